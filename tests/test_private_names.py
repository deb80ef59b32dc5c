"""Private names of Keras and JAX stand in `_compat` alone, and what we put into Keras
can be taken out again.
"""

import ast
import pathlib
import re
import subprocess
import sys

import keras_distribute as kd

PACKAGE = pathlib.Path(kd.__file__).parent
PRIVATE = re.compile(
    r"(keras\.src|jax\._src|jax\.interpreters|from keras import _|jax\.lib)"
)


def test_private_modules_are_named_in_compat_only():
    offenders = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in PACKAGE.rglob("*.py")
        if "_compat" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert offenders == []


def test_uninstall_leaves_keras_as_it_was():
    script = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
import keras.src.callbacks
from keras.optimizers import LossScaleOptimizer, Optimizer
from keras.src.backend.jax import trainer
from keras.src.losses import loss
from keras.src.saving import saving_lib
from keras.src.trainers import data_adapters
try:
    from keras.src.backend.jax.ops import nn
except ImportError:
    from keras.src.backend.jax import nn

_, jax_trainer, base_trainer = keras.Model.__mro__[:3]
owners = [keras.Variable, nn, trainer, jax_trainer, trainer.JAXEpochIterator, loss, loss.Loss, Optimizer,
          LossScaleOptimizer, keras.random.SeedGenerator, base_trainer, keras.layers.BatchNormalization, keras.Layer,
          keras.StatelessScope, keras.callbacks.CallbackList, keras.callbacks, keras.src.callbacks, saving_lib, data_adapters]
class OfTrainer(jax_trainer, keras.Layer):
    pass
class OfModel(keras.Model):
    pass
bases = [c.__bases__ for c in (keras.Model, OfTrainer, OfModel)]
before = [{k: v for k, v in vars(o).items() if callable(v)} for o in owners]
import keras_distribute
from keras_distribute.training import install
during = [{k: v for k, v in vars(o).items() if callable(v)} for o in owners]
assert sum(a != b for a, b in zip(before, during)) > 10, "nothing was installed"
assert [type(m).__mro__.index(keras_distribute.training.trainer.StrategyTrainer) for m in (keras.Model(), OfModel(), OfTrainer())] == [1, 2, 1]
install.uninstall()
assert bases == [c.__bases__ for c in (keras.Model, OfTrainer, OfModel)]
after = [{k: v for k, v in vars(o).items() if callable(v)} for o in owners]
for owner, a, b in zip(owners, before, after):
    assert a == b, (owner, {k for k in a.keys() | b.keys() if a.get(k) is not b.get(k)})
install.install()
with keras_distribute.MirroredStrategy(["cpu:0"]).scope():
    assert type(keras.Variable(1.0)).__name__ == "MirroredVariable"
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_private_attributes_are_looked_up_at_the_import():
    """Each that a module of `_compat` uses is in a `check` or a `replace` there."""
    modules = {
        path.stem: ast.parse(path.read_text())
        for path in (PACKAGE / "_compat").glob("*.py")
    }
    known = {
        argument.value
        for tree in modules.values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _name(call.func) in ("check", "replace")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    assert len(known) > 40
    unknown = {
        f"{module}: {name}"
        for module, tree in modules.items()
        if module not in NOT_OF_KERAS
        for name in _private(tree) - known
    }
    assert unknown <= {*PYTHONS, *NEWER}


# TensorFlow's are looked up when TensorFlow is used, which may not be installed.
NOT_OF_KERAS = ("tensorflow", "seams", "versions")
# Of Python, with another way where it is not there.
PYTHONS = ("checkpoint: _register_atexit",)
# Used where they are there.
NEWER = (
    "optimizer: _exclude_from_weight_decay_pattern",
    "trainer: _get_unbuilt_components",
    "trainer: _maybe_symbolic_build",
)


def _private(tree):
    """The private attributes of others: those that no class or function there makes."""
    own, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            own.add(_name(node.target))
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.ctx, ast.Store) and _name(node.value) == "self"
            (own if of_self else used).add(node.attr)
        elif isinstance(node, ast.Call) and _name(node.func) in ("getattr", "hasattr"):
            used |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    is_private = re.compile(r"_[a-zA-Z]").match
    return {name for name in used - own if isinstance(name, str) and is_private(name)}


def _name(node):
    return getattr(node, "attr", getattr(node, "id", ""))

"""Private names of Keras and JAX stand in `_compat` alone, and what we put into Keras can be taken out again."""

import pathlib
import re
import subprocess
import sys

import keras_distribute as kd

PACKAGE = pathlib.Path(kd.__file__).parent
PRIVATE = re.compile(r"(keras\.src|jax\._src|jax\.interpreters|from keras import _|jax\.lib)")


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
from keras.src.backend import StatelessScope, Variable
from keras.src.backend.jax import nn, trainer
from keras.src.losses import loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.trainer import Trainer

owners = [Variable, nn, trainer, trainer.JAXTrainer, trainer.JAXEpochIterator, loss, BaseOptimizer,
          LossScaleOptimizer, SeedGenerator, Trainer, keras.layers.BatchNormalization, keras.Layer, StatelessScope]
before = [{k: v for k, v in vars(o).items() if callable(v)} for o in owners]
import keras_distribute
from keras_distribute import _install
during = [{k: v for k, v in vars(o).items() if callable(v)} for o in owners]
assert sum(a != b for a, b in zip(before, during)) > 10, "nothing was installed"
_install.uninstall()
after = [{k: v for k, v in vars(o).items() if callable(v)} for o in owners]
for owner, a, b in zip(owners, before, after):
    assert a == b, (owner, {k for k in a.keys() | b.keys() if a.get(k) is not b.get(k)})
_install.install()
with keras_distribute.MirroredStrategy(["cpu:0"]).scope():
    assert type(keras.Variable(1.0)).__name__ == "MirroredVariable"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr

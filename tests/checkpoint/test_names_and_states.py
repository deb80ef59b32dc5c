"""Names that every process agrees on, errors that name what does not fit, and the state
of things that are not Keras.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.checkpoint import Checkpoint, tracking
from keras_distribute.checkpoint.tracking import track
from keras_distribute.cluster import messages
from keras_distribute.cluster.encoding import can_encode, decode, encode
from keras_distribute.errors import (
    BackendError,
    CheckpointError,
    ContextError,
    StructureTypeError,
    VariableScopeError,
)

from .support import bits, build, made, scope, strategy_of


class Block(layers.Layer):
    """Weights without names, and an inner layer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = layers.Dense(3), layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.first, self.second = (
            self.add_weight(shape=(3,)),
            self.add_weight(shape=(3,)),
        )
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return self.drop(self.inner(x)) * self.first + self.second


def nested() -> keras.Model:
    inputs = keras.Input((3,))
    inner = keras.Sequential(
        [keras.Input((3,)), layers.Dense(3), layers.Dense(3, name="chosen_7")]
    )
    model = keras.Model(inputs, layers.Dense(2)(inner(Block()(Block()(inputs)))))
    model.compile(
        keras.optimizers.SGD(momentum=0.9),
        "mse",
        metrics=[keras.metrics.MeanSquaredError()],
    )
    model.optimizer.build(model.trainable_variables)
    return model


EXPECTED = [
    "model/variables/block/variable",
    "model/variables/block/variable#2",
    "model/variables/block/dense/kernel",
    "model/variables/block/dense/bias",
    "model/variables/block/dropout/seed_generator_state",
    "model/variables/block_1/variable",
    "model/variables/block_1/variable#2",
    "model/variables/block_1/dense/kernel",
    "model/variables/block_1/dense/bias",
    "model/variables/block_1/dropout/seed_generator_state",
    "model/variables/sequential/dense/kernel",
    "model/variables/sequential/dense/bias",
    "model/variables/sequential/chosen_7/kernel",
    "model/variables/sequential/chosen_7/bias",
    "model/variables/dense/kernel",
    "model/variables/dense/bias",
    "model/metrics/loss/total",
    "model/metrics/loss/count",
    "model/optimizer/SGD/iteration",
    "model/optimizer/SGD/learning_rate",
    "model/optimizer/SGD/momentum/block/variable",
    "model/optimizer/SGD/momentum/block/variable#2",
    "model/optimizer/SGD/momentum/block/dense/kernel",
]


@pytest.mark.parametrize("place", [0, 2])
def test_names_do_not_depend_on_the_process(place: int) -> None:
    for _ in range(2):
        layers.Dense(2), Block(), keras.random.SeedGenerator(1)  # Counters go on.
        with scope(place):
            names = list(track({"model": nested()}).variables)
        assert names[: len(EXPECTED)] == EXPECTED


def test_a_variable_is_saved_once() -> None:
    model = build()
    names = list(
        track(
            {
                "model": model,
                "optimizer": model.optimizer,
                "seed": model.layers[2].seed_generator,
            }
        ).variables
    )
    assert [n for n in names if n.startswith("optimizer/")] == [
        "optimizer/Adam/iteration",
        "optimizer/Adam/learning_rate",
    ]
    assert not [n for n in names if n.startswith(("model/optimizer/", "seed/"))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> str:
    return Checkpoint(model=made(0)).write(tmp_path_factory.mktemp("saved") / "ckpt")


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"width": 7},
            [
                "of another shape or type: model/variables/dense/kernel: (6, 5) float32 in the checkpoint, (6, 7) float32 here",
                "of another shape or type: model/optimizer/Adam/velocity/dense/bias: (5,) float32 in the checkpoint",
            ],
        ),
        (
            {"head": "top"},
            [
                "missing in the checkpoint: model/variables/top/kernel (4, 3) float32 (sequential",
                "in the checkpoint only: model/variables/head/kernel (4, 3) float32",
            ],
        ),
        (
            {"optimizer": "sgd"},
            [
                "model/optimizer: Adam in the checkpoint, SGD here",
                "missing in the checkpoint: model/optimizer/SGD/momentum/dense/kernel",
                "in the checkpoint only: model/optimizer/Adam/momentum/dense/kernel",
                "partial=True",
            ],
        ),
    ],
)
def test_another_model_or_optimizer(
    options: dict[str, Any], lines: list[str], saved: str
) -> None:
    """An error with every name, and nothing has changed."""
    other = build(**options)
    other.optimizer.build(other.trainable_variables)
    before = bits(model=other)
    with pytest.raises(CheckpointError) as error:
        Checkpoint(model=other).restore(saved)
    assert saved in str(error.value)
    for line in lines:
        assert line in str(error.value)
    after = bits(model=other)
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_partial_takes_what_has_the_same_name(saved: str) -> None:
    other = made(2, head="top", seed=5)
    status = Checkpoint(model=other).restore(saved, partial=True)
    assert "model/variables/top/kernel" in status.missing
    assert "model/variables/head/kernel" in status.unexpected
    assert "model/variables/dense/kernel" in status.restored
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(CheckpointError, match="top/kernel"):
            check()
    with pytest.raises(CheckpointError, match="another shape"):
        Checkpoint(model=build(width=7)).restore(saved, partial=True)


def test_a_model_without_its_optimizer(saved: str) -> None:
    """For inference: the weights alone."""
    other = keras.Sequential(build().layers)
    other.build((None, 6))
    status = Checkpoint(model=other).restore(saved, partial=True)
    assert status.missing == ()
    assert all(
        name.startswith(("model/optimizer/", "model/metrics/"))
        for name in status.unexpected
    )


STATES = [
    None,
    {
        "a": 1,
        2: "b",
        (3, "c"): [True, None, 1e300, float("inf"), -0.0],
        b"k": b"\x00\xff",
    },
    (1, (2, [3]), {}),
    {"position": {"bytes": 7, "tuple": [1]}, "ints": 2**80},
    np.random.default_rng(0).bit_generator.state,
    np.random.RandomState(1).get_state(),
    np.float32(1.5),
    np.arange(6.0).reshape(2, 3)[:, ::2],
    np.array(["x", "yz"]),
    np.array(7),
    np.zeros((0, 2), "int16"),
    np.array(["2026-01-01"], "datetime64[D]"),
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_states_come_back_with_their_types(state: Any, tmp_path: Any) -> None:
    class Thing:
        def get_state(self) -> Any:
            return state

        def set_state(self, restored: Any) -> None:
            self.restored = restored

    path = Checkpoint(thing=Thing()).write(tmp_path / "ckpt")
    other = Thing()
    Checkpoint(thing=other).restore(path)
    assert_same(other.restored, state)
    arrays: dict[str, Any] = {}
    assert_same(decode(encode(state, "state", arrays), arrays), state)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_come_back(impl: str, tmp_path: Any) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    state: dict[str, Any] = {"keys": keys, "one": keys[0]}
    assert can_encode(state)
    path = Checkpoint(state=state).write(tmp_path / "ckpt")
    state.clear()
    Checkpoint(state=state).restore(path)
    assert state["keys"].dtype == keys.dtype
    assert jnp.array_equal(
        jax.random.key_data(state["keys"]), jax.random.key_data(keys)
    )
    assert jax.random.bits(state["one"]) == jax.random.bits(keys[0])
    for signed in (True, False):
        said = messages.from_bytes(
            messages.to_bytes(keys, signed=signed), signed=signed
        )
        assert (said == keys).all()


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_same(ours, theirs)
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert np.array_equal(actual, expected)
    else:
        assert repr(actual) == repr(expected)


def test_dictionaries_are_restored_in_place_and_saved_as_they_were(
    tmp_path: Any,
) -> None:
    history = {"loss": [1.0, 0.5]}
    progress: dict[str, Any] = {"epoch": 2, "history": history, "rng": np.ones(3)}
    path = Checkpoint(progress=progress).write(tmp_path / "ckpt")
    history["loss"].append(0.1)
    progress["rng"][:] = 9
    progress["new"] = 1
    Checkpoint(progress=progress).restore(path)
    assert list(progress) == ["epoch", "history", "rng"]
    assert progress["history"] == {"loss": [1.0, 0.5]}
    assert progress["rng"].tolist() == [1, 1, 1]


def test_what_refuses_its_state_leaves_variables_alone(tmp_path: Any) -> None:
    class Picky:
        def get_state(self) -> int:
            return 1

        def set_state(self, state: int) -> None:
            raise ValueError("of another dataset")

    variable, progress = keras.Variable(1.0), {"step": 1}
    checkpoint = Checkpoint(v=variable, progress=progress, picky=Picky())
    path = checkpoint.write(tmp_path / "ckpt")
    variable.assign(2.0)
    progress["step"] = 2
    with pytest.raises(ValueError, match="of another dataset"):
        checkpoint.restore(path)
    assert float(variable.value) == 2.0 and progress == {"step": 2}


def test_what_cannot_be_kept() -> None:
    with pytest.raises(
        StructureTypeError, match=re.escape("epoch_state = {'value': ...}")
    ):
        Checkpoint(epoch=3)
    with pytest.raises(StructureTypeError, match="Two objects have the name 'root'"):
        Checkpoint({"step": 1}, root={"step": 2})
    fields = np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")])
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    for value in (object(), {1, 2}, np.array([object()]), fields, fields[0], masked):
        assert not can_encode(value)
        with pytest.raises(CheckpointError, match="'progress/x' is of a type"):
            Checkpoint(progress={"x": value})._snapshot()


def test_a_state_in_itself_cannot_be_kept() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(2000):
        deep = {"a": [deep]}
    for state in (endless, deep):
        with pytest.raises(
            CheckpointError, match="(?s)'progress' contains itself.*Fix"
        ):
            Checkpoint(progress={"x": state})._snapshot()


def test_a_model_that_is_not_built(saved: str) -> None:
    for call in (
        Checkpoint(model=keras.Sequential())._snapshot,
        lambda: Checkpoint(model=keras.Sequential()).restore(saved),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"(?s)'model' is not built.*model.build\(input_shape\)",
        ):
            call()


def test_an_old_orbax_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.11.39")
    checkpoint = Checkpoint(v=keras.Variable(1.0))
    with pytest.raises(
        BackendError,
        match=r"(?s)Orbax 0.12 or newer.*orbax-checkpoint 0.11.39.*"
        "pip install 'orbax-checkpoint>=0.12'",
    ):
        checkpoint.save(tmp_path / "a")


def test_orbax_is_needed_only_to_save_and_restore() -> None:
    script = """
import sys
sys.modules["orbax"] = None
import keras
from keras_distribute.checkpoint import Checkpoint, CheckpointManager
from keras_distribute.errors import BackendError
checkpoint = Checkpoint(v=keras.Variable(1.0))
for call in (lambda: checkpoint.save("x"), lambda: checkpoint.restore("x"), lambda: CheckpointManager(checkpoint, "x")):
    try:
        call()
    except BackendError as error:
        assert "pip install 'orbax-checkpoint>=" in str(error), error
    else:
        raise AssertionError
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_wrong_contexts(tmp_path: Any) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        variable = keras.Variable(1.0)
    checkpoint = Checkpoint(v=variable)
    path = checkpoint.write(tmp_path / "ckpt")
    with pytest.raises(ContextError, match="inside a replica"):
        strategy.run(lambda: checkpoint.write(tmp_path / "other"))
    with pytest.raises(ContextError, match="inside a replica"):
        strategy.run(lambda: checkpoint.restore(path))
    with (
        strategy_of(4).scope(),
        pytest.raises(VariableScopeError, match="another strategy"),
    ):
        checkpoint.restore(path)


def test_a_variable_without_a_value(tmp_path: Any) -> None:
    """In a `fit` that holds it, or after its memory was given away."""
    variable = keras.Variable(1.0)
    variable.value.delete()
    with pytest.raises(CheckpointError, match=r"1 variable\(s\) have no value: v\."):
        Checkpoint(v=variable).write(tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()

    class Saving(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            Checkpoint(optimizer=model.optimizer).write(tmp_path / "ckpt")

    model = made(2)
    model.fit(np.ones((4, 6)), np.ones(4), verbose=0, callbacks=[NoSync(Saving())])
    iterations = model.optimizer.iterations
    assert int(iterations) == 1
    iterations.assign(0)
    Checkpoint(optimizer=model.optimizer).restore(tmp_path / "ckpt")
    assert int(iterations) == 1


class NoSync(keras.callbacks.Callback):
    """Keras gives values back to a callback that asks for `self.model`; not to this."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.on_train_batch_end = inner.on_train_batch_end


def test_a_variable_whose_memory_was_given_away_is_restored(tmp_path: Any) -> None:
    """After a step that failed, the buffers that it was given are gone."""
    with strategy_of(2).scope():
        mirrored = keras.Variable(1.0)
        own = keras.Variable(
            2.0, synchronization="on_read", aggregation="sum", trainable=False
        )
    plain = keras.Variable(3.0)
    checkpoint = Checkpoint(mirrored=mirrored, own=own, plain=plain)
    path = checkpoint.write(tmp_path / "ckpt")
    for variable in (mirrored, own, plain):
        variable._value.delete()
    checkpoint.restore(path)
    assert [float(v.value) for v in (mirrored, own, plain)] == [1.0, 2.0, 3.0]


def test_a_name_that_looks_like_a_counted_one_is_another(tmp_path: Any) -> None:
    layer = layers.Layer()
    for i, name in enumerate(["w", "w", "w#2"]):
        layer.add_weight(name=name, shape=(), initializer="zeros").assign(float(i + 1))
    layer.built = True
    path = Checkpoint(layer=layer).write(tmp_path / "c")
    for variable in layer.weights:
        variable.assign(0.0)
    assert len(Checkpoint(layer=layer).restore(path).restored) == 3
    assert [float(variable.value) for variable in layer.weights] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("place", [0, 2])
def test_a_dtype_that_jax_has_smaller(place: int, tmp_path: Any) -> None:
    """Of `keras.config.set_floatx("float64")`, where JAX has no x64."""
    with scope(place):
        saved = keras.Variable(np.arange(3), dtype="float64")
        count = keras.Variable(7, dtype="int64", trainable=False)
    path = Checkpoint(saved=saved, count=count).write(tmp_path / "c")
    saved.assign(np.zeros(3))
    count.assign(0)
    Checkpoint(saved=saved, count=count).restore(path)
    assert np.asarray(saved.value).tolist() == [0.0, 1.0, 2.0]
    assert int(count.value) == 7


def binned(numbers: Any) -> Any:
    """A model that says which bin its input is in."""
    bins = layers.Discretization(num_bins=3)
    bins.adapt(np.array(numbers))
    model = keras.Sequential([keras.Input((1,)), bins, layers.Dense(1)])
    model.layers[1].set_weights([np.ones((1, 1)), np.zeros(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("place", [0, 2])
def test_what_adapt_has_found_out_is_restored(place: int, tmp_path: Any) -> None:
    """Also where a step was compiled that has another as a constant."""
    x = np.array([[0.0], [5.0], [50.0], [500.0]])
    with scope(place):
        saved, other = (
            binned([1.0, 2.0, 3.0, 4.0]),
            binned([100.0, 200.0, 300.0, 400.0]),
        )
        same, late = binned([1.0, 2.0, 3.0, 4.0]), binned([7.0, 8.0, 9.0])
    path = Checkpoint(model=saved).write(tmp_path / "c")
    status = Checkpoint(model=other).restore(path).assert_consumed()
    assert "model/adapted/discretization" in status.restored
    expected = saved.predict(x, verbose=0)
    assert np.array_equal(other.predict(x, verbose=0), expected)
    assert same.predict(x, verbose=0).shape == late.predict(x, verbose=0).shape
    Checkpoint(model=same).restore(path)
    Checkpoint(model=late).restore(path)
    assert np.array_equal(late.predict(x, verbose=0), expected)


class RestoreOther(keras.callbacks.Callback):
    """Restores a checkpoint after the first epoch."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self._where = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            Checkpoint(model=self.model).restore(self._where, partial=True)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("followed", [False, True])
def test_steps_go_by_the_statistics_that_were_restored(
    place: int, followed: bool, tmp_path: Any
) -> None:
    """Those of a `Normalization`, which compiled steps have as constants."""
    x = np.random.default_rng(0).normal(3, 5, (20, 2)).astype("float32")

    def model_of(data: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        with scope(place):
            normalization = layers.Normalization()
            normalization.adapt(data)
            model = keras.Sequential(
                [keras.Input((2,)), normalization, layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        return model

    model, other = model_of(x), model_of(30 * x + 7)
    path = Checkpoint(model=model).write(tmp_path / "c")
    other.predict(x, verbose=0)
    other.evaluate(x, x[:, :1], verbose=0)
    callbacks: list[Any] = [RestoreOther(path)]
    if followed:
        callbacks.append(kd.callbacks.BackupAndRestore(tmp_path / "b", save_freq=1))
    other.fit(x, x[:, :1], batch_size=20, epochs=2, verbose=0, callbacks=callbacks)
    loss = model.evaluate(x, x[:, :1], verbose=0)
    assert other.history.history["loss"][1] == pytest.approx(loss, rel=1e-5)
    Checkpoint(model=other).restore(path, partial=True)
    expected = model.predict(x, verbose=0)
    assert np.array_equal(other.predict(x, verbose=0), expected)
    assert other.evaluate(x, x[:, :1], verbose=0) == pytest.approx(loss, rel=1e-5)


def test_a_checkpoint_of_version_0_1_has_nothing_of_adapt(
    tmp_path: Any, monkeypatch: Any
) -> None:
    x = np.array([[0.0], [5.0]])
    saved, other = binned([1.0, 2.0, 3.0]), binned([4.0, 5.0, 6.0])
    with monkeypatch.context() as before:
        before.setattr(tracking, "adapted_in", lambda *_: {})
        path = Checkpoint(model=saved).write(tmp_path / "c")
    expected = other.predict(x, verbose=0)
    with pytest.warns(UserWarning, match="not say to which.*model/adapted/discretiz"):
        status = Checkpoint(model=other).restore(path)
    assert status.missing == ("model/adapted/discretization",)
    assert np.array_equal(other.predict(x, verbose=0), expected)
    Checkpoint(model=other).restore(path, partial=True)


@pytest.mark.parametrize(
    ("make", "data", "other"),
    [
        (layers.StringLookup, ["b", "a", "b"], ["c"]),
        (lambda: layers.IntegerLookup(output_mode="count"), [5, 6, 6], [7, 8]),
        (lambda: layers.StringLookup(output_mode="tf_idf"), ["b", "a"], ["c", "d"]),
        (layers.TextVectorization, ["a b", "b c"], ["d"]),
    ],
)
def test_a_vocabulary_is_restored(
    make: Any, data: Any, other: Any, tmp_path: Any
) -> None:
    pytest.importorskip("tensorflow")
    lookup, later = make(), make()
    lookup.adapt(np.array(data))
    later.adapt(np.array(other))
    expected, _ = np.asarray(lookup(np.array(data))), later(np.array(other))
    path = Checkpoint(lookup=lookup).write(tmp_path / "c")
    Checkpoint(lookup=later).restore(path)
    assert later.get_vocabulary() == lookup.get_vocabulary()
    assert np.array_equal(np.asarray(later(np.array(data))), expected)

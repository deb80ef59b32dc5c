"""A training step sums the gradients of the replicas' own rows, where the model allows;
and what a step costs outside.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.training.steps import compiled_step
from keras_distribute.training.steps.plan import plan_of
from tests.support import mirrored, pack_from

pytestmark = pytest.mark.timeout(200)
RNG = np.random.RandomState(0)
X, Y = RNG.randn(24, 12).astype("float32"), RNG.randint(0, 3, 24)


class Own(layers.Layer):
    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x - keras.ops.mean(x, 0) / 2)


INSIDE = {
    "dense": lambda: layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
    "batch normalization": layers.BatchNormalization,
    "dropout": lambda: layers.Dropout(0.3),
    "a layer of one's own": Own,
}


def built(replicas: int, inside: str = "dense", **more: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with mirrored(replicas).scope():
        model = keras.Sequential(
            [keras.Input((12,)), layers.Dense(16), INSIDE[inside](), layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss, **more)
    return model


def programs_of(model: keras.Model, monkeypatch: Any) -> str:
    """The text of the program that `fit` runs."""
    texts: list[str] = []
    original = compiled_step.CompiledStep._one

    def one(self: Any, holder: Any, placed: Any) -> Any:
        texts.append(self.executable(placed).lowered.as_text())
        texts.append(self.executable(placed).compile().as_text())
        return original(self, holder, placed)

    with monkeypatch.context() as patch:
        patch.setattr(compiled_step.CompiledStep, "_one", one)
        model.fit(X, Y, batch_size=len(X), verbose=0)
    return "\n".join(texts)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_gradients_are_summed_in_the_shape_of_their_weights(
    replicas: int, monkeypatch: Any
) -> None:
    pack_from(monkeypatch, None)
    text = programs_of(built(replicas), monkeypatch)
    reduced = re.findall(r"= \((.*)\) all-reduce(?:-start)?\(", text) + re.findall(
        r"= (f32\S*) all-reduce\(", text
    )
    shapes = re.findall(r"f32\[([\d,]*)\]", " ".join(reduced))
    assert {"12,16", "16,16", "16,3"} <= {shape.removeprefix("1,") for shape in shapes}
    assert not {"16,12", "3,16"} & {shape.removeprefix("1,") for shape in shapes}
    assert (
        "xla.sdy.manual_computation" in text
        or "sdy.manual_computation" in text
        or "shard_map" in text
    )


def scaling() -> Any:
    inner = keras.optimizers.SGD(0.1)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


class OwnStep(keras.Sequential):
    """A training step of the user's own."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(weights: Any) -> Any:
            outputs, new = self.stateless_call(weights, others, x, training=True)
            return self.loss(y, outputs, sample_weight=weight), new

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"loss": loss}, (weights, others, slots, metrics)


KINDS = {
    **{name: lambda n, name=name: built(n, name) for name in INSIDE},
    "mixed precision": lambda n: lowered(n, "mixed_bfloat16"),
    "a scaled loss": lambda n: lowered(n, "mixed_float16", scaling),
    "a step of one's own": lambda n: lowered(n, "float32", kind=OwnStep),
}


def lowered(
    replicas: int,
    policy: str,
    optimizer: Any = keras.optimizers.Adam,
    kind: Any = keras.Sequential,
) -> keras.Model:
    keras.utils.set_random_seed(1)
    with mirrored(replicas).scope():
        model = kind(
            [
                keras.Input((12,)),
                layers.Dense(16, dtype=policy),
                layers.Dropout(0.2, dtype=policy),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_all_models_have_it(kind: str, monkeypatch: Any) -> None:
    """Each kernel's gradient is one sum, in a program of one replica's rows."""
    model = KINDS[kind](4)
    programs_of(model, monkeypatch)
    strategy = mirrored(4)
    assert plan_of(model, strategy).mixed == ""
    assert not plan_of(model, kd.MirroredStrategy(["cpu:0"])).is_local


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "batch normalization"])
def test_their_numbers_are_those_of_one_replica(kind: str, replicas: int) -> None:
    found = []
    for count in (1, replicas):
        model = KINDS[kind](count)
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        found.append([*history.history.values(), *(v.numpy() for v in model.variables)])
    wide = kind in ("mixed precision", "a scaled loss")
    for expected, actual in zip(*found, strict=True):
        np.testing.assert_allclose(
            actual, expected, rtol=2e-2 if wide else 2e-5, atol=2e-3 if wide else 1e-5
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [24, 21])
def test_the_numbers_of_one_replica(rows: int) -> None:
    """With rows that divide, and with a last batch that does not."""
    found = []
    for replicas in (1, 2, 4):
        model = built(replicas, metrics=["accuracy"])
        weight = np.linspace(0.0, 2.0, rows)
        history = model.fit(
            X[:rows], Y[:rows], sample_weight=weight, batch_size=8, epochs=2, verbose=0
        ).history
        found.append([*history.values(), *(v.numpy() for v in model.variables)])
    for other in found[1:]:
        for expected, actual in zip(found[0], other, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


# What a step costs outside of its program.
# ---------------------------------------------------------------------------


class Steps(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, float(logs["loss"])))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(sorted(logs))


def test_logs_go_only_to_callbacks_that_want_them(monkeypatch: Any) -> None:
    from keras.src.callbacks.callback_list import CallbackList

    handed: list[str] = []
    original = CallbackList._async_dispatch
    monkeypatch.setattr(
        CallbackList,
        "_async_dispatch",
        lambda self, fn, *args: (handed.append(fn.__name__), original(self, fn, *args)),
    )
    model = built(2)
    model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y))
    model.predict(X, batch_size=8, verbose=0)
    assert handed == []
    steps = Steps()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[steps])
    assert [batch for batch, _ in steps.seen] == [0, 1, 2]
    model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[steps])
    assert steps.seen[3:] == [0, 1, 2]
    model.predict(X, batch_size=8, verbose=0, callbacks=[steps])
    assert steps.seen[6:] == [["outputs"]] * 3


def test_the_progress_bar_is_served(capsys: Any) -> None:
    built(2).fit(X, Y, batch_size=8, verbose=1)
    assert "3/3" in capsys.readouterr().out


def test_a_callback_given_its_method_afterwards_is_called() -> None:
    callback, seen = keras.callbacks.Callback(), []
    callback.on_train_batch_end = lambda batch, logs=None: seen.append(batch)
    built(2).fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert seen == [0, 1, 2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dtype", ["float64", "int64", "float16", "bool", ">f4", "uint8"]
)
@pytest.mark.parametrize("replicas", [1, 4])
def test_pieces_arrive_as_jax_would_put_them(dtype: str, replicas: int) -> None:
    mesh = mirrored(replicas).replica_mesh
    rows = (RNG.rand(8, 3) * 5).astype(dtype)
    placed = mesh.put_split(rows)
    expected = jax.device_put(rows.astype(rows.dtype.newbyteorder("=")), mesh.split)
    assert (placed.dtype, placed.shape, placed.sharding) == (
        expected.dtype,
        expected.shape,
        expected.sharding,
    )
    np.testing.assert_array_equal(placed, expected)
    assert [shard.device for shard in placed.addressable_shards] == list(mesh.devices)


def test_arrays_at_hand_are_read_in_the_callers_thread(monkeypatch: Any) -> None:
    import threading

    from keras_distribute.training import batches

    threads: list[str] = []
    original = batches.place

    def place(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args, **options)

    monkeypatch.setattr(batches, "place", place)
    monkeypatch.setattr(kd.config._chosen, "prefetch_steps", None)
    model = built(2)

    def readers(shuffle: bool) -> set[str]:
        threads.clear()
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=shuffle)
        return {name for name in threads if "input" in name}

    assert readers(shuffle=False) == set()
    assert readers(shuffle=True)
    monkeypatch.setattr(kd.config._chosen, "prefetch_steps", 3)
    assert readers(shuffle=False)


# Fewer bytes.
# --------------------------------------------------------------------------------------------------------


def linear(replicas: int, dtype: str | None, **options: Any) -> keras.Model:
    strategy = kd.MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas)], communication_dtype=dtype
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((12,)),
                layers.Dense(1, kernel_initializer="zeros", use_bias=False),
            ]
        )
        model.compile(keras.optimizers.SGD(1.0, **options), "mse")
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_travel_in_the_chosen_dtype(steps: int, monkeypatch: Any) -> None:
    accumulating = {"gradient_accumulation_steps": steps} if steps > 1 else {}
    model = linear(4, "bfloat16", **accumulating)
    text = programs_of(model, monkeypatch)
    assert re.search(r"all_reduce.*?tensor<12x1xbf16>", text, re.DOTALL)
    assert model.weights[0].dtype == "float32"
    plain = programs_of(linear(4, None, **accumulating), monkeypatch)
    assert "bf16" not in plain


def test_the_sum_is_of_rounded_gradients() -> None:
    y = RNG.randn(24).astype("float32")
    exact, rounded = linear(2, None), linear(2, "bfloat16")
    for model in (exact, rounded):
        model.fit(X, y, batch_size=24, verbose=0)
    apart = (
        np.abs(exact.weights[0].numpy() - rounded.weights[0].numpy()).max()
        / np.abs(exact.weights[0].numpy()).max()
    )
    assert apart < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_run_as_well(dtype: str) -> None:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], communication_dtype=dtype)
    with strategy.scope():
        weight = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
    third = np.float32(1 / 3)

    def step() -> None:
        optimizer.apply([jax.numpy.full(2, third)], [weight])

    strategy.run(step)
    sent = jax.numpy.asarray(third, dtype)
    np.testing.assert_array_equal(
        weight.numpy(), -np.asarray(sent + sent, "float32").repeat(2)
    )
    assert weight.numpy()[0] != -2 * third


@pytest.mark.parametrize("dtype", ["float32", "int8", 16])
def test_only_narrower_floats(dtype: Any) -> None:
    with pytest.raises(
        kd.errors.StructureTypeError,
        match=r'(?s)communication_dtype.*Received.*"bfloat16", "float16"',
    ):
        kd.MirroredStrategy(["cpu:0"], communication_dtype=dtype)

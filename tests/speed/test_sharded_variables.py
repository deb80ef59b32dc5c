"""Weights that are divided over the replicas: the numbers of one device, an n-th of the
memory, and what the programs communicate.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import shutil
import warnings
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd
from keras_distribute.devices.launches import Executable
from keras_distribute.run import whole_variables
from tests.support import OnFirstDevice, distributed, mirrored

LENGTH, VOCABULARY, WIDTH = 8, 64, 32
TAIL = 21  # As many rows end in a batch of 5, which is a program more.
SMALL = {"shard_variables": True, "min_shard_bytes": 32}


def decoder(dropout: float = 0.0, blocks: int = 1) -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, WIDTH)(ids)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(hidden)
        # Without biases: of that of the keys the gradient is zero, and its rounding is
        # what an optimizer would divide by itself.
        attention = layers.MultiHeadAttention(4, 8, use_bias=False)
        attended = attention(normed, normed, use_causal_mask=True)
        hidden = layers.Add()([hidden, attended])
        wide = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(hidden))
        narrow = layers.Dense(WIDTH)(wide)
        if dropout:
            narrow = layers.Dropout(dropout)(narrow)
        hidden = layers.Add()([hidden, narrow])
    return keras.Model(ids, layers.Dense(VOCABULARY)(hidden))


def tokens(rows: int = TAIL) -> tuple[Any, Any]:
    found = np.random.default_rng(0).integers(0, VOCABULARY, (rows, LENGTH + 1))
    return found[:, :-1], found[:, 1:]


def trained(
    strategy: Any, build: Any, optimizer: Any, epochs: int = 2, rows: int = 24
) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    x, y = tokens(rows)
    logs = model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0
    ).history
    return model, logs


@functools.cache
def of_one_device(build: Any, optimizer: Any, rows: int) -> Any:
    model, logs = trained(kd.get_strategy(), build, optimizer, rows=rows)
    return logs, model.get_weights(), used(model, rows)


def used(model: keras.Model, rows: int) -> list[Any]:
    x, y = tokens(rows)
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
    return [evaluated, model.predict(x, batch_size=8, verbose=0)]


def assert_like_one_device(
    strategy: Any, build: Any, optimizer: Any, tolerance: float = 2e-5, rows: int = 24
) -> keras.Model:
    logs, weights, expected = of_one_device(build, optimizer, rows)
    model, own = trained(strategy, build, optimizer, rows=rows)
    np.testing.assert_allclose(own["loss"], logs["loss"], rtol=tolerance)
    np.testing.assert_allclose(own["accuracy"], logs["accuracy"], rtol=1e-6)
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    for a, b in zip(used(model, rows), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=10 * tolerance)
    return model


def adam() -> Any:
    return keras.optimizers.Adam(1e-3)


def divided(variables: Any) -> list[Any]:
    return [v for v in variables if not v.value.sharding.is_fully_replicated]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_weights_and_slots_are_divided_and_numbers_those_of_one_device(replicas):
    model = assert_like_one_device(
        mirrored(replicas, **SMALL), decoder, adam, rows=TAIL
    )
    if replicas == 1:
        assert not divided(model.variables)
        return
    for variable in divided([*model.variables, *model.optimizer.variables]):
        part = variable.value.sharding.shard_shape(variable.shape)
        assert np.prod(part) * replicas == np.prod(variable.shape)
    kernels = [v for v in model.trainable_variables if np.prod(v.shape) >= 1024]
    assert kernels and len(divided(kernels)) == len(kernels)
    slots = [v for v in model.optimizer.variables if np.prod(v.shape) >= 1024]
    assert len(slots) == 2 * len(kernels) and len(divided(slots)) == len(slots)


def accumulating() -> Any:
    return keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "global norm": lambda: keras.optimizers.AdamW(1e-3, global_clipnorm=0.3),
    "clipped": lambda: keras.optimizers.Adam(1e-3, clipnorm=0.1),
    "average": lambda: keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.9),
    "accumulating": accumulating,
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "lamb": lambda: keras.optimizers.Lamb(1e-3),
    "muon": lambda: keras.optimizers.Muon(1e-3),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "nadam": lambda: keras.optimizers.Nadam(1e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(1e-3),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    tolerance = 2e-5
    strategy = mirrored(4, **SMALL)
    assert_like_one_device(strategy, decoder, OPTIMIZERS[name], tolerance)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_with_tails(name):
    """Of each weight, the distance beside its length."""
    seven = {"epochs": 7, "rows": TAIL}
    expected, _ = trained(kd.get_strategy(), decoder, OPTIMIZERS[name], **seven)
    model, _ = trained(mirrored(8, **SMALL), decoder, OPTIMIZERS[name], **seven)
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def penalized() -> keras.Model:
    """Penalties and constraints of every kind, in a nested model, too."""
    inner = keras.Sequential(
        [
            layers.LSTM(WIDTH, return_sequences=True, recurrent_regularizer="l2"),
            layers.Dense(WIDTH, kernel_regularizer="orthogonal_regularizer"),
        ]
    )
    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, WIDTH, embeddings_regularizer="l2")(ids)
    hidden = layers.Dense(
        WIDTH,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2),
        bias_regularizer="l1",
        kernel_constraint=keras.constraints.MaxNorm(1.0),
    )(inner(hidden))
    dense = layers.Dense(
        VOCABULARY,
        activity_regularizer="l2",
        kernel_constraint=keras.constraints.UnitNorm(),
    )
    return keras.Model(ids, dense(hidden))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [SMALL, {"deterministic": True}, {}], ids=str)
def test_penalties_count_once_and_constraints_hold(options):
    strategy = mirrored(4, **options)
    assert_like_one_device(strategy, penalized, lambda: keras.optimizers.SGD(0.1))


def test_random_layers_draw_what_one_device_draws():
    def build() -> keras.Model:
        return decoder(dropout=0.3)

    strategy = mirrored(4, **SMALL)
    assert_like_one_device(strategy, build, lambda: keras.optimizers.Adam(1e-3))


class ReadsLosses(layers.Layer):
    """Adds to its outputs what the model's penalties are until then."""

    def __init__(self, dense: Any) -> None:
        super().__init__()
        self.dense = dense

    def call(self, x: Any) -> Any:
        return self.dense(x) + sum(self.dense.losses)


def test_a_layer_may_read_penalties_of_divided_weights():
    def build() -> keras.Model:
        ids = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.Embedding(VOCABULARY, 32)(ids)
        hidden = ReadsLosses(layers.Dense(32, kernel_regularizer="l2"))(hidden)
        return keras.Model(ids, layers.Dense(VOCABULARY)(hidden))

    assert_like_one_device(mirrored(4, **SMALL), build, keras.optimizers.SGD)


def running(weight: Any, inputs: Any) -> Any:
    """Each row gets what is left of those before it, the first one a weight."""
    return ops.scan(lambda left, row: (left / 2 + row, left), weight, inputs)[1]


def running_again(weight: Any, inputs: Any) -> Any:
    return jax.checkpoint(running)(weight, inputs)


def solved(weight: Any, inputs: Any) -> Any:
    """By an operation of JAX that holds several programs."""

    def solution(row: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(
            lambda v: 2 * v + weight * ops.sum(weight * v), row, maxiter=3
        )[0]

    return jax.vmap(solution)(inputs)


class Through(layers.Layer):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def build(self, input_shape: Any) -> None:
        self.start = self.add_weight(shape=input_shape[-1:])

    def call(self, inputs: Any) -> Any:
        return self.function(ops.convert_to_tensor(self.start), inputs)


@pytest.mark.parametrize("function", [running, running_again, solved])
def test_loops_that_need_the_rows_of_all_replicas(function: Any) -> None:
    def weights(strategy: kd.Strategy) -> list[Any]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((8,)), Through(function), layers.Dense(4), layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        return model.get_weights()

    expected = weights(kd.get_strategy())
    for ours, theirs in zip(weights(mirrored(4, **SMALL)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_own_step_gathers_what_its_layers_read():
    class Own(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            trained, others, slots, metrics = state
            x, y = data
            step = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
            arguments = trained, others, metrics, x, y, None
            (loss, aux), grads = step(
                *arguments, training=True, optimizer_variables=slots
            )
            _, predictions, others, metrics = aux
            trained, slots = self.optimizer.stateless_apply(slots, grads, trained)
            logs, metrics = self._update_metrics_variables(
                metrics, loss, x, y, predictions, None
            )
            return logs, (trained, others, slots, metrics)

    def build() -> keras.Model:
        plain = decoder()
        return Own(plain.inputs, plain.outputs)

    strategy = mirrored(4, **SMALL)
    assert_like_one_device(strategy, build, lambda: keras.optimizers.Adam(1e-3))


def test_frozen_weights_are_divided_and_adapters_train():
    def build() -> keras.Model:
        model = decoder()
        for layer in model.layers:
            if isinstance(layer, layers.Dense | layers.Embedding):
                layer.enable_lora(4)
            else:
                layer.trainable = False
        return model

    model = assert_like_one_device(
        mirrored(4, **SMALL), build, lambda: keras.optimizers.Adam(1e-2)
    )
    frozen = [v for v in model.non_trainable_variables if np.prod(v.shape) >= 1024]
    assert frozen and len(divided(frozen)) == len(frozen)


def test_a_quantized_base_is_divided():
    def build() -> keras.Model:
        model = decoder()
        for layer in model.layers:
            if isinstance(layer, layers.Dense):
                layer.quantize("int8")
                layer.enable_lora(4)
        return model

    model = assert_like_one_device(
        mirrored(4, **SMALL), build, lambda: keras.optimizers.Adam(1e-3), 1e-4, TAIL
    )
    base = [v for v in model.variables if v.dtype == "int8"]
    assert base and len(divided(base)) == len(base)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("options", [SMALL, {}], ids=["divided", "whole"])
def test_scales_of_float8_are_those_of_all_rows(options, steps):
    """Their gradient is their new value, which no replica's rows alone give."""
    x = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")

    def scales(strategy: Any) -> list[Any]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            dense = [layers.Dense(32, "relu"), layers.Dense(2)]
            model = keras.Sequential([keras.Input((16,)), *dense])
            model.quantize("float8")
            rule = keras.optimizers.SGD(0.01, gradient_accumulation_steps=steps)
            model.compile(rule, "mse")
        model.fit(x, x[:, :2], batch_size=8, epochs=2, shuffle=False, verbose=0)
        kept = [v for v in model.weights if "scale" in v.path or "amax" in v.path]
        return [np.asarray(v) for v in kept]

    found = scales(mirrored(4, **options))
    assert len(found) == 12
    for a, b in zip(found, scales(kd.get_strategy()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


def narrow(kind: str) -> keras.Model:
    """A model of a large table, and of kernels that are large beside a small batch."""
    ids = keras.Input((4,), dtype="int32")
    kinds = {"tied": layers.ReversibleEmbedding}
    # Of as many tokens four replicas divide the rows; of 502 the columns.
    table = kinds.get(kind, layers.Embedding)(502 if kind == "columns" else 500, 64)
    hidden = layers.Dense(64)(layers.Dense(256, "gelu")(table(ids)))
    tied = kind == "tied"
    out = table(hidden, reverse=True) if tied else layers.Dense(500)(hidden)
    model = keras.Model(ids, out)
    for layer in model.layers:
        if kind == "int8" and hasattr(layer, "embeddings"):
            layer.quantize("int8")
        if kind in ("LoRA", "int8") and hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"num_logical_devices": 2}], ids=repr)
@pytest.mark.parametrize("kind", ["rows", "columns", "tied", "LoRA", "int8"])
def test_few_rows_travel_in_place_of_tables(kind, options, monkeypatch):
    x, y = np.random.default_rng(0).integers(0, 500, (2, 24, 4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = []
    compiled = programs(monkeypatch)
    devices = 4 * options.get("num_logical_devices", 1)
    for strategy in (kd.get_strategy(), mirrored(devices, **SMALL, **options)):
        keras.utils.set_random_seed(3)
        compiled.clear()
        with strategy.scope():
            model = narrow(kind)
            model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    text = compiled[0].as_text()
    results = [line.partition(" all-gather(") for line in text.splitlines()]
    gathered = [shape for shape, name, _ in results if name]
    assert gathered
    # A table that is a matrix, too, is gathered for that: 32 rows of 500 are many. With
    # LoRA Keras looks up in the sum of a table and of what the adapters add.
    if not options and kind not in ("tied", "LoRA"):
        assert not [s for s in gathered if "[500,64]" in s or "[502,64]" in s]


def test_rematerialized_blocks():
    def build() -> keras.Model:
        with keras.RematScope(mode="full"):
            return wide(2)

    assert_like_one_device(
        mirrored(4, **SMALL), build, lambda: keras.optimizers.Adam(1e-3)
    )


def test_several_steps_in_one_dispatch():
    x, y = tokens()
    found = []
    for strategy in (kd.get_strategy(), mirrored(4, **SMALL)):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = decoder()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, steps_per_execution=2)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def loops_of(strategy: Any, optimizer: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = decoder()
        model.optimizer = None
        rule = optimizer()
        rule.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = tokens()

    def step(x: Any, y: Any) -> Any:
        def of_rows() -> Any:
            return loss(y, model(x, training=True))

        value, grads = kd.value_and_grad(of_rows, model.trainable_variables)()
        rule.apply(grads, model.trainable_variables)
        return value

    replicas = strategy.num_replicas_in_sync
    rows = [distributed(strategy, np.split(each[:16], replicas)) for each in (x, y)]
    for _ in range(2):
        strategy.run(step, args=tuple(rows))
    return [np.asarray(v) for v in model.trainable_variables], divided(
        [*model.variables, *rule.variables]
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["sgd", "accumulating", "global norm"])
def test_a_loop_sees_whole_weights(name):
    expected, _ = loops_of(mirrored(1), OPTIMIZERS[name])
    found, parts = loops_of(mirrored(4, **SMALL), OPTIMIZERS[name])
    assert parts
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def programs(monkeypatch: Any, lowered: bool = False) -> list[Any]:
    """What is compiled from now on; or the programs before XLA has seen them."""
    found: list[Any] = []
    compile_one = Executable.compile

    def noting(executable: Executable) -> Any:
        before = executable.lowered
        program = compile_one(executable)
        found.append(before if lowered else program)
        return program

    monkeypatch.setattr(Executable, "compile", noting)
    return found


def assert_gathered_in_turn(text: str, blocks: int) -> None:
    """Each weight of a decoder is gathered in the forward pass, and again in the
    backward pass, but for a table; no gradient of a kernel is whole.
    """
    assert text.count(" reduce-scatter(") >= 6 * blocks + 2
    assert text.count(" all-gather(") >= 2 * 6 * blocks
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    # Of biases and norms, the loss and its count: nothing of the size of a kernel.
    assert all("[32,64]" not in line and "[64,32]" not in line for line in sums)


def test_no_gradient_is_whole_and_layers_are_gathered_one_after_the_other(monkeypatch):
    compiled = programs(monkeypatch)
    trained(mirrored(4, **SMALL), lambda: decoder(blocks=6), keras.optimizers.SGD, 1)
    assert_gathered_in_turn(compiled[0].as_text(), 6)


class OwnFunctional(keras.Model):
    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def scaling() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "optimizer",
    [keras.optimizers.Adam, scaling, accumulating],
    ids=lambda o: o.__name__,
)
@pytest.mark.parametrize("kind", ["dropout", "own step", "penalties"])
def test_no_gradient_is_whole_in_any_step(kind, optimizer, monkeypatch):
    def build() -> keras.Model:
        plain = decoder(dropout=0.1 if kind == "dropout" else 0.0, blocks=2)
        if kind == "penalties":
            for layer in plain.layers:
                if isinstance(layer, layers.Dense):
                    layer.kernel_regularizer = keras.regularizers.L2(1e-3)
        return OwnFunctional(plain.inputs, plain.outputs) if "own" in kind else plain

    compiled = programs(monkeypatch)
    trained(mirrored(4, **SMALL), build, optimizer, 1)
    assert_gathered_in_turn(compiled[0].as_text(), 2)


def test_memory_of_a_step_does_not_grow_with_the_layers(monkeypatch):
    compiled = programs(monkeypatch)
    temporary = []
    for options in (SMALL, {}):
        for blocks in (2, 10):
            compiled.clear()
            trained(
                mirrored(4, **options),
                lambda n=blocks: wide(n),
                keras.optimizers.SGD,
                1,
            )
            temporary.append(compiled[0].memory_analysis().temp_size_in_bytes)
    few, many, few_whole, many_whole = temporary
    weights = 8 * 2 * 4 * 256 * 256  # Bytes of one kernel more a block, of 8 blocks.
    assert many - few < 0.5 * weights
    assert many_whole - few_whole > 0.9 * weights


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "kind", ["dropout", "own", "tail", "muon", "mixing", "evaluate", "predict"]
)
def test_memory_does_not_grow_with_other_steps(kind, monkeypatch):
    """Also of steps whose collectives XLA places: neither weights nor gradients are
    whole at the same time.
    """
    compiled = programs(monkeypatch)
    x = np.ones((6 if kind == "tail" else 8, 256), "float32")
    temporary = []
    for blocks in (2, 6):
        with mirrored(4, **SMALL).scope():
            dense = [layers.Dense(256, "relu") for _ in range(2 * blocks)]
            random = [layers.Dropout(0.1)] if kind == "dropout" else []
            random += [Mixing()] if kind == "mixing" else []
            of_kind = OwnStep if kind == "own" else keras.Sequential
            model = of_kind([keras.Input((256,)), *dense, *random])
            model.compile("muon" if kind == "muon" else "sgd", "mse")
        compiled.clear()
        if kind == "predict":
            model.predict(x, verbose=0)
        else:
            method = model.evaluate if kind == "evaluate" else model.fit
            method(x, x, batch_size=8, verbose=0)
        temporary.append(compiled[-1].memory_analysis().temp_size_in_bytes)
    few, many = temporary
    # Of 8 more kernels; Muon's update begins when all gradients are there, in parts.
    share = 0.3 if kind == "muon" else 0.2
    assert many - few < share * 8 * 4 * 256 * 256


class Mixing(layers.Layer):
    """Takes the rows in another order, that of a large value."""

    def call(self, x: Any) -> Any:
        return jax.numpy.sort(jax.numpy.tile(x, (1, 64)), 0)[:, :256]


class OwnStep(keras.Sequential):
    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def wide(blocks: int) -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 256)(ids)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    for _ in range(blocks):
        hidden = layers.Dense(256, "relu")(layers.Dense(256, "relu")(hidden))
    hidden = layers.RepeatVector(LENGTH)(hidden)
    return keras.Model(ids, layers.Dense(VOCABULARY)(hidden))


def test_blocks_that_are_computed_again_gather_again(monkeypatch):
    """A rematerialized model is one block for JAX; its weights are not whole at once."""
    compiled = programs(monkeypatch)

    def build(blocks: int) -> keras.Model:
        with keras.RematScope(mode="full"):
            return wide(blocks)

    temporary = []
    for blocks in (2, 10):
        compiled.clear()
        trained(
            mirrored(4, **SMALL), lambda n=blocks: build(n), keras.optimizers.SGD, 1
        )
        temporary.append(compiled[0].memory_analysis().temp_size_in_bytes)
    few, many = temporary
    assert many - few < 0.5 * 8 * 2 * 4 * 256 * 256


def test_half_precision_travels_as_such(monkeypatch):
    # XLA for CPUs widens what travels.
    compiled = programs(monkeypatch, lowered=True)
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        trained(mirrored(4, **SMALL), decoder, keras.optimizers.SGD, 1)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    lines = compiled[0].as_text().splitlines()
    gathers = [line for line in lines if "stablehlo.all_gather" in line]
    kernels = [line for line in gathers if "32x64x" in line]
    assert kernels and all("32x64xbf16" in line for line in kernels)


def test_saving_and_loading_on_other_numbers(tmp_path):
    model, _ = trained(
        mirrored(4, **SMALL), decoder, lambda: keras.optimizers.Adam(1e-3)
    )
    model.save(tmp_path / "model.keras")
    x, y = tokens(24)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for strategy in (kd.get_strategy(), mirrored(8, **SMALL), mirrored(2)):
        with strategy.scope():
            other = keras.models.load_model(tmp_path / "model.keras")
        other.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    assert divided(model.variables)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            raise KeyboardInterrupt


def weights_of_fit(replicas: int, *callbacks: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    with mirrored(replicas, **SMALL).scope():
        model = decoder()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    x, y = tokens()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def backup(folder: Any) -> Any:
    return kd.callbacks.BackupAndRestore(folder, save_freq=1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a fit that was killed has left, and the weights of one that was not."""
    folder = tmp_path_factory.mktemp("killed")
    expected = weights_of_fit(4)
    with pytest.raises(KeyboardInterrupt):
        weights_of_fit(4, backup(folder), Stop())
    return folder, expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [4, 2])
def test_a_killed_fit_goes_on(tmp_path, replicas, killed):
    folder, expected = killed
    shutil.copytree(folder, tmp_path / "killed")
    resumed = weights_of_fit(replicas, backup(tmp_path / "killed"))
    for a, b in zip(resumed, expected, strict=True):
        if replicas == 4:
            np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_small_variables_stay_whole():
    strategy = mirrored(4, shard_variables=True, min_shard_bytes=1024)
    with strategy.scope():
        below = keras.Variable(np.ones((8, 127), "float32"))
        above = keras.Variable(np.ones((8, 128), "float32"))
        odd = keras.Variable(np.ones((33, 63), "float32"))
        second = keras.Variable(np.ones((33, 64), "float32"))
    assert below.value.sharding.is_fully_replicated
    assert above.value.sharding.shard_shape(above.shape) == (2, 128)
    assert odd.value.sharding.is_fully_replicated
    assert second.value.sharding.shard_shape(second.shape) == (33, 16)


def test_what_the_replicas_do_not_divide_is_said():
    """Once by a warning, whenever one asks by the summary; biases are not worth it."""
    strategy = mirrored(4, shard_variables=True, min_shard_bytes=1024)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((33,)),
                layers.Dense(35, name="odd"),
                layers.Dense(64, name="even"),
                layers.Dense(3, name="small"),
            ],
            name="net",
        )
        model.compile(keras.optimizers.Adam(1e-3, name="adam"), "mse")
    x = np.ones((8, 33), "float32")
    with pytest.warns(UserWarning, match="4 replicas divide none of the dim") as found:
        model.fit(x, x[:, :3], verbose=0)
    text = next(str(w.message) for w in found if "divide none" in str(w.message))
    assert "1 large variable(s)" in text and "(4.5 KiB of weights)" in text
    assert "net/odd/kernel (33, 35)" in text and "even" not in text
    said = str(strategy.summary(model))
    assert "3 large variables whole on each device, 13.5 KiB, since 4 replicas" in said
    assert "dimensions: net/odd/kernel (33, 35), adam/net_odd_kernel_momentum" in said


def test_a_loop_says_what_it_gathers(monkeypatch):
    strategy = mirrored(4, num_logical_devices=2, **SMALL)
    with strategy.scope():
        table = keras.Variable(np.ones((64, 64), "float32"))

    def step() -> Any:
        return table.value.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(strategy.run(step).values[0]) == 4096
        monkeypatch.setattr(whole_variables, "LARGE", 16 * 1024)
        assert float(strategy.run(step).values[0]) == 4096  # It is compiled.
    with pytest.warns(UserWarning, match=r"take 16.0 KiB on each device"):
        strategy.run(lambda: table.value.sum())
    monkeypatch.setattr(whole_variables, "_memory_of", lambda device: 16 * 1024 - 1)
    with pytest.raises(kd.errors.OutOfMemoryError, match="gathers one layer after"):
        strategy.run(lambda: table.value.sum())


def test_nothing_is_whole_while_a_model_is_made():
    shape, made = (513, 264), 6  # Of no other test's arrays.

    def kernels() -> int:
        """How many are on the first device, in all their parts."""
        gc.collect()
        sizes = [
            shard.data.size
            for array in jax.live_arrays()
            for shard in array.addressable_shards
            if shard.device == jax.devices()[0] and array.shape == shape
        ]
        return sum(sizes) / (shape[0] * shape[1])

    class Watched(keras.layers.Layer):
        def build(self, _: Any) -> None:
            self.counts = []
            for i in range(made):
                self.add_weight(shape=shape, name=f"kernel_{i}")
                self.counts.append(kernels())

        def call(self, x: Any) -> Any:
            return x

    with mirrored(8, **SMALL).scope():
        layer = Watched()
        layer.build((1,))
    assert layer.counts == [(i + 1) / 8 for i in range(made)]


DEPTH, SIDE = 6, 136  # A shape of no other test's arrays.
STATE = 3 * DEPTH  # Arrays: weights and the slots of Adam.


def deep() -> keras.Model:
    dense = [layers.Dense(SIDE, use_bias=False) for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((SIDE,)), *dense])
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of a model, in all formats."""
    folder = tmp_path_factory.mktemp("saved")
    keras.utils.set_random_seed(1)
    model = deep()
    model.save(folder / "model.keras")
    model.save_weights(folder / "a.weights.h5")
    kd.Checkpoint(model=model).write(folder / "checkpoint")
    return folder, model


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("made", 8),
        ("load_model", 8),
        ("load_weights", 8),
        ("restored", 8),
        ("load_weights", 1),  # Nothing is divided, and all of it is seen.
    ],
)
def test_the_state_is_never_whole_on_a_device_when_it_comes(name, devices, saved):
    folder, expected = saved
    with mirrored(devices, **SMALL).scope(), OnFirstDevice((SIDE, SIDE)) as found:
        if name == "load_model":
            model = keras.models.load_model(folder / "model.keras")
        else:
            model = deep()
        if name == "load_weights":
            model.load_weights(folder / "a.weights.h5")
        elif name == "restored":
            kd.Checkpoint(model=model).read(folder / "checkpoint")
    if name != "made":
        for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert STATE / devices <= found.more <= STATE / devices + 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["save", "save_weights", "checkpoint", "read"])
def test_the_state_is_never_whole_on_a_device_when_it_goes(name, tmp_path):
    with mirrored(8, **SMALL).scope():
        model = deep()
    with OnFirstDevice((SIDE, SIDE)) as found:
        if name == "save":
            model.save(tmp_path / "model.keras")
        elif name == "save_weights":
            model.save_weights(tmp_path / "a.weights.h5")
        elif name == "checkpoint":
            kd.Checkpoint(model=model).write(tmp_path / "checkpoint")
        else:
            model.get_weights()
    assert found.more <= 2


def test_deterministic_strategies_refuse():
    with pytest.raises(kd.errors.ValueStructureError, match="whole weights") as raised:
        mirrored(2, deterministic=True, shard_variables=True)
    assert "shard_optimizer_state=True" in str(raised.value)


def test_the_summary_says_how_the_step_is_made():
    strategy = mirrored(4, **SMALL)
    model, _ = trained(strategy, decoder, keras.optimizers.SGD, 1)
    assert "gathers divided weights where a layer needs them" in str(
        strategy.summary(model)
    )
    with strategy.scope():
        mixing = keras.Sequential([layers.Dense(256), Mixing(name="mixing")])
        mixing.compile("sgd", "mse")
    mixing.fit(np.ones((8, 256)), np.ones((8, 256)), verbose=0)
    assert "because the operation `sort` in `mixing` mixes rows" in str(
        strategy.summary(mixing)
    )


LAYOUTS = {
    ".*query/kernel": (None, "logical", None),
    ".*/embeddings": ("logical", None),
    ".*dense[_0-9]*/kernel": (None, "logical"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_logical_devices_of_any_strategy(replicas, shards):
    strategy = mirrored(
        2 * replicas,
        num_logical_devices=2,
        layout_map=LAYOUTS,
        shard_variables=shards,
        min_shard_bytes=32,
    )
    assert strategy.num_replicas_in_sync == replicas
    assert strategy.num_logical_devices == 2
    model = assert_like_one_device(strategy, decoder, adam, 5e-5)
    parts = 2 * (replicas if shards else 1)
    kernels = [v for v in model.trainable_variables if v.path.endswith("/embeddings")]
    for variable in [*kernels, *model.optimizer.variables]:
        if "embeddings" in variable.path:
            own = variable.value.sharding.shard_shape(variable.shape)
            assert np.prod(own) * parts == np.prod(variable.shape)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_logical_devices": 3}, "Each replica has equally many logical devices."),
        (
            {"num_logical_devices": 2, "deterministic": True},
            "The replicas of a deterministic strategy are on one device each.",
        ),
    ],
)
def test_devices_that_cannot_be_grouped(options, text):
    with pytest.raises(kd.errors.DeviceError, match=text):
        mirrored(4, **options)


@pytest.mark.parametrize("layouts", [0, "", [], False])
def test_what_is_no_layout_map_is_refused(layouts):
    with pytest.raises(kd.errors.StructureTypeError, match="Layouts come as a"):
        mirrored(1, layout_map=layouts)


@pytest.mark.parametrize("eager", [False, True])
def test_seeds_are_never_divided(eager):
    """However small the parts may be."""

    def fitted(scope: Any) -> list[Any]:
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential([layers.Dense(4), layers.Dropout(0.5)])
            model.compile("sgd", "mse", run_eagerly=eager)
        model.fit(np.ones((8, 6)), np.ones((8, 4)), batch_size=4, verbose=0)
        return model.get_weights()

    strategy = mirrored(2, shard_variables=True, min_shard_bytes=1)
    for ours, theirs in zip(
        fitted(strategy.scope()), fitted(contextlib.nullcontext()), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)

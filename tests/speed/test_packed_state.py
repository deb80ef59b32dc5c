"""A state that travels in few buffers gives the numbers of one that does not, and is
there whenever somebody looks.
"""

from __future__ import annotations

import math
import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import keras_distribute as kd
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute.training.steps import packed_state
from tests.support import mirrored, mirrored_or_default, pack_from, traced_programs

pytestmark = pytest.mark.sampled(7)

RNG = np.random.RandomState(0)
X, Y = RNG.randn(42, 6).astype("float32"), RNG.randint(0, 3, 42)


@pytest.fixture(params=["packed", "one by one"])
def packed(request: Any, monkeypatch: Any) -> bool:
    pack_from(monkeypatch, 4 if request.param == "packed" else None)
    return request.param == "packed"


def built(replicas: int, make: Any, *inside: Any, **compiled: Any) -> keras.Model:
    """Small weights beside a large one, where `SMALL_BYTES` is small."""
    keras.utils.set_random_seed(3)
    with mirrored_or_default(replicas).scope():
        blocks = [
            layers.Dense(8, activation="tanh"),
            *(make_layer() for make_layer in inside),
            layers.Dense(8, activation="tanh"),
            layers.Dense(5),
        ]
        model = keras.Sequential([keras.Input((6,)), *blocks, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss, metrics=["accuracy"], **compiled)
    return model


def trained(model: keras.Model, tails: bool = False, **options: Any) -> dict[str, Any]:
    """With `tails`, `fit`, its validation and `predict` end in smaller batches, which
    are a program more each.
    """
    rows = 42 if tails else 40
    arguments = {
        "batch_size": 8,
        "epochs": 2,
        "verbose": 0,
        "validation_data": (X[:20], Y[:20]) if tails else (X[:16], Y[:16]),
    } | options
    history = model.fit(X[:rows], Y[:rows], **arguments).history
    values = {
        v.path.split("/", 1)[-1] + str(i): v.numpy()
        for i, v in enumerate(model.variables)
    }
    slots = {f"slot {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    return {
        "history": history,
        "predictions": model.predict(X[:rows], batch_size=9 if tails else 8, verbose=0),
        **values,
        **slots,
    }


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys() or len(actual) == len(expected)
    for (name, a), b in zip(actual.items(), expected.values(), strict=True):
        if name == "history":
            assert a.keys() == b.keys()
            for key in a:
                np.testing.assert_allclose(a[key], b[key], rtol=1e-5, err_msg=key)
        else:
            np.testing.assert_allclose(
                a,
                b,
                rtol=1e-5,
                atol=1e-6 * max(1.0, np.max(np.abs(b), initial=0)),
                err_msg=name,
            )


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(
        0.05, momentum=0.9, nesterov=True, clipvalue=0.01
    ),
    "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    "Lion": lambda: optimizers.Lion(0.001),
    "average": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
    ),
    "callable rate": lambda: optimizers.SGD(lambda: 0.05),
}
WHOLE = {
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=8.0
    ),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


def flat(model: keras.Model) -> bool:
    """Whether the optimizer sees one long weight."""
    from keras_distribute._compat import optimizer as compat

    return compat.takes_elements_alone(model.optimizer, model.trainable_variables)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_take_elements_one_by_one(name: str, monkeypatch: Any) -> None:
    expected = trained(built(0, OPTIMIZERS[name]))
    pack_from(monkeypatch, 4)
    model = built(2, OPTIMIZERS[name])
    assert_close(trained(model), expected)
    assert flat(model)


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_whole_weights(name: str, monkeypatch: Any) -> None:
    expected = trained(built(0, WHOLE[name]))
    pack_from(monkeypatch, 4)
    model = built(2, WHOLE[name])
    assert_close(trained(model), expected)
    assert not flat(model)


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("large", [False, True])
def test_replica_counts_with_a_short_last_batch(
    replicas: int, large: bool, monkeypatch: Any
) -> None:
    """With `large`, some weights are too large for a buffer."""
    expected = trained(built(0, OPTIMIZERS["AdamW"]), tails=True)
    pack_from(monkeypatch, 4)
    monkeypatch.setattr(packed_state, "SMALL_BYTES", 160 if large else 10**6)
    actual = trained(built(replicas, OPTIMIZERS["AdamW"]), tails=True)
    assert_close(actual, expected)


INSIDE = {
    "dropout": lambda: layers.Dropout(0.4),
    "regularizer": lambda: layers.Dense(8, kernel_regularizer="l2"),
    "activity regularizer": lambda: layers.ActivityRegularization(0.1),
    "constraint": lambda: layers.Dense(8, kernel_constraint="unit_norm"),
    "frozen": lambda: layers.Dense(8, trainable=False),
    "half": lambda: layers.Dense(8, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_layers(name: str, monkeypatch: Any) -> None:
    """What mixes rows, draws, or has rules of its own steps over the whole batch."""
    adam = OPTIMIZERS["Adam"]
    expected = trained(built(4, adam, INSIDE[name]))
    pack_from(monkeypatch, 4)
    actual = trained(built(4, adam, INSIDE[name]))
    if name == "half":
        np.testing.assert_allclose(
            actual["history"]["loss"], expected["history"]["loss"], rtol=0.02
        )
    else:
        assert_close(actual, expected)


def test_weights_excluded_from_decay(packed: bool) -> None:
    def excluding() -> Any:
        optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    model = built(2, excluding)
    assert_close(trained(model), trained(built(0, excluding)))
    assert not flat(model)


def test_steps_of_ones_own(packed: bool) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(6) for _ in range(3)] + [layers.Dense(3)]

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

        def train_step(self, state: Any, data: Any) -> Any:
            assert (
                all(isinstance(group, list) for group in state) and len(state[0]) == 8
            )
            return super().train_step(state, data)

    def run(strategy: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Own()
            model.compile(
                "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
        return trained(model)

    assert_close(run(mirrored(2)), run(kd.get_strategy()))


class Meddling(keras.callbacks.Callback):
    """Looks at the state after some steps, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch in (1, 2):
            model = self.model
            self.seen += [
                int(model.optimizer.iterations),
                model.layers[0].kernel.numpy().sum(),
            ]
            model.optimizer.learning_rate = 0.02 / (batch + 1)
            model.layers[1].bias.assign(model.layers[1].bias + 0.1)


def test_a_callback_sees_and_changes_the_state(packed: bool) -> None:
    expected, actual = Meddling(), Meddling()
    one = trained(built(0, OPTIMIZERS["Adam"]), callbacks=[expected])
    assert_close(trained(built(2, OPTIMIZERS["Adam"]), callbacks=[actual]), one)
    np.testing.assert_allclose(actual.seen, expected.seen, rtol=1e-5)


class Break(keras.callbacks.Callback):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.left = 3
        setattr(self, method, self.strike)

    def strike(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["on_train_batch_begin", "on_train_batch_end"])
def test_an_interrupted_fit_keeps_what_its_steps_did(method: str, packed: bool) -> None:
    model = built(2, OPTIMIZERS["Adam"])
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Break(method)])
    assert int(model.optimizer.iterations) == (
        3 if method == "on_train_batch_end" else 2
    )
    model.fit(X, Y, batch_size=8, verbose=0)
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)


def test_input_that_breaks_before_the_first_step_changes_nothing(packed: bool) -> None:
    model = built(2, OPTIMIZERS["Adam"])
    before = [v.numpy() for v in model.variables]

    class Broken(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            raise LookupError("broken")

    with pytest.raises(LookupError, match="broken"):
        model.fit(Broken(), verbose=0)
    for a, b in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *WHOLE])
def test_an_optimizer_for_other_weights_takes_no_memory(name: str) -> None:
    optimizer = (OPTIMIZERS | WHOLE)[name]()
    optimizer.build([keras.Variable(np.ones((4, 3), "float32"))])
    copy = compat_optimizer.same_for(optimizer, [((10**7, 10**7), "float32")])
    assert len(copy.variables) == len(optimizer.variables)
    assert all(variable._value is None for variable in copy.variables)
    assert max(math.prod(v.shape) for v in copy._trainable_variables) == 10**14


def test_later_epochs_compile_nothing(packed: bool, compilations: Any) -> None:
    model = built(4, OPTIMIZERS["Adam"])
    for _ in range(2):  # The first `fit` after a `predict` takes its buffer apart.
        trained(model)
    before = len(compilations)
    trained(model)
    assert len(compilations) == before


@pytest.mark.parametrize("metrics_too", [False, True])
def test_what_is_read_and_set_each_epoch(metrics_too: bool, monkeypatch: Any) -> None:
    """Metrics and the learning rate are in no buffer with others; moving statistics
    are in one.
    """
    pack_from(monkeypatch, 4)
    few = 2 if metrics_too else packed_state.MANY * 100
    monkeypatch.setattr(packed_state, "MANY_METRICS_ON_CPUS", few)
    norms = [layers.BatchNormalization] * 2
    model = built(2, lambda: optimizers.Adam(0.01), *norms)
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    options: Any = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": [slower]}
    model.fit(X[:40], Y[:40], **options)
    joined, taken_apart = list[int](), list[int]()
    join, take_apart = packed_state.Packing.pack_now, packed_state.Packing.unpack_now

    def joins(self: Any, arrays: Any) -> Any:
        joined.extend(arrays)
        return join(self, arrays)

    def takes_apart(self: Any, buffer: int, value: Any) -> Any:
        taken_apart.append(buffer)
        return take_apart(self, buffer, value)

    monkeypatch.setattr(packed_state.Packing, "pack_now", joins)
    monkeypatch.setattr(packed_state.Packing, "unpack_now", takes_apart)
    model.fit(X[:40], Y[:40], **options)
    assert len(set(joined)) == metrics_too  # Once an epoch.
    assert joined == taken_apart == joined[:1] * 2
    np.testing.assert_allclose(model.optimizer.learning_rate.numpy(), 0.01 / 16)
    assert model.layers[1].moving_mean.numpy().any()
    assert len(taken_apart) == len(joined) + 1


def test_few_arrays_and_one_reduction(monkeypatch: Any) -> None:
    """What the packing is for."""
    found: dict[bool, tuple[int, int]] = {}
    for many in (4, None):
        pack_from(monkeypatch, many)
        model = built(4, OPTIMIZERS["Adam"])
        texts: list[str] = []
        from keras_distribute.training.steps import compiled_step

        original = compiled_step.CompiledStep._one

        def one(
            self: Any,
            holder: Any,
            placed: Any,
            original: Any = original,
            texts: Any = texts,
        ) -> Any:
            if not texts:
                texts.append(self.executable(placed).compile().as_text())
            return original(self, holder, placed)

        monkeypatch.setattr(compiled_step.CompiledStep, "_one", one)
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
        monkeypatch.setattr(compiled_step.CompiledStep, "_one", original)
        entry = texts[0][texts[0].index("ENTRY") :]
        arrays = len(re.findall(r" parameter\(\d+\)", entry))
        reductions = re.findall(r"= (.*) all-reduce(?:-start)?\(", texts[0])
        found[many == 4] = (
            arrays,
            sum(len(re.findall(r"f32\[\d", reduced)) for reduced in reductions),
        )
    assert found[True][0] < found[False][0] / 2
    assert found[True][1] <= 2 < found[False][1]


def test_layers_frozen_without_compiling_again(monkeypatch: Any) -> None:
    pack_from(monkeypatch, 4)
    model = built(2, OPTIMIZERS["Adam"])
    model.fit(X, Y, batch_size=8, verbose=0)
    model.layers[0].trainable = False
    with pytest.raises(
        kd.errors.ValueStructureError,
        match=r"(?s)variables of the model have changed.*model.compile",
    ):
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["packed", "one by one", "divided", "eager"])
def test_predictions_after_layers_were_frozen_without_compiling_again(
    strategy: str, monkeypatch: Any
) -> None:
    """Layers of one shape, frozen in turn: their values do not change places."""
    pack_from(monkeypatch, 4 if strategy == "packed" else None)
    options = {"shard_variables": True, "min_shard_bytes": 16}
    placed = kd.MirroredStrategy(
        ["cpu:0", "cpu:1"], **(options if strategy == "divided" else {})
    )
    with placed.scope():
        blocks = [layers.Dense(6, activation="tanh") for _ in range(5)]
        model = keras.Sequential([keras.Input((6,)), *blocks, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=strategy == "eager")
    for block in blocks[::2]:
        block.trainable = False
    expected = model.predict(X, batch_size=8, verbose=0)
    before = model.evaluate(X, Y, batch_size=8, verbose=0)
    for _ in range(2):
        for block in blocks:
            block.trainable = not block.trainable
        found = model.predict(X, batch_size=8, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        found = model.evaluate(X, Y, batch_size=8, verbose=0)
        assert found == pytest.approx(before, rel=1e-6)


@pytest.mark.sampled(1)
def test_programs_before_and_after_freezing_are_kept(
    packed: bool, compilations: Any
) -> None:
    model = built(2, OPTIMIZERS["SGD"])
    for _ in range(4):
        model.layers[0].trainable = not model.layers[0].trainable
        model.predict(X[:40], batch_size=8, verbose=0)
    before = len(compilations)
    for _ in range(4):
        model.layers[0].trainable = not model.layers[0].trainable
        model.predict(X[:40], batch_size=8, verbose=0)
    assert len(compilations) == before


def test_what_joins_a_model_outside_the_scope_is_refused() -> None:
    """After a first prediction, and without compiling again."""
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(3)])
    model.predict(X, verbose=0)
    model.layers[0].enable_lora(2)
    with pytest.raises(kd.errors.VariableScopeError, match="enable_lora"):
        model.predict(X, verbose=0)


@pytest.mark.sampled(1)
def test_a_loss_that_reads_weights_trains_them(packed: bool) -> None:
    """A penalty that the loss computes, and a weight that it alone reads."""

    class WithScale(layers.Dense):
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.log_scale = self.add_weight(shape=(), name="log_scale")

    def train(replicas: int) -> Any:
        keras.utils.set_random_seed(3)
        with mirrored_or_default(replicas).scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    WithScale(4, activation="tanh"),
                    layers.Dense(4, activation="tanh"),
                    layers.Dense(3),
                ]
            )
            first = model.layers[0]

            def loss(y: Any, logits: Any) -> Any:
                own = keras.losses.sparse_categorical_crossentropy(y, logits, True)
                penalty = keras.ops.sum(first.kernel**2) + first.log_scale
                return keras.ops.exp(-first.log_scale) * own + penalty

            model.compile(optimizers.Adam(0.01), loss)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return {v.path: v.numpy() for v in model.trainable_variables}

    assert_close(train(2), train(0))


def test_a_large_weight_of_another_dtype_keeps_it(monkeypatch: Any) -> None:
    pack_from(monkeypatch, 4)
    model = built(2, OPTIMIZERS["SGD"], INSIDE["half"])
    dtypes = [v.dtype for v in model.variables]
    model.fit(X, Y, batch_size=8, verbose=0)
    assert "bfloat16" in dtypes
    assert [v.value.dtype.name for v in model.variables if v.dtype == "bfloat16"] == [
        "bfloat16"
    ] * 2


def test_a_step_of_ones_own_may_return_tuples(packed: bool) -> None:
    class Tuples(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            return logs, tuple(map(tuple, state))

    with mirrored(2).scope():
        model = Tuples([keras.Input((6,)), layers.Dense(3)])
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_few_weights_are_one_on_cpus(replicas: int, monkeypatch: Any) -> None:
    """Where replicas share their cores."""
    pack_from(monkeypatch, 64)
    monkeypatch.setattr(packed_state, "MANY_WEIGHTS_ON_CPUS", 3)
    traced = traced_programs(monkeypatch)
    with mirrored(replicas).scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4), layers.Dense(3, use_bias=False)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    shapes = [aval.shape for aval in traced[0].jaxpr.in_avals]
    assert ((40,) in shapes) == (replicas == 2)
    assert ((6, 4) in shapes) == (replicas == 1)

"""The cases that TensorFlow's `MirroredStrategy` or `keras.distribution.DataParallel`
get wrong, one test each.

Four replicas against one device. Each test is named after its case; its docstring says
what the peers did with it (Keras 3.15, TensorFlow 2.21; KD is `keras.distribution`).
Here: the numbers of a step. `test_peers_surroundings` has the cases around the step:
saving, callbacks, scopes, custom loops. `test_batch_normalization` has its three rows.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from . import harness, zoo
from .harness import equals_one_device, fit_evaluate_predict, fit_only, table

pytestmark = pytest.mark.timeout(120)

X, Y = table(70)


def dense(hidden: layers.Layer | None = None, **options: Any) -> keras.Model:
    """A compiled classifier, with a layer more in the middle if given."""
    middle = [] if hidden is None else [hidden]
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            *middle,
            layers.Dense(3),
        ]
    )
    settings: dict[str, Any] = {
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **options,
    }
    model.compile(**settings)
    return model


def test_arrays_divisible_batches() -> None:
    """Both peers ok."""
    equals_one_device(dense, fit_evaluate_predict(X[:64], Y[:64]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("samples", [70, 65])
def test_fit_70_samples_batch_32(samples: int) -> None:
    """TF: weights silently off by 2.4e-2 (9.6e-2 with 65). KD: IndivisibleError,
    earlier steps stay applied.
    """
    equals_one_device(dense, fit_only(X[:samples], Y[:samples], epochs=3))


def test_evaluate_predict_70() -> None:
    """TF ok. KD: IndivisibleError, in `validation_data`, too."""

    def run(model: keras.Model) -> Any:
        history = model.fit(
            X[:64], Y[:64], validation_data=(X, Y), shuffle=False, verbose=0
        ).history
        evaluation = model.evaluate(X, Y, return_dict=True, verbose=0)
        return {
            "history": history,
            "evaluation": evaluation,
            "predictions": model.predict(X, verbose=0),
        }

    outcome = equals_one_device(dense, run)
    assert outcome.result["predictions"].shape == (70, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("samples", "batch_size"), [(6, 32), (3, 32), (60, 30)])
def test_6_or_3_samples_and_batch_30(samples: int, batch_size: int) -> None:
    """TF: InvalidArgumentError in fit. KD: IndivisibleError."""
    equals_one_device(
        dense, fit_evaluate_predict(X[:samples], Y[:samples], batch_size=batch_size)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "layer", [layers.Dropout, layers.GaussianNoise, layers.GaussianDropout]
)
def test_dropout_and_noise(layer: type[layers.Layer]) -> None:
    """TF: silently the same mask on every replica. KD: equal to one device."""
    equals_one_device(lambda: dense(layer(0.4)), fit_only(X, Y))


class AlwaysDropout(layers.Layer):
    """Dropout in predictions, so that the masks can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)

    def call(self, inputs: Any) -> Any:
        return keras.random.dropout(ops.ones_like(inputs), 0.5, seed=self.seed)


def test_dropout_masks_differ_between_replicas() -> None:
    """The rows of one replica are masked unlike those of another."""
    outcome = equals_one_device(
        lambda: keras.Sequential([keras.Input((16,)), AlwaysDropout()]),
        lambda model: model.predict(np.ones((32, 16), "float32"), verbose=0),
    )
    shares = np.split(outcome.result, 4)
    assert all(
        not np.array_equal(shares[i], shares[j]) for i in range(4) for j in range(i)
    )


def test_built_in_metrics_even_batches() -> None:
    """Both peers ok. All metrics: `test_layers_optimizers_metrics`."""

    def build() -> keras.Model:
        return dense(
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
        )

    equals_one_device(build, fit_evaluate_predict(X[:64], Y[:64]))


class Largest(keras.metrics.Metric):
    """A metric that assigns: the largest prediction so far."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable(
            (), initializer=keras.initializers.Constant(-1e9), name="value"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self) -> Any:
        return self.value + 0.0

    def reset_state(self) -> None:
        self.value.assign(-1e9)


def test_metric_that_assigns_a_maximum() -> None:
    """TF: silently summed over the replicas. KD ok."""
    equals_one_device(lambda: dense(metrics=[Largest()]), fit_evaluate_predict(X, Y))


def test_add_loss_sum() -> None:
    """TF: silently divided by 4. KD ok."""
    equals_one_device(lambda: dense(zoo.Penalty()), fit_evaluate_predict(X, Y))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum", "mean"])
def test_mean_with_sample_weight(reduction: str) -> None:
    """TF: silently off by 1.7e-2. KD ok."""
    weights = np.linspace(0.0, 3.0, 70, dtype="float32")
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    optimizer = keras.optimizers.SGD(0.1 if reduction != "sum" else 0.005)
    equals_one_device(
        lambda: dense(
            loss=loss,
            optimizer=keras.optimizers.SGD.from_config(optimizer.get_config()),
        ),
        fit_evaluate_predict(X, Y, sample_weight=weights),
    )


def test_mask_zero() -> None:
    """TF: silently off by 1.8e-3. KD ok. Every row has another number of real tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 10, (70, 6)).astype("int32")
    tokens[np.arange(6) > rng.integers(0, 6, (70, 1))] = 0
    targets = rng.integers(0, 3, (70, 6)).astype("int32")

    def build() -> keras.Model:
        recurrent = layers.SimpleRNN(5, return_sequences=True)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Embedding(10, 4, mask_zero=True),
                recurrent,
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"]
        )
        return model

    equals_one_device(build, fit_evaluate_predict(tokens, targets))


def test_loss_that_returns_a_scalar() -> None:
    """TF: gradient and log silently times 4. KD ok."""
    equals_one_device(
        lambda: dense(loss=zoo.scalar_crossentropy), fit_evaluate_predict(X, Y)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", ["none", None])
def test_reduction_none(reduction: str | None) -> None:
    """TF: the log silently times 4. KD, and one device: TypeError, there is no scalar
    to differentiate.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )

    def error_under(strategy: Any) -> type[BaseException] | None:
        return harness.error_class(
            lambda: harness.observe(
                lambda: dense(loss=loss), fit_only(X, Y, epochs=1), strategy
            )
        )

    errors = [error_under(strategy) for strategy in (None, harness.mirrored(4))]
    assert errors == [TypeError, TypeError]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flavour", [0, 1], ids=["compute_loss", "ops_mean"])
def test_own_train_step(flavour: int) -> None:
    """TF: with `compute_loss` the logged loss is a quarter; with `ops.mean` the
    gradient is silently times 4. KD ok.
    """
    case = zoo.Case(
        "own_step", flavour, 4, 32, 70, "sum_over_batch_size", zoo.OptimizerChoice()
    )
    equals_one_device(lambda: zoo.build_model(case), fit_evaluate_predict(X, Y))


def test_steps_per_execution_4() -> None:
    """TF: fit fails. KD: ok, a Python loop."""
    equals_one_device(
        lambda: dense(steps_per_execution=4), fit_evaluate_predict(X, Y, batch_size=8)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 3, "global_clipnorm": 0.1},
        {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2},
        {"use_ema": True, "ema_momentum": 0.7},
    ],
    ids=["accumulate", "accumulate_and_clip", "ema_overwrite", "ema_at_the_end"],
)
def test_gradient_accumulation_and_ema(options: dict[str, Any]) -> None:
    """TF: both fail. KD ok."""
    equals_one_device(
        lambda: dense(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, **options)),
        fit_only(X, Y, batch_size=16),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping(option: str) -> None:
    """TF: silently clips before the reduction. KD ok."""
    equals_one_device(
        lambda: dense(optimizer=keras.optimizers.SGD(0.5, **{option: 0.05})),
        fit_only(X * 3, Y, batch_size=16),
    )


def test_float16_overflow_on_one_replica() -> None:
    """TF: every weight silently NaN. KD ok: the step is skipped on all replicas and the
    scale halved.
    """
    x = X[:32].copy()
    x[30] = 6e4  # Only the last replica's rows overflow float16.

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, dtype="mixed_float16"),
                layers.Dense(3, dtype="mixed_float16"),
            ]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=1024.0
        )
        model.compile(optimizer=optimizer, loss=zoo.scalar_squared_error)
        return model

    outcome = equals_one_device(
        build, lambda model: model.train_on_batch(x, X[:32, :1]) and None
    )
    for (path, before), (_, after) in zip(
        outcome.initial, outcome.weights, strict=True
    ):
        assert np.array_equal(before, after), f"{path} moved in a step that overflowed"
    assert float(outcome.model.optimizer.dynamic_scale) == 512.0


def test_generator_input() -> None:
    """TF: silently 192 of 320 samples used. KD ok."""
    x, y = table(320)

    def run(model: keras.Model) -> Any:
        counter = (
            (x[start : start + 32], y[start : start + 32])
            for start in range(0, 320, 32)
        )
        return model.fit(counter, epochs=1, verbose=0).history

    equals_one_device(dense, run)


class ScaledBy(keras.Model):
    """A model with a second input that may be a bare number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.head(inputs["rows"]) * inputs["scale"]


def test_a_0d_value_beside_the_batch() -> None:
    """TF and one device: an error. KD: IndexError."""

    def run(model: keras.Model) -> Any:
        batch = ({"rows": X[:8], "scale": np.float32(2.0)}, Y[:8])
        return harness.error_class(lambda: model.fit(iter([batch]), verbose=0))

    def build() -> keras.Model:
        model = ScaledBy()
        model.compile(
            optimizer="sgd",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    expected = harness.observe(build, run).result
    assert harness.observe(build, run, harness.mirrored(4)).result is expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [32, 30])
def test_train_on_batch(rows: int) -> None:
    """TF: each replica runs the whole batch, counts are times 4. KD ok if divisible."""

    def run(model: keras.Model) -> Any:
        logs = [
            model.train_on_batch(X[:rows], Y[:rows], return_dict=True) for _ in range(3)
        ]
        return {
            "train": logs,
            "test": model.test_on_batch(X[:rows], Y[:rows], return_dict=True),
        }

    equals_one_device(dense, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [32, 30])
def test_predict_on_batch(rows: int) -> None:
    """TF: silently 128 rows out for 32 in. KD ok."""
    outcome = equals_one_device(
        dense, lambda model: np.asarray(model.predict_on_batch(X[:rows]))
    )
    assert outcome.result.shape == (rows, 3)


def test_jit_compile_true() -> None:
    """TF: fails. KD ok."""
    equals_one_device(lambda: dense(jit_compile=True), fit_evaluate_predict(X, Y))


def test_more_than_100_steps_without_a_syncing_callback() -> None:
    """KD: the process aborts after 40 s on fewer cores than devices."""
    x, y = table(4 * 320)
    equals_one_device(dense, fit_only(x, y, batch_size=4, epochs=1))

"""Every Keras optimizer and every Keras metric, found by looking, and the types of low
precision.

A new optimizer or metric in Keras is tested as soon as it is there: it gets its default
arguments, and a test fails if those will not do.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd

from . import harness
from .harness import equals_one_device, fit_only, table

pytestmark = [pytest.mark.timeout(120), pytest.mark.sampled(18)]

X, Y = table(22)


def public_classes(module: Any, base: type, excluded: set[str]) -> dict[str, type]:
    """The module's classes below the base, each under the first name that it has there."""
    found: dict[type, str] = {}
    for name, value in sorted(vars(module).items()):
        if (
            inspect.isclass(value)
            and issubclass(value, base)
            and value is not base
            and name not in excluded
        ):
            found.setdefault(value, name)
    return {name: value for value, name in found.items()}


# Optimizers that need more than a learning rate: `LossScaleOptimizer` and
# `MultiOptimizer` have tests of their own.
OPTIMIZERS = public_classes(
    keras.optimizers,
    keras.optimizers.Optimizer,
    {"LossScaleOptimizer", "MultiOptimizer"},
)
# Where an update is a normalised gradient, an epsilon far above rounding: see
# `zoo.OPTIMIZERS`.
EPSILONS = {
    "Adam",
    "AdamW",
    "Adamax",
    "Nadam",
    "RMSprop",
    "Adadelta",
    "Adagrad",
    "Lamb",
    "ScheduleFreeAdamW",
}


def make_optimizer(name: str, **options: Any) -> keras.optimizers.Optimizer:
    """The optimizer with a visible step and a well-conditioned epsilon."""
    rate = {"Lion": 0.002, "Adadelta": 1.0, "Ftrl": 0.05}.get(name, 0.02)
    if name in EPSILONS:
        options.setdefault("epsilon", 1e-2)
    return OPTIMIZERS[name](learning_rate=rate, **options)


def classifier(optimizer: Any, metrics: Any = ("accuracy",)) -> keras.Model:
    """A compiled classifier."""
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(7, activation="tanh"), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics))
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    """Three steps an epoch, a tail among them."""
    equals_one_device(
        lambda: classifier(make_optimizer(name)), fit_only(X, Y, batch_size=8)
    )


@pytest.mark.parametrize("name", ["Adam", "Muon", "Ftrl", "ScheduleFreeAdamW"])
def test_optimizers_with_every_option(name: str) -> None:
    """Weight decay, clipping, accumulation and averaging together, and a schedule for
    the learning rate.
    """
    options: dict[str, Any] = {
        "weight_decay": 0.01,
        "global_clipnorm": 0.2,
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.7,
        "ema_overwrite_frequency": 2,
    }

    def build() -> keras.Model:
        optimizer = make_optimizer(name, **options)
        optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(
            0.02, 2, 0.5
        )
        return classifier(optimizer)

    equals_one_device(build, fit_only(X, Y, batch_size=8))


def test_multi_optimizer() -> None:
    """Two optimizers for two parts of a model."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")

    def build() -> keras.Model:
        choose = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, momentum=0.9))
        choose["bias"] = make_optimizer("Adam")
        return classifier(keras.optimizers.MultiOptimizer(choose))

    equals_one_device(build, fit_only(X, Y, batch_size=8))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16"])
def test_low_precision(policy: str) -> None:
    """The loss and the weights agree within the rounding of the compute type, however
    the rows are split.

    A product whose rows are split is rounded to 8 (bfloat16) or 11 (float16) bits once
    per replica instead of once: two or three such roundings of each gradient, times the
    learning rate.
    """
    rounding = 2.0**-8 if policy == "mixed_bfloat16" else 2.0**-11

    def build() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return classifier(keras.optimizers.SGD(0.1), metrics=())
        finally:
            keras.config.set_dtype_policy(before)

    outcome = equals_one_device(
        build, fit_only(X, Y, batch_size=8), rtol=4 * rounding, floor=rounding
    )
    scaled = isinstance(outcome.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


def rows_that_overflow(replica: int) -> np.ndarray:
    """16 rows for 4 replicas, of which one replica's overflow float16."""
    x = X[:16].copy()
    x[replica * 4 + 1] = 6e4
    return x


@pytest.mark.parametrize("replica", [0, 3])
def test_overflow_on_one_replica_skips_the_step_on_all(replica: int) -> None:
    """No weight moves, the scale halves, and the next steps are those of one device."""

    def build() -> keras.Model:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        scaled = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=512.0, dynamic_growth_steps=2
        )
        # One linear layer: a saturated activation would swallow the overflow.
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(3, dtype="mixed_float16")]
        )
        model.compile(
            optimizer=scaled,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    def run(model: keras.Model) -> Any:
        scales, moved = [], []
        for x in (rows_that_overflow(replica), X[:16], X[:16], X[:7]):
            before = [np.array(weight.value) for weight in model.trainable_variables]
            model.train_on_batch(x, Y[: len(x)])
            after = [np.array(weight.value) for weight in model.trainable_variables]
            scales.append(float(model.optimizer.dynamic_scale.value))
            moved.append(
                not all(
                    np.array_equal(old, new)
                    for old, new in zip(before, after, strict=True)
                )
            )
        return {"scales": scales, "moved": moved}

    outcome = equals_one_device(build, run, rtol=4 * 2.0**-11, floor=2.0**-11)
    assert outcome.result == {
        "scales": [256.0, 256.0, 512.0, 512.0],
        "moved": [False, True, True, True],
    }


# How a metric's targets and predictions look. Unnamed metrics take a column of
# probabilities.
SHAPES: dict[str, str] = {
    **dict.fromkeys(
        ["SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy"], "sparse"
    ),
    **dict.fromkeys(["SparseCategoricalCrossentropy"], "sparse"),
    **dict.fromkeys(
        ["CategoricalAccuracy", "TopKCategoricalAccuracy", "CategoricalCrossentropy"],
        "one_hot",
    ),
    **dict.fromkeys(
        ["CategoricalHinge", "KLDivergence", "F1Score", "FBetaScore", "OneHotIoU"],
        "one_hot",
    ),
    **dict.fromkeys(
        ["OneHotMeanIoU", "ConcordanceCorrelation", "PearsonCorrelation"], "one_hot"
    ),
    **dict.fromkeys(["CosineSimilarity", "R2Score"], "one_hot"),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "PrecisionAtRecall": {"recall": 0.6},
    "RecallAtPrecision": {"precision": 0.6},
    "SensitivityAtSpecificity": {"specificity": 0.6},
    "SpecificityAtSensitivity": {"sensitivity": 0.6},
    "IoU": {"num_classes": 2, "target_class_ids": [1]},
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
# Metrics of values alone, which `compile` cannot use.
OF_VALUES = {"Mean", "Sum"}
METRICS = public_classes(keras.metrics, keras.metrics.Metric, set())


def targets_and_head(shape: str) -> tuple[np.ndarray, Any]:
    """Targets of a shape and the model's last activation."""
    if shape == "sparse":
        return Y, "softmax"
    if shape == "one_hot":
        return np.eye(3, dtype="float32")[Y], "softmax"
    return (Y[:, None] == 1).astype("float32"), "sigmoid"


@pytest.mark.parametrize("shape", ["column", "sparse", "one_hot"])
def test_every_metric(shape: str) -> None:
    """All metrics of a shape in one model, weighted and not, over batches with a tail."""
    names = [
        name
        for name in METRICS
        if name not in OF_VALUES and SHAPES.get(name, "column") == shape
    ]
    assert names
    y, activation = targets_and_head(shape)
    weights = np.linspace(0.1, 2.0, len(X), dtype="float32")

    def build() -> keras.Model:
        units = 1 if shape == "column" else 3
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(units, activation=activation)]
        )
        plain = [
            METRICS[name](name=name.lower(), **ARGUMENTS.get(name, {}))
            for name in names
        ]
        weighted = [
            METRICS[name](name=f"weighted_{name.lower()}", **ARGUMENTS.get(name, {}))
            for name in names
        ]
        loss = "sparse_categorical_crossentropy" if shape == "sparse" else "mse"
        model.compile(
            optimizer="sgd", loss=loss, metrics=plain, weighted_metrics=weighted
        )
        return model

    def run(model: keras.Model) -> Any:
        return model.evaluate(
            X, y, sample_weight=weights, batch_size=8, return_dict=True, verbose=0
        )

    equals_one_device(build, run)


class Norms(keras.Model):
    """Tracks the size of its inputs, beside what `compile` names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(3)
        self.mean, self.sum = (
            keras.metrics.Mean(name="mean_norm"),
            keras.metrics.Sum(name="sum_norm"),
        )

    def call(self, inputs: Any) -> Any:
        return self.head(inputs)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        squares = keras.ops.sum(keras.ops.square(x), axis=-1)
        self.mean.update_state(squares)
        self.sum.update_state(squares)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_metrics_of_values() -> None:
    """`Mean` and `Sum` track values that a model computes."""

    def build() -> keras.Model:
        model = Norms()
        model.compile(
            optimizer="sgd",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    outcome = equals_one_device(build, fit_only(X, Y, batch_size=8))
    squares = np.sum(np.square(X), axis=-1)
    harness.assert_close_tree(
        outcome.result["sum_norm"], [float(squares.sum())] * 2, "sum_norm"
    )
    harness.assert_close_tree(
        outcome.result["mean_norm"], [float(squares.mean())] * 2, "mean_norm"
    )


@pytest.mark.parametrize(
    "layer",
    ["SpectralNormalization", "GroupNormalization", "UnitNormalization", "attention"],
)
def test_layers_with_state_or_statistics(layer: str) -> None:
    """Statistics within a row, and state that a forward pass updates, know no replicas."""

    def build() -> keras.Model:
        middle: list[layers.Layer] = {
            "SpectralNormalization": [layers.SpectralNormalization(layers.Dense(6))],
            "GroupNormalization": [layers.Dense(6), layers.GroupNormalization(2)],
            "UnitNormalization": [layers.Dense(6), layers.UnitNormalization()],
            "attention": [layers.Reshape((3, 2)), SelfAttention(), layers.Flatten()],
        }[layer]
        model = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss=loss)
        return model

    equals_one_device(build, fit_only(X, Y, batch_size=8))


class SelfAttention(layers.Layer):
    """A sequence that attends to itself, with dropout on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 2, dropout=0.2, seed=3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.attention(inputs, inputs, training=training)


def test_the_strategy_is_there() -> None:
    """Two things are compared above: building under a strategy is seen as such."""
    with harness.mirrored(4).scope():
        assert kd.has_strategy()
    assert not kd.has_strategy()

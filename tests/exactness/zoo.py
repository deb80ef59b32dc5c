"""The drawn cases of the property test: small models of every kind, their data and the
way the data is fed.

A `Case` is a plain description that hypothesis draws and prints; `build_model`,
`make_data` and `run_case` turn it into a compiled model, arrays, and a training run.
All models are tiny: most of the time here is compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops, regularizers, tree

import keras_distribute as kd

REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight", "mean", "scalar")
INPUTS = ("numpy", "tf.data", "generator", "pydataset")


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer and the options that every Keras optimizer has."""

    name: str = "SGD"
    clip: str | None = None
    weight_decay: float | None = None
    accumulate: int | None = None
    ema: str | None = None


@dataclass(frozen=True)
class Case:
    """One drawn training run."""

    kind: str
    flavour: int
    replicas: int
    batch_size: int
    samples: int
    reduction: str
    optimizer: OptimizerChoice
    weights: str = "none"
    inputs: str = "numpy"
    steps_per_execution: int = 1
    shuffle: bool = False
    validate: bool = False
    epochs: int = 2


# Well-conditioned on purpose: a normalised update `m / (sqrt(v) + epsilon)` of a
# gradient that is zero up to rounding is anything between -1 and 1, on one device as
# well, so the epsilons are far above float32 rounding. Lion takes a sign and has no
# epsilon: the models have no gradient that is zero but for rounding (no bias before a
# normalization).
OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "SGD": lambda **options: keras.optimizers.SGD(0.05, momentum=0.9, **options),
    "Adam": lambda **options: keras.optimizers.Adam(0.02, epsilon=1e-2, **options),
    "AdamW": lambda **options: keras.optimizers.AdamW(
        0.02, epsilon=1e-2, **{"weight_decay": 0.01, **options}
    ),
    "RMSprop": lambda **options: keras.optimizers.RMSprop(
        0.01, epsilon=1e-2, **options
    ),
    "Adagrad": lambda **options: keras.optimizers.Adagrad(
        0.05, epsilon=1e-3, **options
    ),
    "Lion": lambda **options: keras.optimizers.Lion(0.002, **options),
}
CLIPS = {"clipnorm": 0.3, "global_clipnorm": 0.5, "clipvalue": 0.05}
EMAS: dict[str, dict[str, Any]] = {
    "at the end": {"use_ema": True, "ema_momentum": 0.8},
    "every 2 steps": {
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 2,
    },
}


def make_optimizer(choice: OptimizerChoice) -> keras.optimizers.Optimizer:
    """The Keras optimizer of a choice."""
    options: dict[str, Any] = {}
    if choice.clip is not None:
        options[choice.clip] = CLIPS[choice.clip]
    if choice.weight_decay is not None:
        options["weight_decay"] = choice.weight_decay
    if choice.accumulate is not None:
        options["gradient_accumulation_steps"] = choice.accumulate
    if choice.ema is not None:
        options.update(EMAS[choice.ema])
    return OPTIMIZERS[choice.name](**options)


def scalar_crossentropy(y_true: Any, y_pred: Any) -> Any:
    """A loss function that returns one number for the batch, as users write them."""
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    )


def scalar_squared_error(y_true: Any, y_pred: Any) -> Any:
    """The same, for a regression."""
    return ops.mean(ops.square(ops.reshape(y_true, (-1, 1)) - y_pred))


def class_loss(reduction: str) -> Any:
    """A classification loss with the reduction."""
    if reduction == "scalar":
        return scalar_crossentropy
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )


def value_loss(reduction: str) -> Any:
    """A regression loss with the reduction."""
    if reduction == "scalar":
        return scalar_squared_error
    return keras.losses.MeanSquaredError(reduction=reduction)


class TwoInputs(keras.Model):
    """A subclassed model over a dictionary of inputs, built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = layers.Dense(5, activation="tanh")
        self.right = layers.Dense(5, activation="tanh")
        self.head = layers.Dense(3)

    def call(self, inputs: dict[str, Any]) -> Any:
        return self.head(self.left(inputs["a"]) * self.right(inputs["b"]))


class Penalty(layers.Layer):
    """Adds a sum over the batch to the loss: the sum, not the mean, whatever the number
    of replicas.
    """

    def call(self, inputs: Any) -> Any:
        self.add_loss(1e-2 * ops.sum(ops.square(inputs)))
        return inputs


class OwnStep(keras.Model):
    """A model with its own `train_step`, in the form of Keras's guide for JAX."""

    own_mean = False

    def loss_and_state(
        self, trainable: Any, non_trainable: Any, x: Any, y: Any, weight: Any
    ) -> Any:
        """The loss with what the step needs beside it."""
        y_pred, non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=True
        )
        if self.own_mean:
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, y_pred, from_logits=True
                )
            )
        else:
            loss = self.compute_loss(x, y, y_pred, weight)
        return loss, (y_pred, non_trainable)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer_state, metric_state = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.loss_and_state, has_aux=True)
        (loss, (y_pred, non_trainable)), gradients = gradient(
            trainable, non_trainable, x, y, weight
        )
        trainable, optimizer_state = self.optimizer.stateless_apply(
            optimizer_state, gradients, trainable
        )
        logs: dict[str, Any] = {
            "norm": ops.sqrt(sum(ops.sum(ops.square(one)) for one in gradients))
        }
        updated: list[Any] = []
        for metric in self.metrics:
            mine = metric_state[len(updated) : len(updated) + len(metric.variables)]
            if metric.name == "loss":
                mine = metric.stateless_update_state(mine, loss)
            else:
                mine = metric.stateless_update_state(
                    mine, y, y_pred, sample_weight=weight
                )
            result = metric.stateless_result(mine)
            logs.update(result if isinstance(result, dict) else {metric.name: result})
            updated += mine
        return logs, (trainable, non_trainable, optimizer_state, updated)


class OwnMeanStep(OwnStep):
    """The step whose loss is a bare `ops.mean`."""

    own_mean = True


def _dense(case: Case) -> keras.Model:
    activation = ("tanh", "softplus")[case.flavour]
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(7, activation=activation), layers.Dense(3)]
    )


def _functional(case: Case) -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    joined = layers.concatenate([layers.Dense(5, activation="tanh")(a), b])
    outputs = {
        "kind": layers.Dense(3, name="kind")(joined),
        "value": layers.Dense(1, name="value")(joined),
    }
    return keras.Model({"a": a, "b": b}, outputs)


def _cnn(case: Case) -> keras.Model:
    # No bias before a normalization: its gradient is zero but for rounding.
    normalization = layers.BatchNormalization(
        momentum=0.8, synchronized=kd.has_strategy()
    )
    tail = (
        [layers.GlobalAveragePooling2D()]
        if case.flavour == 0
        else [layers.MaxPooling2D(), layers.Flatten()]
    )
    convolution = layers.Conv2D(4, 3, use_bias=False)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            convolution,
            normalization,
            layers.Activation("tanh"),
            *tail,
            layers.Dense(3),
        ]
    )


def _recurrent(case: Case) -> keras.Model:
    cell = layers.LSTM if case.flavour % 2 == 0 else layers.GRU
    embedding = layers.Embedding(12, 4, mask_zero=True)
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            embedding,
            cell(4, return_sequences=case.flavour >= 2),
            layers.Dense(3),
        ]
    )


def _random(case: Case) -> keras.Model:
    noise = layers.GaussianNoise(0.1) if case.flavour == 0 else layers.AlphaDropout(0.2)
    hidden = layers.Dense(8, activation="tanh")
    return keras.Sequential(
        [keras.Input((6,)), noise, hidden, layers.Dropout(0.4), layers.Dense(3)]
    )


def _regularized(case: Case) -> keras.Model:
    kernel = regularizers.L1L2(l1=1e-3, l2=1e-2)
    hidden = layers.Dense(
        6,
        activation="tanh",
        kernel_regularizer=kernel,
        activity_regularizer=regularizers.L2(1e-2),
    )
    extra = [Penalty()] if case.flavour == 1 else []
    return keras.Sequential(
        [keras.Input((6,)), hidden, *extra, layers.Dense(3, bias_regularizer="l2")]
    )


def _own_step(case: Case) -> keras.Model:
    inputs = keras.Input((6,))
    outputs = layers.Dense(3)(layers.Dense(6, activation="tanh")(inputs))
    return (OwnStep, OwnMeanStep)[case.flavour](inputs, outputs)


def _values(case: Case) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(1)]
    )


BUILDERS: dict[str, Callable[[Case], keras.Model]] = {
    "dense": _dense,
    "functional": _functional,
    "subclassed": lambda case: TwoInputs(),
    "cnn": _cnn,
    "recurrent": _recurrent,
    "random": _random,
    "regularized": _regularized,
    "own_step": _own_step,
    "values": _values,
}
FLAVOURS = {"subclassed": 1, "recurrent": 4, "functional": 1, "values": 1}


def build_model(case: Case) -> keras.Model:
    """The compiled model of a case."""
    model = BUILDERS[case.kind](case)
    options: dict[str, Any] = {
        "optimizer": make_optimizer(case.optimizer),
        "steps_per_execution": case.steps_per_execution,
    }
    if case.kind == "functional":
        # Mixed losses, the second one with another reduction than the first.
        loss = {"kind": class_loss(case.reduction), "value": keras.losses.Huber()}
        metrics = {
            "kind": ["accuracy"],
            "value": [keras.metrics.RootMeanSquaredError()],
        }
        model.compile(
            loss=loss,
            loss_weights={"kind": 1.0, "value": 0.5},
            metrics=metrics,
            **options,
        )
    elif case.kind == "values":
        root = keras.metrics.RootMeanSquaredError(name="weighted_root")
        model.compile(
            loss=value_loss(case.reduction),
            metrics=["mae"],
            weighted_metrics=[root],
            **options,
        )
    else:
        model.compile(loss=class_loss(case.reduction), metrics=["accuracy"], **options)
    return model


def make_data(case: Case) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights (or None) of a case."""
    rng = np.random.default_rng(case.samples)
    rows = case.samples
    labels = rng.integers(0, 3, rows).astype("int32")
    weight: Any = (0.2 + rng.random(rows)).astype("float32")
    if case.kind in ("functional", "subclassed"):
        x: Any = {
            "a": _normal(rng, rows, 4),
            "b": _normal(rng, rows, 3 if case.kind == "functional" else 4),
        }
    elif case.kind == "cnn":
        x = _normal(rng, rows, 6, 6, 2)
    elif case.kind == "recurrent":
        x = rng.integers(1, 12, (rows, 5)).astype("int32")
        # Right-padded rows of every length; the first token stays, so that no row is
        # empty.
        x[np.arange(5) > rng.integers(0, 5, (rows, 1))] = 0
    else:
        x = _normal(rng, rows, 6)
    y: Any = labels
    if case.kind == "functional":
        y = {"kind": labels, "value": _normal(rng, rows, 1)}
        weight = {"kind": weight, "value": weight[::-1].copy()}
    elif case.kind == "values":
        y = _normal(rng, rows, 1)
    elif case.kind == "recurrent" and case.flavour >= 2:
        y = rng.integers(0, 3, (rows, 5)).astype("int32")
        # Keras 3.15.1 does not multiply a mask of tokens by weights of rows.
        weight = np.repeat(weight[:, None], 5, axis=1)
    return x, y, weight if case.weights == "sample" else None


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype("float32")


class Batches(keras.utils.PyDataset):
    """A `PyDataset` over arrays, with the tail that is left."""

    def __init__(self, data: Any, batch_size: int) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size

    def __len__(self) -> int:
        return math.ceil(len(tree.flatten(self.data)[0]) / self.batch_size)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return tree.map_structure(lambda leaf: leaf[rows], self.data)


def feed(data: tuple[Any, ...], inputs: str, batch_size: int) -> Any:
    """The data as a `tf.data.Dataset`, an endless generator, or a `PyDataset`."""
    if inputs == "tf.data":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    batches = Batches(data, batch_size)
    if inputs == "pydataset":
        return batches

    def generate() -> Iterator[Any]:
        while True:
            for index in range(len(batches)):
                yield batches[index]

    return generate()


def run_case(case: Case) -> Callable[[keras.Model], dict[str, Any]]:
    """Fit, evaluate and predict, fed as the case says."""
    x, y, weight = make_data(case)
    packed = (x, y) if weight is None else (x, y, weight)
    classes = {0: 0.5, 1: 1.0, 2: 2.5} if case.weights == "class" else None

    # Keras runs whole executions: a generator is read past an epoch whose steps they do
    # not divide.
    steps = (
        math.ceil(case.samples / case.batch_size / case.steps_per_execution)
        * case.steps_per_execution
    )

    def run(model: keras.Model) -> dict[str, Any]:
        options: dict[str, Any] = {
            "epochs": case.epochs,
            "verbose": 0,
            "class_weight": classes,
        }
        if case.inputs == "numpy":
            if case.validate:
                options["validation_data"] = packed
            rows = {"batch_size": case.batch_size}
            history = model.fit(
                x, y, sample_weight=weight, shuffle=case.shuffle, **rows, **options
            )
            evaluation = model.evaluate(
                x, y, sample_weight=weight, return_dict=True, verbose=0, **rows
            )
            predictions = model.predict(x, verbose=0, **rows)
        else:
            limit: dict[str, Any] = {}
            if case.validate:
                options["validation_data"] = feed(packed, case.inputs, case.batch_size)
            if case.inputs == "generator":
                options["steps_per_epoch"] = limit["steps"] = steps
                options["validation_steps"] = steps if case.validate else None
            shuffle = case.shuffle and case.inputs == "pydataset"
            history = model.fit(
                feed(packed, case.inputs, case.batch_size), shuffle=shuffle, **options
            )
            again = feed(packed, case.inputs, case.batch_size)
            evaluation = model.evaluate(again, return_dict=True, verbose=0, **limit)
            predictions = model.predict(
                feed((x,), case.inputs, case.batch_size), verbose=0, **limit
            )
        return {
            "history": history.history,
            "evaluation": evaluation,
            "predictions": predictions,
        }

    return run

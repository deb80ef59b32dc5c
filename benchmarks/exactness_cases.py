"""The cases of `exactness.py`: each builds a model from a seed, trains it, evaluates
and predicts.

A case is a function of a `Layout`, which says where to run, and of the number of
samples; it returns whatever has to be equal: weights, the history of `fit`, the results
of `evaluate`, predictions.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUM_DEVICES = 4

Result = dict[str, Any]
Case = Callable[["Layout", int], Result]
EVEN, ODD = 64, 70  # samples, in batches of 32: two full batches, and a third of 6 rows
CASES: dict[str, tuple[Case, tuple[int, ...]]] = {}


def case(name: str, *sizes: int) -> Callable[[Case], Case]:
    """Registers a case, to be run with an even number of samples and with an odd one
    unless `sizes` says otherwise.
    """

    def register(function: Case) -> Case:
        CASES[name] = function, sizes or (EVEN, ODD)
        return function

    return register


class Layout:
    """Where a case runs, and the few words in which the three ways differ."""

    def __init__(self, name: str) -> None:
        self.is_one = name == "one device"
        self.is_ours = name == "keras_distribute"
        if self.is_ours:
            import keras_distribute as kd

            kd.config.set_cpu_devices(NUM_DEVICES)
        import jax

        if not self.is_one and not self.is_ours:
            jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
        assert len(jax.devices()) == (1 if self.is_one else NUM_DEVICES)

    @contextlib.contextmanager
    def scope(self, num_replicas: int = NUM_DEVICES) -> Iterator[None]:
        """Around the building of a model. `DataParallel` wants to stay in force
        afterwards, so it is left set.
        """
        import keras

        keras.utils.set_random_seed(7)
        if self.is_ours:
            import keras_distribute as kd

            with kd.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]).scope():
                yield
            return
        if not self.is_one:
            devices = keras.distribution.list_devices()[:num_replicas]
            keras.distribution.set_distribution(
                keras.distribution.DataParallel(devices=devices)
            )
        yield


# The data and the models that the cases share.
# -----------------------------------------------------------------------


def rows(n: int, features: int = 8, classes: int = 3, seed: int = 0) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features)).astype("float32")
    y = (x @ rng.normal(size=(features, classes))).argmax(axis=1)
    return x, y.astype("int32")


def dense(*extra: Any, classes: int = 3) -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh"),
            *extra,
            layers.Dense(classes),
        ]
    )


def compiled(model: Any, **options: Any) -> Any:
    import keras

    settings: dict[str, Any] = {
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    model.compile(**(settings | options))
    return model


def trained(
    model: Any, x: Any, y: Any, *, batch_size: int = 32, epochs: int = 3, **options: Any
) -> Result:
    """Trains without shuffling, evaluates and predicts on the same rows."""
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **options
    )
    return {
        "history": list(history.history.values()),
        **measured(model, x, y, batch_size),
    }


def measured(model: Any, x: Any, y: Any, batch_size: int = 32) -> Result:
    return {
        "evaluate": model.evaluate(x, y, batch_size=batch_size, verbose=0),
        "predict": model.predict(x, batch_size=batch_size, verbose=0),
        "weights": model.get_weights(),
    }


# The cases.
# --------------------------------------------------------------------------------------


@case("fit, evaluate, predict", EVEN, ODD)
def arrays(layout: Layout, n: int) -> Result:
    with layout.scope():
        model = compiled(dense())
    return trained(model, *rows(n))


@case("a last batch of 1 row", 65)
def one_row(layout: Layout, n: int) -> Result:
    return arrays(layout, n)


@case("fewer rows than devices", 3)
def few_rows(layout: Layout, n: int) -> Result:
    return arrays(layout, n)


@case("every batch of 30 rows", 90)
def batches_of_30(layout: Layout, n: int) -> Result:
    with layout.scope():
        model = compiled(dense())
    return trained(model, *rows(n), batch_size=30)


@case("`validation_data`")
def validation(layout: Layout, n: int) -> Result:
    with layout.scope():
        model = compiled(dense())
    return trained(
        model, *rows(EVEN), validation_data=rows(n, seed=1), validation_batch_size=32
    )


@case("`sample_weight`, weighted metrics")
def sample_weight(layout: Layout, n: int) -> Result:
    import numpy as np

    x, y = rows(n)
    with layout.scope():
        model = compiled(dense(), weighted_metrics=["accuracy"])
    return trained(model, x, y, sample_weight=np.linspace(0, 2, n, dtype="float32"))


@case("`class_weight`")
def class_weight(layout: Layout, n: int) -> Result:
    with layout.scope():
        model = compiled(dense())
    return trained(model, *rows(n), class_weight={0: 0.5, 1: 2.0, 2: 1.0})


def _register_reductions() -> None:
    for reduction in ("sum", "mean", "mean_with_sample_weight"):

        @case(f'loss `reduction="{reduction}"`, weighted')
        def reduced(layout: Layout, n: int, reduction: str = reduction) -> Result:
            import keras
            import numpy as np

            x, y = rows(n)
            with layout.scope():
                loss = keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction=reduction
                )
                model = compiled(
                    dense(), loss=loss, optimizer=keras.optimizers.SGD(0.01)
                )
            return trained(
                model, x, y, sample_weight=np.linspace(0, 2, n, dtype="float32")
            )


_register_reductions()


@case("a loss function that returns a scalar")
def scalar_loss(layout: Layout, n: int) -> Result:
    from keras import ops

    def loss(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(ops.one_hot(ops.reshape(y_true, (-1,)), 3) - y_pred))

    with layout.scope():
        model = compiled(dense(), loss=loss)
    return trained(model, *rows(n))


@case("`add_loss` of a sum over the batch, regularizers")
def added_loss(layout: Layout, n: int) -> Result:
    from keras import layers, ops

    class Penalty(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(1e-3 * ops.sum(ops.square(x)))
            return x

    with layout.scope():
        model = compiled(
            dense(
                Penalty(),
                layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"),
            )
        )
    return trained(model, *rows(n))


@case("`mask_zero`, an LSTM, rows of different lengths")
def masked(layout: Layout, n: int) -> Result:
    import keras
    import numpy as np
    from keras import layers

    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (n, 12))
    tokens[np.arange(12)[None] >= rng.integers(1, 13, n)[:, None]] = 0
    with layout.scope():
        embedding, lstm = (
            layers.Embedding(20, 8, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
        )
        model = compiled(
            keras.Sequential([keras.Input((12,)), embedding, lstm, layers.Dense(20)])
        )
    return trained(model, tokens, np.roll(tokens, -1, axis=1))


@case("two inputs, two outputs, loss weights")
def two_outputs(layout: Layout, n: int) -> Result:
    import keras
    from keras import layers

    x, y = rows(n)
    with layout.scope():
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        both = layers.Dense(16, activation="tanh")(layers.Concatenate()([a, b]))
        outputs = {
            "label": layers.Dense(3, name="label")(both),
            "value": layers.Dense(1, name="value")(both),
        }
        model = compiled(
            keras.Model({"a": a, "b": b}, outputs),
            loss={
                "label": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "value": "mse",
            },
            loss_weights={"label": 1.0, "value": 0.3},
            metrics=None,
        )
    return trained(
        model, {"a": x, "b": x[::-1].copy()}, {"label": y, "value": x[:, :1]}
    )


def _batch_norm(layout: Layout, n: int, **options: Any) -> Result:
    from keras import layers

    with layout.scope():
        model = compiled(dense(layers.BatchNormalization(momentum=0.9, **options)))
    return trained(model, *rows(n))


@case("BatchNormalization by the whole batch [1]")
def whole_batch_norm(layout: Layout, n: int) -> Result:
    return _batch_norm(layout, n, **({"synchronized": True} if layout.is_ours else {}))


@case("BatchNormalization by each replica's rows [2]")
def local_batch_norm(layout: Layout, n: int) -> Result:
    from keras import layers, ops

    if not layout.is_one:
        return _batch_norm(layout, n)

    class Grouped(layers.BatchNormalization):
        """The definition, written out on one device: groups of rows, normalised one by
        one, statistics averaged.
        """

        def call(self, inputs: Any, training: bool | None = None) -> Any:
            if not training or inputs.shape[0] % NUM_DEVICES:
                return super().call(inputs, training=training)
            groups = ops.split(inputs, NUM_DEVICES, axis=0)
            means = [ops.mean(group, axis=0) for group in groups]
            variances = [ops.var(group, axis=0) for group in groups]
            for moving, values in (
                (self.moving_mean, means),
                (self.moving_variance, variances),
            ):
                moving.assign(
                    moving * self.momentum
                    + sum(values) / NUM_DEVICES * (1 - self.momentum)
                )
            normalised = [
                (group - mean) / ops.sqrt(variance + self.epsilon)
                for group, mean, variance in zip(groups, means, variances, strict=True)
            ]
            return ops.concatenate(normalised, axis=0) * self.gamma + self.beta

    with layout.scope():
        model = compiled(dense(Grouped(momentum=0.9)))
    return trained(model, *rows(n))


@case("Dropout and GaussianNoise")
def random(layout: Layout, n: int) -> Result:
    from keras import layers

    with layout.scope():
        model = compiled(
            dense(layers.Dropout(0.4, seed=3), layers.GaussianNoise(0.2, seed=4))
        )
    return trained(model, *rows(n))


@case("AUC, F1, top-k and precision metrics")
def metrics(layout: Layout, n: int) -> Result:
    import keras
    import numpy as np

    x, y = rows(n)
    with layout.scope():
        chosen = [
            keras.metrics.AUC(multi_label=True, from_logits=True),
            keras.metrics.F1Score(),
            keras.metrics.TopKCategoricalAccuracy(2),
            keras.metrics.Precision(),
        ]
        model = compiled(
            dense(),
            loss=keras.losses.CategoricalCrossentropy(from_logits=True),
            metrics=chosen,
        )
    return trained(model, x, np.eye(3, dtype="float32")[y])


@case("a metric that assigns a maximum")
def maximum(layout: Layout, n: int) -> Result:
    import keras
    from keras import ops

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.largest = self.add_variable((), "zeros", name="largest")

        def update_state(
            self, y_true: Any, y_pred: Any, sample_weight: Any = None
        ) -> None:
            self.largest.assign(ops.maximum(self.largest.value, ops.max(y_pred)))

        def result(self) -> Any:
            return self.largest.value

    with layout.scope():
        model = compiled(dense(), metrics=[Largest()])
    return trained(model, *rows(n))


def _custom_step(layout: Layout, n: int, *, compute_loss: bool) -> Result:
    """A model whose `train_step` is its own, written for Keras on JAX."""
    import jax
    import keras
    from keras import ops

    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense()

        def call(self, x: Any, training: bool | None = None) -> Any:
            return self.inner(x, training=training)

        def loss_of(self, trainable: Any, others: Any, x: Any, y: Any) -> Any:
            y_pred, others = self.stateless_call(trainable, others, x, training=True)
            if compute_loss:
                return self.compute_loss(x, y, y_pred), others
            log_probabilities = ops.log_softmax(y_pred)
            return -ops.mean(
                ops.sum(ops.one_hot(y, 3) * log_probabilities, axis=-1)
            ), others

        def train_step(self, state: Any, data: Any) -> Any:
            trainable, others, slots, metrics = state
            x, y = data
            gradient = jax.value_and_grad(self.loss_of, has_aux=True)
            (loss, others), grads = gradient(trainable, others, x, y)
            trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
            return {"loss": loss}, (trainable, others, slots, metrics)

    with layout.scope():
        model = compiled(Custom(), metrics=None)
        model.build((None, 8))
    return trained(model, *rows(n))


@case("a custom `train_step` with `compute_loss`")
def custom_compute_loss(layout: Layout, n: int) -> Result:
    return _custom_step(layout, n, compute_loss=True)


@case("a custom `train_step` with `ops.mean`")
def custom_mean(layout: Layout, n: int) -> Result:
    return _custom_step(layout, n, compute_loss=False)


@case("`steps_per_execution=4`")
def steps_per_execution(layout: Layout, n: int) -> Result:
    with layout.scope():
        model = compiled(dense(), steps_per_execution=4)
    return trained(model, *rows(n), batch_size=16)


def _register_optimizers() -> None:
    optimizers: list[dict[str, Any]] = [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 3},
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.1},
        {"weight_decay": 0.01, "momentum": 0.9},
    ]
    for options in optimizers:

        @case(f"`{', '.join(f'{name}={value}' for name, value in options.items())}`")
        def optimizer(
            layout: Layout, n: int, options: dict[str, Any] = options
        ) -> Result:
            import keras

            with layout.scope():
                model = compiled(
                    dense(), optimizer=keras.optimizers.SGD(0.1, **options)
                )
            return trained(model, *rows(n))


_register_optimizers()


@case("mixed float16, loss scaling, a row that overflows [3]")
def overflow(layout: Layout, n: int) -> Result:
    import keras
    import numpy as np

    x, y = rows(n)
    x[37] = 1e3
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with layout.scope():
            inner = keras.optimizers.SGD(0.01)
            optimizer = keras.optimizers.LossScaleOptimizer(
                inner, initial_scale=2.0**10
            )
            linear = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
            model = compiled(linear, optimizer=optimizer, loss="mse", metrics=None)
        trained(model, x, np.eye(3, dtype="float32")[y], epochs=2)
    finally:
        keras.config.set_dtype_policy(before)
    finite = all(np.isfinite(weight).all() for weight in model.get_weights())
    return {
        "scale": float(optimizer.dynamic_scale.value),
        "steps": int(inner.iterations.value),
        "finite": finite,
    }


@case("`train_on_batch`, `test_on_batch`, `predict_on_batch`", 32, 30)
def on_batch(layout: Layout, n: int) -> Result:
    x, y = rows(n)
    with layout.scope():
        model = compiled(dense())
    return {
        "train": [model.train_on_batch(x, y) for _ in range(3)],
        "test": model.test_on_batch(x, y),
        "predict": model.predict_on_batch(x),
        "weights": model.get_weights(),
    }


@case("a generator")
def generator(layout: Layout, n: int) -> Result:
    x, y = rows(n)

    def batches() -> Iterator[tuple[Any, Any]]:
        for start in range(0, n, 32):
            yield x[start : start + 32], y[start : start + 32]

    with layout.scope():
        model = compiled(dense())
    history = model.fit(batches(), epochs=1, verbose=0)
    return {"history": list(history.history.values()), **measured(model, x, y)}


@case("a `PyDataset`")
def pydataset(layout: Layout, n: int) -> Result:
    import keras

    x, y = rows(n)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-n // 32)

        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return x[32 * i : 32 * (i + 1)], y[32 * i : 32 * (i + 1)]

    with layout.scope():
        model = compiled(dense())
    history = model.fit(Batches(), epochs=3, shuffle=False, verbose=0)
    return {"history": list(history.history.values()), **measured(model, x, y)}


@case("saved, then loaded and trained on 1, 2 and 4 replicas")
def saved(layout: Layout, n: int) -> Result:
    import keras

    x, y = rows(n)
    with layout.scope():
        model = compiled(dense())
    trained(model, x, y, epochs=1)
    results: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        for num_replicas in (1, 2, 4):
            with layout.scope(num_replicas):
                loaded = keras.models.load_model(path)
            again = trained(loaded, x, y, epochs=1)
            results |= {
                f"{key} on {num_replicas}": value for key, value in again.items()
            }
    return results


@case("two strategies in one process")
def two_strategies(layout: Layout, n: int) -> Result:
    results: Result = {}
    for num_replicas in (2, 4):
        with layout.scope(num_replicas):
            model = compiled(dense())
        results |= {
            f"{key} on {num_replicas}": value
            for key, value in trained(model, *rows(n)).items()
        }
    return results


@case("300 steps in one call of `fit`", 2400)
def many_steps(layout: Layout, n: int) -> Result:
    with layout.scope():
        model = compiled(dense())
    return trained(model, *rows(n), batch_size=8, epochs=1)

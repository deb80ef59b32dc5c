"""Less common ways to train, and data of odd structure: equal to one device as well."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.support import mirrored

from .harness import equals_one_device, fit_evaluate_predict, fit_only, table

pytestmark = pytest.mark.timeout(120)

X, Y = table(22)


def compiled(
    *body: layers.Layer, shape: tuple[int, ...] = (6,), **options: Any
) -> keras.Model:
    """A compiled classifier."""
    model = keras.Sequential([keras.Input(shape), *body, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.5),
        loss=loss,
        metrics=["accuracy"],
        **options,
    )
    return model


def test_fit_inside_the_scope() -> None:
    """Inside the scope or outside it, all is the same."""
    equals_one_device(
        lambda: compiled(layers.Dense(4)),
        fit_evaluate_predict(X, Y, batch_size=8),
        fit_in_scope=True,
    )


def test_run_eagerly() -> None:
    """Nothing compiled, for debugging."""
    run = fit_evaluate_predict(X[:14], Y[:14], batch_size=8, epochs=1)
    equals_one_device(
        lambda: compiled(layers.Dense(4), layers.Dropout(0.3), run_eagerly=True), run
    )


def test_steps_go_on_as_they_were_made() -> None:
    """Until the model is compiled again, whatever its attributes say."""

    def run(model: keras.Model) -> Any:
        model.fit(X[:4], Y[:4], verbose=0)
        model.jit_compile = True
        return model.fit(X[:11], Y[:11], batch_size=8, shuffle=False, verbose=0).history

    equals_one_device(lambda: compiled(jit_compile=False), run)


def test_unbuilt_model_is_built_by_its_first_batch_outside_the_scope() -> None:
    """The variables that the first batch makes belong to the model's strategy."""

    def build() -> keras.Model:
        model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(
            optimizer="adamw",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    outcome = equals_one_device(build, fit_evaluate_predict(X, Y, batch_size=8))
    assert {len(variable.value.devices()) for variable in outcome.model.variables} == {
        4
    }


class WithUnusedLayer(keras.Model):
    """A layer of which no step ever makes the variables, as in KerasHub's D-FINE."""

    def __init__(self) -> None:
        super().__init__()
        self.used = layers.Dense(3)
        self.unused = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.used(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trained", [False, True])
def test_layer_that_is_never_built(trained: bool) -> None:
    """`predict` takes the first batch for building it, and all of them then."""

    def build() -> keras.Model:
        model = WithUnusedLayer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    def predict(model: keras.Model) -> Any:
        batches = ((X[start : start + 8],) for start in range(0, len(X), 8))
        return [model.predict(X, batch_size=8), model.predict(batches)]

    both = fit_evaluate_predict(X, Y, batch_size=8)
    equals_one_device(build, both if trained else predict)


@pytest.mark.parametrize(
    "convert",
    [jnp.asarray, lambda array: array.astype("float64"), lambda array: array.tolist()],
)
def test_arrays_of_other_kinds(convert: Any) -> None:
    """JAX arrays, float64, and lists of rows where Keras takes them."""

    def run(model: keras.Model) -> Any:
        try:
            return model.fit(
                convert(X), Y, batch_size=8, shuffle=False, verbose=0
            ).history
        except ValueError as error:
            return {"error": type(error)}

    equals_one_device(lambda: compiled(layers.Dense(4)), run)


def test_compiled_again() -> None:
    """A model that is compiled again, in the scope, goes on with a new optimizer."""

    def run(model: keras.Model) -> Any:
        first = fit_only(X, Y, batch_size=8)(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizer=keras.optimizers.Adam(0.01, epsilon=1e-2),
            loss=loss,
            metrics=["accuracy"],
        )
        return {"first": first, "second": fit_only(X, Y, batch_size=8)(model)}

    equals_one_device(lambda: compiled(layers.Dense(4)), run, fit_in_scope=True)


def test_layers_frozen_between_fits() -> None:
    """`trainable = False` and a new `compile`: the frozen weights stay."""

    def run(model: keras.Model) -> Any:
        model.layers[0].trainable = False
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        return fit_only(X, Y, batch_size=8)(model)

    outcome = equals_one_device(
        lambda: compiled(layers.Dense(4)), run, fit_in_scope=True
    )
    assert np.array_equal(outcome.initial[0][1], outcome.weights[0][1])


@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict"])
def test_settings_of_jax_that_change_between_steps(kind: str) -> None:
    seen: set[Any] = set()

    class Asking(layers.Layer):
        def call(self, x: Any) -> Any:
            seen.add(jax.config.values["jax_default_matmul_precision"])
            return x

    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((6,)), Asking()])
        model.compile(loss="mse")
    data = (X[:4],) if kind == "predict" else (X[:4], X[:4])
    step = functools.partial(getattr(model, kind), *data, verbose=0)
    step()
    seen.clear()
    with jax.default_matmul_precision("highest"):
        step()
    assert seen == {"highest"}


def test_normalization_adapted_in_the_scope() -> None:
    """Statistics of the data, taken before training."""

    def build() -> keras.Model:
        normalization = layers.Normalization()
        normalization.adapt(X * 3 + 1)
        return compiled(normalization)

    equals_one_device(build, fit_only(X * 3 + 1, Y, batch_size=8))


def test_random_augmentation_and_discretization() -> None:
    """Preprocessing layers inside the model."""
    images = np.random.default_rng(0).random((22, 8, 8, 3)).astype("float32")

    def build() -> keras.Model:
        body = [
            layers.RandomFlip(seed=1),
            layers.RandomTranslation(0.2, 0.2, seed=2),
            layers.Flatten(),
        ]
        return compiled(*body, shape=(8, 8, 3))

    equals_one_device(build, fit_only(images, Y, batch_size=8, epochs=1))


def test_stateful_recurrent_layer() -> None:
    """A state per row, carried from one batch to the next."""
    x = np.random.default_rng(0).normal(size=(24, 4, 2)).astype("float32")
    y = np.arange(24) % 3

    def build() -> keras.Model:
        inputs = keras.Input(batch_shape=(6, 4, 2))
        outputs = layers.Dense(3)(layers.GRU(3, stateful=True)(inputs))
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        return model

    equals_one_device(build, fit_only(x, y, batch_size=6))


class OwnTestAndPredict(keras.Model):
    """A `test_step` and a `predict_step` of its own."""

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        logits, non_trainable = self.stateless_call(trainable, non_trainable, x)
        return {
            "first": logits[0, 0],
            "spread": ops.std(logits),
            "rows": ops.shape(y)[0],
        }, (
            trainable,
            non_trainable,
            metrics,
        )

    def predict_step(self, state: Any, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        logits, non_trainable = self.stateless_call(*state, x)
        return {
            "logits": logits,
            "centred": logits - ops.mean(logits, axis=0),
            "pairs": logits @ logits.T,
        }, non_trainable


class OwnFunctions(keras.Model):
    """What Keras calls for each batch is made by the model itself."""

    def make_train_function(self, force: bool = False) -> None:
        step = jax.jit(self.train_step)
        self.train_function = lambda state, batches: step(state, next(batches))

    def make_test_function(self, force: bool = False) -> None:
        step = jax.jit(self.test_step)
        self.test_function = lambda state, batches: step(state, next(batches))

    def make_predict_function(self, force: bool = False) -> None:
        step = jax.jit(self.predict_step)

        def predict(state: Any, batches: Iterator[Any]) -> Any:
            outputs, non_trainable = step(state, next(batches))
            return outputs, (state[0], non_trainable)

        self.predict_function = predict


class WrappedFunctions(keras.Model):
    """What Keras calls is made around what it would call otherwise."""

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is None or force:
            super().make_train_function(force)
            own = self.train_function
            self.train_function = lambda state, batches: own(state, batches)


@pytest.mark.parametrize("kind", [OwnFunctions, WrappedFunctions])
def test_functions_of_the_model(kind: type[keras.Model]) -> None:
    """They get the rows of each batch, and no others; X has a smaller last batch."""

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        norm = layers.BatchNormalization(synchronized=True)
        hidden = norm(layers.Dense(4)(inputs))
        model = kind(inputs, layers.Dense(3)(hidden))
        model.compile(
            optimizer="sgd",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    equals_one_device(build, fit_evaluate_predict(X, Y, batch_size=8))


def test_own_test_step_and_predict_step() -> None:
    """Results that mix the rows of a batch are those of the whole batch."""

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        model = OwnTestAndPredict(inputs, layers.Dense(3)(inputs))
        model.compile(
            optimizer="sgd",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    def run(model: keras.Model) -> Any:
        x, y = X[:14], Y[:14]
        evaluation = model.evaluate(x, y, batch_size=7, return_dict=True, verbose=0)
        return {
            "evaluation": evaluation,
            "predictions": model.predict(x, batch_size=7, verbose=0),
        }

    equals_one_device(build, run)


class WithPrior(keras.Model):
    """An input that is no batch beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.normalization = layers.BatchNormalization(synchronized=True)
        self.head = layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return (
            self.head(self.normalization(inputs["rows"], training=training))
            + inputs["a_prior"]
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [8, 6])
def test_an_array_that_is_no_batch_beside_the_batch(rows: int) -> None:
    """A vector of three numbers for all rows, named so that it comes first: it belongs
    to every row of every replica.
    """

    def batches() -> Iterator[Any]:
        for start in range(0, 18, rows):
            prior = np.array([0.1, 0.2, 0.3], "float32") * start
            yield (
                {"a_prior": prior, "rows": X[start : start + rows]},
                Y[start : start + rows],
            )

    def build() -> keras.Model:
        model = WithPrior()
        model.compile(
            optimizer="sgd",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    equals_one_device(build, lambda model: model.fit(batches(), verbose=0).history)


def test_early_stopping_and_learning_rate_callbacks() -> None:
    """Callbacks that read results and set variables between epochs."""

    def run(model: keras.Model) -> Any:
        callbacks = [
            keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", patience=1, factor=0.3
            ),
            keras.callbacks.EarlyStopping(
                monitor="val_loss", patience=2, restore_best_weights=True
            ),
        ]
        options = {"batch_size": 8, "epochs": 8, "shuffle": False, "verbose": 0}
        validation = (X[:10], (Y[:10] + 1) % 3)
        return model.fit(
            X, Y, validation_data=validation, callbacks=callbacks, **options
        ).history

    equals_one_device(lambda: compiled(layers.Dense(4)), run)


TWO_VARIABLES_ONE_BUFFER = """
import sys
sys.modules["tensorflow"] = None  # Keras would import it to seed it, which takes 3 s.
import keras, numpy as np
import keras_distribute as kd

kd.config.set_cpu_devices(2)
keras.utils.set_random_seed(0)
with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(3, name="b")])
    average = {"use_ema": True, "ema_momentum": 0.5} if sys.argv[1] == "average" else {}
    model.compile(optimizer=keras.optimizers.SGD(0.1, **average), loss="mse")
x = np.ones((8, 3), "float32")
model.fit(x, x, verbose=0)
if sys.argv[1] == "assigned":
    model.get_layer("b").kernel.assign(model.get_layer("a").kernel)
model.fit(x, x, verbose=0)
model.evaluate(x, x, verbose=0)
assert np.all(np.isfinite(model.optimizer.variables[-1].numpy()))
assert not np.array_equal(model.get_layer("a").kernel.numpy(), model.get_layer("b").kernel.numpy())
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["average", "assigned"])
def test_two_variables_that_share_a_value(how: str) -> None:
    """A weight and its average after a fit, or a variable assigned to another: both can
    be trained on.

    Keras on one device refuses ("Attempt to donate the same buffer twice"). In a
    process of its own, since XLA may end the process when a buffer that several devices
    hold is donated twice.
    """
    command = [sys.executable, "-c", TWO_VARIABLES_ONE_BUFFER, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

"""What Keras is handed as the state of a step is a sequence of the variables' values."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

from keras_distribute.errors import VariableScopeError
from tests.support import assert_close, mirrored_or_default, pack_from

pytestmark = pytest.mark.sampled(8)

GROUPS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
X = np.random.RandomState(0).randn(26, 5).astype("float32")


def built(replicas: int, cls: Any = keras.Sequential) -> keras.Model:
    keras.utils.set_random_seed(0)
    with mirrored_or_default(replicas).scope():
        blocks = [layers.Dense(4), layers.BatchNormalization(synchronized=True)]
        model = cls([keras.Input((5,)), *blocks, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


@pytest.fixture(params=["packed", "one by one"])
def packed(request: Any, monkeypatch: Any) -> None:
    pack_from(monkeypatch, 2 if request.param == "packed" else None)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_callback_looks_through_the_state(replicas: int, packed: None) -> None:
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            state = self._model._jax_state
            assert tuple(state) == GROUPS
            owners = [*[self._model] * 2, self._model.optimizer, self._model]
            names = [*GROUPS[:2], "variables", GROUPS[3]]
            for group, owner, name in zip(state.values(), owners, names, strict=True):
                variables = getattr(owner, name)
                values = [np.asarray(v) for v in variables]
                assert len(group) == len(variables)
                for looked in (
                    list(group),
                    [group[i] for i in range(len(group))],
                    group[:],
                    jax.tree.leaves(group),
                    keras.tree.flatten(group),
                    jax.tree.map(lambda array: array + 0, group),
                    keras.tree.map_structure(lambda array: array + 0, group),
                ):
                    for array, value in zip(looked, values, strict=True):
                        np.testing.assert_array_equal(array, value)
            weights, *_ = state.values()
            seen.append(np.asarray(weights[-2]))

    model = built(replicas)
    model.fit(X, X[:, :1], batch_size=8, verbose=0, callbacks=[Look()])
    assert len(seen) == 4 and (seen[0] != seen[1]).any()
    np.testing.assert_array_equal(seen[-1], model.trainable_variables[-2])


class OfALibrary(keras.Sequential):
    """Puts the values back by itself, as libraries for Keras on JAX do."""

    def _synchronized(self) -> None:
        if not getattr(self, "_jax_state", None) or self._jax_state_synced:
            return
        trained, others, slots, metrics = (self._jax_state.get(name) for name in GROUPS)
        pairs = [
            (self.trainable_variables, trained),
            (self.non_trainable_variables, others),
        ]
        pairs += [(self.optimizer.variables, slots), (self.metrics_variables, metrics)]
        for variables, values in pairs:
            for variable, value in zip(variables, values or [], strict=bool(values)):
                variable.assign(value)
        self._jax_state_synced = True

    jax_state_sync = state_sync = _synchronized


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_library_synchronizes_by_itself(replicas: int, packed: None) -> None:
    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._model.jax_state_sync()

    results = []
    for model in (built(0), built(replicas, OfALibrary)):
        options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(
            X, X[:, :1], validation_data=(X, X[:, :1]), callbacks=[Ask()], **options
        ).history
        values = [*history.values(), model.predict(X, verbose=0)]
        results.append(
            [*values, *model.get_weights(), model.evaluate(X, X[:, :1], verbose=0)]
        )
    plain, ours = results
    assert_close(ours, plain)


@pytest.mark.parametrize("replicas", [1, 4])
def test_what_a_callback_assigns_is_what_the_next_step_starts_from(
    replicas: int, packed: None
) -> None:
    """Of plain Keras, which forgets it, we take the steps one by one."""

    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for variable in self._model.trainable_variables[:1]:
                variable.assign(0.5 * np.asarray(variable))

    plain, ours = built(0), built(replicas)
    for start in range(0, len(X), 8):
        plain.train_on_batch(X[start : start + 8], X[start : start + 8, :1])
        kernel = plain.trainable_variables[0]
        kernel.assign(0.5 * np.asarray(kernel))
    ours.fit(X, X[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[Halve()])
    assert_close(ours.get_weights(), plain.get_weights())


class ReadsItsRate(keras.Sequential):
    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return logs | {"rate": 1 * self.optimizer.learning_rate}, state


class ReadsAWeight(keras.Sequential):
    def predict_step(self, state: Any, data: Any) -> Any:
        outputs, others = super().predict_step(state, data)
        return outputs * self.layers[0].bias[0], others


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_reads_beside_its_state_is_refused(replicas: int) -> None:
    """It would keep the value that its trace saw; Keras's own is a TypeError."""
    model = built(replicas, ReadsItsRate)
    with pytest.raises(VariableScopeError, match=r"(?s)learning_rate.*from `state`"):
        model.fit(X, X[:, :1], batch_size=8, verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    history = model.fit(X, X[:, :1], batch_size=8, verbose=0).history
    np.testing.assert_allclose(history["rate"], [0.01])

    model = built(replicas, ReadsAWeight)
    with pytest.raises(VariableScopeError, match="bias' was read in a step of"):
        model.predict(X, verbose=0)

    model = built(replicas)
    kernel = model.layers[0].kernel
    metric = lambda y, p: keras.ops.sum(kernel) + 0 * p  # noqa: E731
    model.compile("sgd", "mse", metrics=[metric])
    with pytest.raises(VariableScopeError, match="kernel' was read in a step of"):
        model.evaluate(X, X[:, :1], verbose=0)

"""Optimizers of the user's own: servers do what these do, or it is an error."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd
from keras_distribute.scheduling import workers
from tests.exactness.harness import assert_same_outcome, fit_only, observe, table
from tests.parameter_server.test_fit import equals_one_device

X, Y = table(22)


class Scaled(keras.optimizers.SGD):
    """Whose `get_config` lacks an argument that it needs."""

    def __init__(self, scale: float, **options: Any) -> None:
        super().__init__(0.1, **options)
        self.scale = scale

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.scale, variable, learning_rate)


class Filled(keras.optimizers.Optimizer):
    """Whose `build` fills what its `__init__` has made, where there is a variable."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.slots: list[Any] = []
        self.names: list[str] = []
        self.by_name: dict[str, Any] = {}
        self.slowness = self.add_variable((), initializer="ones", name="slowness")

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            slot = self.add_variable_from_reference(variable, "slot")
            self.slots.append(slot)
            self.names.append(variable.name)
            self.by_name[variable.path] = slot
        self.last = self.slots[-1]
        self.pair = (self.slots[0], None), self.last

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        slot = self.by_name[variable.path]
        assert slot is self.slots[index]
        factor = 2.0 if self.names[index] == "kernel" else 0.5
        slot.assign(0.5 * slot + gradient)
        step = learning_rate * factor * slot / (self.slowness + 1)
        variable.assign_sub(step)


class Counting(keras.optimizers.SGD):
    """Each update of a weight is smaller than the one before, of whichever weight."""

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self.count = self.add_variable((), initializer="zeros", name="count")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.count.assign_add(1.0)
        rate = learning_rate / (1.0 + self.count)
        super().update_step(gradient, variable, rate)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without `get_config`."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * 0.5 ** ops.cast(step, "float32")


OPTIMIZERS = {
    "scaled": lambda: Scaled(5.0, momentum=0.5),
    "filled": Filled,
    "counting": lambda: Counting(0.5, momentum=0.5),
    "schedule": lambda: keras.optimizers.SGD(Halving()),
}


def model_of(optimizer: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_own_optimizers(one_worker, name):
    equals_one_device(
        one_worker, lambda: model_of(OPTIMIZERS[name]()), fit_only(X, Y, batch_size=8)
    )


def test_an_own_outer_optimizer(make):
    """Each model's is its own, and as the one that was passed."""
    weights = []
    for outer in (Scaled(2.0), keras.optimizers.SGD(0.2)):
        strategy = make(1, local_steps=2, outer_optimizer=outer)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = model_of(keras.optimizers.SGD(0.1))
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        assert not outer.built
        strategy.close()
    for ours, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_an_outer_optimizer_that_is_not_built_is_built_again(make):
    class Failing(keras.optimizers.SGD):
        failures = 1

        def build(self, variables: Sequence[Any]) -> None:
            Failing.failures -= 1
            if Failing.failures >= 0:
                raise LookupError("no memory")
            super().build(variables)

    strategy = make(1, local_steps=2, outer_optimizer=Failing(0.2, momentum=0.5))
    with strategy.scope():
        model = model_of(keras.optimizers.SGD(0.1))
    with pytest.raises(LookupError):
        strategy._optimizers_of(model)
    outer = strategy._optimizers_of(model)["outer_optimizer"]
    assert outer.built and len(outer.variables) == 2 + len(model.trainable_variables)
    assert strategy._optimizers_of(model)["outer_optimizer"] is outer


def test_a_method_of_one_object_is_refused(one_worker):
    with one_worker.scope():
        optimizer = keras.optimizers.SGD(0.1)
        update = optimizer.update_step
        optimizer.update_step = lambda g, v, rate: update(ops.sign(g), v, rate)
        model = model_of(optimizer)
    with pytest.raises(
        kd.errors.StructureTypeError, match=r"update_step(.|\n)*Fix: class MySGD\(SGD\)"
    ):
        model.fit(X, Y, verbose=0)


def settings_of_sgd(optimizer: Any) -> None:
    optimizer.momentum = 0.0
    optimizer.weight_decay = 0.3


def another_schedule(optimizer: Any) -> None:
    optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)


def a_schedule_that_changes(optimizer: Any) -> None:
    optimizer._learning_rate.decay_rate = 0.25


SCHEDULE = keras.optimizers.schedules.ExponentialDecay
CHANGES: dict[str, Any] = {
    "settings": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), settings_of_sgd),
    "rate": (lambda: keras.optimizers.Adam(0.1), another_schedule),
    "schedule": (lambda: Scaled(2.0, momentum=0.5), another_schedule),
    "in_it": (lambda: keras.optimizers.SGD(SCHEDULE(0.1, 1, 0.9)), None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_change(one_worker, name):
    """After `compile` with the same optimizer, its slots go on with the new ones."""
    make_optimizer, change = CHANGES[name]

    def run(model: keras.Model) -> Any:
        optimizer, fit = model.optimizer, fit_only(X, Y, batch_size=8)
        first = fit(model)
        (change or a_schedule_that_changes)(optimizer)
        model.compile(optimizer, model.loss)
        return first, fit(model)

    def build() -> keras.Model:
        return model_of(make_optimizer())

    outcome = observe(build, run, one_worker, fit_in_scope=True)
    assert_same_outcome(outcome, observe(build, run))


def test_settings_that_change_without_compile(one_worker, monkeypatch):
    """As with plain Keras the step stays as it is, also on a worker that comes back."""
    told, away = workers.Worker._told, []

    def failing(*args: Any) -> Any:
        if away:
            raise away.pop()
        return told(*args)

    monkeypatch.setattr(workers.Worker, "_told", failing)

    def run(model: keras.Model) -> Any:
        fit = fit_only(X, Y, batch_size=8)
        first = fit(model)
        settings_of_sgd(model.optimizer)
        away.append(kd.errors.UnavailableError("The worker is gone."))
        return first, fit(model)

    def build() -> keras.Model:
        return model_of(keras.optimizers.SGD(0.1, momentum=0.9))

    outcome = observe(build, run, one_worker, fit_in_scope=True)
    assert not away
    assert_same_outcome(outcome, observe(build, run))


def test_slots_that_were_not_built(one_worker):
    with one_worker.scope():
        model = model_of(keras.optimizers.SGD(0.1))
    model.fit(X, Y, verbose=0)
    model.optimizer.momentum = 0.9
    with one_worker.scope():
        model.compile(model.optimizer, model.loss)
    with pytest.raises(
        kd.errors.ValueStructureError, match=r"SGD needs other.*_momentum(.|\n)*Fix"
    ):
        model.fit(X, Y, verbose=0)


def test_slots_of_other_shapes_than_their_weights(one_worker):
    """They are where those are, whoever has used the weights before."""

    def run(model: keras.Model) -> Any:
        loss = model.evaluate(X, Y, verbose=0)
        return loss, fit_only(X, Y, batch_size=8)(model)

    def build() -> keras.Model:
        return model_of(keras.optimizers.Adafactor(0.1))

    equals_one_device(one_worker, build, run)
    places = [place for _, place in one_worker.cluster.served.places()]
    assert {part.server for place in places for part in place.parts} == {0, 1}


def test_state_of_all_weights_where_they_are_apart(one_worker):
    """What the error says to do helps, whoever has used the weights before."""
    with one_worker.scope():
        model = model_of(Counting(0.1))
    model.evaluate(X, Y, verbose=0)
    with pytest.raises(
        kd.errors.ValueStructureError,
        match=r"all weights(.|\n)*on 2 servers(.|\n)*Fix: .*new.set_weights\(model",
    ):
        model.fit(X, Y, verbose=0)
    with one_worker.scope():
        new = model_of(Counting(0.1))
    new.set_weights(model.get_weights())
    new.fit(X, Y, batch_size=8, verbose=0)
    assert int(new.optimizer.iterations) == -(-len(X) // 8)


def test_two_models_of_one_layer(one_worker):
    """The second one's weights go where the first one's are."""
    with one_worker.scope():
        shared = layers.Dense(4)
        for _ in range(2):
            model = keras.Sequential([keras.Input((6,)), shared, layers.Dense(3)])
            model.compile(Counting(0.1), "mse")
            model.fit(X, X[:, :3], batch_size=8, verbose=0)
            assert float(model.optimizer.count) == 3 * 4


def test_a_function_that_sets_what_more_servers_have_since(one_worker):
    coordinator = kd.coordinator.ClusterCoordinator(one_worker)
    with one_worker.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def loss_of() -> Any:
        return ops.mean(ops.square(model(X)))

    gradients = kd.value_and_grad(loss_of, model.trainable_variables)

    def step() -> None:
        optimizer.apply(gradients()[1], model.trainable_variables)

    def set_rate(rate: Any) -> None:
        optimizer.learning_rate.assign(rate)

    coordinator.schedule(set_rate, (0.05,))
    coordinator.schedule(step)
    coordinator.join()
    place = one_worker.cluster.served.place_of(optimizer.learning_rate)
    assert len(place.parts) == 2
    coordinator.schedule(set_rate, (0.0,))
    coordinator.join()
    before = model.get_weights()
    coordinator.schedule(step)
    coordinator.join()
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)

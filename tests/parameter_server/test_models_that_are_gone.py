"""Models that nobody has any more: neither the coordinator nor a task keeps them."""

import gc
import weakref
from typing import Any

import keras
import pytest
from keras import layers

import keras_distribute as kd
from tests.exactness.harness import table

X, Y = table(22)


def trained(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4), layers.Dropout(0.1), layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    model.evaluate(X, Y, verbose=0)
    return model


def kept(strategy: Any) -> list[list[int]]:
    """What servers have."""
    asked = [s.call({"op": "status"})[0] for s in strategy.cluster.servers]
    return [[each["values"], each["bytes"]] for each in asked]


@pytest.mark.parametrize("local_steps", [1, 2])
def test_models_are_freed(make, local_steps):
    strategy = make(local_steps=local_steps)
    cluster = strategy.cluster
    found, counts, sent = [], [], []
    for _ in range(4):
        model = trained(strategy)
        optimizer = model.optimizer
        variables = [*model.variables, *optimizer.variables, *model.metrics_variables]
        found += [weakref.ref(each) for each in (model, optimizer, *variables)]
        counts.append((kept(strategy), len(cluster.served._places)))
        sent.append(len(cluster.updates.sent))
        del model, optimizer, variables
        keras.backend.clear_session()
        gc.collect()
        assert not [each() for each in found if each() is not None]
    assert counts[1] == counts[2] == counts[3]
    assert set(sent) == {2 if local_steps == 1 else sent[0]}  # One of each server.
    assert not cluster.served.places()


def test_another_model_has_the_id_of_one_that_is_gone(one_worker):
    """Its weights are its own, wherever they are in memory."""
    with one_worker.scope():
        variables = [keras.Variable([float(i)]) for i in range(50)]
    coordinator = kd.coordinator.ClusterCoordinator(one_worker)

    def total(own):
        return sum(float(x[0]) for x in coordinator.schedule(lambda: own).fetch())

    assert total(variables) == sum(range(50))
    assert all(one_worker.cluster.served.place_of(v) for v in variables)
    del variables
    gc.collect()
    with one_worker.scope():
        others = [keras.Variable([float(i)]) for i in range(50, 150)]
    assert not any(one_worker.cluster.served.place_of(v) for v in others)
    assert total(others) == sum(range(50, 150))
    assert min(one_worker.cluster.served._bytes) == 200


def test_a_result_is_kept(one_worker):
    """It keeps nothing of the model that it was computed with."""
    coordinator = kd.coordinator.ClusterCoordinator(one_worker)
    found = []

    def scheduled() -> Any:
        with one_worker.scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        found.extend(map(weakref.ref, [model, *model.variables]))
        return coordinator.schedule(lambda: {"sum": keras.ops.sum(model(X))})

    result = scheduled()
    coordinator.join()
    gc.collect()
    assert not [each() for each in found if each() is not None]
    assert result.fetch().keys() == {"sum"}

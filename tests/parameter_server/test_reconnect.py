"""A server that was lost and started again is taken anew, in the same program."""

import re

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from tests.exactness.harness import table
from tests.parameter_server.conftest import resolver_of
from tests.parameter_server.test_fit import assert_same_weights, network

X, Y = table(40)


def killing(cluster, step):
    """A callback that kills a server at some step, once."""
    left = iter(range(step))

    def count(batch, logs):
        if next(left, None) == step - 1:
            cluster.kill("ps", 1)

    return keras.callbacks.LambdaCallback(on_train_batch_end=count)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "of_strategy",
    [{}, {"local_steps": 2}, {"local_steps": 2, "local_slots": True}],
    ids=lambda each: "-".join(each) or "single",
)
def test_a_fit_goes_on_to_the_numbers_of_one_device(own_cluster, tmp_path, of_strategy):
    options = {"batch_size": 5, "epochs": 3, "verbose": 0, "shuffle": False}
    if of_strategy:
        of_strategy = {**of_strategy, "outer_optimizer": keras.optimizers.SGD(1.0)}
    strategy = kd.ParameterServerStrategy(resolver_of(own_cluster, 1), **of_strategy)
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = network()
    kills = killing(own_cluster, 11)
    times = 0
    while True:
        backup = kd.callbacks.BackupAndRestore(str(tmp_path), save_freq=4)
        try:
            model.fit(X, Y, callbacks=[backup, kills], **options)
            break
        except kd.errors.UnavailableError as error:
            assert "strategy.reconnect()" in str(error)
            own_cluster.start("ps", 1)
            strategy.reconnect(60)
            times += 1
            with pytest.raises(
                kd.errors.UnavailableError,
                match=re.escape(f"lost with it: {model.weights[0].path}."),
            ):
                model.weights[0].numpy()
    assert times == 1
    keras.utils.set_random_seed(2)
    plain = network()
    plain.fit(X, Y, **options)
    assert model.optimizer.iterations.numpy() == 24
    assert_same_weights(model, plain)
    assert sum(strategy.steps_of_workers.values()) >= 24
    strategy.close()


def test_local_slots_come_before_the_servers_are_taken_anew(own_cluster):
    """Who gives the weights by hand, and no slots, goes on with the last ones."""
    strategy = kd.ParameterServerStrategy(
        resolver_of(own_cluster, 2), local_steps=2, local_slots=True
    )
    found = []
    for is_lost in (False, True):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = network()
        model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
        state = [v.numpy() for v in model.variables if "float" in v.dtype]
        if is_lost:
            own_cluster.kill("ps", 1)
            own_cluster.start("ps", 1)
            strategy.reconnect(60)
            variables = [v for v in model.variables if "float" in v.dtype]
            for variable, value in zip(variables, state, strict=True):
                variable.assign(value)
        slots = [v for v in model.optimizer.variables if v.shape]
        found.append([v.numpy() for v in slots])
        strategy_held = strategy.cluster.slots_of(slots)
        assert [strategy_held.holder_of(i) is None for i in (0, 1)] == [is_lost] * 2
    assert any(map(np.any, found[0]))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    strategy.close()


def test_a_loop_goes_on_from_its_checkpoint(own_cluster, tmp_path):
    """What was scheduled is cancelled; what was not restored is not used."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v, w = keras.Variable(np.zeros(5, "float32")), keras.Variable(0.0)

    def add():
        v.assign_add(np.ones(5, "float32"))

    def both():
        w.assign_add(v[0])

    for _ in range(10):
        coordinator.schedule(add)
    coordinator.schedule(both).fetch()
    checkpoint = kd.Checkpoint(v=v)
    path = checkpoint.save(str(tmp_path / "a"))
    own_cluster.kill("ps", 0)
    with pytest.raises(kd.errors.UnavailableError, match="ps:0"):
        coordinator.schedule(add)
        coordinator.join()
    own_cluster.start("ps", 0)
    strategy.reconnect()
    with pytest.raises(
        kd.errors.UnavailableError,
        match=r"had a value that was lost with it(.|\n)*2 variable(.|\n)*CheckpointMan",
    ):
        coordinator.schedule(both)
    checkpoint.restore(path)
    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    np.testing.assert_array_equal(v.numpy(), np.full(5, 20.0))
    with pytest.raises(kd.errors.UnavailableError, match="1 variable"):
        coordinator.schedule(both)
    w.assign(1.0)
    coordinator.schedule(both).fetch()
    assert w.numpy() == 21.0
    strategy.close()


def test_a_server_that_does_not_come_back(own_cluster):
    """All calls say so, until one does."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    for wrong, error in ((0, "ValueStructure"), ("10", "StructureType")):
        with pytest.raises(
            getattr(kd.errors, f"{error}Error"), match="timeout_seconds is a finite"
        ):
            strategy.reconnect(wrong)
    own_cluster.kill("ps", 0)
    with pytest.raises(
        kd.errors.UnavailableError, match=r"ps:0 cannot be had\.(.|\n)*for 0\.5 s"
    ):
        strategy.reconnect(0.5)
    coordinator = ClusterCoordinator(strategy)
    for call in (coordinator.done, coordinator.join, coordinator.done):
        with pytest.raises(
            kd.errors.UnavailableError, match=r"no workers(.|\n)*ps:0(.|\n)*once more"
        ):
            call()
    assert not any(worker.is_ready for worker in strategy.cluster.workers)
    with pytest.raises(kd.errors.UnavailableError, match="ps:0 cannot be had"):
        strategy.cluster.bytes_of_servers()
    own_cluster.start("ps", 0)
    strategy.reconnect(60)
    assert coordinator.schedule(lambda: 1.0 + np.ones(())).fetch() == 2.0
    strategy.close()

"""`CentralStorageStrategy`: where its variables are between steps, and that its numbers
are those of one device.
"""

import functools

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.strategies import central_storage
from tests.support import central, mirrored, pack_from

RNG = np.random.RandomState(0)
X = RNG.randn(40, 6).astype("float32")
Y = RNG.randint(0, 3, 40)
PLACES = {"host": (), "a replica's device": ("cpu:1",), "another device": ("cpu:6",)}


@pytest.fixture(params=PLACES)
def strategy(request):
    return central(2, *PLACES[request.param])


def make_model(layers=1, optimizer="adam", **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,))]
        + [keras.layers.Dense(6, activation="tanh") for _ in range(layers)]
        + [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if optimizer == "adam":
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def fit(model, **options):
    return model.fit(
        X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options
    ).history


@functools.cache
def plain(*args):
    model = make_model(*args)
    return fit(model), [v.numpy() for v in model.variables]


def assert_like_plain(model, history, *args):
    for name, values in plain(*args)[0].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for ours, theirs in zip(model.variables, plain(*args)[1], strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-6)


def assert_at_rest(strategy, arrays):
    """That arrays, one or more, are where the strategy keeps its variables."""
    arrays = list(arrays)
    assert arrays
    device = strategy.placement.parameter_device
    for array in arrays:
        if device is None:
            assert array.sharding.memory_kind == "pinned_host"
            assert array.sharding.device_set == set(strategy.replica_mesh.devices)
            for shard in array.addressable_shards:
                assert shard.data.sharding.memory_kind == "pinned_host"
        else:
            assert array.sharding.device_set == {device}


def mirrored_of(model):
    """The variables that every replica has the same of."""
    found = [*model.trainable_variables, *model.optimizer.variables]
    return [v for v in found if isinstance(v, kd.MirroredVariable)]


def state_of(model):
    """The arrays that the last training step has left, buffers included."""
    holder = model.trainable_variables[0]._link[0]
    return holder.landing[-1][1]


@pytest.mark.sampled(3)
def test_variables_rest_between_steps(strategy):
    with strategy.scope():
        model = make_model()
    assert_at_rest(strategy, [v.stored for v in model.trainable_variables])
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            arrays = [v.stored for v in mirrored_of(model)]
            assert_at_rest(strategy, arrays)
            assert_at_rest(strategy, state_of(model)[: len(model.trainable_variables)])
            seen.append(len(arrays))

    history = fit(model, callbacks=[Looks()])
    # Weights, two moments of each, the step's number and the learning rate.
    assert seen == [3 * 6 + 2] * 10
    assert_like_plain(model, history)
    assert_at_rest(strategy, [v.stored for v in mirrored_of(model)])
    found = [*mirrored_of(model), *model.non_trainable_variables]
    for variable in found:  # What is read is on the replicas.
        value = variable.value
        assert value.sharding == strategy.replica_mesh.replicated
        assert len(variable.values) == 2
    expected = model.predict(X[:3], verbose=0)
    np.testing.assert_allclose(model(X[:3]), expected, rtol=1e-5)  # By operations.
    model.layers[0].kernel.assign(np.zeros((6, 6)))
    model.layers[0].kernel.assign_add(np.ones((6, 6)))
    assert float(model.layers[0].kernel.numpy().sum()) == 36
    assert_at_rest(strategy, [model.layers[0].kernel.stored])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("replicas", [1, 4, 8])
def test_numbers_are_those_of_one_device(place, replicas):
    strategy = central(replicas, *PLACES[place])
    with strategy.scope():
        model = make_model()
    assert_like_plain(model, fit(model))
    again = make_model()
    again.set_weights(model.get_weights())
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), again.evaluate(X, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        model.predict(X[:13], verbose=0),
        again.predict(X[:13], verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.sampled(3)
def test_several_steps_in_one_dispatch_copy_once(strategy):
    with strategy.scope():
        model = make_model(steps_per_execution=5)
    assert_like_plain(model, fit(model))
    assert_at_rest(strategy, [v.stored for v in mirrored_of(model)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_state_in_buffers_rests_too(strategy, optimizer, monkeypatch):
    """Adam's step sees one long weight, Muon's is packed."""
    pack_from(monkeypatch, 4)

    def make():
        chosen = keras.optimizers.Muon(0.01) if optimizer == "muon" else "adam"
        return make_model(3, chosen)

    expected = make()
    history = fit(expected)
    with strategy.scope():
        model = make()
    ours = fit(model)
    np.testing.assert_allclose(ours["loss"], history["loss"], rtol=1e-4)
    for own, theirs in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(own.numpy(), theirs.numpy(), rtol=1e-3, atol=1e-5)
    state = state_of(model)
    assert len(state) < 12 < len(model.optimizer.variables)
    assert_at_rest(strategy, [array for array in state if array.size > 100])
    assert_at_rest(strategy, [v.stored for v in mirrored_of(model)])
    model.layers[1].kernel.assign(np.zeros((6, 6)))
    fit(model)


@pytest.mark.sampled(3)
def test_gradient_accumulation(strategy):
    def make():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return make_model(1, optimizer)

    expected = make()
    history = fit(expected)
    with strategy.scope():
        model = make()
    np.testing.assert_allclose(fit(model)["loss"], history["loss"], rtol=1e-5)
    assert_at_rest(strategy, [v.stored for v in mirrored_of(model)])


@pytest.mark.sampled(3)
def test_eager_steps(strategy):
    with strategy.scope():
        model = make_model(run_eagerly=True)
    assert_like_plain(model, fit(model))
    assert_at_rest(strategy, [v.stored for v in mirrored_of(model)])
    assert_at_rest(strategy, state_of(model)[: len(model.trainable_variables)])


@pytest.mark.sampled(3)
def test_a_loop_of_ones_own(strategy):
    with strategy.scope():
        total = keras.Variable(np.zeros(3), aggregation="sum")
        read_only = keras.Variable(np.arange(3.0))
        own = keras.Variable(1.0, synchronization="on_read", aggregation="sum")

    def step():
        own.assign_add(1.0)
        total.assign_add(read_only + kd.get_replica_context().replica_id_in_sync_group)
        return total + own

    for i in range(1, 4):
        results = strategy.run(step)
        # Each replica adds its own: 0, 1, 2 and 1, 2, 3.
        np.testing.assert_array_equal(total.numpy(), [i, 3 * i, 5 * i])
        expected = np.asarray([1, 3, 5]) * i + (i + 1.0)
        np.testing.assert_array_equal(results.values[0], expected)
        assert_at_rest(strategy, [total.stored, read_only.stored])
    assert float(own.numpy()) == 7  # The initial 1 stands on the first replica.


@pytest.mark.sampled(3)
def test_saving_and_loading(strategy, tmp_path):
    with strategy.scope():
        model = make_model()
    fit(model)
    model.save(tmp_path / "model.keras")
    path = kd.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
        restored = make_model()
    with mirrored(4).scope():
        elsewhere = make_model()
    kd.Checkpoint(model=restored).restore(path)
    kd.Checkpoint(model=elsewhere).restore(path)
    expected = fit(model)
    for other in (loaded, restored, elsewhere):
        np.testing.assert_allclose(fit(other)["loss"], expected["loss"], rtol=1e-5)
    assert_at_rest(strategy, [v.stored for v in mirrored_of(restored)])


def test_names_of_devices(monkeypatch):
    strategy = central(2)
    assert repr(strategy) == (
        "CentralStorageStrategy([cpu:0, cpu:1], variables in host memory)"
    )
    assert strategy.extended.parameter_devices == ("cpu:0",)
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
    strategy = kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "/cpu:5")
    assert repr(strategy) == (
        "CentralStorageStrategy([cpu:0, cpu:1], variables in cpu:5)"
    )
    assert strategy.extended.parameter_devices == ("cpu:5",)
    assert kd.experimental.CentralStorageStrategy().num_replicas_in_sync == 8
    monkeypatch.setattr(central_storage, "_HOST_MEMORY", "none")
    assert central(2).placement.parameter_device == jax.devices("cpu")[0]
    with pytest.raises(kd.errors.DeviceError) as raised:
        central(2, "cpu:99")
    assert str(raised.value).startswith("There is no device cpu:99.\n  Received: ")
    with pytest.raises(kd.errors.DeviceError, match="A device is named by its kind"):
        central(2, ["cpu:0"])


def test_the_summary_says_where_variables_are():
    with central(2).scope():
        model = make_model()
    text = str(model.trainable_variables[0].distribute_strategy.summary(model))
    assert "in host memory" in text
    strategy = central(2, "cpu:1")
    with strategy.scope():
        variable = keras.Variable(np.zeros(4))
    summary = strategy.summary(variable)
    assert "on cpu:1" in str(summary) and "on cpu:1" in summary.svg()


@pytest.mark.sampled(3)
def test_later_epochs_compile_nothing(strategy, compilations):
    with strategy.scope():
        model = make_model()
    fit(model)
    before = len(compilations)
    fit(model)
    assert len(compilations) == before


def test_a_dry_run_says_what_is_in_host_memory():
    for place, expected in (((), True), (("cpu:1",), False)):
        with central(2, *place).scope():
            model = make_model()
        report = kd.dry_run(model, 8, topology="cpu:2")
        text = "copied to the device by each step"
        assert (text in str(report)) == expected
        of_state = report.memory.parameters + report.memory.optimizer
        assert (report.memory.host >= of_state - 8) == expected
        assert report.memory.host <= of_state + report.memory.other_state

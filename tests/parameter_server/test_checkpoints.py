"""What servers have is saved and restored as on one device."""

import keras
import numpy as np
import pytest

import keras_distribute as kd
from tests.exactness.harness import table
from tests.parameter_server.test_fit import assert_same_weights, network

X, Y = table(40)


def test_a_checkpoint_is_restored_into_the_servers(strategy, tmp_path):
    with strategy.scope():
        model = network()
    model.fit(X, Y, batch_size=5, verbose=0)
    checkpoint = kd.Checkpoint(model=model)
    path = checkpoint.save(str(tmp_path / "a"))
    saved = [variable.numpy().copy() for variable in model.variables]
    model.fit(X, Y, batch_size=5, verbose=0)
    assert not np.array_equal(saved[0], model.variables[0].numpy())
    checkpoint.restore(path)
    plain = network()
    kd.Checkpoint(model=plain).restore(path)
    for value, ours, theirs in zip(
        saved, model.variables, plain.variables, strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), value, ours.path)
        if not ours.path.startswith("seed_generator"):
            np.testing.assert_array_equal(theirs.numpy(), value, ours.path)
    # And the servers go on from there.
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-5
    )


def test_a_model_that_was_never_compiled(strategy, tmp_path):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    checkpoint = kd.Checkpoint(model=model)
    path = checkpoint.save(str(tmp_path / "a"))
    saved = model.get_weights()
    model.set_weights([0 * weight for weight in saved])
    checkpoint.restore(path)
    for ours, value in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(ours, value)


class Ends(keras.callbacks.Callback):
    """Ends the training at some step."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def backed_up_fit(strategy, folder, save_freq, *callbacks):
    """A model that was trained, or trained on from the last save in the folder."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = network()
    backup = kd.callbacks.BackupAndRestore(str(folder), save_freq=save_freq)
    options = {"batch_size": 5, "epochs": 3, "verbose": 0, "shuffle": False}
    model.fit(X, Y, callbacks=[backup, *callbacks], **options)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [11, 16])
def test_a_fit_that_is_broken_off_goes_on(one_worker, tmp_path, step):
    """With the very next batch after the last save, to the numbers of one device."""

    with pytest.raises(KeyboardInterrupt):
        backed_up_fit(one_worker, tmp_path, 3, Ends(step))
    model = backed_up_fit(one_worker, tmp_path, 3)
    keras.utils.set_random_seed(2)
    plain = network()
    plain.fit(X, Y, batch_size=5, epochs=3, verbose=0, shuffle=False)
    assert model.optimizer.iterations.numpy() == 24
    assert_same_weights(model, plain)


def test_a_save_waits_for_what_was_scheduled(strategy, tmp_path):
    """So that it is of one moment."""
    with strategy.scope():
        a, b = keras.Variable(np.zeros(9)), keras.Variable(0.0)

    def add():
        a.assign_add(np.ones(9))
        b.assign_add(1.0)

    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    for _ in range(100):
        coordinator.schedule(add)
    checkpoint = kd.Checkpoint(a=a, b=b)
    path = checkpoint.save(str(tmp_path / "a"))
    for _ in range(100):
        coordinator.schedule(add)
    checkpoint.restore(path)
    assert (a.numpy().tolist(), float(b.numpy())) == ([100.0] * 9, 100.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("local_slots", [False, True])
@pytest.mark.parametrize("step", [11, 19])
def test_local_steps_go_on_to_the_bit(make, tmp_path, step, local_slots):
    """With the slots of each group, and the momentum of the outer optimizer."""
    strategy = make(2, local_steps=2, local_slots=local_slots)

    whole = backed_up_fit(strategy, tmp_path / "a", 4)
    with pytest.raises(KeyboardInterrupt):
        backed_up_fit(strategy, tmp_path / "b", 4, Ends(step))
    resumed = backed_up_fit(strategy, tmp_path / "b", 4)
    for ours, theirs in zip(resumed.variables, whole.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), ours.path)


@pytest.mark.parametrize("local_slots", [False, True])
def test_a_checkpoint_of_local_steps_elsewhere(make, tmp_path, local_slots):
    """The mean of the slots, and no outer optimizer; and the other way round."""
    strategy = make(2, local_steps=2, local_slots=local_slots)
    with strategy.scope():
        model = network()
    model.fit(X, Y, batch_size=5, verbose=0)
    path = kd.Checkpoint(model=model).save(str(tmp_path / "a"))
    plain = network()
    status = kd.Checkpoint(model=plain).restore(path)
    assert any("outer_optimizer" in name for name in status.unbuilt)
    for ours, theirs in zip(
        model.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
    plain.fit(X, Y, batch_size=5, verbose=0)
    path = kd.Checkpoint(model=plain).save(str(tmp_path / "b"))
    assert not kd.Checkpoint(model=model).restore(path).missing
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        if "seed_generator" not in ours.path:
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), ours.path)

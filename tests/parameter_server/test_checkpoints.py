"""What servers have is saved and restored as on one device."""

import keras
import numpy as np
import pytest

import keras_distribute as kd
from tests.exactness.harness import table
from tests.parameter_server.test_fit import network

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


class Ends(keras.callbacks.Callback):
    """Ends the training at some step."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [11, 16])
def test_a_fit_that_is_broken_off_goes_on(one_worker, tmp_path, step):
    """With the very next batch after the last save, to the numbers of one device."""

    def fit(*more):
        keras.utils.set_random_seed(2)
        with one_worker.scope():
            model = network()
        backup = kd.callbacks.BackupAndRestore(str(tmp_path), save_freq=3)
        options = {"batch_size": 5, "epochs": 3, "verbose": 0, "shuffle": False}
        model.fit(X, Y, callbacks=[backup, *more], **options)
        return model

    with pytest.raises(KeyboardInterrupt):
        fit(Ends(step))
    model = fit()
    keras.utils.set_random_seed(2)
    plain = network()
    plain.fit(X, Y, batch_size=5, epochs=3, verbose=0, shuffle=False)
    assert model.optimizer.iterations.numpy() == 24
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        if ours.dtype == "float32":
            np.testing.assert_allclose(
                ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=ours.path
            )

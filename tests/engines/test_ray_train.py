"""`MultiWorkerMirroredStrategy` in the workers of a real Ray Train, which starts them
again.
"""

import os
import signal

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd

ray = pytest.importorskip(
    "ray", reason="needs Ray: pip install 'keras-distribute[ray]'"
)
train = pytest.importorskip(
    "ray.train",
    reason="needs Ray Train: pip install 'keras-distribute[ray]'",
    exc_type=ImportError,
)
from ray.train.v2.jax import JaxConfig, JaxTrainer

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("local_ray")]


class Fault(keras.callbacks.Callback):
    """In the third epoch, in the first try."""

    def __init__(self, config):
        super().__init__()
        self.done, self.kind = f"{config['folder']}/done", config["fault"]
        self.process = config["process"]

    def on_train_batch_end(self, batch, logs=None):
        mine = kd.process_index() == self.process and not os.path.exists(self.done)
        if not mine or int(self.model.optimizer.iterations) != 13:
            return
        open(self.done, "w").close()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("a bug of the user's")


def train_func(config):
    """A script as users write them, which runs in any number of processes."""
    strategy = kd.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.Input((5,)),
            keras.layers.Dense(4),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    x = np.random.RandomState(0).randn(44, 5).astype("float32")
    callbacks = [kd.callbacks.RayReport()] if config.get("reports") else []
    if "fault" in config:
        backup = kd.callbacks.BackupAndRestore(
            f"{config['folder']}/backup", save_freq=2, save_before_preemption=False
        )
        callbacks = [backup, Fault(config)]
    history = model.fit(x, x[:, :3], 8, 4, verbose=0, callbacks=callbacks).history
    return {
        "loss": history["loss"],
        "weights": model.get_weights(),
        "resolver": type(strategy.cluster_resolver).__name__,
        "token": len(os.environ["KERAS_DISTRIBUTE_JOB_TOKEN"]),
        "processes": kd.process_count(),
        "platforms": [device.platform for device in jax.devices()],
    }


def run(tmp_path, config=None, num_workers=2, max_failures=0, **options):
    """What the first worker has returned."""
    return result_of(
        tmp_path, config, num_workers, max_failures, **options
    ).return_value


def result_of(tmp_path, config=None, num_workers=2, max_failures=0, **options):
    """What Ray returns."""
    return JaxTrainer(
        train_func,
        train_loop_config={"folder": str(tmp_path), **(config or {})},
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(
            storage_path=str(tmp_path / "ray"),
            failure_config=train.FailureConfig(max_failures=max_failures),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
        **options,
    ).fit()


@pytest.fixture(scope="module")
def two_workers(local_ray, tmp_path_factory):
    """A training without interruption."""
    return run(tmp_path_factory.mktemp("two"))


def test_fit_has_the_numbers_of_one_device(two_workers):
    assert two_workers["resolver"] == "RayTrainClusterResolver"
    assert two_workers["processes"] == 2
    assert two_workers["platforms"] == ["cpu", "cpu"]
    assert two_workers["token"] == 64
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(4),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    x = np.random.RandomState(0).randn(44, 5).astype("float32")
    history = model.fit(x, x[:, :3], 8, 4, verbose=0).history
    np.testing.assert_allclose(two_workers["loss"], history["loss"], rtol=1e-5)
    for value, right in zip(two_workers["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("fault", "process"), [("kill", 0), ("raise", 1)])
def test_ray_starts_all_again_and_fit_goes_on(two_workers, tmp_path, fault, process):
    config = {"fault": fault, "process": process}
    again = run(tmp_path, config, max_failures=1)
    assert (tmp_path / "done").exists()
    assert again["loss"] == two_workers["loss"]
    for value, right in zip(again["weights"], two_workers["weights"], strict=True):
        np.testing.assert_array_equal(value, right)


def test_ray_is_told_the_logs_and_the_model_of_each_epoch(tmp_path):
    result = result_of(tmp_path, {"reports": True})
    trained = result.return_value
    assert result.metrics["epoch"] == 4
    assert result.metrics["loss"] == pytest.approx(trained["loss"][-1])
    with result.checkpoint.as_directory() as folder:
        assert os.listdir(folder) == ["model.keras"]
        model = keras.models.load_model(f"{folder}/model.keras")
    for value, right in zip(model.get_weights(), trained["weights"], strict=True):
        np.testing.assert_array_equal(value, right)


def test_reports_need_ray_train():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(kd.errors.ContextError, match="leave the callback out"):
        model.fit(
            np.ones((4, 2)),
            np.ones((4, 1)),
            verbose=0,
            callbacks=[kd.callbacks.RayReport()],
        )


def test_without_restarts_the_error_of_a_worker_comes_to_the_driver(tmp_path):
    with pytest.raises(train.TrainingFailedError, match="a bug of the user's"):
        run(tmp_path, {"fault": "raise", "process": 1})


def test_where_ray_starts_the_runtime_of_jax_the_strategy_takes_part(
    two_workers, tmp_path
):
    # As for GPUs; here with the platform that JAX_PLATFORMS names.
    again = run(tmp_path, jax_config=JaxConfig(use_gpu=True))
    assert again["resolver"] == "RayTrainClusterResolver"
    assert (again["processes"], again["token"]) == (2, 64)
    assert again["loss"] == two_workers["loss"]

"""Device names, meshes, and the CPU devices that never starve XLA's thread pool."""

import os
import subprocess
import sys

import jax
import pytest

import keras_distribute as kd
from keras_distribute import errors
from keras_distribute.devices import names


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("cpu:3", 3),
        ("CPU:1", 1),
        ("/cpu:2", 2),
        ("cpu", 0),
        ("/device:CPU:5", 5),
        ("/job:worker/replica:0/task:0/device:CPU:7", 7),
        ("/job:localhost/task:0/cpu:4", 4),
    ],
)
def test_device_names(name, index):
    assert names.parse_device(name) == jax.devices("cpu")[index]


def test_a_jax_device_names_itself():
    device = jax.devices()[2]
    assert kd.OneDeviceStrategy(device).replica_mesh.devices == (device,)


@pytest.mark.parametrize("name", ["", "cpu:", "cpu:x", "cpu 1", 3, None, "a/b:0"])
def test_what_is_no_device_name(name):
    with pytest.raises(
        errors.DeviceError,
        match='named by its kind and its number.*\n.*Received.*\n.*Fix: "GPU:0"',
    ):
        names.parse_device(name)


def test_a_device_that_does_not_exist():
    with pytest.raises(
        errors.DeviceError,
        match=r"no device cpu:8.*\n.*'cpu:8', with the devices cpu:0, cpu:1",
    ) as caught:
        kd.MirroredStrategy(["cpu:0", "cpu:8"])
    assert "Fix: kd.config.set_cpu_devices(9)" in str(caught.value)
    with pytest.raises(errors.DeviceError, match="no device gpu:0"):
        kd.MirroredStrategy(["GPU:0"])
    with pytest.raises(ValueError, match="no device tpu:1"):
        kd.OneDeviceStrategy("TPU:1")


def test_devices_named_twice_or_not_at_all():
    with pytest.raises(
        errors.DeviceError, match=r"named once; cpu:1 is named more often"
    ):
        kd.MirroredStrategy(["cpu:1", "/cpu:1"])
    with pytest.raises(errors.DeviceError, match="at least one device"):
        kd.MirroredStrategy([])


def test_all_devices_by_default_and_in_the_given_order():
    assert kd.MirroredStrategy().num_replicas_in_sync == 8
    strategy = kd.MirroredStrategy(["cpu:2", "cpu:0"])
    assert strategy.extended.worker_devices == ("cpu:2", "cpu:0")
    assert kd.MirroredStrategy("cpu:1").num_replicas_in_sync == 1


def test_set_cpu_devices_again():
    kd.config.set_cpu_devices(8)
    with pytest.raises(
        errors.DeviceError,
        match=r"already started with 8 CPU.*\n.*set_cpu_devices\(4\)",
    ):
        kd.config.set_cpu_devices(4)
    for wrong in (0, -1, 2.0, True, "8"):
        with pytest.raises(errors.DeviceError, match="integer of at least 1"):
            kd.config.set_cpu_devices(wrong)


def in_new_process(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=env | environment,
    )


PRINT = "import os, jax; print(jax.device_count(), os.environ.get('NPROC'))"


@pytest.mark.parametrize(
    ("first", "environment"),
    [
        ("kd.config.set_cpu_devices(6)", {}),
        ("", {"XLA_FLAGS": "--xla_force_host_platform_device_count=6"}),
        ("", {"JAX_NUM_CPU_DEVICES": "6"}),
        (
            "kd.config.set_cpu_devices(6)",
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        ),
    ],
)
def test_the_thread_pool_grows_with_the_devices(first, environment):
    result = in_new_process(
        f"import keras_distribute as kd\n{first}\n{PRINT}", **environment
    )
    assert result.stdout.split() == ["6", str(max(24, kd.config.cores()))], (
        result.stderr
    )


def test_the_pool_has_the_cores_that_the_process_may_use():
    """As XLA's own has, whatever the host has."""
    script = (
        "import os; os.cpu_count = lambda: 64; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "import keras_distribute as kd\nprint(kd.config.cores(), kd.config.pool()[0])\n"
        f"kd.config.set_cpu_devices(8)\n{PRINT}\nprint(kd.config.pool()[0])"
    )
    result = in_new_process(script)
    assert result.stdout.split() == ["1", "1", "8", "32", "32"], result.stderr


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["Mirrored", "MultiWorkerMirrored"])
def test_the_same_bits_need_the_same_pool(strategy, devices):
    result = in_new_process(
        "import keras_distribute as kd\n"
        f"kd.config.set_cpu_devices({devices})\n"
        f"kd.{strategy}Strategy(deterministic=True)\n{PRINT}\nprint(kd.config.pool())"
    )
    assert result.stdout.splitlines() == [
        f"{devices} 32",
        "(32, 'keras_distribute, for deterministic=True')",
    ], result.stderr


def test_a_pool_that_the_user_asks_for_stays():
    script = "import keras_distribute as kd\nkd.MirroredStrategy(deterministic=True)\n"
    script += f"{PRINT}\nprint(kd.config.pool()[1])"
    result = in_new_process(script, NPROC="3")
    assert result.stdout.splitlines() == ["1 3", "NPROC in the environment"]


def test_one_device_leaves_the_thread_pool_alone():
    result = in_new_process(f"import keras_distribute as kd\n{PRINT}")
    assert result.stdout.split() == ["1", "None"], result.stderr


def test_a_pool_that_would_starve_is_refused():
    devices = kd.config.cores() + 2
    script = (
        f"import jax; jax.config.update('jax_num_cpu_devices', {devices}); jax.devices()\n"
        "import keras_distribute as kd\nkd.MirroredStrategy()"
    )
    result = in_new_process(script)
    assert "would deadlock" in result.stderr
    assert (
        "Fix: import keras_distribute before using JAX, or set the environment variable NPROC="
        in result.stderr
    )
    result = in_new_process(script, NPROC=str(devices))
    assert result.returncode == 0, result.stderr

"""Training on more CPU devices than cores neither aborts nor hangs: whole processes,
each with a 200-step `fit`.

One run of each by default, three with `EVERY_CASE`;
`SOAK_RUNS=20 python -m pytest tests/test_no_starvation.py` for the long form.
"""

import os
import subprocess
import sys

import pytest

RUNS = int(os.environ.get("SOAK_RUNS") or (3 if os.environ.get("EVERY_CASE") else 1))
SCRIPT = """
import keras_distribute as kd
{setup}
import keras, numpy as np
strategy = kd.MirroredStrategy()
assert strategy.num_replicas_in_sync == 8
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(64, activation="relu") for _ in range(6)], keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.RandomState(0).randn(200 * 32, 64).astype("float32")
model.fit(x, x[:, :1], batch_size=32, epochs=1, verbose=0)
loss = keras.losses.MeanSquaredError()
data = strategy.experimental_distribute_values_from_function(lambda c: x[:4])

def step(x):
    value, grads = kd.value_and_grad(lambda: loss(x[:, :1], model(x)), model.trainable_variables)()
    model.optimizer.apply(grads, model.trainable_variables)
    return value

for _ in range(200):
    value = strategy.run(step, args=(data,))
print("finished", int(model.optimizer.iterations), float(strategy.reduce("SUM", value, axis=None)))
"""


@pytest.mark.sampled(2)
@pytest.mark.timeout(300 * max(1, RUNS // 3))
@pytest.mark.parametrize(
    ("setup", "flags"),
    [
        ("kd.config.set_cpu_devices(8)", ""),
        ("", "--xla_force_host_platform_device_count=8"),
    ],
    ids=["set_cpu_devices", "XLA_FLAGS"],
)
def test_runs_finish(setup, flags):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")} | {
        "XLA_FLAGS": flags
    }
    for run in range(RUNS):
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(setup=setup)],
            capture_output=True,
            text=True,
            timeout=200,
            env=env,
        )
        assert result.returncode == 0, (
            f"run {run}: {result.returncode}\n{result.stderr[-3000:]}"
        )
        assert result.stdout.startswith("finished 400 "), result.stdout

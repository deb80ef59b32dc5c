"""The script of the guide in a job step of Slurm: the same command in all tasks, of
which each finds by itself what it is. Slurm's variables are set by hand here.
"""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap

from keras_distribute.cluster import signing
from keras_distribute.cluster.ports import free_port

SCRIPT = """
    import keras, numpy as np
    import keras_distribute as kd

    jobs = {"chief": 1, "ps": 1, "worker": 2}
    resolver = kd.cluster_resolver.SlurmClusterResolver(jobs, port_base=PORT)
    if resolver.task_type in ("worker", "ps"):
        spec = resolver.cluster_spec()
        kd.Server(spec, resolver.task_type, resolver.task_id).join()
    else:
        strategy = kd.ParameterServerStrategy(resolver)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((40, 4), "float32")
        model.fit(x, x[:, 0], batch_size=4, verbose=0)
        print(sum(strategy.steps_of_workers.values()), "steps", flush=True)
"""


def first_of_free_ports(count):
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as all_of_them:
            for port in range(first, first + count):
                server = socket.create_server(("127.0.0.1", port))
                all_of_them.enter_context(server)
            return first


def test_four_tasks_of_a_job_step(tmp_path):
    script = tmp_path / "train.py"
    text = textwrap.dedent(SCRIPT).replace("PORT", str(first_of_free_ports(4)))
    script.write_text(text)
    common = {
        **os.environ,
        signing.TOKEN: signing.new_token(),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            env={**common, "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [task.communicate(timeout=100)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0] * 4
    assert said == ["10 steps\n", "", "", ""]

"""Two network namespaces stand for two hosts, and the link between them is cut: a worker
that is cut off counts nothing twice, and comes back; a server that is, is an error.
"""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from keras_distribute.cluster import signing
from tests.namespaces import hosts, ip

__all__ = ["hosts"]

COORDINATOR = """
    import time
    import numpy as np
    import keras_distribute as kd
    from tests.parameter_server import test_kill_matrix as here

    resolver = kd.cluster_resolver.TFConfigClusterResolver()
    strategy = kd.ParameterServerStrategy(resolver)
    counting = here.Counting(strategy)
    workers = strategy.cluster.workers

    def slow():
        while True:
            time.sleep(0.02)
            yield np.ones(1000, "float32")

    iterator = iter(counting.coordinator.create_per_worker_dataset(slow))

    def schedule():
        for _ in range(100):
            counting.coordinator.schedule(counting.add_next, (iterator,))

    while not all(worker.is_ready for worker in workers):
        time.sleep(0.01)
    schedule()
    counting.coordinator.join()
    counting.assert_counts(100)
    schedule()
    print("cut", flush=True)
    start = time.monotonic()
    try:
        counting.coordinator.join()
    except kd.errors.UnavailableError as error:
        assert time.monotonic() - start < 20
        print(str(error).splitlines()[0], flush=True)
        strategy.close()
        raise SystemExit
    counting.assert_counts(200)
    print("mend", workers[0].is_ready, flush=True)
    end = time.monotonic() + 60
    while not workers[0].is_ready and time.monotonic() < end:
        time.sleep(0.05)
    before = workers[0].steps
    schedule()
    counting.coordinator.join()
    counting.assert_counts(300)
    print("again", workers[0].steps > before, flush=True)
    strategy.close(end_tasks=True)
"""


@pytest.mark.sampled(2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("far", ["worker", "ps"])
def test_the_link_is_cut(hosts, tmp_path, far):
    addresses = {
        job: [f"10.213.0.{1 + (job == far and i == 0)}:{port + i}" for i in range(2)]
        for job, port in (("worker", 2222), ("ps", 2232), ("chief", 2242))
    }
    addresses["chief"] = addresses["chief"][:1]
    common = {
        **os.environ,
        signing.TOKEN: signing.new_token(),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    def started(job, index, *command, **options):
        config = {"cluster": addresses, "task": {"type": job, "index": index}}
        host = hosts[job == far and index == 0]
        return subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, *command],
            env={**common, "TF_CONFIG": json.dumps(config)},
            **options,
        )

    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(COORDINATOR))
    with contextlib.ExitStack() as stack:
        for job in ("worker", "ps"):
            for index in range(2):
                task = started(
                    job, index, "-W", "ignore", "-m", "keras_distribute.servers"
                )
                stack.enter_context(task)
                stack.callback(task.kill)
        chief = stack.enter_context(
            started("chief", 0, str(script), stdout=subprocess.PIPE, text=True)
        )
        stack.callback(chief.kill)
        ends = threading.Timer(200, chief.kill)
        ends.start()
        stack.callback(ends.cancel)
        assert chief.stdout.readline() == "cut\n"
        ip("-n", hosts[1], "link", "set", "link1", "down")
        line = chief.stdout.readline()
        if far == "ps":
            assert line.startswith("The parameter server ps:0 (10.213.0.2:2232) has")
            assert chief.wait(60) == 0
            return
        assert line == "mend False\n"
        ip("-n", hosts[1], "link", "set", "link1", "up")
        assert chief.stdout.readline() == "again True\n"
        assert chief.wait(60) == 0

"""The batch file and the program of docs/guide/slurm.md on a real Slurm: the numbers of
one device, and a training that is cancelled, warned, requeued or loses a task or a node.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.engines.slurm_cluster import SlurmCluster, missing, wait

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(missing()),
        reason=f"needs Slurm, without {', '.join(missing())}: "
        "apt-get install slurm-wlm munge",
    ),
]
ROOT = pathlib.Path(__file__).parents[2]
PASSING = "train.sbatch, with --signal=B:TERM@120"
PAGE = (ROOT / "docs/guide/slurm.md").read_text()
SUBMIT = re.findall(r"^```shell\n(.*?)\n```", PAGE, re.M | re.S)[0]
# Steps as slow as wanted, who takes part, and the numbers to the bit.
WATCH = """
import hashlib
import os
import pathlib
import time

steps = []  # Not of the callback, whose attributes are kept from start to start.


class Watch(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        pathlib.Path(f"process-{kd.process_index()}").write_text(str(os.getpid()))

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if kd.is_chief():
            pathlib.Path("new").write_text(str(step))
            os.replace("new", "step")
        if not steps:
            kd.print_on_chief("first step", step)
        steps.append(step)
        if os.path.exists("slow"):
            time.sleep(1.0)
"""
NUMBERS = """
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights()))
digest.update(str([loss.hex() for loss in history.history["loss"]]).encode())
kd.print_on_chief("numbers", digest.hexdigest())
"""


def block(title):
    """A file as the page prints it."""
    found = re.search(rf'^```\w+ title="{title}"\n(.*?)^```', PAGE, re.M | re.S)
    assert found is not None, title
    return found[1]


def watched(program):
    """The page's program, with a callback beside its own, and its numbers at the end."""
    before, call, after = program.partition("callbacks=[backup]")
    assert call
    head, first, rest = before.partition("strategy = ")
    assert first
    return f"{head}{WATCH}\n\n{first}{rest}callbacks=[backup, Watch()]{after}{NUMBERS}"


class Training:
    """A folder with the page's files, and what a job leaves there."""

    def __init__(self, slurm, folder, batch=None, program=None):
        self.slurm, self.folder = slurm, folder
        submits, name = SUBMIT.split()
        assert submits == "sbatch"
        self.batch = folder / name
        self.batch.write_text(batch or block("train.sbatch"))
        (folder / "train.py").write_text(program or watched(block("train.py")))

    def submit(self, *options, slow=False):
        if slow:
            (self.folder / "slow").touch()
        self.number = self.slurm.submit(self.batch, *options)
        return self

    @property
    def log(self):
        file = self.folder / f"train-{self.number}.log"
        return file.read_text() if file.exists() else ""

    @property
    def numbers(self):
        return re.findall(r"^numbers (\w+)$", self.log, re.MULTILINE)

    @property
    def first_steps(self):
        """Of each start of this job."""
        return [int(n) for n in re.findall(r"^first step (\d+)$", self.log, re.M)]

    def step(self):
        file = self.folder / "step"
        return int(file.read_text()) if file.exists() else 0

    def wait_for_step(self, step):
        """Until a training that is slow has come so far."""
        wait(lambda: self.step() >= step, f"step {step}: {self.log}", 120)

    def go_on(self):
        """From now on steps are fast."""
        (self.folder / "slow").unlink()

    def end(self, state="COMPLETED", seconds=150):
        """Waits for the end of the job, and for what is still on its way to the log."""
        job = self.slurm.end_of(self.number, seconds)
        time.sleep(1.0)
        assert job["JobState"] == state, f"{job}\n{self.log}"
        return job


@pytest.fixture(scope="module")
def slurm(light_processes, tmp_path_factory):
    """Two nodes, whose names nobody but Slurm knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(pathlib.Path(sys.executable).parent), os.pathsep)
        patch.setenv("PYTHONPATH", str(ROOT), os.pathsep)
        patch.setenv("TESTS_WITHOUT", "sklearn matplotlib IPython tensorflow")
        patch.setenv("JAX_PLATFORMS", "cpu")
        for name in list(os.environ):
            if name.startswith("CUDA_VISIBLE"):
                patch.delenv(name)
        with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def uninterrupted(slurm, tmp_path_factory):
    """A training of two tasks on each of two nodes, as the page has it."""
    training = Training(slurm, tmp_path_factory.mktemp("uninterrupted"))
    training.submit().end()
    return training


@pytest.fixture
def training(slurm, tmp_path):
    return Training(slurm, tmp_path)


def assert_went_on(training, uninterrupted):
    """A job has started twice, the second time with the step after its last one."""
    first, second = training.first_steps
    assert (first, second) == (1, max(second, 11)), training.log
    assert training.numbers == uninterrupted.numbers


def test_the_batch_file_gives_the_numbers_of_one_device(uninterrupted, tmp_path):
    losses = re.search(r"^\['[\d., ']+'\]$", uninterrupted.log, re.MULTILINE)
    assert losses is not None, uninterrupted.log
    assert losses[0] in PAGE
    first = "4 processes x 1 cpu device(s) = 4 replicas, by SlurmClusterResolver"
    assert first in uninterrupted.log
    assert "without a token" not in uninterrupted.log
    (tmp_path / "train.py").write_text(block("train.py"))
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=uninterrupted.slurm.environment,
    )
    assert plain.stdout.splitlines() == [losses[0]], plain.stderr


def test_a_training_that_is_cancelled_has_saved(uninterrupted, training):
    training.submit(slow=True).wait_for_step(10)
    training.slurm.run("scancel", training.number)
    training.end("CANCELLED")
    stopped = training.step()
    assert stopped < 100
    training.go_on()
    training.submit().end()
    assert training.first_steps == [stopped + 1]
    assert training.numbers == uninterrupted.numbers


def test_the_signal_before_the_end_of_the_time_saves_and_requeues(
    uninterrupted, training
):
    training.submit("--time=2", "--signal=TERM@30", slow=True)
    wait(lambda: training.slurm.job(training.number)["Restarts"] == "1", "it", 150)
    training.go_on()
    training.end()
    assert_went_on(training, uninterrupted)
    assert "DUE TO TIME LIMIT" not in training.log


def test_a_signal_to_the_batch_file_is_passed_on(slurm, uninterrupted, tmp_path):
    page, passing = block("train.sbatch"), block(PASSING)
    own = re.sub(r"(?ms)^srun.*?^code=\$\?\n", lambda _: passing, page)
    assert own != page
    training = Training(slurm, tmp_path, own)
    training.submit("--time=2", "--signal=B:TERM@30", slow=True)
    wait(lambda: slurm.job(training.number)["Restarts"] == "1", "it", 150)
    training.go_on()
    training.end()
    assert_went_on(training, uninterrupted)


def test_where_slurm_ends_all_tasks_after_the_first_that_fails(
    slurm, uninterrupted, tmp_path
):
    batch = block("train.sbatch").replace("srun ", "srun --kill-on-bad-exit=1 ")
    training = Training(slurm, tmp_path, batch)
    training.submit(slow=True).wait_for_step(10)
    slurm.run("scancel", "--signal=TERM", training.number)  # As before its end.
    wait(lambda: slurm.job(training.number)["Restarts"] == "1", "it", 100)
    training.go_on()
    training.end()
    assert_went_on(training, uninterrupted)


def test_a_job_that_is_requeued_goes_on(uninterrupted, training):
    training.submit(slow=True).wait_for_step(10)
    training.slurm.run("scontrol", "requeue", training.number)
    wait(lambda: training.slurm.job(training.number)["Restarts"] == "1", "it", 150)
    training.go_on()
    training.end()
    assert_went_on(training, uninterrupted)


def test_a_task_that_is_killed_is_named_and_all_end(training):
    training.submit(slow=True).wait_for_step(10)
    os.kill(int((training.folder / "process-2").read_text()), signal.SIGKILL)
    start = time.monotonic()
    training.end("FAILED", 60)
    assert time.monotonic() - start < 45
    assert re.search(r"process 2 ", training.log), training.log


def test_a_node_that_is_set_down_and_comes_back(uninterrupted, training):
    training.submit(slow=True).wait_for_step(10)
    down = ("scontrol", "update", "nodename=node2")
    training.slurm.run(*down, "state=down", "reason=test")
    wait(lambda: training.slurm.job(training.number)["Restarts"] == "1", "it", 150)
    # Slurm does not wait for the job's step on such a node, and the next one would have
    # the same number.
    running = training.slurm.steps_on
    wait(lambda: not running("node2", training.number), "the end of its step", 90)
    training.slurm.run(*down, "state=resume")
    training.go_on()
    training.end()
    assert_went_on(training, uninterrupted)


RAISES = """
class Raises(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 4 and kd.process_index() == 3:
            raise KeyError("label")


strategy = """


def test_an_error_in_a_task_is_named_by_all(slurm, tmp_path):
    program = block("train.py").replace("strategy = ", RAISES.strip())
    program = program.replace("callbacks=[backup]", "callbacks=[backup, Raises()]")
    training = Training(slurm, tmp_path, program=program)
    start = time.monotonic()
    training.submit().end("FAILED", 60)
    assert time.monotonic() - start < 50
    # Each of the others once: from an error of its own, or as it is ended.
    named = re.findall(
        r"follow from another one: process 3 has raised KeyError: .label."
        r"|process 3 has raised KeyError: .label..*\. Process \d,.*ends\.",
        training.log,
    )
    assert len(named) == 3, training.log
    assert len(re.findall("Exited with exit code 43", training.log)) >= 1


def test_two_jobs_share_the_nodes(slurm, uninterrupted, tmp_path):
    jobs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        program = FROM + block("train.py") + TO
        job = Training(slurm, tmp_path / name, program=program)
        jobs.append(job.submit("--ntasks-per-node=1"))
    for job in jobs:
        job.end()
    ports = {re.search(r"coordinator \S+:(\d+)", job.log)[1] for job in jobs}
    assert len(ports) == 2
    said = {re.search(r"^\['.*", job.log, re.MULTILINE)[0] for job in jobs}
    assert len(said) == 1 and said.pop() in PAGE
    ran = [
        [float(t) for t in re.findall(r"(?:from|to) (\d{9,}.*)", job.log)]
        for job in jobs
    ]
    assert max(first for first, _ in ran) < min(last for _, last in ran), "one by one"


FROM = """
import os
import time

if os.environ["SLURM_PROCID"] == "0":
    print("from", time.time(), flush=True)
"""
TO = """
kd.print_on_chief("to", time.time())
"""
PLACES = """
import os

import keras_distribute as kd

resolver = kd.cluster_resolver.automatic_resolver()
place = [os.environ[f"SLURM_{name}"] for name in ("PROCID", "NODEID", "LOCALID")]
address = resolver.cluster_spec().task_address("worker", int(place[0]))
print("place", *place, address, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (["--ntasks-per-node=2", "--gpus-per-task=1"], 1),
        (["--ntasks-per-node=2", "--gpus-per-task=2"], 2),
        (["--ntasks-per-node=2", "--gpus-per-node=4"], 2),
        (["--ntasks-per-node=2", "--gres=gpu:4", "--gpu-bind=single:1"], 1),
        (["--ntasks-per-node=1", "--gpus-per-task=4"], 4),
        (["--ntasks-per-node=2", "--gpus-per-node=4", "--distribution=cyclic"], 2),
        (["--ntasks-per-node=2", "--gpus-per-node=4", "--distribution=plane=1"], 2),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_each_task_has_its_place_and_gpus_of_its_own(slurm, tmp_path, options, gpus):
    (tmp_path / "places.py").write_text(PLACES)
    said = slurm.run("srun", "--nodes=2", *options, "python", f"{tmp_path}/places.py")
    tasks = re.findall(r"^place (\d) (\d) (\d) node(\d):(\d+) (\S+)$", said, re.M)
    assert len(tasks) == (2 if gpus == 4 else 4), said
    base = min(int(port) for *_, port, _ in tasks)
    for _, node, place, named, port, own in tasks:
        assert (int(named), int(port)) == (int(node) + 1, base + int(place)), said
        assert len(own.split(",")) == gpus, said
    of_nodes = [(node, gpu) for _, node, *_, own in tasks for gpu in own.split(",")]
    assert len(set(of_nodes)) == len(of_nodes), said

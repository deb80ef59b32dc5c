"""A process that dies, freezes, raises or ends too early: the others end within the
time, and say which one it was, and where.
"""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import keras
import pytest

import keras_distribute as kd
from keras_distribute._compat import jax_internals
from keras_distribute.cluster import agreement, liveness, processes
from keras_distribute.cluster.heartbeats import Heartbeat, Heartbeats
from keras_distribute.cluster.ports import free_port

pytestmark = pytest.mark.timeout(120)
SECONDS = 6.0


def training(raises=None, error=KeyError, text="a bug of the user's"):
    import numpy as np

    said = []
    if raises is not None:
        processes._LOOK_SECONDS = 1.5  # For another culprit, of which there is none.
    options = kd.experimental.CommunicationOptions(timeout_seconds=SECONDS)
    strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")

    class Telling(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if not said and all(
                beat.steps for beat, _ in liveness.current.heard.last.values()
            ):
                said.append("running")  # It has heard of steps of all.
                print("running", flush=True)
            if raises == kd.process_index() and epoch == 3:
                raise error(text)
            time.sleep(0.02)

    model.fit(
        np.ones((40, 5)),
        np.ones((40, 3)),
        batch_size=10,
        epochs=10**6,
        verbose=0,
        callbacks=[Telling()],
    )


def survivors_of(num_processes, victim, number):
    """What the others write and how long they last, after one got a signal in the
    middle of an epoch.
    """
    with kd.testing.MultiProcessRunner(training, num_processes, timeout=80) as runner:
        end = time.monotonic() + 60
        while (
            not all("running" in runner.log(i) for i in range(num_processes))
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        runner.kill(victim, number)
        start = time.monotonic()
        while (
            runner.num_running > (number == signal.SIGSTOP)
            and time.monotonic() - start < 40
        ):
            time.sleep(0.05)
        seconds = time.monotonic() - start
        runner.kill(victim, signal.SIGKILL)
        results = runner.join()
        assert all("running" in result.log for result in results)
    assert results[victim].exit_code == 128 + (
        signal.SIGTERM if number == signal.SIGTERM else signal.SIGKILL
    )
    others = [result for result in results if result.index != victim]
    assert len(others) == num_processes - 1 and all(
        result.exit_code for result in others
    )
    return seconds, [result.log for result in others]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("num_processes", "victim", "number", "name"),
    [
        (3, 1, signal.SIGKILL, "process 1"),
        (2, 0, signal.SIGKILL, "process 0"),
        (2, 1, signal.SIGTERM, "process 1"),
        (2, 1, signal.SIGSTOP, "process 1"),
        (3, 0, signal.SIGSTOP, "process 0"),
    ],
)
def test_a_process_that_dies_or_freezes_is_named(num_processes, victim, number, name):
    seconds, logs = survivors_of(num_processes, victim, number)
    assert seconds < 6 * SECONDS  # And not after JAX's 100 seconds.
    for log in logs:
        said = [
            line
            for line in log.splitlines()
            if line.startswith("keras_distribute: ") and name in line
        ]
        # When process 0 dies, JAX ends a process at once, often after it has said so.
        ended_by_jax = (
            victim == 0
            and number == signal.SIGKILL
            and "JAX distributed service detected fatal" in log
        )
        assert said or ended_by_jax, log
        others = {f"process {i} gave its last sign" for i in range(num_processes)} - {
            f"{name} gave its last sign"
        }
        assert not any(wrong in log for wrong in others), log


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("raising", "error", "text", "named"),
    [
        (0, KeyError, "a bug of the user's", 'KeyError: "a bug of the user\'s"'),
        (1, ValueError, "INTERNAL: as of JAX", "ValueError: INTERNAL: as of JAX"),
    ],
)
def test_an_exception_on_one_process_ends_all_and_is_named_by_all(
    raising, error, text, named
):
    start = time.monotonic()
    with kd.testing.MultiProcessRunner(
        training, 2, args=[raising, error, text], timeout=80
    ) as runner:
        results = runner.join()
    assert time.monotonic() - start < 60
    assert [result.exit_code for result in results] == [
        1 if i == raising else liveness.FOLLOWING_CODE for i in (0, 1)
    ]
    assert named in results[raising].error
    assert f"process {raising} of 2 ends with this error" in results[raising].log
    text = f"process {raising} has raised {named}, in fit, evaluate or predict (step 16 of its program)"
    assert text in results[1 - raising].log


def leaving(leaver, what):
    options = kd.experimental.CommunicationOptions(timeout_seconds=SECONDS)
    strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        on_read = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
    for _ in range(3):
        strategy.run(lambda: on_read.assign_add(1.0))
    if kd.process_index() == leaver:
        print("leaves", flush=True)
        sys.exit(3)
    {
        "step": lambda: strategy.run(lambda: on_read.assign_add(1.0)),
        "read": lambda: float(on_read.numpy()),
        "barrier": lambda: kd.barrier("both are here"),
        "nothing": lambda: time.sleep(SECONDS / 2),
    }[what]()
    print("goes on", flush=True)
    time.sleep(60 if what != "nothing" else 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("leaver", "what"), [(1, "step"), (1, "read"), (0, "barrier")])
def test_a_process_that_ends_too_early_is_named_by_all(leaver, what):
    with kd.testing.MultiProcessRunner(
        leaving, 2, args=[leaver, what], timeout=80
    ) as runner:
        end = time.monotonic() + 60
        while "leaves" not in runner.log(leaver) and time.monotonic() < end:
            time.sleep(0.05)
        start = time.monotonic()
        results = runner.join()
    assert time.monotonic() - start < 4 * SECONDS
    assert [result.exit_code for result in results] == [
        1 if i == leaver else liveness.FOLLOWING_CODE for i in (0, 1)
    ]
    for result in results:
        assert (
            f"process {leaver} has ended after step 3 of its program, others have not"
            in result.log
        )
    if what == "barrier":
        assert f"Process {leaver} has ended." in results[1 - leaver].error


def test_whoever_is_done_waits_for_the_others():
    with kd.testing.MultiProcessRunner(
        leaving, 2, args=[1, "nothing"], timeout=80
    ) as runner:
        results = runner.join()
    assert [result.exit_code for result in results] == [0, 3]
    assert "goes on" in results[0].log


def heard(*texts, start=0):
    """What `Heartbeats.hear` gets: the heartbeats in these texts, by process."""
    return {i: Heartbeat.parse(text) for i, text in enumerate(texts, start)}


def test_whoever_has_begun_one_program_more_has_been_left():
    beats = Heartbeats(0, 3)
    beats.hear(heard("5|7|9|ended", "5|7|9|in run", start=1))
    assert beats.left_behind(9) is None
    assert beats.has_ended(1) and not beats.has_ended(2)
    assert beats.left_behind(10) == (
        1,
        "process 1 has ended after step 7 of its program, others have not",
    )


def test_a_long_place_is_cut():
    """Such as the path of a variable."""
    beat = Heartbeat(5, 1, 2, "at the reading of " + "x" * 600)
    assert Heartbeat.parse(beat.to_text()) == (5, 1, 2, beat.place[:500])


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    Clock.now = 0.0
    return Clock


def test_silence_is_judged_by_what_was_last_heard(clock):
    watch = Heartbeats(0, 3)
    watch.hear(heard("1|0|0|at the start", "1|7|7|in run", "1|7|7|in run"))
    clock.now = 8.0
    watch.hear(heard("2|0|0|at the start", "1|7|7|in run", "2|8|8|ended"))
    assert watch.silent(10.0) is None
    clock.now = 12.0
    assert watch.silent(5.0)[0] == 1  # The longest of all.
    watch.hear(heard("3|0|0|at the start", "1|7|7|in run", "2|8|8|ended"))
    assert (
        watch.silent(10.0)[1]
        == "process 1 gave its last sign of life 12 seconds ago, in run (step 7 of its program)"
    )
    clock.now = 23.0
    assert (
        watch.silent(10.0)[1]
        == "process 0, by which all find each other, has not answered for 11 seconds"
    )


def test_where_process_0_is_silent_nobody_else_is_blamed(clock):
    watch = Heartbeats(2, 3)
    watch.hear(heard("1|7|7|in run", "1|7|7|in run", "1|7|7|in run"))
    clock.now = 1.0  # Process 1 has told nothing new since, and process 0 freezes now.
    watch.hear(heard("2|7|7|in run", "1|7|7|in run", "2|7|7|in run"))
    clock.now = 10.5
    assert watch.silent(10.0) is None
    clock.now = 11.5
    assert watch.silent(10.0)[0] == 0


def test_time_in_which_it_stood_still_itself_does_not_count(clock):
    watch = Heartbeats(1, 2)
    clock.now = 60.0
    watch.discount(57.0)
    assert watch.silent(10.0) is None and watch.silent(2.0)[0] == 0


def test_where_nobody_gets_on_all_places_are_shown_once(clock, capsys):
    watch = liveness.Processes(0, 2, 10.0)
    for _ in range(3):
        watch.begin_step("in run", 2)
    watch.show_if_slow()
    watch.heard.hear(heard("1|3|3|in run", "1|2|2|in fit, evaluate or predict"))
    for clock.now in (100.0, 130.0, 200.0):
        watch.show_if_slow()
    said = capsys.readouterr().err
    assert said == (
        "keras_distribute: no step for 120 seconds in process 0. process 0 in run (step 3 of its program); "
        "process 1 in fit, evaluate or predict (step 2 of its program). "
        "A program of all, such as the reading of what is divided, waits until every process has begun it.\n"
    )


def test_who_reads_says_so(clock, capsys):
    watch = liveness.Processes(0, 2, 10.0)
    watch.begin_step("in run", 2)
    watch.begin_program(2, "at the reading of 'dense/kernel'")
    watch.show_if_slow()
    watch.heard.hear(heard("1|1|2|" + watch._place, "1|2|2|in run"))
    for clock.now in (100.0, 130.0):
        watch.show_if_slow()
    said = capsys.readouterr().err
    assert "process 0 at the reading of 'dense/kernel' (step 1 of its program)" in said
    watch.begin_step("in run", 2)
    assert watch.where == "in run (step 2 of its program)"


def going_on_alone():
    kd.MultiWorkerMirroredStrategy(
        communication_options=kd.experimental.CommunicationOptions(
            timeout_seconds=SECONDS / 2
        )
    )
    if kd.process_index() == 1:
        time.sleep(2 * SECONDS / 3)  # Others ask from time to time.
    kd.barrier("both are here")
    jax.distributed.shutdown()
    time.sleep(2 * SECONDS / 3)  # Longer than the time.
    print("alone", flush=True)


def test_whoever_has_ended_the_runtime_goes_on_alone():
    with kd.testing.MultiProcessRunner(going_on_alone, 2, timeout=80) as runner:
        results = runner.join()
    assert [result.exit_code for result in results] == [0, 0], results
    assert all("alone" in result.log for result in results)


def test_where_all_are_over_nobody_ends_because_of_another_one():
    ended = []
    watch = liveness.Processes(1, 2, 10.0, end=ended.append)
    watch._end_because(liveness._ALL_ENDED, "")
    watch.claim_the_end()  # No other thread has.
    assert not ended


class Service:
    """JAX's key-value service, where a stranger replaces each heartbeat at once."""

    verdict = b"-1|"

    def key_value_dir_get_bytes(self, folder):
        return [(f"{folder}/{process}", b"of a stranger") for process in (0, 1)]

    def key_value_set_bytes(self, key, value, *, allow_overwrite):
        if not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")

    def key_value_try_get_bytes(self, key):
        return self.verdict

    def blocking_key_value_get_bytes(self, key, wait):
        return self.verdict


def test_who_waits_for_the_end_hears_it_by_the_verdict(monkeypatch):
    """Process 0 has heard that all are over; its own last heartbeat is lost."""
    monkeypatch.setattr(jax_internals, "coordination_client", Service)
    ended = []
    watch = liveness.Processes(1, 2, 10.0, end=ended.append)
    watch.start()
    watch.wait_for_the_end()
    assert not watch.heard.has_ended(0) and not ended
    assert not any(thread.is_alive() for thread in watch._threads)


def test_one_process_listens_to_nobody():
    assert type(liveness.current) is liveness.Alone
    assert sys.excepthook is sys.__excepthook__  # An error waits for no other process.
    liveness.current.begin_step("in run", 1)
    liveness.current.begin_program(1)
    assert not liveness.current.has_ended(0)


def leaving_with_other_numbers():
    """As on a slice of TPUs, where JAX numbers the hosts by their places."""
    started = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
    jax.process_index = lambda *backend: (started + 1) % 3
    kd.MultiWorkerMirroredStrategy()
    kd.MultiWorkerMirroredStrategy()  # It runs already.
    if started == 2:
        return "left"
    with pytest.raises(kd.errors.ClusterError) as caught:
        kd.barrier("the end")
    return str(caught.value)


def test_who_has_ended_is_known_where_jax_numbers_otherwise():
    with kd.testing.MultiProcessRunner(
        leaving_with_other_numbers, 3, timeout=60
    ) as runner:
        told = [result.value for result in runner.join()]
    assert told[2] == "left"
    for text in told[:2]:
        assert "has ended" in text, told


def test_who_never_comes_is_told_before_jax_ends_the_process():
    """Which it does by a failed check, that names an RPC of its own."""
    code = (
        "from keras_distribute.cluster import processes\n"
        "from keras_distribute.cluster_resolver import automatic_resolver\n"
        "processes._STARTS = 1\n"
        "processes.start(automatic_resolver().topology(), 'a test', 2.0)"
    )
    variables = {"NUM_PROCESSES": "2", "JOB_ADDRESSES": f"127.0.0.1:{free_port()}"}
    told = []
    for own in (1, 0):  # Nobody listens to the first.
        environment = {**variables, "PROCESS_ID": str(own)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ
            | {f"KERAS_DISTRIBUTION_{name}": v for name, v in environment.items()},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode, done.stderr
        told.append(done.stderr[done.stderr.index("keras_distribute: Process") :])
    address = variables["JOB_ADDRESSES"]
    assert told[0].startswith(
        "keras_distribute: Process 1 of 2 could not join the others: in 2 seconds "
        f"nothing answers at {address}.\n  Received: the address {address} of process "
        "0, by a test.\n  Fix: check that process 0 runs, and that its address can be "
        "reached from this host.\n"
    )
    assert "in 2 seconds not all of the others have come.\n" in told[1]


def stopping_early():
    """As with a callback that ends the training of one process in an epoch."""
    agreement._APART_SECONDS = 2.0
    strategy = kd.MultiWorkerMirroredStrategy()

    def step():
        return kd.get_replica_context().all_reduce("SUM", 1.0)

    for _ in range(2):
        strategy.run(step)
    if jax.process_index() == 0:  # A program that is compared already.
        total = strategy.run(step)
        jax.block_until_ready(total.values)
    kd.barrier("the end of the epoch")


def test_who_goes_on_without_another_process_is_told():
    with kd.testing.MultiProcessRunner(stopping_early, 2, timeout=60) as runner:
        results = runner.join()
    assert [result.exit_code for result in results] == [liveness.FOLLOWING_CODE, 1]
    assert re.search(
        r"ClusterError: The processes do different things.*process 0 is in run \(step 3 "
        r"of its program\), process 1 at barrier 'the end of the epoch'",
        results[1].error,
        re.DOTALL,
    )

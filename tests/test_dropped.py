"""What was dropped without being closed is ended, and never waits for itself."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from keras_distribute.threads import dropped
from tests.interruptions import Interrupter

pytestmark = pytest.mark.timeout(120)


class Owner:
    pass


def test_the_end_comes_in_another_thread():
    ended = []
    owner = Owner()
    dropped.when_dropped(owner, lambda: ended.append(threading.current_thread().name))
    dropped.settle()
    assert ended == []
    del owner
    dropped.settle()
    assert ended == ["keras_distribute dropped"]


def test_nobody_waits_for_the_thread_where_nothing_was_dropped(monkeypatch):
    dropped.settle()
    monkeypatch.setattr(dropped._closer, "queue", None)
    dropped.settle()


def test_it_can_be_called_off():
    ended = []
    owner = Owner()
    dropped.when_dropped(owner, lambda: ended.append(1)).detach()
    del owner
    gc.collect()
    dropped.settle()
    assert ended == []


def test_a_failure_is_shown_and_does_not_end_the_thread(monkeypatch):
    shown, ended = [], []
    monkeypatch.setattr(
        sys, "excepthook", lambda kind, error, traceback: shown.append(repr(error))
    )

    def fail():
        raise OSError("the disk is full")

    first, second = Owner(), Owner()
    dropped.when_dropped(first, fail)
    dropped.when_dropped(second, lambda: ended.append(1))
    del first, second
    dropped.settle()
    assert shown == ["OSError('the disk is full')"]
    assert ended == [1]


def test_an_end_may_settle():
    ended = []
    owner = Owner()
    dropped.when_dropped(owner, lambda: (dropped.settle(), ended.append(1)))
    del owner
    dropped.settle()
    assert ended == [1]


def test_garbage_that_is_found_under_the_lock_of_the_threads_does_not_wait_for_itself():
    """A finalizer that joined a thread would wait for its own thread's lock."""
    ended, joined = [], threading.Thread(target=lambda: None)
    joined.start()
    collected = threading.Event()
    owner = Owner()
    owner.itself = owner
    dropped.when_dropped(
        owner, lambda: (joined.join(), collected.wait(20), ended.append(1))
    )
    del owner
    with (
        threading._shutdown_locks_lock
        if hasattr(threading, "_shutdown_locks_lock")
        else threading.Lock()
    ):
        gc.collect()
        assert ended == []
    collected.set()
    dropped.settle()
    assert ended == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
def test_a_forked_process_has_its_own_thread():
    program = """
    import os
    import threading
    from keras_distribute.threads import dropped
    class Owner: pass
    ended, closing, forked = [], threading.Event(), threading.Event()
    def of_the_parent():
        closing.set(); forked.wait(50); ended.append(0)
    for _ in range(2):
        owner = Owner(); dropped.when_dropped(owner, of_the_parent); del owner
    closing.wait(50)
    if os.fork() == 0:
        forked.set()
        owner = Owner(); dropped.when_dropped(owner, lambda: ended.append(1)); del owner; dropped.settle()
        os._exit(0 if ended == [1] and not dropped._closer.unfinished else 5)
    child = os.waitstatus_to_exitcode(os.wait()[1])
    forked.set(); dropped.settle()
    print(child, ended)
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.stdout.strip() == "0 [0, 0]", result.stderr


def test_a_failure_that_cannot_be_shown_does_not_end_the_thread(monkeypatch):
    def fail(*args):
        raise OSError("stderr is closed")

    monkeypatch.setattr(sys, "excepthook", fail)
    ended = []
    first, second = Owner(), Owner()
    dropped.when_dropped(first, fail)
    dropped.when_dropped(second, lambda: ended.append(1))
    del first
    dropped.settle()
    del second
    dropped.settle()
    assert ended == [1]


def test_an_interruption_ends_no_thread():
    """Python before 3.13 takes a thread for ended whose `is_alive` was interrupted."""

    def drop():
        owner = Owner()
        dropped.when_dropped(owner, lambda: ended.append(1))
        del owner
        dropped.settle()

    ended: list[int] = []
    drop()
    counter = Interrupter(None)
    counter(drop)
    for place in range(counter.count):
        Interrupter(place)(drop)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("keras_distribute dropped") == 1
    ended.clear()
    drop()
    assert ended == [1]

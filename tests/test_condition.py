"""Ctrl-C at any place leaves no lock held, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from keras_distribute.devices.launches import Launches
from keras_distribute.threads import dropped
from keras_distribute.threads.condition import Condition
from tests.interruptions import Interrupter

pytestmark = pytest.mark.timeout(60)


def in_another_thread(function: Callable[[], Any]) -> bool:
    """Whether a call there ends."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def at_each_place(made: Callable[[], Callable[[], Any]]) -> Any:
    """Calls what `made` returns, interrupted once at each of its places."""
    counter = Interrupter(None)
    counter(made())
    assert counter.count > 5
    for place in range(counter.count):
        interrupter = Interrupter(place)
        interrupter(made())
        yield interrupter.where


def test_a_condition() -> None:
    condition = Condition()

    def waits_and_tells() -> None:
        with condition.lock:
            condition.wait(0.001)
            condition.notify_all()

    def enters() -> None:
        with condition.lock:
            pass

    for where in at_each_place(lambda: waits_and_tells):
        assert in_another_thread(enters), where


def test_a_condition_is_told() -> None:
    for first in (None, 3):  # Also when somebody who waited was interrupted.
        condition, told = Condition(), []

        def wait(condition: Condition = condition) -> None:
            with condition.lock:
                condition.wait(0.01)

        if first is not None:
            Interrupter(first)(wait)

        def tell(condition: Condition = condition, told: list[int] = told) -> None:
            with condition.lock:
                told.append(1)
                condition.notify_all()

        with condition.lock:
            threading.Timer(0.05, tell).start()
            assert condition.wait_for(lambda told=told: told, timeout=30)


def test_a_condition_is_not_entered_by_itself() -> None:
    with pytest.raises(TypeError, match=r"with condition\.lock:"), Condition():
        pass


def test_settling() -> None:
    class Owner:
        pass

    def made() -> Callable[[], Any]:
        owner = Owner()
        dropped.when_dropped(owner, int)
        del owner
        return dropped.settle

    for where in at_each_place(made):
        assert in_another_thread(dropped.settle), where


def test_a_program_in_the_thread() -> None:
    made = Launches()
    landing: list[Any] = []

    def call() -> None:
        with made.lock:
            made.settle()
            made.run_in_thread(lambda: (1, 2), (), landing)

    def settle() -> None:
        with made.lock:
            made.settle()

    for where in at_each_place(lambda: call):
        assert in_another_thread(settle), where
        assert landing in ([], [(1, 2)]), where
        landing.clear()

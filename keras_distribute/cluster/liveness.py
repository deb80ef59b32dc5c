"""Whether the other processes live, and where they stand: signs of life through JAX's key-value service.

JAX ends a process when another one has died, but does not say which. Here each process tells the others about once a
second where it is; one that is silent for too long is named, with its last place, and this process ends. Where nobody
gets on, all places are shown once, and nothing else happens: a step may be slow.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_distribute._compat import jax_internals

SLOW_SECONDS = 120.0
_MOST_SECONDS = 1.0
_FOLDER = "keras_distribute/alive"

_steps = 0
_place = "at the start"
_watch: _Watch | None = None


def at(place: str) -> None:
    """Notes where this process is; called before each step."""
    global _steps, _place
    _steps, _place = _steps + 1, place


def watch(process: int, num_processes: int, timeout: float) -> None:
    """Begins to tell and to listen.

    Args:
        process: The number of this one.
        num_processes: Of all.
        timeout: Seconds of silence after which a process counts as dead.
    """
    global _watch
    _watch = _Watch(process, num_processes, timeout)
    _watch.start()


def whoever_is_silent(wait: float) -> str | None:
    """Which process has just fallen silent, in words; looks for it for some seconds."""
    if _watch is None:
        return None
    end = time.monotonic() + wait
    while time.monotonic() < end:
        silent = _watch.silent(3 * _watch.interval)
        if silent is not None:
            return silent
        time.sleep(_watch.interval / 4)
    return None


class _Watch:
    """What this process knows of the others.

    Args:
        process: The number of this one.
        num_processes: Of all.
        timeout: Seconds of silence after which a process counts as dead.
        end: Ends this process.
    """

    def __init__(self, process: int, num_processes: int, timeout: float, end: Callable[[int], Any] = os._exit) -> None:
        self._process, self._num_processes, self._timeout, self._end = process, num_processes, timeout, end
        self.interval = min(_MOST_SECONDS, timeout / 8)
        self._stopped = threading.Event()
        self._turn = 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered = time.monotonic()
        self._moved, self._shown = (time.monotonic(), -1), False

    def start(self) -> None:
        for loop in (self._tell_and_hear, self._judge):
            threading.Thread(target=loop, name=f"keras_distribute {loop.__name__}", daemon=True).start()

    def stop(self) -> None:
        """At the end of the program, when silence means nothing."""
        self._stopped.set()

    def _tell_and_hear(self) -> None:
        client = jax_internals.coordination_client()
        while not self._stopped.wait(self.interval):
            self._turn += 1
            with contextlib.suppress(Exception):  # Whoever does not answer is noticed by its silence.
                told = f"{self._turn}|{_steps}|{_place}"
                client.key_value_set(f"{_FOLDER}/{self._process}", told, allow_overwrite=True)
                self.hear(dict(client.key_value_dir_get(_FOLDER)))

    def hear(self, said: dict[str, str]) -> None:
        """Notes what all have said, by the key of each."""
        now = time.monotonic()
        self._answered = now
        for key, told in said.items():
            process = int(key.rsplit("/", 1)[1])
            if self._heard.get(process, ("", 0.0))[0] != told:
                self._heard[process] = (told, now)

    def silent(self, seconds: float) -> str | None:
        """Which process has been silent for so long, in words."""
        now = time.monotonic()
        if now - self._answered > seconds:
            return f"process 0, by which all find each other, has not answered for {now - self._answered:.0f} seconds"
        for process, (told, when) in sorted(self._heard.items()):
            if process != self._process and now - when > seconds and not told.endswith("|ended"):
                return f"process {process} gave its last sign of life {now - when:.0f} seconds ago, {_where(told)}"
        return None

    def _judge(self) -> None:
        while not self._stopped.wait(self.interval / 2):
            silent = self.silent(self._timeout)
            if silent is not None:
                self._write(f"{silent}. Process {self._process}, {_where(f'0|{_steps}|{_place}')}, ends.")
                self._end(1)
                return
            self.show_if_slow()

    def show_if_slow(self) -> None:
        """Shows where all stand, once, when this process has not begun a step for long."""
        moved, steps = self._moved
        if steps != _steps:
            self._moved, self._shown = (time.monotonic(), _steps), False
        elif _steps and not self._shown and time.monotonic() - moved > SLOW_SECONDS:
            self._shown = True
            places = "; ".join(f"process {p} {_where(told)}" for p, (told, _) in sorted(self._heard.items()))
            self._write(f"no step for {SLOW_SECONDS:.0f} seconds in process {self._process}. {places}.")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"keras_distribute: {text}\n")
        sys.stderr.flush()


def _where(told: str) -> str:
    _, steps, place = told.split("|", 2)
    return f"{place} (step {steps} of its program)" if int(steps) else place


def say_that_it_ends() -> None:
    """Tells the others that this process ends because its program does."""
    if _watch is None:
        return
    _watch.stop()
    client = jax_internals.coordination_client()
    if client is not None:
        with contextlib.suppress(Exception):
            client.key_value_set(f"{_FOLDER}/{_watch._process}", f"{_watch._turn}|{_steps}|ended", allow_overwrite=True)

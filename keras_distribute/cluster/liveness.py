"""Whether the other processes are alive: heartbeats through JAX's key-value service.

JAX ends a process when another one has died, but does not say which. Here each process
sends a heartbeat about once a second. The first one to know why the job cannot go on
(its own exception, or a process that is silent or has ended too early) writes that in
one place, the verdict. All others wait for the verdict, repeat it, and end. So every
process names the same culprit, and not one that has ended because of it. Where no
process makes progress, all places are shown once, and nothing else happens: a step may
be slow.

A process whose program is over waits for all others. Process 0 serves the keys and
values, and JAX ends all others at the moment that it ends, so it leaves last.

Anybody who reaches the service can write there. Heartbeats and the verdict are signed
with the token of the job, if it has one, and anything of another form is ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_distribute._compat import jax_internals
from keras_distribute.cluster.alone import check_together
from keras_distribute.cluster.heartbeats import ENDED, Heartbeat, Heartbeats, Verdict
from keras_distribute.cluster.signing import Seal

SLOW_SECONDS = 120.0
WAIT_SECONDS = 1800.0
FOLLOWING_CODE = 43  # The exit code of a process that ends because of another one.
_MOST_SECONDS = 1.0
# An hour: each wait that times out costs process 0 some kilobytes for ever.
_LISTEN_SECONDS = 3600.0
_JOIN_SECONDS = 5.0
_ASK_SECONDS = 0.05
_FOLDER, _VERDICT = "keras_distribute/alive", "keras_distribute/verdict"
_MOST_TEXT = 2000  # Characters of a verdict.
_ALL_ENDED = -1  # In place of a culprit: the programs of all are over.


class Alone:
    """The processes that train together where there is only this one: does nothing."""

    has_joined = False
    seal = Seal(None)
    wait_seconds = WAIT_SECONDS

    def __init__(self) -> None:
        # All processes open their channels in the same order (`agreement.Channel`).
        self.channel_numbers = itertools.count()

    def begin_step(self, place: str, num_processes: int) -> None:
        """Notes that this process begins a step of `num_processes`, and where it is."""

    def begin_program(self, num_processes: int, place: str | None = None) -> None:
        """Notes that this process begins a program of `num_processes`, and where."""

    def has_ended(self, process: int) -> bool:
        """Whether a process that this one waits for has ended its program."""
        return False

    def ahead(self, process: int) -> str | None:
        """Where a process is that has begun more programs of all than this one; `None`
        where it has not, and in a thread that begins none.
        """
        return None


class Processes(Alone):
    """The processes that train together, as this one sees them.

    A process counts as dead after `timeout` seconds of silence. `end` ends this one.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        timeout: float,
        seal: Seal = Alone.seal,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        super().__init__()
        self.process, self.num_processes, self.seal = process, num_processes, seal
        self._timeout, self._end = timeout, end
        self._interval = min(_MOST_SECONDS, timeout / 8)
        self._steps, self._programs, self._place = 0, 0, "at the start"
        self._beginning: int | None = None  # The thread that begins programs.
        self._turn, self._leaves = 0, False
        self._stopped = threading.Event()
        # So that no older heartbeat is written after that this process leaves.
        self._sending = threading.Lock()
        # Held, for ever, by the thread that ends this process.
        self._ending = threading.Lock()
        self._keys = {f"{_FOLDER}/{other}": other for other in range(num_processes)}
        self.heard = Heartbeats(process, num_processes)
        # Of each process, by its number in JAX's meshes, the one that is heard of it.
        self.heard_as: Sequence[int] = range(num_processes)
        self._awaited: int | None = None
        self._verdict: Verdict | None = None
        self._warned = self._shown = False
        self._moved = (time.monotonic(), -1)
        self._threads = [
            threading.Thread(
                target=loop, name=f"keras_distribute {loop.__name__}", daemon=True
            )
            for loop in (self._send_and_hear, self._judge, self._listen)
        ]

    def start(self) -> None:
        """Begins to send and to hear."""
        for thread in self._threads:
            thread.start()

    def begin_step(self, place: str, num_processes: int) -> None:
        self._steps += 1
        self.begin_program(num_processes, place)

    def begin_program(self, num_processes: int, place: str | None = None) -> None:
        self._place = place or self._place
        if num_processes == self.num_processes:
            check_together("A program over the devices of all")
            self._programs += 1
            self._beginning = threading.get_ident()

    def has_ended(self, process: int) -> bool:
        other = self.heard_as[process]
        if not self.heard.has_ended(other):
            return False
        self._awaited = other
        return True

    def ahead(self, process: int) -> str | None:
        other = self.heard.last[self.heard_as[process]][0]
        is_ahead = other.programs > self._programs and not other.has_ended
        begins = self._beginning == threading.get_ident()
        return other.where if is_ahead and begins else None

    def sign(self, seal: Seal) -> None:
        """From now on only what this seal opens is heard."""
        with self._sending:
            self.seal, self.heard = seal, Heartbeats(self.process, self.num_processes)

    @property
    def where(self) -> str:
        """Where this process is, in words."""
        return Heartbeat(steps=self._steps, place=self._place).where

    def _send_and_hear(self) -> None:
        while not self._stopped.wait(self._interval):
            self._send()
            self._hear()

    def _send(self) -> None:
        # A process 0 that does not answer is noticed by its silence.
        with self._sending, contextlib.suppress(Exception):
            self._turn += 1
            place = ENDED if self._leaves else self._place
            own = Heartbeat(self._turn, self._steps, self._programs, place)
            self._write(f"{_FOLDER}/{self.process}", own.to_text(), replace=True)

    def _write(self, key: str, text: str, *, replace: bool) -> None:
        client = jax_internals.coordination_client()
        sealed = self.seal.sealed(key, text.encode())
        client.key_value_set_bytes(key, sealed, allow_overwrite=replace)

    def _hear(self) -> None:
        with contextlib.suppress(Exception):
            client = jax_internals.coordination_client()
            found: dict[int, Heartbeat] = {}
            for key, sealed in client.key_value_dir_get_bytes(_FOLDER):
                heartbeat = self._opened(key, sealed)
                if heartbeat is not None:
                    found[self._keys[key]] = heartbeat
            self.heard.hear(found)

    def _opened(self, key: str, sealed: bytes) -> Heartbeat | None:
        """A heartbeat; `None` for anything else, or an old one written again."""
        process = self._keys.get(key)
        found = Heartbeat.parse(self._text(key, sealed))
        if process is None or found is None:
            return None
        is_old = found.turn < self.heard.last[process][0].turn
        return None if self.seal.signs and is_old else found

    def _text(self, key: str, sealed: bytes) -> str:
        return (self.seal.opened(key, sealed) or b"").decode(errors="replace")

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._interval / 2):
            self.heard.discount(time.monotonic() - before - self._interval)
            before = time.monotonic()
            if jax_internals.coordination_client() is None:
                return  # The user has ended JAX's runtime, and goes on alone.
            found = self.heard.silent(self._timeout)
            found = found or self.heard.left_behind(self._programs)
            if found is not None:
                self._end_because(*self._pass_verdict(found))
                return
            self.show_if_slow()

    def _listen(self) -> None:
        """Waits for the verdict, or the end of process 0, which JAX would not name."""
        client = jax_internals.coordination_client()
        wait = round(1000 * _LISTEN_SECONDS)
        while not self._stopped.is_set():
            try:
                sealed = client.blocking_key_value_get_bytes(_VERDICT, wait)
            except Exception as error:
                if "UNAVAILABLE" in str(error) and not self._stopped.is_set():
                    where = self.heard.last[0][0].where
                    text = "process 0, by which all find each other, is gone"
                    self._print_end(f"{text}; it was last {where}")
                    self._end(FOLLOWING_CODE)  # At once: JAX is about to abort.
                    return
                if "DEADLINE_EXCEEDED" not in str(error):
                    self._stopped.wait(self._interval)
                continue
            verdict = self._read(sealed)
            if verdict is None:
                self._warn()
                self._stopped.wait(self._interval)
                continue
            self._verdict = verdict
            # For the error that this process may be about to raise.
            if not self._stopped.wait(self._interval):
                self._end_because(*verdict)
            return

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            print_error(
                "somebody who is no process of this job has written that it ends; "
                "that is ignored. Which networks are safe: docs/guide/network.md"
            )

    def _read(self, sealed: bytes) -> Verdict | None:
        """The verdict; `None` for what a stranger has written in its place."""
        text = self._text(_VERDICT, sealed)
        found = re.fullmatch(rf"(-1|\d{{1,9}})\|(.{{0,{_MOST_TEXT}}})", text, re.DOTALL)
        if found is None or int(found[1]) >= self.num_processes:
            return None
        return int(found[1]), found[2]

    def _read_verdict(self) -> Verdict | None:
        """The verdict, where there is one."""

        def read() -> None:
            client = jax_internals.coordination_client()
            self._verdict = self._read(client.key_value_try_get_bytes(_VERDICT))

        if self._verdict is None:
            self._briefly(read)
        return self._verdict

    def _pass_verdict(self, verdict: Verdict) -> Verdict:
        """Writes why the job ends, unless that is written already; returns what is."""

        def write() -> None:
            text = f"{verdict[0]}|{verdict[1][:_MOST_TEXT]}"
            try:
                self._write(_VERDICT, text, replace=False)
            except Exception:
                client = jax_internals.coordination_client()
                if self._read(client.key_value_try_get_bytes(_VERDICT)) is not None:
                    raise  # Another process was faster.
                self._write(_VERDICT, text, replace=True)
            self._verdict = verdict

        self._briefly(write)
        return self._read_verdict() or verdict

    def _briefly(self, ask: Callable[[], None]) -> None:
        """Asks process 0; goes on without an answer where it is frozen or fails."""

        def asking() -> None:
            with contextlib.suppress(Exception):
                ask()

        thread = threading.Thread(target=asking, daemon=True)
        thread.start()
        thread.join(2 * self._interval)

    def claim_the_end(self) -> None:
        """Makes the calling thread the one that ends this process; stops others."""
        self._ending.acquire()

    def reason(self, own: str, wait: float) -> str | None:
        """Why the job ends, by the verdict; `None` where the reason is this process.

        Waits so long for another verdict before it gives its `own`.
        """
        awaited = self._awaited
        found = None if awaited is None else self.heard.left_by(awaited)
        end = time.monotonic() + wait
        while time.monotonic() < end and not found and self._read_verdict() is None:
            found = self.heard.silent(3 * self._interval)
            time.sleep(self._interval / 4)
        culprit, text = self._pass_verdict(found or (self.process, own))
        return None if culprit == self.process else text

    def _end_because(self, culprit: int, text: str) -> None:
        if culprit == _ALL_ENDED:
            return
        self.claim_the_end()
        self._print_end(text)
        self._briefly(sys.stdout.flush)
        self.leave()
        self._end(1 if culprit == self.process else FOLLOWING_CODE)

    def _print_end(self, text: str) -> None:
        print_error(f"{text}. Process {self.process}, {self.where}, ends.")

    def leave(self) -> None:
        """Says that this process ends; process 0 waits until all but the culprit do."""
        self._say_that_it_ends()
        culprit = self._verdict[0] if self._verdict else self.process
        if self.process == 0 and culprit and self.heard.has_ended(culprit):
            time.sleep(2 * self._interval)  # It lives, and hears the verdict, too.
        present = set(self.heard.last) - {self.process, culprit}
        end = time.monotonic() + 4 * self._interval
        while self.process == 0 and present and time.monotonic() < end:
            # Also for those that have said so just now, and are about to end.
            time.sleep(self._interval / 4)
            present = {other for other in present if not self.heard.has_ended(other)}
            self._hear()

    def _say_that_it_ends(self) -> None:
        self._leaves = True
        self._briefly(self._send)

    def wait_for_the_end(self) -> None:
        """Tells the others that this program is over, and waits until theirs are.

        Where a verdict comes first, this process ends with it.
        """
        sys.stdout.flush()  # A verdict ends the process at once.
        self._say_that_it_ends()
        others = set(self.heard.last) - {self.process}
        # The first one to know that all are over says no more than the verdict.
        while (
            self._verdict is None
            and not all(map(self.heard.has_ended, others))
            and jax_internals.coordination_client() is not None
        ):
            time.sleep(_ASK_SECONDS)
            self._briefly(self._hear)
        # Ends all waits for a verdict. Others may have ended because of an earlier one.
        self._end_because(*self._pass_verdict((_ALL_ENDED, "")))
        self._stopped.set()
        for thread in self._threads:
            # One in a call of JAX's runtime would abort an interpreter that is gone.
            thread.join(_JOIN_SECONDS)

    def show_if_slow(self) -> None:
        """Shows where all are, once, when this process begins no step for long."""
        moved, steps = self._moved
        if steps != self._steps:
            self._moved, self._shown = (time.monotonic(), self._steps), False
        elif steps and not self._shown and time.monotonic() - moved > SLOW_SECONDS:
            self._shown = True
            last = sorted(self.heard.last.items())
            places = "; ".join(f"process {p} {beat.where}" for p, (beat, _) in last)
            text = f"no step for {SLOW_SECONDS:.0f} seconds in process {self.process}"
            print_error(
                f"{text}. {places}. A program of all, such as the reading of what is "
                "divided, waits until every process has begun it."
            )


def print_error(text: str) -> None:
    """A line on the standard error, at once."""
    sys.stderr.write(f"keras_distribute: {text}\n")
    sys.stderr.flush()


current: Alone = Alone()
"""The processes of this program; `processes.start` replaces it."""

"""Whether the other processes live, and where they stand: signs of life through JAX's
key-value service.

JAX ends a process when another one has died, but does not say which. Here each process
tells the others about once a second where it is. The first one to know why the job
cannot go on - an exception of its own, or another process that has been silent for too
long, or has ended too early - says so in one place, the verdict; all others hear it at
once, repeat it, and end. So every process names the same culprit, and not one that has
ended because of it. Where nobody gets on, all places are shown once, and nothing else
happens: a step may be slow.

A process whose program is over waits until those of all others are. It tells how many
programs of all processes it has taken part in: whoever has begun one more would wait
for it for ever.

Process 0 serves the keys and values, and JAX ends all others at the moment that it
ends: it leaves last.

Whoever reaches the service can write there. Signs of life and the verdict are signed
with the token of the job, if it has one, and whatever has another form is ignored.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_distribute._compat import jax_internals
from keras_distribute.cluster.signing import Seal

SLOW_SECONDS = 120.0
FOLLOWING_CODE = 43  # The exit code of a process that ends because of another one.
_MOST_SECONDS = 1.0
_LISTEN_SECONDS = 3600.0  # Each wait that comes to nothing stays in the memory of process 0, with some kilobytes.
_JOIN_SECONDS = 5.0
_ASK_SECONDS = 0.05
_FOLDER, _VERDICT = "keras_distribute/alive", "keras_distribute/verdict"
_ENDED = "ended"
_SIGN = re.compile(r"\d{1,15}(\|\d{1,15}){2}\|.{0,500}")
_MOST_TEXT = 2000  # Characters of a verdict.
_OVER = -1  # In place of a culprit: the programs of all are over.

_steps = 0
_together = 0
_awaited: int | None = None
_place = "at the start"
_watch: _Watch | None = None

Verdict = tuple[int, str]  # The process that is the reason, and what to say of it.


def at(place: str, num_processes: int) -> None:
    """Notes where this process is; called before each step.

    Args:
        place: In words.
        num_processes: That take part in the step.
    """
    global _steps, _place
    _steps, _place = _steps + 1, place
    together(num_processes)


def together(num_processes: int) -> None:
    """Notes that this process begins a program of so many processes, a step or another
    one.
    """
    global _together
    if _watch is not None and num_processes == _watch.num_processes:
        _together += 1


def has_ended(process: int) -> bool:
    """Whether a process that this one waits for has told that its program is over;
    notes that it was waited for.
    """
    global _awaited
    if _watch is None or not _watch.has_ended(process):
        return False
    _awaited = process
    return True


def watch(
    process: int, num_processes: int, timeout: float, seal: Seal | None = None
) -> None:
    """Begins to tell and to listen.

    Args:
        process: The number of this one.
        num_processes: Of all.
        timeout: Seconds of silence after which a process counts as dead.
        seal: With the token of the job, or without one.
    """
    global _watch
    _watch = _Watch(process, num_processes, timeout, seal=seal)
    _watch.start()


def sign(seal: Seal) -> None:
    """From now on only what this seal opens is heard.

    Args:
        seal: That all processes have by now, or are about to.
    """
    if _watch is not None:
        _watch.sign(seal)


def claim_the_end() -> None:
    """Makes the calling thread the one that ends this process; returns only where no
    other one does already.
    """
    if _watch is not None:
        _watch.claim()


def reason(own: str, wait: float) -> str | None:
    """Why the job ends, in the words that all processes hear: those of the first one to
    know.

    Args:
        own: What this process says of itself, where nobody else has said anything.
        wait: Seconds to look for another process before that.

    Returns:
        `None` where the reason is this process.
    """
    if _watch is None:
        return None
    found, end = (
        None if _awaited is None else _watch.left_by([_awaited]),
        time.monotonic() + wait,
    )
    while time.monotonic() < end and found is None and _watch.verdict() is None:
        found = _watch.silent(3 * _watch.interval)
        time.sleep(_watch.interval / 4)
    culprit, text = _watch.pass_verdict(found or (_watch.process, own))
    return None if culprit == _watch.process else text


def leave() -> None:
    """Says that this process ends because of an error; in process 0, waits until all
    others end.
    """
    if _watch is not None:
        _watch.leave()


def here() -> str:
    """Where this process is, in words."""
    return _where(f"0|{_steps}|{_together}|{_place}")


class _Watch:
    """What this process knows of the others.

    Args:
        process: The number of this one.
        num_processes: Of all.
        timeout: Seconds of silence after which a process counts as dead.
        end: Ends this process.
        seal: With the token of the job, or without one.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        timeout: float,
        end: Callable[[int], Any] = os._exit,
        seal: Seal | None = None,
    ) -> None:
        self.process, self.num_processes, self._timeout, self._end = (
            process,
            num_processes,
            timeout,
            end,
        )
        self.interval = min(_MOST_SECONDS, timeout / 8)
        self._stopped, self._leaves = threading.Event(), False
        self._tells = (
            threading.Lock()
        )  # So that nothing older is told after that this process leaves.
        self._ends = (
            threading.Lock()
        )  # Held, for ever, by the thread that ends this process.
        self._turn = 0
        self._seal = seal or Seal(None)
        self._warned = False
        self._keys = {f"{_FOLDER}/{other}": other for other in range(num_processes)}
        now = time.monotonic()
        self._heard = self._nothing_heard()
        self._answered = now
        self._moved, self._shown = (now, -1), False
        self._verdict: Verdict | None = None
        loops = (self._tell_and_hear, self._judge, self._listen)
        self._threads = [
            threading.Thread(target=loop, name=f"keras_distribute {loop.__name__}")
            for loop in loops
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        """At the end of the program, when silence means nothing."""
        self._stopped.set()
        for thread in (
            self._threads
        ):  # One in a call of JAX's runtime would abort an interpreter that is gone.
            thread.join(_JOIN_SECONDS)

    def sign(self, seal: Seal) -> None:
        """Forgets what was heard by another seal."""
        with self._tells:
            self._seal, self._heard = seal, self._nothing_heard()

    def _nothing_heard(self) -> dict[int, tuple[str, float]]:
        now = time.monotonic()
        return dict.fromkeys(range(self.num_processes), ("0|0|0|at the start", now))

    def claim(self) -> None:
        """Returns in the first thread that calls it, and never in another one."""
        self._ends.acquire()

    def _tell_and_hear(self) -> None:
        while not self._stopped.wait(self.interval):
            self._tell()
            self._ask()

    def _tell(self) -> None:
        client = jax_internals.coordination_client()
        with (
            self._tells,
            contextlib.suppress(Exception),
        ):  # Whoever does not answer is noticed by its silence.
            self._turn += 1
            told = f"{self._turn}|{_steps}|{_together}|{_ENDED if self._leaves else _place}"
            key = f"{_FOLDER}/{self.process}"
            sealed = self._seal.sealed(key, told.encode())
            client.key_value_set_bytes(key, sealed, allow_overwrite=True)

    def _ask(self) -> None:
        with contextlib.suppress(Exception):
            client = jax_internals.coordination_client()
            said = client.key_value_dir_get_bytes(_FOLDER)
            told = {key: self._told(key, sealed) for key, sealed in said}
            self.hear({key: sign for key, sign in told.items() if sign is not None})

    def _told(self, key: str, sealed: bytes) -> str | None:
        """A sign of life; `None` for what is none, or an old one written again."""
        process = self._keys.get(key)
        message = self._seal.opened(key, sealed)
        told = "" if message is None else message.decode(errors="replace")
        if process is None or not _SIGN.fullmatch(told):
            return None
        before = self._heard[process][0]
        is_old = int(told.split("|")[0]) < int(before.split("|")[0])
        return None if self._seal.signs and is_old else told

    def hear(self, said: dict[str, str]) -> None:
        """Notes what all have said, by the key of each."""
        now = time.monotonic()
        self._answered = now
        for key, told in said.items():
            process = int(key.rsplit("/", 1)[1])
            if self._heard[process][0] != told:
                self._heard[process] = (told, now)

    def pass_over(self, seconds: float) -> None:
        """Time in which this process itself stood still does not count: it could have
        heard nobody.
        """
        if seconds > 0:
            self._answered += seconds
            self._heard = {
                process: (told, when + seconds)
                for process, (told, when) in self._heard.items()
            }

    def silent(self, seconds: float) -> Verdict | None:
        """Which process has been silent for so long, the longest of all; and what to
        say of it.
        """
        now = time.monotonic()
        if now - self._answered > seconds:
            return (
                0,
                "process 0, by which all find each other, has not answered for "
                f"{now - self._answered:.0f} seconds",
            )
        others = [  # Up to the last answer: since then nobody could be heard.
            (when, process, told)
            for process, (told, when) in self._heard.items()
            if process != self.process
            and self._answered - when > seconds
            and not _is_over(told)
        ]
        if not others:
            return None
        when, process, told = min(others)
        return (
            process,
            f"process {process} gave its last sign of life {now - when:.0f} seconds "
            f"ago, {_where(told)}",
        )

    def has_ended(self, process: int) -> bool:
        """Whether a process has told that its program is over."""
        return _is_over(self._heard[process][0])

    def left_by(self, processes: Sequence[int]) -> Verdict | None:
        """What to say of the first of these, which have ended."""
        if not processes:
            return None
        steps = self._heard[processes[0]][0].split("|")[1]
        return (
            processes[0],
            f"process {processes[0]} has ended after step {steps} of its program, "
            "others have not",
        )

    def left_behind(self) -> Verdict | None:
        """Who has ended and is missing in a program that this process has begun."""
        over = [
            process
            for process in self._heard
            if process != self.process and self.has_ended(process)
        ]
        return self.left_by(
            [p for p in over if int(self._heard[p][0].split("|")[2]) < _together]
        )

    def verdict(self) -> Verdict | None:
        """The reason for the end of the job, where one has been given."""

        def read() -> None:
            client = jax_internals.coordination_client()
            self._verdict = self._read(client.key_value_try_get_bytes(_VERDICT))

        if self._verdict is None:
            self._briefly(read)
        return self._verdict

    def pass_verdict(self, verdict: Verdict) -> Verdict:
        """Says why the job ends, unless somebody has said so before; returns what
        holds.
        """

        def write() -> None:
            client = jax_internals.coordination_client()
            text = f"{verdict[0]}|{verdict[1][:_MOST_TEXT]}".encode()
            sealed = self._seal.sealed(_VERDICT, text)
            try:
                client.key_value_set_bytes(_VERDICT, sealed)
            except Exception:
                there = client.key_value_try_get_bytes(_VERDICT)
                if self._read(there) is not None:
                    raise  # Another process was faster.
                client.key_value_set_bytes(_VERDICT, sealed, allow_overwrite=True)
            self._verdict = verdict

        self._briefly(write)
        return self.verdict() or verdict

    def _briefly(self, ask: Callable[[], None]) -> None:
        """Asks process 0, and goes on without an answer where it is frozen, or an error
        is the answer.
        """

        def asking() -> None:
            with contextlib.suppress(Exception):
                ask()

        thread = threading.Thread(target=asking, daemon=True)
        thread.start()
        thread.join(2 * self.interval)

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self.interval / 2):
            self.pass_over(time.monotonic() - before - self.interval)
            before = time.monotonic()
            if jax_internals.coordination_client() is None:
                return  # The user has ended JAX's runtime, and goes on alone.
            found = self.silent(self._timeout) or self.left_behind()
            if found is not None:
                self._end_because(*self.pass_verdict(found))
                return
            self.show_if_slow()

    def _listen(self) -> None:
        """Waits for the verdict; and for process 0 to end, of which JAX would tell
        without a name.
        """
        client = jax_internals.coordination_client()
        while not self._stopped.is_set():
            try:
                wait = round(1000 * _LISTEN_SECONDS)
                sealed = client.blocking_key_value_get_bytes(_VERDICT, wait)
                verdict = self._read(sealed)
            except Exception as error:
                if "UNAVAILABLE" in str(error) and not self._stopped.is_set():
                    text = f"process 0, by which all find each other, is gone; it was last {_where(self._heard[0][0])}"
                    self._write(f"{text}. Process {self.process}, {here()}, ends.")
                    self._end(FOLLOWING_CODE)  # At once: JAX is about to abort.
                    return
                if "DEADLINE_EXCEEDED" not in str(error):
                    self._stopped.wait(self.interval)
                continue
            if verdict is None:
                self._warn()
                self._stopped.wait(self.interval)
                continue
            self._verdict = verdict
            self._stopped.wait(
                self.interval
            )  # For the error that this process may be about to raise.
            if not self._stopped.is_set():
                self._end_because(*verdict)
            return

    def _read(self, sealed: bytes) -> Verdict | None:
        """The verdict; `None` for what a stranger has written in its place."""
        message = self._seal.opened(_VERDICT, sealed)
        text = "" if message is None else message.decode(errors="replace")
        found = re.fullmatch(rf"(-1|\d{{1,9}})\|(.{{0,{_MOST_TEXT}}})", text, re.DOTALL)
        if found is None or int(found[1]) >= self.num_processes:
            return None
        return int(found[1]), found[2]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            self._write(
                "somebody who is no process of this job has written that it ends; "
                "that is ignored. Which networks are safe: docs/guide/network.md"
            )

    def _end_because(self, culprit: int, text: str) -> None:
        if culprit == _OVER:
            return
        self.claim()
        self._write(f"{text}. Process {self.process}, {here()}, ends.")
        self._briefly(sys.stdout.flush)
        self.leave()
        self._end(1 if culprit == self.process else FOLLOWING_CODE)

    def say_that_it_ends(self) -> None:
        """From now on its silence means nothing."""
        self._leaves = True
        self._briefly(self._tell)

    def leave(self) -> None:
        """Says that this process ends; process 0 waits until the others have said so,
        too, but for the culprit.
        """
        self.say_that_it_ends()
        culprit = self._verdict[0] if self._verdict else self.process
        if self.process == 0 and culprit and self.has_ended(culprit):
            time.sleep(2 * self.interval)  # It lives, and hears the verdict, too.
        present = set(self._heard) - {self.process, culprit}
        end = time.monotonic() + 4 * self.interval
        while self.process == 0 and present and time.monotonic() < end:
            time.sleep(
                self.interval / 4
            )  # The last time for those that have said so, and are about to end.
            present = {other for other in present if not self.has_ended(other)}
            self._ask()

    def wait_for_all(self) -> None:
        """Returns when the programs of all others are over, too; where a verdict comes
        first, this process ends.

        All waits for a verdict end then, too.
        """
        others = set(self._heard) - {self.process}
        while (
            not all(map(self.has_ended, others))
            and jax_internals.coordination_client() is not None
        ):
            time.sleep(_ASK_SECONDS)
            self._briefly(self._ask)
        self._end_because(
            *self.pass_verdict((_OVER, ""))
        )  # Others may have ended because of an earlier one.

    def show_if_slow(self) -> None:
        """Shows where all stand, once, when this process has not begun a step for long."""
        moved, steps = self._moved
        if steps != _steps:
            self._moved, self._shown = (time.monotonic(), _steps), False
        elif _steps and not self._shown and time.monotonic() - moved > SLOW_SECONDS:
            self._shown = True
            places = "; ".join(
                f"process {p} {_where(told)}"
                for p, (told, _) in sorted(self._heard.items())
            )
            self._write(
                f"no step for {SLOW_SECONDS:.0f} seconds in process {self.process}. "
                f"{places}."
            )

    def _write(self, text: str) -> None:
        sys.stderr.write(f"keras_distribute: {text}\n")
        sys.stderr.flush()


def _is_over(told: str) -> bool:
    return told.endswith(f"|{_ENDED}")


def _where(told: str) -> str:
    _, steps, _, place = told.split("|", 3)
    return f"{place} (step {steps} of its program)" if int(steps) else place


def wait_for_the_end() -> None:
    """Tells the others that this program is over, and waits until theirs are."""
    if _watch is not None:
        sys.stdout.flush()  # A verdict ends the process at once.
        _watch.say_that_it_ends()
        _watch.wait_for_all()
        _watch.stop()

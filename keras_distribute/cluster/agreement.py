"""How processes exchange host values, in turns, through JAX's key-value service.

Nothing here runs a program on a device, so it may be called while one runs, and from
threads. A single process agrees with itself at once.

A message is data (`messages`), signed with the token of the job, if it has one. Refused
is one that is not signed, or signed for another process, turn or start of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from keras_distribute._compat import jax_internals
from keras_distribute.cluster import liveness, messages, signing
from keras_distribute.cluster.alone import alone, check_together
from keras_distribute.errors import ClusterError

_PATIENT_SECONDS = 0.5
_ASK_SECONDS = 0.1
# A process that is late overwrites in this time what a stranger wrote in its place.
_REFUSED_SECONDS = 20.0
# How long one process may wait here for another that has gone on without it: threads of
# the two may begin programs at other moments.
_APART_SECONDS = 10.0
_T = TypeVar("_T")


class Interrupted(Exception):
    """A wait was given up by its own process."""


class Channel:
    """A conversation in which all processes speak in turn, and hear what each says.

    All processes open their channels in the same order, and with the same topics.

    Args:
        topic: What it is about; the processes compare it.
        num_processes: How many take part: all, or 1 for a process on its own.
        fix: What a user writes where a process does not take part, in place of the
            general advice.
    """

    def __init__(self, topic: str, num_processes: int, fix: str | None = None) -> None:
        self._topic, self._num_processes, self._fix = topic, num_processes, fix
        if num_processes > 1:
            check_together(f"The agreement on {topic!r}")
        numbers = liveness.current.channel_numbers
        self._name = f"keras_distribute/{next(numbers)}" if num_processes > 1 else ""
        self._turn = 0
        self._given_up = False

    def exchange(self, said: Any) -> list[Any]:
        """What each process says in this turn, in the order of their numbers.

        Raises:
            ClusterError: Where another process does something else, or says nothing for
                too long; where the message in its place is not signed.
            StructureTypeError: For anything but data (`messages`), without a token.
            Interrupted: After `give_up`.
        """
        if self._num_processes == 1:
            return [said]
        client, own = jax_internals.coordination_client(), jax.process_index()
        seal = liveness.current.seal
        turn, self._turn = self._turn, self._turn + 1
        message = messages.to_bytes((self._topic, said), signed=seal.signs)
        key = self._key(turn, own)
        sealed = seal.sealed(key, message)
        client.key_value_set_bytes(key, sealed, allow_overwrite=True)
        heard = [
            said if other == own else self._hear(turn, other)
            for other in range(self._num_processes)
        ]
        if turn:  # All have spoken in this turn, so all have heard the one before.
            client.key_value_delete(self._key(turn - 1, own))
        return heard

    def give_up(self) -> None:
        """Makes a wait in another thread end."""
        self._given_up = True

    def _key(self, turn: int, process: int) -> str:
        return f"{self._name}/{turn}/{process}"

    def _hear(self, turn: int, process: int) -> Any:
        message = self._wait_for(turn, process)
        topic, said = _topic_and_said(message, process)
        if topic != self._topic:
            raise self._apart(process, f"at {topic}")
        return said

    def _apart(self, process: int, where: str) -> ClusterError:
        return ClusterError(
            "The processes do different things.",
            received=f"process {process} is {where}, process {jax.process_index()} at "
            f"{self._topic}.",
            fix=self._fix
            or "run the same program on every process, also where a callback ends the "
            "training; only prints and files of your own may depend on kd.is_chief().",
        )

    def _wait_for(self, turn: int, process: int) -> bytes:
        """The message of another process, opened."""
        client, key = jax_internals.coordination_client(), self._key(turn, process)
        start = together = time.monotonic()
        refused: float | None = None
        while not self._given_up:
            # Asked before the message: what a process said before its end, or before
            # it went on, still counts.
            ended = liveness.current.has_ended(process)
            ahead = liveness.current.ahead(process)
            together = together if ahead else time.monotonic()
            waited = time.monotonic() - start
            try:
                sealed = _ask(client, key, patiently=waited < _PATIENT_SECONDS)
            except jax.errors.JaxRuntimeError as error:
                self._check_silence(error, process, turn, waited, ended)
                if ahead and time.monotonic() - together > _APART_SECONDS:
                    raise self._apart(process, ahead) from error
                continue
            message = liveness.current.seal.opened(key, sealed)
            if message is not None:
                return message
            refused = refused or time.monotonic()
            if time.monotonic() - refused > _REFUSED_SECONDS:
                raise _refusal(process, sealed)
            time.sleep(_ASK_SECONDS)
        raise Interrupted

    def _check_silence(
        self, error: Exception, process: int, turn: int, waited: float, ended: bool
    ) -> None:
        """Raises unless it is worth asking again for the message of a process, whose
        program had `ended` or not before the last question.
        """
        own, most = jax.process_index(), liveness.current.wait_seconds
        waits = f"process {own} waits for it at {self._topic}"
        look = (
            "look at the log of that process: every process has to run the same program"
        )
        text = str(error)
        if "DEADLINE_EXCEEDED" not in text and "NOT_FOUND" not in text:
            first_line = (text.splitlines() or [type(error).__name__])[0]
            raise ClusterError(
                f"Process {own} cannot hear the others any more: {first_line}",
                received=f"while waiting for process {process} at {self._topic}.",
                fix="look at the log of that process; a job is started again from its "
                "checkpoint.",
            ) from error
        if ended:
            what, fix = (
                f"Process {process} has ended.",
                self._fix or f"{look} to its end.",
            )
            raise ClusterError(what, received=f"{waits}.", fix=fix) from error
        if waited > most:
            raise ClusterError(
                f"Process {process} has said nothing for {most:.0f} seconds.",
                received=f"{waits}, turn {turn}.",
                fix=f"{look} program.",
            ) from error


def exchange(topic: str, said: Any, num_processes: int) -> list[Any]:
    """One turn of a channel of its own."""
    return Channel(topic, num_processes).exchange(said)


def from_chief(
    topic: str,
    function: Callable[[], _T],
    num_processes: int,
    fix: str | None = None,
) -> _T:
    """Broadcasts the result of a function that process 0 calls, or its exception.

    The function begins nothing in which the others take part (`alone`).

    Args:
        topic: What it is about; the processes compare it.
        function: What process 0 calls.
        num_processes: How many take part.
        fix: As of `Channel`.
    """
    if num_processes == 1:
        return function()
    said: Any = None
    if jax.process_index() == 0:
        try:
            with alone(topic):
                said = (function(), None)
            # A result that cannot be sent is an error in all processes.
            messages.to_bytes(said, signed=liveness.current.seal.signs)
        except Exception as error:
            said = (None, error)
    channel = Channel(topic, num_processes, fix)
    result, failure = channel.exchange(said)[0]
    if failure is not None:
        raise failure
    return result


def _topic_and_said(message: bytes, process: int) -> tuple[Any, Any]:
    signs = liveness.current.seal.signs
    if signing.is_signed(message) and not signs:
        raise ClusterError(
            f"Process {process} has a token of the job, and process "
            f"{jax.process_index()} has none.",
            received=f"a signed message of process {process}.",
            fix=f"the same token in every process: {signing.HOW_TO_GIVE}",
        )
    said = messages.from_bytes(message, signed=signs)
    return said if isinstance(said, tuple) and len(said) == 2 else (None, said)


def _refusal(process: int, sealed: bytes) -> ClusterError:
    return ClusterError(
        f"What process {process} says was refused: {signing.why_refused(sealed)}.",
        received=f"{len(sealed)} bytes, in process {jax.process_index()}.",
        fix="the same token in every process; where it is, somebody else wrote "
        f"this.\n    {signing.HOW_TO_GIVE}",
    )


def _ask(client: Any, key: str, *, patiently: bool) -> bytes:
    """The value of a key. Waits for it only at first: each wait that times out stays in
    the memory of process 0.
    """
    if patiently:
        return client.blocking_key_value_get_bytes(key, round(1000 * _PATIENT_SECONDS))
    time.sleep(_ASK_SECONDS)
    return client.key_value_try_get_bytes(key)

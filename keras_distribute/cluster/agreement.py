"""How processes tell each other host values: in turns, through the key-value service of
JAX's runtime.

Nothing here runs a program on a device, so it may be called while one runs, and from
threads. A single process agrees with itself at once.

What is said is data (`messages`), signed with the token of the job, if it has one: what
is not signed is refused, and so is what was said by another process, in another turn,
or in another start of the job.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from keras_distribute._compat import jax_internals
from keras_distribute.cluster import liveness, messages, signing
from keras_distribute.errors import ClusterError

_PATIENT_SECONDS = 0.5
_ASK_SECONDS = 0.1
# In which the process itself, if it is late, puts right what a stranger said for it.
_REFUSED_SECONDS = 20.0
_DEFAULT_SECONDS = 1800.0
_T = TypeVar("_T")
_numbers = itertools.count()
_wait_seconds = _DEFAULT_SECONDS
_seal = signing.Seal(None)


class Interrupted(Exception):
    """A wait was given up by its own process."""


class Channel:
    """A conversation in which all processes speak in turn: what each says, all hear.

    All processes open their channels in the same order, and with the same topics.

    Args:
        topic: What it is about; the processes compare it.
        num_processes: How many take part: all, or 1 for one that speaks with itself.
    """

    def __init__(self, topic: str, num_processes: int) -> None:
        self._topic, self._num_processes = topic, num_processes
        self._name = f"keras_distribute/{next(_numbers)}" if num_processes > 1 else ""
        self._turn = 0
        self._given_up = False

    def exchange(self, said: Any) -> list[Any]:
        """What each process says in this turn, in the order of their numbers.

        Args:
            said: As of `messages.to_bytes`.

        Raises:
            ClusterError: Where another process does something else, or says nothing for
                too long; where what stands in its place is not signed.
            StructureTypeError: For an object that is no data, without a token.
            Interrupted: After `give_up`.
        """
        if self._num_processes == 1:
            return [said]
        client, own = jax_internals.coordination_client(), jax.process_index()
        turn, self._turn = self._turn, self._turn + 1
        message = messages.to_bytes((self._topic, said), signed=_seal.signs)
        key = self._key(turn, own)
        sealed = _seal.sealed(key, message)
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
        client, key = jax_internals.coordination_client(), self._key(turn, process)
        start = time.monotonic()
        refused: float | None = None
        while True:
            if self._given_up:
                raise Interrupted
            ended = liveness.has_ended(
                process
            )  # What it said before can still be heard.
            try:
                patient = time.monotonic() - start < _PATIENT_SECONDS
                sealed = _asked(client, key, patient)
                message = _seal.opened(key, sealed)
                if message is not None:
                    break
                refused = refused or time.monotonic()
                if time.monotonic() - refused > _REFUSED_SECONDS:
                    raise _refusal(process, sealed)
                time.sleep(_ASK_SECONDS)
            except jax.errors.JaxRuntimeError as error:
                if not any(
                    status in str(error)
                    for status in ("DEADLINE_EXCEEDED", "NOT_FOUND")
                ):
                    raise ClusterError(
                        f"Process {jax.process_index()} cannot hear the others any "
                        f"more: {_first_line(error)}",
                        received=f"while waiting for process {process} at "
                        f"{self._topic}.",
                        fix="look at the log of that process; a job is started again "
                        "from its checkpoint.",
                    ) from error
                if ended:
                    raise ClusterError(
                        f"Process {process} has ended.",
                        received=f"process {jax.process_index()} waits for it at "
                        f"{self._topic}.",
                        fix="look at the log of that process: every process has to run "
                        "the same program to its end.",
                    ) from error
                if time.monotonic() - start > _wait_seconds:
                    raise ClusterError(
                        f"Process {process} has said nothing for {_wait_seconds:.0f} "
                        "seconds.",
                        received=f"process {jax.process_index()} waits for it at "
                        f"{self._topic}, turn {turn}.",
                        fix="look at the log of that process: every process has to run "
                        "the same program.",
                    ) from error
        topic, said = _topic_and_said(message, process)
        if topic != self._topic:
            raise ClusterError(
                "The processes do different things.",
                received=f"process {process} is at {topic}, process "
                f"{jax.process_index()} at {self._topic}.",
                fix="run the same program on every process; only files and prints may "
                "depend on kd.is_chief().",
            )
        return said


def set_wait(seconds: float | None) -> None:
    """How long to wait for another process that lives (`liveness` looks after others):
    half an hour, or longer.
    """
    global _wait_seconds
    _wait_seconds = max(seconds or 0.0, _DEFAULT_SECONDS)


def begin(seal: signing.Seal, num_processes: int) -> None:
    """Begins to sign what this process says, for this start of the job alone.

    Args:
        seal: With the token of the job, or without one.
        num_processes: Of all.

    Raises:
        ClusterError: Where other processes have another token, or none.
    """
    global _seal
    _seal = seal
    nonces = exchange("the token of the job", signing.new_nonce(), num_processes)
    _seal = seal.of(list(map(str, nonces)))
    liveness.sign(_seal)


def exchange(topic: str, said: Any, num_processes: int) -> list[Any]:
    """One turn of a channel of its own."""
    return Channel(topic, num_processes).exchange(said)


def from_chief(topic: str, function: Callable[[], _T], num_processes: int) -> _T:
    """Calls a function in process 0; all others wait, and get what it returned, or
    raise what it raised.

    Args:
        topic: What it does.
        function: Its result, or its exception, is of the kinds of `messages.to_bytes`.
        num_processes: How many take part.
    """
    said: Any = None
    if num_processes == 1 or jax.process_index() == 0:
        try:
            said = (function(), None)
        except Exception as error:
            if num_processes == 1:
                raise
            said = (None, error)
        else:
            if num_processes > 1:
                said = _sayable(said)
    result, failure = exchange(topic, said, num_processes)[0]
    if failure is not None:
        raise failure
    return result


def _sayable(said: tuple[Any, None]) -> tuple[Any, Exception | None]:
    """What process 0 says of a result; of one that it cannot say, the error of all."""
    try:
        messages.to_bytes(said, signed=_seal.signs)
    except Exception as error:
        return None, error
    return said


def _topic_and_said(message: bytes, process: int) -> tuple[Any, Any]:
    if signing.is_signed(message) and not _seal.signs:
        raise ClusterError(
            f"Process {process} has a token of the job, and process "
            f"{jax.process_index()} has none.",
            received=f"a signed message of process {process}.",
            fix=f"the same token in every process: {signing.HOW_TO_GIVE}",
        )
    said = messages.from_bytes(message, signed=_seal.signs)
    return said if isinstance(said, tuple) and len(said) == 2 else (None, said)


def _refusal(process: int, sealed: bytes) -> ClusterError:
    return ClusterError(
        f"What process {process} says was refused: {signing.why_refused(sealed)}.",
        received=f"{len(sealed)} bytes, in process {jax.process_index()}.",
        fix="the same token in every process; where it is, somebody else wrote "
        f"this.\n    {signing.HOW_TO_GIVE}",
    )


def _asked(client: Any, key: str, patient: bool) -> bytes:
    """What there is at a key, soon after it is. Each wait that comes to nothing stays
    in the memory of process 0.
    """
    if patient:
        return client.blocking_key_value_get_bytes(key, round(1000 * _PATIENT_SECONDS))
    time.sleep(_ASK_SECONDS)
    return client.key_value_try_get_bytes(key)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""What both kinds of task do with a message: they look at who says it, and what is
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from keras_distribute.errors import ClusterError, DistributeError
from keras_distribute.remote.endpoint import Answer, Peer
from keras_distribute.remote.frames import Array, Header

Operation = Callable[[Any, Header, list[Array]], Answer]


class Task:
    """A worker, or a parameter server; it works for the coordinator that was the last
    to say `"begin"`.

    Attributes:
        kind: In words.
        operations: What it does, by name.
        refusal: The error for another coordinator.
        has_ended: Whether the coordinator has said goodbye.
    """

    kind: ClassVar[str]
    operations: ClassVar[Mapping[str, Operation]]
    refusal: ClassVar[type[DistributeError]]

    def __init__(self) -> None:
        self.has_ended = False
        self._coordinator = ""

    def handle(self, peer: Peer, header: Header, arrays: list[Array]) -> Answer:
        """Answers one message."""
        del peer
        operation = str(header.get("op"))
        if operation == "begin":
            self._coordinator = str(header["coordinator"])
        elif header.get("coordinator") != self._coordinator:
            raise self.refusal(
                f"The {self.kind} works for another coordinator.",
                received=f"a message of {header.get('coordinator')!r}.",
                fix="start the program of the coordinator anew.",
            )
        method = self.operations.get(operation)
        if method is None:
            raise ClusterError(
                f"A {self.kind} does not know {operation!r}.",
                received=f"{header!r}.",
                fix="run the same version of keras_distribute in all tasks.",
            )
        return method(self, header, arrays)

    def end(self, header: Header, arrays: list[Array]) -> Answer:
        """The coordinator says goodbye."""
        del header, arrays
        self.has_ended = True
        return {}, []

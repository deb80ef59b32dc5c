"""What both kinds of task do with a message: they look at who says it, and what is
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from keras_distribute.errors import ClusterError, UnavailableError
from keras_distribute.remote.endpoint import Answer
from keras_distribute.remote.frames import Array, Header

Operation = Callable[[Any, Header, list[Array]], Answer]


class Task:
    """A worker, or a parameter server; it works for the coordinator that was the last
    to say `"begin"`.

    Attributes:
        kind: In words.
        operations: What it does, by name.
        has_ended: Whether the coordinator has said goodbye.
    """

    kind: ClassVar[str]
    operations: ClassVar[Mapping[str, Operation]]

    def __init__(self) -> None:
        self.has_ended = False
        self._coordinator = ""

    def handle(self, header: Header, arrays: list[Array]) -> Answer:
        """Answers one message."""
        operation = str(header.get("op"))
        if operation == "begin":
            self._coordinator = str(header["coordinator"])
        elif header.get("coordinator") != self._coordinator:
            raise self._refusal()
        method = self.operations.get(operation)
        if method is None:
            raise ClusterError(
                f"A {self.kind} does not know {operation!r}.",
                received=f"{header!r}.",
                fix="run the same version of keras_distribute in all tasks.",
            )
        return method(self, header, arrays)

    def _refusal(self) -> Exception:
        """The error for whoever else than the coordinator says something."""
        if not self._coordinator:
            return UnavailableError(f"The {self.kind} was started again.")
        return ClusterError(
            f"The {self.kind} works for another coordinator, which has taken it: a "
            "cluster serves one strategy at a time.",
            received="a message of the strategy that had it before.",
            fix="strategy.close(), and then the next strategy for the cluster; or a "
            "cluster for each: kd.ParameterServerStrategy() starts one of its own.",
        )

    def end(self, header: Header, arrays: list[Array]) -> Answer:
        """The coordinator says goodbye."""
        self.has_ended = True
        return {}, []

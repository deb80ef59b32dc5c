"""What the traces of one ragged program tell each other about what they gather.

A function whose replicas hold different shapes is traced once for each variant of the
shapes, one after the other. At each `all_gather` a trace needs the shapes of the other
variants. The first time it is broken off; when all variants have said their shapes,
they are traced again, and go on with the answer. So no line of the function ever runs
with a guessed shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_distribute.errors import ValueStructureError

_MOST_CHANGES = 8

Form = tuple[tuple[int, ...], str]
"""The shape and the dtype of an array."""


class BrokenOff(BaseException):
    """Ends a trace that needs more shapes; `except Exception` does not catch it."""


class Told:
    """What each replica has at each place, in the order in which traces reach it."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._places: list[tuple[tuple[Form, ...], ...]] = []
        self._changes = 0
        self._before: list[tuple[int, tuple[Form, ...], bool]] = []

    def trace(self, replicas: Sequence[int]) -> RaggedTrace:
        """A new trace, of these replicas."""
        return RaggedTrace(self._places, tuple(replicas))

    def learn(self, traces: Sequence[RaggedTrace]) -> bool:
        """Notes what the traces of all variants were broken off for.

        Returns:
            Whether any was: then all have to be traced again.

        Raises:
            ValueStructureError: Where only some of them reach a place, or another one
                each time.
        """
        if not any(trace.broken_off for trace in traces):
            return False
        place = min(trace.place for trace in traces if trace.broken_off)
        if place < len(self._places) or not all(trace.broken_off for trace in traces):
            # A layer that gathers while it is built does so in one trace, and not in
            # the next one.
            before = self._before
            self._before = [(each.place, each.own, each.broken_off) for each in traces]
            self._changes += 1
            if before == self._before:
                raise _error(
                    traces,
                    "The replicas hold different numbers of rows, and would "
                    "communicate in different ways.",
                    "communicate in the same order for any number of rows; or pass "
                    "batches that divide over the replicas.",
                )
            if self._changes > _MOST_CHANGES:
                raise _error(
                    traces,
                    "The function given to strategy.run gathers other shapes each time "
                    "it is traced.",
                    "let what it gathers depend on its arguments alone, not on a "
                    "counter or a Python random number.",
                )
            del self._places[place:]
            return True
        of_replica = {i: trace.own for trace in traces for i in trace.replicas}
        self._places.append(tuple(of_replica[i] for i in range(self._num_replicas)))
        return True


class RaggedTrace:
    """One trace of some replicas of a ragged program.

    Attributes:
        place: How many places it has come to before the last one.
        own: What the replicas have there.
        broken_off: Whether it could not go on from there.
    """

    def __init__(
        self, places: list[tuple[tuple[Form, ...], ...]], replicas: tuple[int, ...]
    ) -> None:
        self._places = places
        self.replicas = replicas
        self.place = -1
        self.own: tuple[Form, ...] = ()
        self.broken_off = False

    def of_all(self, own: Sequence[Form]) -> list[tuple[Form, ...]]:
        """What each replica has where these have `own`, in replica order.

        Raises:
            BrokenOff: Where the other replicas have not said it yet.
        """
        if self.broken_off:  # The function has caught the exception.
            raise BrokenOff
        self.place, self.own = self.place + 1, tuple(own)
        known = self.place < len(self._places)
        if not known or self._places[self.place][self.replicas[0]] != self.own:
            self.broken_off = True
            raise BrokenOff
        return list(self._places[self.place])

    def __repr__(self) -> str:
        forms = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.own)
        return f"all_gather of {forms}" if self.broken_off else "nothing more"


def _error(traces: Sequence[RaggedTrace], what: str, fix: str) -> ValueStructureError:
    shown = "; ".join(f"replica {trace.replicas[0]}: {trace}" for trace in traces)
    return ValueStructureError(what, received=f"{shown}.", fix=fix)

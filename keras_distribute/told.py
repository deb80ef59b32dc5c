"""What the traces of one ragged program tell each other. Knows neither programs nor
collectives.

A function whose replicas hold different shapes is traced once for each variant of the
shapes, one after the other. To join what the replicas gather, a trace has to know the
others' shapes at the same place. The first time that it comes to such a place it is
broken off; when all variants have said what they have there, they are traced anew, and
go on with the answer. So no line of the function ever runs with a shape that is only
guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_distribute.errors import ValueStructureError

_MOST_CHANGES = 8

Form = tuple[tuple[int, ...], str]
"""The shape and the dtype of an array."""


class BrokenOff(BaseException):
    """Ends a trace that has to know more. No error: `except Exception` lets it pass."""


class Told:
    """What each replica has at each place, in the order in which a trace comes to them."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._places: list[tuple[tuple[Form, ...], ...]] = []
        self._changes = 0
        self._before: list[tuple[int, tuple[Form, ...], bool]] = []

    def trace(self, replicas: Sequence[int]) -> RaggedTrace:
        """A new trace, of these replicas."""
        return RaggedTrace(self._places, tuple(replicas))

    def learn(self, traces: Sequence[RaggedTrace]) -> bool:
        """Takes in what the traces of all variants were broken off for.

        Returns:
            Whether there was anything: then they have to be traced anew.

        Raises:
            ValueStructureError: Where only some of them came to a place, or to another
                one each time.
        """
        if not any(trace.broken_off for trace in traces):
            return False
        place = min(trace.place for trace in traces if trace.broken_off)
        if place < len(self._places) or not all(trace.broken_off for trace in traces):
            # A layer that gathers while it is built does so in one trace, and not in
            # the next one.
            before, self._before = (
                self._before,
                [(trace.place, trace.own, trace.broken_off) for trace in traces],
            )
            self._changes += 1
            if before == self._before:
                raise _unlike_error(traces)
            if self._changes > _MOST_CHANGES:
                raise _unsteady_error(traces)
            del self._places[place:]
            return True
        of_replica = {i: trace.own for trace in traces for i in trace.replicas}
        self._places.append(tuple(of_replica[i] for i in range(self._num_replicas)))
        return True


class RaggedTrace:
    """One trace of some replicas of a ragged program.

    Attributes:
        replicas: The replicas.
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
        if self.broken_off:  # The function has caught it, and is of no more use.
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


def _received(traces: Sequence[RaggedTrace]) -> str:
    return "; ".join(f"replica {trace.replicas[0]}: {trace}" for trace in traces) + "."


def _unlike_error(traces: Sequence[RaggedTrace]) -> ValueStructureError:
    return ValueStructureError(
        "The replicas hold different numbers of rows, and would communicate in "
        "different ways.",
        received=_received(traces),
        fix="communicate in the same order, whatever the number of rows; or pass "
        "batches that "
        "divide over the replicas.",
    )


def _unsteady_error(traces: Sequence[RaggedTrace]) -> ValueStructureError:
    return ValueStructureError(
        "The function given to strategy.run gathers other shapes each time it is "
        "traced.",
        received=_received(traces),
        fix="let what it gathers depend on its arguments alone, not on a counter or a "
        "Python random number.",
    )

"""What a check found, as numbers and in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

_MOST_LINES = 12


@dataclasses.dataclass(frozen=True)
class Element:
    """One element of a copy, and of the copy that it was compared with.

    Args:
        index: Where it is in the variable.
        value: Of this copy.
        other: Of the other one.
        bits: The numbers of the bits that differ, 0 the lowest.
    """

    index: tuple[int, ...]
    value: Any
    other: Any
    bits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A copy of a variable that is not as others are.

    Args:
        path: Of the variable.
        replica: Which has the copy.
        device: Where it is, such as `"cpu:1"`.
        process: To which that belongs.
        beside: In words, the replica whose copy it was compared with.
        is_wrong: Whether more than half of the copies are as that one; with two copies
            nobody knows which is right.
        num_elements: How many elements differ; `None` for a variable that was not
            looked at any more, after many others.
        size: Of how many.
        elements: The first of those.
        largest: The largest difference of two elements; infinite beside a NaN.
        since: For a part of a variable that has no copies, and that no step changes:
            the step at which it was another.
    """

    path: str
    replica: int
    device: str
    process: int
    beside: str
    is_wrong: bool
    num_elements: int | None = None
    size: int = 0
    elements: tuple[Element, ...] = ()
    largest: float = 0.0
    since: int | None = None

    def __str__(self) -> str:
        where = f"replica {self.replica} ({self.device}, process {self.process})"
        if self.since is not None:
            return (
                f"{self.path} on {where} has other bits than at step {self.since}: "
                f"its part of {self.size} element(s) exists once, and no step changes "
                "it"
            )
        beside = f"most others, as {self.beside}" if self.is_wrong else self.beside
        text = f"{self.path} on {where} differs from {beside}"
        if self.num_elements is None:
            return text
        count = self.num_elements
        shown = "; ".join(map(_in_words, self.elements))
        more = "; ..." if count > len(self.elements) else ""
        return (
            f"{text}, in {count} of {self.size} element(s) by up to "
            f"{self.largest:.3g}: {shown}{more}"
        )


@dataclasses.dataclass(frozen=True)
class ConsistencyReport:
    """What `Strategy.check_consistency` found: print it.

    Attributes:
        num_variables: How many variables were compared.
        num_replicas: On how many replicas.
        skipped: The paths of variables of which there are no copies: they are divided
            over the replicas, each replica has its own, or they are elsewhere.
        differences: An entry for each copy that differs, with its `path`, `replica`,
            `device`, `process`, the replica `beside` which it differs, `is_wrong`,
            `num_elements` of `size`, the first `elements`, and the `largest`
            difference.
        step: Of the training, where it is known.
        is_repaired: Whether they have been made equal since.

    Example:
        >>> import keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> print(strategy.check_consistency(model))
        2 variables are the same on all 2 replicas.
    """

    num_variables: int
    num_replicas: int
    skipped: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    step: int | None = None
    is_repaired: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The variables that differ, each once."""
        return _paths(self.differences)

    @property
    def heading(self) -> str:
        """One sentence."""
        same = "variable is" if self.num_variables == 1 else "variables are"
        at = "" if self.step is None else f" at step {self.step}"
        if not self.differences:
            return (
                f"{self.num_variables} {same} the same on all "
                f"{self.num_replicas} replicas{at}."
            )
        said = []
        if copies := _paths(each for each in self.differences if each.since is None):
            several = "variables are" if len(copies) > 1 else "variable is"
            said.append(
                f"{len(copies)} {several} not the same on all {self.num_replicas} "
                f"replicas{at}, of {self.num_variables}."
            )
        if once := _paths(e for e in self.differences if e.since is not None):
            several = "variables have" if len(once) > 1 else "variable has"
            said.append(
                f"{len(once)} {several} changed{at}, though no step changes it."
            )
        return " ".join(said)

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each difference; not too many."""
        shown = [f"{each}." for each in self.differences[:_MOST_LINES]]
        left = len(self.differences) - len(shown)
        return tuple(shown + ([f"... and {left} more."] if left else []))

    def __str__(self) -> str:
        done = (
            ["The right copies were put in their places."] if self.is_repaired else []
        )
        return "\n  ".join([self.heading, *self.lines, *done])


def _paths(differences: Iterable[Difference]) -> tuple[str, ...]:
    """Of their variables, each once."""
    return tuple(dict.fromkeys(each.path for each in differences))


def _in_words(element: Element) -> str:
    index = ", ".join(map(str, element.index))
    numbers = ", ".join(map(str, element.bits))
    bits = f"bit{'s' if len(element.bits) > 1 else ''} {numbers}"
    return f"[{index}] {element.value} here, {element.other} there ({bits})"

"""Programs with some of their operations written otherwise, since XLA does not do with
these what it should, or not quickly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from keras_distribute.devices import jaxprs

_OF_EACH_DEVICE = "shard_map"  # Its program is that of each device alone.


@dataclasses.dataclass(frozen=True)
class Rewriting:
    """How some operations are written otherwise.

    Args:
        is_one: Whether an operation is one of them.
        rule: From such an operation and its operands to its results.
    """

    is_one: Callable[[Any], bool]
    rule: Callable[[Any, list[Any]], list[Any]]

    def is_in(self, program: Any) -> bool:
        """Whether a traced program has such operations."""
        return jaxprs.has(program, self.is_one, but_in=(_OF_EACH_DEVICE,))

    def applied(
        self, program: core.ClosedJaxpr, axes: Sequence[tuple[str, int]] = ()
    ) -> core.ClosedJaxpr:
        """A program, written so if it has such operations.

        Args:
            axes: Those over which it communicates, with their lengths.
        """
        if not self.is_in(program):
            return program
        inner = functools.partial(self.applied, axes=axes)

        def changed(eqn: Any) -> Any:
            if eqn.primitive.name != _OF_EACH_DEVICE:
                eqn = jaxprs.with_programs(eqn, inner)
            if not self.is_one(eqn):
                return eqn
            return lambda *given: self.rule(eqn, list(given))

        return jaxprs.with_replaced(program, changed, axes)


def rewritten(
    function: Callable[..., Any], rewritings: Sequence[Rewriting]
) -> Callable[..., Any]:
    """The same function, with those of the rewritings that it needs."""

    change = functools.partial(all_rewritten, rewritings=rewritings)
    return jaxprs.by_changed_program(function, change)


def all_rewritten(
    program: core.ClosedJaxpr,
    rewritings: Sequence[Rewriting],
    axes: Sequence[tuple[str, int]] = (),
) -> core.ClosedJaxpr:
    """A program with those of the rewritings that it needs; itself if it needs none.

    Args:
        axes: Those over which it communicates, with their lengths.
    """
    for rewriting in rewritings:
        program = rewriting.applied(program, axes)
    return program


def may_be_divided(
    shape: tuple[int, ...], axes: tuple[int, ...], rows: int | None
) -> bool:
    """Whether an array may be divided along one of these axes.

    Args:
        shape: Of the array. Its rows are its first dimension, or its first ones, unless
            they were moved; then they may be one with others.
        axes: Of the array.
        rows: Of the batch, which is divided; `None` where other dimensions are, too.
    """
    if rows is None:
        return bool(axes)
    rows = max(rows, 1)
    counts = itertools.accumulate(shape, operator.mul)
    first = next((i for i, count in enumerate(counts, 1) if count % rows == 0), None)
    if first is None:
        return bool(axes)  # Some of the rows, or of what was one with them.
    return any(
        axis < first or shape[axis] == rows or (first > 1 and shape[axis] % rows == 0)
        for axis in axes
    )

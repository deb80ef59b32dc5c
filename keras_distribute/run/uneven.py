"""One program for replicas whose arguments have different shapes. Knows no Keras.

The function of `Strategy.run` is traced once for each distinct set of shapes: a
variant. Replicas that communicate must all reach the same operation, so the variants
cannot simply be the branches of one conditional. They are cut where they communicate,
and joined:

- what all variants compute in the same way from the same inputs (an optimizer's step on
  summed gradients) is computed outside of any condition, once, so that every replica
  gets the same bits and `devices/replication_proof.py` can prove it;
- everything else of a variant stands in its branch of a `lax.switch` by the replica's
  number;
- between two switches stand the operations over the replicas, which must be the same
  ones in all variants: as many as do not need each other's results.

A value that a branch leaves for a later one travels at the largest shape that any
variant has in its place.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.run.alike import check_alike
from keras_distribute.run.common_expressions import Listing, Node, Numbering
from keras_distribute.values.arrays import filled_up

# Computed again in each branch that needs them, rather than handed on from branch to
# branch.
_LIGHT = {
    "broadcast_in_dim",
    "convert_element_type",
    "iota",
    "reshape",
    "slice",
    "squeeze",
    "expand_dims",
}


def joined(
    variants: Sequence[core.ClosedJaxpr], variant_of: Sequence[int]
) -> core.ClosedJaxpr:
    """One program of all replicas from one program for each variant.

    Args:
        variants: Programs of one replica each, with inputs of the same shapes, and as
            many outputs, of one rank and dtype each.
        variant_of: For each replica, the number of its variant.

    Returns:
        The program. An output whose shape differs among the variants is padded with
        zeros to the largest.

    Raises:
        ValueStructureError: When the variants do not communicate in the same way.
    """
    avals = [var.aval for var in variants[0].jaxpr.invars]
    numbering = Numbering(avals)
    listings = [numbering.listing(program) for program in variants]
    check_alike(listings, variant_of)
    schedule = _Schedule(numbering, listings, variant_of)
    axes = [(REPLICA_AXIS, len(variant_of))]
    return jax.make_jaxpr(schedule.emit, axis_env=axes)(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """A value that leaves a switch: one number for each variant, `None` where a variant
    has nothing to put there.
    """

    numbers: tuple[int | None, ...]
    shape: tuple[int, ...]
    dtype: Any


class _Schedule:
    """Which operation stands where. A level is the number of rounds of communication
    that come before.
    """

    def __init__(
        self, numbering: Numbering, listings: list[Listing], variant_of: Sequence[int]
    ) -> None:
        self._listings, self._variant_of = listings, variant_of
        self._inputs, self._constants = numbering.inputs, numbering.constants
        self._avals = numbering.avals
        self._maker = {
            number: node
            for listing in listings
            for node in listing.nodes
            for number in node.outputs
        }
        shared = set.intersection(
            *({node for node in listing.nodes if node.pure} for listing in listings)
        )
        collectives = {node for listing in listings for node in listing.collectives}
        # What is known outside of the switches.
        self._common = {*self._inputs, *self._constants}
        self._common.update(
            number for node in shared | collectives for number in node.outputs
        )
        self._light = self._find_light(shared)
        self._levels, self._rounds = self._find_levels()
        needed = [_needed(listing) for listing in listings]
        self._shared = [
            node for node in listings[0].nodes if node in shared & set.union(*needed)
        ]
        inside = [nodes - shared - collectives - self._light for nodes in needed]
        self._own = [
            [node for node in listing.nodes if node in nodes]
            for listing, nodes in zip(listings, inside, strict=True)
        ]
        self._places = self._find_places()

    def emit(self, *inputs: Any) -> list[Any]:
        """The joined program, while it is traced."""
        known: dict[int, Any] = {
            **self._constants,
            **dict(zip(self._inputs, inputs, strict=True)),
        }
        placed: dict[_Place, Any] = {}
        # A number looked up by the replica's own makes the choice differ per replica,
        # which `devices/replication_proof.py` sees.
        variant = jnp.asarray(np.asarray(self._variant_of, "int32"))[
            lax.axis_index(REPLICA_AXIS)
        ]

        def resolved(numbers: tuple[int, ...]) -> Any:
            if self._is_common(numbers):
                return known[numbers[0]]
            return placed[self._place(numbers)]

        for level, places in enumerate(self._places):
            for node in self._shared:
                if self._levels[0][node] == level:
                    _compute(node, (known[n] for n in node.inputs), known)
            branches = [
                self._branch(v, level, known, placed)
                for v in range(len(self._listings))
            ]
            if places or any(
                not node.pure
                for v in range(len(branches))
                for node in self._at(v, level)
            ):
                placed.update(zip(places, lax.switch(variant, branches), strict=True))
            for k, ready in enumerate(self._rounds):
                if ready == level:
                    node = self._listings[0].collectives[k]
                    _compute(node, map(resolved, self._operands(k)), known)
        return [resolved(numbers) for numbers in self._outputs()]

    def _branch(
        self, variant: int, level: int, known: dict[int, Any], placed: dict[_Place, Any]
    ) -> Callable[[], Any]:
        """What one variant computes at a level, from what is known or was left."""

        def branch() -> list[Any]:
            left = {place.numbers[variant]: value for place, value in placed.items()}
            own: dict[int, Any] = {}

            def read(number: int) -> Any:
                if number not in own and self._maker.get(number) in self._light:
                    maker = self._maker[number]
                    _compute(maker, map(read, maker.inputs), own)
                if number in own:
                    return own[number]
                if number in known:
                    return known[number]
                shape = self._avals[number].shape
                return lax.slice(left[number], (0,) * len(shape), shape)

            for node in self._at(variant, level):
                _compute(node, map(read, node.inputs), own)
            numbers = [place.numbers[variant] for place in self._places[level]]
            values = [
                _zeros(place) if number is None else _fitted(read(number), place)
                for number, place in zip(numbers, self._places[level], strict=True)
            ]
            # Over several logical devices XLA refuses branches that end in a sharding
            # constraint and in something else.
            return list(lax.optimization_barrier(values)) if values else []

        return branch

    def _find_light(self, shared: set[Node]) -> set[Node]:
        """Operations that each branch does for itself: on constants, and those of one
        variant on common values.
        """
        light: set[Node] = set()
        numbers: set[int] = set()
        for node in itertools.chain.from_iterable(
            listing.nodes for listing in self._listings
        ):
            given = self._constants.keys() if node in shared else self._common
            if (
                node.pure
                and node.equation.primitive.name in _LIGHT
                and {*node.inputs} <= given | numbers
            ):
                light.add(node)
                numbers.update(node.outputs)
        return light

    def _find_levels(self) -> tuple[list[dict[int | Node, int]], list[int]]:
        """The level of each number and operation in each variant, and the last switch
        before each collective.
        """
        levels: list[dict[int | Node, int]] = [
            dict.fromkeys([*self._inputs, *self._constants], 0) for _ in self._listings
        ]
        rounds: list[int] = []
        left = [iter(listing.nodes) for listing in self._listings]
        for together in zip(
            *(listing.collectives for listing in self._listings), strict=True
        ):
            ready = 0
            for level, nodes, collective in zip(levels, left, together, strict=True):
                _assign(level, nodes, collective)
                ready = max([ready, *(level[number] for number in collective.inputs)])
            rounds.append(ready)
            for level, collective in zip(levels, together, strict=True):
                level.update(
                    dict.fromkeys([collective, *collective.outputs], ready + 1)
                )
        for level, nodes in zip(levels, left, strict=True):
            _assign(level, nodes)
        return levels, rounds

    def _find_places(self) -> list[list[_Place]]:
        """For each level what leaves its switch: operands of collectives, outputs, and
        what later branches need.
        """
        due: dict[_Place, int] = {}
        wanted = [
            (numbers, ready)
            for k, ready in enumerate(self._rounds)
            for numbers in self._operands(k)
        ]
        wanted += [
            (n, max(level[i] for level, i in zip(self._levels, n, strict=True)))
            for n in self._outputs()
        ]
        for numbers, level in wanted:
            if not self._is_common(numbers):
                place = self._place(numbers)
                due[place] = min(due.get(place, level), level)
        count = 1 + max(
            itertools.chain(
                [0], due.values(), *(levels.values() for levels in self._levels)
            )
        )
        places: list[list[_Place]] = [
            [place for place in due if due[place] == level] for level in range(count)
        ]
        kept = [self._kept(v, due) for v in range(len(self._listings))]
        for level in range(count):
            places[level] += self._slots([numbers.get(level, []) for numbers in kept])
        return places

    def _kept(self, variant: int, due: dict[_Place, int]) -> dict[int, list[int]]:
        """By level the numbers that its branch leaves for later ones, in order."""
        levels = self._levels[variant]
        uses = [
            (number, levels[node])
            for node in self._own[variant]
            for number in node.inputs
        ]
        uses += [(place.numbers[variant], level) for place, level in due.items()]
        last: dict[int, int] = {}
        for number, level in uses:
            for source in self._sources(number):
                last[source] = max(last.get(source, 0), level)
        leaving = {(place.numbers[variant], level) for place, level in due.items()}
        kept: dict[int, list[int]] = {}
        for number in (n for node in self._own[variant] for n in node.outputs):
            level = levels[number]
            if last.get(number, 0) > level and (number, level) not in leaving:
                kept.setdefault(level, []).append(number)
        return kept

    def _slots(self, numbers: list[list[int]]) -> list[_Place]:
        """Places for the variants' values: the first of a rank and dtype in each share
        one, and so on.
        """
        kinds: dict[Any, list[list[int]]] = {}
        for variant, of_variant in enumerate(numbers):
            for number in of_variant:
                aval = self._avals[number]
                kinds.setdefault((aval.dtype, aval.ndim), [[] for _ in numbers])[
                    variant
                ].append(number)
        return [
            self._place(row)
            for rows in kinds.values()
            for row in itertools.zip_longest(*rows)
        ]

    def _place(self, numbers: tuple[int | None, ...]) -> _Place:
        avals = [self._avals[number] for number in numbers if number is not None]
        return _Place(
            numbers,
            tuple(map(max, *(a.shape for a in avals), avals[0].shape)),
            avals[0].dtype,
        )

    def _sources(self, number: int | None) -> Iterator[int]:
        """The values of its variant that a branch needs for `number`: itself, or what a
        light operation takes.
        """
        maker = None if number is None else self._maker.get(number)
        if maker in self._light:
            assert maker is not None
            for operand in maker.inputs:
                yield from self._sources(operand)
        elif number is not None and number not in self._common:
            yield number

    def _at(self, variant: int, level: int) -> list[Node]:
        return [
            node for node in self._own[variant] if self._levels[variant][node] == level
        ]

    def _is_common(self, numbers: tuple[int | None, ...]) -> bool:
        return len(set(numbers)) == 1 and numbers[0] in self._common

    def _operands(self, k: int) -> list[tuple[int, ...]]:
        """The operands of a collective, a number from each variant for each."""
        nodes = [listing.collectives[k] for listing in self._listings]
        return list(zip(*(node.inputs for node in nodes), strict=True))

    def _outputs(self) -> list[tuple[int, ...]]:
        return list(zip(*(listing.outputs for listing in self._listings), strict=True))


def _compute(node: Node, operands: Iterable[Any], known: dict[int, Any]) -> None:
    """Does an operation; its results are known from now on."""
    known.update(zip(node.outputs, node(*operands), strict=True))


def _assign(
    levels: dict[int | Node, int], nodes: Iterator[Node], end: Node | None = None
) -> None:
    """Gives each operation before `end` the level of its last operand."""
    for node in nodes:
        if node is end:
            return
        level = max((levels[number] for number in node.inputs), default=0)
        levels.update(dict.fromkeys([node, *node.outputs], level))


def _needed(listing: Listing) -> set[Node]:
    """The operations that an output, a collective or an effect needs."""
    wanted, needed = set(listing.outputs), set[Node]()
    for node in reversed(listing.nodes):
        if not node.pure or not wanted.isdisjoint(node.outputs):
            needed.add(node)
            wanted.update(node.inputs)
    return needed


def _fitted(value: Any, place: _Place) -> Any:
    """A value in its place's shape and dtype, zeros at the end of each dimension."""
    value = jnp.asarray(value)
    if value.dtype != place.dtype or value.weak_type:
        value = lax.convert_element_type(value, place.dtype)
    return filled_up(value, place.shape)


def _zeros(place: _Place) -> Any:
    return lax.full(place.shape, 0, place.dtype)

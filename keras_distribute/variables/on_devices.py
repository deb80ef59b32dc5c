"""The arrays that stand on the devices for variables: each variable's own, or those of
a program's state, which may have many variables in one buffer.

Whoever looks at each device's own copy needs these arrays themselves. What a variable
reads may be made from them by a program, and says nothing about where it came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from keras_distribute.devices.launches import launches


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a variable is in an array: `size` elements from `start` on, counted in the
    array as one row.
    """

    variable: Any
    start: int
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Standing:
    """An array, the variables in it, and what puts another array in its place.

    Args:
        array: As the next program will be given it.
        parts: The variables, in the order in which they are in it.
        replace: Takes an array of the same shape, dtype and sharding.
    """

    array: jax.Array
    parts: tuple[Part, ...]
    replace: Callable[[jax.Array], None]

    @property
    def is_packed(self) -> bool:
        """Whether it may hold something beside the one variable."""
        sizes = [part.size for part in self.parts]
        return sizes != [self.array.size]


def standing(variables: Iterable[Any]) -> list[Standing]:
    """The arrays behind these variables, each once. The caller holds `launches.lock`
    as long as it uses them.

    Variables that have none on the devices are left out, as those that are with
    parameter servers.
    """
    launches.settle()
    found: list[Standing] = []
    held: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
    for variable in variables:
        link = variable._link
        if link is not None:
            links = held.setdefault(id(link[0]), (link[0], []))[1]
            links.append((link[1], variable))
        elif isinstance(array := variable.stored, jax.Array):
            found.append(_of_one(variable, array))
    for holder, links in held.values():
        found += holder.standing(links)
    return found


def _of_one(variable: Any, array: jax.Array) -> Standing:
    def replace(array: jax.Array) -> None:
        variable._value = array

    return Standing(array, (Part(variable, 0, array.size),), replace)

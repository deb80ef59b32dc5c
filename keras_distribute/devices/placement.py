"""Where the variables and programs of a strategy are: all that the rooms below
`strategies/` know of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from keras_distribute.devices.mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a variable is divided over the logical devices of a replica: for each
    dimension mesh axes, or `None`.
    """

    axes: tuple[Any, ...] = ()


class Layouts(Protocol):
    """The layouts of a strategy's variables."""

    def of(self, path: str, shape: tuple[int, ...]) -> Layout:
        """The layout of one variable."""
        ...

    def warn_of_unused(self, paths: Sequence[str]) -> None:
        """Warns of layouts that no variable has, before a model with variables of these
        paths is trained.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where variables and programs are.

    Args:
        mesh: The devices of the replicas.
        layouts: How variables are divided over the logical devices of a replica;
            `None`: none is.
        shard_optimizer_state: Whether each replica keeps a part of the optimizer's
            state, not all of it.
        communication_dtype: In which gradients are summed over the replicas; `None`:
            in the one that they have.
    """

    mesh: ReplicaMesh
    layouts: Layouts | None = None
    shard_optimizer_state: bool = False
    communication_dtype: str | None = None

    def layout_of(self, path: str, shape: tuple[int, ...]) -> Layout:
        """How a variable is divided over the logical devices of a replica."""
        return Layout() if self.layouts is None else self.layouts.of(path, shape)

    def check_layouts(self, paths: Sequence[str]) -> None:
        """Warns of layouts that no variable of a model has."""
        if self.layouts is not None:
            self.layouts.warn_of_unused(paths)

"""Which variables no training step changes: frozen weights, and those of other layers
that have no gradient.

Known from the traced step, which returns what it was given. A list of frozen layers
would not do: a `train_step` may assign to them, as to the weights of a target network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

Step = Callable[[Any, Any], tuple[Any, Any]]


def unchanged(
    step: Step, groups: Sequence[Sequence[Any]], state: Any, data: Any
) -> list[Any]:
    """The variables whose values a step returns as it was given them.

    Args:
        step: From Keras's groups of values and a batch to logs and the new groups.
        groups: The variables behind the groups.
        state: The groups, each array as a `jax.ShapeDtypeStruct`.
        data: A batch, likewise.
    """
    leaves, structure = jax.tree.flatten(state)

    def on_leaves(leaves: Any, data: Any) -> Any:
        _, new = step(jax.tree.unflatten(structure, leaves), data)
        return jax.tree.leaves(tuple(list(group) for group in new))

    traced = jax.make_jaxpr(on_leaves)(leaves, data).jaxpr
    variables = [variable for group in groups for variable in group]
    given = traced.invars[: len(variables)]
    return [
        variable
        for variable, old, new in zip(variables, given, traced.outvars, strict=True)
        if old is new
    ]

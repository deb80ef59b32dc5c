"""Puts a global batch on the devices of a strategy, and takes it apart again inside the step.

The rows of an array are split over the replicas. Where their number does not divide, rows are added for the transfer
and sliced off inside the compiled step, before anything is computed: each replica holds at most
`ceil(rows / num_replicas)` of them, none enters a number, and XLA keeps the uneven split throughout the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

from keras_distribute.mesh import ReplicaMesh

Rows = tuple[int, ...]
Spread = tuple[int, int]
WHOLE = -1  # In place of a number of rows: the array is on every replica, and all of it is meant.


class Placed(NamedTuple):
    """A batch on devices.

    Args:
        data: The structure of placed arrays.
        rows: The true number of rows of each leaf, or `WHOLE`.
        spread: The rows of the first leaf, and the number of replicas that they are spread over evenly.
    """

    data: Any
    rows: Rows
    spread: Spread


def place(batch: Any, mesh: ReplicaMesh, *, traced: bool = True) -> Placed:
    """The batch on the devices of `mesh`.

    Args:
        batch: A structure of arrays whose axis 0 is the rows; arrays without dimensions, and sparse ones, go to every
            replica whole.
        mesh: Where to.
        traced: Whether `trim` will be called in a compiled step. Otherwise an array whose rows do not divide goes to
            every replica whole.

    Returns:
        The batch, ready for a step; a batch that is placed already as it is.
    """
    if isinstance(batch, Placed):
        return batch
    leaves, structure = jax.tree.flatten(batch, is_leaf=_is_sparse)
    replicas = mesh.num_replicas
    placed: list[Any] = []
    rows: list[int] = []
    spread: Spread | None = None
    for leaf in leaves:
        array = leaf if isinstance(leaf, jax.Array) or _is_sparse(leaf) else np.asarray(leaf)
        count = array.shape[0] if array.ndim else 0
        extra = -count % replicas
        spread = spread or (count, 1 if extra or not count else replicas)
        if count == 0 or _is_sparse(leaf) or (extra and not traced):
            placed.append(jax.device_put(array, mesh.replicated))
            rows.append(WHOLE)
            continue
        if extra:
            numpy_like = jnp if isinstance(array, jax.Array) else np
            array = numpy_like.concatenate([array, numpy_like.repeat(array[-1:], extra, axis=0)])
        placed.append(jax.device_put(array, mesh.split))
        rows.append(count if extra else WHOLE)
    return Placed(jax.tree.unflatten(structure, placed), tuple(rows), spread or (0, 1))


def trim(batch: Any, rows: Rows, mesh: ReplicaMesh) -> Any:
    """Slices the placed `batch` to its true rows, inside a compiled step."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=_is_sparse)
    trimmed = [
        leaf if count == WHOLE else lax.with_sharding_constraint(leaf[:count], mesh.split)
        for leaf, count in zip(leaves, rows, strict=True)
    ]
    return jax.tree.unflatten(structure, trimmed)


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, sparse.JAXSparse)

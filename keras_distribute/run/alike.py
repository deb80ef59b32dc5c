"""Whether the replicas communicate in the same way, whatever their shapes; and what to
write where they would not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from keras_distribute.errors import ValueStructureError
from keras_distribute.run.common_expressions import Listing, Node


def check_alike(listings: list[Listing], variant_of: Sequence[int]) -> None:
    """Raises unless all variants communicate in the same way."""
    replicas = [list(variant_of).index(v) for v in range(len(listings))]
    collectives = (listing.collectives for listing in listings)
    for together in itertools.zip_longest(*collectives):
        if len({node and (node.key, *_forms(node)) for node in together}) == 1:
            continue
        does = "; ".join(
            f"replica {replica}: {'nothing more' if node is None else node}"
            for replica, node in zip(replicas, together, strict=True)
        )
        names = {"" if node is None else node.name for node in together}
        fix = _FIXES.get(names.pop() if len(names) == 1 else "", _FIX)
        raise ValueStructureError(
            "The replicas hold different numbers of rows, and would communicate in "
            "different ways.",
            received=f"{does}.",
            fix=f"{fix}; or pass batches that divide over the replicas.",
        )


def _forms(node: Node) -> list[Any]:
    return [
        (atom.aval.shape, atom.aval.dtype)
        for atom in (*node.equation.invars, *node.equation.outvars)
    ]


_FIX = (
    "communicate in the same order, and values of the same shapes, whatever the "
    "number of rows"
)


_BEFORE = (
    "communicate outside of it, or all_gather the rows before: what goes in needs one "
    "shape on all replicas"
)


_REDUCE = 'reduce over the rows first, all_reduce("SUM", keras.ops.sum(value, axis=0))'


_FIXES = {
    "psum": _REDUCE,
    "pmax": "reduce over the rows first",
    "pmin": "reduce over the rows first",
    "scan": _BEFORE,
    "while": _BEFORE,
    "cond": _BEFORE,
    "all_gather": "kd.get_replica_context().all_gather(value, axis=0), which joins "
    "values of different sizes",
    "a joining all_gather": "all_gather outside of functions under jax.jit, which are "
    "traced once for several calls",
}

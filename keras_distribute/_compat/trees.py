"""Structures that JAX and Keras look through.

- The namespace `"keras"` of `optree`, in which `keras.tree` registers its own classes.
  Goes when `keras.tree` can be told of a class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import optree


def register_sequence(cls: type) -> None:
    """Makes `jax.tree` and `keras.tree` see a list of its elements in an instance."""

    def flatten(sequence: Any) -> tuple[tuple[Any, ...], None]:
        return tuple(sequence), None

    def unflatten(_: Any, children: Iterable[Any]) -> list[Any]:
        return list(children)

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    optree.register_pytree_node(cls, flatten, unflatten, namespace="keras")

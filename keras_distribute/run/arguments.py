"""The arguments of one `Strategy.run`, as arrays and a signature. Knows neither
functions nor how they are traced.

Of a value whose components differ in shape, a program gets the array of the largest
shape; the true shapes of each replica are part of the signature. Replicas with the same
shapes throughout are one variant of the function.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.dtypes
import numpy as np
from jax import lax

from keras_distribute._compat import variables as compat
from keras_distribute._compat.jax_internals import is_key, settings
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.values import structures
from keras_distribute.values.arrays import fitting, is_array
from keras_distribute.values.per_replica import Mirrored, PerReplica

Shape = tuple[int, ...]

# New objects at each access, equal where object and function are the same.
_BOUND = types.MethodType | types.BuiltinMethodType


@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no array: part of the program's signature."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, _BOUND):
            return self.value == other.value
        same = (
            _by_value(self.value)
            and (self.value == other.value or self.value != self.value)  # A NaN.
            and repr(self.value) == repr(other.value)
        )
        # 0.0 == -0.0, but they compute differently.
        return self.value is other.value or same

    def __hash__(self) -> int:
        if isinstance(self.value, _BOUND):
            return hash(self.value)
        value = self.value if _by_value(self.value) else id(self.value)
        return hash((type(self.value), value if value == value else repr(value)))


def _by_value(value: Any) -> bool:
    return isinstance(
        value, bool | int | float | complex | str | bytes | None | type | np.dtype
    )


@dataclasses.dataclass(frozen=True)
class Variant:
    """The true shape of each array on some replicas; `None`: the array's own."""

    shapes: tuple[Shape | None, ...]
    replicas: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether these replicas have no rows of something."""
        return any(shape is not None and 0 in shape for shape in self.shapes)

    def cut(self, arrays: Sequence[Any]) -> list[Any]:
        """These replicas' arrays at their true shapes; inside a program."""
        return [
            array
            if shape in (None, array.shape)
            else lax.slice(array, (0,) * array.ndim, shape)
            for array, shape in zip(arrays, self.shapes, strict=True)
        ]


class Call:
    """The arguments of one call, as arrays and a hashable signature.

    Attributes:
        arrays: The leaves that are arrays.
        split: Which of them have one component for each replica.
        leaves: For each leaf what a replica sees: a shape and dtype, or a `Static`.
        signature: Equal for calls that one program serves.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: ReplicaMesh
    ) -> None:
        leaves, self._structure = structures.flatten((args, kwargs), is_leaf)
        self.arrays: list[Any] = []
        self.split: list[bool] = []
        self.leaves: list[Any] = []
        self._true_shapes: list[tuple[Shape, ...] | None] = []
        self._num_replicas = mesh.num_replicas
        for leaf in leaves:
            array, split = _as_array(leaf, mesh)
            if array is None:
                self.leaves.append(Static(leaf))
                continue
            self.arrays.append(array)
            self.split.append(split)
            self._true_shapes.append(
                leaf.shapes if isinstance(leaf, PerReplica) else None
            )
            shape = array.shape[1:] if split else array.shape
            dtype = array.dtype
            if not is_key(array):
                dtype = jax.dtypes.canonicalize_dtype(dtype)
            weak = getattr(array, "weak_type", False)
            self.leaves.append(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak))
        kinds = iter(zip(self.split, self._true_shapes, strict=True))
        forms = (
            s if isinstance(s, Static) else (s.shape, s.dtype, s.weak_type, next(kinds))
            for s in self.leaves
        )
        self.signature = self._structure, tuple(forms), settings()

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `arrays` in the place of arrays."""
        left = iter(arrays)
        leaves = [
            leaf.value if isinstance(leaf, Static) else next(left)
            for leaf in self.leaves
        ]
        return jax.tree.unflatten(self._structure, leaves)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """What one replica's program takes: of ragged values the largest shape."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, Static)]

    @property
    def variants(self) -> list[Variant]:
        """The distinct shapes among the replicas, those of replicas without rows last;
        one where nothing is ragged.
        """
        replicas: dict[tuple[Shape | None, ...], list[int]] = {}
        for replica in range(self._num_replicas):
            shapes = tuple(
                None if true is None else true[replica] for true in self._true_shapes
            )
            replicas.setdefault(shapes, []).append(replica)
        return sorted(
            (Variant(shapes, tuple(of)) for shapes, of in replicas.items()),
            key=lambda v: v.empty,
        )


def in_trace_error(received: str) -> ContextError:
    """The error for a program that a function which JAX traces calls: it would run
    once, while that function is traced.
    """
    return ContextError(
        "strategy.run was called inside another traced function.",
        received=received,
        fix="call strategy.run outside jax.jit, jax.grad and tf.function: it compiles "
        "by itself.",
    )


def is_leaf(value: Any) -> bool:
    """Whether a structure of arguments or results ends here."""
    return isinstance(value, PerReplica | Mirrored | compat.Variable) or value is None


def _as_array(leaf: Any, mesh: ReplicaMesh) -> tuple[Any, bool]:
    """The leaf as an array and whether it is split over the replicas; `(None, False)`
    for other objects.
    """
    if isinstance(leaf, PerReplica):
        array = leaf.padded if leaf.stacked is None else leaf.stacked
        if array is None:
            forms = ", ".join(
                f"{v.dtype}{list(v.shape)}" if hasattr(v, "shape") else repr(v)
                for v in leaf.values
            )
            raise ValueStructureError(
                "The components of an argument may differ in the sizes of their "
                "dimensions only.",
                received=f"components {forms}.",
                fix="pass arrays of numbers, of one number of dimensions and one dtype "
                "on all replicas.",
            )
        if array.shape[0] != mesh.num_replicas:
            raise ValueStructureError(
                f"A value of {array.shape[0]} replicas was passed to a strategy of "
                f"{mesh.num_replicas}.",
                received=f"{leaf!r}.",
                fix="make the value with the strategy that runs the function.",
            )
        return array, True
    if isinstance(leaf, Mirrored):
        leaf = leaf.value
    if isinstance(leaf, jax.core.Tracer):
        raise in_trace_error(f"{leaf!r}.")
    if isinstance(leaf, jax.Array):
        return mesh.within_reach(leaf), False
    if (
        leaf is None
        or isinstance(leaf, compat.Variable | type)
        or not hasattr(leaf, "__array__")
    ):
        return None, False
    known = isinstance(leaf, np.ndarray | np.generic)
    array: Any = leaf if known else np.asarray(leaf)
    if not is_array(array):
        raise StructureTypeError(
            "A program computes with numbers.",
            received=f"an array of dtype {array.dtype} as an argument.",
            fix="arrays of numbers: text becomes numbers in the pipeline, by "
            "keras.layers.StringLookup or in tf.data.",
        )
    return fitting(array), False

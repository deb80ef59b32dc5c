"""Values that differ per replica, or are the same on each. Knows no contexts and no
variables.

A `PerReplica` is stored in one of four ways: as one array of shape `(num_replicas,
*shape)` split over the replicas; if only the sizes of dimensions differ, as such an
array of the largest sizes, whose components are filled up with zeros; as a tuple of
components that differ in rank or dtype, that are no arrays, or that stay on the host
until a program takes them; or, while a program over all replicas is being traced, as
this replica's own component alone (`PerReplica.local`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.mixins import NDArrayOperatorsMixin

from keras_distribute.devices.mesh import ReplicaMesh, mesh_of_array
from keras_distribute.devices.mesh import components as mesh_components
from keras_distribute.devices.mesh import copies as mesh_copies
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.values.arrays import filled_up, fitting, form_of

Forms = Sequence[Any]


class DistributedValues(NDArrayOperatorsMixin):
    """Base of values with one component for each replica. Source:
    `tf.distribute.DistributedValues`.

    Where it stands for one array, it can be computed with like that array.
    """

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order."""
        raise NotImplementedError

    def _as_one(self) -> Any:
        """The one array that it stands for."""
        raise NotImplementedError

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        """NumPy's functions and all operators, by JAX."""
        arrays = [
            value._as_one() if isinstance(value, DistributedValues) else value
            for value in inputs
        ]
        if any(isinstance(out, DistributedValues) for out in kwargs.get("out", ())):
            del kwargs["out"]  # `value += 1`: a new array takes the name.
        function = getattr(jnp, ufunc.__name__, None)
        if function is None or method != "__call__" or kwargs:
            return getattr(ufunc, method)(*map(np.asarray, arrays), **kwargs)
        return function(*arrays)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - NumPy has none.
        return object.__hash__(self)

    def __array__(
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        if copy:
            return np.array(self._as_one(), dtype=dtype)
        return np.asarray(self._as_one(), dtype=dtype)

    def __getitem__(self, key: Any) -> Any:
        return self._as_one()[key]

    def __len__(self) -> int:
        return len(self._as_one())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_one())

    def __contains__(self, value: Any) -> bool:
        return value in self._as_one()

    def __bool__(self) -> bool:
        return bool(self._as_one())

    def __float__(self) -> float:
        return float(self._as_one())

    def __int__(self) -> int:
        return int(self._as_one())

    def __complex__(self) -> complex:
        return complex(self._as_one())

    def __index__(self) -> int:
        return operator.index(self._as_one())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self._as_one(), ndigits or 0)

    def __format__(self, spec: str) -> str:
        return format(self._as_one(), spec) if spec else repr(self)


def is_distributed(value: Any) -> bool:
    """Whether a value is one of each replica."""
    return isinstance(value, DistributedValues)


class PerReplica(DistributedValues):
    """A value that differs per replica: what `Strategy.run` returns.

    Not made by hand: see `Strategy.run` and
    `Strategy.experimental_distribute_values_from_function`. A `PerReplica` of one
    replica converts to an array or a number, and can be computed with; with more, that
    is an error: read `values`, `strategy.reduce` or `strategy.gather` it, or compute in
    `strategy.run`.
    """

    def __init__(
        self,
        *,
        stacked: jax.Array | None = None,
        padded: jax.Array | None = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
        components: tuple[Any, ...] | None = None,
        local: Any = None,
    ) -> None:
        self._stacked = stacked
        self._padded = padded
        self._shapes = None if shapes is None else tuple(map(tuple, shapes))
        self._components = components
        self._local = local
        self._to_devices: Callable[[], PerReplica] | None = None

    @staticmethod
    def of(
        components: Sequence[Any], mesh: ReplicaMesh, forms: Forms | None = None
    ) -> PerReplica:
        """From one component a replica; arrays of one rank and dtype are stored as one
        split array.

        Args:
            components: Those of this process's replicas, in replica order.
            mesh: Where to.
            forms: What `form_of` says of the components of all replicas, where other
                processes have some of them.
        """
        forms = list(map(form_of, components)) if forms is None else forms
        if any(form is None for form in forms):
            return PerReplica(components=tuple(components))
        arrays = [
            fitting(np.asarray(c)) if not isinstance(c, jax.Array) else c
            for c in components
        ]
        if len({(len(shape), dtype) for shape, dtype in forms}) > 1:
            return PerReplica(
                components=tuple(
                    jax.device_put(array, mesh.device_of(replica))
                    for replica, array in zip(mesh.local_replicas, arrays, strict=True)
                )
            )
        shapes = [shape for shape, _ in forms]
        largest = tuple(map(max, zip(*shapes, strict=True)))
        array = mesh.joined([filled_up(a, largest)[None] for a in arrays])
        if len(set(shapes)) == 1:
            return PerReplica(stacked=array)
        return PerReplica(padded=array, shapes=shapes)

    @staticmethod
    def on_host(
        components: Sequence[Any], mesh: ReplicaMesh, forms: Forms | None = None
    ) -> PerReplica:
        """As `of`, but `values` stay where they are: what is on the devices is made
        when a program takes it.
        """
        value = PerReplica(components=tuple(components))
        value._to_devices = lambda: PerReplica.of(components, mesh, forms)
        return value

    def _on_devices(self) -> PerReplica:
        """Itself, with the array over all replicas if it can have one."""
        make = self._to_devices
        if make is not None:
            made = make()
            self._stacked, self._padded = made._stacked, made._padded
            self._shapes, self._to_devices = made._shapes, None
        return self

    @property
    def stacked(self) -> jax.Array | None:
        """The array of shape `(num_replicas, *shape)`, or `None` where the components'
        shapes differ.
        """
        return self._on_devices()._stacked

    @property
    def padded(self) -> jax.Array | None:
        """The array of shape `(num_replicas, *largest shape)` where the components'
        shapes differ, else `None`.
        """
        return self._on_devices()._padded

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The true shape of each replica's component of `padded`."""
        return self._on_devices()._shapes

    @property
    def is_on_host(self) -> bool:
        """Whether there is no array over all replicas, but only components."""
        return self.stacked is None and self.padded is None and self._local is None

    @property
    def local(self) -> Any:
        """This replica's component while a program is traced, else `None`."""
        return self._local

    @property
    def values(self) -> tuple[Any, ...]:
        if self._components is None:
            array = self._stacked if self._stacked is not None else self._padded
            if array is None:
                raise ValueStructureError(
                    "The components of other replicas cannot be read while the program "
                    "is traced.",
                    received="PerReplica.values inside merge_call.",
                    fix="strategy.reduce, strategy.gather or "
                    "strategy.extended.reduce_to, which are collectives.",
                )
            # Also where a program is being traced: these are real arrays.
            with jax.ensure_compile_time_eval():
                if array.size:
                    self._components = tuple(
                        self._cut(jnp.squeeze(part, 0), replica)
                        for replica, part in mesh_components(array)
                    )
                else:  # XLA does not split what has no elements.
                    empty = jnp.zeros(array.shape[1:], array.dtype)
                    own = ReplicaMesh(mesh_of_array(array)).local_replicas
                    self._components = tuple(
                        self._cut(empty, replica) for replica in own
                    )
        return self._components

    def _cut(self, value: jax.Array, replica: int) -> jax.Array:
        shape = value.shape if self._shapes is None else self._shapes[replica]
        if shape == value.shape:
            return value
        return lax.slice(value, (0,) * value.ndim, shape)

    def _as_one(self) -> Any:
        if self._local is None and len(self.values) == 1:
            return self.values[0]
        raise StructureTypeError(
            "A value that differs per replica is not one array.",
            received=f"{self!r}.",
            fix='strategy.reduce("SUM", value, axis=None), strategy.gather(value, '
            "axis=0), or value.values; to compute "
            "with each component, strategy.run(lambda x: x + 1, args=(value,)), "
            "without tf.function or jax.jit around it.",
        )

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        # An error where JAX looks, rather than its own, which says nothing of replicas.
        value = self._as_one()
        return lambda: jnp.asarray(value)

    def __repr__(self) -> str:
        if self._local is not None:
            return f"PerReplica(<this replica's component: {self._local}>)"
        lines = (f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return "PerReplica(\n" + ",\n".join(lines) + "\n)"


class Mirrored(DistributedValues):
    """A value that is the same on every replica, stored as one replicated array.

    It can be used like that array, in operators and functions; the result is an array.

    Example:
        >>> import numpy as np, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = strategy.experimental_distribute_values_from_function(
        ...     lambda context: np.arange(2.0))
        >>> total = strategy.extended.reduce_to("SUM", value, value)
        >>> type(total).__name__, 1 + total
        ('Mirrored', Array([1., 3.], dtype=float32))
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        """The replicated array."""
        return self._value

    @property
    def values(self) -> tuple[Any, ...]:
        if isinstance(self._value, jax.Array) and not isinstance(
            self._value, jax.core.Tracer
        ):
            return mesh_copies(self._value)
        return (self._value,)

    def _as_one(self) -> Any:
        return self._value

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self._value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Also where a copy has no value yet.
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self._value, name)

    def __repr__(self) -> str:
        return f"Mirrored({self._value!r})"


# The arguments of JAX's own functions are structures of arrays.
jax.tree_util.register_pytree_node(
    Mirrored, lambda value: ((value.value,), None), lambda _, part: Mirrored(part[0])
)

"""Programs that travel: functions of arrays as bytes, made by `jax.export`.

The bytes are StableHLO with a header, which other versions of JAX read for some months
(https://docs.jax.dev/en/latest/export/export.html). No Python travels. The coordinator
alone decides whether a program has numbers of 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_distribute.devices import exports
from keras_distribute.errors import StructureTypeError

Program = Callable[..., Any]


def exported(
    function: Callable[..., Any],
    shapes: Sequence[Any],
    platforms: Sequence[str],
    droppable: int = 0,
    needed: Collection[int] = (),
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """A function of arrays as bytes, and which of its first arguments it takes.

    Args:
        function: From arrays to a list of arrays.
        shapes: A `jax.ShapeDtypeStruct` for each argument.
        platforms: Where it will run: as in `exports.exported`.
        droppable: How many of the first arguments are left out where no result depends
            on them.
        needed: Those of them that are not.

    Raises:
        StructureTypeError: For a function that calls Python when it runs.
    """
    used = list(range(droppable))
    if droppable:
        made = _made(jax.jit(function), shapes, platforms)
        if len(made.module_kept_var_idx) == len(shapes):
            return _as_bytes(made), used  # It takes all: no other one is needed.
        kept = {*made.module_kept_var_idx, *needed}
        used = [i for i in range(droppable) if i in kept]

    def of_used(*values: Any) -> Any:
        given = dict(zip(used, values, strict=False))
        first = (
            given[i] if i in given else jnp.zeros(shape.shape, shape.dtype)
            for i, shape in enumerate(shapes[:droppable])
        )
        return function(*first, *values[len(used) :])

    taken = [*(shapes[i] for i in used), *shapes[droppable:]]
    final = jax.jit(of_used, keep_unused=True)
    made = _made(final, taken, platforms)
    return _as_bytes(made), used


def _made(
    program: Any, shapes: Sequence[Any], platforms: Sequence[str]
) -> jax.export.Exported:
    try:
        return exports.exported(program, platforms)(*shapes)
    except NotImplementedError as error:
        raise StructureTypeError(
            "A function that workers run is a program, and calls no Python, as "
            "jax.debug.print, jax.debug.callback and jax.pure_callback do.",
            received=f"{error}.",
            fix="keras.ops alone; and print what a worker returns: "
            "coordinator.schedule(step).fetch(), or a callback of fit.",
        ) from error


def _as_bytes(made: jax.export.Exported) -> np.ndarray[Any, Any]:
    return np.frombuffer(made.serialize(), np.uint8)


def loaded(
    blob: Any, divided: Sequence[tuple[int, int]] = (), num_devices: int = 1
) -> Program:
    """The function; compiled at its first call.

    Args:
        blob: What `exported` made.
        divided: The arguments whose rows the devices divide, each with the axis of
            rows; what does not divide evenly, each device has whole. Results are the
            same as on one device, and on all of them.
        num_devices: How many devices of this process.
    """
    made = jax.export.deserialize(bytearray(np.asarray(blob).tobytes()))
    program = _compiled(made, divided, num_devices)
    if not any(aval.dtype.itemsize == 8 for aval in (*made.in_avals, *made.out_avals)):
        return program
    dtypes = [aval.dtype for aval in made.in_avals]

    def with_64_bits(*arrays: Any) -> Any:
        given = map(_of_dtype, arrays, dtypes)
        with jax.enable_x64(True):
            return program(*given)

    return with_64_bits


def _of_dtype(array: Any, dtype: Any) -> Any:
    """The array as the program takes it, which JAX does not see to with 64 bits."""
    return array if isinstance(array, jax.Array) else np.asarray(array, dtype)


def _compiled(
    made: jax.export.Exported, divided: Sequence[tuple[int, int]], num_devices: int
) -> Program:
    if num_devices == 1 or not divided:
        return jax.jit(made.call)
    mesh = Mesh(np.array(jax.local_devices()[:num_devices]), ("rows",))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = [whole for _ in made.in_avals]
    for index, axis in divided:
        if made.in_avals[index].shape[axis] % num_devices == 0:
            spec = PartitionSpec(*[None] * axis, "rows")
            shardings[index] = NamedSharding(mesh, spec)
    return jax.jit(made.call, in_shardings=tuple(shardings), out_shardings=whole)

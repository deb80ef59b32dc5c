"""Tables and matrices of which each replica has a part: few rows travel, and not they."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute.devices.by_rows import program, sums
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.devices.summed_parts import summed_part

pytestmark = pytest.mark.timeout(200)
RNG = np.random.default_rng(0)
N, TABLE = 16, (96, 16)
INSIDE = RNG.integers(0, 96, (N, 3)).astype("int32")
OUTSIDE = INSIDE.copy()
OUTSIDE[:8] = RNG.integers(-300, 300, (8, 3))
OUTSIDE[0] = -1, 96, 95
FEW = RNG.integers(0, 96, N).astype("int8")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def taken(mode: str) -> Callable[..., Any]:
    return lambda table, ids: jnp.take(table, ids, axis=0, mode=mode)


def tied(table: Any, ids: Any) -> Any:
    """Of a table that is read as a matrix, too."""
    return jnp.tanh(table[ids]) @ table.T


def twice(table: Any, ids: Any) -> Any:
    return table[ids] * table[jnp.flip(ids, 1)]


def product(spec: str) -> Callable[..., Any]:
    return functools.partial(jnp.einsum, spec)


# By what reads it: a function of the state and of rows, and the shape of the state.
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], np.ndarray]] = {
    "rows": (lambda table, ids: table[ids], TABLE, INSIDE),
    "no rows": (taken("fill"), TABLE, OUTSIDE),
    "the next rows": (taken("clip"), TABLE, OUTSIDE),
    "one number a row": (lambda table, ids: table[ids], TABLE, FEW),
    "rows two times": (twice, TABLE, INSIDE),
    "rows, and all": (tied, TABLE, INSIDE),
    "a product": (product("io,ni->no"), (64, 128), normal(N, 64)),
    "rows first": (product("io,ni->on"), (64, 128), normal(N, 64)),
    "of positions": (product("io,nti->nto"), (128, 128), normal(N, 2, 128)),
    "of heads": (product("ihd,nti->nthd"), (128, 8, 16), normal(N, 2, 128)),
    "from heads": (product("hdo,nthd->nto"), (16, 16, 64), normal(N, 1, 16, 16)),
    "rows between": (product("io,int->tno"), (128, 128), normal(128, N, 2)),
}
ROWS = {"rows between": 1}
WHOLE = ("rows, and all",)


def of_gradients(read: Callable[..., Any], mesh: ReplicaMesh, axis: int) -> Any:
    """What is read, and the gradients, in which the state is divided along an axis."""
    parts = NamedSharding(mesh.mesh, PartitionSpec(*[None] * axis, REPLICA_AXIS))
    whole = NamedSharding(mesh.mesh, PartitionSpec())

    def function(state: Any, rows: Any) -> Any:
        state = lax.with_sharding_constraint(state, whole)
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            found, back = jax.vjp(lambda s: read(s, rows), state)
        else:
            found, back = jax.vjp(read, state, rows)
        gradient, *others = back(jnp.cos(found))
        return lax.with_sharding_constraint(gradient, parts), found, *others

    return function


def of_replicas(
    read: Callable[..., Any], arrays: Any, axis: int, rows: int, replicas: int
) -> tuple[Any, str]:
    """The same from one replica's program, and its text."""
    mesh = ReplicaMesh.of(jax.devices()[:replicas])
    traced = jax.make_jaxpr(of_gradients(read, mesh, axis))(*arrays)
    scatter = functools.partial(summed_part, mesh=mesh)
    state = program.InParts([0], {0: axis}, scatter)
    dims = [axis, rows]
    own = program.of_one_replica(traced, dims, replicas, in_parts=state)
    found = jax.jit(lambda *given: sums.results_of(mesh, own, dims, given))(*arrays)
    return found, str(own.program)


def gathered(text: str, shape: tuple[int, ...]) -> list[str]:
    """The gathers of arrays of a shape whose results are used."""
    sizes = ",".join(map(str, shape))
    return re.findall(rf"\b[a-z]+:\w+\[{sizes}\] = all_gather", text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_few_rows_travel(name: str, axis: int, replicas: int) -> None:
    read, shape, rows = CASES[name]
    arrays = normal(*shape) / 8, rows
    found, text = of_replicas(read, arrays, axis, ROWS.get(name, 0), replicas)
    mesh = ReplicaMesh.of(jax.devices()[:1])
    expected = of_gradients(read, mesh, axis)(*map(jnp.asarray, arrays))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert bool(gathered(text, shape)) == (name in WHOLE)


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_whole_numbers_are_exact(axis):
    """As of a quantized layer, beyond what float32 has digits for."""
    matrix, rows = RNG.integers(-9999, 9999, (64, 128)), RNG.integers(0, 9999, (N, 64))
    arrays = [matrix.astype("int32"), rows.astype("int32")]
    mesh = ReplicaMesh.of(jax.devices()[:4])
    whole = NamedSharding(mesh.mesh, PartitionSpec())

    def function(matrix: Any, rows: Any) -> Any:
        return rows @ lax.with_sharding_constraint(matrix, whole)

    traced = jax.make_jaxpr(function)(*arrays)
    state = program.InParts([0], {}, functools.partial(summed_part, mesh=mesh))
    own = program.of_one_replica(traced, [axis, 0], 4, in_parts=state)
    assert not gathered(str(own.program), (64, 128))
    (found,) = sums.results_of(mesh, own, [axis, 0], arrays)
    np.testing.assert_array_equal(found, arrays[1] @ arrays[0])

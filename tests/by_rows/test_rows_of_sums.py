"""The gradient of a large table of which few rows are looked up: its rows travel, not
the gradient; the numbers are those of the program over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from keras import layers

import keras_distribute as kd
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.by_rows import program, sums
from keras_distribute.devices.mesh import ReplicaMesh
from tests.support import mirrored

RNG = np.random.default_rng(0)
ROWS, WIDTH, N = 12_000, 64, 16
IDS = RNG.integers(0, ROWS, (N, 3)).astype("int32")
OUTSIDE = np.where(RNG.random((N, 3)) < 0.2, ROWS + 5, IDS)
BOTH = np.stack([IDS, IDS[::-1]], -1)


def looked_up(table: Any, ids: Any) -> Any:
    return jnp.sin(table[ids])


def twice(table: Any, ids: Any) -> Any:
    return jnp.sin(table[ids[..., 0]]) * table[ids[..., 1]]


def transposed(table: Any, ids: Any) -> Any:
    return jnp.sin(table.T[ids])


def narrow(table: Any, ids: Any) -> Any:
    return jnp.sin(table.astype("bfloat16")[ids]).astype("float32")


def tied(table: Any, ids: Any) -> Any:
    found = table[ids].mean(1)
    return jnp.sin(found @ table[:, :64].T)


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any]] = {
    "rows": (looked_up, (ROWS, WIDTH), IDS),
    "indices outside": (looked_up, (ROWS, WIDTH), OUTSIDE),
    "indices from the end": (looked_up, (ROWS, WIDTH), IDS - ROWS),
    "two lookups": (twice, (ROWS, WIDTH), BOTH),
    "columns": (transposed, (WIDTH, ROWS), IDS),
    "bfloat16": (narrow, (ROWS, WIDTH), IDS),
    "elements": (looked_up, (1 << 19,), IDS),
}
DENSE: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any]] = {
    "a head that is tied to it": (tied, (ROWS, WIDTH), IDS),
    "a small table": (looked_up, (1000, WIDTH), IDS % 1000),
    "many rows": (looked_up, (5000, WIDTH), RNG.integers(0, 5000, (N, 200))),
}


def gradient_of(read: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(table: Any, ids: Any) -> Any:
        found = jax.grad(lambda table: jnp.cos(read(table, ids)).sum())(table)
        return checkpoint_name(found, "gradient")

    return gradient


def of_replicas(
    read: Callable[..., Any], arrays: Any, replicas: int, dtype: Any = None
) -> tuple[Any, bool]:
    """The gradient by one replica's program, and whether its rows have travelled."""
    travelled = []

    def total(own: Any, of_rows: Callable[[], Any] | None) -> Any:
        travelled.append(of_rows is not None)
        return lax.psum(own, REPLICA_AXIS) if of_rows is None else of_rows()

    traced = jax.make_jaxpr(gradient_of(read))(*arrays)
    own = program.of_one_replica(
        traced, [None, 0], replicas, {"gradient": total}, dtype=dtype
    )
    mesh = ReplicaMesh.of(jax.devices()[:replicas])
    run = jax.jit(lambda *given: sums.results_of(mesh, own, [None, 0], given))
    compiled = run.lower(*arrays).compile()
    (is_rows,) = travelled
    text = compiled.as_text()
    assert ("all-reduce" in text) != is_rows
    assert ("all-gather" in text) == is_rows
    return compiled(*arrays)[0], is_rows


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("name", [*CASES, *DENSE])
def test_gradient_of_a_table(name: str, replicas: int) -> None:
    read, shape, ids = (CASES | DENSE)[name]
    arrays = RNG.normal(size=shape).astype("float32"), jnp.asarray(ids)
    found, travelled = of_replicas(read, arrays, replicas)
    expected = jax.jit(gradient_of(read))(*arrays)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if travelled:  # In the order of one device.
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)
    assert travelled == (name in CASES)


def test_rows_travel_in_16_bits():
    """And are added in 32 again: the same row, looked up 1,000 times."""
    ids = jnp.zeros((1000, 3), "int32").at[:, 1:].set(jnp.arange(2000).reshape(-1, 2))
    arrays = jnp.full((ROWS, WIDTH), 0.1, "float32"), ids

    def read(table: Any, ids: Any) -> Any:
        return jnp.arccos(table[ids] / 3)  # Its gradient is a third, not in 16 bits.

    found, travelled = of_replicas(read, arrays, 4, "bfloat16")
    expected = gradient_of(read)(*arrays)
    assert travelled
    assert np.abs(found - expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=2**-8)


def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    ids = keras.Input((3,), dtype="int32")
    hidden = layers.Embedding(ROWS, WIDTH, name="table")(ids)
    hidden = layers.Dense(8, activation="tanh")(layers.Flatten()(hidden))
    return keras.Model(ids, layers.Dense(1)(hidden))


def trained(strategy: Any, optimizer: Any) -> list[np.ndarray]:
    with strategy.scope():
        own = model()
        own.compile(optimizer(), "mse")
    y = np.sin(IDS.sum(1)).astype("float32")
    own.fit(IDS, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return own.get_weights()


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("name", ["Adam", "Muon"])
def test_fit(name: str, replicas: int) -> None:
    optimizer = getattr(keras.optimizers, name)
    expected = trained(kd.get_strategy(), lambda: optimizer(0.01))
    found = trained(mirrored(replicas), lambda: optimizer(0.01))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Noting(kd.CrossDeviceOps):
    """Adds as it likes."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def reduce_implementation(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        self.shapes.add(value.local.shape)
        return lax.psum(value.local, REPLICA_AXIS)


def test_operations_of_a_user_are_asked():
    ops = Noting()
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    trained(strategy, lambda: keras.optimizers.SGD(0.1))
    assert (ROWS, WIDTH) in ops.shapes

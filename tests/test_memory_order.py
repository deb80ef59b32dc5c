"""Gradients in the order in which a TPU has their weights, which no test here has."""

import math
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental.layout import Layout, with_layout_constraint

import keras_distribute as kd
from keras_distribute.devices import memory_order
from keras_distribute.devices.memory_order import as_weights
from keras_distribute.training import replica_rules
from keras_distribute.training.steps import by_rows
from tests.support import mirrored

RNG = np.random.RandomState(0)
X = RNG.randint(0, 300, (32, 5))
Y = RNG.randn(32, 3).astype("float32")


def of_chips(logical_axes=()):
    """A mesh of TPUs, as far as it is looked at."""
    return types.SimpleNamespace(
        platform="tpu", logical_axes=logical_axes, devices=["a chip"]
    )


@pytest.fixture
def long_axis_innermost(monkeypatch):
    def order(device, shape, dtype):
        return tuple(sorted(range(len(shape)), key=shape.__getitem__))

    monkeypatch.setattr(memory_order, "axes_in_memory", order)


def orders_in(shape, mesh):
    """What the gradient of such a weight is constrained to."""
    value = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.make_jaxpr(lambda g: as_weights(g, mesh) + 1)(value)
    return [
        eqn.params["layout"].major_to_minor
        for eqn in program.eqns
        if eqn.primitive.name == "layout_constraint"
    ]


@pytest.mark.parametrize(
    ("shape", "orders"),
    [
        ((100_000, 64), [(1, 0)]),
        ((1000, 64), []),
        ((64, 100_000), []),
        ((7,), []),
        ((), []),
        ((3000, 200, 4), [(2, 1, 0)]),
    ],
)
def test_only_another_order_of_what_is_large_is_said(
    long_axis_innermost, shape, orders
):
    assert orders_in(shape, of_chips()) == orders


def test_gradients_in_parts_are_left_to_xla(long_axis_innermost):
    assert orders_in((100_000, 64), of_chips(("logical0",))) == []


def test_other_devices_have_the_order_of_the_axes():
    assert orders_in((100_000, 64), mirrored(2).replica_mesh) == []


def test_a_client_is_asked(monkeypatch):
    asked = []

    def of_client(dtype, shape, device):
        asked.append((dtype.name, shape))
        if shape == (3, 2):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: layouts")
        return shape

    client = types.SimpleNamespace(get_default_layout=of_client)
    device = types.SimpleNamespace(client=client)
    monkeypatch.setattr(Layout, "from_pjrt_layout", lambda shape: Layout((1, 0)))
    assert memory_order.axes_in_memory(device, (5, 2), "float32") == (1, 0)
    assert memory_order.axes_in_memory(device, (3, 2), "float32") == (0, 1)
    assert asked == [("float32", (5, 2)), ("float32", (3, 2))]


def test_a_cpu_says_its_order():
    here = jax.devices()[0]
    assert memory_order.axes_in_memory(here, (100_000, 64), "float32") == (0, 1)


def trained(strategy, in_a_loop):
    """The weights and slots after two steps."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(300, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
    if not in_a_loop:
        model.fit(X, Y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    else:

        def step(x, y):
            def loss_of(x, y):
                return keras.losses.MeanSquaredError()(y, model(x))

            weights = model.trainable_variables
            _, grads = kd.value_and_grad(loss_of, weights)(x, y)
            optimizer.apply(grads, weights)

        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(step, batch)
    return [np.asarray(v) for v in (*model.weights, *optimizer.variables)]


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("replicas", [1, 4])
def test_the_order_changes_no_number(replicas, deterministic, in_a_loop, monkeypatch):
    """On CPUs, whose compiler knows it, too."""
    strategy, told = mirrored(replicas, deterministic=deterministic), []
    expected = trained(strategy, in_a_loop)

    def reversed_axes(value, mesh):
        told.append((value.shape, mesh))
        return with_layout_constraint(value, Layout(tuple(range(value.ndim))[::-1]))

    for module in (by_rows, replica_rules):
        monkeypatch.setattr(module, "as_weights", reversed_axes)
    again = mirrored(replicas, deterministic=deterministic)
    for value, other in zip(trained(again, in_a_loop), expected, strict=True):
        np.testing.assert_array_equal(value, other)
    if replicas > 1 or in_a_loop:
        # On CPUs small weights may be one to the optimizer.
        shapes = {shape for shape, _ in told}
        assert sum(map(math.prod, shapes)) >= 300 * 4 + 4 * 3 + 3
        assert all(mesh is again.replica_mesh for _, mesh in told)

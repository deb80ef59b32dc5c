"""Replicas in series, through `run` and custom loops: the same bits on 1, 2, 4 and 8
devices, and what eight devices with a replica each give.
"""

import os
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import keras_distribute as kd
from keras_distribute import errors
from keras_distribute.devices import jaxprs
from keras_distribute.devices.convolutions import IN_ORDER
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.devices.rewriting import rewritten
from tests.support import dense_model, distributed, mirrored

# On 1 nothing is between devices, on 8 each has one replica: the others are between.
DEVICES = (1, 2, 4, 8) if os.environ.get("EVERY_CASE") else (1, 4)
AXIS = "replica"
# As for users; these tests are compiled without, to be quick.
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
RNG = np.random.RandomState(0)
X = [RNG.randn(8, 3).astype("float32") for _ in range(8)]
UNEVEN = [RNG.randn(i % 3, 2).astype("float32") for i in range(8)]


def in_series(devices, num_replicas=8):
    return mirrored(devices, deterministic=True, num_replicas=num_replicas)


@pytest.fixture(scope="module")
def plain():
    return mirrored(8)


@pytest.fixture(scope="module")
def strategies():
    return [in_series(devices) for devices in DEVICES]


def as_numpy(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def results(strategy, fn, *args):
    """The components of all results, as arrays of NumPy."""
    given = [distributed(strategy, a) if isinstance(a, list) else a for a in args]
    leaves = jax.tree.leaves(
        strategy.run(fn, args=given), is_leaf=lambda v: isinstance(v, kd.PerReplica)
    )
    assert all(len(leaf.values) == 8 for leaf in leaves)
    return [as_numpy(value) for leaf in leaves for value in leaf.values]


def assert_same_bits(own, others):
    for other in others:
        for a, b in zip(own, other, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.tobytes() == b.tobytes(), (a, b)


def check(strategies, plain, fn, *args, rtol=1e-5):
    """The same bits on any number of devices; those of a plain strategy with
    `rtol=0`.
    """
    one, *several = [results(strategy, fn, *args) for strategy in strategies]
    assert_same_bits(one, several)
    if plain is None:
        return one
    expected = results(plain, fn, *args)
    if not rtol:
        assert_same_bits(one, [expected])
    for a, b in zip(one, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            a.astype("complex128"), b.astype("complex128"), rtol, 1e-5 if rtol else 0
        )
    return one


def test_sums(strategies, plain):
    def fn(x, large):
        total = lax.psum(x, AXIS)
        over_both = jax.vmap(
            lambda row: (lax.psum(row, (AXIS, "rows")), lax.psum(row, "rows")),
            axis_name="rows",
        )
        return [
            total,
            lax.psum((x, x[0]), AXIS),
            lax.pmean(x, AXIS),
            lax.psum(total, AXIS),
            lax.psum(jnp.ones(3), AXIS),
            lax.psum_scatter(x, AXIS),
            lax.psum_scatter(x, AXIS, tiled=True),
            lax.psum_scatter(x.T, AXIS, scatter_dimension=1, tiled=True),
            lax.psum_scatter(total, AXIS),
            lax.psum(large, AXIS),
            over_both(x),
            jax.grad(lambda x: jnp.sum(jnp.sin(lax.psum(x**2, AXIS))))(x),
            lax.psum(x * 1j, AXIS),
        ]

    large = [RNG.randn(70, 101).astype("float32") for _ in range(8)]
    check(strategies, plain, fn, X, large)


def test_movements(strategies, plain):
    def fn(x):
        most, cube = lax.pmax(x, AXIS), jnp.stack([x, x + 1], 1)
        some = [(0, 1), (5, 2)]
        return [
            most,
            lax.pmin(x, AXIS),
            lax.axis_index(AXIS),
            [lax.all_gather(x, AXIS, axis=axis) for axis in (0, 1, 2)],
            [lax.all_gather(x, AXIS, axis=axis, tiled=True) for axis in (0, 1)],
            lax.all_gather(lax.axis_index(AXIS), AXIS),
            lax.all_gather(most, AXIS),
            lax.ppermute(x, AXIS, [(i, (i + 3) % 8) for i in range(8)]),
            lax.ppermute(x, AXIS, some),
            lax.ppermute(most, AXIS, some),
            lax.all_to_all(x, AXIS, 0, 0),
            lax.all_to_all(x, AXIS, 0, 1),
            lax.all_to_all(x.T, AXIS, 1, 0),
            lax.all_to_all(cube, AXIS, 0, 2),
            lax.all_to_all(cube, AXIS, 0, 2, tiled=True),
            lax.all_to_all(x, AXIS, 0, 0, tiled=True),
            lax.all_to_all(most, AXIS, 0, 0, tiled=True),
            jax.vmap(lambda row: lax.pmax(row, (AXIS, "v")), axis_name="v")(x),
            jax.vmap(lambda row: lax.all_gather(row, AXIS))(x),
        ]

    check(strategies, plain, fn, X, rtol=0)


def test_types(strategies, plain):
    def exact(x):
        whole = (10 * x).astype("int32")
        return [
            lax.psum(whole, AXIS),
            lax.psum(whole.astype("int8"), AXIS),
            lax.pmax(whole.astype("uint8"), AXIS),
            lax.psum(x > 0, AXIS),
            lax.pmax(x > 0, AXIS),
            lax.pmin(x > 0, AXIS),
            lax.all_gather(x > 0, AXIS),
            lax.ppermute(x > 0, AXIS, [(0, 1)]),
        ]

    def of_16_bits(x):
        return [
            result
            for dtype in ("bfloat16", "float16")
            for own in [x.astype(dtype)]
            for result in (
                lax.psum(own, AXIS),
                lax.pmean(own, AXIS),
                lax.psum_scatter(own, AXIS),
                lax.pmax(own, AXIS),
                lax.all_gather(2 * own, AXIS),
                jax.grad(lambda x: jnp.sum(lax.psum(jnp.tanh(x), AXIS) ** 2))(own),
            )
        ]

    check(strategies, plain, exact, X, rtol=0)
    check(strategies, plain, of_16_bits, X, rtol=0.1)


def test_weak_types(strategies, plain):
    def weak(x):
        return x, 2 * x, jnp.full(3, x), jnp.ones(3)

    def product(x):
        return x * jnp.ones(3, "bfloat16")

    for strategy in [plain, *strategies]:
        found = strategy.run(weak, (jnp.asarray(2.0),))
        flags = [value.weak_type for each in found for value in each.values]
        assert flags == [True] * 24 + [False] * 8
        assert strategy.run(product, (found[1],)).values[7].dtype == "bfloat16"


def test_what_is_no_number_and_zeros_with_signs(strategies):
    def fn(x):
        return lax.pmax(x, AXIS), lax.pmin(x, AXIS), lax.psum(x, AXIS)

    given = [np.float32([i, 0.0 if i % 2 else -0.0]) for i in range(8)]
    given[3][0] = np.nan
    found = check(strategies, None, fn, given)
    assert all(np.isnan(value[0]) for value in found)


def test_divisors_that_several_share(strategies, plain):
    """XLA makes them products, if it sees that they are shared."""

    def fn(x, weights):
        def loss(weights):
            each = jnp.dot(x, weights)
            scale = lax.rsqrt(each.var(-1, keepdims=True) + 1e-3)
            return jnp.sum(jnp.cos(each * scale)) / 7

        return jax.grad(loss)(weights)

    rows = [RNG.randn(5, 6).astype("float32") for _ in range(8)]
    check(strategies, plain, fn, rows, RNG.randn(6, 7).astype("float32"), rtol=1e-3)


def test_divisors_that_are_compared_too(strategies, plain):
    """In a loop, in a condition and in what is computed again, too."""

    def scaled(x):
        largest = jnp.sum(jnp.abs(x)) + 1
        return jnp.where(x > largest, x, 0) + jnp.tanh(x) / largest + jnp.arange(37.0)

    def fn(x):
        chosen = lax.cond(x[0, 0] > -100, scaled, lambda x: x, x)
        turned = lax.scan(lambda c, row: (scaled(c + row),) * 2, x[0], x)[1]
        again = jax.grad(lambda x: jnp.sum(jax.checkpoint(scaled)(x) ** 2))(x)
        return scaled(x), chosen, turned, again

    rows = [RNG.randn(3, 37).astype("float32") for _ in range(8)]
    check(strategies, plain, fn, rows, rtol=1e-4)


def test_equal_constants_are_one(strategies):
    """What XLA fuses depends on who else takes a constant."""
    split = PartitionSpec(AXIS)

    def fn(x):
        rows = jnp.where(x > 0, x, 0)
        return jnp.sum(rows, keepdims=True), jnp.where(x < 0, 0, rows[0])

    for mesh in [strategy.replica_mesh for strategy in strategies]:
        program = jax.jit(
            over_replicas(mesh, fn, split, split),
            compiler_options=mesh.series.compiler_options,
        )
        text = program.lower(np.ones((24, 5), "float32")).compile().as_text()
        for computation in text.split("\n\n"):
            constants = re.findall(r"= (\w+\[\] constant\(.*?\))", computation)
            assert len(constants) == len(set(constants)), computation


def test_nothing(strategies, plain):
    def fn(x):
        none = jnp.zeros((8, 0)) + jnp.sum(x)
        return [
            lax.psum(x, AXIS),
            lax.pmax(x, AXIS),
            lax.all_gather(x, AXIS),
            lax.all_gather(x, AXIS, axis=1, tiled=True),
            lax.ppermute(x, AXIS, [(0, 1)]),
            lax.psum_scatter(none, AXIS),
            lax.all_to_all(none, AXIS, 0, 0),
            2 * x,
        ]

    check(strategies, plain, fn, [np.zeros((0, 3), "float32")] * 8, rtol=0)


def test_conditions_and_loops_that_communicate(strategies, plain):
    def fn(x):
        total = lax.psum(jnp.sum(x), AXIS)

        def body(carry, row):
            carry = lax.cond(
                lax.psum(jnp.sum(row), AXIS) > 0,
                lambda c: lax.fori_loop(0, 2, lambda _, c: lax.pmean(c, AXIS) + row, c),
                lambda c: jnp.sin(c - lax.axis_index(AXIS)),
                carry,
            )
            return jnp.tanh(carry), (lax.psum(carry, AXIS), lax.all_gather(row, AXIS))

        return [
            lax.cond(total > 0, lambda: lax.psum(x, AXIS), lambda: lax.pmax(x, AXIS)),
            lax.scan(body, x[0], x),
            lax.scan(body, x[0], x, reverse=True),
            lax.while_loop(
                lambda c: lax.pmax(jnp.max(c), AXIS) > 0.1,
                lambda c: 0.4 * c + 0.1 * lax.pmean(c, AXIS),
                jnp.abs(x),
            ),
            jax.vmap(
                lambda row: lax.while_loop(
                    lambda c: lax.pmax(jnp.max(c), AXIS) > 0.1,
                    lambda c: 0.4 * c + 0.1 * lax.pmean(c, AXIS),
                    row,
                )
            )(jnp.abs(x)),
            jax.grad(
                lambda x: jnp.sum(lax.scan(jax.checkpoint(body), x[0], x)[0]),
            )(x),
        ]

    check(strategies, plain, fn, X, rtol=1e-4)


def test_gradients_of_ones_own_and_what_is_computed_again(strategies, plain):
    @jax.custom_vjp
    def scaled(x):
        return lax.pmean(x, AXIS) * x

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (lax.psum(g * x, AXIS),))

    def fn(x):
        again = jax.checkpoint(lambda x: jnp.sin(lax.psum(jnp.sin(x), AXIS)))
        alone = jax.checkpoint(lambda x: jnp.sin(x) * lax.axis_index(AXIS))
        return [
            scaled(x),
            jax.grad(lambda x: jnp.sum(scaled(x) ** 2))(x),
            jax.grad(lambda x: jnp.sum(again(x)))(x),
            jax.grad(lambda x: jnp.sum(alone(lax.psum(x, AXIS) * x)))(x),
        ]

    check(strategies, plain, fn, X, rtol=1e-4)


def test_a_replica_knows_its_number_everywhere(strategies, plain):
    """Also where it does not communicate."""

    def fn(x):
        def number():
            return lax.axis_index(AXIS).astype("float32")

        return [
            lax.cond(jnp.sum(x) > 0, lambda: x * number(), lambda: x - number()),
            lax.scan(lambda c, row: (c + number(), row * number()), x[0], x),
            lax.while_loop(lambda c: c < number(), lambda c: c + number() / 2, 0.0),
            jax.vmap(
                lambda v: lax.while_loop(
                    lambda c: c < number(), lambda c: c + 1 + jnp.abs(v), v
                )
            )(x[0]),
            jax.checkpoint(lambda x: x * number() * np.arange(3.0))(x),
            lax.map(lambda row: jax.jit(lambda r: r * number())(row), x),
        ]

    check(strategies, plain, fn, X)


def test_random_keys_cross_communication(strategies, plain):
    def fn(x, key):
        own = jax.random.fold_in(key, lax.axis_index(AXIS))
        pair = jax.random.split(own, 2)
        total = lax.psum(jax.random.normal(own, (3,)), AXIS)

        def body(key, row):
            key, sub = jax.random.split(key)
            return key, lax.psum(jax.random.normal(sub, (2,)) * row[0], AXIS)

        return [
            own,
            pair,
            jax.random.uniform(pair[0], (2,)) + total[0],
            lax.ppermute(own, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
            lax.scan(body, own, x),
            lax.cond(
                total[0] > 0,
                lambda k: jax.random.fold_in(k, lax.pmax(1, AXIS)),
                lambda k: k,
                own,
            ),
        ]

    check(strategies, plain, fn, X, jax.random.key(3))


def test_communication_among_some_is_refused(strategies):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def fn(x):
        return lax.psum(x, AXIS, axis_index_groups=groups)

    for strategy in (strategies[0], strategies[-1]):
        with pytest.raises(errors.ContextError) as caught:
            strategy.run(fn, args=(distributed(strategy, X),))
        assert str(caught.value) == (
            "With deterministic=True, replicas communicate with all others.\n"
            "  Received: the operation 'psum' with axis_index_groups=((0, 1, 2, 3), "
            "(4, 5, 6, 7)).\n"
            "  Fix: kd.get_replica_context().all_reduce or all_gather; or a strategy "
            "without deterministic=True."
        )


def test_constructors_refuse():
    def refusal(devices, **options):
        with pytest.raises(errors.DeviceError) as caught:
            mirrored(devices, **options)
        return str(caught.value)

    assert refusal(1, deterministic=True, num_replicas=6) == (
        "The replicas of a deterministic strategy are summed by a binary tree, so "
        "their number is a power of two.\n"
        "  Received: num_replicas=6.\n"
        "  Fix: num_replicas=8, on every machine that is to get the same bits."
    )
    assert refusal(8, deterministic=True, num_replicas=4) == (
        "Each device of a deterministic strategy has equally many of the replicas.\n"
        "  Received: 4 replicas on 8 devices.\n"
        "  Fix: 4 devices, or num_replicas=8 on every machine that is to get the same "
        "bits."
    )
    assert refusal(3, deterministic=True, num_replicas=8) == (
        "Each device of a deterministic strategy has equally many of the replicas.\n"
        "  Received: 8 replicas on 3 devices.\n"
        "  Fix: 2 devices."
    )
    assert refusal(2, num_replicas=8) == (
        "Without deterministic=True, each device is a replica.\n"
        "  Received: num_replicas=8.\n"
        "  Fix: deterministic=True, num_replicas=8; or devices=, which names as many "
        "devices."
    )
    assert in_series(2, None).num_replicas_in_sync == 8


def lists(value):
    return jax.tree.map(lambda array: np.asarray(array).tolist(), value)


def test_values(strategies, plain):
    """Components, reductions and what is joined, also of other sizes and ranks."""
    mixed = [np.full((2,) * (1 + i % 2), i, "float32") for i in range(8)]

    def of(strategy):
        even, uneven = distributed(strategy, X), distributed(strategy, UNEVEN)
        doubled, total = strategy.run(
            lambda x: (2 * x, lax.psum(jnp.sum(x), AXIS)), args=(uneven,)
        )
        gathered = strategy.run(
            lambda x: kd.get_replica_context().all_gather(x, axis=0), args=(uneven,)
        )
        reduced = strategy.extended.reduce_to("SUM", even, None)
        assert len(reduced.values) == len(even.values) == len(total.values) == 8
        exact = [
            even.values,
            uneven.values,
            distributed(strategy, mixed).values,
            strategy.experimental_local_results(uneven),
            strategy.gather(even, axis=1),
            strategy.gather(uneven, axis=0),
            strategy.gather(doubled, axis=0),
            gathered.values,
        ]
        close = [
            total.values,
            reduced.values,
            [strategy.reduce(op, even, axis=None) for op in ("SUM", "MEAN")],
            [strategy.reduce(op, uneven, axis=0) for op in ("SUM", "MEAN")],
        ]
        return lists(exact), lists(close)

    exact, close = of(strategies[0])
    for strategy in strategies[1:]:
        assert of(strategy) == (exact, close)
    there = of(plain)
    assert exact == there[0]
    np.testing.assert_allclose(
        *(
            np.concatenate([np.ravel(a) for a in jax.tree.leaves(c)])
            for c in (close, there[1])
        ),
        1e-5,
        1e-5,
    )


def test_variables_and_metrics(strategies, plain):
    def of(strategy):
        with strategy.scope():
            parts = [
                keras.Variable(
                    np.zeros(3, "float32"),
                    synchronization="on_read",
                    aggregation=aggregation,
                    trainable=False,
                )
                for aggregation in ("sum", "mean", "only_first_replica")
            ]
            mean = keras.Variable(np.ones(3, "float32"), aggregation="mean")
            same = keras.Variable(np.ones(3, "float32"))
            metric = keras.metrics.MeanSquaredError()

        def merge(strategy, x):
            total = strategy.extended.reduce_to("SUM", x, same)
            strategy.extended.update(same, lambda v, t: v.assign_add(t), args=(total,))
            return total

        def fn(x):
            for row, variable in zip(x, parts, strict=False):
                variable.assign_add(row)
            mean.assign(x[3])
            metric.update_state(x[4], x[5])
            return kd.get_replica_context().merge_call(merge, args=(x[6],))

        total = strategy.run(fn, args=(distributed(strategy, X),))
        locals_ = [strategy.experimental_local_results(v) for v in [*parts, same]]
        assert [len(each) for each in locals_] == [8] * 4
        everything = [*parts, mean, same, metric.result(), *total.values, locals_]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(everything)]

    one, *several = map(of, strategies)
    assert_same_bits(one, several)
    for a, b in zip(one, of(plain), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


ROWS = RNG.randn(37, 6).astype("float32")
TARGETS = RNG.randn(37, 2).astype("float32")


def trained(strategy, *, random):
    """Three epochs of a custom loop, whose last batches have fewer rows than
    replicas.
    """
    keras.utils.set_random_seed(1)
    with strategy.scope():
        between = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                *(between if random else []),
                keras.layers.Dense(2),
            ]
        )
        optimizer = keras.optimizers.SGD(
            0.05, momentum=0.9, gradient_accumulation_steps=2
        )
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.MeanSquaredError()

    def step(x, y):
        def loss_fn():
            predictions = model(x, training=True)
            metric.update_state(y, predictions)
            losses = keras.ops.sum(keras.ops.square(predictions - y), -1)
            return kd.nn.compute_average_loss(losses, global_batch_size=16)

        loss, gradients = kd.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = []
    dataset = kd.ArrayDataset((ROWS, TARGETS), batch_size=16)
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(dataset):
            count = strategy.num_replicas_in_sync
            assert [len(part.values) for part in batch] == [count, count]
            loss = strategy.run(step, args=batch)
            losses.append(np.asarray(strategy.reduce("SUM", loss, axis=None)))
    variables = [v.numpy() for v in [*model.variables, *optimizer.variables]]
    return [*losses, np.asarray(metric.result()), *map(np.asarray, variables)]


def test_a_custom_loop(strategies):
    one, *several = [trained(strategy, random=True) for strategy in strategies]
    assert_same_bits(one, several)


def test_a_custom_loop_is_as_on_one_device(strategies):
    found = [
        trained(strategy, random=False) for strategy in (strategies[0], strategies[-1])
    ]
    assert_same_bits(found[0], found[1:])
    for a, b in zip(found[0], trained(mirrored(1), random=False), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_the_replica_with_what_is_no_number_is_named(strategies):
    rows = ROWS[:32].copy()
    rows[11] = np.nan
    for strategy in strategies[1:]:
        model = dense_model(strategy, 6, 2)
        with pytest.raises(errors.NonFiniteError, match=r"in x of replica 2 \("):
            model.fit(
                rows,
                TARGETS[:32],
                batch_size=32,
                shuffle=False,
                verbose=0,
                callbacks=[kd.callbacks.RaiseOnNaN()],
            )


def test_arrays_that_the_compiler_knows(strategies, plain):
    """What it made of a sum over 3, times 3, was another operation on one device, where
    it knew the 3 in the loop, too.
    """
    three = np.array([3], "float32")

    def fn(x):
        own = jnp.sum(x[:, 0]) / jnp.prod(jnp.asarray(three)) * 3
        total = lax.psum(x, AXIS)
        return own, jnp.sum(total) / jnp.prod(jnp.asarray(three)) * 3

    check(strategies, plain, fn, [x[:3] for x in X])
    for devices in DEVICES:
        mesh = in_series(devices).replica_mesh
        program = over_replicas(mesh, fn, (PartitionSpec(AXIS),), PartitionSpec())
        lowered = jax.jit(program).lower(np.ones((24, 3), "float32"))
        computations = lowered.as_text(dialect="hlo").split("\n\n")
        knowing = [each for each in computations if "constant({3})" in each]
        assert {each.lstrip()[:5] for each in knowing} <= {"ENTRY"}


@pytest.mark.parametrize("devices", DEVICES)
def test_new_weights_take_the_place_of_old_ones(devices):
    """And nothing large is there only because a scalar is needed in its form."""
    rows, weights = (PartitionSpec(AXIS), PartitionSpec())

    def step(w, slot, rate, x):
        total = lax.psum(jnp.einsum("ri,rj->ij", x, jnp.tanh(x @ w)), AXIS)
        slot = 0.9 * slot + total
        return w - rate * slot / jnp.sqrt(1 + slot**2), slot, rate * 0.5

    mesh = in_series(devices).replica_mesh
    specs = (weights, weights, weights, rows)
    w, slot = np.ones((2, 96, 96), "float32")
    given = w, slot, np.float32(0.1), np.ones((32, 96), "float32")
    program = over_replicas(mesh, step, specs, (weights, weights, weights))
    lowered = jax.jit(
        program,
        donate_argnums=(0, 1, 2),
        compiler_options=mesh.series.compiler_options,
    ).lower(*given)
    compiled = lowered.compile()
    text = compiled.as_text()
    assert re.findall(r"= f32\[(?:96,96|9216)\]\S* copy\(.*", text) == []
    own, flat = w.nbytes * 8 // devices, w.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < own + 4 * flat


def optimized_sum(devices, function, *arrays):
    """The sum over the replicas of what a function makes of their rows."""
    mesh, rows = in_series(devices).replica_mesh, PartitionSpec(AXIS)
    program = over_replicas(
        mesh,
        lambda *own: lax.psum(function(*own), AXIS),
        (rows,) * len(arrays),
        PartitionSpec(),
    )
    options = mesh.series.compiler_options | OPTIMIZED
    return jax.jit(program, compiler_options=options)(*arrays)[0]


def sum_of_pairs(rows):
    """The sum that NumPy makes of pairs, of pairs of them, and so on."""
    rows = list(rows)
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-7, 1e-5, 6e-5, 1, 3e4])
def test_sums_of_16_bits_are_rounded_as_such(dtype, scale):
    """Also to the small numbers of float16 in which the bits of exponents end."""
    drawn = scale * np.random.RandomState(2).randn(8, 500)
    values = np.asarray(drawn.astype(jnp.dtype(dtype)))
    with np.errstate(over="ignore"):
        expected = sum_of_pairs(values)
    for devices in (1, 4, 8):
        sums = optimized_sum(devices, lambda x: x, values)
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_products_are_rounded_before_they_are_added(dtype):
    """Where a device has several replicas, as where each has its own."""
    drawn = np.random.RandomState(1).randn(2, 8, 500)
    x, y = jnp.asarray(drawn + drawn[::-1] * 1j if dtype == "complex64" else drawn)
    x, y = x.astype(dtype), y.astype(dtype)
    found = [optimized_sum(devices, jnp.multiply, x, y) for devices in (1, 2, 8)]
    expected = sum_of_pairs(np.asarray(x) * np.asarray(y))
    # How a complex product is rounded is XLA's own.
    rtol = 1e-5 if dtype == "complex64" else 0
    np.testing.assert_allclose(found[0], expected, rtol)
    for sums in found[1:]:
        np.testing.assert_array_equal(sums, found[0])


def test_convolutions_in_loops_have_one_order_of_dimensions():
    """Also in those of the user's own."""
    images, kernel = np.ones((2, 5, 6, 3), "float32"), np.ones((2, 2, 3, 4), "float32")

    def function(kernel):
        def loss(kernel):
            convolved = lax.conv_general_dilated(
                images,
                kernel,
                (1, 2),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            return jnp.sum(convolved**2)

        return lax.scan(lambda k, _: (k - jax.grad(loss)(k), None), kernel, None, 2)[0]

    def is_in_another(eqn):
        orders = eqn.params.get("dimension_numbers")
        is_one = eqn.primitive.name == "conv_general_dilated"
        return is_one and orders.lhs_spec != (0, 3, 1, 2)

    own = rewritten(function, [IN_ORDER])
    assert jaxprs.has(jax.make_jaxpr(function)(kernel), is_in_another)
    assert not jaxprs.has(jax.make_jaxpr(own)(kernel), is_in_another)
    np.testing.assert_allclose(own(kernel), function(kernel), rtol=1e-5)

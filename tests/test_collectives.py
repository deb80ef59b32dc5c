"""`reduce`, `gather`, the replica context's collectives, their gradients, and the
`CrossDeviceOps`.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import errors
from tests.support import distributed, mirrored

RNG = np.random.RandomState(0)


@pytest.fixture(params=[1, 2, 3, 8])
def strategy(request):
    return mirrored(request.param)


def parts_of(n, shape=(3, 4)):
    return [RNG.randn(*shape).astype("float32") for _ in range(n)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (-1, 0)])
def test_reduce(strategy, op, axis):
    parts = parts_of(strategy.num_replicas_in_sync)
    result = strategy.reduce(op, distributed(strategy, parts), axis=axis)
    reduce = np.sum if op == "SUM" else np.mean
    stacked = np.stack(parts)
    axes = (
        ()
        if axis is None
        else tuple(a % 2 + 1 for a in (axis if isinstance(axis, tuple) else (axis,)))
    )
    np.testing.assert_allclose(
        result, reduce(stacked, axis=(0, *axes)), rtol=1e-5, atol=1e-6
    )
    assert isinstance(result, jax.Array)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(shard.data, result)


def test_what_is_the_same_on_all_replicas_in_merge_call():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 3.0])

    def merged(op, make):
        def step(x):
            return kd.get_replica_context().merge_call(
                lambda strategy: strategy.reduce(op, make(x), axis=0)
            )

        return strategy.run(step, args=(np.ones(2, "float32"),)).values[1]

    for make in (lambda _: variable, lambda _: np.array([1.0, 3.0], "float32")):
        assert float(merged("MEAN", make)) == 2
        with pytest.raises(errors.ValueStructureError, match="same on every replica"):
            merged("SUM", make)
    with pytest.raises(
        errors.ContextError, match="(?s)In a merge_call, only what it is given.*args="
    ):
        merged("MEAN", lambda x: x)


@pytest.mark.parametrize("n", [1, 2])
def test_complex_arrays_that_repeat_one_number(n):
    """XLA ends the process where it sums such an array over devices."""
    strategy, one = mirrored(n), np.full(3, 1 + 2j, "complex64")
    with strategy.scope():
        variable = keras.Variable(0 * one, dtype="complex64", aggregation="sum")

    def step():
        variable.assign(one)
        context = kd.get_replica_context()
        merged = context.merge_call(
            lambda strategy, x: strategy.reduce("SUM", x, axis=0), args=(one[None],)
        )
        return *(context.all_reduce(op, one) for op in ("SUM", "MEAN")), merged

    total, mean, merged = [value.values[n - 1] for value in strategy.run(step)]
    np.testing.assert_array_equal([total, merged, variable], [n * one] * 3)
    np.testing.assert_array_equal(mean, one)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_of_ragged_components_divides_by_the_true_count(op):
    strategy = mirrored(4)
    parts = [np.arange(i + 1, dtype="float32") for i in range(3)] + [
        np.zeros(0, "float32")
    ]
    result = strategy.reduce(op, distributed(strategy, parts), axis=0)
    reduce = np.sum if op == "SUM" else np.mean
    assert float(result) == pytest.approx(float(reduce(np.concatenate(parts))))
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)shapes differ outside the reduced axes.*\(1,\), \(2,\).*Fix",
    ):
        strategy.reduce(op, distributed(strategy, parts), axis=None)


def test_mean_of_integers_is_not_truncated(strategy):
    n = strategy.num_replicas_in_sync
    value = distributed(strategy, [np.int32(i) for i in range(n)])
    assert float(strategy.reduce("MEAN", value, axis=None)) == pytest.approx(
        (n - 1) / 2
    )
    assert strategy.reduce("SUM", value, axis=None).dtype == jnp.int32
    assert (
        float(
            strategy.reduce(
                "MEAN", distributed(strategy, [np.array([0, 1])] * n), axis=0
            )
        )
        == 0.5
    )


def test_reduce_of_structures_and_names(strategy):
    n = strategy.num_replicas_in_sync
    value = {
        "a": distributed(strategy, [np.float32(1)] * n),
        "b": [distributed(strategy, parts_of(n))],
    }
    assert float(strategy.reduce("sum", value, axis=None)["a"]) == n
    assert strategy.reduce(kd.ReduceOp.MEAN, value, axis=None)["b"][0].shape == (3, 4)


def test_reduce_of_what_is_the_same_everywhere():
    strategy = mirrored(2)
    assert float(strategy.reduce("MEAN", 3.0, axis=None)) == 3.0
    assert float(strategy.reduce("MEAN", np.array([1.0, 2.0]), axis=0)) == 1.5
    assert float(strategy.reduce("SUM", 0.0, axis=None)) == 0.0
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)sum of a value that is the same.*Fix:.*MEAN",
    ):
        strategy.reduce("SUM", 3.0, axis=None)
    assert float(mirrored(1).reduce("SUM", 3.0, axis=None)) == 3.0


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_keys_of_random_numbers_have_no_sum(op, axis):
    strategy = mirrored(2)
    keys = jax.random.split(jax.random.key(0), 2)
    of_replicas = distributed(strategy, lambda i: keys)
    unlike = distributed(strategy, lambda i: keys if i else keys[:, None])
    for value in (of_replicas, unlike, *([keys] if op == "SUM" or axis == 0 else [])):
        with pytest.raises(errors.StructureTypeError, match="(?s)neither a sum.*Fix"):
            strategy.reduce(op, value, axis)
    with pytest.raises(errors.StructureTypeError, match="(?s)neither a sum.*Fix"):
        strategy.run(lambda: kd.get_replica_context().all_reduce(op, keys))
    gathered = strategy.gather(of_replicas, axis=0)
    assert (gathered == jax.numpy.concatenate([keys, keys])).all()


def test_reduce_refusals(strategy):
    n = strategy.num_replicas_in_sync
    value = distributed(strategy, parts_of(n))
    with pytest.raises(
        errors.ValueStructureError, match=r"(?s)ReduceOp.SUM or ReduceOp.MEAN.*'MAX'"
    ):
        strategy.reduce("MAX", value, axis=None)
    with pytest.raises(TypeError, match="ReduceOp.SUM or ReduceOp.MEAN"):
        strategy.reduce(3, value, axis=None)
    with pytest.raises(
        errors.ValueStructureError, match="There is no axis 2 in a value of 2 dimension"
    ):
        strategy.reduce("SUM", value, axis=2)
    with pytest.raises(
        errors.ValueStructureError,
        match="(?s)There is no axis 0 in a value of 0.*Fix: axis=None",
    ):
        strategy.reduce("SUM", distributed(strategy, [np.float32(1)] * n), axis=0)
    with pytest.raises(errors.StructureTypeError, match="An axis is an integer"):
        strategy.reduce("SUM", value, axis="x")
    with pytest.raises(errors.StructureTypeError, match="Only arrays can be reduced"):
        strategy.reduce("SUM", distributed(strategy, ["a"] * n), axis=None)
    with pytest.raises(errors.StructureTypeError, match="Only arrays can be reduced"):
        strategy.reduce("MEAN", "text", axis=None)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(strategy, axis):
    parts = parts_of(strategy.num_replicas_in_sync)
    result = strategy.gather(distributed(strategy, parts), axis=axis)
    np.testing.assert_array_equal(result, np.concatenate(parts, axis))


def test_scalars_have_no_axis_to_be_gathered_along(strategy):
    n = strategy.num_replicas_in_sync
    text = r"(?s)There is no axis 0 in a value of 0.*Fix: .*value\[None\] to gather it"
    one = distributed(strategy, [np.float32(1)] * n)
    for gather in (
        lambda: strategy.gather(one, axis=0),
        lambda: strategy.gather(1.0, axis=0),
    ):
        with pytest.raises(errors.ValueStructureError, match=text):
            gather()
    result = strategy.run(lambda value: value[None], args=(one,))
    assert strategy.gather(result, axis=0).tolist() == [1.0] * n


def test_gather_of_ragged_components():
    strategy = mirrored(3)
    parts = [RNG.randn(2, size).astype("float32") for size in (1, 3, 0)]
    np.testing.assert_array_equal(
        strategy.gather(distributed(strategy, parts), axis=1), np.concatenate(parts, 1)
    )
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)all other dimensions.*float32\[2, 1\], float32\[2, 3\].*Fix",
    ):
        strategy.gather(distributed(strategy, parts), axis=0)
    with pytest.raises(errors.ValueStructureError, match="no axis 0 in a value of 0"):
        strategy.gather(distributed(strategy, [np.float32(1)] * 3), axis=0)


@pytest.mark.parametrize("rows", [8, 5])
def test_batches_on_the_host_are_used_like_those_on_the_devices(rows):
    strategy = mirrored(4)
    array = RNG.randn(rows, 2).astype("float16")
    data = kd.ArrayDataset(array, batch_size=rows)
    options = kd.InputOptions(experimental_fetch_to_device=False)
    host, placed = (
        next(iter(strategy.experimental_distribute_dataset(data, given)))
        for given in (options, None)
    )
    parts = strategy.experimental_local_results(host)
    assert [(type(p), len(p)) for p in parts] == [
        (np.ndarray, len(p)) for p in placed.values
    ]

    def step(x):
        return kd.get_replica_context().all_reduce("SUM", x.sum())

    def used(value):
        sums = strategy.run(step, args=(value,))
        results = [strategy.gather(value, axis=0), *sums.values]
        results += [strategy.reduce(op, value, axis=0) for op in ("SUM", "MEAN")]
        if rows == 8:
            results.append(strategy.reduce("MEAN", value, axis=None))
            results.append(strategy.extended.reduce_to("SUM", value, value))
        return list(map(str, results))

    assert used(host) == used(placed)
    assert all(a is b for a, b in zip(host.values, parts, strict=True))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_the_sum_behind_a_mean_does_not_overflow(dtype):
    strategy, largest = mirrored(4), float(jnp.finfo(dtype).max)
    equal = distributed(strategy, [jnp.full(2, largest, dtype)] * 4)
    ragged = distributed(strategy, [jnp.full(1 + i, largest, dtype) for i in range(4)])
    for mean in (
        strategy.reduce("MEAN", equal, axis=None)[1],
        strategy.reduce("MEAN", equal, axis=0),
        strategy.reduce("MEAN", ragged, axis=0),
    ):
        assert mean.dtype == dtype and float(mean) == largest


def test_a_mean_of_more_elements_than_an_int32_counts():
    strategy = mirrored(2)
    for sizes in ((2**30, 2**30), (2**30, 2**30 + 1)):
        value = distributed(strategy, [np.zeros((size, 0)) for size in sizes])
        assert strategy.reduce("MEAN", value, axis=0).shape == (0,)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)], ids=["equal", "ragged"])
def test_what_was_gathered_is_freed(sizes):
    strategy = mirrored(2)
    value = distributed(strategy, [np.ones((size, 7), "float32") for size in sizes])
    assert strategy.gather(value, axis=0).shape == (4, 7)
    kept = weakref.ref(value)
    del value
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce_in_a_replica(strategy, op):
    parts = parts_of(strategy.num_replicas_in_sync)

    def fn(x):
        return kd.get_replica_context().all_reduce(
            op, {"x": x, "nested": [x * 2, None]}
        )

    result = strategy.run(fn, args=(distributed(strategy, parts),))
    expected = (np.sum if op == "SUM" else np.mean)(np.stack(parts), 0)
    for component in strategy.experimental_local_results(result):
        np.testing.assert_allclose(component["x"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            component["nested"][0], 2 * expected, rtol=1e-5, atol=1e-6
        )


def test_all_gather_in_a_replica(strategy):
    parts = parts_of(strategy.num_replicas_in_sync)

    def fn(x):
        return kd.get_replica_context().all_gather({"a": x, "b": (x[0],)}, axis=0)

    for component in strategy.experimental_local_results(
        strategy.run(fn, args=(distributed(strategy, parts),))
    ):
        np.testing.assert_array_equal(component["a"], np.concatenate(parts))
        np.testing.assert_array_equal(
            component["b"][0], np.concatenate([p[0] for p in parts])
        )
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)without dimensions cannot be gathered.*Fix: value\[None\]",
    ):
        strategy.run(lambda: kd.get_replica_context().all_gather(1.0, axis=0))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16"])
def test_the_default_strategy_reduces_to_the_dtype_of_one_replica(op, dtype):
    def reduced():
        return kd.get_replica_context().all_reduce(op, np.ones(2, dtype))

    plain, (own,) = kd.get_strategy().run(reduced), mirrored(1).run(reduced).values
    assert (plain.dtype, plain.tolist()) == (own.dtype, own.tolist())


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize(
    "ops", [kd.NcclAllReduce, kd.HierarchicalCopyAllReduce, kd.ReductionToOneDevice]
)
def test_values_without_elements_are_reduced(ops, op):
    strategy = mirrored(2, cross_device_ops=ops())
    value = distributed(strategy, [np.zeros((0, 3), "float32")] * 2)
    assert strategy.reduce(op, value, axis=None).shape == (0, 3)


def test_an_update_in_merge_call_gets_components_wherever_they_are():
    strategy = mirrored(2)
    with strategy.scope():
        total = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
    outside = distributed(strategy, [1.0, 2.0])

    def update(variable, first, *, more):
        variable.assign_add(first + more[0]["x"])

    def merged(strategy, x, given=None):
        args = (x,), {"more": [{"x": x if given is None else given}]}
        strategy.extended.update(total, update, *args)

    def fn(x):
        kd.get_replica_context().merge_call(merged, (x,))

    strategy.run(fn, args=(outside,))
    assert [float(value) for value in total.values] == [2, 4]
    strategy.extended.update(total, update, (outside,), {"more": [{"x": outside}]})
    assert [float(value) for value in total.values] == [4, 8]
    with pytest.raises(errors.ValueStructureError, match="from outside of the program"):
        strategy.run(
            lambda x: kd.get_replica_context().merge_call(
                lambda s, x: merged(s, x, outside), (x,)
            ),
            args=(outside,),
        )
    assert float(total.numpy()) == 12


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_gradients_through_collectives(strategy, op):
    """The gradient of an all-reduce is the all-reduce of the gradients; of a gather,
    the sum of its part's.
    """
    n = strategy.num_replicas_in_sync
    parts, weights = parts_of(n, (3,)), np.arange(1.0, n + 1, dtype="float32")

    def reduced(x, w):
        return jax.grad(
            lambda x: w * jnp.sum(kd.get_replica_context().all_reduce(op, x) ** 1)
        )(x)

    def gathered(x, w):
        return jax.grad(
            lambda x: w * jnp.sum(kd.get_replica_context().all_gather(x, axis=0)[:2])
        )(x)

    args = (distributed(strategy, parts), distributed(strategy, list(weights)))
    expected = weights.sum() if op == "SUM" else weights.mean()
    for component in strategy.run(reduced, args=args).values:
        np.testing.assert_allclose(component, np.full(3, expected), rtol=1e-6)
    components = strategy.run(gathered, args=args).values
    np.testing.assert_allclose(components[0], np.array([1.0, 1.0, 0.0]) * weights.sum())
    for component in components[1:]:
        np.testing.assert_allclose(component, np.zeros(3))


OPS = {
    "nccl": kd.NcclAllReduce(),
    "nccl, one by one": kd.NcclAllReduce(num_packs=0),
    "nccl, three packs": kd.NcclAllReduce(num_packs=3),
    "hierarchical": kd.HierarchicalCopyAllReduce(),
    "hierarchical, one by one": kd.HierarchicalCopyAllReduce(num_packs=0),
    "one device": kd.ReductionToOneDevice(),
    "one device, own sum": kd.ReductionToOneDevice(
        accumulation_fn=lambda parts: jnp.sum(jnp.stack(parts), 0)
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_cross_device_ops_give_the_same_numbers(name, n):
    strategy = mirrored(n, OPS[name])
    shapes = [(5,), (), (2, 3), (7, 1), (1,)]
    parts = [
        [np.asarray(RNG.randn(*shape), "float32") for shape in shapes]
        + [np.int32([i, 1])]
        for i in range(n)
    ]
    values = [
        distributed(strategy, [row[k] for row in parts]) for k in range(len(parts[0]))
    ]
    inside = strategy.run(
        lambda xs: kd.get_replica_context().all_reduce("SUM", xs), args=(values,)
    )
    outside = strategy.extended.batch_reduce_to("SUM", [(v, v) for v in values])
    means = strategy.extended.batch_reduce_to("MEAN", [(v, v) for v in values])
    for k, value in enumerate(values):
        expected = np.sum([row[k] for row in parts], 0)
        np.testing.assert_allclose(
            np.asarray(inside[k].values[-1]), expected, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            np.asarray(outside[k]), expected, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            np.asarray(means[k]), expected / n, rtol=1e-5, atol=1e-6
        )
        assert isinstance(outside[k], kd.Mirrored)
        assert float(
            jnp.sum(strategy.reduce("SUM", value, axis=None))
        ) == pytest.approx(float(expected.sum()), rel=1e-4)


@pytest.mark.parametrize("count", [2, 8, 9, 20])
def test_any_number_of_arrays_go_into_one_buffer(count):
    strategy = mirrored(2, kd.NcclAllReduce())
    parts = [
        [np.asarray(RNG.randn(k % 3 + 1, 4), "float32") for k in range(count)]
        for _ in range(2)
    ]
    values = [distributed(strategy, [row[k] for row in parts]) for k in range(count)]
    sums = strategy.extended.batch_reduce_to(
        "SUM", [(value, value) for value in values]
    )
    for k, total in enumerate(sums):
        np.testing.assert_array_equal(np.asarray(total), parts[0][k] + parts[1][k])


def count_all_reduces(strategy, fn, *args):
    strategy.run(fn, args=args)
    program = next(iter(strategy.programs.programs_of(fn).values()))
    text = program.jitted.lower(
        [program.variables[i].stored for i in program.written],
        [program.variables[i].stored for i in program.read],
        list(args),
    ).as_text()
    return (
        text.count("stablehlo.all_reduce"),
        text.count("stablehlo.reduce_scatter"),
        text.count("stablehlo.all_gather"),
    )


def test_packs_are_real():
    values = [np.ones(10, "float32") for _ in range(6)]

    def counts(ops, options=None):
        strategy = mirrored(2, ops)

        def fn(*xs):
            return kd.get_replica_context().all_reduce("SUM", list(xs), options)

        return count_all_reduces(strategy, fn, *values)

    assert counts(kd.NcclAllReduce(num_packs=0)) == (6, 0, 0)
    assert counts(kd.NcclAllReduce(num_packs=1)) == (1, 0, 0)
    assert counts(kd.NcclAllReduce(num_packs=2)) == (2, 0, 0)
    assert counts(kd.HierarchicalCopyAllReduce(num_packs=1)) == (0, 1, 1)
    assert counts(kd.ReductionToOneDevice())[0] == 0
    assert counts(
        kd.NcclAllReduce(0), kd.experimental.CommunicationOptions(bytes_per_pack=80)
    ) == (3, 0, 0)


def test_cross_device_ops_of_ones_own():
    class Negated(kd.CrossDeviceOps):
        def reduce_implementation(
            self, reduce_op, per_replica_value, destinations, options
        ):
            return -jax.lax.psum(per_replica_value.local, "replica")

    strategy = mirrored(2, Negated())
    value = strategy.run(lambda: jnp.float32(2))
    assert float(strategy.reduce("SUM", value, axis=None)) == -4.0
    with pytest.raises(
        errors.StructureTypeError, match="(?s)does not say how to reduce.*Fix: override"
    ):
        mirrored(2, kd.CrossDeviceOps()).reduce("SUM", value, axis=None)
    with pytest.raises(errors.StructureTypeError, match="cross_device_ops says how"):
        mirrored(2, "nccl")
    with pytest.raises(
        errors.StructureTypeError,
        match="(?s)Only distributed values and variables.*Fix",
    ):
        kd.NcclAllReduce().reduce("SUM", 3.0, None)
    with pytest.raises(
        errors.ValueStructureError, match="num_packs is the number of buffers"
    ):
        kd.NcclAllReduce(num_packs=-1)


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "ops",
    [kd.NcclAllReduce(), kd.HierarchicalCopyAllReduce(), kd.ReductionToOneDevice()],
    ids=lambda ops: type(ops).__name__,
)
def test_variables_and_mirrored_values_are_reduced_by_their_copies(ops, num_replicas):
    strategy = mirrored(num_replicas, ops)
    with strategy.scope():
        same = keras.Variable(np.arange(3.0))
        own = keras.Variable(0.0, synchronization="on_read", aggregation="mean")
    context = kd.get_replica_context
    strategy.run(lambda: own.assign(context().replica_id_in_sync_group + 1.0))
    total = num_replicas * (num_replicas + 1) / 2
    for value in (same, kd.Mirrored(same.value)):
        result = ops.reduce("SUM", value, None)
        np.testing.assert_allclose(result, np.arange(3.0) * num_replicas)
        assert len(result.values) == num_replicas
        np.testing.assert_allclose(ops.reduce("MEAN", value, None), np.arange(3.0))
    assert float(ops.reduce("SUM", own, None)) == total
    pairs = [(same, same), (own, same)]
    both = ops.batch_reduce(kd.ReduceOp.MEAN, pairs)
    np.testing.assert_allclose(both[0], np.arange(3.0))
    assert float(both[1]) == pytest.approx(total / num_replicas)

    def merged(strategy):
        return strategy.extended.cross_device_ops.reduce("SUM", same, None)

    result = strategy.run(lambda: context().merge_call(merged)).values[0]
    np.testing.assert_allclose(result, np.arange(3.0) * num_replicas)


def test_values_are_reduced_together_as_pairs():
    text = "(?s)list of pairs of a value and destinations.*Fix: .*None"
    for wrong in (3, None, "ab", [3], [(1, 2, 3)], {1: 2}):
        with pytest.raises(errors.StructureTypeError, match=text):
            mirrored(2).extended.batch_reduce_to("SUM", wrong)
        with pytest.raises(errors.StructureTypeError, match=text):
            kd.NcclAllReduce().batch_reduce("SUM", wrong)


def test_broadcast():
    strategy = mirrored(3)
    with strategy.scope():
        variable = keras.Variable(1.0)
    result = strategy.extended.cross_device_ops.broadcast(np.arange(2.0), variable)
    assert [v.tolist() for v in result.values] == [[0.0, 1.0]] * 3


def test_merge_call_sees_all_replicas(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = keras.Variable(1.0)

    def merged(strategy, x, *, factor):
        assert isinstance(x, kd.PerReplica)
        total = strategy.reduce("SUM", x, axis=None)
        mean = strategy.extended.reduce_to("MEAN", x, variable)
        joined = strategy.gather(x.__class__(local=x.local[None]), axis=0)
        strategy.extended.update(
            variable, lambda v, t: v.assign_add(t * factor), args=(total,)
        )
        with pytest.raises(
            errors.ValueStructureError,
            match="cannot be read while the program is traced",
        ):
            x.values  # noqa: B018
        return {"total": total, "joined": joined, "mean": mean, "own": x}

    def fn(x):
        return kd.get_replica_context().merge_call(
            merged, args=(x,), kwargs={"factor": 2.0}
        )

    result = strategy.run(
        fn, args=(distributed(strategy, [np.float32(i) for i in range(n)]),)
    )
    total = n * (n - 1) / 2
    assert {float(v) for v in result["total"].values} == {total}
    assert {float(v) for v in result["mean"].values} == {total / n}
    assert [float(v) for v in result["own"].values] == list(range(n))
    assert float(variable.numpy()) == 1.0 + 2 * total


def test_values_from_a_function(strategy):
    n = strategy.num_replicas_in_sync

    def make(context):
        assert context.num_replicas_in_sync == n
        return {
            "x": np.full(2, context.replica_id_in_sync_group),
            "name": f"replica {context.replica_id_in_sync_group}",
        }

    value = strategy.experimental_distribute_values_from_function(make)
    assert isinstance(value["x"], kd.PerReplica)
    assert [v.tolist() for v in value["x"].values] == [[i, i] for i in range(n)]
    assert value["name"].values == tuple(f"replica {i}" for i in range(n))
    if n > 1:
        with pytest.raises(
            errors.ValueStructureError,
            match="(?s)different structures.*a list of 1 from replica 0, a list of 2",
        ):
            strategy.experimental_distribute_values_from_function(
                lambda c: [1.0] * (c.replica_id_in_sync_group + 1)
            )
        with pytest.raises(
            errors.ValueStructureError,
            match="(?s)a float from replica 0, a dict with the keys",
        ):
            strategy.experimental_distribute_values_from_function(
                lambda c: {"a": 1} if c.replica_id_in_sync_group else 1.0
            )


@pytest.mark.parametrize(
    "others",
    [np.ones(2), np.ones(2, ">f4"), np.ones(2, "float32"), jnp.ones(2)],
    ids=lambda array: f"{type(array).__name__} {array.dtype.str}",
)
def test_components_of_the_dtypes_that_jax_stores_are_one_array(others):
    """As those of a replica that has NumPy's numbers and one that has JAX's."""
    strategy = mirrored(3)
    value = distributed(strategy, [jnp.zeros(2), others, others])
    assert strategy.gather(value, axis=0).tolist() == [0, 0, 1, 1, 1, 1]
    doubled = strategy.run(lambda x: x * 2, args=(value,)).values
    assert [part.tolist() for part in doubled] == [[0, 0], [2, 2], [2, 2]]
    assert {str(part.dtype) for part in doubled} == {"float32"}
    numbers = distributed(strategy, [1, jnp.int32(2), np.int64(3)])
    assert strategy.reduce("SUM", numbers, axis=None) == 6


@pytest.mark.parametrize(
    "component", [np.array(["2020-01-01"], "datetime64[D]"), np.longdouble(1)]
)
def test_what_jax_has_no_dtype_for_is_an_object(component):
    strategy = mirrored(2)
    value = distributed(strategy, [component, component])
    assert all(part is component for part in value.values)
    with pytest.raises(errors.StructureTypeError, match="Only arrays can be gathered"):
        strategy.gather(value, axis=0)
    with pytest.raises(errors.ValueStructureError, match="pass arrays of numbers, of"):
        strategy.run(lambda x: x, args=(value,))


def test_reduce_op():
    assert (
        kd.ReduceOp.from_variable_aggregation(kd.VariableAggregation.SUM)
        is kd.ReduceOp.SUM
    )
    with pytest.raises(
        errors.ValueStructureError, match="Only the aggregations SUM and MEAN"
    ):
        kd.ReduceOp.from_variable_aggregation(kd.VariableAggregation.ONLY_FIRST_REPLICA)


def test_communication_options():
    options = kd.experimental.CommunicationOptions
    with pytest.raises(errors.ValueStructureError, match="number of bytes"):
        options(bytes_per_pack=-1)
    with pytest.raises(errors.ValueStructureError, match="timeout_seconds is a time"):
        options(timeout_seconds=0)
    with pytest.raises(
        errors.StructureTypeError, match="one of CommunicationImplementation"
    ):
        options(implementation="NCCL")
    strategy = mirrored(2)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(2)
    )
    with pytest.raises(errors.ValueStructureError, match="no timeout of its own"):
        strategy.extended.reduce_to("SUM", value, value, options(timeout_seconds=1.0))


def test_options_of_a_strategy_of_several_processes():
    options = kd.experimental.CommunicationOptions(
        timeout_seconds=5.0, bytes_per_pack=64
    )
    strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)

    def step():
        return kd.get_replica_context().all_reduce(
            "SUM", [np.ones(8, "float32"), np.ones(8, "float32")]
        )

    first, second = strategy.run(step)
    assert (
        float(first.values[0].sum() + second.values[0].sum())
        == 16 * strategy.num_replicas_in_sync
    )
    with pytest.raises(errors.DeviceError, match="NCCL is for GPUs"):
        kd.MultiWorkerMirroredStrategy(
            communication_options=kd.experimental.CommunicationOptions(
                implementation=kd.experimental.CommunicationImplementation.NCCL
            )
        )
    with pytest.raises(errors.StructureTypeError, match="found by a ClusterResolver"):
        kd.MultiWorkerMirroredStrategy("localhost")
    with pytest.raises(
        errors.StructureTypeError, match="The options are CommunicationOptions"
    ):
        kd.MultiWorkerMirroredStrategy(communication_options=3)
    cluster = kd.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})
    late = kd.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=0
    )
    with pytest.raises(
        errors.ClusterError, match="JAX has started already, as a process of its own"
    ):
        kd.MultiWorkerMirroredStrategy(late)


def test_run_in_merge_call_is_part_of_the_program(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = keras.Variable(1.0)

    def again(x, *, factor):
        context = kd.get_replica_context()
        assert not kd.in_cross_replica_context()
        variable.assign(context.all_reduce("SUM", x["x"]))
        return {
            "scaled": x["x"] * factor + variable,
            "id": context.replica_id_in_sync_group,
            "name": "replica",
        }

    def merged(strategy, x):
        result = strategy.run(again, args=({"x": x},), kwargs={"factor": 2.0})
        assert (
            isinstance(result["scaled"], kd.PerReplica) and result["name"] == "replica"
        )
        total = strategy.reduce("SUM", result["scaled"], axis=None)
        return strategy.run(
            lambda scaled, total: scaled + total, args=(result["scaled"], total)
        ), result["id"]

    def fn(x):
        return kd.get_replica_context().merge_call(merged, args=(x,))

    scaled, ids = strategy.run(
        fn, args=(distributed(strategy, [np.float32(i) for i in range(n)]),)
    )
    total = n * (n - 1) / 2
    own = [2.0 * i + total for i in range(n)]
    assert [float(v) for v in scaled.values] == [value + sum(own) for value in own]
    assert [int(v) for v in ids.values] == list(range(n)) and float(
        variable.numpy()
    ) == total


def test_refusals_of_run_in_merge_call(strategy):
    outside = distributed(
        strategy, [np.float32(i) for i in range(strategy.num_replicas_in_sync)]
    )
    other = mirrored(3)
    with strategy.scope():
        variable = keras.Variable(1.0)
    for merged, error, text in (
        (
            lambda s: s.run(lambda x: x, args=(outside,)),
            errors.ValueStructureError,
            "value from outside of the program",
        ),
        (
            lambda s: other.run(lambda: 1),
            errors.ContextError,
            "in the scope of the same strategy",
        ),
        (
            lambda s: s.extended.update(variable, lambda v: s.run(lambda: 1)),
            errors.ContextError,
            "inside the program or the scope",
        ),
        (
            lambda s: s.run(lambda: s.run(lambda: 1)),
            errors.ContextError,
            "strategy.run was called inside a replica",
        ),
    ):
        with pytest.raises(error, match=f"(?s){text}.*Fix|Fix.*{text}"):
            strategy.run(
                lambda merged=merged: kd.get_replica_context().merge_call(merged)
            )


def test_merge_call_of_the_default_strategy():
    variable = keras.Variable(1.0)

    def merged(strategy, x, *, factor):
        assert kd.in_cross_replica_context() and kd.get_replica_context() is None
        twice = strategy.run(
            lambda x: kd.get_replica_context().all_reduce("SUM", x) * factor, args=(x,)
        )
        strategy.extended.update(
            variable, lambda v, t: v.assign_add(t[0]), args=(twice,)
        )
        return {
            "twice": twice,
            "reduced": strategy.reduce("SUM", twice, axis=0),
            "to": strategy.extended.reduce_to("MEAN", twice, variable),
            "gathered": strategy.gather(twice, axis=0),
            "local": strategy.experimental_local_results(x),
        }

    x = jnp.asarray([1.0, 2.0])
    result = kd.get_replica_context().merge_call(
        merged, args=(x,), kwargs={"factor": 2}
    )
    assert (
        result["twice"].tolist()
        == result["gathered"].tolist()
        == result["to"].tolist()
        == [2, 4]
    )
    assert float(result["reduced"]) == 6 and result["local"][0] is x
    assert float(variable.numpy()) == 3
    inside = kd.get_strategy().run(
        lambda: kd.get_replica_context().merge_call(
            lambda s, x: s.run(lambda y: y + 1, (x,)), (x,)
        )
    )
    assert inside.tolist() == [2, 3]

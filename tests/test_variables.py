"""What a creation under scope yields, and the read and assign rules of every context."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras.src.backend.common.variables import AutocastScope

import keras_distribute as kd
from keras_distribute import errors
from tests.support import distributed, mirrored

REPLICAS = (1, 2, 3, 8)


@pytest.fixture(params=REPLICAS)
def strategy(request):
    return mirrored(request.param)


def shards(variable):
    """What really stands on each device."""
    return [
        np.asarray(s.data)
        for s in sorted(variable.stored.addressable_shards, key=lambda s: s.device.id)
    ]


def test_layers_optimizers_metrics_and_seeds():
    with mirrored(2).scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
            ]
        )
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.MeanSquaredError()
    kinds = {
        v.path: type(v).__name__
        for v in [*model.variables, *optimizer.variables, *metric.variables]
    }
    by_end = {path.split("/")[-1]: kind for path, kind in kinds.items()}
    assert (
        by_end["kernel"]
        == by_end["bias"]
        == by_end["gamma"]
        == by_end["beta"]
        == "MirroredVariable"
    )
    assert by_end["moving_mean"] == by_end["moving_variance"] == "SyncOnReadVariable"
    assert (
        by_end["seed_generator_state"]
        == by_end["iteration"]
        == by_end["learning_rate"]
        == "MirroredVariable"
    )
    assert by_end["total"] == by_end["count"] == "SyncOnReadVariable"
    accumulators = [
        kind for path, kind in kinds.items() if path.endswith("gradient_accumulator")
    ]
    assert accumulators == ["SyncOnReadVariable"] * 4
    assert (
        kinds[next(p for p in kinds if p.endswith("kernel_momentum"))]
        == "MirroredVariable"
    )
    moving = model.layers[1].moving_mean
    assert (moving.synchronization, moving.aggregation) == ("on_read", "mean")
    assert (metric.variables[0].synchronization, metric.variables[0].aggregation) == (
        "on_read",
        "sum",
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, kd.MirroredVariable),
        ({"trainable": False}, kd.MirroredVariable),
        ({"aggregation": "sum"}, kd.MirroredVariable),
        ({"synchronization": "on_write", "aggregation": "mean"}, kd.MirroredVariable),
        ({"synchronization": "on_read"}, kd.SyncOnReadVariable),
        (
            {"synchronization": "on_read", "aggregation": "only_first_replica"},
            kd.SyncOnReadVariable,
        ),
    ],
)
def test_bare_variables(arguments, kind):
    with mirrored(2).scope():
        variable = keras.Variable(np.ones(3, "float32"), **arguments)
    assert type(variable) is kind
    assert isinstance(variable, keras.Variable)
    assert variable.aggregation == arguments.get("aggregation", "none")
    np.testing.assert_array_equal(shards(variable)[1].reshape(3), np.ones(3))


def test_arguments_by_their_places():
    with mirrored(2).scope():
        of_each = keras.Variable(2.0, None, "int32", None, True, "sum", "on_read", "a")
        common = keras.Variable(2.0, None, "int32", False, True, "mean")
        with pytest.raises(TypeError, match="multiple values for argument 'dtype'"):
            keras.Variable(
                2.0, None, "int32", dtype="float32", synchronization="on_read"
            )
    assert (of_each.name, of_each.aggregation, of_each.dtype) == ("a", "sum", "int32")
    assert [int(v) for v in of_each.values] == [2, 0]
    assert isinstance(common, kd.MirroredVariable)
    assert common.aggregation == "mean"


def test_a_variable_of_a_value_is_not_made_in_run(strategy):
    with pytest.raises(
        errors.VariableScopeError,
        match=r"(?s)run creates a variable.*keras.Variable\(0.0\) in the replica.*Fix",
    ):
        strategy.run(lambda: keras.Variable(0.0).assign_add(1.0))


def test_layer_state_that_is_not_trained():
    class Layer(keras.layers.Layer):
        def build(self, input_shape):
            self.average = self.add_weight(shape=(), trainable=False, name="average")
            self.counter = self.add_weight(
                shape=(), trainable=False, dtype="int32", name="counter"
            )
            self.explicit = self.add_weight(
                shape=(), trainable=False, aggregation="sum", name="explicit"
            )

    with mirrored(2).scope():
        layer = Layer()
        layer.build((1, 1))
    assert type(layer.average) is kd.SyncOnReadVariable
    assert type(layer.counter) is kd.MirroredVariable
    assert type(layer.explicit) is kd.MirroredVariable


def test_no_synchronization_is_refused():
    with (
        mirrored(2).scope(),
        pytest.raises(
            errors.AggregationError,
            match='(?s)synchronization="none" has no meaning.*Fix:',
        ),
    ):
        keras.Variable(1.0, synchronization="none")


def test_outside_a_scope_variables_are_keras_own():
    assert type(keras.Variable(1.0)) is keras.Variable
    strategy = mirrored(2)
    with strategy.scope():
        inside = keras.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(inside)
    assert not strategy.extended.variable_created_in_scope(keras.Variable(1.0))
    assert not mirrored(2).extended.variable_created_in_scope(inside)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_in_a_scope_is_of_the_same_class(copied):
    plain = keras.Variable(2.0, name="plain")
    with mirrored(2).scope():
        mirrored_one = keras.Variable(3.0)
        made = [copied(plain), copied(mirrored_one)]
    assert list(map(type, made)) == [keras.Variable, kd.MirroredVariable]
    assert list(map(float, made)) == [2, 3] and made[0].path == "plain"


def test_a_strategy_and_its_variables_stay_in_their_process():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(3.0)
    assert copy.copy(strategy) is copy.deepcopy(strategy) is strategy
    for each in (strategy, variable, strategy.scope):
        with pytest.raises(TypeError, match="belong to the devices(.|\n)*Fix: make"):
            pickle.dumps(each)


def test_one_device_strategy_places_variables():
    with kd.OneDeviceStrategy("cpu:3").scope():
        variable = keras.Variable(1.0)
    assert variable.stored.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_an_assigned_array_may_be_changed_afterwards(strategy, synchronization):
    # JAX takes the memory of arrays that begin at a multiple of 64 bytes.
    memory = np.zeros(64 * 16 * 4 + 64, "uint8")
    begin = -memory.ctypes.data % 64
    array = memory[begin : begin + 64 * 16 * 4].view("float32").reshape(64, 16)
    array[:] = 1
    with strategy.scope():
        given = keras.Variable(
            array, synchronization=synchronization, aggregation="mean"
        )
        assigned = keras.Variable(
            np.zeros((64, 16)), synchronization=synchronization, aggregation="mean"
        )
    assigned.assign(array)
    array[:] = 7
    for variable in (given, assigned):
        assert np.all(variable.numpy() == 1)
        assert all(np.all(shard == 1) for shard in shards(variable))


def test_random_initial_values_are_the_same_everywhere():
    with mirrored(4).scope():
        layer = keras.layers.Dense(5)
        layer.build((1, 7))
    for shard in shards(layer.kernel)[1:]:
        np.testing.assert_array_equal(shard, shards(layer.kernel)[0])
    assert np.std(shards(layer.kernel)[0]) > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["on_write", "on_read"])
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_assigned_across_replicas_reads_back_exactly(
    strategy, kind, aggregation, dtype
):
    with strategy.scope():
        variable = keras.Variable(
            [1, 2], dtype=dtype, synchronization=kind, aggregation=aggregation
        )
    for operation, expected in [
        (lambda: variable.assign([7, 5]), [7, 5]),
        (lambda: variable.assign_add([1, 1]), [8, 6]),
        (lambda: variable.assign_sub([2, 0]), [6, 6]),
    ]:
        operation()
        assert variable.numpy().tolist() == expected
        assert variable.value.dtype == dtype
        values = [np.asarray(v, "float64") for v in variable.values]
        assert len(values) == strategy.num_replicas_in_sync
        total = (
            np.sum(values, 0)
            if kind == "on_read" and aggregation == "sum"
            else values[-1]
        )
        assert total.tolist() == expected


def expected_after_run(kind, aggregation, operation, start, numbers):
    """Each replica applies `operation` with its own number: what the components are
    then, and what is read.
    """
    change = {
        "sum": sum(numbers),
        "mean": sum(numbers) / len(numbers),
        "only_first_replica": numbers[0],
    }[aggregation]
    apply = {
        "assign": lambda a, b: b,
        "assign_add": lambda a, b: a + b,
        "assign_sub": lambda a, b: a - b,
    }[operation]
    if kind == "on_write":
        return [apply(start, change)] * len(numbers), apply(start, change)
    first = [start] + [0.0 if aggregation == "sum" else start] * (len(numbers) - 1)
    components = [apply(a, b) for a, b in zip(first, numbers, strict=True)]
    read = {
        "sum": sum,
        "mean": lambda c: sum(c) / len(c),
        "only_first_replica": lambda c: c[0],
    }[aggregation]
    return components, read(components)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "aggregation", "operation"),
    list(
        itertools.product(
            ["on_write", "on_read"],
            ["sum", "mean", "only_first_replica"],
            ["assign", "assign_add", "assign_sub"],
        )
    ),
)
def test_assigned_in_a_replica(strategy, kind, aggregation, operation):
    with strategy.scope():
        variable = keras.Variable(4.0, synchronization=kind, aggregation=aggregation)

    def fn():
        getattr(variable, operation)(
            kd.get_replica_context().replica_id_in_sync_group + 1.0
        )
        return variable.value

    inside = strategy.run(fn)
    numbers = [i + 1.0 for i in range(strategy.num_replicas_in_sync)]
    components, read = expected_after_run(kind, aggregation, operation, 4.0, numbers)
    np.testing.assert_allclose(
        [float(v) for v in variable.values], components, rtol=1e-6
    )
    np.testing.assert_allclose([float(v) for v in inside.values], components, rtol=1e-6)
    np.testing.assert_allclose(float(variable.numpy()), read, rtol=1e-6)


@pytest.mark.parametrize("kind", ["on_write", "on_read"])
@pytest.mark.parametrize(
    ("dtype", "first", "step", "mean"),
    [
        ("float16", 40000, 64, 40096),
        ("bfloat16", 1, 1 / 128, 1.015625),
        ("int32", 2**30, 2**20, 2**30 + 3 * 2**19),
        ("uint8", 100, 20, 130),
    ],
)
def test_the_sum_behind_a_mean_is_wide(kind, dtype, first, step, mean):
    strategy = mirrored(4)
    with strategy.scope():
        variable = keras.Variable(
            0, dtype=dtype, synchronization=kind, aggregation="mean"
        )

    def fn():
        replica = kd.get_replica_context()
        own = (first + step * replica.replica_id_in_sync_group).astype(dtype)
        variable.assign(own)
        return own, replica.merge_call(lambda _: variable.value)

    own, merged = strategy.run(fn)
    assert float(variable.numpy()) == mean
    assert {float(value) for value in merged.values} == {mean}
    assert strategy.reduce("MEAN", own, axis=None).astype(dtype) == mean


@pytest.mark.parametrize("kind", ["on_write", "on_read"])
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_read_and_assigned_in_merge_call_and_update(strategy, kind, aggregation):
    with strategy.scope():
        variable = keras.Variable(4.0, synchronization=kind, aggregation=aggregation)

    def merged(strategy):
        across = variable.value
        variable.assign(across * 2)
        strategy.extended.update(
            variable, lambda v: v.assign_add(1.0 if kind == "on_write" else 0.0)
        )
        return across, variable.value

    before, after = strategy.run(lambda: kd.get_replica_context().merge_call(merged))
    assert {float(v) for v in strategy.experimental_local_results(before)} == {4.0}
    expected = 9.0 if kind == "on_write" else 8.0
    assert {float(v) for v in strategy.experimental_local_results(after)} == {expected}
    assert float(variable.numpy()) == expected


def test_without_aggregation_equal_values_may_be_assigned(strategy):
    with strategy.scope():
        variable = keras.Variable(1.0)

    def fn(x):
        context = kd.get_replica_context()
        variable.assign_add(x)
        variable.assign_add(
            context.all_reduce("SUM", 1.0 * context.replica_id_in_sync_group)
        )

    strategy.run(fn, args=(np.float32(2.0),))
    n = strategy.num_replicas_in_sync
    assert [float(s) for s in shards(variable)] == [3.0 + n * (n - 1) / 2] * n


class Scale(keras.layers.Layer):
    """A weight that is divided by what the layer keeps of it."""

    def __init__(self, **kwargs):
        super().__init__()
        self.weight = self.add_weight((), "ones", name="weight")
        self.norm = self.add_weight((), "ones", name="norm", trainable=False, **kwargs)

    def call(self, x):
        self.norm.assign(2 * self.norm + self.weight)
        self.weight.assign(self.weight / self.norm)
        return x


def test_weights_that_are_assigned_what_follows_from_state():
    strategy = mirrored(2)
    with strategy.scope():
        layer, mended = Scale(), Scale(aggregation="only_first_replica")
    with pytest.raises(
        errors.AggregationError,
        match=r"(?s)scale/weight.*Received: .* computed from scale/norm, of which each"
        r".*Fix: .*add_weight\(.*aggregation=\"only_first_replica\"\)",
    ):
        strategy.run(layer, args=(np.ones(2),))
    strategy.run(mended, args=(np.ones(2),))
    assert float(mended.weight) == pytest.approx(1 / 3)


def test_without_aggregation_differing_values_are_an_error():
    strategy = mirrored(2)
    with strategy.scope():
        a, b, c = (keras.Variable(1.0, name=name) for name in "abc")

    def fn():
        i = kd.get_replica_context().replica_id_in_sync_group
        a.assign(1.0 * i)
        b.assign_sub(i / 2)
        c.assign(5.0)

    with pytest.raises(
        errors.AggregationError,
        match=r"(?s)different values to 2 mirrored.*a \(\), b \(\)",
    ) as caught:
        strategy.run(fn)
    assert (
        'Fix: combine the value first, kd.get_replica_context().all_reduce("SUM", value)'
        in str(caught.value)
    )
    assert [float(v.numpy()) for v in (a, b, c)] == [1.0, 1.0, 1.0], (
        "nothing may be assigned by a program refused"
    )


SYNCHRONIZATIONS = ["on_read", kd.VariableSynchronization.ON_READ]
AGGREGATIONS = ["sum", kd.VariableAggregation.SUM]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=["text", "member"])
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS, ids=["text", "member"])
@pytest.mark.parametrize("under", [kd.get_strategy, lambda: mirrored(2)])
def test_variables_that_are_read_together_are_not_trainable(
    under, synchronization, aggregation
):
    how = {"synchronization": synchronization, "aggregation": aggregation}
    with under().scope():
        seen = keras.Variable(1.0, **how)
        asked = keras.Variable(1.0, trainable=True, **how)
        by_place = keras.Variable(np.ones(2), (2,), "float32", True, **how)
        other = keras.Variable(1.0, synchronization="on_write")
    trainable = [v.trainable for v in (seen, asked, by_place, other)]
    assert trainable == [False, True, True, True]
    assert (seen.synchronization, seen.aggregation) == ("on_read", "sum")
    assert "aggregation" not in repr(seen) and float(seen.numpy()) == 1.0


def test_members_of_the_enums_are_the_strings_of_keras():
    for member in (*kd.VariableSynchronization, *kd.VariableAggregation):
        assert member == member.name.lower() == str(member)
        assert {member: 1}[member.name.lower()] == 1
    assert kd.VariableAggregation("sum") is kd.VariableAggregation.SUM
    with mirrored(2).scope():
        mean = keras.Variable(1.0, aggregation=kd.VariableAggregation.MEAN)
    strategy = mean.distribute_strategy

    def fn():
        mean.assign(kd.get_replica_context().replica_id_in_sync_group + 1.0)

    strategy.run(fn)
    assert float(mean.numpy()) == 1.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("number", [0, 3, 0.5, True])
@pytest.mark.parametrize("synchronization", ["on_read", "on_write"])
def test_an_assigned_number(dtype, number, synchronization):
    own = keras.Variable(1, dtype=dtype)
    with mirrored(4).scope():
        variable = keras.Variable(
            1, dtype=dtype, aggregation="sum", synchronization=synchronization
        )
    wanted, given = own.assign(number), variable.assign(number)
    assert isinstance(given, jax.Array)
    assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
    assert given == wanted and variable.value == own.value
    assert not variable.value.weak_type
    with keras.StatelessScope() as scope:
        variable.assign(number)
    assert scope.get_current_value(variable) == own.value


NEAR = 0.003906640625  # In bfloat16 it is half of the last bit of 1, which is lost.
CHANGES = [
    ([1, 2, 0.1], "float32", 1.0),
    ([1, 2, 0.1], "float32", np.full((1,), 0.1)),
    (1, "bfloat16", NEAR),
    (1, "bfloat16", np.float32(NEAR)),
    ([1, -1], "int32", 0.5),
    ([1, -1], "int32", True),
    ([2, 250], "uint8", 3),
    ([2, 250], "uint8", np.array([300, 4.5])),
]


@pytest.mark.parametrize("operation", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("where", ["eager", "run", "stateless", "autocast"])
@pytest.mark.parametrize("kind", ["on_write", "on_read"])
def test_changes_are_added_as_in_keras(kind, where, operation):
    """Of another shape, which is broadcast, and of another dtype, in which they are
    added before the sum is cast.
    """
    how = {
        "synchronization": kind,
        "aggregation": "mean" if kind == "on_read" else None,
    }

    def made(how):
        return [
            keras.Variable(value, dtype=dtype, **how) for value, dtype, _ in CHANGES
        ]

    def change(variables):
        for variable, (_, _, by) in zip(variables, CHANGES, strict=True):
            getattr(variable, operation)(by)

    def changed(variables, change):
        if where in ("eager", "run"):
            change(variables)
            return [v.value for v in variables]
        cast = AutocastScope("float16" if where == "autocast" else None)
        with keras.StatelessScope() as scope, cast:
            change(variables)
        return [scope.get_current_value(v) for v in variables]

    def in_run(variables):
        strategy.run(lambda: change(variables))

    strategy = mirrored(2)
    expected = changed(made({}), change)
    with strategy.scope():
        ours = changed(made(how), in_run if where == "run" else change)
    for own, value in zip(expected, ours, strict=True):
        assert own.dtype == value.dtype
        np.testing.assert_array_equal(value, own)


def test_changes_do_not_make_a_variable_larger():
    with mirrored(2).scope():
        variable = keras.Variable([1.0, 2.0])
    for change in (np.ones(3), np.ones((1, 2))):
        with pytest.raises(errors.ValueStructureError, match=r"has the shape \(2,\)"):
            variable.assign_add(change)


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_changes_of_replicas_are_aggregated_before_they_are_cast(aggregation):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1, 2], dtype="int32", aggregation=aggregation)

    def fn():
        replica = kd.get_replica_context().replica_id_in_sync_group
        variable.assign_add(0.5 + 2 * replica)

    strategy.run(fn)
    change = {"sum": 3, "mean": 1, "only_first_replica": 0}[aggregation]
    assert variable.numpy().tolist() == [1 + change, 2 + change]


@pytest.mark.parametrize("devices", [(0, 1), (0, 1, 2, 4)])
def test_components_of_another_strategys_replicas_are_refused(devices):
    with mirrored(4).scope():
        variable = keras.Variable(3.0, synchronization="on_read", aggregation="sum")
    other = kd.MirroredStrategy([f"cpu:{i}" for i in devices])
    value = distributed(other, np.ones(4, "float32"))
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)of other replicas was assigned.*cpu:2, cpu:3\].*Fix: make the value",
    ):
        variable.assign(value)
    assert float(variable) == 3
    variable.assign(distributed(mirrored(4), np.arange(4, dtype="float32")))
    assert float(variable) == 6


def test_components_without_aggregation():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(1.0, synchronization="on_read")
    strategy.run(
        lambda: variable.assign(1.0 * kd.get_replica_context().replica_id_in_sync_group)
    )
    assert [float(v) for v in variable.values] == [0.0, 1.0]
    with pytest.raises(
        errors.AggregationError,
        match="(?s)no aggregation, so they cannot be read.*Fix: create it with",
    ):
        variable.numpy()
    assert "aggregation=none" in repr(variable)


def test_arithmetic_conversion_and_repr(strategy):
    with strategy.scope():
        variable = keras.Variable(
            [1.0, 2.0], synchronization="on_read", aggregation="sum"
        )
        scalar = keras.Variable(3.0)
    assert (variable * 2 + 1).tolist() == [3.0, 5.0]
    assert (1 - variable)[0] == 0.0
    assert float(scalar) == 3.0
    assert int(scalar) == 3
    assert np.asarray(variable).tolist() == [1.0, 2.0]
    assert jnp.sum(variable.value) == 3.0
    assert keras.ops.matmul(variable, [1.0, 1.0]) == 3.0
    n = strategy.num_replicas_in_sync
    assert (
        repr(scalar)
        == f"<MirroredVariable path={scalar.path}, shape=(), dtype=float32, num_replicas={n}, value=3.0>"
    )
    assert "SyncOnReadVariable" in repr(variable)
    assert variable.distribute_strategy is strategy


def test_bad_assignments():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)must match.*shape \(2,\).*shape \(3,\).*Fix",
    ):
        variable.assign([1.0, 2.0, 3.0])
    differing = strategy.run(
        lambda: jnp.ones(2) * kd.get_replica_context().replica_id_in_sync_group
    )
    with pytest.raises(
        errors.StructureTypeError,
        match="(?s)differs per replica cannot be assigned.*Fix: assign it inside",
    ):
        variable.assign(differing)
    variable.assign(strategy.extended.reduce_to("SUM", differing, variable))
    assert variable.numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["mirrored", "sync on read"])
@pytest.mark.parametrize("operation", ["assign", "assign_add"])
@pytest.mark.parametrize("is_number", [False, True])
def test_a_variable_is_not_assigned_in_a_trace(kind, operation, is_number):
    with mirrored(2).scope():
        variable = keras.Variable(1.0)
        if kind == "sync on read":
            variable = keras.metrics.Sum().variables[0]
    before = float(variable)

    def function(x):
        getattr(variable, operation)(2.0 if is_number else x)

    with pytest.raises(errors.VariableScopeError, match="function that JAX traces"):
        jax.jit(function)(2.0)
    assert float(variable) == before


def test_a_layer_is_made_in_a_trace():
    @jax.jit
    def step(x):
        with keras.StatelessScope():
            x = keras.layers.BatchNormalization()(x, training=True)
            return keras.layers.Dropout(0.5, seed=1)(x, training=True)

    x = jnp.arange(8.0).reshape(4, 2)
    plain = step(x)
    jax.clear_caches()
    with mirrored(2).scope():
        np.testing.assert_array_equal(step(x), plain)


def test_every_copy_changes_and_values_survive_later_programs():
    strategy = mirrored(4)
    with strategy.scope():
        variable = keras.Variable(np.arange(4.0, dtype="float32"))
    held, components = variable.value, variable.values
    strategy.run(lambda: variable.assign_add(jnp.ones(4)))
    assert held.tolist() == [0, 1, 2, 3], (
        "an array that the user holds is not given away"
    )
    assert components[3].tolist() == [0, 1, 2, 3]
    for shard in shards(variable):
        assert shard.tolist() == [1, 2, 3, 4]


def test_autocast():
    with mirrored(2).scope():
        layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
        layer.build((1, 2))
    assert layer(np.ones((1, 2))).dtype == "bfloat16"
    assert layer.kernel.dtype == "float32"


def test_an_optimizer_has_its_slots_in_the_scope_of_its_weights():
    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable(np.ones((4, 4)), name="weight")
    optimizer = keras.optimizers.Adam()
    with pytest.raises(kd.errors.VariableScopeError, match="'weight' belongs") as found:
        optimizer.build([weight])
    assert "with strategy.scope(): optimizer = ...;" in str(found.value)
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        optimizer.build([weight])
    assert len(optimizer.variables) == 4


def test_variables_without_names_have_keras_names():
    """Layouts and optimizers go by names."""

    def paths() -> list[str]:
        keras.backend.clear_session()
        layer = keras.layers.Layer(name="own")
        layer.add_weight(shape=(2,))
        layer.add_weight(shape=(2,), initializer="zeros", name="known")
        own = keras.Variable(1.0), keras.Variable(2.0), keras.Variable(0.0, name="n")
        return [v.path for v in (*layer.weights, *own)]

    expected = paths()
    with mirrored(2).scope():
        assert paths() == expected
    assert expected[0] == "own/variable"


@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_an_array_of_one_device_is_added(kind):
    strategy = mirrored(4)
    with strategy.scope():
        variable = keras.Variable(
            np.zeros(2, "float32"), synchronization=kind, aggregation="sum"
        )
        metric = keras.metrics.MeanSquaredError()
    for device in (jax.devices()[1], jax.devices()[6]):
        ones = jax.device_put(np.ones(2, "float32"), device)
        variable.assign_add(3 * ones)
        variable.assign_sub(ones)
        metric.update_state(ones, 3 * ones)
    np.testing.assert_array_equal(variable.numpy(), [4, 4])
    assert variable.value.sharding.device_set == set(strategy.replica_mesh.devices)
    assert float(metric.result()) == 4


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_numpy_copies(strategy, kind):
    with strategy.scope():
        variable = keras.Variable(
            np.ones(2, "float32"), synchronization=kind, aggregation="mean"
        )
    copied = np.array(variable)
    copied += 1
    np.testing.assert_array_equal(copied, [2, 2])
    np.testing.assert_array_equal(np.asarray(variable, "float64"), [1, 1])
    assert np.array(variable, "int32", copy=True).dtype == np.int32

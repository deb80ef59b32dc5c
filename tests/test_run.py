"""`Strategy.run`: arguments, results, caching, lazily made variables, and refusals."""

import collections
import functools
import gc
import operator
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import errors
from tests.support import distributed, mirrored


@pytest.fixture(params=[1, 2, 8])
def strategy(request):
    return mirrored(request.param)


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_results_keep_their_structure(strategy):
    marker = object()
    with strategy.scope():
        variable = keras.Variable(1.0)

    def fn(x, *, scale):
        i = kd.get_replica_context().replica_id_in_sync_group
        return {
            "a": [x * scale, None],
            "b": Pair(i, "text"),
            "c": (marker, 5, variable),
            "d": np.ones(2),
        }

    result = strategy.run(
        fn,
        args=(distributed(strategy, lambda i: np.full(3, i, "float32")),),
        kwargs={"scale": 2},
    )
    n = strategy.num_replicas_in_sync
    assert [v.tolist() for v in result["a"][0].values] == [
        [2.0 * i] * 3 for i in range(n)
    ]
    assert result["a"][1] is None
    assert isinstance(result["b"], Pair)
    assert [int(v) for v in result["b"].left.values] == list(range(n))
    assert result["b"].right == "text"
    assert result["c"][0] is marker
    assert result["c"][1] == 5
    assert result["c"][2] is variable
    assert isinstance(result["d"], kd.PerReplica)
    local = strategy.experimental_local_results(result)
    assert len(local) == n
    assert local[-1]["a"][0].tolist() == [2.0 * (n - 1)] * 3
    assert local[-1]["b"].right == "text"


def test_arguments(strategy):
    with strategy.scope():
        variable = keras.Variable(2.0)
    mirrored_value = strategy.extended.reduce_to(
        "MEAN", distributed(strategy, lambda i: np.float32(3)), None
    )

    def fn(per_replica, array, number, nested, v, same, flag):
        assert isinstance(number, int)
        assert flag is True
        assert v is variable
        return per_replica + array + number + nested["x"][0] + v.value + same

    result = strategy.run(
        fn,
        args=(
            distributed(strategy, lambda i: np.float32(i)),
            np.float32(10),
            100,
            {"x": [jnp.float32(1000)]},
        ),
        kwargs={"v": variable, "same": mirrored_value, "flag": True},
    )
    assert [float(v) for v in result.values] == [
        1115.0 + i for i in range(strategy.num_replicas_in_sync)
    ]


def test_the_function_is_compiled_once(strategy, compilations):
    with strategy.scope():
        variable = keras.Variable(0.0)

    def fn(x, power):
        variable.assign_add(jnp.sum(x) ** power)
        return variable.value

    x = np.ones(4, "float32")
    strategy.run(fn, args=(x, 1))
    before = len(compilations)
    for _ in range(5):
        strategy.run(fn, args=(x, 1))
    assert len(compilations) == before
    strategy.run(fn, args=(x, 2))
    strategy.run(fn, args=(x[:3], 1))
    assert len(compilations) == before + 2
    strategy.run(fn, args=(x, 2))
    assert len(compilations) == before + 2
    assert float(variable.numpy()) == 4.0 * 6 + 16 + 3 + 16


def test_a_setting_of_jax_that_changes_is_followed(strategy, compilations):
    def fn(x):
        return jax.config.jax_default_matmul_precision, x @ x

    def precision():
        return strategy.run(fn, args=(np.ones((2, 2), "float32"),))[0]

    assert precision() is None
    with jax.default_matmul_precision("highest"):
        assert precision() == "highest"
    before = len(compilations)
    assert precision() is None
    assert len(compilations) == before


def test_python_values_of_equal_hash_are_told_apart(strategy):
    def fn(x):
        return type(x).__name__

    assert [strategy.run(fn, args=(x,)) for x in (True, 1, 1.0)] == [
        "bool",
        "int",
        "float",
    ]


def test_a_python_value_that_is_nan_is_compiled_once(strategy, compilations):
    def fn(x, value):
        return x + value

    one = np.float32(1)
    strategy.run(fn, args=(one, float("nan")))
    before = len(compilations)
    strategy.run(fn, args=(one, -float("nan")))
    strategy.run(fn, args=(one, complex("nanj")))
    strategy.run(fn, args=(one, complex("nanj")))
    assert len(compilations) == before + 1
    found = [
        float(strategy.run(lambda x, zero: x / zero, args=(one, zero)).values[0])
        for zero in (0.0, -0.0)
    ]
    assert found == [np.inf, -np.inf]


def test_models_and_optimizers_built_inside(strategy, compilations):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam()
        metric = keras.metrics.Mean()

    def step(x):
        def loss_fn():
            loss = keras.ops.mean(model(x, training=True) ** 2)
            metric.update_state(loss)
            return loss

        if not model.built:
            model(x)
        loss, grads = kd.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    x = np.random.RandomState(0).randn(4, 5).astype("float32")
    losses = [
        float(strategy.reduce("MEAN", strategy.run(step, args=(x,)), axis=None))
        for _ in range(4)
    ]
    assert losses[-1] < losses[0]
    assert {type(v) for v in model.trainable_variables} == {kd.MirroredVariable}
    assert all(type(v) is not keras.Variable for v in optimizer.variables)
    assert int(optimizer.iterations.numpy()) == 4
    assert float(metric.variables[1].numpy()) == 4.0 * strategy.num_replicas_in_sync
    before = len(compilations)
    strategy.run(step, args=(x,))
    assert len(compilations) == before


def test_programs_are_forgotten_with_their_function():
    strategy = mirrored(2)

    def make():
        large = np.zeros(1000)
        return (lambda x: x + 1), large

    fn, _ = make()
    alive = weakref.ref(fn)
    strategy.run(fn, args=(1,))
    strategy.run(fn, args=(np.ones(2),))
    del fn
    gc.collect()
    assert alive() is None


def test_an_object_whose_method_returns_it_is_forgotten():
    class Adder:
        def added(self, x):
            return self, x + 1

    strategy, adder = mirrored(2), Adder()
    for _ in range(2):
        found, value = strategy.run(adder.added, args=(np.float32(1),))
        assert found is adder and float(value.values[1]) == 2
    alive = weakref.ref(adder)
    del adder, found
    gc.collect()
    assert alive() is None


def test_methods_partials_and_callable_objects():
    strategy = mirrored(2)

    class Doubler:
        def twice(self, x):
            return 2 * x

        def thrice(self, x):
            return 3 * x

        def __call__(self, x):
            return 5 * x

    doubler, one = Doubler(), np.float32(1)
    fns = [
        doubler.twice,
        doubler.thrice,
        doubler,
        functools.partial(doubler.twice, one),
    ]
    args = [(one,), (one,), (one,), ()]
    for _ in range(2):
        assert [
            float(strategy.run(f, args=a).values[1])
            for f, a in zip(fns, args, strict=True)
        ] == [2, 3, 5, 2]


def test_functions_that_run_later_are_refused(strategy):
    def generator(x):
        yield x

    async def coroutine(x):
        return x

    async def asynchronous_generator(x):
        yield x

    for fn in (generator, coroutine, asynchronous_generator):
        with pytest.raises(
            errors.StructureTypeError,
            match=f"(?s)runs none of it.*{fn.__name__}.*Fix: a function that returns",
        ):
            strategy.run(fn, args=(np.float32(1),))


def test_functions_in_c_are_told_apart(compilations):
    strategy, pair = mirrored(2), np.array([-2, 3], "float32")
    after = []
    for _ in range(2):
        for function, expected in ((operator.add, [-4, 6]), (operator.mul, [4, 9])):
            value = strategy.run(function, args=(pair, pair))
            assert value.values[1].tolist() == expected
        for function, expected in ((abs, [2, 3]), (sum, 1)):
            assert strategy.run(function, args=(pair,)).values[1].tolist() == expected
        after.append(len(compilations))
    assert after[0] == after[1]


def test_a_method_among_the_arguments_is_compiled_once(compilations):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def times(self, x):
            return self.factor * x

        def plus(self, x):
            return self.factor + x

    def step(fn, x):
        return fn(x)

    strategy, one = mirrored(2), np.float32(1)
    scales, after = [Scale(2), Scale(3)], []
    for _ in range(2):
        found = [
            float(strategy.run(step, args=(fn, one)).values[1])
            for scale in scales
            for fn in (scale.times, scale.plus)
        ]
        assert found == [2, 3, 3, 4]
        after.append(len(compilations))
    assert after[0] == after[1]


def test_a_new_function_in_each_call_is_warned_about():
    strategy = mirrored(2)
    with pytest.warns(
        UserWarning,
        match="has compiled .* 8 times, since each call passed a new function object",
    ):
        for _ in range(8):
            strategy.run(lambda: 1)


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def times(self, x):
        return self.factor * x


def test_a_method_of_an_object_without_weak_references_is_compiled_once(compilations):
    strategy, one = mirrored(2), np.float32(1)
    slots, after = [Slots(2), Slots(3)], []
    for _ in range(2):
        found = [strategy.run(each.times, args=(one,)).values[1] for each in slots]
        assert list(map(float, found)) == [2, 3]
        after.append(len(compilations))
    assert after[0] == after[1]


KEPT = Slots(2)
MADE_ANEW = {
    "a partial": lambda: functools.partial(Slots.times, KEPT),
    "a partial of a method": lambda: functools.partial(KEPT.times),
    "a partial of what is no function of Python": lambda: functools.partial(pow, 2),
    "a method": lambda: Slots(2).times,
}


@pytest.mark.parametrize("name", MADE_ANEW)
def test_partials_and_methods_that_are_made_in_each_call_are_warned_about(name):
    strategy = mirrored(1)
    with pytest.warns(UserWarning, match="8 times, since each call passed a new"):
        for _ in range(8):
            strategy.run(MADE_ANEW[name](), args=(np.float32(1),))


def test_methods_of_many_objects_are_not_warned_about(recwarn):
    class Doubler:
        def twice(self, x):
            return 2 * x

    strategy = mirrored(1)
    for each in [Doubler() for _ in range(9)]:
        strategy.run(each.twice, args=(jnp.ones(()),))
    assert not [w for w in recwarn if "has compiled" in str(w.message)]


def test_random_layers_differ_per_replica_and_follow_the_seed():
    def masks(seed, n=4):
        keras.utils.set_random_seed(seed)
        strategy = mirrored(n)
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=seed)
        results = [
            strategy.run(lambda: layer(jnp.ones(64), training=True)) for _ in range(2)
        ]
        return [np.asarray(v) for result in results for v in result.values]

    first, again, other = masks(1), masks(1), masks(2)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for i, a in enumerate(first):
        assert not any(np.array_equal(a, b) for b in first[i + 1 :])
    assert not np.array_equal(first[0], other[0])
    np.testing.assert_array_equal(
        masks(1, n=1)[0],
        np.asarray(keras.layers.Dropout(0.5, seed=1)(jnp.ones(64), training=True)),
    )


def test_xla_options():
    strategy = mirrored(2)
    options = kd.RunOptions(
        experimental_xla_options={"xla_cpu_enable_fast_min_max": True}
    )
    assert [
        float(v)
        for v in strategy.run(
            lambda x: x + 1, args=(np.float32(1),), options=options
        ).values
    ] == [2, 2]
    with pytest.raises(errors.ValueStructureError, match="not padded to buckets"):
        kd.RunOptions(experimental_bucketizing_dynamic_shape=True)


def test_passes_that_a_user_disables_are_disabled_besides_those_of_the_strategy(
    monkeypatch,
):
    passes = []
    jit = jax.jit

    def noting(*args, **options):
        passes.append((options.get("compiler_options") or {}).get(option))
        return jit(*args, **options)

    option = "xla_disable_hlo_passes"
    strategy = mirrored(2, deterministic=True)
    monkeypatch.setattr(jax, "jit", noting)
    strategy.run(lambda: 1.0)
    options = kd.RunOptions(experimental_xla_options={option: "dce"})
    strategy.run(lambda: 2.0, options=options)
    own, both = filter(None, passes)
    assert "while-loop-invariant-code-motion" in own
    assert both == f"{own},dce"


def test_variables_of_others_are_refused():
    strategy, other = mirrored(2), mirrored(2)
    with other.scope():
        foreign = keras.Variable(1.0, name="foreign")
    plain = keras.Variable(1.0, name="plain")
    with pytest.raises(
        errors.VariableScopeError,
        match=r"(?s)'foreign' lives on another strategy.*Fix: build the model",
    ):
        strategy.run(lambda: foreign.value + 1)
    with pytest.raises(
        errors.VariableScopeError,
        match=r"(?s)1 variable\(s\) .*plain \(\).*Fix: create the model",
    ):
        strategy.run(lambda: plain.assign(2.0))
    assert float(plain.numpy()) == 1.0
    assert [float(v) for v in strategy.run(lambda: plain.value + 1).values] == [
        2.0,
        2.0,
    ]


def test_refusals(strategy):
    with strategy.scope():
        variable = keras.Variable(2.0)
    unlike = distributed(strategy, lambda i: np.zeros((1,) * (i + 1), "float32"))
    if strategy.num_replicas_in_sync > 1:
        text = r"(?s)differ in the sizes of their dimensions only.*float32\[1\], float32\[1, 1\].*Fix"
        with pytest.raises(errors.ValueStructureError, match=text):
            strategy.run(lambda x: x, args=(unlike,))
        with pytest.raises(
            errors.ValueStructureError, match="(?s)was passed to a strategy of 3"
        ):
            mirrored(3).run(
                lambda x: x, args=(distributed(strategy, lambda i: np.float32(1)),)
            )
    with pytest.raises(errors.StructureTypeError, match="runs a function"):
        strategy.run(5)
    with pytest.raises(errors.StructureTypeError, match="come as a tuple"):
        strategy.run(lambda x: x, args=np.ones(3))
    for array in (np.array(["text"]), np.array([object()]), np.datetime64("2026-01")):
        with pytest.raises(errors.StructureTypeError, match="computes with numbers"):
            strategy.run(lambda x: x, args=(array,))
    with pytest.raises(errors.ContextError, match="inside another traced function"):
        jax.jit(lambda x: strategy.run(lambda y: y, args=(x,)))(1.0)
    # Without traced arguments it would run once, and never again.
    for call in (
        lambda x: x + strategy.run(lambda: jnp.ones(())).values[0],
        lambda x: strategy.extended.update(variable, lambda v: v.assign(x)),
    ):
        for transformed in (jax.jit(call), jax.grad(call)):
            with pytest.raises(errors.ContextError, match="another traced function"):
                transformed(1.0)
    with (
        keras.StatelessScope([(variable, jnp.float32(7))]),
        pytest.raises(errors.ContextError, match="(?s)no values from a.*Fix"),
    ):
        strategy.run(lambda: variable.value)
    assert float(variable) == 2


def test_integers_that_do_not_fit_and_other_byte_orders(strategy):
    """JAX cuts the former off, and does not take the latter."""
    for number in (np.int64(2**40), np.array([1, -(2**31) - 1])):
        with pytest.raises(errors.ValueStructureError, match="32-bit integers"):
            strategy.run(lambda x: x, args=(number,))
    kept = strategy.run(lambda x: x, args=([np.array([7]), np.array([1.5], ">f4")],))
    assert [float(each.values[0][0]) for each in kept] == [7, 1.5]


def test_user_errors_come_out_as_they_are(strategy):
    def fn():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        strategy.run(fn)


def test_per_replica_of_several_replicas_is_no_array():
    strategy = mirrored(2)
    value = strategy.run(lambda: jnp.float32(1))
    for convert in (float, int, np.asarray, jnp.asarray):
        with pytest.raises(
            errors.StructureTypeError,
            match="(?s)differs per replica is not one array.*Fix: strategy.reduce",
        ):
            convert(value)
    assert float(mirrored(1).run(lambda: jnp.float32(1))) == 1.0
    assert repr(value).startswith("PerReplica(\n  0: Array(1., dtype=float32),\n  1:")


def test_a_loop_copies_no_variable(monkeypatch):
    """Unless somebody holds its array, which the next call would delete."""
    strategy = mirrored(2)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(3, "float32"), trainable=False) for _ in range(5)
        ]
    copies = []
    copy = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda array: copies.append(1) or copy(array))

    def step():
        for variable in variables:
            variable.assign_add(np.ones(3, "float32"))

    for _ in range(4):
        strategy.run(step)
    copies.clear()
    for _ in range(4):
        strategy.run(step)
        assert float(variables[0].numpy()[0]) > 0
    assert copies == []
    held = variables[1].value
    strategy.run(step)
    assert copies == [1]
    np.testing.assert_array_equal(held, 8 * np.ones(3))
    np.testing.assert_array_equal(variables[1].numpy(), 9 * np.ones(3))


def unchanged_later(take):
    """Whether what `take` gives to a function of `run` is what an array was then."""
    strategy = mirrored(2)
    memory = np.empty(1024 + 16, np.float32)
    offset = -(memory.ctypes.data // 4) % 16  # JAX shares what is aligned like this.
    array = memory[offset : offset + 1024]

    def function(value):
        late = jnp.ones((300, 300))
        late = jax.lax.fori_loop(0, 60, lambda _, a: a @ a / 300, late)
        return jnp.sum(value * late[0, 0])

    for _ in range(4):
        array[:] = 1
        total = take(strategy, function, array)
        array[:] = 2
        np.testing.assert_allclose(strategy.experimental_local_results(total), 1024)


def test_an_array_may_be_changed_as_soon_as_run_returns():
    unchanged_later(lambda strategy, function, array: strategy.run(function, (array,)))


def test_an_array_of_one_replica_may_be_changed_as_soon_as_it_is_distributed():
    def take(strategy, function, array):
        value = strategy.experimental_distribute_values_from_function(lambda _: array)
        array[:] = 2
        return strategy.run(function, (value,))

    unchanged_later(take)


@pytest.mark.parametrize("number", [2.0, 2, np.float32(2), True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_numbers_promote_as_in_a_plain_call(number, deterministic):
    strategy = mirrored(2, deterministic=deterministic)

    def both(number, half):
        return number * half, number + jnp.int8(1)

    half = jnp.ones(3, "bfloat16")
    for value in (number, jnp.asarray(number), jnp.asarray(np.asarray(number))):
        expected = both(value, half)
        for result, plain in zip(
            strategy.run(both, (value, half)), expected, strict=True
        ):
            assert result.values[1].dtype == plain.dtype
            np.testing.assert_array_equal(result.values[1], plain)

"""`Mirrored` and `PerReplica` as operands, and what `run` takes and returns besides
dicts and tuples.
"""

import collections
import copy
import dataclasses
import functools
import operator
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import wrapt
from keras.src.utils.tracking import TrackedDict

import keras_distribute as kd
from keras_distribute import errors
from tests.support import mirrored

ARRAY = np.array([1.0, 4.0, 8.0], "float32")
BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "matmul",
)
OTHERS = {
    "int": 2,
    "float": 2.5,
    "bool": True,
    "NumPy's number": np.float16(3),
    "NumPy": ARRAY[::-1].copy(),
    "JAX": jnp.asarray(ARRAY, "int32"),
}


strategy_of = functools.cache(mirrored)


def on_all(value, n=2):
    strategy = strategy_of(n)
    return strategy.extended.reduce_to(
        "MEAN", strategy.run(lambda: jnp.asarray(value)), None
    )


def number(n=2):
    strategy = strategy_of(n)
    return strategy.extended.reduce_to("SUM", strategy.run(lambda: jnp.int32(4)), None)


def per_replica(n=2):
    return strategy_of(n).run(
        lambda: jnp.ones(2) * kd.get_replica_context().replica_id_in_sync_group
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", BINARY)
def test_mirrored_computes_like_its_array(name, n):
    value, function = on_all(ARRAY, n), getattr(operator, name)
    assert isinstance(value, kd.Mirrored)
    for other in (*OTHERS.values(), on_all(ARRAY, n)):
        if name == "matmul" and np.ndim(other) == 0:
            continue
        plain = jnp.asarray(ARRAY) if isinstance(other, kd.Mirrored) else other
        for result, expected in (
            (function(value, other), function(jnp.asarray(ARRAY), plain)),
            (function(other, value), function(plain, jnp.asarray(ARRAY))),
        ):
            assert isinstance(result, jax.Array) and result.dtype == expected.dtype
            np.testing.assert_allclose(result, expected)


def test_mirrored_is_used_like_its_array():
    value, count = on_all(ARRAY), number()
    for result, expected in (
        (-value, -ARRAY),
        (+value, ARRAY),
        (abs(-value), ARRAY),
        (value[1:], ARRAY[1:]),
        (value.sum(), 13),
        (value.reshape(3, 1), ARRAY[:, None]),
        (list(value), ARRAY),
        (np.asarray(value, "int32"), ARRAY.astype("int32")),
    ):
        np.testing.assert_array_equal(result, expected)
    assert (len(value), value.shape, value.dtype, 4.0 in value) == (
        3,
        (3,),
        jnp.float32,
        True,
    )
    assert (
        int(count),
        float(count),
        complex(count),
        bool(count),
        range(99)[count],
    ) == (8, 8.0, 8, True, 8)
    assert (
        int(~count),
        int(count << 1),
        int(1 << count),
        int(count & 12),
        int(3 | count),
    ) == (-9, 16, 256, 8, 11)
    assert [int(part) for part in divmod(count, 5)] == [
        1,
        3,
    ] and f"{count:d} {count}" == f"8 {count!r}"
    value += 1
    assert isinstance(value, jax.Array) and value.tolist() == [2, 5, 9]


@pytest.mark.parametrize(
    "name", ["sin", "sum", "mean", "exp", "max", "square", "argmax", "sqrt"]
)
@pytest.mark.parametrize("module", [jnp, np, keras.ops], ids=["jax", "numpy", "keras"])
def test_functions_take_mirrored(module, name):
    np.testing.assert_allclose(
        getattr(module, name)(on_all(ARRAY)), getattr(np, name)(ARRAY), rtol=1e-5
    )


def test_transformations_take_mirrored():
    value = on_all(ARRAY)
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(value), ARRAY + 1)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(x * x))(value), 2 * ARRAY)
    np.testing.assert_array_equal(
        jnp.concatenate([value, value]), np.concatenate([ARRAY, ARRAY])
    )
    np.testing.assert_array_equal(
        keras.ops.where(value > 1, value, 0), np.where(ARRAY > 1, ARRAY, 0)
    )
    np.testing.assert_array_equal(
        np.add(value, 1, out=np.zeros(3, "float32")), ARRAY + 1
    )
    np.testing.assert_array_equal(np.add.reduce(value), 13)
    np.testing.assert_array_equal(copy.deepcopy(value) * 2, ARRAY * 2)
    for component in strategy_of(2).run(lambda x: x + 1, args=(value,)).values:
        np.testing.assert_array_equal(component, ARRAY + 1)


USES = {
    "+": lambda x: x + 1,
    "reflected +": lambda x: 1 + x,
    "+ of an array": lambda x: jnp.ones(2) + x,
    "+ of NumPy's": lambda x: np.ones(2) + x,
    "+ of a Mirrored": lambda x: on_all(ARRAY[:2]) + x,
    "-": lambda x: -x,
    "==": lambda x: x == 1,
    "<": lambda x: x < 1,
    "sum": lambda x: sum([x, x]),
    "bool": bool,
    "if": lambda x: 1 if x else 2,
    "float": float,
    "index": lambda x: x[0],
    "len": len,
    "list": list,
    "in": lambda x: 1 in x,
    "numpy": np.sin,
    "asarray": jnp.asarray,
    "keras.ops": keras.ops.sin,
    "stack": lambda x: jnp.stack([x, x]),
}


@pytest.mark.parametrize("name", USES)
def test_per_replica_is_not_computed_with(name):
    with pytest.raises(
        errors.StructureTypeError,
        match=r"(?s)differs per replica is not one array.*0: Array.*Fix: strategy.reduce.*strategy.run\(lambda",
    ):
        USES[name](per_replica())


def test_per_replica_in_a_function_of_jax_is_a_type_error():
    with pytest.raises(TypeError, match="PerReplica"):
        jnp.sin(per_replica())


def test_per_replica_of_one_replica_is_computed_with():
    value = strategy_of(1).run(lambda: jnp.arange(2.0))
    for result, expected in (
        (value + 1, [1, 2]),
        (1 - value, [1, 0]),
        (keras.ops.square(value), [0, 1]),
        (value, [0, 1]),
    ):
        np.testing.assert_array_equal(np.asarray(result), expected)
    assert bool(value[1]) and not bool(value[0]) and len(value) == 2


def test_values_can_be_kept_in_sets():
    value = per_replica()
    assert {value: 1}[value] == 1 and len({on_all(ARRAY), on_all(ARRAY)}) == 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    n: int = 3


class Named(dict):
    name = "none"


class Lookup(Mapping):
    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Strict(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Several(list):
    pass


class Many(tuple):
    pass


def named(**items):
    made = Named(items)
    made.name = "mine"
    return made


CONTAINERS = {  # How each is made of two items, and what it has of them.
    "a dict of a class": (
        lambda a, b: named(b=b, a=a),
        lambda c: (c["a"], c["b"], list(c), c.name),
        (["b", "a"], "mine"),
    ),
    "a frozen dict": (lambda a, b: Strict(a=a, b=b), lambda c: (c["a"], c["b"]), ()),
    "a default dict": (
        lambda a, b: collections.defaultdict(list, a=a, b=b),
        lambda c: (c["a"], c["b"], c.default_factory),
        (list,),
    ),
    "a user dict": (
        lambda a, b: collections.UserDict(a=a, b=b),
        lambda c: (c["a"], c["b"]),
        (),
    ),
    "a mapping": (
        lambda a, b: Lookup({"a": a, "b": b}),
        lambda c: (c["a"], c["b"]),
        (),
    ),
    "a view": (
        lambda a, b: types.MappingProxyType({"a": a, "b": b}),
        lambda c: (c["a"], c["b"]),
        (),
    ),
    "Keras's dict": (
        lambda a, b: TrackedDict({"a": a, "b": b}),
        lambda c: (c["a"], c["b"]),
        (),
    ),
    "a list of a class": (lambda a, b: Several([a, b]), tuple, ()),
    "a tuple of a class": (lambda a, b: Many([a, b]), tuple, ()),
    "a named tuple": (lambda a, b: Point(a, b), tuple, ()),
    "a wrapped named tuple": (
        lambda a, b: wrapt.ObjectProxy(Point(a, b)),
        lambda c: (c.x, c.y, type(c.__wrapped__)),
        (Point,),
    ),
    "a wrapped dict": (
        lambda a, b: wrapt.ObjectProxy({"a": a, "b": b}),
        lambda c: (c["a"], c["b"]),
        (),
    ),
    "a dataclass": (lambda a, b: Pair(a, b), lambda c: (c.x, c.y), ()),
    "a frozen dataclass": (
        lambda a, b: Pair(Frozen(a), b),
        lambda c: (c.x.x, c.y, c.x.n),
        (3,),
    ),
    "nested": (
        lambda a, b: Pair([named(a=a)], Lookup({"c": (b,)})),
        lambda c: (c.x[0]["a"], c.y["c"][0], c.x[0].name),
        ("mine",),
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("n", [1, 2])
def test_containers_come_back_as_their_class(name, n):
    made, items, rest = CONTAINERS[name]
    strategy = strategy_of(n)

    def fn(given):
        a, b, *_ = items(given)
        total, doubled = (
            kd.get_replica_context().all_reduce("SUM", made(a, b)),
            made(a + 1, b * 2),
        )
        return items(total)[0], doubled

    x = strategy.experimental_distribute_values_from_function(
        lambda context: made(
            np.float32(context.replica_id_in_sync_group), np.ones(2, "float32")
        )
    )
    assert type(x) is type(made(0, 0)) and isinstance(items(x)[0], kd.PerReplica)
    with jax.checking_leaks():
        total, doubled = strategy.run(fn, args=(x,))
    a, b, *others = items(doubled)
    assert type(doubled) is type(made(0, 0)) and tuple(others) == rest
    assert [float(v) for v in a.values] == [i + 1 for i in range(n)]
    assert [v.tolist() for v in b.values] == [[2, 2]] * n
    assert {float(v) for v in total.values} == {sum(range(n))}
    reduced, local = (
        strategy.reduce("MEAN", doubled, axis=None),
        strategy.experimental_local_results(doubled),
    )
    assert type(reduced) is type(doubled) and float(items(reduced)[0]) == (n + 1) / 2
    assert [float(items(part)[0]) for part in local] == [i + 1 for i in range(n)]
    if name != "a frozen dataclass":  # Its number cannot be gathered.
        assert items(strategy.gather(made(b, b), axis=0))[1].tolist() == [2, 2] * n


def test_attributes_of_a_container_are_part_of_the_program():
    strategy = strategy_of(2)

    def fn(given):
        return given["a"] * len(given.name)

    for name in ("one", "three"):
        given = Named(a=per_replica())
        given.name = name
        assert strategy.run(fn, args=(given,)).values[1].tolist() == [len(name)] * 2


def test_a_dataclass_without_arrays_is_passed_as_it_is():
    options = Pair(1, "text")
    options.y = options  # Nothing looks into it.
    assert strategy_of(2).run(lambda given: given is options, args=(options,)) is True
    assert strategy_of(2).run(lambda: options) is options


class Holder:
    def __init__(self, x):
        self.x = [x]


@pytest.mark.parametrize(
    "make",
    [
        Holder,
        lambda x: collections.deque([x]),
        lambda x: {"a": x}.values(),
        lambda x: lambda: x,
        lambda x: functools.partial(max, x),
        ValueError,
        lambda x: (x + i for i in range(2)),
    ],
)
def test_objects_that_hide_arrays_are_refused(make):
    with pytest.raises(
        errors.StructureTypeError,
        match=r"(?s)holds arrays and is no structure.*Fix: return a dict",
    ):
        strategy_of(2).run(
            lambda: [make(kd.get_replica_context().replica_id_in_sync_group)]
        )


def test_a_mapping_that_cannot_be_made_is_refused():
    class Odd(Lookup):
        def __init__(self, items, more):
            super().__init__(items)

    with pytest.raises(
        errors.StructureTypeError,
        match=r"(?s)its class makes one from a dict.*Odd.*Fix: return a dict",
    ):
        strategy_of(2).run(lambda: Odd({"a": jnp.ones(1)}, 2))


class Tensor:
    """One of another library."""

    shape, dtype = (2,), "float32"

    def __init__(self, number):
        self.array = np.full(2, number, "float32")

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_tensors_of_other_libraries_are_distributed_as_arrays():
    strategy = strategy_of(2)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"x": Tensor(context.replica_id_in_sync_group), "y": Tensor}
    )
    doubled = strategy.run(lambda x: 2 * x, args=(value["x"],))
    np.testing.assert_array_equal(strategy.gather(doubled, axis=0), [0, 0, 2, 2])
    total = strategy.reduce("SUM", value["x"], axis=None)
    np.testing.assert_array_equal(total, [1, 1])
    assert value["y"].values == (Tensor, Tensor)  # A class is no tensor.


def test_structures_that_differ_by_replica_are_refused():
    def value_fn(context):
        return (
            Pair(np.ones(1))
            if context.replica_id_in_sync_group
            else Named(a=np.ones(1))
        )

    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)different structures.*a Named with the keys.*a Pair",
    ):
        strategy_of(2).experimental_distribute_values_from_function(value_fn)

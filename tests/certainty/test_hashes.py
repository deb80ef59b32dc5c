"""Each device hashes what it has itself, and a hash finds any single bit; by one program
that is compiled once.
"""

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.consistency import hashing
from keras_distribute.consistency.check import _Check
from tests.support import central, mirrored

DTYPES = [
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int16"),
    *("int32", "uint32", "bool", "complex64"),
]


def array_of(strategy, parts):
    """One array, of which each device has another part as its copy."""
    mesh = strategy.replica_mesh
    shards = [jax.device_put(p, d) for p, d in zip(parts, mesh.devices, strict=True)]
    return jax.make_array_from_single_device_arrays(
        parts[0].shape, mesh.replicated, shards
    )


def hashes_of(*arrays, layout=None):
    layout = layout or tuple((i,) for i in range(len(arrays)))
    pairs = np.asarray(hashing.of_arrays(arrays, layout)).astype("uint64")
    return (pairs[..., 0] << 32 | pairs[..., 1]).tolist()


def flipped(array, element, bit):
    changed = np.array(array)
    row = changed.reshape(-1).view(np.uint8)
    row[element * array.dtype.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    return changed


def values(dtype, shape=(3, 5)):
    numbers = np.random.RandomState(1).randn(*shape) * 7
    return (numbers > 0) if dtype == "bool" else numbers.astype(jax.numpy.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_an_element_changes_both_sums(dtype):
    """Each device has another bit flipped; the first has none."""
    array, strategy = values(dtype), mirrored(8)
    bits = 1 if dtype == "bool" else 8 * array.dtype.itemsize
    for begin in range(0, bits, 7):
        some = list(range(begin, min(begin + 7, bits)))
        parts = [array, *[flipped(array, 11, bit) for bit in some]]
        parts += [array] * (8 - len(parts))
        given = array_of(strategy, parts)
        pairs = np.asarray(hashing.of_arrays([given], ((0,),)))[:, 0]
        for i in range(1, 8):
            assert (pairs[i] != pairs[0]).all() == (i <= len(some))
        if len(some) < 7:
            assert (pairs[-1] == pairs[0]).all()
        assert len(set(map(tuple, pairs.tolist()))) == len(some) + 1


def test_each_device_reads_its_own_copy():
    """Eight devices with eight arrays behind one that says that it is replicated; in a
    row with others, and as parts of a row, too.
    """
    strategy = mirrored(8)
    parts = [np.full((4, 4), i, "float32") for i in range(8)]
    given, same = array_of(strategy, parts), array_of(strategy, [parts[0]] * 8)
    assert given.is_fully_replicated
    alone = hashes_of(same, given, same)
    assert [len({of[i] for of in alone}) for i in range(3)] == [1, 8, 1]
    joined = hashes_of(same, given, same, layout=((0, 2), (1,), (0, 1, 2)))
    assert [len({of[i] for of in joined}) for i in range(3)] == [1, 8, 8]
    pieces = np.asarray(hashing.of_parts([same, given], [16, 3, 13]))[..., 0]
    assert [len(set(pieces[:, i])) for i in range(3)] == [1, 8, 8]
    # What each device says, is of what it has.
    for i in range(8):
        copies = array_of(strategy, [parts[i]] * 8)
        assert {of[0] for of in hashes_of(copies)} == {hashes_of(given)[i][0]}


@pytest.mark.parametrize("other", ["signs", "swapped", "moved", "zeros", "nans"])
def test_changes_of_several_elements(other):
    """Two signs would vanish in sums of odd multiples; the bits are compared."""
    array = values("float32", (32,))
    changed = array.copy()
    if other == "signs":
        changed[[2, 9]] *= -1
    elif other == "swapped":
        changed[[2, 9]] = changed[[9, 2]]
    elif other == "moved":
        changed = np.roll(array, 1)
    elif other == "zeros":
        array, changed = np.zeros(32, "float32"), np.full(32, -0.0, "float32")
    else:
        array = np.full(32, np.nan, "float32")
        changed = array.view("uint32").copy()
        changed[[4, 7]] ^= 1
        changed = changed.view("float32")
    first, second = (of[0] for of in hashes_of(array_of(mirrored(2), [array, changed])))
    assert first != second
    first, second = (of[0] for of in hashes_of(array_of(mirrored(2), [array] * 2)))
    assert first == second


def test_a_second_check_compiles_nothing(compilations):
    strategy = mirrored(4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), *[keras.layers.Dense(3)] * 20])
    strategy.check_consistency(model)
    before = len(compilations)
    strategy.check_consistency(model)
    assert len(compilations) == before


def test_a_check_is_one_launch(monkeypatch):
    """However many arrays there are."""
    strategy, calls = mirrored(2), []
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((200,)), keras.layers.Dense(200), keras.layers.Dense(3)]
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    launch = hashing.of_arrays
    monkeypatch.setattr(
        hashing, "of_arrays", lambda *a: calls.append(a[1]) or launch(*a)
    )
    report = strategy.check_consistency(model)
    # Three arrays above 64 KiB, and all others together.
    assert [sorted(map(len, layout)) for layout in calls] == [[1, 1, 1, 11]]
    assert report.num_variables == 14
    assert report.skipped == ("loss/total", "loss/count")  # No `fit` has them yet.


def test_what_has_no_copies_is_skipped():
    strategy = mirrored(2)
    with strategy.scope():
        own = keras.Variable(1.0, synchronization="on_read", aggregation="sum")
        weight = keras.Variable(1.0)
    report = strategy.check_consistency(own, weight, weight)
    assert (report.skipped, report.num_variables) == ((own.path,), 1)
    alone = mirrored(1)
    with alone.scope():
        weight = keras.Variable(1.0)
    assert alone.check_consistency(weight).skipped == (weight.path,)
    resting = central(2)
    with resting.scope():
        weight = keras.Variable(1.0)
    assert resting.check_consistency(weight).skipped == (weight.path,)
    plain = keras.Variable(1.0)
    assert kd.get_strategy().check_consistency(plain).num_variables == 0
    assert str(strategy.check_consistency(plain)) == (
        "0 variables are the same on all 2 replicas."
    )


def test_a_check_inside_of_run_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
    with pytest.raises(kd.errors.ContextError, match="outside strategy.run"):
        strategy.run(lambda: strategy.check_consistency(weight))


def test_a_hash_that_is_wrong_itself_is_told(monkeypatch, caplog):
    """A device whose copies are right, and which has computed something else once."""
    strategy = mirrored(4)
    with strategy.scope():
        variables = [keras.Variable(np.ones(3)), keras.Variable(np.ones(5))]
    once = [1]
    hashes = _Check._hashes

    def wrong_once(self, array):
        found = hashes(self, array)
        if once:
            found[0][2] ^= once.pop()
        return found

    monkeypatch.setattr(_Check, "_hashes", wrong_once)
    assert not strategy.check_consistency(*variables).differences
    assert "replica 2 (cpu:2, process 0) computed another hash" in caplog.text
    caplog.clear()
    assert not strategy.check_consistency(*variables).differences
    assert not caplog.text

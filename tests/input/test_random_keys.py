"""Elements with JAX's keys of random numbers, which NumPy does not know."""

import jax
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.cluster import agreement
from keras_distribute.input import datasets
from keras_distribute.input.kinds import source_of
from keras_distribute.input.lockstep import agreed
from keras_distribute.input.shares import RoundLayout, SplitLayout
from keras_distribute.input.source import Batch
from tests.support import mirrored

KEYS = jax.random.split(jax.random.key(3), 7)
DATA = jax.random.key_data(KEYS)


def elements():
    for first in (0, 4):
        rows = slice(first, first + 4)
        yield {"rows": KEYS[rows], "step": KEYS[first], "x": np.arange(7.0)[rows]}


def rows_of(dataset):
    strategy = mirrored(2)
    with_numbers = strategy.experimental_distribute_dataset(dataset)
    assert with_numbers.element_spec["rows"] == kd.ElementSpec((None,), "key<fry>")
    return [
        [jax.random.key_data(part).tolist() for part in element["rows"].values]
        for element in with_numbers
    ]


@pytest.mark.parametrize("kind", ["a generator", "arrays"])
def test_a_replica_gets_the_keys_of_its_rows(kind):
    dataset = elements()
    if kind == "arrays":
        dataset = kd.ArrayDataset({"rows": KEYS, "x": np.arange(7.0)}, 4)
    cuts = [[(0, 2), (2, 4)], [(4, 6), (6, 7)]]
    assert rows_of(dataset) == [
        [DATA[first:last].tolist() for first, last in step] for step in cuts
    ]


def test_a_step_draws_from_the_keys_of_an_element():
    strategy = mirrored(2)

    def step(element):
        own = jax.vmap(jax.random.uniform)(element["rows"])
        return (own * element["x"]).sum() + jax.random.uniform(element["step"])

    dataset = strategy.experimental_distribute_dataset(elements())
    drawn = np.asarray(jax.vmap(jax.random.uniform)(KEYS))
    for element, first in zip(dataset, (0, 4), strict=True):
        total = strategy.reduce("SUM", strategy.run(step, args=(element,)), axis=None)
        rows = slice(first, first + 4)
        expected = drawn[rows] @ np.arange(7.0)[rows] + 2 * drawn[first]
        assert float(total) == pytest.approx(expected, rel=1e-5)


def test_shuffled_keys_go_on_from_a_position():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(
        kd.ArrayDataset(KEYS, 2, shuffle=True, seed=1)
    )
    first, second = iter(dataset), iter(dataset)
    next(first)
    second.set_state(first.get_state())
    for one, other in zip(first, second, strict=True):
        for part, same in zip(one.values, other.values, strict=True):
            assert (jax.random.key_data(part) == jax.random.key_data(same)).all()


def test_a_process_without_data_goes_on_with_no_keys(monkeypatch):
    monkeypatch.setattr(agreement, "exchange", lambda _, own, count: [own] * count)
    source = source_of(elements())
    layout = agreed(RoundLayout([source], 2), 2)
    announced = layout.announce(Batch([next(elements())] * 2, 8))
    assert announced.specs[0][0] == ((4,), "key<fry>")
    empty = layout.without_rows(announced).data[0]
    assert empty["rows"].dtype == KEYS.dtype and empty["rows"].shape == (0,)
    assert empty["step"].dtype == KEYS.dtype and empty["x"].shape == (0,)


def test_one_array_twice_where_another_process_has_two(monkeypatch):
    """Each process knows the widths of both on the replicas of the other."""
    monkeypatch.setattr(agreement, "exchange", lambda _, own, count: [own] * count)
    layout = SplitLayout(source_of(kd.ArrayDataset(KEYS, 2)), 2, (0, 2))
    dataset = datasets.DistributedDataset(
        layout, mirrored(2).replica_mesh, kd.InputOptions(), ""
    )
    monkeypatch.setattr(type(dataset._mesh), "num_processes", 2)
    prepare = datasets._Prepare(dataset)
    found = []
    monkeypatch.setattr(
        prepare, "_group", lambda components, specs: found.append(specs)
    )
    own = np.ones((2, 3), "float32")
    of_replicas = [
        [((1, width), "float32") for width in widths] for widths in ((3, 3), (4, 5))
    ]
    prepare(Batch({"b": own, "none": None, "a": own}, 2, of_replicas))
    b, none, a = found
    assert none is None
    assert [shape for shape, _ in b] == [(1, 3), (1, 5)]
    assert [shape for shape, _ in a] == [(1, 3), (1, 4)]

"""Sums of which each replica keeps a part, along the dimensions of a slice of chips."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from keras_distribute.devices import summed_parts
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.devices.over_replicas import over_replicas

CUBE = [(x, y, 0, core) for x in (0, 1) for y in (0, 1) for core in (0, 1)]
BLOCKS = [(x, y, 0, 0) for h in (0, 2) for y in (0, 1) for x in (h, h + 1)]


@pytest.fixture(autouse=True)
def no_lines_are_left():
    yield
    summed_parts._lines_of.cache_clear()


def placed(monkeypatch, places):
    """A mesh whose devices say that they are there."""
    devices = jax.devices()[: len(places)]
    of_device = dict(zip(devices, places, strict=True))
    monkeypatch.setattr(summed_parts, "_place_of", of_device.__getitem__)
    summed_parts._lines_of.cache_clear()
    return ReplicaMesh.of(devices)


def program(mesh, axis):
    spec = PartitionSpec(*[None] * axis, REPLICA_AXIS)
    return jax.jit(
        over_replicas(
            mesh,
            lambda x: summed_parts.summed_part(x[0], axis, mesh),
            in_specs=(PartitionSpec(REPLICA_AXIS),),
            out_specs=spec,
        )
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "places",
    [
        CUBE,
        [(z, x, 0, y) for x, y, _, z in CUBE],
        [(x + 2, y + 4, 0, core) for x, y, _, core in CUBE],
        [(x, y, 0, 0) for x in (0, 1) for y in (0, 1)],
        [(x, y, 0, 0) for y in (0, 1) for x in (0, 1)],
    ],
    ids=["in order", "otherwise", "elsewhere", "square", "columns"],
)
def test_each_replica_has_its_part_of_the_sum(places, axis, monkeypatch):
    mesh, count = placed(monkeypatch, places), len(places)
    x = np.arange(count * 16 * 24).reshape(count, 16, 24).astype("int32")
    lowered = program(mesh, axis).lower(x)
    dimensions = 3 if count == 8 else 2
    assert lowered.as_text().count("stablehlo.reduce_scatter") == dimensions
    summed = lowered.compile()(x)
    assert summed.tolist() == x.sum(0).tolist()
    assert {shard.data.size for shard in summed.addressable_shards} == {
        16 * 24 // count
    }


@pytest.mark.parametrize(
    "places",
    [
        BLOCKS,  # 4x2: libtpu has a reduce-scatter over all of it.
        [(i, 0, 0, 0) for i in range(8)],
        CUBE[:6],
        CUBE[::-1],
        [CUBE[i] for i in (0, 1, 2, 3, 4, 5, 7, 6)],
        [CUBE[0], CUBE[1]] * 4,
    ],
    ids=["4x2", "line", "no slice", "backwards", "another order", "several slices"],
)
def test_elsewhere_all_replicas_sum_at_once(places, monkeypatch):
    mesh, count = placed(monkeypatch, places), len(places)
    x = np.arange(count * 24).reshape(count, 24).astype("int32")
    lowered = program(mesh, 0).lower(x)
    assert lowered.as_text().count("stablehlo.reduce_scatter") == 1
    assert lowered.compile()(x).tolist() == x.sum(0).tolist()


def test_devices_without_places():
    assert summed_parts._lines_of(tuple(jax.devices())) is None


@pytest.mark.parametrize("sizes", [(4, 4), (8, 8), (4, 4, 4)])
def test_lines_of_a_slice_whose_hosts_are_blocks(sizes, monkeypatch):
    """As libtpu numbers chips: host by host, each two by two."""
    hosts = itertools.product(*(range(0, size, 2) for size in reversed(sizes)))
    within = list(itertools.product((0, 1), repeat=len(sizes)))
    places = [
        (*(h + i for h, i in zip(host[::-1], inner[::-1], strict=True)),)
        for host in hosts
        for inner in within
    ]
    monkeypatch.setattr(summed_parts, "_place_of", places.__getitem__)
    found = summed_parts._lines_of(tuple(range(len(places))))
    for dimension, groups in enumerate(found.groups):
        assert sorted(itertools.chain(*groups)) == list(range(len(places)))
        for group in groups:
            along = [places[replica] for replica in group]
            assert [place[dimension] for place in along] == list(range(sizes[0]))
            others = {place[:dimension] + place[dimension + 1 :] for place in along}
            assert len(others) == 1
    # The part of each replica is where the steps along the lines leave it.
    value = np.arange(len(places))
    ordered = summed_parts._reordered(value, 0, found.bits)
    assert [places[replica] for replica in ordered] == sorted(places)


class Device:
    """What a device says of itself."""

    def __init__(self, platform, **attributes):
        self.platform = platform
        self.__dict__.update(attributes)


def test_gpus_are_on_no_lines():
    """They have coordinates, but no cores (jaxlib 0.10)."""
    square = [(i % 2, i // 2, 0) for i in range(4)]
    gpus = tuple(Device("gpu", coords=place) for place in square)
    assert summed_parts._lines_of(gpus) is None
    chips = tuple(Device("tpu", coords=place, core_on_chip=0) for place in square)
    assert summed_parts._lines_of(chips) is not None

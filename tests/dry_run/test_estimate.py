"""Estimates by hand, the search for the largest batch, and the names of hardware."""

import pytest

from keras_distribute.dry_run import estimate, fitting, targets
from keras_distribute.dry_run.collectives import Collective
from keras_distribute.dry_run.hardware import HARDWARE
from keras_distribute.errors import DeviceError


def all_reduce(num_bytes, size, times=1, num_replicas=None):
    replicas = size if num_replicas is None else num_replicas
    return Collective(
        "all-reduce", "r", num_bytes, 1, ("f32",), size, 1, times, (), "", replicas
    )


def test_a_step_by_hand():
    target = targets.parse("v5e:4x4")
    found = estimate.of_step(
        target, {"bfloat16": 197e12 * 0.002}, 819e9 * 0.003, [all_reduce(100e6, 16)], 1
    )
    # Two lines of 4 chips: 50 GB/s each, and 6 hops.
    communication = 2 * (100e6 * 15 / 16 / 100e9 + 6e-6)
    assert found.compute == pytest.approx(0.002)
    assert found.memory == pytest.approx(0.003)
    assert found.communication == pytest.approx(communication)
    assert found.at_least == pytest.approx(0.003)
    assert found.in_turn == pytest.approx(0.003 + communication)
    assert found.bound_by == "memory"
    assert "cloud.google.com" in found.source


def test_rings_have_twice_the_bandwidth_of_lines():
    ring, line = targets.parse("v5e:16x16"), targets.parse("v5e:8x8")
    assert estimate.seconds(ring, "all-gather", 1e6, 256) == pytest.approx(
        256e6 * 255 / 256 / 200e9 + 16e-6
    )
    assert estimate.seconds(line, "reduce-scatter", 1e6, 64) == pytest.approx(
        1e6 * 63 / 64 / 100e9 + 14e-6
    )
    assert estimate.seconds(
        targets.parse("h100:8"), "all-reduce", 450e9, 8
    ) == pytest.approx(2 * 7 / 8)
    assert estimate.seconds(line, "all-reduce", 1e6, 1) == 0
    row = targets.parse("v5e:1x4")  # Of one axis.
    assert estimate.seconds(row, "reduce-scatter", 1e6, 4) == pytest.approx(
        1e6 * 3 / 4 / 50e9 + 3e-6
    )


def test_devices_of_a_chip_share_its_links():
    """Of 4 x 4 chips no axis is a ring; each has a link along both, for two cores."""
    target = targets.parse("v3:4x4")
    assert target.num_devices == 32
    assert estimate.seconds(target, "all-gather", 1e6, 32) == pytest.approx(
        31e6 / (2 * 82e9 / 2) + 6e-6
    )


def test_neighbours_have_one_link_and_one_hop():
    line, alone = targets.parse("v5e:8x8"), targets.parse("h100:8")
    assert estimate.seconds(line, "collective-permute", 1e6, 2) == pytest.approx(
        1e6 / 50e9 + 1e-6
    )
    assert estimate.seconds(alone, "collective-permute", 1e6, 2) == pytest.approx(
        1e6 / 450e9
    )


def test_of_several_steps_a_call_each_has_its_share():
    target = targets.parse("v5e:4x4")
    once, often = all_reduce(100e6, 16), all_reduce(100e6, 16, times=6)
    one = estimate.of_step(target, {}, 0, [once], 1).communication
    here = estimate.of_step(target, {"bfloat16": 197e10}, 0, [often], 3)
    assert here.communication == pytest.approx(2 * one)
    for each, expected in (("v5e:8x8", 64), ("v5e:2x2", 4)):
        points = estimate.scaling(target, here, [often], 0, rows=4, num_steps=3)
        (point,) = [point for point in points if point.topology == each]
        there = targets.parse(each)
        seconds = estimate.seconds(there, "all-reduce", 100e6, expected)
        assert point.in_turn == pytest.approx(0.01 + 2 * seconds)


def test_scaling_names_slices_of_as_many_axes():
    target = targets.parse("v4:2x2x1")
    here = estimate.of_step(target, {"bfloat16": 1e12}, 0, [], 1)
    points = estimate.scaling(target, here, [], 10**8, rows=4, num_steps=1)
    named = [point.topology for point in points]
    assert named[:4] == ["v4:1x1x1", "v4:2x2x1", "v4:2x4x1", "v4:4x4x1"]
    assert [targets.parse(name).num_devices for name in named[:4]] == [1, 4, 8, 16]


def test_nothing_is_known_of_cpus():
    assert (
        estimate.of_step(targets.parse("cpu:8"), {"float32": 1e9}, 1e9, [], 1) is None
    )


def test_scaling_keeps_the_rows_of_a_device():
    target = targets.parse("v5e:1x1")
    here = estimate.of_step(target, {"bfloat16": 197e10}, 0, [], 1)
    points = estimate.scaling(
        target, here, [], gradient_bytes=10**8, rows=32, num_steps=1
    )
    assert [(p.topology, p.num_devices, p.batch) for p in points[:3]] == [
        ("v5e:1x1", 1, 32),
        ("v5e:2x2", 4, 128),
        ("v5e:2x4", 8, 256),
    ]
    assert points[0].efficiency == 1
    assert points[1].in_turn == pytest.approx(0.01 + 2 * (1e8 * 3 / 4 / 100e9 + 2e-6))
    assert all(0 < point.efficiency < 1 for point in points[1:])


def test_scaling_adds_replicas_not_logical_devices():
    """Pairs add up activations, the replicas' halves of the gradients, and one
    collective is over all devices.
    """
    target = targets.parse("v5e:2x4")
    here = estimate.of_step(target, {"bfloat16": 197e10}, 0, [], 1)
    pair, halves, every = (
        all_reduce(5e7, 2, 3, num_replicas=1),
        all_reduce(1e8, 4),
        all_reduce(1e6, 8, num_replicas=4),
    )
    points = estimate.scaling(
        target, here, [pair, halves, every], 10**9, rows=4, num_steps=1, num_logical=2
    )
    assert [(p.num_devices, p.batch) for p in points[:3]] == [
        (4, 16),
        (8, 32),
        (16, 64),
    ]
    for point in points:
        there, count = targets.parse(point.topology), point.num_devices
        expected = 3 * estimate.seconds(there, "all-reduce", 5e7, 2)
        expected += estimate.seconds(there, "all-reduce", 1e8, count // 2)
        expected += estimate.seconds(there, "all-reduce", 1e6, count)
        assert point.in_turn == pytest.approx(0.01 + expected)
        assert 0 < point.efficiency < 1
    # Compiled for a single replica, which has nothing to reduce yet.
    alone = estimate.scaling(
        target, here, [pair], 10**9, rows=4, num_steps=1, num_logical=2
    )
    assert alone[1].in_turn == pytest.approx(
        0.01
        + 3 * estimate.seconds(target, "all-reduce", 5e7, 2)
        + estimate.seconds(target, "all-reduce", 1e9, 4)
    )


def test_a_pair_is_one_hop_apart():
    target = targets.parse("v5e:8x8")
    assert estimate.seconds(target, "all-reduce", 0, 2) == pytest.approx(2 * 1e-6)
    assert estimate.seconds(target, "all-reduce", 0, 64) == pytest.approx(2 * 14e-6)


@pytest.mark.parametrize("capacity", [1, 7, 40, 1000, 12_345])
def test_the_largest_batch_is_found_in_few_compilations(capacity):
    tried = []

    def needed(rows):
        tried.append(rows)
        return 1000 + 10 * rows + (rows // 100) ** 2  # Not quite a line.

    limit = needed(8 * capacity)
    tried.clear()
    fits, too_large, count = fitting.largest(needed, limit, 8, 64)
    assert count == len(tried) == len(set(tried)) <= 12
    assert all(rows % 8 == 0 for rows in tried)
    assert needed(fits) <= limit < needed(too_large)
    assert too_large - fits <= max(8, fits // 16)


def test_the_search_ends_where_nothing_fits_and_where_memory_does_not_grow():
    assert fitting.largest(lambda rows: 100, 10, 4, 64)[:2] == (0, 4)
    fits, too_large, count = fitting.largest(lambda rows: 5, 10, 4, 64)
    assert fits > 64 and too_large is None and count == 12


@pytest.mark.parametrize(
    ("name", "platform", "devices"),
    [
        ("v5e:4x4", "tpu", 16),
        ("V6E:2x2", "tpu", 4),
        ("v2:2x2", "tpu", 8),
        ("v4:2x2x1", "tpu", 4),
        ("tpu7x:2x2x1", "tpu", 8),
        ("v5litepod:2x4", "tpu", 8),
        ("h100:8", "cuda", 8),
        ("a100-80gb:4", "cuda", 4),
        ("cpu:8", "cpu", 8),
    ],
)
def test_names_of_topologies(name, platform, devices):
    target = targets.parse(name)
    assert (target.platform, target.num_devices) == (platform, devices)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v5e", "not of the form"),
        ("v9:2x2", "no hardware 'v9'"),
        ("v5e:4", "has 2 axes"),
        ("v5e:2x2x2", "has 2 axes"),
        ("h100:16", "at most 8"),
        ("h100:2x2", "at most 8"),
        ("v5e:0x4", "a size of 0"),
        ("cpu:2x2", "no hardware 'cpu'"),
        (8, "not of the form"),
    ],
)
def test_what_is_no_topology_is_said(name, why):
    with pytest.raises(DeviceError, match=why) as caught:
        targets.parse(name)
    assert 'Fix: "v5e:4x4" (v2, v3, v4, v5e, v5p, v6e, tpu7x)' in str(caught.value)


def test_every_gpu_has_its_properties():
    for hardware in HARDWARE.values():
        if not hardware.torus_axes:
            text = hardware.target_config()
            size = int(text.partition("device_memory_size: ")[2].split()[0])
            assert hardware.usable_bytes == int(0.75 * size)
            assert text.count("{") == text.count("}")

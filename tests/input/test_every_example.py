"""Nothing is lost, repeated or moved: what all replicas of all processes see together
is what one process sees.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

import keras_distribute as kd
from keras_distribute.input import sharing
from tests.support import mirrored

from . import kinds

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
PROFILE = settings(
    max_examples=400 if THOROUGH else 12,
    derandomize=not THOROUGH,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if THOROUGH else [])],
    suppress_health_check=QUIET,
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.sampled_from([4, 8, 3, 5, 1, 16]))
    processes, own = draw(
        st.sampled_from(
            [(1, 1), (1, 4), (2, 2), (1, 2), (2, 1), (4, 2), (4, 1), (3, 1), (1, 8)]
        )
    )
    return {
        "rows": draw(st.integers(0, 30)),
        "batch": batch,
        "processes": processes,
        "own": own,
        "shuffle": draw(st.booleans()),
        "repeat": draw(st.sampled_from([1, 2])),
        "drop": draw(st.booleans()),
        "ahead": draw(st.sampled_from([2, 0, 5])),
        "passes": draw(st.sampled_from([1, 2])),
    }


def host_batches(dataset: Any, passes: int) -> list[list[Any]]:
    """What one process reads: the ids of each batch of each pass."""
    options = kd.InputOptions(
        experimental_per_replica_buffer_size=0, experimental_fetch_to_device=False
    )
    mesh = kd.MirroredStrategy(["cpu:0"]).replica_mesh
    distributed = sharing.distribute(dataset, mesh, kd.InputContext(1, 0, 1), options)
    return [
        [batch[0].values[0].tolist() for batch in distributed] for _ in range(passes)
    ]


def check(ids: np.ndarray, features: np.ndarray) -> None:
    """Each example kept its features."""
    np.testing.assert_array_equal(features, np.stack([ids * 0.5, -ids], 1))


@pytest.mark.sampled(4)
@pytest.mark.timeout(0 if THOROUGH else 240)
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_example_once_in_order(kind: str) -> None:
    @settings(PROFILE)
    @given(case=cases())
    def run(case: dict[str, Any]) -> None:
        make = (
            case["rows"],
            case["batch"],
            case["shuffle"],
            case["repeat"],
            case["drop"],
        )
        whole = case["rows"] * case["repeat"]
        batches = whole // case["batch"] if case["drop"] else -(-whole // case["batch"])
        if not batches and kind in kinds.EMPTY_IS_AN_ERROR:
            return
        passes = 1 if "generator" in kind else case["passes"]
        expected = host_batches(kinds.KINDS[kind](*make), passes)
        if not case["drop"]:
            every = sorted(kinds.order_of(case["rows"], False, case["repeat"]))
            assert all(sorted(itertools.chain(*each)) == every for each in expected), (
                "one process loses examples"
            )
        assert all(len(each) == batches for each in expected)
        event(f"{case['processes']} processes of {case['own']}")

        processes, own = case["processes"], case["own"]
        policy = kd.AutoShardPolicy.DATA if processes > 1 else None
        options = kd.InputOptions(
            experimental_per_replica_buffer_size=case["ahead"], auto_shard_policy=policy
        )
        strategy = mirrored(own)
        iterators = [
            sharing.distribute(
                kinds.KINDS[kind](*make),
                strategy.replica_mesh,
                kd.InputContext(processes, i, processes * own),
                options,
            )
            for i in range(processes)
        ]
        seen = []
        for _ in range(passes):
            steps = [
                [(step[0].values, step[1].values) for step in iterator]
                for iterator in iterators
            ]
            assert len({len(each) for each in steps}) == 1, (
                "the processes have different numbers of steps"
            )
            one_pass = []
            for parts in zip(*steps, strict=True):
                ids = [np.asarray(value) for part in parts for value in part[0]]
                features = [np.asarray(value) for part in parts for value in part[1]]
                assert [len(a) for a in ids] == [len(a) for a in features]
                check(np.concatenate(ids), np.concatenate(features))
                one_pass.append(np.concatenate(ids).tolist())
            seen.append(one_pass)
        assert seen == expected

    run()


def test_passes_of_arrays_differ_and_follow_the_seed() -> None:
    def orders(seed: int | None) -> list[Any]:
        return host_batches(
            kd.ArrayDataset(kinds.examples(20), 5, shuffle=True, seed=seed), 3
        )

    first, second, third = orders(1)
    assert first != second != third != first
    assert orders(1) == [first, second, third]
    assert orders(2)[0] != first
    import keras

    keras.utils.set_random_seed(4)
    drawn = orders(None)
    assert orders(None) != drawn
    keras.utils.set_random_seed(4)
    assert orders(None) == drawn


@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
def test_files_are_read_once_by_one_process(tmp_path: Any, policy: str) -> None:
    """Unequal files over 2 processes: together the whole, each file on one process."""
    tf = pytest.importorskip("tensorflow")
    for i, count in enumerate([7, 3, 5, 4]):
        (tmp_path / f"{i}.txt").write_text(
            "".join(f"{10 * i + j}\n" for j in range(count))
        )

    def part(process: int) -> list[list[list[int]]]:
        dataset = tf.data.TextLineDataset(sorted(str(p) for p in tmp_path.iterdir()))
        dataset = dataset.map(lambda line: tf.strings.to_number(line, tf.int32)).batch(
            4
        )
        strategy = mirrored(2)
        options = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy[policy])
        distributed = sharing.distribute(
            dataset, strategy.replica_mesh, kd.InputContext(2, process, 4), options
        )
        assert f"process {process} of 2 reads its files ({policy})" in repr(distributed)
        return [
            [np.asarray(v).tolist() for v in element.values] for element in distributed
        ]

    parts = [
        [row for step in part(process) for rows in step for row in rows]
        for process in (0, 1)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(
        10 * i + j for i, n in enumerate([7, 3, 5, 4]) for j in range(n)
    )
    assert {x // 10 for x in parts[0]} == {0, 2} and {x // 10 for x in parts[1]} == {
        1,
        3,
    }


def test_the_first_process_says_what_is_shared_how(capfd: Any) -> None:
    mesh = kd.MirroredStrategy(["cpu:0"]).replica_mesh
    data = kd.ArrayDataset(np.arange(8), 4)
    for process in (0, 1):
        sharing.distribute(data, mesh, kd.InputContext(2, process, 2), None)
    sharing.distribute(data, mesh, kd.InputContext(1, 0, 1), None)
    line = "keras_distribute: DistributedDataset(arrays: process 0 of 2 keeps its rows of each batch (DATA))\n"
    assert capfd.readouterr().err == line

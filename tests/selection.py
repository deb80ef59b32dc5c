"""Which tests run where not all do, and in which order:

- of the cases of a test that is marked `sampled(n)` one in `n`, always the same;
- of the tests that take long, which `long_tests.txt` lists, one part of ten, each day
  another, where all tests are asked for. `--part 2` names a part, `--part 0` is all.

With `EVERY_CASE` all of them run. What takes long is written down anew by

    scripts/test --part 0 --durations=0 --durations-min=0.5 | python -m tests.selection

A test that is not listed always runs.
"""

import datetime
import math
import os
import pathlib
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import pytest

LISTED = pathlib.Path(__file__).with_name("long_tests.txt")
PARTS = 10
LONG = 1.0  # Seconds.

# Files of few tests that take long: begun last, they would be the tail of a run.
LONGEST = [
    "programs/test_programs.py",
    "engines/test_ray_train.py",
    "engines/test_ray_servers.py",
    "engines/test_slurm.py",
    "engines/test_mpi.py",
    "certainty/test_deterministic.py",
    "parameter_server/test_kill_matrix.py",
    "checkpoint/test_killed.py",
    "checkpoint/test_preemption.py",
    "processes/test_launch.py",
    "processes/test_liveness.py",
    "compat/test_keras_suites.py",
    "exactness/test_peers.py",
    "exactness/test_property.py",
    "exactness/test_saving.py",
    "exactness/test_edges.py",
    "dry_run/test_dry_run.py",
    "batch_size/test_find_batch_size.py",
    "checkpoint/test_backup.py",
    "test_ragged_run.py",
    "test_interruptions.py",
    "test_tutorials.py",
    "test_docs.py",
]


def part_of_today(config: pytest.Config) -> int:
    """Which part of the long tests runs; 0 for all, as where some are asked for."""
    some = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf"))
    if some or config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    if os.environ.get("EVERY_CASE"):
        return 0
    return datetime.date.today().toordinal() % PARTS + 1


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The longest files first."""
    here = pathlib.Path(__file__).parent
    order = {here / name: place for place, name in enumerate(LONGEST)}
    return sorted(items, key=lambda item: order.get(item.path, len(order)))


def left_out(items: Sequence[pytest.Item], part: int) -> list[pytest.Item]:
    """Those that do not run."""
    if os.environ.get("EVERY_CASE"):
        return []
    unsampled = set(items).difference(_in_samples(items))
    names = [item.nodeid for item in items if item not in unsampled]
    parts = dealt(names, listed()) if part else {}
    return [
        item
        for item in items
        if item in unsampled or parts.get(item.nodeid, part) != part
    ]


def _in_samples(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
        else:
            yield item
    for (_, n), of_one_test in cases.items():
        yield from sample(of_one_test, math.ceil(len(of_one_test) / n))


def sample(cases: list[pytest.Item], number: int) -> list[pytest.Item]:
    """So many of the cases, chosen so that as many as possible of the values of each
    parameter occur: one after the other, that which adds the most values to those that
    have been chosen.
    """
    values = {case: _values_of(case) for case in cases}
    left = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    seen, chosen = set(), []
    for _ in range(number):
        best = max(left, key=lambda case: len(values[case] - seen))
        left.remove(best)
        chosen.append(best)
        seen |= values[best]
    return chosen


def _values_of(case: pytest.Item) -> set[tuple[str, Hashable]]:
    """Each parameter of a case, with its value, or with what tells it from others."""
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    return {(name, _told_apart(value)) for name, value in parameters.items()}


def _told_apart(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def dealt(names: Iterable[str], seconds: Mapping[str, float]) -> dict[str, int]:
    """The part of each of the tests that take long: each case by itself, or a file as a
    whole where it is listed as one. The longest are dealt first, each to the part that
    has the least.
    """
    lengths = {}
    units = {}
    for name in names:
        file, test = name.partition("::")[0], name.partition("[")[0]
        if file in seconds:
            units[name], lengths[file] = file, seconds[file]
        elif test in seconds:
            units[name], lengths[name] = name, seconds[test]
    totals = dict.fromkeys(range(1, PARTS + 1), 0.0)
    parts = {}
    for unit in sorted(lengths, key=lambda unit: (-lengths[unit], unit)):
        part = min(totals, key=lambda part: totals[part])
        totals[part] += lengths[unit]
        parts[unit] = part
    return {name: parts[unit] for name, unit in units.items()}


def listed() -> dict[str, float]:
    """How many seconds each long test takes, a case of it, or a file as a whole."""
    lines = LISTED.read_text().splitlines()
    return {name: float(took) for took, name in (line.split(" ", 1) for line in lines)}


def long_ones(durations: Iterable[str]) -> dict[str, float]:
    """The tests that take long, from what pytest says of their durations. A file is
    listed as a whole if most of its time is what its tests begin with together.
    """
    form = re.compile(r"([\d.]+)s (call|setup|teardown) +((\S+?\.py)::.*)")
    found = [match.groups() for line in durations if (match := form.match(line))]
    cases, files, begun = defaultdict(float), defaultdict(float), defaultdict(float)
    for took, phase, name, file in found:
        if phase == "teardown":
            continue
        cases[name] += float(took)
        files[file] += float(took)
        if phase == "setup":
            begun[file] += float(took)
    whole = {
        file: round(took, 1)
        for file, took in files.items()
        if begun[file] >= LONG and begun[file] > took / 2
    }
    tests = defaultdict(list)
    for name, took in cases.items():
        if name.partition("::")[0] not in whole:
            tests[name.partition("[")[0]].append(took)
    means = {test: sum(times) / len(times) for test, times in tests.items()}
    return whole | {
        test: round(mean, 1) for test, mean in means.items() if mean >= LONG
    }


if __name__ == "__main__":
    found = sorted(long_ones(sys.stdin).items())
    LISTED.write_text("".join(f"{took} {name}\n" for name, took in found))

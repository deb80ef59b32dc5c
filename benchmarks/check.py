"""Whether all that the benchmarks are to reach is reached, in less than 20 minutes on
two cores: the targets of `step_time` (each workload, and `fit`, `evaluate`, `predict`
and `run`) and of `startup`. Fails if not.

    python -m benchmarks --check

It measures what has a target and its peers alone, in fewer rounds. What is missed is
measured once more before it counts, while there is time. It writes no results.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import comparisons
import report
import startup
import step_time
from contenders import Measured

ROUNDS, STARTUP_CALLS = 3, 10
LAST_REPEAT_MINUTES = 14


class Verdict(NamedTuple):
    """A target, and what else the machine did.

    Args:
        name: Of what was measured.
        load: Of the machine when that began, and when it ended.
    """

    name: str
    target: report.Target
    load: tuple[float, float]

    def __str__(self) -> str:
        word = "reached" if self.target.is_reached else "MISSED "
        before, after = self.load
        return (
            f"{word} {self.target.value:5.2f} ≤ {self.target.limit:5.2f}  {self.name}: "
            f"{self.target.title}  (load {before:.1f}–{after:.1f})"
        )


def verdicts(
    name: str, measured: Callable[[], list[report.Target]], until: float
) -> list[Verdict]:
    """Measures, and once more where something is missed.

    Args:
        measured: Gives the targets; a second time those of both measurements together.
        until: The time after which nothing is measured a second time.
    """
    before = os.getloadavg()[0]
    found = measured()
    missed = not all(target.is_reached for target in found)
    if missed and time.monotonic() < until:
        found = measured()
    own = [Verdict(name, each, (before, os.getloadavg()[0])) for each in found]
    print(*own, sep="\n", flush=True)
    return own


def of_steps(name: str) -> Callable[[], list[report.Target]]:
    """The targets of a comparison of `step_time`."""
    comparison = comparisons.judged_alone(comparisons.COMPARISONS[name])
    so_far: dict[str, Measured] = {}

    def measured() -> list[report.Target]:
        for each, new in step_time.measured_in(comparison, ROUNDS).items():
            old = so_far.get(each)
            rounds = (old.all_ms if old else []) + new.all_ms
            so_far[each] = new._replace(all_ms=rounds)
        return list(comparisons.targets(comparison, so_far))

    return measured


def of_startup() -> Callable[[], list[report.Target]]:
    """The targets of `startup`."""
    so_far: startup.Found = {}

    def measured() -> list[report.Target]:
        for name, new in startup.measured(1, calls=STARTUP_CALLS).items():
            own = so_far.setdefault(name, {kind: [] for kind in new})
            for kind, values in new.items():
                own[kind] += values
        return startup.targets(so_far)

    return measured


def check(names: list[str]) -> bool:
    """Measures, prints a line for each target, and says whether all are reached."""
    begun, load = time.monotonic(), os.getloadavg()[0]
    until = begun + 60 * LAST_REPEAT_MINUTES
    found: list[Verdict] = []
    for name in names:
        measured = of_startup() if name == "startup" else of_steps(name)
        found += verdicts(name, measured, until)
    missed = sum(not each.target.is_reached for each in found)
    minutes = (time.monotonic() - begun) / 60
    print("", *found, sep="\n")
    print(
        f"{len(found) - missed} of {len(found)} targets reached in {minutes:.0f} "
        f"minutes. {os.cpu_count()} cores; load before: {load:.1f}."
    )
    return not missed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*comparisons.COMPARISONS, "startup"]
    parser.add_argument("--only", choices=every, nargs="+", default=every)
    raise SystemExit(not check(parser.parse_args().only))


if __name__ == "__main__":
    main()

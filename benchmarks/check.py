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
LIMIT_MINUTES = 19  # What would take longer is not measured a second time.


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
            f"{word} {self.target.value:6.3f} ≤ {self.target.limit:6.3f}  {self.name}: "
            f"{self.target.title}  (load {before:.1f}–{after:.1f})"
        )


class Measurement:
    """What gives some targets; each time all its rounds together.

    Attributes:
        seconds: How long the last time took.
        verdicts: What was found.
        failure: Why nothing was, if a contender does not train.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._measured = of_startup() if name == "startup" else of_steps(name)
        self.seconds = 0.0
        self.verdicts: list[Verdict] = []
        self.failure = ""

    @property
    def is_missed(self) -> bool:
        reached = all(each.target.is_reached for each in self.verdicts)
        return bool(self.failure) or not reached

    def run(self) -> None:
        begun, before = time.monotonic(), os.getloadavg()[0]
        found: list[report.Target] = []
        try:
            found, self.failure = self._measured(), ""
        except RuntimeError as error:
            self.failure = f"FAILED  {self._name}: {error}"
            print(self.failure, flush=True)
        self.seconds = time.monotonic() - begun
        load = before, os.getloadavg()[0]
        self.verdicts = [Verdict(self._name, each, load) for each in found]
        print(*self.verdicts, sep="\n", flush=True)


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
    every = [Measurement(name) for name in names]
    for each in every:
        each.run()
    for each in every:
        after = time.monotonic() - begun + each.seconds
        if each.is_missed and after < 60 * LIMIT_MINUTES:
            each.run()
    found = [verdict for each in every for verdict in each.verdicts]
    failures = [each.failure for each in every if each.failure]
    missed = sum(not each.target.is_reached for each in found)
    minutes = (time.monotonic() - begun) / 60
    print("", *found, *failures, sep="\n")
    print(
        f"{len(found) - missed} of {len(found)} targets reached in {minutes:.0f} "
        f"minutes. {os.cpu_count()} cores; load before: {load:.1f}."
    )
    return not missed and not failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*comparisons.COMPARISONS, "startup"]
    parser.add_argument("--only", choices=every, nargs="+", default=every)
    raise SystemExit(not check(parser.parse_args().only))


if __name__ == "__main__":
    main()

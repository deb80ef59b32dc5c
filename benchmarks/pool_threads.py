"""Steps on several devices with several numbers of threads in XLA's pool."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import peers
import report
from comparisons import COMPARISONS
from contenders import POOLED, THREADS_PER_DEVICE, TITLES, Task, measure
from workloads import WORKLOADS

NAMES = ("mlp_fit", "cnn_fit", "deep_fit", "transformer_fit")
Found = dict[str, dict[str, dict[str, list[float]]]]
"""Milliseconds a step of each round, by comparison, threads and contender."""


def counts(text: str) -> tuple[int, ...]:
    """`"4,8,16"` as numbers."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each device needs a thread")
    return numbers


def measured(names: Sequence[str], numbers: Sequence[int], rounds: int) -> Found:
    """What those contenders of each comparison took whose devices share a pool."""
    found: Found = {}
    for name in names:
        comparison, found[name] = COMPARISONS[name], {}
        shared = [
            each
            for each in comparison.contenders
            if each in POOLED or each.startswith("ours")
            if peers.missing(each) is None
        ]
        for number in numbers:
            where = comparison.workload, comparison.devices, comparison.kind
            tasks = [Task(each, *where, number) for each in shared]
            times = measure(tasks, rounds)
            found[name][str(number)] = {each: times[each].all_ms for each in shared}
    return found


def described(found: Found) -> str:
    """A table: the numbers of threads are its columns."""
    numbers = list(next(iter(found.values())))
    rows = []
    for name, by_number in found.items():
        comparison = COMPARISONS[name]
        title = f"{WORKLOADS[comparison.workload].title}, {comparison.devices} devices"
        for contender in next(iter(by_number.values())):
            cells = []
            for times in by_number.values():
                took = statistics.median(times[contender])
                base = statistics.median(next(iter(times.values())))
                cells.append(f"{took:.2f}, {took / base:.2f} ×")
            rows.append([title, TITLES[contender], *cells])
            title = ""
    header = ["", "", *(f"{number} threads" for number in numbers)]
    table = report.table(header, rows, "ll" + "r" * len(numbers))
    return (
        f"### Threads of XLA's pool for each device\n\n{table}\n\nMilliseconds a step "
        "of `fit`, and the ratio to the first contender with as many threads. Without "
        f"`--threads-per-device` there are {THREADS_PER_DEVICE}, as "
        "`kd.config.set_cpu_devices` has it."
    )

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
    """Two tables, whose columns are the numbers of threads: the times, and what was to
    be reached.
    """
    each_numbers = {int(number) for by_number in found.values() for number in by_number}
    numbers = [str(number) for number in sorted(each_numbers)]
    times, ratios = list[list[str]](), list[list[str]]()
    for name in filter(found.__contains__, COMPARISONS):
        comparison, by_number = COMPARISONS[name], found[name]
        workload = WORKLOADS[comparison.workload].title
        count = comparison.devices
        devices = "one device" if count == 1 else f"{count} devices"
        title = f"{workload}, `{comparison.kind}`, {devices}"
        each_time = [by_number.get(number, {}) for number in numbers]
        limits = [
            limit
            for limit in comparison.limits
            if all(each in next(iter(by_number.values())) for each in limit[:2])
        ]
        ratios += [
            [
                "" if i else title,
                f"{TITLES[ours]} / {TITLES[other]}",
                f"{limit:.2f}",
                *(_compared(each, ours, other, limit) for each in each_time),
            ]
            for i, (ours, other, limit) in enumerate(limits)
        ]
        for contender in next(iter(by_number.values())):
            cells = [_time(each, contender) for each in each_time]
            times.append([title, TITLES[contender], *cells])
            title = ""
    threads, align = [f"{number} threads" for number in numbers], "r" * len(numbers)
    return (
        "### Threads of XLA's pool for each device\n\n"
        f"{report.table(['', '', *threads], times, f'll{align}')}\n\n"
        "Milliseconds a step. Without `--threads-per-device` there are "
        f"{THREADS_PER_DEVICE}, as `kd.config.set_cpu_devices` has it.\n\n"
        f"{report.table(['', '', 'at most', *threads], ratios, f'llr{align}')}\n\n"
        "What is missed is in bold. Each number of threads is a run of its own."
    )


def _time(times: dict[str, list[float]], contender: str) -> str:
    return f"{statistics.median(times[contender]):.2f}" if times else "–"


def _compared(
    times: dict[str, list[float]], ours: str, other: str, limit: float
) -> str:
    """The median of the rounds' own ratios."""
    if not times:
        return "–"
    both = zip(times[ours], times[other], strict=True)
    ratio = statistics.median(a / b for a, b in both)
    return f"{ratio:.2f}" if ratio <= limit else f"**{ratio:.2f}**"

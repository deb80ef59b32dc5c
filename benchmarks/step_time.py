"""Milliseconds a step: keras_distribute beside plain Keras, `DataParallel`,
`tf.distribute` and loops by hand.

    # Writes results/step_time.md, .json and .svg:
    python benchmarks/step_time.py
    # Quicker and rougher:
    python benchmarks/step_time.py --rounds 3
    # One comparison, which takes its place among the others' results:
    python benchmarks/step_time.py --only mlp_fit
    # Writes nothing:
    python benchmarks/step_time.py --only mlp_fit --dry
    # With as many threads in XLA's pool for each device, in tables of their own:
    python benchmarks/step_time.py --threads-per-device 4,8,16

The devices are virtual CPU devices that share the machine's cores: this measures what
distribution costs, not what more hardware would gain. Read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import peers
import pool_threads
import report
from comparisons import COMPARISONS, Comparison, targets
from contenders import TITLES, Measured, Task, measure
from workloads import WORKLOADS

NOTE = (
    "Milliseconds a step: the median of several rounds (fastest–slowest); a ratio is "
    "the median of the rounds' own, in the table to the first row. The "
    "contenders of a table are processes of the same run and take turns, in another "
    "order each round. The "
    "processors' milliseconds are what all threads of a process work for a step, the "
    "median of the rounds; with two cores they are up to twice those of the clock. "
    "The first round compiles. The devices are "
    "virtual CPU devices on the same cores. In BatchNormalization, `DataParallel` uses "
    "statistics of the whole batch, "
    "keras_distribute, `tf.distribute` and the loops by hand those of each replica's "
    "rows. `ModelParallel` divides batches by two and weights by two. PyTorch, for "
    "orientation, has a process of one thread for each device; its memory is that of "
    "the first."
)


def described(
    comparison: Comparison, found: dict[str, Measured], load: float | None = None
) -> str:
    """A table of one comparison, and what of it was to be reached.

    Args:
        load: Of the machine before, where it is known.
    """
    base = found[comparison.contenders[0]]
    rows = []
    for contender in filter(found.__contains__, comparison.contenders):
        each = found[contender]
        low, high = min(each.all_ms), max(each.all_ms)
        one = contender in ("plain", "tf_one")
        time = f"{each.median:.2f} ({low:.2f}–{high:.2f})"
        own = each.processor_ms
        processors = "–" if own is None else f"{own:.2f}"
        first, peak = f"{each.first_ms / 1000:.1f} s", f"{each.peak_mib:.0f} MiB"
        rows.append(
            [
                TITLES[contender],
                str(1 if one else comparison.devices),
                time,
                f"{each.over(base):.2f} ×",
                processors,
                first,
                peak,
            ]
        )
    header = [
        "",
        "devices",
        "ms a step",
        "ratio",
        "processors' ms",
        "first round",
        "peak memory",
    ]
    workload = WORKLOADS[comparison.workload]
    kind = (
        "a `fit` of one batch" if comparison.kind == "call" else f"`{comparison.kind}`"
    )
    batch, devices = f"{workload.batch} rows", f"{comparison.devices} device(s)"
    title = f"### {workload.title}, {batch}, {kind}, {devices}"
    lines = [title, "", report.table(header, rows, "lrrrrrr"), ""]
    lines += [f"- {target}" for target in targets(comparison, found)]
    if "by_hand_again" in found:
        ratio = found["by_hand_again"].over(found["by_hand"])
        lines.append(f"- the loop by hand in another process / itself: {ratio:.2f}")
    lines += [
        f"- {TITLES[each]}: left out, {_why_not(each)}"
        for each in comparison.contenders
        if each not in found
    ]
    if load is not None:
        lines.append(f"- load of the machine before: {load:.1f}")
    return "\n".join(lines)


def _why_not(contender: str) -> str:
    package = peers.missing(contender)
    return f"{package} is not installed" if package else "not measured in this run"


def measured_in(comparison: Comparison, rounds: int) -> dict[str, Measured]:
    """What each contender of a comparison took whose package is installed."""
    tasks = [
        Task(each, comparison.workload, comparison.devices, comparison.kind)
        for each in comparison.contenders
        if peers.missing(each) is None
    ]
    return measure(tasks, rounds)


def draw(found: dict[str, dict[str, Measured]]) -> None:
    """Writes results/step_time.svg: a row of bars for each comparison."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 * ((len(found) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(found) + 1) // 2, 2, squeeze=False).ravel()
    for axis, (name, each) in zip(axes, found.items(), strict=False):
        comparison = COMPARISONS[name]
        names = list(each)[::-1]
        colors = [
            "#3f51b5" if contender.startswith("ours") else "#b0b4c8"
            for contender in names
        ]
        bars = axis.barh(
            [TITLES[contender].replace("`", "") for contender in names],
            [each[n].median for n in names],
        )
        for bar, color in zip(bars, colors, strict=True):
            bar.set_color(color)
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axis.set_title(
            f"{WORKLOADS[comparison.workload].title}: {comparison.kind}, "
            f"{comparison.devices} device(s)",
            fontsize=9,
        )
        axis.tick_params(labelsize=7)
        axis.margins(x=0.12)
        axis.set_xlabel("ms a step", fontsize=7)
    for axis in axes[len(found) :]:
        axis.remove()
    figure.savefig(report.RESULTS / "step_time.svg", metadata={"Date": None})


def _facts() -> dict[str, Any]:
    """What results/step_time.json says."""
    path = report.RESULTS / "step_time.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def stored() -> dict[str, dict[str, Measured]]:
    """The comparisons in results/step_time.json."""
    facts = _facts()
    return {
        name: {contender: Measured(**each) for contender, each in facts[name].items()}
        for name in COMPARISONS
        if name in facts
    }


def write(
    every: dict[str, dict[str, Measured]],
    loads: dict[str, float] | None = None,
    threads: pool_threads.Found | None = None,
) -> None:
    """All comparisons, in their order, as text, numbers and picture.

    Args:
        loads: Of the machine before what was measured now.
        threads: What was found with several numbers of threads; by default what the
            results already say of it.
    """
    draw(every)
    facts: dict[str, Any] = {
        name: {each: found._asdict() for each, found in every[name].items()}
        for name in every
    }
    told = _facts()
    loads = told.get("loads", {}) | (loads or {})
    facts["loads"] = {name: loads[name] for name in every if name in loads}
    texts = [
        described(COMPARISONS[name], every[name], loads.get(name)) for name in every
    ]
    threads = told.get("threads") if threads is None else threads
    if threads:
        facts["threads"] = threads
        texts.append(pool_threads.described(threads))
    report.write("step_time", facts, "\n\n".join([*texts, NOTE]), quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=COMPARISONS, nargs="+", default=[])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--threads-per-device", type=pool_threads.counts, default=())
    arguments = parser.parse_args()
    if arguments.threads_per_device:
        names = arguments.only or pool_threads.NAMES
        counts = arguments.threads_per_device
        threads = pool_threads.measured(names, counts, arguments.rounds)
        print(pool_threads.described(threads))
        if not arguments.dry:
            write(stored(), threads=_facts().get("threads", {}) | threads)
        return
    every = stored() if arguments.only else {}
    loads: dict[str, float] = {}
    for name in arguments.only or COMPARISONS:
        comparison = COMPARISONS[name]
        loads[name] = round(os.getloadavg()[0], 1)
        found = measured_in(comparison, arguments.rounds)
        print(described(comparison, found, loads[name]), end="\n\n", flush=True)
        every = {
            each: found if each == name else every[each]
            for each in COMPARISONS
            if each == name or each in every
        }
        if not arguments.dry:  # What has been measured is kept, should the rest fail.
            write(every, loads)


if __name__ == "__main__":
    main()

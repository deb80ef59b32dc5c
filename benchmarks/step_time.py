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
    # Whether all that is to be reached is reached, in three rounds; fails if not:
    python benchmarks/step_time.py --check

The devices are virtual CPU devices that share the machine's cores: this measures what
distribution costs, not what more hardware would gain. Read the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

import report
from contenders import TITLES, Measured, Task, measure
from workloads import VARIANTS, WORKLOADS


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Contenders that do the same work in the same run.

    Args:
        workload: Which.
        devices: How many; those that use one device are named so.
        kind: What is measured.
        contenders: Their names.
        limits: What ours must reach: our contender, the other one, and the ratio.
        scaling: Ours must also lose no more to plain Keras on one device than
            `tf.distribute` does to its own.
    """

    workload: str
    devices: int
    kind: str
    contenders: tuple[str, ...]
    limits: tuple[tuple[str, str, float], ...] = ()
    scaling: bool = False


ALL = (
    "plain",
    "data_parallel",
    "tf_mirrored",
    "by_hand",
    "by_hand_scan",
    "ours",
    "ours_fused",
)
COMPARISONS = {
    "mlp_fit": Comparison(
        "mlp",
        4,
        "fit",
        ALL,
        (
            ("ours", "by_hand", 0.97),
            ("ours", "data_parallel", 0.75),
            ("ours_fused", "by_hand_scan", 1.00),
            ("ours", "tf_mirrored", 0.20),
        ),
    ),
    "cnn_fit": Comparison(
        "cnn",
        4,
        "fit",
        (
            "plain",
            "data_parallel",
            "tf_one",
            "tf_mirrored",
            "by_hand",
            "ours",
            "ours_fused",
        ),
        (
            ("ours", "by_hand", 0.97),
            ("ours", "data_parallel", 0.92),
            ("ours", "tf_mirrored", 0.60),
            ("ours_fused", "ours", 1.02),
        ),
        scaling=True,
    ),
    "deep_fit": Comparison(
        "deep",
        8,
        "fit",
        ("plain", "data_parallel", "by_hand", "by_hand_flat", "ours", "ours_fused"),
        (("ours", "data_parallel", 0.16), ("ours", "by_hand_flat", 0.90)),
    ),
    "transformer_fit": Comparison(
        "transformer",
        4,
        "fit",
        ("plain", "data_parallel", "by_hand", "ours", "ours_fused"),
        (("ours", "by_hand", 0.97),),
    ),
    **{
        f"{name}_{variant}_fit": Comparison(
            f"{name}_{variant}",
            4,
            "fit",
            ("plain", "data_parallel", "by_hand", "ours"),
            (("ours", "by_hand", 1.03),),
        )
        for name in ("mlp", "cnn", "transformer")
        for variant in VARIANTS
    },
    **{
        f"{name}_one_device": Comparison(
            name, 1, "fit", ("plain", "ours"), (("ours", "plain", 0.98),)
        )
        for name in ("mlp", "cnn", "deep", "transformer")
    },
    **{
        f"mlp_{kind}": Comparison(
            "mlp",
            4,
            kind,
            ("plain", "data_parallel", "by_hand", "ours"),
            (("ours", "by_hand", 1.00),),
        )
        for kind in ("evaluate", "predict")
    },
    "mlp_call": Comparison(
        "mlp",
        4,
        "call",
        ("plain", "data_parallel", "tf_mirrored", "ours"),
        (("ours", "tf_mirrored", 0.03), ("ours", "plain", 1.30)),
    ),
    "mlp_run": Comparison(
        "mlp", 4, "run", ("by_hand", "ours"), (("ours", "by_hand", 1.00),)
    ),
    "cnn_run": Comparison(
        "cnn", 4, "run", ("by_hand", "ours"), (("ours", "by_hand", 1.00),)
    ),
    **{
        f"mlp_{devices}_devices": Comparison(
            "mlp",
            devices,
            "fit",
            ("plain", "data_parallel", "by_hand", "ours"),
            (("ours", "by_hand", 1.05),),
        )
        for devices in (2, 8)
    },
}


CHECK_ROUNDS = 3
PEAK_LIMIT = 1.05  # Of the memory of a `fit`, beside the loop by hand.
NOTE = (
    "Milliseconds a step: the median of several rounds (fastest–slowest); the ratio is "
    "to the first row. The "
    "contenders of a table are processes of the same run and take turns. The first "
    "round compiles. The devices are "
    "virtual CPU devices on the same cores. In BatchNormalization, `DataParallel` uses "
    "statistics of the whole batch, "
    "keras_distribute, `tf.distribute` and the loops by hand those of each replica's "
    "rows."
)


def _judged(ratio: float, limit: float) -> str:
    verdict = "reached" if ratio <= limit else "**missed**"
    return f"{ratio:.2f}, to be at most {limit:.2f}: {verdict}"


def judged(
    comparison: Comparison, found: dict[str, Measured]
) -> Iterator[tuple[str, bool]]:
    """What was to be reached, in words, and whether it is."""
    for ours, other, limit in comparison.limits:
        ratio = found[ours].median / found[other].median
        yield (
            f"{TITLES[ours]} / {TITLES[other]}: {_judged(ratio, limit)}",
            (ratio <= limit),
        )


def described(name: str, comparison: Comparison, found: dict[str, Measured]) -> str:
    """A table of one comparison, and what of it was to be reached."""
    base = found[comparison.contenders[0]].median
    rows = []
    for contender in comparison.contenders:
        each = found[contender]
        low, high = min(each.all_ms), max(each.all_ms)
        one = contender in ("plain", "tf_one")
        time = f"{each.median:.2f} ({low:.2f}–{high:.2f})"
        first, peak = f"{each.first_ms / 1000:.1f} s", f"{each.peak_mib:.0f} MiB"
        rows.append(
            [
                TITLES[contender],
                str(1 if one else comparison.devices),
                time,
                f"{each.median / base:.2f} ×",
                first,
                peak,
            ]
        )
    header = ["", "devices", "ms a step", "ratio", "first round", "peak memory"]
    workload = WORKLOADS[comparison.workload]
    kind = (
        "a `fit` of one batch" if comparison.kind == "call" else f"`{comparison.kind}`"
    )
    batch, devices = f"{workload.batch} rows", f"{comparison.devices} device(s)"
    title = f"### {workload.title}, {batch}, {kind}, {devices}"
    lines = [title, "", report.table(header, rows, "lrrrrr"), ""]
    lines += [f"- {text}" for text, _ in judged(comparison, found)]
    if comparison.scaling:
        theirs = found["tf_mirrored"].median / found["tf_one"].median
        ratio = found["ours"].median / found["plain"].median
        lines.append(
            f"- {TITLES['ours']} / {TITLES['plain']}, beside TensorFlow's ratio: "
            f"{_judged(ratio, theirs)}"
        )
    if comparison.kind == "fit" and {"ours", "by_hand"} <= found.keys():
        ratio = found["ours"].peak_mib / found["by_hand"].peak_mib
        lines.append(
            f"- peak memory, {TITLES['ours']} / {TITLES['by_hand']}: "
            f"{_judged(ratio, PEAK_LIMIT)}"
        )
    return "\n".join(lines)


def missed(name: str, comparison: Comparison, found: dict[str, Measured]) -> list[str]:
    """What of a comparison was to be reached, and is not."""
    return [
        f"{name}: {text}"
        for text, is_reached in judged(comparison, found)
        if not is_reached
    ]


def check() -> None:
    """Measures what has a limit, and its peers alone.

    Raises:
        SystemExit: Where a limit is not reached.
    """
    found: list[str] = []
    for name, comparison in COMPARISONS.items():
        names = {each for limit in comparison.limits for each in limit[:2]}
        lean = dataclasses.replace(
            comparison,
            contenders=tuple(c for c in comparison.contenders if c in names),
            scaling=False,
        )
        measured = measured_in(lean, CHECK_ROUNDS)
        print(described(name, lean, measured), end="\n\n", flush=True)
        found += missed(name, lean, measured)
    print("\n".join(found) or "All limits are reached.")
    raise SystemExit(bool(found))


def measured_in(comparison: Comparison, rounds: int) -> dict[str, Measured]:
    """What each contender of a comparison took."""
    tasks = [
        Task(each, comparison.workload, comparison.devices, comparison.kind)
        for each in comparison.contenders
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


def stored() -> dict[str, dict[str, Measured]]:
    """The comparisons in results/step_time.json."""
    path = report.RESULTS / "step_time.json"
    facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        name: {contender: Measured(**each) for contender, each in facts[name].items()}
        for name in COMPARISONS
        if name in facts
    }


def write(every: dict[str, dict[str, Measured]]) -> None:
    """All comparisons, in their order, as text, numbers and picture."""
    draw(every)
    facts = {
        name: {each: found._asdict() for each, found in every[name].items()}
        for name in every
    }
    texts = [described(name, COMPARISONS[name], every[name]) for name in every]
    report.write("step_time", facts, "\n\n".join([*texts, NOTE]), quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=COMPARISONS, nargs="+", default=[])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        check()
    every = stored() if arguments.only else {}
    for name in arguments.only or COMPARISONS:
        comparison = COMPARISONS[name]
        found = measured_in(comparison, arguments.rounds)
        print(described(name, comparison, found), end="\n\n", flush=True)
        every = {
            each: found if each == name else every[each]
            for each in COMPARISONS
            if each == name or each in every
        }
        if not arguments.dry:  # What has been measured is kept, should the rest fail.
            write(every)


if __name__ == "__main__":
    main()

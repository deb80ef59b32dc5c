"""A report as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_distribute.errors import BackendError

if TYPE_CHECKING:
    from keras_distribute.dry_run.report import DryRunReport

_COLORS = ("#4c72b0", "#55a868", "#c44e52", "#8172b3", "#ccb974", "#64b5cd")
_GIB = 2**30


def draw(report: DryRunReport, path: str | Path) -> None:
    """Memory of a device; where there is an estimate, the parts of a step's time and
    its scaling, too.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "Pictures are drawn by matplotlib, which is not installed.",
            received=f"plot({str(path)!r}).",
            fix="pip install matplotlib, or print(report).",
        ) from error
    count = 1 if report.estimate is None else 3
    figure = Figure(figsize=(4.2 * count, 3.6), layout="constrained")
    axes: list[Any] = list(figure.subplots(1, count, squeeze=False)[0])
    _memory(report, axes[0])
    if report.estimate is not None:
        _time(report, axes[1])
        _scaling(report, axes[2])
    figure.suptitle(
        f"Batch {report.batch} on {report.topology}: compiled, not run", fontsize=11
    )
    figure.savefig(path)


def _memory(report: DryRunReport, axes: Any) -> None:
    memory = report.memory
    if memory is None:
        parts = {"needed": report.needed_bytes}
    else:
        state = (
            memory.parameters + memory.optimizer + memory.other_state + memory.metrics
        )
        parts = {
            "parameters": memory.parameters,
            "optimizer": memory.optimizer,
            "batch, other, padding": memory.arguments
            - state
            + memory.other_state
            + memory.metrics,
            "activations, temporary": memory.temporary,
        }
    bottom = 0.0
    for (name, value), color in zip(parts.items(), _COLORS, strict=False):
        axes.bar([0], [value / _GIB], bottom=bottom, color=color, label=name, width=0.5)
        bottom += value / _GIB
    if report.limit_bytes is not None:
        limit = report.limit_bytes / _GIB
        axes.axhline(
            limit, color="black", linestyle="--", label=f"available: {limit:.1f} GiB"
        )
    axes.set_xlim(-0.6, 0.6)
    axes.set_xticks([])
    axes.set_ylabel("GiB of each device")
    axes.legend(fontsize=7, frameon=False)


def _time(report: DryRunReport, axes: Any) -> None:
    own = report.estimate
    assert own is not None
    parts = {
        "compute": own.compute,
        "memory": own.memory,
        "communication": own.communication,
        "without\noverlap": own.in_turn,
    }
    axes.bar(
        list(parts),
        [value * 1e3 for value in parts.values()],
        color=_COLORS[: len(parts)],
    )
    axes.set_ylabel("ms a step, ESTIMATED from peak rates")
    axes.tick_params(axis="x", labelsize=8)


def _scaling(report: DryRunReport, axes: Any) -> None:
    points = report.scaling()
    axes.plot(
        [p.num_devices for p in points],
        [100 * p.efficiency for p in points],
        marker="o",
        color=_COLORS[0],
    )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"devices, {-(-report.batch // report.num_devices)} rows on each")
    axes.set_ylabel("% of one replica's rate, ESTIMATED")

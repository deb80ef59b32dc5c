"""The memory, estimated time and estimated scaling of a dry run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_distribute import checks
from keras_distribute.dry_run.estimate import Estimate, ScalingPoint

_COLORS = ("#4c72b0", "#55a868", "#c44e52", "#8172b3", "#ccb974", "#64b5cd")
_GIB = 2**30


def draw(
    path: str | Path,
    title: str,
    memory: Mapping[str, int],
    limit: int | None,
    estimate: Estimate | None,
    points: Sequence[ScalingPoint],
) -> None:
    """Draws the bytes of a device by what takes them, and how many it has; where there
    is an estimate, the parts of a step's time and its scaling, too.
    """
    what = "Pictures are drawn by matplotlib, which is not installed."
    fix = "pip install matplotlib, or print(report)."
    drawing = checks.imported("matplotlib.figure", what, fix)
    count = 1 if estimate is None else 3
    figure = drawing.Figure(figsize=(4.2 * count, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, count, squeeze=False)[0]
    _memory(axes[0], memory, limit)
    if estimate is not None:
        _time(axes[1], estimate)
        _scaling(axes[2], points)
    figure.savefig(path)


def _memory(axes: Any, parts: Mapping[str, int], limit: int | None) -> None:
    bottom = 0.0
    for (name, value), color in zip(parts.items(), _COLORS, strict=False):
        axes.bar([0], [value / _GIB], bottom=bottom, color=color, label=name, width=0.5)
        bottom += value / _GIB
    if limit is not None:
        label = f"available: {limit / _GIB:.1f} GiB"
        axes.axhline(limit / _GIB, color="black", linestyle="--", label=label)
    axes.set_xlim(-0.6, 0.6)
    axes.set_xticks([])
    axes.set_ylabel("GiB of each device")
    axes.legend(fontsize=7, frameon=False)


def _time(axes: Any, estimate: Estimate) -> None:
    parts = {
        "compute": estimate.compute,
        "memory": estimate.memory,
        "communication": estimate.communication,
        "without\noverlap": estimate.in_turn,
    }
    milliseconds = [seconds * 1e3 for seconds in parts.values()]
    axes.bar(list(parts), milliseconds, color=_COLORS[: len(parts)])
    axes.set_ylabel("ms a step, ESTIMATED from peak rates")
    axes.tick_params(axis="x", labelsize=8)


def _scaling(axes: Any, points: Sequence[ScalingPoint]) -> None:
    devices = [point.num_devices for point in points]
    percent = [100 * point.efficiency for point in points]
    axes.plot(devices, percent, marker="o", color=_COLORS[0])
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"devices, {points[0].batch // devices[0]} rows on each")
    axes.set_ylabel("% of one replica's rate, ESTIMATED")

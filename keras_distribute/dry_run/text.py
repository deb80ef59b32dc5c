"""A report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_distribute.dry_run.collectives import Collective

if TYPE_CHECKING:
    from keras_distribute.dry_run.report import DryRunReport

_SHOWN = 8
_WIDTH = 24


def table(report: DryRunReport) -> str:
    """All of it, in lines of a name and a value."""
    parts = [_heading(report), _memory(report)]
    if report.memory is not None:
        parts += [_work(report), _collectives(report), _estimate(report)]
    return "\n".join(line for part in parts for line in part)


def size(num_bytes: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return (
                f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _heading(report: DryRunReport) -> list[str]:
    hosts = f" on {report.num_processes} hosts" if report.num_processes > 1 else ""
    devices = (
        f"{report.num_devices} device{'s' if report.num_devices > 1 else ''}{hosts}"
    )
    replicas = f", {report.num_logical} to a replica" if report.num_logical > 1 else ""
    steps = f", {report.num_steps} steps a call" if report.num_steps > 1 else ""
    return [
        f"Dry run: batch {report.batch} on {report.topology}, "
        f"{devices}{replicas}{steps}; compiled, not run"
    ]


def _memory(report: DryRunReport) -> list[str]:
    lines = ["", "memory of each device"]
    if (memory := report.memory) is not None:
        lines += [
            _line("parameters", size(memory.parameters)),
            _line("optimizer", size(memory.optimizer)),
            _line("other state, metrics", size(memory.other_state + memory.metrics)),
            _line("batch", size(memory.batch)),
            _line(
                "all arguments",
                f"{size(memory.arguments)}, of which {size(memory.aliased)} are "
                "updated in place",
            ),
            _line("activations, temporary", size(memory.temporary)),
            _line("program", size(memory.code)),
        ]
    lines.append(
        _line(
            "peak" if report.memory is not None else "needed", size(report.needed_bytes)
        )
    )
    if report.limit_bytes is None:
        lines.append(_line("available", "not known"))
    else:
        apart = size(abs(report.limit_bytes - report.needed_bytes))
        verdict = (
            f"fits, {apart} to spare"
            if report.fits
            else f"does NOT fit, {apart} too much"
        )
        lines.append(_line("available", f"{size(report.limit_bytes)}: {verdict}"))
    if (largest := report.largest_batch) is not None:
        beyond = (
            f"{largest.too_large} does not fit"
            if largest.too_large
            else "no larger one was tried"
        )
        lines.append(
            _line(
                "largest batch",
                f"{largest.rows} ({beyond}; {largest.compilations} compilations)",
            )
        )
    return lines


def _work(report: DryRunReport) -> list[str]:
    flops = ", ".join(
        f"{count:.3g} in {dtype}" for dtype, count in report.flops.items()
    )
    lines = ["", "one step on each device", _line("FLOPs", flops or "0")]
    if report.compiler_flops is not None:
        lines.append(_line("  the compiler's count", f"{report.compiler_flops:.3g}"))
    if report.bytes_moved is not None:
        lines.append(_line("bytes moved", size(report.bytes_moved)))
    if report.unknown_loops:
        lines.append(
            _line(
                "loops without a length",
                f"{report.unknown_loops}, whose iterations count once",
            )
        )
    return lines


def _collectives(report: DryRunReport) -> list[str]:
    counts: dict[str, int] = {}
    for each in report.collectives:
        counts[each.kind] = counts.get(each.kind, 0) + 1
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
    lines = ["", f"collectives for {report.num_gradients} gradients: {found}"]
    largest = sorted(report.collectives, key=lambda each: -each.num_bytes * each.times)
    lines += [_one(each) for each in largest[:_SHOWN]]
    if len(largest) > _SHOWN:
        rest = sum(each.num_bytes * each.times for each in largest[_SHOWN:])
        lines.append(f"  and {len(largest) - _SHOWN} more, {size(rest)}")
    return lines


def _one(each: Collective) -> str:
    times = f" {each.times} times" if each.times > 1 else ""
    arrays = f"{each.num_arrays} array{'s' if each.num_arrays > 1 else ''} of {'+'.join(each.dtypes)}"
    kind, of = (
        ("pair", "")
        if each.kind == "collective-permute"
        else ("group", f" of {each.group_size}")
    )
    groups = f"{each.num_groups} {kind}{'s' if each.num_groups > 1 else ''}{of}"
    return f"  {each.kind}{times}: {size(each.num_bytes)}, {arrays}, {groups}; waits for {each.waits_for}"


def _estimate(report: DryRunReport) -> list[str]:
    if (own := report.estimate) is None:
        return []

    def time(seconds: float) -> str:
        return f"{seconds * 1e3:.3g} ms"

    return [
        "",
        "ESTIMATE of a step, from published peak rates; not a measurement",
        _line("compute", time(own.compute)),
        _line("memory", time(own.memory)),
        _line("communication", time(own.communication)),
        _line("at least", f"{time(own.at_least)}, bound by {own.bound_by}"),
        _line(
            "without overlap",
            f"{time(own.in_turn)}, {_rounded(report.batch / own.in_turn)} rows a second",
        ),
        _line("rates", own.source),
    ]


def _rounded(number: float) -> str:
    """Three digits of a number, which is an estimate."""
    return f"{float(f'{number:.3g}'):,.0f}"


def _line(name: str, value: str) -> str:
    return f"  {name:<{_WIDTH}}{value}"

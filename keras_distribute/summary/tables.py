"""What a summary says, as tables of words: the same for text, terminals and notebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_distribute.summary.facts import FOREIGN, GROUPS, DeviceFacts, VariableFacts

GROUP_WORDS = {
    "weights": "weights",
    "state": "layer state",
    "optimizer": "optimizer",
    "metrics": "metrics",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Words in rows and columns.

    Args:
        title: What it is about.
        header: The names of the columns.
        rows: The cells; numbers are words, too.
        right: The columns whose cells stand on the right.
        total: Whether the last row is the sum of the others.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int]
    total: bool = False


def bytes_in_words(count: int) -> str:
    """`"17 B"`, `"1.5 KiB"`: in units of 1024 (IEC 80000-13), with at least two digits
    that count.
    """
    if count < 1024:
        return f"{count} B"
    value = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if value < 1023.95:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def spread_in_words(counts: Sequence[int]) -> str:
    """The bytes on the devices: one number if they agree, else the least and the most."""
    least, most = min(counts), max(counts)
    return (
        bytes_in_words(least)
        if least == most
        else f"{bytes_in_words(least)} to {bytes_in_words(most)}"
    )


def rows_in_words(rows: Sequence[int]) -> str:
    """How the rows of a batch are shared: `"32 on each"`, or `"18, 18, 18, 16"`."""
    return f"{rows[0]} on each" if len(set(rows)) == 1 else ", ".join(map(str, rows))


def of_devices(devices: Sequence[DeviceFacts], rows: Sequence[int]) -> Table:
    """One line for each device."""
    processes = len({device.process for device in devices}) > 1
    memory = any(device.bytes_in_use is not None for device in devices)
    header = ["replica", "device", "model"]
    header += (
        ["process"] * processes
        + ["memory in use"] * memory
        + ["rows of the batch"] * bool(rows)
    )
    lines: list[tuple[str, ...]] = []
    for device in devices:
        line = [str(device.replica), device.name, device.model]
        line += [str(device.process)] * processes + [_memory(device)] * memory
        lines.append((*line, str(rows[device.replica])) if rows else tuple(line))
    right = frozenset({0, *range(3, len(header))})
    return Table("Replicas", tuple(header), tuple(lines), right)


def of_groups(variables: Sequence[VariableFacts]) -> Table:
    """One line for each group and kind of variable, and their sum."""
    lines = [
        _group_line(GROUP_WORDS[group], kind, chosen)
        for group, kind, chosen in grouped(variables)
    ]
    lines.append(_group_line("together", "", variables))
    header = ("", "kind", "variables", "their values", "on each device")
    return Table("Variables", header, tuple(lines), frozenset({2, 3, 4}), total=True)


def grouped(
    variables: Sequence[VariableFacts],
) -> list[tuple[str, str, list[VariableFacts]]]:
    """The variables of each group and kind that occurs, in order."""
    keys = dict.fromkeys((variable.group, variable.kind) for variable in variables)
    ordered = sorted(keys, key=lambda key: (GROUPS.index(key[0]), key[1] == FOREIGN))
    return [
        (g, k, [v for v in variables if (v.group, v.kind) == (g, k)])
        for g, k in ordered
    ]


def of_each(variables: Sequence[VariableFacts], max_variables: int | None) -> Table:
    """One line for each variable; the largest ones, if they are too many."""
    chosen = list(variables)
    title = "Each variable"
    if max_variables is not None and len(chosen) > max_variables:
        title = f"The {max_variables} largest of {len(chosen)} variables"
        largest = sorted(range(len(chosen)), key=lambda i: -chosen[i].num_bytes)[
            :max_variables
        ]
        chosen = [chosen[i] for i in sorted(largest)]
    lines = tuple(
        (v.path, str(v.shape), v.dtype, v.kind, spread_in_words(v.bytes_on))
        for v in chosen
    )
    return Table(
        title,
        ("variable", "shape", "dtype", "kind", "on each device"),
        lines,
        frozenset({4}),
    )


def _group_line(
    name: str, kind: str, variables: Sequence[VariableFacts]
) -> tuple[str, ...]:
    whole = bytes_in_words(sum(variable.num_bytes for variable in variables))
    each = spread_in_words(totals(variables))
    return name, kind, str(len(variables)), whole, each


def totals(variables: Sequence[VariableFacts]) -> tuple[int, ...]:
    """The bytes of all of them on each device."""
    return tuple(
        map(sum, zip(*(variable.bytes_on for variable in variables), strict=True))
    )


def _memory(device: DeviceFacts) -> str:
    if device.bytes_in_use is None:
        return ""
    limit = (
        ""
        if device.bytes_limit is None
        else f" of {bytes_in_words(device.bytes_limit)}"
    )
    return bytes_in_words(device.bytes_in_use) + limit

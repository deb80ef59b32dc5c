"""What a summary says, as tables of words, for text, terminals and notebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from keras_distribute.checks import bytes_in_words as bytes_in_words
from keras_distribute.summary.facts import FOREIGN, GROUPS, DeviceFacts, VariableFacts


@dataclasses.dataclass(frozen=True)
class Table:
    """Words in rows and columns.

    Args:
        rows: The cells; numbers are words, too.
        right: The columns whose cells are aligned to the right.
        total: Whether the last row is the sum of the others.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int]
    total: bool = False

    @property
    def sides(self) -> list[Literal["left", "right"]]:
        """To which side each column is aligned."""
        count = len(self.header)
        return ["right" if i in self.right else "left" for i in range(count)]


def spread_in_words(counts: Sequence[int]) -> str:
    """The bytes on the devices: one number, or the least and the most of them."""
    return " to ".join(map(bytes_in_words, sorted({min(counts), max(counts)})))


def rows_in_words(rows: Sequence[int]) -> str:
    """How the rows of a batch are shared: `"32 on each"`, or `"18, 18, 18, 16"`."""
    return f"{rows[0]} on each" if len(set(rows)) == 1 else ", ".join(map(str, rows))


def of_devices(devices: Sequence[DeviceFacts], rows: Sequence[int]) -> Table:
    """One line for each device."""
    columns = {
        "replica": [device.replicas for device in devices],
        "device": [device.name for device in devices],
        "model": [device.model for device in devices],
    }
    if len({device.process for device in devices}) > 1:
        columns["process"] = [str(device.process) for device in devices]
    if any(device.bytes_in_use is not None for device in devices):
        columns["memory in use"] = [_memory(device) for device in devices]
    if rows:
        columns["rows of the batch"] = [str(device.rows_of(rows)) for device in devices]
    lines = tuple(zip(*columns.values(), strict=True))
    right = frozenset({0, *range(3, len(columns))})
    return Table("Replicas", tuple(columns), lines, right)


def of_groups(variables: Sequence[VariableFacts]) -> Table:
    """One line for each group and kind of variable, and their sum."""
    lines = [
        _group_line(GROUPS[group], kind, chosen)
        for group, kind, chosen in grouped(variables)
    ]
    lines.append(_group_line("together", "", variables))
    header = ("", "kind", "variables", "their values", "on each device")
    return Table("Variables", header, tuple(lines), frozenset({2, 3, 4}), total=True)


def grouped(
    variables: Sequence[VariableFacts],
) -> list[tuple[str, str, list[VariableFacts]]]:
    """The variables of each group and kind that occurs, in order."""
    found: dict[tuple[str, str], list[VariableFacts]] = {}
    for variable in variables:
        found.setdefault((variable.group, variable.kind), []).append(variable)
    order = list(GROUPS)
    keys = sorted(found, key=lambda key: (order.index(key[0]), key[1] == FOREIGN))
    return [(*key, found[key]) for key in keys]


def of_each(variables: Sequence[VariableFacts], max_variables: int | None) -> Table:
    """One line for each variable; the largest ones, if they are too many."""
    chosen = list(variables)
    title = "Each variable"
    if max_variables is not None and len(chosen) > max_variables:
        title = f"The {max_variables} largest of {len(chosen)} variables"
        by_size = sorted(range(len(chosen)), key=lambda i: -chosen[i].num_bytes)
        chosen = [chosen[i] for i in sorted(by_size[:max_variables])]
    lines = tuple(
        (v.path, str(v.shape), v.dtype, v.kind, spread_in_words(v.bytes_on))
        for v in chosen
    )
    header = ("variable", "shape", "dtype", "kind", "on each device")
    return Table(title, header, lines, frozenset({4}))


def _group_line(
    name: str, kind: str, variables: Sequence[VariableFacts]
) -> tuple[str, ...]:
    whole = bytes_in_words(sum(variable.num_bytes for variable in variables))
    return name, kind, str(len(variables)), whole, spread_in_words(totals(variables))


def totals(variables: Sequence[VariableFacts]) -> tuple[int, ...]:
    """The bytes of all of them on each device."""
    return tuple(map(sum, zip(*(each.bytes_on for each in variables), strict=True)))


def _memory(device: DeviceFacts) -> str:
    if device.bytes_in_use is None:
        return ""
    used, limit = bytes_in_words(device.bytes_in_use), device.bytes_limit
    return used if limit is None else f"{used} of {bytes_in_words(limit)}"

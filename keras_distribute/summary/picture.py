"""The picture of a summary, as SVG: a column for each replica, a line for each group of
variables.

Drawn by hand rather than by a library: it is a grid of boxes, and takes the colours of
the page it stands in.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from keras_distribute.summary.facts import FOREIGN, PLAIN, DeviceFacts, VariableFacts
from keras_distribute.summary.tables import GROUP_WORDS, bytes_in_words, grouped, totals

_LEFT, _LINE, _GAP, _TOP = 250, 46, 12, 52
_WIDTH = 920  # of the whole, as long as the columns fit
_MOST_COLUMNS = 8
_COLORS = {
    "mirrored": "#4c78a8",
    PLAIN: "#4c78a8",
    "divided": "#54a24b",
    "sync-on-read": "#f58518",
    FOREIGN: "#e45756",
}
_BATCH = "#b279a2"
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def draw(
    strategy: str,
    devices: Sequence[DeviceFacts],
    rows: Sequence[int],
    variables: Sequence[VariableFacts],
) -> str:
    """The picture as the text of an SVG file."""
    shown = min(len(devices), _MOST_COLUMNS)
    column = (_WIDTH - _LEFT) / shown - _GAP
    groups = grouped(variables)
    height = _TOP + _LINE * (len(groups) + bool(rows) + bool(groups)) + 8
    parts = [
        _head(device, _LEFT + i * (column + _GAP), column)
        for i, device in enumerate(devices[:shown])
    ]
    y = float(_TOP)
    if rows:
        parts += _batch(devices[:shown], rows, y, column)
        y += _LINE
    for group, kind, chosen in groups:
        parts += _group(group, kind, chosen, shown, y, column)
        y += _LINE
    if groups:
        parts += _sum(totals(variables)[:shown], y, column)
    more = (
        f"; {len(devices) - shown} more devices are not drawn"
        if len(devices) > shown
        else ""
    )
    title = html.escape(
        f"{strategy}: what stands on each of {len(devices)} devices{more}"
    )
    if more:
        parts.append(_text(_WIDTH - _GAP, 14, title.split("; ")[1], "end", 11))
    return (
        '<svg class="kd-picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 '
        f'{_WIDTH} {height:g}" '
        f'role="img" aria-label="{title}" font-family="{_FONT}" fill="currentColor" '
        f'style="width:100%;max-width:{_WIDTH}px;height:auto"><title>{title}</title>{"".join(parts)}</svg>'
    )


def on_paper(svg: str) -> str:
    """The picture for a file of its own: dark words on white, wherever it is shown."""
    start = svg.index("</title>") + len("</title>")
    paper = '<rect width="100%" height="100%" fill="#ffffff" rx="6"/>'
    return (
        svg[:start].replace('fill="currentColor"', 'fill="#1f2328"')
        + paper
        + svg[start:]
        + "\n"
    )


def _head(device: DeviceFacts, x: float, width: float) -> str:
    name = f"replica {device.replica}" if width > 60 else str(device.replica)
    middle = x + width / 2
    return _text(middle, 22, name, "middle", 13, bold=True) + _text(
        middle, 40, device.name, "middle", 11
    )


def _batch(
    devices: Sequence[DeviceFacts], rows: Sequence[int], y: float, column: float
) -> list[str]:
    parts = [_label(y, "global batch", f"{sum(rows)} rows, divided")]
    for i, device in enumerate(devices):
        mine = rows[device.replica]
        words = f"{mine} row{'' if mine == 1 else 's'}" if column > 60 else str(mine)
        share = (sum(rows[: device.replica]) / sum(rows), mine / sum(rows))
        parts += _box(
            _LEFT + i * (column + _GAP),
            y,
            column,
            _BATCH,
            words if mine else "none",
            share,
        )
    return parts


def _group(
    group: str,
    kind: str,
    variables: Sequence[VariableFacts],
    shown: int,
    y: float,
    column: float,
) -> list[str]:
    family = kind.partition(" (")[0]
    count = f"{len(variables)} variable{'' if len(variables) == 1 else 's'}, {kind}"
    parts = [_label(y, GROUP_WORDS[group], count)]
    on_each, whole = (
        totals(variables),
        sum(variable.num_bytes for variable in variables),
    )
    for i in range(shown):
        if not on_each[i]:
            continue
        pieces = max(1, round(whole / on_each[i])) if family == "divided" else 1
        share = (i % pieces / pieces, 1 / pieces)
        words = bytes_in_words(on_each[i])
        # Every replica's own component is drawn in a shade of its own.
        shade = 1 - 0.5 * i / max(shown - 1, 1) if family == "sync-on-read" else 1.0
        parts += _box(
            _LEFT + i * (column + _GAP), y, column, _COLORS[family], words, share, shade
        )
    return parts


def _sum(on_each: Sequence[int], y: float, column: float) -> list[str]:
    parts = [_text(0, y + 24, "variables on this device", "start", 13, bold=True)]
    for i, count in enumerate(on_each):
        middle = _LEFT + i * (column + _GAP) + column / 2
        parts.append(
            _text(
                middle,
                y + 24,
                bytes_in_words(count),
                "middle",
                13 if column > 60 else 10,
                bold=True,
            )
        )
    return parts


def _label(y: float, name: str, detail: str) -> str:
    return _text(0, y + 15, name, "start", 13, bold=True) + _text(
        0, y + 31, detail, "start", 11
    )


def _box(
    x: float,
    y: float,
    width: float,
    color: str,
    words: str,
    share: tuple[float, float],
    shade: float = 1.0,
) -> list[str]:
    """A frame that is filled in part, with words below the fill's line."""
    first, part = share
    frame = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="18" rx="3"'
    return [
        f'<rect {frame} fill="{color}" fill-opacity="0.18"/>',
        f'<rect x="{x + first * width:.1f}" y="{y:.1f}" width="{part * width:.1f}" '
        'height="18" rx="3" '
        f'fill="{color}" fill-opacity="{shade:.2f}"/>',
        _text(x + width / 2, y + 32, words, "middle", 11 if width > 60 else 9),
    ]


def _text(
    x: float, y: float, words: str, anchor: str, size: int, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>{html.escape(words)}</text>'

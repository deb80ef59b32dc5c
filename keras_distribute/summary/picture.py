"""The picture of a summary, as SVG: a column for each replica, a line for each group of
variables.

Written as text rather than drawn by a library: it is a grid of boxes, and takes the
colours of the page around it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from keras_distribute import checks
from keras_distribute.summary.facts import (
    FOREIGN,
    GROUPS,
    PLAIN,
    DeviceFacts,
    VariableFacts,
)
from keras_distribute.summary.tables import bytes_in_words, grouped, totals

_LEFT, _LINE, _GAP, _TOP = 250, 46, 12, 52
_WIDTH = 920
# More columns than these would be too narrow for their words.
_MOST_COLUMNS = 8
_COLORS = {
    "mirrored": "#4c78a8",
    PLAIN: "#4c78a8",
    "divided": "#54a24b",
    "sync-on-read": "#f58518",
    FOREIGN: "#e45756",
}
_RESTING = "#72b7b2"
_BATCH = "#b279a2"
_FONT = (
    "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', "
    "sans-serif"
)


class _Box(NamedTuple):
    """A frame filled from `start` by a `part` of its width, both from 0 to 1."""

    words: str
    color: str
    start: float
    part: float
    opacity: float = 1.0


def draw(
    strategy: str,
    devices: Sequence[DeviceFacts],
    rows: Sequence[int],
    variables: Sequence[VariableFacts],
) -> str:
    """The picture as the text of an SVG file."""
    shown = devices[:_MOST_COLUMNS]
    step = (_WIDTH - _LEFT) / len(shown)
    width = step - _GAP
    middles = [_LEFT + i * step + width / 2 for i in range(len(shown))]
    parts: list[str] = []
    for device, x in zip(shown, middles, strict=True):
        parts.append(_text(x, 22, f"replica {device.replicas}", "middle", bold=True))
        parts.append(_text(x, 40, device.name, "middle"))
    y = _TOP
    lines = [_batch(shown, rows)] if rows else []
    lines += [_group(*group, len(shown)) for group in grouped(variables)]
    for name, detail, boxes in lines:
        parts += [_text(0, y + 15, name, bold=True), _text(0, y + 31, detail)]
        for box, x in zip(boxes, middles, strict=True):
            parts += _box(box, x - width / 2, y, width) if box else []
        y += _LINE
    if variables:
        parts.append(_text(0, y + 24, "variables on this device", bold=True))
        for x, count in zip(middles, totals(variables), strict=False):
            parts.append(_text(x, y + 24, bytes_in_words(count), "middle", bold=True))
        y += _LINE
    title = f"{strategy}: what stands on each of {len(devices)} devices"
    if len(devices) > len(shown):
        more = f"{len(devices) - len(shown)} more devices are not drawn"
        parts.append(_text(_WIDTH - _GAP, 14, more, "end"))
        title += f"; {more}"
    title = html.escape(title)
    return (
        '<svg class="kd-picture" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {_WIDTH} {y + 8}" role="img" aria-label="{title}" '
        f'font-family="{_FONT}" fill="currentColor" '
        f'style="width:100%;max-width:{_WIDTH}px;height:auto">'
        f"<title>{title}</title>{''.join(parts)}</svg>"
    )


def on_paper(svg: str) -> str:
    """The picture for a file of its own: dark words on white, wherever it is shown."""
    paper = '<rect width="100%" height="100%" fill="#ffffff" rx="6"/>'
    svg = svg.replace('fill="currentColor"', 'fill="#1f2328"', 1)
    return svg.replace("</title>", f"</title>{paper}", 1) + "\n"


def _batch(
    devices: Sequence[DeviceFacts], rows: Sequence[int]
) -> tuple[str, str, list[_Box | None]]:
    """Name, detail and boxes of the line of the global batch."""
    whole = sum(rows)
    boxes: list[_Box | None] = []
    for device in devices:
        own = device.rows_of(rows)
        words = checks.counted(own, "row") if own else "none"
        start = sum(rows[: device.replica]) / whole
        boxes.append(_Box(words, _BATCH, start, own / whole))
    return "global batch", f"{whole} rows, divided", boxes


def _group(
    group: str, kind: str, variables: Sequence[VariableFacts], shown: int
) -> tuple[str, str, list[_Box | None]]:
    """Name, detail and boxes of the line of a group of variables."""
    family = kind.partition(" (")[0]
    detail = f"{checks.counted(len(variables), 'variable')}, {kind}"
    whole = sum(variable.num_bytes for variable in variables)
    boxes: list[_Box | None] = []
    for i, count in enumerate(totals(variables)[:shown]):
        if not count:
            boxes.append(None)
            continue
        pieces = max(1, round(whole / count)) if family == "divided" else 1
        # Each replica has a value of its own, so each is drawn in a shade of its own.
        shade = 1 - 0.5 * i / max(shown - 1, 1) if family == "sync-on-read" else 1.0
        words, start = bytes_in_words(count), i % pieces / pieces
        boxes.append(
            _Box(words, _COLORS.get(family, _RESTING), start, 1 / pieces, shade)
        )
    return GROUPS[group], detail, boxes


def _box(box: _Box, x: float, y: float, width: float) -> list[str]:
    start, part = x + box.start * width, box.part * width
    rest = f'height="18" rx="3" fill="{box.color}" fill-opacity'
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" {rest}="0.18"/>',
        f'<rect x="{start:.1f}" y="{y}" width="{part:.1f}" {rest}="{box.opacity:g}"/>',
        _text(x + width / 2, y + 32, box.words, "middle"),
    ]


def _text(
    x: float, y: float, words: str, anchor: str = "start", bold: bool = False
) -> str:
    style = '13" font-weight="600' if bold else "11"
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-size="{style}">'
        f"{html.escape(words)}</text>"
    )

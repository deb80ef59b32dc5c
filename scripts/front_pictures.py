"""Draws the two pictures of the front page, which strategy one needs, and a `fit` on
four replicas beside one device; and for the guide what to divide where memory is short.

    python scripts/front_pictures.py            # writes docs/pictures/
    python scripts/front_pictures.py --check    # an error where they are out of date

The one of `fit` is drawn from the numbers in `benchmarks/results/why.json`.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Sequence

import pictures

ROOT = pathlib.Path(__file__).parents[1]
WIDTH = 880
GRAY, BLUE, GREEN, ORANGE = "#888888", "#4c78a8", "#54a24b", "#f58518"
# As an image, which GitHub shows, a picture has no page to take its colours from.
ALONE = (
    "<style>svg:root{color:#1f2328}@media(prefers-color-scheme:dark)"
    "{svg:root{color:#e6edf3;--md-default-bg-color:#0d1117}}</style>"
)


def main() -> None:
    pictures.write_or_check(
        {
            "which-strategy.svg": which_strategy(),
            "same-curve.svg": same_curve(),
            "what-to-divide.svg": what_to_divide(),
        }
    )


# The devices that there are, the strategy for them, and a word about it.
BRANCHES = (
    (("one device",), ("OneDeviceStrategy",), "or no strategy", GRAY),
    (("several GPUs", "of one machine"), ("MirroredStrategy",), "or CPU devices", BLUE),
    (("a TPU: a chip,", "a host, a slice"), ("TPUStrategy",), "also many hosts", BLUE),
    (
        ("several machines", "that are alike"),
        ("MultiWorker-", "MirroredStrategy"),
        "in step",
        BLUE,
    ),
    (
        ("machines that", "come and go"),
        ("ParameterServer-", "Strategy"),
        "asynchronous",
        ORANGE,
    ),
)
OPTIONS = (
    ("The optimizer's state is too large:", "shard_optimizer_state=True"),
    ("The variables should be in host memory:", "experimental.CentralStorageStrategy"),
    ("The bits must not depend on the number of devices:", "deterministic=True"),
    ("The weights do not fit on one device:", "shard_variables=True"),
)
# What is too large, the argument that helps, and what it leaves on a device.
TOO_LARGE = (
    (
        ("the optimizer's", "slots"),
        ("shard_optimizer_", "state=True"),
        "slots: 1/n",
        BLUE,
    ),
    (
        ("weights, slots,", "gradients"),
        ("shard_variables=", "True"),
        "all three: 1/n",
        BLUE,
    ),
    (
        ("one layer, or there", "are too few rows"),
        ("num_logical_devices=", "layout_map="),
        "all three: 1/m",
        GREEN,
    ),
    (
        ("one layer, and", "all together"),
        ("the layouts, and", "shard_variables=True"),
        "all three: 1/(n m)",
        GREEN,
    ),
    (("activations of", "many rows"), ("fewer rows", "a step"), "or in 16 bits", GRAY),
)


def which_strategy() -> str:
    """From the devices to a strategy, and below it options."""
    parts = _choice("What are you going to train on?", BRANCHES)
    parts += _lines(WIDTH / 2, 240, ["And if"], 12, True)
    half = WIDTH / 2
    for i, (case, answer) in enumerate(OPTIONS):
        x, y = half * (i % 2) + 8, 258 + 46 * (i // 2)
        parts.append(_box(x, y, half - 16, 38, GRAY))
        middle = x + (half - 16) / 2
        parts += _lines(middle, y + 12, [case], 11.5, False)
        parts += _lines(middle, y + 28, [answer], 12, True)
    return _svg(354, "Which strategy do I need?", parts)


def what_to_divide() -> str:
    """From what is too large to the argument that divides it."""
    parts = _choice("What is too large for one device?", TOO_LARGE)
    note = (
        "n replicas of m logical devices each. The numbers of a training are the same."
    )
    parts += _lines(WIDTH / 2, 234, [note], 12, False)
    return _svg(250, "What is too large for one device?", parts)


def _choice(
    question: str, branches: Sequence[tuple[Sequence[str], Sequence[str], str, str]]
) -> list[str]:
    """A question, and an answer below each case."""
    step = WIDTH / len(branches)
    width = step - 14
    parts = [_box(WIDTH / 2 - 140, 8, 280, 38, GREEN)]
    parts += _lines(WIDTH / 2, 27, [question], 14, True)
    for i, (case, names, note, color) in enumerate(branches):
        x = step * (i + 0.5)
        parts.append(
            f'<path d="M{WIDTH / 2:.0f} 46C{WIDTH / 2:.0f} 68 {x:.0f} 54 {x:.0f} 76" '
            f'fill="none" stroke="{GRAY}" stroke-width="1.3"/>'
        )
        parts += _lines(x, 98, case, 12, False)
        parts.append(_arrow(x, 120, 144))
        parts.append(_box(x - width / 2, 145, width, 66, color))
        parts += _lines(x, 170 if len(names) == 1 else 168, names, 12.5, True)
        parts += _lines(x, 198, [note], 11, False)
    return parts


def same_curve() -> str:
    """The losses of both runs, and below them how far apart they are."""
    facts = json.loads((ROOT / "benchmarks/results/why.json").read_text("utf-8"))
    ours, plain = facts["curves"]["ours"]["loss"], facts["curves"]["plain"]["loss"]
    left, right, top, bottom = 88.0, WIDTH - 20.0, 40.0, 220.0
    apart_top, apart_bottom = 262.0, 340.0
    epochs = len(ours)

    def across(epoch: int) -> float:
        return left + (right - left) * epoch / (epochs - 1)

    highest = math.ceil(max(ours + plain) * 2) / 2
    parts = _axes(left, right, top, bottom, ("0", f"{highest:g}"), "loss")
    points = [
        (across(i), bottom - (bottom - top) * y / highest) for i, y in enumerate(ours)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="3"/>'
    )
    for i, y in enumerate(plain):
        place = bottom - (bottom - top) * y / highest
        parts.append(
            f'<circle cx="{across(i):.1f}" cy="{place:.1f}" r="5" '
            f'fill="none" stroke="{ORANGE}" stroke-width="2"/>'
        )
    parts += _legend(right - 250, top + 12)
    apart = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
    scale = 10.0 ** math.ceil(math.log10(max(*apart, 1e-9)))
    parts += _axes(
        left, right, apart_top, apart_bottom, ("0", f"{scale:.0e}"), "difference"
    )
    for i, y in enumerate(apart):
        height = (apart_bottom - apart_top) * y / scale
        parts.append(
            f'<rect x="{across(i) - 6:.1f}" y="{apart_bottom - height:.1f}" width="12" '
            f'height="{max(height, 1):.1f}" fill="{GREEN}"/>'
        )
        parts += _lines(across(i), apart_bottom + 13, [str(i + 1)], 11, False)
    parts += _lines((left + right) / 2, apart_bottom + 30, ["epoch"], 11, False)
    title = (
        "Four replicas beside one device: 1,437 rows in batches of 128, the last of 29"
    )
    parts += _lines(WIDTH / 2, 16, [title], 13, True)
    return _svg(384, title, parts)


def _axes(
    left: float,
    right: float,
    top: float,
    bottom: float,
    ends: tuple[str, str],
    name: str,
) -> list[str]:
    low, high = ends
    return [
        f'<path d="M{left:.0f} {top:.0f}V{bottom:.0f}H{right:.0f}" fill="none" '
        f'stroke="{GRAY}" stroke-width="1.3"/>',
        f'<text x="{left - 8:.0f}" y="{bottom + 4:.0f}" text-anchor="end" '
        f'font-size="11">{low}</text>',
        f'<text x="{left - 8:.0f}" y="{top + 4:.0f}" text-anchor="end" '
        f'font-size="11">{high}</text>',
        f'<text x="{left - 8:.0f}" y="{(top + bottom) / 2 + 4:.0f}" text-anchor="end" '
        f'font-size="11" font-weight="600">{name}</text>',
    ]


def _legend(x: float, y: float) -> list[str]:
    return [
        f'<path d="M{x:.0f} {y:.0f}h28" stroke="{BLUE}" stroke-width="3"/>',
        f'<text x="{x + 38:.0f}" y="{y + 4:.0f}" font-size="12">MirroredStrategy, four '
        "replicas</text>",
        f'<circle cx="{x + 14:.0f}" cy="{y + 22:.0f}" r="5" fill="none" '
        f'stroke="{ORANGE}" stroke-width="2"/>',
        f'<text x="{x + 38:.0f}" y="{y + 26:.0f}" font-size="12">plain Keras, one '
        "device</text>",
    ]


def _box(x: float, y: float, w: float, h: float, color: str) -> str:
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="5" '
        f'fill="{color}" fill-opacity="0.13" stroke="{color}" stroke-width="1.5"/>'
    )


def _lines(
    x: float, middle: float, lines: Sequence[str], size: float, strong: bool
) -> list[str]:
    """Lines of text around a middle."""
    pitch = size + 3
    first = middle - pitch * (len(lines) - 1) / 2 + size / 3
    weight = ' font-weight="600"' if strong else ""
    return [
        f'<text x="{x:.0f}" y="{first + pitch * i:.0f}" text-anchor="middle" '
        f'font-size="{size:g}"{weight}>{line}</text>'
        for i, line in enumerate(lines)
    ]


def _arrow(x: float, y0: float, y1: float) -> str:
    return (
        f'<line x1="{x:.0f}" y1="{y0:.0f}" x2="{x:.0f}" y2="{y1:.0f}" '
        f'stroke="{GRAY}" stroke-width="1.3"/>'
        f'<path d="M{x - 4:.0f} {y1 - 6:.0f}L{x:.0f} {y1:.0f}'
        f'L{x + 4:.0f} {y1 - 6:.0f}" '
        f'fill="none" stroke="{GRAY}" stroke-width="1.3"/>'
    )


def _svg(height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg class="kd-picture" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'fill="currentColor" font-family="sans-serif"><title>{label}</title>{ALONE}'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()

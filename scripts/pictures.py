"""Draws the pictures of the package itself: its rooms, and the way of a step.

    python scripts/pictures.py            # writes docs/pictures/
    python scripts/pictures.py --check    # an error where what is there is not true

The rooms and what they import are read from the package, by `tests/test_rooms.py`; a
file that a picture names has to exist.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_rooms import PACKAGE, ROOMS, imports_of, name_of, room_of  # noqa: E402

PICTURES = ROOT / "docs/pictures"
WIDTH = 880
GRAY, BLUE, GREEN, ORANGE = "#888888", "#4c78a8", "#54a24b", "#f58518"

OWNS = {
    "errors": ("what failed, and its fix",),
    "checks": ("what an argument has to be",),
    "types": ("enums and frozen options",),
    "_compat": ("private names of Keras", "and JAX, with reasons"),
    "devices": ("meshes of replicas; programs", "on their way to them"),
    "config": ("CPU virtual devices,", "prefetching"),
    "context": ("which strategy, which of", "its contexts"),
    "values": ("PerReplica, Mirrored;", "reductions and gathers"),
    "cluster": ("processes: start, agreement,", "signs of life, resolvers"),
    "remote": ("messages with arrays,", "proofs, heartbeats"),
    "variables": ("mirrored, sync-on-read;", "who holds the arrays"),
    "run": ("Strategy.run: traces, proof,", "one program"),
    "threads": ("waiting for threads;", "closing what was dropped"),
    "checkpoint": ("state of objects on disk", "and back"),
    "input": ("any dataset as batches;", "shards, positions, prefetch"),
    "consistency": ("whether copies on the", "replicas are the same"),
    "summary": ("devices and variables as", "numbers and pictures"),
    "tpu": ("where chips are, which", "make up a replica"),
    "strategies": ("the shared API, one small", "file a strategy"),
    "servers": ("kd.Server: a worker, a", "parameter server"),
    "scheduling": ("from a function to what", "a worker runs"),
    "coordinator": ("ClusterCoordinator",),
    "launch": ("the processes of a job",),
    "testing": ("combinations of strategies,", "faults"),
    "training": ("trainer, batches, rules;", "steps: compiled, called"),
    "dry_run": ("a step compiled for hardware", "that is not there"),
    "batch_size": ("the largest batch that", "trains here, from real steps"),
    "callbacks": ("resuming a fit; where", "its time goes"),
    "nn": ("loss scaling",),
    "cluster_resolver": ("the resolvers' names",),
    "experimental": ("TensorFlow's other names",),
    "compat": ("TensorFlow's old names",),
    "commands": ("what keras-distribute says", "and tries on this machine"),
    "": ("the public names",),
}


def main() -> None:
    write_or_check({"rooms.svg": rooms(), "way-of-a-step.svg": way_of_a_step()})


def write_or_check(drawn: dict[str, str]) -> None:
    """Writes pictures; with `--check` ends the script that runs where one is stale."""
    stale = [
        name
        for name, text in drawn.items()
        if not (PICTURES / name).exists() or (PICTURES / name).read_text() != text
    ]
    if "--check" in sys.argv:
        if stale:
            script = pathlib.Path(sys.argv[0]).name
            raise SystemExit(f"{', '.join(stale)}: run python scripts/{script}")
        return
    for name, text in drawn.items():
        (PICTURES / name).write_text(text)


def rooms() -> str:
    """Each room above those that it needs, with lines to them."""
    needs = _needs()
    floors: dict[int, list[str]] = {}
    for room in ROOMS:
        floors.setdefault(_floor(needs, room), []).append(room)
    size, gap, box = 96, 34, (200, 62)
    height = size * len(floors) + 10
    center: dict[str, float] = {}
    top: dict[str, float] = {}
    for floor in sorted(floors):
        here = sorted(floors[floor], key=lambda room: _wanted(needs[room], center))
        free = (WIDTH - len(here) * box[0]) / (len(here) + 1)
        for i, room in enumerate(here):
            center[room] = free * (i + 1) + box[0] * (i + 0.5)
            top[room] = height - (floor + 1) * size + (size - box[1]) / 2 - 5
    lines = [
        _curve(center[a], top[a] + box[1], center[b], top[b], gap)
        for a in needs
        for b in sorted(needs[a])
        if a  # The public names are from all rooms.
    ]
    parts = [f'<g fill="none" stroke="{GRAY}" stroke-width="1.3">', *lines, "</g>"]
    for room in ROOMS:
        x, color = center[room] - box[0] / 2, BLUE
        if not (PACKAGE / room).is_dir():
            color = GRAY
        parts.append(_box(x, top[room], *box, color if room else GREEN))
        title = room or "keras_distribute"
        parts += _text(center[room], top[room], box[1], title, OWNS[room])
    label = "The rooms of the package, each above those that it imports from"
    return _svg(height, label, parts)


def _wanted(needed: set[str], center: dict[str, float]) -> float:
    """Where a room is as near as can be to what it needs."""
    below = [center[each] for each in sorted(needed) if each in center]
    return sum(below) / len(below) if below else WIDTH / 2


def _needs() -> dict[str, set[str]]:
    """By room those that it imports from, but for what these import from, too."""
    imports: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = ROOMS[room_of(name_of(path))]
        imports[own] |= {ROOMS[room_of(other)] for other in imports_of(path)} - {own}

    @functools.cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(imports[room]).union(*map(reached, imports[room]))

    return {
        room: {
            other
            for other in others
            if not any(other in reached(third) for third in others - {other})
        }
        for room, others in imports.items()
    }


def _floor(needs: dict[str, set[str]], room: str) -> int:
    if room == "threads":  # Needs nothing: near those that need it.
        return min(_floor(needs, other) for other in needs if room in needs[other]) - 1
    below = needs[room] - {"threads"}
    return 1 + max((_floor(needs, other) for other in below), default=-1)


# Column, row, color, file, what it does.
STEP = (
    (1, 0, GRAY, "", "model.fit(x, y)", ()),
    (
        1,
        1,
        BLUE,
        "training/trainer.py",
        "",
        ("in the strategy's context;", "asks for a step"),
    ),
    (
        1,
        2,
        BLUE,
        "training/steps/choose.py",
        "",
        ("which kind of step it is;", "plan.py says why"),
    ),
    (2, 2, GRAY, "", "your train_step, or Keras's", ("compiled as it is",)),
    (
        0,
        3,
        GREEN,
        "training/steps/by_rows.py",
        "",
        ("each replica its rows;", "gradients summed once"),
    ),
    (1, 3, GREEN, "training/steps/long_weight.py", "", ("many small weights as one",)),
    (
        2,
        3,
        GREEN,
        "training/steps/accumulating.py",
        "",
        ("summed when the optimizer", "updates"),
    ),
    (
        0,
        4,
        BLUE,
        "training/epoch_iterator.py",
        "",
        ("batches, read ahead by", "input/prefetch.py"),
    ),
    (1, 4, GRAY, "", "Keras's loop", ("epochs and steps, as ever",)),
    (
        2,
        4,
        BLUE,
        "training/callback_list.py",
        "",
        ("callbacks see what they", "ask for"),
    ),
    (0, 5, BLUE, "training/batches.py", "", ("padded, put on the devices",)),
    (
        1,
        5,
        BLUE,
        "training/steps/compiled_step.py",
        "",
        ("one call: program, state", "and batch"),
    ),
    (
        2,
        5,
        BLUE,
        "training/steps/step_programs.py",
        "",
        ("compiled, once for each", "form of a batch"),
    ),
    (
        0,
        6,
        BLUE,
        "training/steps/state.py",
        "",
        ("holds the variables' arrays", "between the calls"),
    ),
    (
        1,
        6,
        ORANGE,
        "devices/launches.py",
        "",
        ("launched, one after the other;", "results land"),
    ),
    (1, 7, GRAY, "", "all replicas", ("one program of XLA",)),
)
# From and to, as (column, row).
ARROWS = (
    ((1, 0), (1, 1)), ((1, 1), (1, 2)), ((2, 2), (1, 2)), ((1, 2), (0, 3)),
    ((1, 2), (1, 3)), ((1, 2), (2, 3)), ((0, 3), (1, 4)), ((1, 3), (1, 4)),
    ((2, 3), (1, 4)), ((0, 4), (1, 4)), ((2, 4), (1, 4)), ((1, 4), (1, 5)),
    ((0, 4), (0, 5)), ((0, 5), (1, 5)), ((2, 5), (1, 5)), ((1, 5), (1, 6)),
    ((0, 6), (1, 6)), ((1, 6), (1, 7)),
)  # fmt: skip


def way_of_a_step() -> str:
    """From `Model.fit` to the compiled program."""
    size, box = 92, (252, 60)
    height = 8 * size + 6

    def place(column: int, row: int) -> tuple[float, float]:
        return 20 + column * (box[0] + 42), 16 + row * size

    parts: list[str] = []
    for start, end in ARROWS:
        (x0, y0), (x1, y1) = place(*start), place(*end)
        if start[1] == end[1]:
            left = x0 < x1
            begin = (x0 + box[0] if left else x0, y0 + box[1] / 2)
            finish = (x1 if left else x1 + box[0], y1 + box[1] / 2)
        else:
            begin = (x0 + box[0] / 2, y0 + box[1])
            finish = (x1 + box[0] / 2, y1)
        parts.append(_arrow(*begin, *finish))
    for column, row, color, file, title, words in STEP:
        assert not file or (PACKAGE / file).exists(), file
        x, y = place(column, row)
        parts.append(_box(x, y, *box, color))
        name = title or file.removeprefix("training/")
        parts += _text(x + box[0] / 2, y, box[1], name, words)
    label = "The way of a step of fit, from Model.fit to the compiled program"
    return _svg(height, label, parts)


def _box(x: float, y: float, w: float, h: float, color: str) -> str:
    """A box that hides the lines behind it, in the page's colour."""
    place = f'<rect x="{x:.0f}" y="{y:.0f}" width="{w}" height="{h}" rx="5" '
    return (
        f'{place}style="fill:var(--md-default-bg-color,#fff)"/>'
        f'{place}fill="{color}" fill-opacity="0.13" stroke="{color}" '
        'stroke-width="1.5"/>'
    )


def _text(
    x: float, y: float, h: float, title: str, words: Iterable[str]
) -> Iterable[str]:
    lines = list(words)
    first = y + h / 2 - 7.5 * len(lines) + 4
    yield (
        f'<text x="{x:.0f}" y="{first:.0f}" text-anchor="middle" font-size="13" '
        f'font-weight="600">{title}</text>'
    )
    for i, line in enumerate(lines, 1):
        yield (
            f'<text x="{x:.0f}" y="{first + 15 * i:.0f}" text-anchor="middle" '
            f'font-size="11">{line}</text>'
        )


def _curve(x0: float, y0: float, x1: float, y1: float, bend: float) -> str:
    return (
        f'<path d="M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} '
        f'{x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"/>'
    )


def _arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    return (
        f'<line x1="{x0:.0f}" y1="{y0:.0f}" x2="{x1:.0f}" y2="{y1:.0f}" '
        'stroke="#888888" stroke-width="1.3" marker-end="url(#kd-arrow)"/>'
    )


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    marker = (
        '<defs><marker id="kd-arrow" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#888888"/></marker></defs>'
    )
    return (
        f'<svg class="kd-picture" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}" '
        f'fill="currentColor" font-family="sans-serif"><title>{label}</title>{marker}'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()

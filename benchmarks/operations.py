"""Where the time of a step's operations goes, from a trace of JAX's profiler."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

KINDS = ("products", "arithmetic", "moving", "communication")
"""Matrix products and convolutions; what computes each element by itself, and sums;
copies, slices and fills; collectives, with the time that one device waits for another.
"""

_PRODUCTS = {"dot", "convolution", "conv", "ynn"}
_MOVING = {
    "bitcast", "broadcast", "concatenate", "copy", "dynamic", "fusion", "gather",
    "iota", "pad", "reshape", "slice", "transpose", "update", "wrapped",
}  # fmt: skip
_COMMUNICATION = re.compile(r"all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter")
_AROUND = re.compile(r"^(while|conditional|call)\b")  # Of other operations.


def milliseconds(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """What all devices together spend on each kind of operation in a step.

    Args:
        step: Runs `steps` steps, which have been compiled.
    """
    found: collections.Counter[str] = collections.Counter(dict.fromkeys(KINDS, 0))
    for name, nanoseconds in _operations(step):
        if not _AROUND.match(name):
            found[kind_of(name)] += nanoseconds
    return {kind: found[kind] / 1e6 / steps for kind in KINDS}


def kind_of(name: str) -> str:
    """Of an operation of XLA for CPUs, by its name: fusions are named by what is in
    them, such as `slice_bitcast_fusion.1`.
    """
    if _COMMUNICATION.search(name):
        return "communication"
    words = {word for word in re.split(r"[-_.\d]+", name) if word}
    if words & _PRODUCTS:
        return "products"
    return "moving" if words <= _MOVING else "arithmetic"


def _operations(step: Callable[[], Any]) -> Iterator[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        for plane in profile.planes:
            for line in plane.lines:
                for event in line.events:
                    if any(name == "hlo_op" for name, _ in event.stats):
                        yield event.name, event.duration_ns

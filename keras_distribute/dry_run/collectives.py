"""The collectives of a compiled program: what they move, between whom, and what they
wait for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np

from keras_distribute.dry_run.hlo import Instruction, Module

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_STARTS = {name: kind for kind in KINDS for name in (kind, f"{kind}-start")}
_LISTED = re.compile(r"replica_groups=\{(\{[^=]*?\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[^=]*?\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_CHAIN = re.compile(r"chain_id=\"(\d+)\"")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
# Parts of JAX's path of names that name no part of a model.
_UNNAMED = {
    "jvp",
    "transpose",
    "vmap",
    "checkpoint",
    "rematted_computation",
    "while",
    "body",
    "cond",
    "closed_call",
    "shard_map",
}
_WRAPPED = re.compile(r"^[A-Za-z_]+\((.*)\)$")
# Instructions that hand on what another one computed.
_RENAMES = {
    "bitcast",
    "get-tuple-element",
    "copy",
    "copy-done",
    "convert",
    "tuple",
    "reshape",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Args:
        kind: `"all-reduce"` or another of XLA's.
        name: Of the instruction in the program's text.
        num_bytes: Of all arrays that each device puts in.
        num_arrays: How many they are.
        dtypes: Theirs, in XLA's words.
        group_size: How many devices exchange with each other.
        num_groups: How many such groups there are.
        times: How often it runs in one call of the program.
        of: The layers, and other named parts of the step, that its arrays come from.
        waits_for: The last of them to be computed.
        num_replicas: Of how many replicas the devices of a group are; 1 where they are
            logical devices of one.
        overlaps: Whether other instructions run while it does.
    """

    kind: str
    name: str
    num_bytes: int
    num_arrays: int
    dtypes: tuple[str, ...]
    group_size: int
    num_groups: int
    times: int
    of: tuple[str, ...]
    waits_for: str
    num_replicas: int
    overlaps: bool = False

    @property
    def bytes_sent(self) -> float:
        """What each device sends each time, around a ring."""
        return bytes_sent(self.kind, self.num_bytes, self.group_size)


def bytes_sent(kind: str, num_bytes: float, group_size: int) -> float:
    """What each device of a group sends around a ring.

    Source: https://doi.org/10.1016/j.jpdc.2008.09.002, where a sum that all get is one
    of which each gets a part, and a gather of these.

    Args:
        num_bytes: What each device puts in.
    """
    if kind == "collective-permute":
        return num_bytes
    total = num_bytes * group_size if kind == "all-gather" else num_bytes
    once = total * (group_size - 1) / group_size
    return 2 * once if kind == "all-reduce" else once


def of_program(
    module: Module, num_devices: int, num_logical: int = 1
) -> list[Collective]:
    """The collectives of a program that runs on `num_devices`, each `num_logical` of
    which are a replica, in the order of the program's text.

    Where a TPU computes while it communicates, the compiler writes the collective into
    each of the fusions that it accompanies: copies that have a number in common.
    """
    found: list[Collective] = []
    seen: set[tuple[str, str]] = set()
    for instruction, times, computation in module.everywhere():
        if instruction.opcode not in _STARTS:
            continue
        if chain := _CHAIN.search(instruction.text):
            key = instruction.opcode, chain.group(1)
            if key in seen:
                continue
            seen.add(key)
        found.append(
            _collective(instruction, times, computation, num_devices, num_logical)
        )
    return found


def _collective(
    instruction: Instruction,
    times: int,
    computation: list[Instruction],
    num_devices: int,
    num_logical: int,
) -> Collective:
    named = {each.name: each for each in computation}
    order = {name: position for position, name in enumerate(named)}
    inputs = [named[name] for name in instruction.operands if name in named]
    arrays = [array for each in inputs for array in each.arrays]
    makers = [_maker(each, named) for each in inputs]
    last = max(makers, key=lambda each: order[each.name], default=instruction)
    sources = [layer for each in makers for layer in layers_of(each.op_name)]
    last_path = last.op_name.rpartition("/")[2]
    groups = _groups(instruction.text, num_devices)
    return Collective(
        kind=_kind_of(instruction, computation),
        name=instruction.name,
        num_bytes=sum(array.num_bytes for array in arrays),
        num_arrays=len(arrays),
        dtypes=tuple(sorted({array.dtype for array in arrays})),
        group_size=groups.shape[1],
        num_groups=len(groups),
        times=times,
        of=tuple(dict.fromkeys(sources or layers_of(instruction.op_name))),
        waits_for=", ".join(layers_of(last.op_name)) or last_path or last.name,
        num_replicas=max(len(set(group // num_logical)) for group in groups),
        overlaps=instruction.opcode.endswith("-start")
        or _CHAIN.search(instruction.text) is not None,
    )


def _kind_of(instruction: Instruction, computation: list[Instruction]) -> str:
    """In XLA's words. A TPU's reduce-scatter may be written as a fusion whose result is
    a part of an all-reduce in it.
    """
    kind, root = _STARTS[instruction.opcode], computation[-1]
    is_part = root.opcode == "dynamic-slice" and root.is_root
    if kind == "all-reduce" and is_part and root.operands[0] == instruction.name:
        return "reduce-scatter"
    return kind


def _maker(instruction: Instruction, named: dict[str, Instruction]) -> Instruction:
    """The instruction that computed a value, behind those that only hand it on."""
    while instruction.opcode in _RENAMES and not layers_of(instruction.op_name):
        before = named.get(next(iter(instruction.operands), ""))
        if before is None:
            break
        instruction = before
    return instruction


def layers_of(op_name: str) -> list[str]:
    """The named parts of a model in JAX's path of names, such as `["dense",
    "optimizer"]`.

    A path is `jit(step)/transpose(jvp(block))/dense/dot_general`; a combined
    instruction has several, separated by semicolons, or written as
    `prefix/(first:second)`. The innermost named part of each is taken.
    """
    paths: list[str] = []
    for path in op_name.split(";"):
        prefix, _, inner = path.partition("/(")
        if ":" in inner:
            paths += [f"{prefix}/{each}" for each in inner.rstrip(")").split(":")]
        else:
            paths.append(path)
    found: list[str] = []
    for path in paths:
        parts = filter(None, map(_without_transformations, path.split("/")[:-1]))
        found += list(parts)[-1:]
    return list(dict.fromkeys(found))


def _without_transformations(part: str) -> str:
    """A path's part without what JAX puts around it; empty for no part of a model."""
    while match := _WRAPPED.match(part):
        if part.startswith(("jit(", "pjit(", "shard_map(")):
            return ""
        part = match.group(1)
    return "" if part in _UNNAMED else part


def _groups(text: str, num_devices: int) -> np.ndarray[Any, Any]:
    """The numbers of the devices that exchange with each other, a group in each row;
    pairs of a permutation.
    """
    devices = np.arange(num_devices)
    if found := _MESH.search(text):
        sizes = {name: int(size) for name, size in _AXIS.findall(found.group(1))}
        names = re.findall(r"'([^']+)'", found.group(2))
        axes = [list(sizes).index(name) for name in names if name in sizes]
        if not axes:
            return devices[None]
        mesh = devices.reshape(tuple(sizes.values()))
        mesh = np.moveaxis(mesh, axes, range(-len(axes), 0))
        return mesh.reshape(-1, math.prod(mesh.shape[-len(axes) :]))
    if found := _IOTA.search(text):
        rows, columns, shape, order = found.groups()
        mesh = devices.reshape(_numbers(shape))
        if order:
            mesh = mesh.transpose(_numbers(order))
        return mesh.reshape(int(rows), int(columns))
    if found := _LISTED.search(text) or _PAIRS.search(text):
        groups = found.group(1).strip("{}").split("},{")
        return np.asarray([_numbers(group) for group in groups])
    return devices[None]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]

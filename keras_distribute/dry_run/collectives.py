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
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
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
_PART = re.compile(r"^[A-Za-z_]+\((.*)\)$")
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
        num_bytes: Of the arrays that each device puts in, together.
        num_arrays: How many they are.
        dtypes: Theirs, in XLA's words.
        group_size: How many devices exchange with each other.
        num_groups: How many such groups there are.
        times: How often it runs in one call of the program.
        of: The layers, and other named parts of the step, that its arrays come from.
        waits_for: The last of them to be computed.
        num_replicas: Of how many replicas the devices of a group are; 1 where they are
            logical devices of one.
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


def of_program(
    module: Module, num_devices: int, num_logical: int = 1
) -> list[Collective]:
    """The collectives, in the order in which the program's text has them.

    Args:
        module: The program.
        num_devices: How many devices run it.
        num_logical: How many of them, one after the other, are a replica.
    """
    return [
        _collective(instruction, times, computation, num_devices, num_logical)
        for instruction, times, computation in module.everywhere()
        if instruction.opcode in _STARTS
    ]


def _collective(
    instruction: Instruction,
    times: int,
    computation: list[Instruction],
    num_devices: int,
    num_logical: int,
) -> Collective:
    order = {each.name: place for place, each in enumerate(computation)}
    named = {each.name: each for each in computation}
    inputs = [named[name] for name in instruction.operands if name in named]
    arrays = [array for each in inputs for array in each.arrays]
    makers = [_maker(each, named) for each in inputs]
    last = max(makers, key=lambda each: order[each.name], default=instruction)
    groups = _groups(instruction.text, num_devices)
    replicas = max(len(set(group // num_logical)) for group in groups)
    sources = [
        layer for each in makers for layer in layers_of(each.op_name)
    ] or layers_of(instruction.op_name)
    waits_for = (
        ", ".join(layers_of(last.op_name))
        or last.op_name.rpartition("/")[2]
        or last.name
    )
    return Collective(
        _STARTS[instruction.opcode],
        instruction.name,
        sum(array.num_bytes for array in arrays),
        len(arrays),
        tuple(sorted({array.dtype for array in arrays})),
        groups.shape[1],
        len(groups),
        times,
        tuple(dict.fromkeys(sources)),
        waits_for,
        replicas,
    )


def _maker(instruction: Instruction, named: dict[str, Instruction]) -> Instruction:
    """The instruction that computed a value, behind those that only hand it on."""
    while (
        instruction.opcode in _RENAMES
        and not layers_of(instruction.op_name)
        and instruction.operands
    ):
        before = named.get(instruction.operands[0])
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
    found: list[str] = []
    for path in _paths(op_name):
        parts = [part for part in map(_bare, path.split("/")[:-1]) if part]
        if parts:
            found.append(parts[-1])
    return list(dict.fromkeys(found))


def _paths(op_name: str) -> list[str]:
    paths: list[str] = []
    for path in op_name.split(";"):
        prefix, opened, inner = path.partition("/(")
        paths += (
            [f"{prefix}/{each}" for each in inner.rstrip(")").split(":")]
            if opened and ":" in inner
            else [path]
        )
    return paths


def _bare(part: str) -> str:
    """A part of a path without the transformations around it; empty for what names no
    part of a model.
    """
    while match := _PART.match(part):
        if part.startswith(("jit(", "pjit(", "shard_map(")):
            return ""
        part = match.group(1)
    return "" if part in _UNNAMED else part


def _groups(text: str, num_devices: int) -> np.ndarray[Any, Any]:
    """The numbers of the devices that exchange with each other, a group in each row;
    pairs of a permutation.
    """
    every = np.arange(num_devices)
    if found := _MESH.search(text):
        sizes = {name: int(size) for name, size in _AXIS.findall(found.group(1))}
        places = [
            list(sizes).index(name)
            for name in re.findall(r"'([^']+)'", found.group(2))
            if name in sizes
        ]
        mesh = np.moveaxis(
            every.reshape(tuple(sizes.values())), places, range(-len(places), 0)
        )
        return mesh.reshape(
            -1, math.prod(mesh.shape[-len(places) :]) if places else num_devices
        )
    if found := _IOTA.search(text):
        rows, columns, shape, order = found.groups()
        mesh = every.reshape(_numbers(shape))
        return (mesh.transpose(_numbers(order)) if order else mesh).reshape(
            int(rows), int(columns)
        )
    if found := _LISTED.search(text) or _PAIRS.search(text):
        return np.asarray(
            [_numbers(group) for group in found.group(1).strip("{}").split("},{")]
        )
    return every[None]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]

"""How many bytes a program moves between a device's memory and its cores.

Each instruction reads its operands and writes its result once; what is fused into it
moves nothing. Arrays in a memory of the core's own (TPU) do not count. An instruction
that reads slices of an array, or updates a part of it in place, counts the slices: a
loop over time would otherwise read the whole sequence in each iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from keras_distribute.dry_run.hlo import Array, Instruction, Module

# What moves nothing by itself.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "async-start",
    "async-update",
}
_SLICES = {"dynamic-slice", "slice", "gather"}
# The operand that these write into a part of operand 0.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


def bytes_moved(module: Module) -> int:
    """Bytes that one call of the program reads and writes in each device's memory."""
    return sum(
        times * of_instruction(module, instruction, named)
        for instruction, times, named in module.running()
    )


def moves_nothing(instruction: Instruction) -> bool:
    """Whether an instruction moves nothing by itself, and takes no time."""
    return instruction.opcode in _FREE or instruction.opcode.endswith("-done")


def of_instruction(
    module: Module, instruction: Instruction, named: Mapping[str, Instruction]
) -> int:
    """The bytes that an instruction moves each time, from the instructions of its
    computation by their names.
    """
    if moves_nothing(instruction):
        return 0
    total = 0
    inside = _inside(module, instruction)
    for index, name in enumerate(instruction.operands):
        source = named.get(name)
        if source is not None and source.opcode != "constant":
            size = sum(map(_in_memory, source.arrays))
            total += _bytes_read(module, inside, index, size)
    return total + _bytes_written(inside, instruction)


def _inside(module: Module, instruction: Instruction) -> list[Instruction]:
    """A fusion's instructions; else the instruction, behind parameters for operands."""
    if instruction.opcode == "fusion":
        return module.computations[instruction.called["calls"][0]]
    parameters = [
        Instruction(f"operand {index}", "parameter", (), (str(index),), {}, False, "")
        for index in range(len(instruction.operands))
    ]
    names = tuple(parameter.name for parameter in parameters)
    itself = dataclasses.replace(instruction, operands=names, is_root=True)
    return [*parameters, itself]


def _bytes_read(
    module: Module, inside: list[Instruction], index: int, size: int
) -> int:
    """Bytes that are read of operand number `index`, of `size` in memory."""
    parameters = {e.operands: e.name for e in inside if e.opcode == "parameter"}
    name = parameters.get((str(index),))
    if not size or name is None:
        return size
    total = 0
    for user, operand in _uses(inside, name):
        if user.opcode in _SLICES and operand == 0:
            total += sum(array.num_bytes for array in user.arrays)
        elif user.opcode == "fusion":
            # TPUs fuse a slice with a matrix product as one within another.
            total += _bytes_read(module, _inside(module, user), operand, size)
        elif user.opcode not in _UPDATES or operand:
            # All of it is read, other than where it is updated in place.
            return size
    return min(total, size)


def _uses(inside: list[Instruction], name: str) -> list[tuple[Instruction, int]]:
    """What takes a value, also behind a bitcast, and as which operand."""
    found: list[tuple[Instruction, int]] = []
    for user in inside:
        for index, operand in enumerate(user.operands):
            if operand == name and user.opcode not in ("parameter", "constant"):
                is_bitcast = user.opcode == "bitcast"
                found += _uses(inside, user.name) if is_bitcast else [(user, index)]
    return found


def _bytes_written(inside: list[Instruction], instruction: Instruction) -> int:
    sizes = list(map(_in_memory, instruction.arrays))
    # The result of a start repeats the operands.
    if instruction.opcode.endswith("-start"):
        return sizes[0]
    named = {each.name: each for each in inside}
    roots = [each for each in inside if each.is_root]
    if roots and roots[0].opcode == "tuple":
        roots = [named[name] for name in roots[0].operands if name in named]
    if len(roots) != len(sizes):
        return sum(sizes)
    total = 0
    for root, size in zip(roots, sizes, strict=True):
        while root.opcode == "bitcast" and root.operands[0] in named:
            root = named[root.operands[0]]
        if root.opcode in _UPDATES:
            update = named.get(root.operands[_UPDATES[root.opcode]])
            if update is not None and update.arrays:
                size = min(size, sum(part.num_bytes for part in update.arrays))
        total += size
    return total


def _in_memory(array: Array) -> int:
    return 0 if array.on_chip else array.num_bytes

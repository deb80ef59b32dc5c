"""How many bytes a program moves between a device's memory and its cores.

Each instruction reads its operands and writes its result once; what is fused into it
moves nothing. Arrays in a memory of the core's own (TPU) do not count. An instruction
that reads slices of an array, or updates a part of it in place, counts the slices: a
loop over time would otherwise read the whole sequence in each iteration.
"""

from __future__ import annotations

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
_UPDATES = {
    "dynamic-update-slice": 1,
    "scatter": 2,
}  # Which operand is written, into operand 0.


def bytes_moved(module: Module) -> int:
    """The bytes that one call of the program reads and writes in the memory of each
    device.
    """
    return sum(
        times * _of_computation(module, module.computations[name])
        for name, times in module.runs.items()
    )


def _of_computation(module: Module, computation: list[Instruction]) -> int:
    results = {instruction.name: instruction for instruction in computation}
    total = 0
    for instruction in computation:
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            continue
        inside = _inside(module, instruction)
        for place, name in enumerate(instruction.operands):
            source = results.get(name)
            if source is not None and source.opcode != "constant":
                total += _read(module, inside, place, sum(map(_counted, source.arrays)))
        total += _written(inside, instruction)
    return total


def _inside(module: Module, instruction: Instruction) -> list[Instruction]:
    """What an instruction consists of: the instructions of a fusion, else itself with
    parameters in front.
    """
    if instruction.opcode == "fusion":
        return module.computations[instruction.called["calls"][0]]
    parameters = [
        Instruction(f"operand {place}", "parameter", (), (str(place),), {}, False, "")
        for place in range(len(instruction.operands))
    ]
    names = tuple(parameter.name for parameter in parameters)
    own = Instruction(
        instruction.name,
        instruction.opcode,
        instruction.arrays,
        names,
        {},
        True,
        instruction.text,
    )
    return [*parameters, own]


def _read(module: Module, inside: list[Instruction], place: int, whole: int) -> int:
    """The bytes that are read of operand number `place`, which has `whole` in the
    device's memory.
    """
    if not whole:
        return 0
    parameter = next(
        (i for i in inside if i.opcode == "parameter" and i.operands == (str(place),)),
        None,
    )
    if parameter is None:
        return whole
    total = 0
    for user, which in _uses(inside, parameter.name):
        if user.opcode in _SLICES and which == 0:
            total += sum(array.num_bytes for array in user.arrays)
        elif user.opcode in _UPDATES and which == 0:
            continue  # In place.
        elif (
            user.opcode == "fusion"
        ):  # TPUs fuse a slice with a matrix product as one within another.
            total += _read(module, _inside(module, user), which, whole)
        else:
            return whole
    return min(total, whole)


def _uses(inside: list[Instruction], name: str) -> list[tuple[Instruction, int]]:
    """The instructions that take a value, and as which operand; through such as only
    rename it.
    """
    found: list[tuple[Instruction, int]] = []
    for user in inside:
        for which, operand in enumerate(user.operands):
            if operand == name and user.opcode not in ("parameter", "constant"):
                found += (
                    _uses(inside, user.name)
                    if user.opcode == "bitcast"
                    else [(user, which)]
                )
    return found


def _written(inside: list[Instruction], instruction: Instruction) -> int:
    """The bytes that an instruction writes."""
    if instruction.opcode.endswith("-start"):  # The result repeats the operands.
        return _counted(instruction.arrays[0])
    named = {each.name: each for each in inside}
    roots = [each for each in inside if each.is_root]
    if roots and roots[0].opcode == "tuple":
        roots = [named[name] for name in roots[0].operands if name in named]
    if len(roots) != len(instruction.arrays):
        return sum(map(_counted, instruction.arrays))
    total = 0
    for root, array in zip(roots, instruction.arrays, strict=True):
        while root.opcode == "bitcast" and root.operands[0] in named:
            root = named[root.operands[0]]
        update = (
            named.get(root.operands[_UPDATES[root.opcode]])
            if root.opcode in _UPDATES
            else None
        )
        own = (
            sum(part.num_bytes for part in update.arrays)
            if update is not None and update.arrays
            else None
        )
        total += _counted(array) if own is None else min(own, _counted(array))
    return total


def _counted(array: Array) -> int:
    return 0 if array.on_chip else array.num_bytes

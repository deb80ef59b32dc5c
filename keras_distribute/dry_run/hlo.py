"""Reads the text of a compiled program: its computations, their instructions, and how
often each runs.

The text is XLA's HLO (https://openxla.org/xla/operation_semantics). Only what the
report needs is read: names, result shapes, operands, the computations that an
instruction calls, `metadata`, and the trip counts of loops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?(\S+) = ")
_ARRAY = re.compile(
    r"\b(pred|token|[a-z]{1,2}\d+[a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?"
)
_NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)="
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape of one array of a result.

    Args:
        dtype: In XLA's words, such as `f32`, `bf16`, `pred`.
        shape: Of one device's part.
        on_chip: Whether it is in a memory of the core's own, and costs the device's
            memory nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool

    @property
    def num_bytes(self) -> int:
        """Its bytes, without what a tiled layout adds."""
        if self.dtype == "token":
            return 0
        bits = 8 if self.dtype == "pred" else int(_BITS.findall(self.dtype)[0])
        return -(-math.prod(self.shape) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Args:
        name: Unique in the module.
        opcode: Such as `fusion`, `all-reduce`.
        arrays: Of its result: one, or those of a tuple.
        operands: Names of the instructions that it takes; of a `parameter` its number,
            of a `constant` its value.
        called: The computations that it runs, by the word in front of them.
        is_root: Whether it is the result of its computation.
        text: The rest of the line, behind the operands.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]]
    is_root: bool
    text: str

    @property
    def op_name(self) -> str:
        """Where it comes from: JAX's path of names, with those of Keras's layers."""
        found = _OP_NAME.search(self.text)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Args:
        computations: Their instructions, in the order in which they are scheduled.
        entry: The name of the one that the program starts with.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation that stands for itself runs in a call; those
        inside of fusions are not in it.

        A loop whose number of iterations the compiler does not know counts once.
        """
        times: dict[str, int] = {self.entry: 1}
        todo = [self.entry]
        while todo:
            name = todo.pop()
            for instruction in self.computations[name]:
                if instruction.opcode == "fusion":
                    continue
                each = (
                    (self.trips(instruction) or 1)
                    if instruction.opcode == "while"
                    else 1
                )
                words = (
                    "body",
                    "branch_computations",
                    "true_computation",
                    "false_computation",
                    "calls",
                )
                words += ("to_apply",) if instruction.opcode == "call" else ()
                for called in (
                    c for word in words for c in instruction.called.get(word, ())
                ):
                    times[called] = times.get(called, 0) + times[name] * each
                    todo.append(called)
        return times

    @functools.cached_property
    def unknown_loops(self) -> int:
        """The loops whose number of iterations the compiler does not know."""
        loops = [
            i
            for name in self.runs
            for i in self.computations[name]
            if i.opcode == "while"
        ]
        return sum(self.trips(loop) is None for loop in loops)

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs; `None` if nobody knows.

        The compiler says it, or the loop is one of `jax.lax.scan`'s, which count from 0
        to a constant by ones.
        """
        if found := _TRIPS.search(loop.text):
            return int(found.group(1))
        condition = self.computations.get(loop.called.get("condition", ("",))[0], [])
        limits = [
            i
            for i in condition
            if i.opcode == "constant"
            and i.arrays[0].dtype == "s32"
            and not i.arrays[0].shape
        ]
        compares = [
            i
            for i in condition
            if i.is_root and i.opcode == "compare" and "direction=LT" in i.text
        ]
        if len(limits) == len(compares) == 1 and compares[0].operands[1:] == (
            limits[0].name,
        ):
            return int(limits[0].operands[0])
        return None

    def everywhere(self) -> Iterator[tuple[Instruction, int, list[Instruction]]]:
        """All instructions, those inside of fusions too, how often each runs, and the
        computation it is in.
        """
        for name, times in self.runs.items():
            todo = [name]
            while todo:
                computation = self.computations[todo.pop()]
                for instruction in computation:
                    yield instruction, times, computation
                    if instruction.opcode == "fusion":
                        todo += instruction.called.get("calls", ())


def parse(text: str) -> Module:
    """Reads the text of `jax.stages.Compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith("  ") and current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current.append(instruction)
        elif header := _COMPUTATION.match(line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        else:
            current = None
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    attributes = rest[end + 1 :]
    called: dict[str, tuple[str, ...]] = {}
    for word in _CALLED.finditer(attributes):
        after = attributes[word.end() :]
        names = (
            after[: after.index("}")]
            if after.startswith("{")
            else after.partition(",")[0].partition(" ")[0]
        )
        called[word.group(1)] = tuple(_NAME.findall(names))
    opcode, inner = rest[:start], rest[start + 1 : end]
    operands = (
        (inner,) if opcode in ("parameter", "constant") else tuple(_NAME.findall(inner))
    )
    return Instruction(
        head.group(2),
        opcode,
        _arrays(result),
        operands,
        called,
        bool(head.group(1)),
        attributes,
    )


def _arrays(text: str) -> tuple[Array, ...]:
    arrays: list[Array] = []
    for dtype, shape, layout in _ARRAY.findall(text):
        sizes = tuple(int(size.lstrip("<=")) for size in shape.split(",") if size)
        space = _SPACE.search(layout)
        arrays.append(Array(dtype, sizes, space is not None and space.group(1) != "0"))
    return tuple(arrays)


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    raise ValueError(text)

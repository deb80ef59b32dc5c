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
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|"
    r"false_computation)=(?:\{([^}]*)\}|([^, ]*))"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# A memory space other than the device's own, which is 0.
_ON_CHIP = re.compile(r"S\((?!0\))\d+\)")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result: its dtype in XLA's words (`f32`, `bf16`, `pred`), the
    shape of one device's part, and whether it is in a memory of the core's own, where
    it costs the device's memory nothing.
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
        arrays: Its result: one, or those of a tuple.
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
    """A compiled program: the instructions of its computations, in the order in which
    they are scheduled, and the name of the computation that it starts with.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs in a call; those inside of fusions are left
        out.

        A loop whose number of iterations the compiler does not know counts once.
        """
        times = {self.entry: 1}
        todo = [(self.entry, 1)]
        while todo:
            name, by_one = todo.pop()
            for instruction in self.computations[name]:
                opcode, calls = instruction.opcode, instruction.called
                if opcode == "fusion":
                    continue
                each = self.trips(instruction) if opcode == "while" else 1
                for word, called in calls.items():
                    # The condition of a loop costs next to nothing, and what a
                    # reduction applies to its elements is counted as the reduction.
                    if word == "condition" or (word == "to_apply" and opcode != "call"):
                        continue
                    for computation in called:
                        runs = by_one * (each or 1)
                        times[computation] = times.get(computation, 0) + runs
                        todo.append((computation, runs))
        return times

    @functools.cached_property
    def unknown_loops(self) -> int:
        """The loops whose number of iterations the compiler does not know."""
        return sum(
            instruction.opcode == "while" and self.trips(instruction) is None
            for instruction, _, _ in self.running()
        )

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs; `None` where it is not known.

        The compiler says it, or the loop is one of `jax.lax.scan`'s, which count from 0
        to a constant by ones.
        """
        if found := _TRIPS.search(loop.text):
            return int(found.group(1))
        condition = self.computations.get(loop.called.get("condition", ("",))[0], [])
        limits = {
            each.name: each.operands[0]
            for each in condition
            if each.opcode == "constant"
            and each.arrays[0].dtype == "s32"
            and not each.arrays[0].shape
        }
        compared = [
            each.operands[1:]
            for each in condition
            if each.is_root and each.opcode == "compare" and "direction=LT" in each.text
        ]
        if len(limits) == 1 and compared == [tuple(limits)]:
            return int(*limits.values())
        return None

    def running(self) -> Iterator[tuple[Instruction, int, dict[str, Instruction]]]:
        """The instructions that run by themselves, those inside of fusions left out;
        how often each does, and the instructions of its computation by their names.
        """
        for name, times in self.runs.items():
            named = {each.name: each for each in self.computations[name]}
            for instruction in named.values():
                yield instruction, times, named

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
    for line in _lines(text):
        if line.startswith("  ") and current is not None:
            if head := _INSTRUCTION.match(line):
                current.append(_instruction(head, line[head.end() :]))
        elif header := _COMPUTATION.match(line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        else:
            current = None
    return Module(computations, entry)


def _lines(text: str) -> list[str]:
    """The lines of a program, one for each instruction: what a kernel says of itself
    may go over several.
    """
    lines: list[str] = []
    for line in text.splitlines():
        goes_on = bool(line) and line != "}" and not line.startswith("  ")
        if goes_on and lines and lines[-1].startswith("  "):
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def _instruction(head: re.Match[str], rest: str) -> Instruction:
    """The instruction whose line is `head` and `rest`: the shape of its result, which
    may be a tuple in parentheses, its opcode, its operands in parentheses, and the
    attributes.
    """
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    opcode, inner, attributes = rest[:start], rest[start + 1 : end], rest[end + 1 :]
    operands = tuple(_NAME.findall(inner))
    if opcode in ("parameter", "constant"):
        operands = (inner,)
    called = {
        word: tuple(_NAME.findall(several or single))
        for word, several, single in _CALLED.findall(attributes)
    }
    name, is_root = head.group(2), bool(head.group(1))
    arrays = _arrays(result)
    return Instruction(name, opcode, arrays, operands, called, is_root, attributes)


def _arrays(text: str) -> tuple[Array, ...]:
    arrays: list[Array] = []
    for dtype, shape, layout in _ARRAY.findall(text):
        sizes = tuple(int(size.lstrip("<=")) for size in shape.split(",") if size)
        arrays.append(Array(dtype, sizes, bool(_ON_CHIP.search(layout))))
    return tuple(arrays)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis is closed that is opened at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    raise ValueError(text)

"""What each instruction of a compiled program has to do: operations, bytes, and where
the compiler says it, the cycles that it expects.

libtpu writes `estimated_cycles` beside each fusion; XLA for GPUs writes nothing of the
kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from keras_distribute.dry_run import collectives, contractions, traffic
from keras_distribute.dry_run.hlo import Instruction, Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Work(NamedTuple):
    """One instruction.

    Args:
        times: How often it runs in a call of the program.
        flops: Operations of its matrix products and convolutions each time, by dtype;
            not counted where the compiler says the cycles.
        num_bytes: That it reads and writes in the device's memory each time.
        cycles: Of the core's clock that the compiler expects; `None` where it says
            nothing.
    """

    name: str
    times: int
    flops: dict[str, float]
    num_bytes: int
    cycles: int | None


def of_program(module: Module) -> Iterator[Work]:
    """The instructions that take time of their own; collectives are no part of it."""
    for instruction, times, named in module.running():
        if _takes_no_time(instruction):
            continue
        found = _CYCLES.search(instruction.text)
        yield Work(
            instruction.name,
            times,
            {} if found else contractions.of_instruction(module, instruction, named),
            traffic.of_instruction(module, instruction, named),
            int(found.group(1)) if found else None,
        )


def _takes_no_time(instruction: Instruction) -> bool:
    """Whether an instruction takes none of its own: it renames, is a collective, which
    `collectives.py` is about, or begins a copy that others run beside.
    """
    opcode = instruction.opcode
    return (
        traffic.moves_nothing(instruction)
        or opcode.endswith("-start")
        or opcode in collectives.KINDS
    )

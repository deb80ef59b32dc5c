"""What a compiled step takes of a device's memory, by the compiler's own account; and
its refusals, read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from keras_distribute.training.planning import GROUPS, Plan

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
# "the total memory required for HLO temporaries (480.00G) exceeds available HBM
# (15.75G)", and "Used 17.21G of 15.75G hbm."
_REFUSALS = (
    re.compile(rf"memory required[^(]*\({_SIZE}\)[^(]*\({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE}"),
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    The first five are the step's own arrays; the others are the compiler's figures,
    `memory_analysis()` of the compiled program. On a TPU arrays are padded to tiles, so
    `arguments` is more than the first five together.

    Args:
        parameters: Weights that are trained.
        optimizer: The optimizer's variables.
        other_state: Weights that are not trained, such as moving statistics, and random
            streams.
        metrics: The variables of metrics.
        batch: One device's part of the batch, or of the batches of several steps.
        arguments: All that the program is given.
        outputs: All that it returns; the state takes the place of the old one.
        aliased: How much of `outputs` is in place of arguments.
        temporary: Activations, gradients, and whatever else is needed while it runs.
        code: The program itself.
        peak: The most at one time; on CPUs without `temporary`.
    """

    parameters: int
    optimizer: int
    other_state: int
    metrics: int
    batch: int
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    peak: int

    def needed(self, platform: str) -> int:
        """What the device must have: the compiler's peak on TPUs; elsewhere that leaves
        out what is temporary.
        """
        together = self.arguments + self.outputs - self.aliased + self.temporary
        return self.peak if platform == "tpu" else max(self.peak, together)


def of_program(compiled: Any, plan: Plan) -> Memory:
    """The account of a compiled step."""
    said = compiled.memory_analysis()
    groups = dict(zip(GROUPS, map(on_each_device, plan.state), strict=True))
    return Memory(
        groups["parameters"],
        groups["optimizer"],
        groups["other state"],
        groups["metrics"],
        on_each_device(jax.tree.leaves(plan.batch.data)) * plan.num_steps,
        said.argument_size_in_bytes,
        said.output_size_in_bytes,
        said.alias_size_in_bytes,
        said.temp_size_in_bytes,
        said.generated_code_size_in_bytes,
        said.peak_memory_in_bytes,
    )


def on_each_device(forms: Sequence[jax.ShapeDtypeStruct]) -> int:
    """The bytes that arrays with shardings take on one device."""
    return sum(math.prod(_part(form)) * form.dtype.itemsize for form in forms)


def _part(form: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return (
        form.sharding.shard_shape(form.shape)
        if form.sharding is not None
        else form.shape
    )


def refusal(text: str) -> tuple[int, int] | None:
    """The needed and the available bytes in a compiler's error; `None` if it says
    something else.
    """
    if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
        return None
    for pattern in _REFUSALS:
        if found := pattern.search(text):
            needed, needed_unit, available, available_unit = found.groups()
            return int(float(needed) * _UNITS[needed_unit]), int(
                float(available) * _UNITS[available_unit]
            )
    return None

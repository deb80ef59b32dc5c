"""What a compiled step takes of a device's memory, by the compiler's own account; and
the sizes in its refusals.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_distribute.devices.mesh import in_own_memory
from keras_distribute.dry_run.planning import Plan

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
# "the total memory required for HLO temporaries (480.00G) exceeds available HBM
# (15.75G)", and "Used 17.21G of 15.75G hbm."
_REFUSAL = re.compile(
    rf"memory required[^(]*\({_SIZE}\)[^(]*\({_SIZE}\)|Used {_SIZE} of {_SIZE}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        temporary: Activations, gradients, and all else that is needed while it runs.
        code: The program itself.
        peak: The most at one time; on CPUs without `temporary`.
        host: How much of the state is in the host's memory, and copied to the device by
            each step: under `kd.experimental.CentralStorageStrategy`. It is no part of
            `arguments` then, and of `temporary` while the program needs it.
    """

    parameters: int = 0
    optimizer: int = 0
    other_state: int = 0
    metrics: int = 0
    batch: int = 0
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    peak: int
    host: int = 0

    def needed(self, platform: str) -> int:
        """What the device must have: the compiler's peak on TPUs; elsewhere that leaves
        out what is temporary.
        """
        total = self.arguments + self.outputs - self.aliased + self.temporary
        return self.peak if platform == "tpu" else max(self.peak, total)


def needed_by(compiled: Any, platform: str) -> int:
    """What a device must have for any kind of compiled program, as `Memory.needed`."""
    return _of(compiled.memory_analysis()).needed(platform)


def of_program(compiled: Any, plan: Plan) -> Memory:
    """The memory that a compiled step takes."""
    state = plan.state
    return dataclasses.replace(
        _of(compiled.memory_analysis()),
        parameters=bytes_per_device(state.weights),
        other_state=bytes_per_device(state.others),
        optimizer=bytes_per_device(state.slots),
        metrics=bytes_per_device(state.metrics),
        batch=bytes_per_device(jax.tree.leaves(plan.batch.data)) * plan.num_steps,
        host=sum(bytes_per_device(filter(_is_on_host, form)) for form in plan.state),
    )


def _of(analysis: Any) -> Memory:
    """The compiler's figures alone."""
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        peak=analysis.peak_memory_in_bytes,
    )


def _is_on_host(form: jax.ShapeDtypeStruct) -> bool:
    sharding = form.sharding
    return isinstance(sharding, NamedSharding) and sharding != in_own_memory(sharding)


def bytes_per_device(forms: Iterable[Any]) -> int:
    """What arrays, or `jax.ShapeDtypeStruct`s, take on each device."""
    total = 0
    for form in forms:
        own = form.sharding.shard_shape(form.shape) if form.sharding else form.shape
        total += math.prod(own) * form.dtype.itemsize
    return total


def refusal(text: str) -> tuple[int, int] | None:
    """The needed and available bytes in a compiler's error; `None` for other errors."""
    if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
        return None
    found = _REFUSAL.search(text)
    if found is None:
        return None
    # Half of the groups are those of the other form of the text.
    number, unit, other, other_unit = (g for g in found.groups() if g is not None)
    return int(float(number) * _UNITS[unit]), int(float(other) * _UNITS[other_unit])

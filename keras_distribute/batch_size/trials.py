"""One size of batch after the other, tried: whether its steps run, and what they take.

All processes try the same sizes, and where one has no memory for a size, all take it
for too large. They agree on that before they run a step, since one that fails in the
middle of it would let the others wait for it: each sets aside what the step will take.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError

from keras_distribute.batch_size import example
from keras_distribute.batch_size.host_copy import HostCopy
from keras_distribute.batch_size.steps import PlainSteps, Steps, StrategySteps
from keras_distribute.cluster.agreement import Channel
from keras_distribute.dry_run.examples import rows_of, with_rows
from keras_distribute.errors import InputError, OutOfMemoryError
from keras_distribute.strategies.base import Strategy

_SIGNS = ("resource_exhausted", "out of memory", "alloc_failed")


class Trials:
    """Tries batches of a model.

    Args:
        batch: Rows to try with, on the host.
        saved: The values of all that a step changes.
        memory_limit: The bytes that a step may take of each device; `None` for what
            the devices have.
        asked: The user's arguments that decide which batches are tried.

    Attributes:
        limit: The bytes that there are; `None` where that is not known.
        rows: Of the batch, in all processes together.
    """

    def __init__(
        self,
        trainer: Any,
        strategy: Strategy | None,
        batch: Any,
        saved: HostCopy,
        *,
        memory_limit: int | None,
        count: int,
        asked: str,
    ) -> None:
        self._trainer, self._strategy = trainer, strategy
        self._batch, self._saved, self._count = batch, saved, count
        self._devices = _devices(trainer, strategy)
        mesh = None if strategy is None else strategy.replica_mesh
        self._num_processes = 1 if mesh is None else mesh.num_processes
        self._channel = Channel("find_batch_size", self._num_processes)
        limit = memory_limit or bytes_of(self._devices)
        rows = rows_of(batch)
        form = f"{with_rows(batch, 1)}, {asked}"
        said = self._channel.exchange((form, rows, limit))
        if any(other != form for other, _, _ in said):
            raise InputError(
                "The processes would try different batches.",
                received="; ".join(f"process {i}: {s[0]}" for i, s in enumerate(said)),
                fix="pass data of the same shapes and dtypes in every process, and "
                "the same numbers; memory_limit alone may differ.",
            )
        limits = [other for _, _, other in said if other is not None]
        self.limit: int | None = min(limits, default=None)
        # Each process has its share of the first batch.
        self.rows = sum(rows for _, rows, _ in said)

    def needed(self, rows: int, accumulates: bool = False) -> int | None:
        """The bytes that steps on so many rows take of each device; `None` if they ran
        out of memory. Steps run unless those bytes are over the limit.

        Args:
            accumulates: Whether there has to be room for accumulators of gradients,
                which the optimizer does not have yet.

        Raises:
            OutOfMemoryError: Of several processes, in the middle of a step.
        """
        try:
            steps = self._compiled(rows)
            extra = steps.weights if accumulates and steps is not None else 0
            own = None if steps is None else steps.needed + extra
            fits = own is not None and (self.limit is None or own <= self.limit)
            if fits:
                self._saved.give_away()
            if fits and self._num_processes > 1 and not self._has_room(own or 0):
                own = None
            said = self._channel.exchange(own)
            known = [each for each in said if each is not None]
            if steps is None or len(known) < len(said):
                return None
            needed = max(known)
            if self.limit is not None and needed > self.limit:
                return needed
            return needed if self._runs(steps, rows, extra) else None
        finally:
            # What an error, or a program, still refers to is in circles.
            gc.collect()

    def _compiled(self, rows: int) -> Steps | None:
        form = with_rows(self._batch, rows)
        try:
            if self._strategy is None:
                return PlainSteps(self._trainer, form)
            return StrategySteps(self._trainer, self._strategy, form)
        except Exception as error:
            if not ran_out(error):
                raise
        return None

    def _has_room(self, needed: int) -> bool:
        """Whether this process can have the memory that a step will take, beside the
        values of the variables.
        """
        standing = self._saved.bytes_on(self._devices[0])
        try:
            _set_aside(max(0, needed - standing), self._devices)
        except Exception as error:
            if not ran_out(error):
                raise
            return False
        return True

    def _runs(self, steps: Steps, rows: int, extra: int) -> bool:
        try:
            kept = _set_aside(extra, self._devices)
            steps.run(example.repeated(self._batch, rows), self._count)
            del kept
        except Exception as error:
            if not ran_out(error):
                raise
            if self._num_processes > 1:
                raise OutOfMemoryError(
                    "A process ran out of memory in the middle of a step, so the other "
                    "processes cannot go on.",
                    received=f"{rows} rows; {str(error).splitlines()[0]}",
                    fix="a limit that leaves more: kd.find_batch_size(model, x, y, "
                    f"memory_limit={(steps.needed + extra) * 9 // 10})",
                ) from error
            return False
        return True


def ran_out(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no more memory."""
    if isinstance(error, JaxRuntimeError):
        return any(sign in str(error).lower() for sign in _SIGNS)
    return isinstance(error, MemoryError) and not isinstance(error, OutOfMemoryError)


def bytes_of(devices: Sequence[Any]) -> int | None:
    """The memory of each of some devices for programs; `None` where unknown (CPUs)."""
    stats = [device.memory_stats() or {} for device in devices]
    limits = [each.get("bytes_limit") for each in stats]
    return min((each for each in limits if each), default=None)


def _devices(trainer: Any, strategy: Strategy | None) -> list[Any]:
    """The devices of this process that the steps run on."""
    if strategy is not None:
        return list(strategy.replica_mesh.local_devices)
    weights = [v.value for v in trainer.weights]
    return list(weights[0].devices()) if weights else jax.local_devices()[:1]


def _set_aside(size: int, devices: Sequence[Any]) -> list[jax.Array]:
    """So many bytes of each device."""
    if not size:
        return []
    # Made there: on its way from the host to a GPU it would need pinned memory.
    kept = [jnp.zeros(size, jnp.uint8, device=device) for device in devices]
    return jax.block_until_ready(kept)

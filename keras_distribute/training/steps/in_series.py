"""Steps that give the same bits on any number of devices (`deterministic=True`), where
their rows mix.

Any other step is that of each replica's rows (`by_rows.py`), of which a device that has
several runs one after the other (`devices/in_series.py`). What sees other rows is
computed whole on every device: as exact, and no faster than one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute import context
from keras_distribute._compat.trainer import TrainState
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.training.steps import accumulating
from keras_distribute.training.steps.step_programs import Step
from keras_distribute.variables.components import of_first


def whole_on_each(mesh: ReplicaMesh, step: Step, accumulators: Sequence[int]) -> Step:
    """A step that each device does alone, on all rows.

    Args:
        accumulators: Where the state has gradient accumulators among its slots, each
            with an axis for the replicas.
    """
    same, split = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

    def on_all_rows(state: Any, data: Any) -> Any:
        frame = context.frame()
        assert frame.batch is not None
        batch = dataclasses.replace(frame.batch, replicated=True)
        with context.entered(dataclasses.replace(frame, batch=batch)):
            return step(state, data)

    def on_sums(state: Any, data: Any) -> Any:
        sums = {i: lax.psum(state.slots[i][0], REPLICA_AXIS) for i in accumulators}
        before = accumulating.with_changed(state.slots, sums)
        logs, new = on_all_rows(state._replace(slots=before), data)
        new = TrainState(*new)
        first = {i: of_first(new.slots[i])[None] for i in accumulators}
        slots = accumulating.with_changed(new.slots, first)
        return logs, TrainState(*map(list, new._replace(slots=slots)))

    def whole(state: Any, data: Any) -> Any:
        if not accumulators:
            program = over_replicas(mesh, on_all_rows, (same, same), (same, same))
            return program(state, data)
        state = TrainState(*map(list, state))
        places = jax.tree.map(lambda _: same, state)
        for i in accumulators:
            places.slots[i] = split
        program = over_replicas(mesh, on_sums, (places, same), (same, places))
        return program(state, data)

    return whole

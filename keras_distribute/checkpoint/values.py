"""The values of variables on the host, and back into variables: on the same replicas
bit for bit, on others by value.

A divided array has no copies that it could be compared with. So its devices compute a
checksum, which is compared with that of the copy on the host, stands in the checkpoint,
and is compared again with what the devices have after it was restored.

A sync-on-read variable is saved as the components of its replicas. Restored on as many
replicas, each gets its own again; anywhere else the variable gets the value that they
add up to, by its aggregation: TensorFlow's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute import context
from keras_distribute._compat import checkpoint as compat
from keras_distribute.checkpoint.manifest import VariableRecord
from keras_distribute.cluster import agreement
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.consistency import checksums
from keras_distribute.devices.mesh import on_every_replica, on_host
from keras_distribute.errors import CheckpointError, ContextError, VariableScopeError
from keras_distribute.types import ReduceOp
from keras_distribute.values.cross_device_ops import widened
from keras_distribute.values.per_replica import PerReplica
from keras_distribute.variables import (
    Blocks,
    DistributedVariable,
    MirroredVariable,
    SyncOnReadVariable,
)


def fetch(variables: dict[str, Any]) -> tuple[Arrays, dict[str, VariableRecord]]:
    """Copies of the variables' values in host memory, which no later step can change.

    Returns:
        Arrays of the variables' shapes, `(num_replicas, *shape)` for sync-on-read ones,
        and how to read them. Of tables that are elsewhere, and may be too large for
        this process, `Blocks`, which are read when they are written: until then no step
        may change them.

    Raises:
        CheckpointError: If a variable has no value now, or the copy of a divided one
            is not what the devices have.
    """
    settle(variables)
    in_blocks = {n: _strategy_of(v)._blocks_of(v) for n, v in variables.items()}
    stored = _stored({n: v for n, v in variables.items() if in_blocks[n] is None})
    divided = {n: a for n, a in stored.items() if _is_divided(variables[n], a)}
    sums = checksums.of_arrays(divided)
    for array in stored.values():
        array.copy_to_host_async()
    arrays: dict[str, Any] = {}
    records: dict[str, VariableRecord] = {}
    for name, variable in variables.items():
        if in_blocks[name] is not None:
            arrays[name] = in_blocks[name]
            records[name] = VariableRecord(variable.path)
            continue
        array = stored.pop(name)
        groups = _strategy_of(variable)._values_of_groups(variable)
        if groups is not None:
            arrays[name] = np.stack(groups)
            exact = jnp.issubdtype(arrays[name].dtype, jnp.inexact)
            aggregation = "mean" if exact else "only_first_replica"
            records[name] = VariableRecord(variable.path, len(groups), aggregation)
        elif isinstance(variable, SyncOnReadVariable):
            arrays[name] = _components(array)
            records[name] = VariableRecord(
                variable.path, len(arrays[name]), variable.aggregation
            )
        else:
            arrays[name] = _copied(array)
            own = sums[name].whole if name in sums else None
            records[name] = VariableRecord(variable.path, checksum=own)
    _check_copies(variables, arrays, sums)
    return arrays, records


def assign(
    variable: Any,
    array: np.ndarray[Any, Any] | Blocks,
    record: VariableRecord,
    optimizers: Sequence[Any],
) -> None:
    """Gives a variable, ours or Keras's own, the value that `fetch` returned.

    Args:
        optimizers: Those that may have the variable.
    """
    strategy = _strategy_of(variable)
    if isinstance(array, Blocks):
        if strategy._assign_blocks(variable, array, optimizers):
            return
        array = array.whole()
    if not _same_replicas(variable, record):
        # The groups of local steps get their slots, if there are as many of them.
        has_groups = record.replicas is not None
        if not (has_groups and strategy._assign_groups(variable, list(array))):
            variable.assign(_value(array, record))
        return
    mesh = variable.replica_mesh
    own = array[mesh.local_replicas.start : mesh.local_replicas.stop]
    variable.assign(PerReplica(stacked=mesh.put_split(own)))


def check_assigned(
    variables: dict[str, Any], records: dict[str, VariableRecord]
) -> None:
    """Compares what the devices have, after `assign`, with what they had when it was
    saved.

    Raises:
        CheckpointError: Where that is not the same, of a variable that was divided.
    """
    checked = {n: v for n, v in variables.items() if records[n].checksum is not None}
    stored = {n: compat.stored_array(v) for n, v in checked.items()}
    sums = checksums.of_arrays(stored)
    wrong = [n for n, own in sums.items() if own.whole != records[n].checksum]
    if wrong:
        raise CheckpointError(
            f"{_counted(wrong)} on the devices other bits than were saved: "
            f"{', '.join(wrong)}.",
            received="checksums that the devices computed of what they were given; the "
            "files are intact.",
            fix="restore again. If it happens again, memory or a transfer errs: find "
            "the device with strategy.check_consistency(...) and smaller meshes.",
        )


def settle(variables: dict[str, Any]) -> None:
    """Waits for what is under way on other machines, and would change variables."""
    ours = (v for v in variables.values() if isinstance(v, DistributedVariable))
    found = {id(v.distribute_strategy): v.distribute_strategy for v in ours}
    for strategy in found.values():
        strategy.wait_for_steps()


def check_assignable(
    variables: dict[str, Any], records: dict[str, VariableRecord]
) -> None:
    """Raises where an assignment would, before the first one is made.

    Raises:
        VariableScopeError: In the scope of another strategy than a variable's.
        CheckpointError: For components that have no aggregation, on another number of
            replicas.
    """
    here = context.get_strategy() if context.has_strategy() else None
    for name, variable in variables.items():
        record = records[name]
        if isinstance(variable, DistributedVariable) and here not in (
            None,
            variable.distribute_strategy,
        ):
            raise VariableScopeError(
                f"{name!r} lives on another strategy than the current one.",
                received=f"a variable of {variable.distribute_strategy!r}, restored in "
                f"the scope of {here!r}.",
                fix="leave the other strategy's scope first.",
            )
        if (
            record.replicas is not None
            and record.aggregation == "none"
            and not _same_replicas(variable, record)
        ):
            raise CheckpointError(
                f"The components of {name!r} have no aggregation, so they only fit "
                f"{record.replicas} replicas.",
                received=f"{variable!r}.",
                fix=f"restore on {record.replicas} replicas, or save a variable with "
                "an aggregation.",
            )


def _is_divided(variable: Any, array: Any) -> bool:
    """Whether it is one value, of which devices have parts."""
    return (
        isinstance(variable, MirroredVariable)
        and checksums.can_have(array)
        and not array.sharding.is_fully_replicated
        and _strategy_of(variable)._values_of_groups(variable) is None
    )


def _check_copies(
    variables: dict[str, Any], arrays: Arrays, sums: dict[str, checksums.OfParts]
) -> None:
    """Compares the copies of divided arrays with what the devices have.

    Raises:
        CheckpointError: In every process, where one of them has another copy.
    """
    wrong = [n for n, own in sums.items() if checksums.on_host(arrays[n]) != own.whole]
    ours = (v for n, v in variables.items() if n in sums)
    num_processes = max((v.replica_mesh.num_processes for v in ours), default=1)
    said = agreement.exchange("copies of divided variables", wrong, num_processes)
    wrong = list(dict.fromkeys(name for each in said for name in each))
    if wrong:
        raise CheckpointError(
            f"{_counted(wrong)} other bits on the host than on the devices: "
            f"{', '.join(wrong)}.",
            received="a copy with another checksum than the devices computed. Nothing "
            "was written; earlier checkpoints are as they were.",
            fix="save again. If it happens again, memory or a transfer errs.",
        )


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} variable{'s have' if len(names) > 1 else ' has'}"


def _same_replicas(variable: Any, record: VariableRecord) -> bool:
    if not isinstance(variable, SyncOnReadVariable):
        return False
    return (record.replicas, record.aggregation) == (
        variable.replica_mesh.num_replicas,
        variable.aggregation,
    )


def _strategy_of(variable: Any) -> Any:
    """The strategy of a variable, ours or Keras's own."""
    if isinstance(variable, DistributedVariable):
        return variable.distribute_strategy
    return context.default_strategy()


def _value(array: np.ndarray[Any, Any], record: VariableRecord) -> Any:
    """What the variable read as when it was saved."""
    if record.replicas is None:
        return array
    if record.aggregation == "only_first_replica":
        return array[0]
    if record.aggregation == "mean" and (array == array[:1]).all():
        return array[0]
    stacked = jnp.asarray(array)
    if record.aggregation == "sum":
        return jnp.sum(stacked, 0, dtype=stacked.dtype)
    total = jnp.sum(widened(ReduceOp.MEAN, stacked), 0)
    return (total / record.replicas).astype(stacked.dtype)


def _components(array: jax.Array) -> np.ndarray[Any, Any]:
    if not array.is_fully_addressable:  # Every process takes part, and gets all.
        return np.asarray(on_every_replica(array).addressable_data(0))
    components = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        components[shard.index] = np.asarray(shard.data)
    return components


def _copied(array: jax.Array) -> np.ndarray[Any, Any]:
    # On a CPU this is the variable's own memory, which XLA gives the next step to write
    # into: its buffers are donated.
    shared = next(iter(array.devices())).platform == "cpu"
    return np.array(on_host(array)) if shared else on_host(array)


def _stored(variables: dict[str, Any]) -> dict[str, Any]:
    """The arrays of all variables, each read once: some are on other machines.

    Raises:
        CheckpointError: If a variable has no value now.
    """
    stored: dict[str, Any] = {}
    for name, variable in variables.items():
        try:
            stored[name] = compat.stored_array(variable)
        except ContextError:  # Its memory was given to a step that failed.
            stored[name] = None
    gone = [name for name, a in stored.items() if a is None or a.is_deleted()]
    if gone:
        raise CheckpointError(
            f"{len(gone)} variable(s) have no value: {', '.join(gone)}.",
            received="variables that were not initialized yet, or whose memory was "
            "given to a step that failed.",
            fix="save outside of traced functions, and restore an earlier checkpoint "
            "after a failed step.",
        )
    return stored

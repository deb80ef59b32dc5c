"""`RaiseOnNaN`: ends a `fit` with a NaN or infinite loss, and says where it is from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_distribute._compat.adapters import is_sparse
from keras_distribute.cluster import agreement, processes
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh, mesh_of_array
from keras_distribute.errors import NonFiniteError
from keras_distribute.training import calls
from keras_distribute.training.batches import WHOLE, Placed

_ARGUMENTS = ("x", "y", "sample_weight")  # Of a batch that is a tuple.


class RaiseOnNaN(keras.callbacks.Callback):
    """Raises an error, in every process, when the loss of a step is not finite;
    earlier checkpoints stay.

    The loss is that of all replicas, so all processes see it at the same step. The
    error names the step, and the replicas and processes whose rows of the batch hold
    values that are not finite themselves. Where there are none, the loss, the gradients
    or the learning rate are the reason, or a device that computes wrongly. Under the
    launcher, `--max-restarts` then goes on from the last checkpoint. Without a
    strategy, with `run_eagerly=True` and with parameter servers the batch is not looked
    at.

    Differs from `keras.callbacks.TerminateOnNaN`, which ends the training without an
    error, and without a reason. Like that one it waits for each step. With
    `steps_per_execution`, a group of steps is looked at as a whole.

    Raises:
        NonFiniteError: From `fit`.

    Example:
        >>> import numpy as np, keras, keras_distribute as kd
        >>> with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x, y = np.ones((8, 3)), np.ones((8, 1))
        >>> x[7] = np.nan
        >>> try:
        ...     options = {"batch_size": 4, "shuffle": False, "verbose": 0}
        ...     _ = model.fit(x, y, callbacks=[kd.callbacks.RaiseOnNaN()], **options)
        ... except kd.errors.NonFiniteError as error:
        ...     print(str(error).splitlines()[1])
          Received: values that are not finite in x of replica 1 (process 0).
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to keep the batch of each step."""
        self._epoch = 0
        calls.keep_batches(True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Looks at the loss."""
        loss = (logs or {}).get("loss")
        if loss is None or np.isfinite(loss):
            return
        batches = calls.stack.batches
        own = [text for placed in batches or [] for text in _found_in(placed)]
        calls.keep_batches(False)
        count = processes.process_count()
        said = (bool(batches), own)
        of_each = agreement.exchange("a loss that is not finite", said, count)
        found = ", ".join(text for _, texts in of_each for text in texts)
        fix = (
            "a smaller learning rate, clipnorm=1.0 in the optimizer, or a loss "
            "without 0 / 0 and log(0)."
        )
        if found:
            received = f"values that are not finite in {found}."
            fix = "look at those rows, and leave them out of the data."
        elif all(has_looked for has_looked, _ in of_each):
            received = (
                "a batch whose values are all finite, in every one of "
                f"{count} process(es)."
            )
        else:
            received = "a batch that was not looked at, since no compiled step has it."
            fix = f"look for such values in the data; where there are none, {fix}"
        raise NonFiniteError(
            f"The loss is {float(loss)} since step {batch + 1} of epoch "
            f"{self._epoch + 1}.",
            received=received,
            fix=fix,
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Drops the last batch."""
        calls.keep_batches(False)


def _found_in(placed: Placed) -> list[str]:
    """This process's arrays with values that are not finite, in words."""
    # In order, each once: the logical devices of a replica have the same rows.
    found: dict[str, None] = {}
    leaves = jax.tree_util.tree_flatten_with_path(placed.data, is_leaf=is_sparse)[0]
    for (path, leaf), rows in zip(leaves, placed.rows, strict=True):
        for array in jax.tree.leaves(leaf):
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                continue
            mesh = ReplicaMesh(mesh_of_array(array))
            for shard in array.addressable_shards:
                place = mesh.replica_at(mesh.devices.index(shard.device))
                process, name = shard.device.process_index, _name_of(path)
                for replica in _not_finite(_true_part(shard, rows), array, mesh):
                    at = place + replica
                    found[f"{name} of replica {at} (process {process})"] = None
    return list(found)


def _not_finite(
    part: np.ndarray[Any, Any], array: jax.Array, mesh: ReplicaMesh
) -> list[int]:
    """Which of a device's replicas have values that are not finite; 0 where all have
    the same.

    Args:
        part: The true rows of the device.
        array: Of all devices.
    """
    wrong = ~np.isfinite(part)
    split = getattr(array.sharding, "spec", ())[:1] == (REPLICA_AXIS,)
    if not split:
        return [0] if wrong.any() else []
    each = array.shape[0] // mesh.num_replicas
    return sorted({int(row) // each for row in np.nonzero(wrong)[0]})


def _true_part(shard: Any, rows: Any) -> np.ndarray[Any, Any]:
    """A replica's rows without those that pad the batch with its last one."""
    part = np.asarray(shard.data, np.float64)
    if not isinstance(rows, int) or rows == WHOLE:
        return part
    return part[: max(0, rows - (shard.index[0].start or 0))]


def _name_of(path: Any) -> str:
    first = getattr(path[0], "idx", None) if path else None
    if first is None or first >= len(_ARGUMENTS):
        return "the batch" + jax.tree_util.keystr(path)
    return _ARGUMENTS[first] + jax.tree_util.keystr(path[1:])

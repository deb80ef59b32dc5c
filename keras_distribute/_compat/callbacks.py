"""Keras's callbacks: the list that `fit` calls, and what some of them keep outside of
their attributes.

- `CallbackList`, by whose name Keras's `fit` makes the list, is replaced by a subclass
  (`training/callback_list.py`), which says why.
- `CallbackList._flush_futures`, `_async_train`: callbacks of a step may still run in a
  thread when the next one begins.
- `Trainer._initial_epoch`: where `fit` begins; Keras's own `BackupAndRestore` sets it.
- `MonitorCallback._set_monitor_op`: a function that is chosen at the end of the first
  epoch, and is no state.
- `TensorBoard`, `CSVLogger`: attributes that say where this process writes, and what is
  open there, which another process has to find out for itself.
- `OrbaxCheckpoint.checkpointer`: saves in the background, and raises if a step is there
  already.
- `orbax_checkpoint._get_state_tree`: what `OrbaxCheckpoint` saves. Orbax notes the
  devices of each array, and plain Keras cannot load one that was on more devices than
  it has; a replicated array is as well saved from one of them.
- `BackupAndRestore._save_model`: in a process that is not the chief it only reads.
  Goes when Keras knows of processes.
- `global_state`: the generator that `keras.random` uses where no seed is given.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from typing import Any

import jax
import keras
import numpy as np
from keras.callbacks import CallbackList
from keras.src import callbacks as callbacks_module
from keras.src.backend.common import global_state
from keras.src.callbacks import orbax_checkpoint
from keras.src.callbacks.monitor_callback import MonitorCallback
from keras.src.random import seed_generator

from keras_distribute._compat.names import BaseTrainer
from keras_distribute._compat.seams import Replacements, check

check(BaseTrainer, "_initial_epoch")
check(CallbackList, "_async_train", "_flush_futures")
check(MonitorCallback, "_set_monitor_op")
check(keras.callbacks.BackupAndRestore, "_save_model", "_weights_path")


def install(replaced: Replacements, callback_list: type) -> None:
    """Puts a subclass in the place of Keras's list of callbacks."""
    get_state_tree = orbax_checkpoint._get_state_tree

    def from_one_device(model: Any) -> Any:
        return jax.tree.map(_on_one_device, get_state_tree(model))

    replaced.assign(callbacks_module, "CallbackList", callback_list)
    replaced.assign(keras.callbacks, "CallbackList", callback_list)
    replaced.replace(orbax_checkpoint, "_get_state_tree", from_one_device)


def _on_one_device(value: Any) -> Any:
    under_keras = keras.distribution.distribution() is not None
    if under_keras or not isinstance(value, jax.Array) or not value.is_fully_replicated:
        return value
    return value.addressable_data(0)


_OF_THIS_PROCESS = {
    keras.callbacks.CSVLogger: frozenset({"append_header", "keys", "sep", "writer"}),
    keras.callbacks.TensorBoard: frozenset(
        {
            "_is_tracing",
            "_log_write_dir",
            "_prev_summary_state",
            "_profiler_started",
            "_should_trace",
            "_should_write_train_graph",
            "_start_batch",
            "_stop_batch",
            "_train_dir",
            "_val_dir",
            "_writers",
        }
    ),
}


def of_this_process(callback: Any) -> frozenset[str]:
    """The attributes of a callback that mean nothing to another process."""
    found = (n for kind, n in _OF_THIS_PROCESS.items() if isinstance(callback, kind))
    return frozenset().union(*found)


def only_read(callback: Any) -> None:
    """Makes Keras's `BackupAndRestore` of a process that is not the chief read the
    variables, and write nothing.
    """
    callback._save_model = functools.partial(_read_weights, callback)
    callback.on_train_end = _nothing


def _read_weights(callback: Any) -> None:
    callback.model.save_weights(callback._weights_path, overwrite=True)


def _nothing(logs: Any = None) -> None:
    return


def finish(callbacks: Any) -> None:
    """Returns when the callbacks of the last step have run."""
    if callbacks._async_train:
        callbacks._flush_futures()


def begin_at(trainer: Any, epoch: int | None) -> None:
    """Makes `fit` begin at another epoch than its argument says; `None`: as it says."""
    trainer._initial_epoch = epoch


def choose_monitor(callback: Any) -> None:
    """Chooses whether less or more is better, as at the end of the first epoch."""
    if isinstance(callback, MonitorCallback) and callback.monitor_op is None:
        callback._set_monitor_op()


def has_monitor(callback: Any) -> bool:
    """Whether that was chosen."""
    return getattr(callback, "monitor_op", None) is not None


def last_orbax_step(callback: Any) -> int | None:
    """The last step that an `OrbaxCheckpoint` has saved; `None` without one."""
    callback.checkpointer.wait()
    return max((info.step for info in callback.checkpointer.checkpoints), default=None)


def forget_orbax_steps(callback: Any, last: int | None) -> None:
    """Deletes the steps after `last`, so that an `OrbaxCheckpoint` saves them again."""
    for info in callback.checkpointer.checkpoints:
        if last is None or info.step > last:
            callback.checkpointer.delete(info.step)


def global_seed() -> np.ndarray[Any, Any] | None:
    """The state of this thread's global seed generator; `None` before it was used."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state)


def set_global_seed(state: np.ndarray[Any, Any] | None) -> None:
    """Gives it back."""
    if state is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        seed_generator.global_seed_generator().state.assign(state)

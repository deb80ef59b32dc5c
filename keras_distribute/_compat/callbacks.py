"""Keras's callbacks: the list that `fit` calls, and what some of them keep outside of
their attributes.

- `CallbackList.on_train_begin`: a callback cannot see the others of its `fit`, nor be
  called after all of them. One with a method `_keras_distribute_joins(callbacks)` is
  moved to the end of the list, and given it, before the training begins; one with an
  attribute `_keras_distribute_first` is moved to the front.
- `CallbackList.on_train_batch_end` and its like: Keras hands the logs of each step to a
  thread, which waits for their values, even where no callback is called with them.
  There the step is left alone. Goes when Keras does that.
- `CallbackList._flush_futures`, `_async_train`: callbacks of a step may still run in a
  thread when the next one begins.
- `Trainer._initial_epoch`: where `fit` begins; Keras's own `BackupAndRestore` sets it.
- `MonitorCallback._set_monitor_op`: a function that is chosen at the end of the first
  epoch, and is no state.
- `OrbaxCheckpoint.checkpointer`: saves in the background, and raises if a step is there
  already.
- `orbax_checkpoint._get_state_tree`: what `OrbaxCheckpoint` saves. Orbax notes the
  devices of each array, and plain Keras cannot load one that was on more devices than
  it has; a replicated array is as well saved from one of them.
- `CallbackList.__init__`: in a process that is not the chief, callbacks that write
  files or print are left out, or write where nobody looks, while those that read
  variables take part. `BackupAndRestore._save_model` of Keras's own then only reads.
  Goes when Keras knows of processes.
- `global_state`: the generator that `keras.random` uses where no seed is given.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import tree
from keras.callbacks import CallbackList, ProgbarLogger
from keras.src.backend.common import global_state
from keras.src.callbacks import orbax_checkpoint
from keras.src.callbacks.monitor_callback import MonitorCallback
from keras.src.random import seed_generator

from keras_distribute._compat.names import BaseTrainer
from keras_distribute._compat.seams import Replacements, check
from keras_distribute.errors import CheckpointError

check(BaseTrainer, "_initial_epoch")
check(CallbackList, "_async_train", "_flush_futures", "_model")
check(MonitorCallback, "_set_monitor_op")
check(keras.callbacks.BackupAndRestore, "_save_model", "_weights_path")

Undo = Callable[[], None]
JOINS, FIRST = "_keras_distribute_joins", "_keras_distribute_first"
_SEE_STEPS = "_keras_distribute_see_steps"
# Of Keras's callbacks with methods for steps, those whose attribute may say that they
# do nothing there.
_BY_EPOCH = {
    keras.callbacks.BackupAndRestore: "save_freq",
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.OrbaxCheckpoint: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
}


def install(is_quiet: Callable[[], bool]) -> Undo:
    """Lets callbacks join, and returns what ends that.

    Args:
        is_quiet: Whether this process leaves files and printing to another one.
    """
    original, initialize = CallbackList.on_train_begin, CallbackList.__init__

    def init(
        self: Any,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        **more: Any,
    ) -> None:
        if is_quiet():
            callbacks, add_progbar = (
                _quiet(tree.flatten(callbacks) if callbacks else []),
                False,
            )
        initialize(self, callbacks, add_history, add_progbar, **more)

    def on_train_begin(self: Any, logs: Any = None) -> None:
        _refuse_orbax(self.callbacks)
        first = [callback for callback in self.callbacks if hasattr(callback, FIRST)]
        if first:
            self.callbacks = first + [
                callback for callback in self.callbacks if callback not in first
            ]
        joining = [callback for callback in self.callbacks if hasattr(callback, JOINS)]
        if joining:
            self.callbacks = [
                callback for callback in self.callbacks if callback not in joining
            ] + joining
        for callback in joining:
            getattr(callback, JOINS)(self)
        trainer = getattr(self, "_model", None)
        if trainer is not None:
            object.__setattr__(
                trainer, _SEE_STEPS, any(map(_sees_steps, self.callbacks))
            )
        original(self, logs)

    def heard_only(name: str) -> Callable[..., Any]:
        method = getattr(CallbackList, name)

        def batch_end(self: Any, batch: int, logs: Any = None) -> None:
            if any(_has_own(each, name, "on_batch_end") for each in self.callbacks):
                method(self, batch, logs)

        return batch_end

    get_state_tree = orbax_checkpoint._get_state_tree

    def from_one_device(model: Any) -> Any:
        return jax.tree.map(_on_one_device, get_state_tree(model))

    replaced = Replacements()
    replaced.replace(CallbackList, "__init__", init)
    replaced.replace(CallbackList, "on_train_begin", on_train_begin)
    replaced.replace(orbax_checkpoint, "_get_state_tree", from_one_device)
    for kind in ("train", "test", "predict"):
        name = f"on_{kind}_batch_end"
        replaced.replace(CallbackList, name, heard_only(name))
    return replaced.undo


def see_steps(trainer: Any) -> bool:
    """Whether a callback of the trainer's `fit` is called with each step; the progress
    bar may miss some.
    """
    return getattr(trainer, _SEE_STEPS, False)


def _sees_steps(callback: Any) -> bool:
    own = _has_own(
        callback,
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_batch_begin",
        "on_batch_end",
    )
    by_epoch = (
        type(callback) in _BY_EPOCH
        and getattr(callback, _BY_EPOCH[type(callback)]) == "epoch"
    )
    return (
        own
        and not by_epoch
        and not isinstance(callback, ProgbarLogger)
        and not hasattr(callback, FIRST)
    )


def _has_own(callback: Any, *names: str) -> bool:
    """Whether a callback has a method of its own of one of these names."""
    return any(
        getattr(type(callback), name, None)
        is not getattr(keras.callbacks.Callback, name)
        or name in vars(callback)
        for name in names
    )


def _refuse_orbax(callbacks: list[Any]) -> None:
    several = jax.process_count() > 1 and keras.distribution.distribution() is None
    if several and any(
        isinstance(callback, keras.callbacks.OrbaxCheckpoint) for callback in callbacks
    ):
        raise CheckpointError(
            "keras.callbacks.OrbaxCheckpoint cannot save what several processes share.",
            received=f"a fit in {jax.process_count()} processes.",
            fix="kd.callbacks.BackupAndRestore(folder) to go on, "
            "keras.callbacks.ModelCheckpoint(path) for models.",
        )


def _on_one_device(value: Any) -> Any:
    under_keras = keras.distribution.distribution() is not None
    if under_keras or not isinstance(value, jax.Array) or not value.is_fully_replicated:
        return value
    return value.addressable_data(0)


def _quiet(callbacks: list[Any]) -> list[Any]:
    """The callbacks of a process that is not the chief."""
    left = [
        c
        for c in callbacks
        if not isinstance(c, keras.callbacks.CSVLogger | keras.callbacks.RemoteMonitor)
    ]
    left = [callback for callback in left if not isinstance(callback, ProgbarLogger)]
    for callback in left:
        if isinstance(callback, keras.callbacks.TensorBoard):
            callback.log_dir = _folder_for_nobody()
        elif isinstance(callback, keras.callbacks.ModelCheckpoint):
            folder = os.path.dirname(callback.filepath)
            if folder and "{" not in folder and "://" not in folder:
                os.makedirs(
                    folder, exist_ok=True
                )  # Keras's own test and making of it collide with the chief's.
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            callback._save_model = functools.partial(_read_weights, callback)
            callback.on_train_end = _nothing
    return left


@functools.cache
def _folder_for_nobody() -> str:
    folder = tempfile.mkdtemp(prefix="keras_distribute_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
    """The last step that an `OrbaxCheckpoint` has saved, once it is complete; `None`
    without one.
    """
    callback.checkpointer.wait()
    return max((info.step for info in callback.checkpointer.checkpoints), default=None)


def forget_orbax_steps(callback: Any, last: int | None) -> None:
    """Deletes the steps after `last`, which an `OrbaxCheckpoint` would refuse to save
    again.
    """
    for info in callback.checkpointer.checkpoints:
        if last is None or info.step > last:
            callback.checkpointer.delete(info.step)


def global_seed() -> np.ndarray[Any, Any] | None:
    """The state of the global seed generator of this thread; `None` before it was used.
    """
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state)


def set_global_seed(state: np.ndarray[Any, Any] | None) -> None:
    """Gives it back."""
    if state is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        seed_generator.global_seed_generator().state.assign(state)

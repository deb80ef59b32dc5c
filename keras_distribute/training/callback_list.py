"""Keras's list of callbacks under a strategy: a subclass that `fit` makes its lists of.

- A callback cannot see the others of its `fit`, nor be called after all of them. One
  with a method `_keras_distribute_joins(callbacks)` is moved to the end of the list,
  and given it, before the training begins; one with an attribute
  `_keras_distribute_first` is moved to the front. One with an attribute
  `_keras_distribute_in_groups` has a method for steps that may be called for several at
  once.
- Keras hands the logs of each step to a thread, which waits for their values, even
  where no callback is called with them. There the step is left alone. Goes when Keras
  does that.
- In a process that is not the chief, callbacks that write files or print are left out,
  or write to a folder that is deleted, while those that read variables take part. Goes
  when Keras knows of processes.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from typing import Any

import jax
import keras
from keras import tree
from keras.callbacks import Callback, CallbackList, ProgbarLogger

from keras_distribute._compat import callbacks as compat
from keras_distribute.errors import CheckpointError
from keras_distribute.training import adoption, calls

_JOINS, _FIRST = "_keras_distribute_joins", "_keras_distribute_first"
_IN_GROUPS = "_keras_distribute_in_groups"
# Of Keras's callbacks with methods for steps, those whose attribute may say that they
# do nothing there.
_BY_EPOCH = {
    keras.callbacks.BackupAndRestore: "save_freq",
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.OrbaxCheckpoint: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
}


class StrategyCallbackList(CallbackList):
    """The callbacks of a `fit`, `evaluate` or `predict`."""

    def __init__(
        self,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        **more: Any,
    ) -> None:
        if adoption.is_quiet():
            callbacks = _without_writers(tree.flatten(callbacks) if callbacks else [])
            add_progbar = False
        super().__init__(callbacks, add_history, add_progbar, **more)

    def on_train_begin(self, logs: Any = None) -> None:
        _refuse_orbax(self.callbacks)
        first = [each for each in self.callbacks if hasattr(each, _FIRST)]
        joining = [each for each in self.callbacks if hasattr(each, _JOINS)]
        if first or joining:
            moved = [*first, *joining]
            others = [each for each in self.callbacks if each not in moved]
            self.callbacks = [*first, *others, *joining]
        for callback in joining:
            getattr(callback, _JOINS)(self)
        sees_steps = any(map(_sees_steps, self.callbacks))
        calls.set_sees_steps(getattr(self, "model", None), sees_steps)
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._any_has("on_train_batch_end"):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._any_has("on_test_batch_end"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._any_has("on_predict_batch_end"):
            super().on_predict_batch_end(batch, jax.tree.map(_there, logs))

    def _any_has(self, name: str) -> bool:
        return any(_has_own(each, name, "on_batch_end") for each in self.callbacks)


def _there(output: Any) -> Any:
    """An array, where what a worker has yet to compute stands for it."""
    wait = getattr(output, "__jax_array__", None)
    return output if wait is None else wait()


def _sees_steps(callback: Any) -> bool:
    """Whether a callback is called with each step; the progress bar may miss some."""
    by_epoch = getattr(callback, _BY_EPOCH.get(type(callback), ""), None) == "epoch"
    left_out = isinstance(callback, ProgbarLogger)
    left_out = left_out or hasattr(callback, _FIRST) or hasattr(callback, _IN_GROUPS)
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin")
    return not (by_epoch or left_out) and _has_own(callback, *names, "on_batch_end")


def _has_own(callback: Any, *names: str) -> bool:
    """Whether a callback has a method of its own of one of these names."""
    return any(
        getattr(type(callback), name, None) is not getattr(Callback, name)
        or name in vars(callback)
        for name in names
    )


def _refuse_orbax(callbacks: list[Any]) -> None:
    several = jax.process_count() > 1 and keras.distribution.distribution() is None
    orbax = keras.callbacks.OrbaxCheckpoint
    if several and any(isinstance(each, orbax) for each in callbacks):
        raise CheckpointError(
            "keras.callbacks.OrbaxCheckpoint cannot save what several processes share.",
            received=f"a fit in {jax.process_count()} processes.",
            fix="kd.callbacks.BackupAndRestore(folder) to go on, "
            "keras.callbacks.ModelCheckpoint(path) for models.",
        )


def _without_writers(callbacks: list[Any]) -> list[Any]:
    """The callbacks of a process that is not the chief."""
    writers = (keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor, ProgbarLogger)
    left = [callback for callback in callbacks if not isinstance(callback, writers)]
    for callback in left:
        if isinstance(callback, keras.callbacks.TensorBoard):
            callback.log_dir = _temporary_folder()
        elif isinstance(callback, keras.callbacks.ModelCheckpoint):
            folder = os.path.dirname(callback.filepath)
            if folder and "{" not in folder and "://" not in folder:
                # Keras's own test and making of it collide with the chief's.
                os.makedirs(folder, exist_ok=True)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            compat.only_read(callback)
    return left


@functools.cache
def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="keras_distribute_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

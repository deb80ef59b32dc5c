"""`BackupAndRestore`: a `fit` that goes on where it was interrupted."""

from __future__ import annotations

import os
from typing import Any

import keras

from keras_distribute import checks
from keras_distribute.callbacks.run import Options, Run
from keras_distribute.checkpoint.preemption import TerminationConfig
from keras_distribute.errors import CheckpointError


class BackupAndRestore(keras.callbacks.Callback):
    """Saves a `fit` while it runs; run again, the same script goes on with the very
    next batch.

    Saved are the model with its optimizer, metrics and seeds, the position in the data,
    the epoch and the step, the history so far, the state of the other callbacks, and
    the random streams of NumPy, Python and Keras. On as many replicas as before, the
    weights and the whole history are those of a run without interruption, bit for bit;
    on another number of replicas, and in plain Keras, up to rounding. Saves are written
    in the background; a save that is cut off leaves the one before it.

    Other callbacks keep their attributes that are numbers, strings, arrays, or lists,
    tuples and dictionaries of them; or what their `get_state()` returns, if they have
    that and `set_state(state)`.

    `SIGTERM` saves after the step that is under way, or as before the validation that
    is, and the program exits with status 42: start it again, and no step is repeated.

    Differs from Keras's `BackupAndRestore`: resumes within an epoch, with all that is
    said above; asynchronous; `max_to_keep` in place of `double_checkpoint`. Needs `pip
    install orbax-checkpoint`.

    Args:
        backup_dir: The folder; of this `fit` alone.
        save_freq: `"epoch"`, or a number of steps, or `False` to save only before
            preemption, or by `save_seconds`.
        save_seconds: Saves also when so many seconds have passed since the last save.
        delete_checkpoint: Whether to delete the folder when the `fit` is complete.
            Otherwise running the script again skips what was trained.
        max_to_keep: How many saves to keep. If the latest is damaged, the one before it
            is used.
        save_before_preemption: Whether to wait for `SIGTERM`, or what
            `termination_config` names. Then the state is also copied to host memory
            before each validation.
        termination_config: Another notice than `SIGTERM`, a grace period, or another
            way to exit.
        data_position: Whether to save the position in the data. `False` for data
            without one, such as a generator: saves are then made after epochs only, and
            each epoch begins with what the data gives.
        objects: More to save, by name: see `kd.Checkpoint`.

    Raises:
        CheckpointError: For arguments that make no sense together, and from `fit` if a
            save cannot be written or the checkpoint is of something else.
        InputError: From `fit`, after its first step, for data without positions; and if
            data, `batch_size` or `steps_per_execution` are others than before, or in
            the middle of an epoch `steps_per_epoch`.

    Example:
        >>> import tempfile, numpy as np, keras, keras_distribute as kd
        >>> def train(backup_dir, callbacks=()):
        ...     keras.utils.set_random_seed(0)
        ...     with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...         model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...         model.compile("adam", "mse")
        ...     backup = kd.callbacks.BackupAndRestore(backup_dir, save_freq=2)
        ...     x, y = np.ones((40, 3)), np.zeros((40, 1))
        ...     options = {"batch_size": 8, "epochs": 3, "verbose": 0}
        ...     callbacks = [backup, *callbacks]
        ...     return model.fit(x, y, callbacks=callbacks, **options).history
        >>> class PowerCut(keras.callbacks.Callback):
        ...     def on_train_batch_end(self, batch, logs=None):
        ...         if self.model.optimizer.iterations == 9:
        ...             raise OSError("no power")
        >>> folder = tempfile.mkdtemp() + "/backup"
        >>> train(folder, [PowerCut()])
        Traceback (most recent call last):
        OSError: no power
        >>> train(folder) == train(tempfile.mkdtemp() + "/backup")
        True
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | bool = "epoch",
        *,
        save_seconds: float | None = None,
        delete_checkpoint: bool = True,
        max_to_keep: int = 2,
        save_before_preemption: bool = True,
        termination_config: TerminationConfig | None = None,
        data_position: bool = True,
        objects: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        fix = 'backup_dir="backup"'
        checks.path("backup_dir", backup_dir, fix, CheckpointError)
        self._options = Options(
            os.fspath(backup_dir),
            save_freq,
            save_seconds,
            max_to_keep,
            delete_checkpoint,
            save_before_preemption,
            termination_config,
            data_position,
            {} if objects is None else objects,
        )
        _check(self._options)
        self._run: Run | None = None

    def _keras_distribute_joins(self, callbacks: Any) -> None:
        """Called before training begins, with Keras's list of the callbacks, of which
        this one is the last.
        """
        kinds = [isinstance(each, BackupAndRestore) for each in callbacks.callbacks]
        if sum(kinds) > 1:
            raise CheckpointError(
                "A fit has one BackupAndRestore.",
                received=f"{sum(kinds)} of them.",
                fix="pass one to fit.",
            )
        self._run = Run(self.model, callbacks, self, self._options)
        self._run.prepare()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores what was saved."""
        self._running().begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._running().epoch_begun(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if it is time."""
        self._running().epoch_ended()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps a copy, in case the validation is preempted."""
        if self._run is not None and not self._run.is_over:
            self._run.validation_begins()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Drops that copy."""
        if self._run is not None and not self._run.is_over:
            self._run.validation_ended()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the folder, if wanted."""
        self._running().train_ended()

    def _running(self) -> Run:
        assert self._run is not None
        return self._run


def _check(options: Options) -> None:
    freq, seconds, error = options.save_freq, options.save_seconds, CheckpointError
    if not ((isinstance(freq, str) and freq == "epoch") or freq is False):
        what = 'save_freq is "epoch", a positive number of steps, or False.'
        checks.count("save_freq", freq, 1, what=what, fix="save_freq=100", error=error)
    if seconds is not None:
        what, fix = "save_seconds is a positive number.", "save_seconds=600"
        checks.number("save_seconds", seconds, what=what, fix=fix, error=error)
    checks.count("max_to_keep", options.max_to_keep, 1, error=error)
    checks.flag("delete_checkpoint", options.delete_checkpoint, error)
    checks.flag("save_before_preemption", options.watched, error)
    checks.flag("data_position", options.data_position, error)
    what, fix = "The objects are a dict by name.", 'objects={"progress": progress}'
    checks.instance("objects", options.objects, dict, what, fix, error)
    config, name = options.termination_config, "termination_config"
    what = "termination_config is a TerminationConfig."
    fix = "kd.experimental.TerminationConfig()"
    checks.instance(name, config, TerminationConfig | None, what, fix, error)
    if not options.directory:
        raise CheckpointError(
            "backup_dir is the path of a folder.",
            received="''.",
            fix='backup_dir="backup"',
        )
    if freq is False and seconds is None and not options.watched:
        raise CheckpointError(
            "This BackupAndRestore would never save.",
            received="save_freq=False, save_seconds=None, "
            "save_before_preemption=False.",
            fix='save_freq="epoch"',
        )
    within_epochs = freq not in ("epoch", False) or seconds is not None
    if within_epochs and not options.data_position:
        raise CheckpointError(
            "Without the position in the data, a fit can go on only at the beginning "
            "of an epoch.",
            received=f"data_position=False, save_freq={freq!r}, "
            f"save_seconds={seconds!r}.",
            fix='save_freq="epoch", save_seconds=None',
        )
    if config is not None and config.save_fn is not None:
        raise CheckpointError(
            "BackupAndRestore saves by itself.",
            received="a TerminationConfig with save_fn.",
            fix="TerminationConfig without save_fn; save_fn is for "
            "PreemptionCheckpointHandler.",
        )

"""One `fit` as it is saved and resumed, followed from step to step."""

from __future__ import annotations

import dataclasses
import pickle
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_distribute._compat import callbacks as compat
from keras_distribute._compat import epochs as compat_epochs
from keras_distribute.callbacks import random_streams, same_bits, states
from keras_distribute.checkpoint import Checkpoint
from keras_distribute.checkpoint.manifest import Manifest
from keras_distribute.checkpoint.preemption import Reaction, TerminationConfig, Watch
from keras_distribute.checkpoint.reading import Reading
from keras_distribute.checkpoint.step_folder import StepFolder
from keras_distribute.cluster import agreement, processes
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.errors import CheckpointError, InputError

_STEP, _EPOCH, _VALIDATION = "between steps", "after an epoch", "before validation"


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `BackupAndRestore`."""

    directory: str
    save_freq: str | int | bool
    save_seconds: float | None
    max_to_keep: int
    delete_checkpoint: bool
    watched: bool
    termination_config: TerminationConfig | None
    data_position: bool
    objects: dict[str, Any]


class Run:
    """A `fit` that is saved while it runs, and goes on where it was saved last.

    A save is made in one of three places: between two steps of an epoch, after an epoch
    with all that belongs to it, and, for a notice that comes during validation, as it
    was before the validation. The first needs the position in the data within a pass,
    the others the one between two passes.

    Args:
        own: The `BackupAndRestore` among them, which comes last.
        options: Its arguments.
    """

    def __init__(self, model: Any, callbacks: Any, own: Any, options: Options) -> None:
        self._model, self._callbacks, self._options = model, callbacks, options
        self._all: list[Any] = callbacks.callbacks
        self._others = [each for each in self._all if each is not own]
        checkpoint = Checkpoint(model=model, training=self, **options.objects)
        self._folder = StepFolder(checkpoint, options.directory, options.max_to_keep)
        self._watch: Watch | None = None
        if options.watched:
            self._watch = Watch(options.termination_config, self._num_processes)
        self._epochs: Any = None
        self._epoch = self._steps = self._since = 0
        self._where = _STEP
        self._logs: Any = {}  # Of the last step: what its `train_step` returns.
        self._last: tuple[str, int, int] | None = None
        self._reading: Reading | None = None
        self._state: dict[str, Any] = {}
        self._streams: dict[str, Any] = {}
        self._replaying = False
        self.is_over = False
        self._checked = not options.data_position
        self._held: tuple[Manifest, Arrays] | None = None
        self._saved_at = self._stepped_at = time.monotonic()
        self._count: int | None = None

    # Called by the checkpoint.

    def get_state(self) -> dict[str, Any]:
        """All state that is no variable."""
        data = None
        if self._options.data_position:
            data = compat_epochs.position(self._epochs, within=self._where == _STEP)
        return {
            "where": self._where,
            "epoch": self._epoch,
            "steps": self._steps,
            "since_last_save": self._since,
            "logs": _plain(self._logs),
            "stop_training": bool(self._model.stop_training),
            "data": data,
            "random": random_streams.get_state(),
            "callbacks": states.get_state(self._others),
            "conditions": same_bits.conditions(self._model),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Called whenever the checkpoint that was read is assigned."""
        self._state = state

    def _keras_distribute_state_of_all(
        self, states: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The state for this process, from those of another number of processes."""
        if len({pickle.dumps(state["data"]) for state in states}) > 1:
            raise CheckpointError(
                f"Each of {len(states)} processes had read other data, of its own, "
                "when the training was interrupted.",
                received=f"{processes.process_count()} process(es) now.",
                fix=f"go on in {len(states)} processes, or let all read the same data.",
            )
        return states[min(processes.process_index(), len(states) - 1)]

    # Called by the callback.

    def prepare(self) -> None:
        """Reads the latest checkpoint, before any callback knows of the training."""
        if keras.distribution.distribution() is not None:
            raise CheckpointError(
                "BackupAndRestore cannot save a model under a Keras distribution.",
                received=f"{keras.distribution.distribution()!r}.",
                fix="train under a strategy: with kd.MirroredStrategy().scope(): ...",
            )
        if self._folder.agreed_steps():
            self._reading = self._folder.read(fallback=True)
            training = self._reading.state_of("training")
            states.before_training(self._others, training["callbacks"])

    def begin(self) -> None:
        """Gives the other callbacks their state; `fit` begins at the right epoch."""
        compat_epochs.follow(self._model, self)
        if self._watch is not None:
            self._watch.start()
        if self._reading is None:
            return
        self._restore()
        same_bits.warn_of_others(self._state.get("conditions", {}), self._model)
        epoch = self._state["epoch"]
        if self._state["where"] == _EPOCH:
            epoch += 1
            if self._state["stop_training"]:
                epoch = self._callbacks.params["epochs"]
        compat.begin_at(self._model, epoch)

    def epoch_begun(self, epoch: int) -> None:
        """Called when all callbacks were."""
        compat.begin_at(self._model, None)
        self._epoch, self._steps = epoch, 0

    def epoch_ended(self) -> None:
        """Called when all callbacks were, and the epoch is complete."""
        self._where = _EPOCH
        self._held = None
        if not self._reacted() and self._options.save_freq == "epoch":
            self._save()

    def validation_begins(self) -> None:
        """Copies the state, for a notice that comes before the validation is over."""
        may_resume = self._epochs is not None and self._options.data_position
        if self._watch is not None and may_resume:
            self._where = _VALIDATION
            self._held = self._folder.snapshot()

    def validation_ended(self) -> None:
        """Drops that copy."""
        self._held = None

    def train_ended(self) -> None:
        """The `fit` is complete, and needs no checkpoint any more."""
        # A notice may have come in the callbacks just before this one.
        if self._watch is not None and self._watch.is_notified():
            self._react(Reaction.EXIT)
        self._folder.close()
        if self._options.delete_checkpoint:
            self._folder.remove()

    # Called by the epoch iterator: see `_compat.epochs.Follower`.

    def epoch_begins(self, epochs: Any) -> compat_epochs.Place | None:
        self._epochs, self._stepped_at = epochs, time.monotonic()
        if self._reading is None:
            return None
        steps = 0 if self._state["where"] == _EPOCH else self._state["steps"]
        self._check_data(self._state["data"], steps)
        self._streams = random_streams.get_state()
        if steps:
            # `fit` has reset the metrics since `begin`, and callbacks have begun an
            # epoch that had begun before.
            self._restore()
            self._steps, self._logs = steps, self._state["logs"]
            self._streams = self._state["random"]
            self._replaying = True
            self._callbacks.callbacks = [
                c for c in self._others if isinstance(c, keras.callbacks.ProgbarLogger)
            ]
        self._reading = None
        data = self._state["data"]
        if data is None:
            return None
        return compat_epochs.Place(steps, self._state["where"] == _STEP, data)

    def moved(self) -> None:
        random_streams.set_state(self._streams)

    def replayed(self) -> None:
        compat.finish(self._callbacks)
        self._callbacks.callbacks = self._all

    def step_ended(self, steps: int) -> None:
        now = time.monotonic()
        if self._watch is not None:
            self._watch.step_took(now - self._stepped_at)
        self._since += steps - self._steps
        self._steps, self._where, self._stepped_at = steps, _STEP, now
        if not self._checked:
            self._check_position()
        if not self._reacted() and self._is_due(now):
            self._save()
        self._stepped_at = time.monotonic()

    def test_step_ended(self) -> None:
        if self._held is not None:
            self._reacted()

    def train_function(
        self, original: Callable[..., Any], state: Any, data: Any
    ) -> Any:
        if self._replaying:
            self._replaying = False
            return self._logs, state
        self._logs, state = original(state, data)
        return self._logs, state

    def fit_ended(self) -> None:
        self.is_over = True
        compat.begin_at(self._model, None)
        self._callbacks.callbacks = self._all
        self._held = None
        try:
            self._folder.close()
        except CheckpointError as error:  # `fit` is being left for another reason.
            warnings.warn(str(error), stacklevel=2)
        finally:
            if self._watch is not None:
                self._watch.stop()

    def _restore(self) -> None:
        assert self._reading is not None
        self._reading.assign()
        state = self._state
        states.set_state(self._others, state["callbacks"])
        random_streams.set_state(state["random"])
        self._since = state["since_last_save"]
        self._model.stop_training = state["stop_training"]

    def _is_due(self, now: float) -> bool:
        freq, seconds = self._options.save_freq, self._options.save_seconds
        if isinstance(freq, int) and freq and self._since >= freq:
            return True
        if seconds is None:
            return False
        due = now - self._saved_at >= seconds
        return agreement.from_chief(
            "whether a save is due", lambda: due, self._num_processes()
        )

    def _num_processes(self) -> int:
        """How many processes train the model; known when it is built."""
        if self._count is None:
            self._count = self._folder.checkpoint.num_processes
        return self._count

    def _save(self) -> None:
        """Starts to save the state; during validation, that of before it."""
        compat.finish(self._callbacks)
        self._since = 0
        place = (self._where, self._epoch, self._steps)
        if place == self._last:
            return
        metrics: dict[str, float] = {"epoch": self._epoch, "step": self._steps}
        step = self._folder.next_step()
        if self._held is None:
            self._folder.save(step, metrics)
        else:
            manifest, arrays = self._held
            held = dataclasses.replace(manifest, step=step, metrics=metrics), arrays
            self._folder.write(step, lambda: held)
        self._last, self._saved_at = place, time.monotonic()

    def _reacted(self) -> bool:
        """Saves, and perhaps exits, if a notice asks for it."""
        reaction = Reaction.NONE if self._watch is None else self._watch.reaction()
        saves_nothing = reaction is Reaction.SAVE and not self._can_save()
        if reaction is Reaction.NONE or saves_nothing:
            return False
        self._react(reaction)
        return True

    def _react(self, reaction: Reaction) -> None:
        def save() -> None:
            if self._can_save():
                self._save()
            self._folder.wait()

        assert self._watch is not None
        self._watch.save_and_react(reaction, save)

    def _can_save(self) -> bool:
        has_place = self._options.data_position or self._where == _EPOCH
        return self._epochs is not None and has_place

    def _check_position(self) -> None:
        """Raises early what the first save would raise."""
        try:
            compat_epochs.position(self._epochs, within=True)
        except InputError as error:
            raise InputError(
                "BackupAndRestore cannot save the position in this data, so it could "
                "not go on with the next batch.",
                received=str(error).split("\n", 1)[0],
                fix="arrays, tf.data, Grain or a PyDataset; or "
                "BackupAndRestore(data_position=False), which goes on at the beginning "
                "of an epoch, with the batches that the data then gives.",
            ) from error
        self._checked = True

    def _check_data(self, data: dict[str, Any] | None, steps: int) -> None:
        here = compat_epochs.kind_of_data(self._epochs)
        group = self._epochs.steps_per_execution
        if data is not None and data["adapter"] != here:
            raise InputError(
                "The training was interrupted with another kind of data.",
                received=f"{data['adapter']} in the checkpoint, {here} here.",
                fix="pass the same data to fit, or start anew in another backup_dir.",
            )
        if steps % group:
            raise InputError(
                f"The training was interrupted after {steps} steps of an epoch, which "
                "steps_per_execution does not divide.",
                received=f"steps_per_execution={group}.",
                fix="compile the model with the same steps_per_execution as before.",
            )
        if data is not None:
            self._check_steps(data)

    def _check_steps(self, data: dict[str, Any]) -> None:
        """Raises for another `steps_per_epoch` in the middle of an epoch."""
        here = self._epochs.steps_per_epoch
        before = data.get("steps_per_epoch", here)  # Version 0.1 has not noted it.
        if before == here:
            return
        if self._state["where"] == _STEP:
            raise InputError(
                "The training was interrupted in the middle of an epoch with another "
                "number of steps.",
                received=f"steps_per_epoch={before} in the checkpoint, {here} here.",
                fix=f"fit(..., steps_per_epoch={before}), or start anew in another "
                "backup_dir.",
            )
        warnings.warn(
            f"The training was interrupted with steps_per_epoch={before}; its further "
            f"epochs have steps_per_epoch={here}.",
            stacklevel=2,
        )


def _plain(value: Any) -> Any:
    """Logs as a checkpoint keeps them; they may be nested, as Keras allows."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.asarray(value)

"""`StepReplay`: while `fit` runs, whether other devices compute the same."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_distribute import checks
from keras_distribute._compat.trainer import is_traced
from keras_distribute.consistency import kept_steps
from keras_distribute.consistency.replays import StepProgram, StepReport, replayed
from keras_distribute.devices.launches import launches
from keras_distribute.errors import ContextError, StepReplayError
from keras_distribute.training import adoption, calls
from keras_distribute.training.steps.by_rows import Watched
from keras_distribute.training.steps.step_programs import form_of_batch
from keras_distribute.training.steps.watched_step import SeenStep

_log = logging.getLogger(__name__)
ACTIONS = ("raise", "report")
LOG_NAME = "replays_that_differ"


class StepReplay(keras.callbacks.Callback):
    """Runs a step of a `fit` again on other devices, every so many steps, and compares
    the bits.

    Each replica's rows are computed by the device of the next replica (a single one's
    by another device of the machine, if there is one, and what is on a logical device
    of it by the next), from the same batch, state and seeds, by the same program. So
    whatever differs is the hardware's:
    a device that computes wrongly, now and then or always, also where all replicas then
    agree on what came of it, which `ReplicaConsistency` cannot see. Where something
    differs, a third run says which device erred: the one whose result for a replica,
    such as its part of a gradient, no other device has. With two devices nobody knows
    which of them is right, unless the error does not come again.

    The step that is run again costs its own time, twice that of a step, and that of a
    copy of its state, for which there must be memory; the first one also the tracing
    and compiling of its program. All others are as without the callback.

    The program must give the same bits each time. XLA's do on CPUs and TPUs; on GPUs
    with `XLA_FLAGS=--xla_gpu_deterministic_ops=true`. A step over the global batch
    (`strategy.summary(model)` says which it is) has no results of single replicas
    before they are summed: then the differences are named, and mostly no device.

    TensorFlow has no such check.

    Args:
        every: How many steps lie between two that are run again. Steps in one dispatch
            (`steps_per_execution`) are counted together, and the first is run again,
            in a dispatch of its own.
        action: `"raise"` an error; or `"report"`: a warning in the log of Python, and
            go on. Then `replays_that_differ` in the logs of an epoch counts them.
        folder: Where to keep a step whose replay differs, in a folder of its own:
            `keras-distribute replay FOLDER/step-0000042` runs it on another machine.
            Of several processes each writes its part.

    Attributes:
        reports: A `StepReport` of each step that was run again.

    Raises:
        StepReplayError: From `fit`, where bits differ.
        ContextError: From `fit`, without a synchronous strategy, or with
            `run_eagerly=True`.
        StructureTypeError: For arguments of other types.
        ValueStructureError: For an unknown action, and less than one step.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> devices = ["cpu:0", "cpu:1", "cpu:2"]
        >>> with kd.MirroredStrategy(devices).scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> flip = {"variable": model.weights[0], "replica": 1, "element": 2, "bit": 30}
        >>> fault = kd.testing.Fault("flip", step=2, what="gradient", **flip)
        >>> replay = kd.callbacks.StepReplay(every=1)
        >>> x, y = np.ones((12, 3)), np.ones((12, 1))
        >>> try:
        ...     _ = model.fit(x, y, batch_size=3, verbose=0, callbacks=[fault, replay])
        ... except kd.errors.StepReplayError as error:
        ...     print(error.report.step, error.report.devices)
        2 ('cpu:1',)
    """

    def __init__(
        self,
        every: int = 1000,
        action: str = "raise",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("action", action, ACTIONS)
        self._every = checks.count("every", every, 1)
        self._action = action
        if folder is not None:
            checks.path("folder", folder)
        self._folder = None if folder is None else pathlib.Path(folder)
        self.reports: list[StepReport] = []
        self._since = self._begun = self._count = 0
        self._programs: dict[Any, StepProgram] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count steps."""
        model: Any = self.model
        strategy = adoption.strategy_of(model)
        is_asynchronous = strategy is not None and strategy.placement.is_on_servers
        if strategy is None or is_asynchronous or not is_traced(model):
            raise ContextError(
                "StepReplay runs the compiled steps of a synchronous strategy again.",
                received=f"{strategy!r}, run_eagerly={model.run_eagerly}, "
                f"jit_compile={model.jit_compile}.",
                fix="create and compile the model in the scope of a strategy, such as "
                "kd.MirroredStrategy(), without run_eagerly=True or jit_compile=False.",
            )
        self._since, self._programs = 0, {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count what is found."""
        self._begun, self._count = -1, 0  # A step of the last epoch has not begun this.

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Watches the step that begins, if it is its turn."""
        self._since += batch - self._begun
        self._begun = batch
        if self._since >= self._every or not self.reports:
            self._since = 0
            calls.watch_next_step(self.model, self._watched)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Says how many steps differed."""
        if self._action == "report" and logs is not None:
            logs[LOG_NAME] = self._count

    def _watched(
        self, seen: SeenStep, state: Any, given: Any, placed: Any
    ) -> tuple[Any, Any]:
        """Runs a step, and runs it again.

        Args:
            given: The batch that the step takes.
            placed: The batch that it should take.
        """
        model: Any = self.model
        step = int(model.optimizer.iterations)
        with launches.lock:
            launches.settle()
            kept = list(map(jnp.copy, seen.disturbed.arrays_of(state)))
        logs, state = seen.disturbed(state, given)
        outputs = [*jax.tree.leaves(logs), *seen.disturbed.arrays_of(state)]
        program = self._program(seen, placed, logs)
        inputs = [*kept, *jax.tree.leaves(placed.data)]

        def keep(hashes: Any) -> str | None:
            if self._folder is None:
                return None
            own = self._folder / f"step-{step:07}"
            try:
                kept_steps.write(own, program, inputs, outputs, hashes, step)
            except OSError as error:  # That bits differ is to be told nevertheless.
                _log.warning("Step %d could not be kept in %s: %s", step, own, error)
                shutil.rmtree(own, ignore_errors=True)
                return None
            return str(own)

        report = replayed(program, inputs, outputs, step, keep)
        self.reports.append(report)
        if report.differing:
            self._count += 1
            if self._action == "raise":
                raise _differing(report)
            _log.warning("%s", report)
        return logs, state

    def _program(self, seen: SeenStep, placed: Any, logs: Any) -> StepProgram:
        """The program of a step on batches of this form."""
        programs = seen.step.programs
        key = form_of_batch(placed)
        if key not in self._programs:
            strategy: Any = adoption.strategy_of(self.model)
            exported = programs.exported(placed)
            named = jax.tree_util.tree_leaves_with_path(logs)
            names = [f"log {jax.tree_util.keystr(path)}" for path, _ in named]
            has_own = isinstance(logs, Watched) and bool(logs.own)
            self._programs[key] = StepProgram(
                exported,
                strategy.replica_mesh,
                [*names, *programs.names_of_state()],
                len(names) - 1 if has_own else None,
                seen.gradients.names if has_own else (),
                programs.compiler_options(placed),
            )
        return self._programs[key]


def _differing(report: StepReport) -> StepReplayError:
    without = f", without {' and '.join(report.devices)}" if report.devices else ""
    return StepReplayError(
        report.heading,
        received="\n    ".join(report.lines),
        fix=f"go on from a checkpoint of an earlier step{without}.",
        report=report,
    )

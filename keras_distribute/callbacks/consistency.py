"""`ReplicaConsistency`: while `fit` runs, whether all replicas still have the same."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import keras

from keras_distribute import checks
from keras_distribute.consistency import ACTIONS
from keras_distribute.consistency.check import differing
from keras_distribute.consistency.kept import Kept
from keras_distribute.consistency.report import Difference
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import adoption, calls

LOG_NAME = "replica_differences"
_log = logging.getLogger(__name__)


class ReplicaConsistency(keras.callbacks.Callback):
    """Compares the replicas' copies of weights, layer state, slots and metrics, every
    so many steps of a `fit` and at the end of each epoch, in every process.

    Each device hashes its own copies where they are, and only the hashes are compared:
    `Strategy.check_consistency` says what is compared, and what a hash finds. A check
    waits for the step before it; the steps in between are left alone. It comes before
    the next step begins, so what is repaired has had no effect.

    Of weights that are divided over the devices (`shard_variables=True`) there are no
    copies to compare. Those that no step changes, such as frozen ones under LoRA, are
    compared with what they were at the check before, and at the beginning of `fit`.
    Nothing can repair them; assignments from outside of the steps are taken as meant.

    Differs from TensorFlow, which has no such check.

    Args:
        every: How many steps lie between two checks. Steps in one dispatch
            (`steps_per_execution`) are looked at together.
        action: `"raise"` an error; `"report"` a warning in the log of Python, and go
            on; or `"repair"`: take the copies that more than half of the replicas have,
            and warn. With the last two, `replica_differences` in the logs of an epoch
            counts what was found, 0 if there was nothing.

    Raises:
        ReplicaConsistencyError: From `fit`; with `"repair"` where no copy is that of
            more than half of the replicas, as of two, or there is none.
        StructureTypeError: For arguments of other types.
        ValueStructureError: For an unknown action, and less than one step.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> flip = {"variable": model.weights[0], "replica": 1, "element": 2, "bit": 31}
        >>> fault = kd.testing.Fault("flip", step=2, **flip)
        >>> check = kd.callbacks.ReplicaConsistency(every=1)
        >>> x, y = np.ones((8, 3)), np.ones((8, 1))
        >>> try:
        ...     _ = model.fit(x, y, batch_size=2, verbose=0, callbacks=[fault, check])
        ... except kd.errors.ReplicaConsistencyError as error:
        ...     found = error.report.differences[0]
        ...     print(error.report.step, found.device, found.elements[0].bits)
        2 cpu:1 (31,)
    """

    # `steps_per_execution="auto"` may go on grouping steps.
    _keras_distribute_in_groups = True

    def __init__(self, every: int = 100, action: str = "raise") -> None:
        super().__init__()
        checks.one_of("action", action, ACTIONS)
        self._every = checks.count("every", every, 1)
        self._action = action
        self._since = self._begun = self._count = 0
        self._kept: Kept | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count steps."""
        self._since = 0
        model: Any = self.model
        strategy: Any = adoption.strategy_of(model)
        self._kept = None
        if isinstance(strategy, Strategy) and not strategy.placement.is_on_servers:
            self._kept = Kept(strategy.replica_mesh)
            self._changed()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count what is found."""
        self._begun = self._count = 0

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Checks what the steps before this one have left."""
        # Keras calls `on_train_batch_end` with logs, and waits for each step for them.
        self._since += batch - self._begun
        self._begun = batch
        if self._since >= self._every:
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks what the last steps of the epoch have left."""
        self._check()
        if self._action != "raise" and logs is not None:
            logs[LOG_NAME] = self._count

    def _check(self) -> None:
        self._since = 0
        model: Any = self.model
        strategy: Any = adoption.strategy_of(model)
        if not isinstance(strategy, Strategy):
            return
        report = strategy.check_consistency(
            model, action=self._action, step=_step_of(model)
        )
        if changed := self._changed():
            found = (*report.differences, *changed)
            report = dataclasses.replace(report, differences=found)
            if self._action != "report":
                raise differing(report)
        if report.differences:
            self._count += len(report.differences)
            _log.warning("%s", report)

    def _changed(self) -> list[Difference]:
        """What exists once, and has changed since the last check, though no step
        changes it.
        """
        model: Any = self.model
        if self._kept is None:
            return []
        others, step = model.non_trainable_variables, _step_of(model) or 0
        unchanged = calls.unchanged_variables(model) if self._kept.knows_any else []
        return self._kept.look(others, unchanged, step)


def _step_of(model: Any) -> int | None:
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return None if iterations is None else int(iterations)

"""Faults for tests: a process raises, dies, freezes or is slow at a chosen moment."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import keras

from keras_distribute import checks
from keras_distribute.cluster.processes import process_index

MOMENTS = (
    "train_begin",
    "epoch_begin",
    "train_batch_begin",
    "train_batch_end",
    "test_begin",
    "test_batch_end",
    "test_end",
    "epoch_end",
    "train_end",
)
_SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "freeze": signal.SIGSTOP,
}
ACTIONS = ("raise", "delay", *_SIGNALS)


class Fault(keras.callbacks.Callback):
    """A fault in one process, once, at a moment of `fit` or where a loop calls `now`.

    Under the launcher only the first start of the job has the fault.

    Args:
        action: `"raise"` an error, `"kill"` the process (`SIGKILL`), `"terminate"` it
            (`SIGTERM`), `"freeze"` it (`SIGSTOP`, for ever), or `"delay"` it.
        process: The number of the process; `None` for all.
        moment: When, in a `fit`: the name of a callback's method without `on_`.
        step: How many steps the optimizer has taken by then, at least; for a loop, what
            `now` is given.
        error: What to raise.
        seconds: How long to delay.

    Raises:
        ValueStructureError: For an unknown action or moment.
        StructureTypeError: For arguments of other types.

    Example:
        >>> import keras_distribute as kd
        >>> fault = kd.testing.Fault("raise", step=3, error=OSError("no network"))
        >>> for step in range(5):
        ...     fault.now(step)
        Traceback (most recent call last):
        OSError: no network
    """

    def __init__(
        self,
        action: str,
        process: int | None = None,
        *,
        moment: str = "train_batch_end",
        step: int = 0,
        error: Exception | None = None,
        seconds: float = 1.0,
    ) -> None:
        super().__init__()
        checks.one_of("action", action, ACTIONS)
        checks.one_of("moment", moment, MOMENTS)
        if process is not None:
            checks.count("process", process)
        checks.count("step", step)
        checks.number("seconds", seconds, zero=True)
        what, fix = "An exception is raised.", 'error=OSError("no network")'
        checks.instance("error", error, Exception | None, what, fix)
        self._action, self._process, self._step = action, process, step
        self._error = error or RuntimeError("a fault that was injected")
        self._seconds = seconds
        self.came = False
        setattr(self, f"on_{moment}", self._at_the_moment)

    def _at_the_moment(self, *_: Any, **logs: Any) -> None:
        model: Any = self.model
        self.now(int(model.optimizer.iterations))

    def now(self, step: int) -> None:
        """The fault, if this is its process, and `step` is reached for the first time.

        Args:
            step: How many steps have been taken.
        """
        checks.count("step", step)
        first = os.environ.get("KERAS_DISTRIBUTE_RESTARTS", "0") == "0"
        here = self._process in (None, process_index())
        if self.came or not first or not here or step < self._step:
            return
        self.came = True
        if self._action == "raise":
            raise self._error
        if self._action == "delay":
            time.sleep(self._seconds)
        else:
            os.kill(os.getpid(), _SIGNALS[self._action])

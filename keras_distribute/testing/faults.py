"""Faults for tests: a process raises, dies, freezes or is slow at a chosen moment, or a
bit flips.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import keras

from keras_distribute import checks
from keras_distribute.cluster.processes import process_index
from keras_distribute.devices.bit_flips import FIX
from keras_distribute.errors import ValueStructureError
from keras_distribute.testing import flips

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
WHAT = ("variable", "gradient", "batch")
ACTIONS = ("raise", "delay", "flip", *_SIGNALS)


class Fault(keras.callbacks.Callback):
    """A fault in one process, once, at a moment of `fit` or where a loop calls `now`.

    Under the launcher only the first start of the job has the fault.

    Args:
        action: `"raise"` an error, `"kill"` the process (`SIGKILL`), `"terminate"` it
            (`SIGTERM`), `"freeze"` it (`SIGSTOP`, for ever), `"delay"` it, or `"flip"`
            a bit, as in hardware that fails.
        process: The number of the process; `None` for all.
        moment: When, in a `fit`: the name of a callback's method without `on_`.
        step: How many steps the optimizer has taken by then, at least; for a loop, what
            `now` is given.
        error: What to raise.
        seconds: How long to delay.
        what: What has the bit. `"variable"`: one device's copy of a variable, as in
            memory that fails; in a `fit` the copy changes that its next step is given.
            `"gradient"`: what one replica gives to the sum of the variable's gradient,
            in the next step of a `fit`. `"batch"`: one replica's rows of the first
            array of the next batch of a `fit`.
        variable: The variable of a strategy, or the path of one of the model that is
            trained, of its optimizer or its metrics; none for a batch.
        replica: Whose copy has it; of several logical devices, the first.
        element: In which element of the copy, counted as in one row.
        bit: Which one, 0 the lowest.

    Raises:
        ValueStructureError: For an unknown action or moment, and a flip without a
            variable; at its moment for a variable, replica, element or bit that there
            is not.
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
        what: str = "variable",
        variable: keras.Variable | str | None = None,
        replica: int = 0,
        element: int = 0,
        bit: int = 0,
    ) -> None:
        super().__init__()
        checks.one_of("action", action, ACTIONS)
        checks.one_of("moment", moment, MOMENTS)
        if process is not None:
            checks.count("process", process)
        checks.count("step", step)
        checks.number("seconds", seconds, zero=True)
        said, fix = "An exception is raised.", 'error=OSError("no network")'
        checks.instance("error", error, Exception | None, said, fix)
        checks.one_of("what", what, WHAT)
        said = "What flips is a bit of a variable."
        kinds = keras.Variable | str | None
        checks.instance("variable", variable, kinds, said, FIX)
        for name, number in (("replica", replica), ("element", element), ("bit", bit)):
            checks.count(name, number)
        if action == "flip" and (variable is None) != (what == "batch"):
            said = "A bit flips in a variable, its gradient, or in a batch without one."
            received = f"what={what!r}, variable={checks.shown(variable)}."
            raise ValueStructureError(said, received=received, fix=FIX)
        self._flip = flips.Flip(what, variable, int(replica), int(element), int(bit))
        self._action, self._process, self._step = action, process, step
        self._error = error or RuntimeError("a fault that was injected")
        self._seconds = seconds
        self.came = False
        self._trained: Any = None
        setattr(self, f"on_{moment}", self._at_the_moment)

    def _at_the_moment(self, *_: Any, **logs: Any) -> None:
        model: Any = self.model
        self._trained = model
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
        elif self._action == "flip":
            self._flip.done(self._trained)
        else:
            os.kill(os.getpid(), _SIGNALS[self._action])

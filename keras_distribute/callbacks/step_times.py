"""`StepTimeReport`: where the time of a training step goes."""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_distribute import checks
from keras_distribute._compat import libtpu
from keras_distribute.cluster import liveness
from keras_distribute.cluster.processes import is_chief
from keras_distribute.devices import timing
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import DeviceError, ValueStructureError
from keras_distribute.variables import DistributedVariable

PARTS = {
    "input": "waiting for input",
    "dispatch": "handing the step to the devices",
    "devices": "waiting for the devices",
    "callbacks": "callbacks and Keras's loop",
}
BEHIND = {
    "reading": "reading a batch",
    "placing": "putting it on the devices",
    "room": "waiting until a step takes one",
}
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
_WIDTH = 40
_PIECE = 1 << 24  # Elements of a reduction that is measured.


class StepTimeReport(keras.callbacks.Callback):
    """Measures some steps of a `fit`, and says where their time went.

    While it measures, `fit` waits for each step: the parts then add up to the step,
    which may take a little longer than a step that is not looked at. Afterwards
    training goes on as ever. For models under a strategy.

    Args:
        num_steps: How many steps to measure.
        skip: How many to leave out first; they compile.
        trace_dir: A folder for a profile of the measured steps by JAX's profiler, for
            TensorBoard or Perfetto.
        verbose: Whether to print the report.

    Attributes:
        milliseconds: Per step, by part: `"input"`, `"dispatch"`, `"devices"`,
            `"callbacks"`; `"step"` is their sum. In the thread that reads ahead:
            `"reading"`, `"placing"`, and `"room"`, in which it waits since enough
            batches are ready; where nothing is read ahead, the first two are a part of
            `"input"`. With several replicas `"reduction"`: one sum of arrays as large
            as all gradients, measured by itself; in a step it is a part of `"devices"`.
            Empty before `num_steps` were measured, or fewer if the epoch ends: what
            comes between two epochs belongs to no step.

    Raises:
        ValueStructureError: For numbers of steps that make no sense, and for a model
            without a strategy.
        StructureTypeError: For arguments of other kinds.
        DeviceError: For a profile where libtpu is installed without a TPU: it would end
            the process.

    Example:
        >>> import numpy as np, keras, keras_distribute as kd
        >>> with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> report = kd.callbacks.StepTimeReport(num_steps=4, verbose=0)
        >>> x, y = np.ones((80, 3)), np.ones((80, 1))
        >>> _ = model.fit(x, y, batch_size=8, verbose=0, callbacks=[report])
        >>> times = report.milliseconds
        >>> parts = ("input", "dispatch", "devices", "callbacks")
        >>> abs(times["step"] - sum(times[part] for part in parts)) < 1e-6
        True
    """

    _keras_distribute_first = True

    def __init__(
        self,
        num_steps: int = 50,
        skip: int = 5,
        trace_dir: str | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        what = "At least one step is measured, and one left out, which compiles."
        fix = "StepTimeReport(num_steps=50, skip=5)"
        checks.count("num_steps", num_steps, 1, what=what, fix=fix)
        checks.count("skip", skip, 1, what=what, fix=fix)
        if trace_dir is not None:
            checks.path("trace_dir", trace_dir)
        if not isinstance(verbose, bool):
            checks.count("verbose", verbose)
        self._num_steps, self._skip = num_steps, skip
        self._trace_dir, self._verbose = trace_dir, verbose
        self.milliseconds: dict[str, float] = {}
        self._done = self._left = 0
        self._times: timing.Times | None = None
        self._begun = self._devices = 0.0
        self._ended: tuple[float, dict[str, float]] = 0.0, {}
        self._first = 0
        self._reads_ahead = True

    def on_train_begin(self, logs: Any = None) -> None:
        self._done, self._left = 0, self._num_steps
        self._times, self.milliseconds = None, {}
        self._reduction = _reduction_of(self.model)
        if self._trace_dir is not None and libtpu.profiling_ends_the_process():
            raise DeviceError(
                "JAX's profiler would end this process: libtpu is installed on a "
                "machine without a TPU.",
                received=f"StepTimeReport(trace_dir={self._trace_dir!r}).",
                fix="JAX_PLATFORMS=cpu in the environment, or "
                "kd.config.set_cpu_devices(1) first thing in the program.",
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first = batch
        if self._times is not None:
            if self._left <= 0:
                self._ended = time.perf_counter(), dict(self._times.seconds)
                self._finish()
        elif self._left and self._done >= self._skip:
            self._times = timing.start(self.model, self._trace_dir)
            self._begun, self._devices = time.perf_counter(), 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = batch - self._first + 1
        self._done += steps
        if self._times is not None:  # Keras has waited for the logs.
            now = time.perf_counter()
            self._devices += now - self._times.ended.get("dispatch", now)
            self._left -= steps
            self._ended = now, dict(self._times.seconds)

    def on_test_begin(self, logs: Any = None) -> None:
        self._finish()  # A validation is no part of a step.

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._finish()

    def get_state(self) -> dict[str, Any]:
        """What a `BackupAndRestore` saves: a report that is complete."""
        milliseconds, ahead = self.milliseconds, self._reads_ahead
        return {"milliseconds": milliseconds, "reads_ahead": ahead}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes that report; where there was none, this process measures its own steps,
        without those that compile.
        """
        if state["milliseconds"]:
            self.milliseconds, self._left = state["milliseconds"], 0
            self._reads_ahead = state["reads_ahead"]

    def _finish(self) -> None:
        """Reports on the steps until `_ended`, if it measures."""
        if self._times is None:
            return
        self._times = None
        timing.stop(self.model)
        (ended, measured), steps = self._ended, self._num_steps - self._left
        self._left = 0
        elapsed = ended - self._begun
        known = {part: measured.get(part, 0.0) for part in ("input", "dispatch")}
        known["devices"] = self._devices
        seconds = known | {"callbacks": elapsed - sum(known.values()), "step": elapsed}
        seconds |= {part: measured.get(part, 0.0) for part in BEHIND}
        self._reads_ahead = "due" not in measured
        per_step = {part: 1000 * value / steps for part, value in seconds.items()}
        self.milliseconds = per_step | self._reduction
        if self._verbose and is_chief():
            sys.stdout.write(f"{self.summary()}\n")

    def summary(self) -> str:
        """The report as text; empty before anything was measured."""
        if not self.milliseconds:
            return ""
        whole = self.milliseconds["step"]
        lines = [f"A step takes {whole:.2f} ms:"]
        for part, words in PARTS.items():
            share = self.milliseconds[part] / whole
            bar = "█" * round(_WIDTH * share)
            lines.append(
                f"  {words:<32}{self.milliseconds[part]:9.2f} ms {share:5.0%}  {bar}"
            )
        lines.append(
            "At the same time, in the thread that reads ahead:"
            if self._reads_ahead
            else "Nothing is read ahead. A part of the waiting for input is:"
        )
        lines += [
            f"  {words:<32}{self.milliseconds[part]:9.2f} ms "
            f"{self.milliseconds[part] / whole:5.0%}"
            for part, words in BEHIND.items()
            if self._reads_ahead or part != "room"
        ]
        if "reduction" in self.milliseconds:
            lines.append(
                "One reduction of all gradients, by itself: "
                f"{self.milliseconds['reduction']:.2f} ms"
            )
        model: Any = self.model
        described = model._describe_training_step()
        return "\n".join([*lines, *([described] if described else [])])

    def plot(self, path: str) -> None:
        """Draws the parts of a step as one bar. Needs `pip install matplotlib`.

        Args:
            path: Of the picture; its ending says the format, such as `.png` or `.svg`.

        Raises:
            BackendError: Without matplotlib.
            ValueStructureError: Before anything was measured.
        """
        checks.path("path", path, 'report.plot("step.png")')
        if not self.milliseconds:
            raise ValueStructureError(
                "There is nothing to draw: no step was measured.",
                received=f"plot({path!r}).",
                fix="model.fit(..., callbacks=[report]) with more steps than skip.",
            )
        what = "Pictures are drawn by matplotlib, which is not installed."
        fix = "pip install matplotlib, or print(report.summary())."
        drawing = checks.imported("matplotlib.figure", what, fix)
        figure = drawing.Figure(figsize=(8, 1.8), layout="constrained")
        axes = figure.subplots()
        left = 0.0
        for (part, words), color in zip(PARTS.items(), _COLORS, strict=True):
            value = self.milliseconds[part]
            label = f"{words}: {value:.2f} ms"
            axes.barh([0], [value], left=left, color=color, label=label)
            left += value
        axes.set_yticks([])
        axes.set_xlabel(f"milliseconds of a step ({left:.2f})")
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False
        )
        figure.savefig(path)


def _reduction_of(model: Any) -> dict[str, float]:
    """The milliseconds of one all-reduce of an array as large as all gradients: where
    that is large, of a piece of it, times their number.
    """
    variables = [
        v for v in model.trainable_variables if isinstance(v, DistributedVariable)
    ]
    if not variables:
        raise ValueStructureError(
            "StepTimeReport is for models under a strategy, with weights to train.",
            received=f"{type(model).__name__} {model.name!r}.",
            fix="create the model inside `with strategy.scope():`; "
            "kd.OneDeviceStrategy is one, too.",
        )
    mesh: ReplicaMesh = variables[0].replica_mesh
    if mesh.num_replicas == 1:
        return {}
    size = sum(math.prod(v.shape) for v in variables)
    piece = min(size, _PIECE)
    add = jax.jit(lambda parts: jnp.sum(parts, 0), out_shardings=mesh.replicated)
    own = jax.jit(
        lambda: jnp.ones((mesh.num_replicas, piece), jnp.float32),
        out_shardings=mesh.split,
    )
    times: list[float] = []
    with launches.lock:
        given = own()
        for _ in range(6):
            liveness.current.begin_program(mesh.num_processes)
            begun = time.perf_counter()
            add(given).block_until_ready()
            times.append(1000 * (time.perf_counter() - begun))
    return {"reduction": statistics.median(times[1:]) * size / piece}

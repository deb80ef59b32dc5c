"""What a dry run found out, as numbers, text and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from keras_distribute import checks
from keras_distribute.dry_run import estimate, picture
from keras_distribute.dry_run.collectives import Collective
from keras_distribute.dry_run.estimate import Estimate, ScalingPoint
from keras_distribute.dry_run.memory import Memory
from keras_distribute.dry_run.prediction import Prediction
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import ValueStructureError
from keras_distribute.summary.tables import bytes_in_words

_SHOWN_COLLECTIVES = 8


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest global batch that fits.

    Args:
        rows: It; 0 where not even one row for each device fits.
        too_large: The smallest batch that was compiled and does not fit; `None` where
            none was found.
        compilations: How many programs were compiled for it.
    """

    rows: int
    too_large: int | None
    compilations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """What `kd.dry_run` found out about one training step. `print(report)` shows it as
    a table.

    All bytes and operations are of one device; those of a program that runs several
    steps (`steps_per_execution`) are of one step, but for `memory` and `collectives`,
    which are the program's.

    Args:
        target: The hardware.
        num_logical: How many of the devices are a replica.
        batch: Rows of the global batch.
        num_processes: The hosts that the devices belong to.
        num_steps: How many steps one call of the program runs.
        memory: What the step takes; `None` where the compiler refused it as too large.
        needed_bytes: At most at one time, or what the compiler said that it would need.
        limit_bytes: What a program may take; `None` where nothing is known of it
            (CPUs).
        flops: Operations of matrix products and convolutions, by the dtype of the
            operands; see `kd.dry_run`.
        compiler_flops: The compiler's own count, which leaves out the iterations of
            loops; `None` where it has none.
        bytes_moved: Between memory and cores.
        collectives: In the compiled program.
        num_gradients: How many trainable weights there are, each of whose gradients is
            reduced over the devices.
        unknown_loops: Loops whose number of iterations is not known before they run:
            they count once.
        estimate: ESTIMATED seconds; `None` for CPUs, and where the step does not fit.
        prediction: PREDICTED seconds, with an error bar; `None` likewise.
        largest_batch: Where it was asked for.
        compile_seconds: What the compilation took here, in seconds.
        compiler_options: Of the compiler, that the step was compiled with because it
            fails without them.
        was_compiled_before: Whether nothing was compiled: the answer is that of an
            earlier dry run of the same program.
        versions: Of what the result depends on.
    """

    target: Target
    num_logical: int
    batch: int
    num_processes: int
    num_steps: int
    memory: Memory | None = None
    needed_bytes: int
    limit_bytes: int | None
    flops: dict[str, float]
    compiler_flops: float | None = None
    bytes_moved: float | None = None
    collectives: tuple[Collective, ...] = ()
    num_gradients: int
    unknown_loops: int = 0
    estimate: Estimate | None = None
    prediction: Prediction | None = None
    largest_batch: LargestBatch | None = None
    compile_seconds: float
    compiler_options: dict[str, bool] = dataclasses.field(default_factory=dict)
    was_compiled_before: bool = False
    versions: dict[str, str]

    @property
    def topology(self) -> str:
        """The name of the hardware."""
        return self.target.name

    @property
    def num_devices(self) -> int:
        """How many devices share the step."""
        return self.target.num_devices

    @property
    def fits(self) -> bool | None:
        """Whether the step fits in the device's memory; `None` where its size is not
        known.
        """
        if self.memory is None or self.limit_bytes is None:
            return None if self.memory else False
        return self.needed_bytes <= self.limit_bytes

    @property
    def bytes_sent(self) -> float:
        """What each device sends to others in a step, if every collective goes around
        a ring.
        """
        sent = (each.bytes_sent * each.times for each in self.collectives)
        return sum(sent) / self.num_steps

    def count(self, kind: str) -> int:
        """How many instructions of a kind, such as `"all-reduce"`, the compiled program
        has.
        """
        checks.text("kind", kind, 'report.count("all-reduce")')
        return sum(each.kind == kind for each in self.collectives)

    def scaling(self) -> list[ScalingPoint]:
        """ESTIMATES for other numbers of the same devices, each with as many rows as
        here; nothing is compiled.

        Replicas of several logical devices stay as they are; there are more or fewer of
        them.

        Raises:
            ValueStructureError: Where there is no estimate to start from.
        """
        if self.estimate is None or self.memory is None:
            raise ValueStructureError(
                "There is no estimate for this report: the step does not fit, or runs "
                "on CPUs.",
                received=f"topology={self.topology!r}, batch={self.batch}.",
                fix="a smaller batch, or a topology of TPUs or GPUs.",
            )
        return estimate.scaling(
            self.target,
            self.estimate,
            self.collectives,
            gradient_bytes=self.memory.parameters,
            rows=-(-self.batch // self.num_devices),
            num_steps=self.num_steps,
            num_logical=self.num_logical,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as numbers, strings, lists and dictionaries."""
        own = dataclasses.asdict(self)
        del own["target"]
        if self.estimate is not None:
            own["estimate"] |= {
                "at_least": self.estimate.at_least,
                "in_turn": self.estimate.in_turn,
                "bound_by": self.estimate.bound_by,
                "note": "An estimate from published peak rates, not a measurement.",
                "formula": estimate.FORMULA,
            }
            own["scaling"] = list(map(dataclasses.asdict, self.scaling()))
        return {
            "topology": self.topology,
            "num_devices": self.num_devices,
            "fits": self.fits,
            **own,
            "collectives": list(map(dataclasses.asdict, self.collectives)),
        }

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        checks.path("path", path, 'report.save("plan.json")')
        text = json.dumps(self.to_json(), indent=1) + "\n"
        Path(path).write_text(text, encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws memory, estimated time and estimated scaling. Needs `pip install
        matplotlib`.

        Args:
            path: Of the picture; its ending says the format, such as `.png` or `.svg`.

        Raises:
            BackendError: Without matplotlib.
        """
        checks.path("path", path, 'report.plot("plan.png")')
        parts = {"needed": self.needed_bytes}
        if (memory := self.memory) is not None:
            on_device = 0 if memory.host else 1
            parts = {
                "parameters": memory.parameters * on_device,
                "optimizer": memory.optimizer * on_device,
                "batch, other, padding": memory.arguments
                - (memory.parameters + memory.optimizer) * on_device,
                "activations, temporary": memory.temporary,
            }
        title = f"Batch {self.batch} on {self.topology}: compiled, not run"
        points = self.scaling() if self.estimate else []
        picture.draw(path, title, parts, self.limit_bytes, self.estimate, points)

    def __str__(self) -> str:
        devices = checks.counted(self.num_devices, "device")
        heading = f"Dry run: batch {self.batch} on {self.topology}, {devices}"
        if self.num_processes > 1:
            heading += f" on {self.num_processes} hosts"
        if self.num_logical > 1:
            heading += f", {self.num_logical} to a replica"
        if self.num_steps > 1:
            heading += f", {self.num_steps} steps a call"
        heading += "; compiled, not run"
        if self.compiler_options:
            heading += f"\ncompiled with {_options_text(self.compiler_options)}"
        parts = [heading, _memory_text(self)]
        if self.memory is not None:
            parts += [_work_text(self), _collectives_text(self)]
        if self.estimate is not None:
            parts.append(_estimate_text(self.estimate, self.batch))
        if self.prediction is not None:
            parts.append(_prediction_text(self.prediction, self.batch))
        return "\n\n".join(parts)


def _options_text(options: dict[str, bool]) -> str:
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{named}, without which XLA fails here"


def _memory_text(report: DryRunReport) -> str:
    lines: dict[str, str] = {}
    if (memory := report.memory) is not None:
        other = memory.other_state + memory.metrics
        aliased = f"of which {bytes_in_words(memory.aliased)} are updated in place"
        lines = {
            "parameters": bytes_in_words(memory.parameters),
            "optimizer": bytes_in_words(memory.optimizer),
            "other state, metrics": bytes_in_words(other),
            "batch": bytes_in_words(memory.batch),
            "all arguments": f"{bytes_in_words(memory.arguments)}, {aliased}",
            "activations, temporary": bytes_in_words(memory.temporary),
            "program": bytes_in_words(memory.code),
        }
        if memory.host:
            held = f"{bytes_in_words(memory.host)}, copied to the device by each step"
            lines["in host memory"] = held
    peak = "needed" if memory is None else "peak"
    lines[peak] = bytes_in_words(report.needed_bytes)
    lines["available"] = "not known"
    if (limit := report.limit_bytes) is not None:
        spare = bytes_in_words(abs(limit - report.needed_bytes))
        verdict = f"fits, {spare} to spare"
        if not report.fits:
            verdict = f"does NOT fit, {spare} too much"
        lines["available"] = f"{bytes_in_words(limit)}: {verdict}"
    if (largest := report.largest_batch) is not None:
        beyond = "no larger one was tried"
        if largest.too_large:
            beyond = f"{largest.too_large} does not fit"
        detail = f"{beyond}; {largest.compilations} compilations"
        lines["largest batch"] = f"{largest.rows} ({detail})"
    return _section("memory of each device", lines)


def _work_text(report: DryRunReport) -> str:
    flops = [f"{count:.3g} in {dtype}" for dtype, count in report.flops.items()]
    lines = {"FLOPs": ", ".join(flops) or "0"}
    if report.compiler_flops is not None:
        lines["  the compiler's count"] = f"{report.compiler_flops:.3g}"
    if report.bytes_moved is not None:
        lines["bytes moved"] = bytes_in_words(report.bytes_moved)
    if report.unknown_loops:
        detail = f"{report.unknown_loops}, whose iterations count once"
        lines["loops without a length"] = detail
    return _section("one step on each device", lines)


def _collectives_text(report: DryRunReport) -> str:
    counts = Counter(each.kind for each in report.collectives)
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
    lines = [f"collectives for {report.num_gradients} gradients: {found}"]
    by_size = sorted(report.collectives, key=lambda each: -each.num_bytes * each.times)
    lines += map(_collective_text, by_size[:_SHOWN_COLLECTIVES])
    if rest := by_size[_SHOWN_COLLECTIVES:]:
        size = bytes_in_words(sum(each.num_bytes * each.times for each in rest))
        lines.append(f"  and {len(rest)} more, {size}")
    return "\n".join(lines)


def _collective_text(each: Collective) -> str:
    times = f" {each.times} times" if each.times > 1 else ""
    arrays = f"{checks.counted(each.num_arrays, 'array')} of {'+'.join(each.dtypes)}"
    groups = f"{checks.counted(each.num_groups, 'group')} of {each.group_size}"
    if each.kind == "collective-permute":
        groups = checks.counted(each.num_groups, "pair")
    size = bytes_in_words(each.num_bytes)
    moved = f"{size}, {arrays}, {groups}"
    return f"  {each.kind}{times}: {moved}; waits for {each.waits_for}"


def _estimate_text(found: Estimate, rows: int) -> str:
    def time(seconds: float) -> str:
        return f"{seconds * 1e3:.3g} ms"

    # Three digits: it is an estimate.
    rate = float(f"{rows / found.in_turn:.3g}")
    return _section(
        "ESTIMATE of a step, from published peak rates; not a measurement",
        {
            "compute": time(found.compute),
            "memory": time(found.memory),
            "communication": time(found.communication),
            "at least": f"{time(found.at_least)}, bound by {found.bound_by}",
            "without overlap": f"{time(found.in_turn)}, {rate:,.0f} rows a second",
            "rates": found.source,
        },
    )


def _prediction_text(found: Prediction, rows: int) -> str:
    def time(seconds: float) -> str:
        return f"{seconds * 1e3:.3g}"

    rate = float(f"{rows / found.seconds:.2g}")
    span = f"{time(found.low)} to {time(found.high)}"
    communication = f"{time(found.overlapped)} ms beside it, {time(found.exposed)} ms"
    return _section(
        "PREDICTION of a step, from what published steps reach; not a measurement",
        {
            "time": f"~ {time(found.seconds)} ms ({span}), {rate:,.0f} rows a second",
            "  instructions": f"{time(found.work)} ms",
            "  communication": f"{communication} after it",
            "published steps": f"{found.num_fitted} fitted, "
            f"{found.num_held_out} more to check",
        },
    )


def _section(title: str, lines: dict[str, str]) -> str:
    return "\n".join([title, *(f"  {name:<24}{text}" for name, text in lines.items())])

"""What a dry run found out, as numbers, text and JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from keras_distribute import checks
from keras_distribute.dry_run import estimate, picture, text
from keras_distribute.dry_run.collectives import Collective
from keras_distribute.dry_run.estimate import Estimate, ScalingPoint
from keras_distribute.dry_run.memory import Memory
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import ValueStructureError


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


@dataclasses.dataclass(frozen=True)
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
        unknown_loops: Loops whose number of iterations nobody knows before they run:
            they count once.
        estimate: ESTIMATED seconds; `None` for CPUs, and where the step does not fit.
        largest_batch: Where it was asked for.
        compile_seconds: What the compilation took here.
        versions: Of what the result depends on.
    """

    target: Target
    num_logical: int
    batch: int
    num_processes: int
    num_steps: int
    memory: Memory | None
    needed_bytes: int
    limit_bytes: int | None
    flops: dict[str, float]
    compiler_flops: float | None
    bytes_moved: float | None
    collectives: tuple[Collective, ...]
    num_gradients: int
    unknown_loops: int
    estimate: Estimate | None
    largest_batch: LargestBatch | None
    compile_seconds: float
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
        if self.memory is None:
            return False
        return (
            None if self.limit_bytes is None else self.needed_bytes <= self.limit_bytes
        )

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
        rows = -(-self.batch // self.num_devices)
        return estimate.scaling(
            self.target,
            self.estimate,
            self.collectives,
            self.memory.parameters,
            rows,
            self.num_steps,
            self.num_logical,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as numbers, strings, lists and dictionaries."""
        names = [
            field.name for field in dataclasses.fields(self) if field.name != "target"
        ]
        own = {name: _plain(getattr(self, name)) for name in names}
        if self.estimate is not None:
            own["estimate"] |= {
                "at_least": self.estimate.at_least,
                "in_turn": self.estimate.in_turn,
                "bound_by": self.estimate.bound_by,
                "note": "An estimate from published peak rates, not a measurement.",
                "formula": estimate.FORMULA,
            }
            own["scaling"] = _plain(self.scaling())
        return {
            "topology": self.topology,
            "num_devices": self.num_devices,
            "fits": self.fits,
            **own,
        }

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        checks.path("path", path, 'report.save("plan.json")')
        Path(path).write_text(
            json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8"
        )

    def plot(self, path: str | Path) -> None:
        """Draws memory, estimated time and estimated scaling. Needs `pip install
        matplotlib`.

        Args:
            path: Of the picture; its ending says the format, such as `.png` or `.svg`.

        Raises:
            BackendError: Without matplotlib.
        """
        checks.path("path", path, 'report.plot("plan.png")')
        picture.draw(self, path)

    def __str__(self) -> str:
        return text.table(self)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

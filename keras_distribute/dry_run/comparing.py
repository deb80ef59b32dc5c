"""Dry runs of one model under the options that divide what it keeps, in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_distribute import checks
from keras_distribute.dry_run.api import dry_run
from keras_distribute.dry_run.report import DryRunReport
from keras_distribute.errors import ValueStructureError
from keras_distribute.strategies.layout_maps import LayoutMap
from keras_distribute.strategies.mirrored import MirroredStrategy
from keras_distribute.summary.tables import bytes_in_words

_ALONE: dict[str, dict[str, Any]] = {
    "replicated": {},
    "shard_optimizer_state": {"shard_optimizer_state": True},
    "shard_variables": {"shard_variables": True},
}


@dataclasses.dataclass(frozen=True)
class DryRunComparison:
    """What `kd.compare_dry_runs` found: a `kd.DryRunReport` for each option. As text,
    a table.
    """

    reports: dict[str, DryRunReport]

    def __str__(self) -> str:
        header = ["", "fits", "memory a device", "sent a step", "largest batch"]
        rows = [header, *(_row(name, each) for name, each in self.reports.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first = next(iter(self.reports.values()))
        title = f"Dry runs: batch {first.batch} on {first.topology}; compiled, not run"
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        return "\n".join([title, "", *(line.rstrip() for line in lines)])


def compare_dry_runs(
    build_model: Callable[[], keras.Model],
    batch: Any,
    topology: str = "v5e:4x4",
    *,
    largest_batch: bool = False,
    memory_limit: int | None = None,
    num_logical_devices: int = 1,
    layout_map: LayoutMap | None = None,
    verbose: int = 1,
) -> DryRunComparison:
    """Compiles a training step for hardware that need not be there with what a replica
    keeps whole, and divided in each of the ways that a strategy knows.

    These are: everything replicated, `shard_optimizer_state=True`,
    `shard_variables=True`, and with a `layout_map` both of it alone and of it with
    `shard_variables=True`. Nothing is run.

    Args:
        build_model: Makes and compiles the model, which gets no values; called once
            for each row of the table, under a strategy.
        batch: As of `kd.dry_run`.
        topology: As of `kd.dry_run`.
        largest_batch: As of `kd.dry_run`, for each; each tries some more programs.
        memory_limit: As of `kd.dry_run`.
        num_logical_devices: As of `kd.MirroredStrategy`, for the rows with a layout.
        layout_map: Likewise.
        verbose: As of `kd.dry_run`.

    Returns:
        A `kd.DryRunComparison`: `reports` by the names of the options.

    Raises:
        StructureTypeError: For what is no function.
        ValueStructureError: For logical devices without a layout.
        DistributeError: Else as `kd.dry_run` and `kd.MirroredStrategy` do.

    Example:
        >>> import keras, keras_distribute as kd
        >>> def build():
        ...     dense = keras.layers.Dense(512)
        ...     model = keras.Sequential([keras.Input((512,)), dense])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> found = kd.compare_dry_runs(build, batch=64, topology="cpu:4")
        >>> whole, parts = (
        ...     found.reports[name].memory.parameters
        ...     for name in ("replicated", "shard_variables"))
        >>> whole, parts
        (1050624, 264192)
    """
    checks.function(
        "build_model",
        build_model,
        "A comparison makes the model anew for each option.",
        "kd.compare_dry_runs(build_model, 256), where build_model() returns a compiled "
        "model.",
    )
    each = checks.count("num_logical_devices", num_logical_devices, 1)
    if each > 1 and layout_map is None:
        raise ValueStructureError(
            "Logical devices have something to do where a layout divides variables "
            "over them.",
            received=f"num_logical_devices={each} without a layout_map.",
            fix='layout_map={".*kernel": (None, "logical")}',
        )
    options = dict(_ALONE)
    if layout_map is not None:
        layout: dict[str, Any] = {
            "layout_map": layout_map,
            "num_logical_devices": num_logical_devices,
        }
        options["layout_map"] = layout
        options["layout_map, shard_variables"] = {**layout, "shard_variables": True}

    def report(chosen: dict[str, Any]) -> DryRunReport:
        own = [f"cpu:{i}" for i in range(chosen.get("num_logical_devices", 1))]

        def build() -> keras.Model:
            with MirroredStrategy(own, **chosen).scope():
                return build_model()

        return dry_run(
            build,
            batch,
            topology,
            largest_batch=largest_batch,
            memory_limit=memory_limit,
            verbose=verbose,
        )

    return DryRunComparison({name: report(each) for name, each in options.items()})


def _row(name: str, report: DryRunReport) -> list[str]:
    fits = {True: "yes", False: "NO", None: "?"}[report.fits]
    sent = bytes_in_words(round(report.bytes_sent)) if report.memory else "?"
    largest = report.largest_batch
    return [
        name,
        fits,
        bytes_in_words(report.needed_bytes),
        sent,
        "" if largest is None else str(largest.rows),
    ]

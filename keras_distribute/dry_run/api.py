"""`kd.dry_run`: compiles a training step for hardware that need not be there, and says
what it would take.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
from jax.errors import JaxRuntimeError

from keras_distribute import checks
from keras_distribute.dry_run import (
    collectives,
    compiling,
    estimate,
    examples,
    fitting,
    flops,
    hlo,
    memory,
    models,
    targets,
    traffic,
)
from keras_distribute.dry_run.report import DryRunReport, LargestBatch
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import (
    BackendError,
    DeviceError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.mesh import ReplicaMesh
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import planning


def dry_run(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    batch: Any,
    topology: str = "v5e:4x4",
    *,
    largest_batch: bool = False,
    memory_limit: int | None = None,
    shard_optimizer_state: bool = False,
) -> DryRunReport:
    """Compiles a training step for hardware that need not be there, and says what it
    would take. Nothing is run.

    The step is the one that `fit` would compile there: the model's own, over the global
    batch, with everything that its strategy does to it, such as divided optimizer state
    or `steps_per_execution`. The compiler is the hardware's own: libtpu for TPUs (`pip
    install 'keras-distribute[dry-run-tpu]'`), JAX's CUDA plugin for GPUs (`pip install
    'keras-distribute[dry-run-cuda]'`), each in a process of its own. On this machine
    the model's weights and optimizer state are created, in the host's memory or where
    the model already has them.

    FLOPs are those of matrix products and convolutions in the traced step, with each
    loop's iterations, divided by the number of devices, as if the logical devices of a
    replica computed nothing twice; bytes moved are the operands and results of the
    compiled program's instructions. Times are ESTIMATES from published peak rates
    (https://doi.org/10.1145/1498765.1498785), and real steps take longer.

    Args:
        model_or_builder: A compiled model, or a function without arguments that makes
            one. A model that belongs to no strategy is made once more from its
            configuration.
        batch: The global batch: a number of rows, for a model that knows the shapes of
            its inputs, and whose labels have the shape of its outputs, or are class
            numbers for a sparse categorical loss; otherwise `(x, y)` or `(x, y,
            sample_weight)`, structures of arrays or of `jax.ShapeDtypeStruct`s.
        topology: A TPU slice by its generation and the chips along each axis,
            `"v5e:4x4"` (`v2`, `v3`, `v4`, `v5e`, `v5p`, `v6e`, `tpu7x`); GPUs of one
            host, `"h100:8"` (`v100`, `a100`, `a100-80gb`, `h100`, `h200`); or virtual
            CPU devices, `"cpu:8"`.
        largest_batch: Whether to search the largest batch that fits, which compiles
            some more programs.
        memory_limit: Bytes that the program may take on each device, in place of what
            is known of the hardware.
        shard_optimizer_state: For a model that a function makes, as for
            `kd.MirroredStrategy`.

    Returns:
        A `kd.DryRunReport`. A batch that does not fit has one, too: with what is needed
        and what there is.

    Raises:
        BackendError: Where the compiler or its assembler is not installed, and where
            the compiler ends its process, which is not this one.
        DeviceError: For a topology that does not exist.
        InputError: For a batch whose shapes are not known.
        StructureTypeError: For what is no compiled model.
        ValueStructureError: For a search without a limit.

    Example:
        >>> import keras, keras_distribute as kd
        >>> def build():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> report = kd.dry_run(build, batch=64, topology="cpu:4")
        >>> report.memory.parameters, report.num_gradients, report.count("all-reduce")
        (164, 4, 1)
    """
    checks.flag("largest_batch", largest_batch)
    checks.flag("shard_optimizer_state", shard_optimizer_state)
    target = targets.parse(topology)
    limit = _limit(target, memory_limit)
    if largest_batch and limit is None:
        raise ValueStructureError(
            "The largest batch that fits can be searched only where the size of the "
            "memory is known.",
            received=f"topology={topology!r} without memory_limit.",
            fix="memory_limit=16 * 2**30",
        )
    devices = target.devices()
    model, strategy = models.of(model_or_builder, shard_optimizer_state)
    example = examples.batch_of(model, batch)
    planning.build(model, strategy, example)
    compile_for = _Compiler(
        model,
        strategy,
        target,
        _mesh_like(strategy.replica_mesh, devices, topology),
        limit,
    )
    report = compile_for(example)
    if not largest_batch:
        return report
    assert limit is not None
    rows = examples.rows_of(example)
    known = {rows: report.needed_bytes}

    def needed(count: int) -> int:
        if count not in known:
            known[count] = compile_for(examples.with_rows(example, count)).needed_bytes
        return known[count]

    found, too_large, tried = fitting.largest(needed, limit, target.num_devices, rows)
    compilations = tried + (1 if rows % target.num_devices else 0)
    return dataclasses.replace(
        report, largest_batch=LargestBatch(found, too_large, compilations)
    )


def _mesh_like(own: ReplicaMesh, devices: list[Any], topology: str) -> ReplicaMesh:
    """A mesh over other devices whose replicas have as many logical devices as those of
    `own`.
    """
    size = own.num_logical
    if len(devices) % size:
        raise DeviceError(
            f"{topology} has no whole number of replicas of {size} logical devices.",
            received=f"{len(devices)} devices.",
            fix=f"a topology with a multiple of {size} devices.",
        )
    return ReplicaMesh.of_groups(
        [devices[i : i + size] for i in range(0, len(devices), size)]
    )


def _limit(target: Target, given: int | None) -> int | None:
    if given is None:
        return target.hardware.usable_bytes if target.hardware else None
    return checks.count(
        "memory_limit",
        given,
        1,
        what="The memory that a program may take is a number of bytes.",
        fix="memory_limit=16 * 2**30",
        error=StructureTypeError,
    )


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Compiles the step of one model for one target, for any batch."""

    model: Any
    strategy: Strategy
    target: Target
    mesh: ReplicaMesh
    limit: int | None

    def __call__(self, batch: Any) -> DryRunReport:
        plan = planning.training_step(self.model, self.strategy, self.mesh, batch)
        counts = flops.of_program(plan.traced.jaxpr)
        begun = time.perf_counter()
        try:
            compiled = compiling.compiled(self.target, plan.traced.lower())
        except JaxRuntimeError as error:
            if "ptxas" in str(error):
                raise BackendError(
                    "XLA assembles programs for GPUs by ptxas, which is missing or "
                    "does not fit.",
                    received=f"{str(error).splitlines()[0]}",
                    fix="pip install 'keras-distribute[dry-run-cuda]', which has one.",
                ) from error
            sizes = memory.refusal(str(error))
            if sizes is None:
                raise
            return self._report(
                plan, batch, counts, None, sizes, time.perf_counter() - begun
            )
        return self._report(
            plan, batch, counts, compiled, None, time.perf_counter() - begun
        )

    def _report(
        self,
        plan: planning.Plan,
        batch: Any,
        counted: Mapping[str, int],
        compiled: Any,
        refused: tuple[int, int] | None,
        seconds: float,
    ) -> DryRunReport:
        rows, num_steps, devices = (
            examples.rows_of(batch),
            plan.num_steps,
            self.target.num_devices,
        )
        # The part of the replica with the most rows, which its logical devices are
        # taken to share evenly.
        share = (
            -(-rows // self.mesh.num_replicas)
            / rows
            / self.mesh.num_logical
            / num_steps
        )
        counts = {dtype: count * share for dtype, count in counted.items()}
        report = DryRunReport(
            target=self.target,
            num_logical=self.mesh.num_logical,
            batch=rows,
            num_processes=self.mesh.num_processes,
            num_steps=num_steps,
            memory=None,
            needed_bytes=refused[0] if refused else 0,
            limit_bytes=min(refused[1], self.limit or refused[1])
            if refused
            else self.limit,
            flops=counts,
            compiler_flops=None,
            bytes_moved=None,
            collectives=(),
            num_gradients=len(plan.state[0]),
            unknown_loops=0,
            estimate=None,
            largest_batch=None,
            compile_seconds=seconds,
            versions=_versions(self.target.platform),
        )
        if compiled is None:
            return report
        taken, module = memory.of_program(compiled, plan), hlo.parse(compiled.as_text())
        moved = traffic.bytes_moved(module) / num_steps
        found = tuple(collectives.of_program(module, devices, self.mesh.num_logical))
        said = compiled.cost_analysis() or {}
        return dataclasses.replace(
            report,
            memory=taken,
            needed_bytes=taken.needed(self.target.platform),
            compiler_flops=said.get("flops"),
            bytes_moved=moved,
            collectives=found,
            unknown_loops=module.unknown_loops,
            estimate=estimate.of_step(self.target, counts, moved, found, num_steps),
        )


def _versions(platform: str) -> dict[str, str]:
    own = {"keras": keras.__version__, "jax": jax.__version__}
    others = ("jaxlib", *targets.PACKAGES[platform])
    return own | {name: importlib.metadata.version(name) for name in others}

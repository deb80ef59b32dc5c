"""`kd.dry_run`: compiles a training step for hardware that need not be there, and says
what it would take.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_distribute import checks
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.dry_run import (
    collectives,
    estimate,
    examples,
    fitting,
    flops,
    hlo,
    memory,
    models,
    planning,
    prediction,
    targets,
    traffic,
)
from keras_distribute.dry_run.outcome import StepCompiler
from keras_distribute.dry_run.report import DryRunReport, LargestBatch
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import DeviceError, StructureTypeError, ValueStructureError
from keras_distribute.strategies.base import Strategy


def dry_run(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    batch: Any,
    topology: str = "v5e:4x4",
    *,
    largest_batch: bool = False,
    memory_limit: int | None = None,
    shard_optimizer_state: bool = False,
    shard_variables: bool = False,
    verbose: int = 1,
) -> DryRunReport:
    """Compiles a training step for hardware that need not be there, and says what it
    would take. Nothing is run.

    The step is the one that `fit` would compile there: the model's own, over the global
    batch, with everything that its strategy does to it, such as divided optimizer state
    or `steps_per_execution`. The compiler is the hardware's own: libtpu for TPUs (`pip
    install 'keras-distribute[dry-run-tpu]'`), JAX's CUDA plugin for GPUs (`pip install
    'keras-distribute[dry-run-cuda]'`), each in a process of its own. A model that a
    function makes gets no values, so it may be larger than the memory of this machine;
    so does the copy of a model without a strategy. Of a strategy's model, the optimizer
    state is created, where the weights are.

    FLOPs are those of matrix products and convolutions in the traced step, with each
    loop's iterations, divided by the number of devices, as if the logical devices of a
    replica computed nothing twice; bytes moved are the operands and results of the
    compiled program's instructions. Times are ESTIMATES from published peak rates
    (https://doi.org/10.1145/1498765.1498785), and real steps take longer; the
    PREDICTION beside them is what a step may take, from the shares of these rates that
    published training steps reach, with an error bar.

    Args:
        model_or_builder: A compiled model, or a function without arguments that makes
            one, in a scope of its own or in none. A model that belongs to no strategy
            is made once more from its configuration.
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
        shard_variables: Likewise.
        verbose: Whether to say on stderr how long the compiler has taken, from 3
            seconds on; 0 for nothing.

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
        ...     layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
        ...     model = keras.Sequential([keras.Input((8,)), *layers])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> report = kd.dry_run(build, batch=64, topology="cpu:4")
        >>> report.memory.parameters, report.num_gradients, report.count("all-reduce")
        (164, 4, 1)
    """
    checks.flag("largest_batch", largest_batch)
    checks.flag("shard_optimizer_state", shard_optimizer_state)
    checks.flag("shard_variables", shard_variables)
    if not isinstance(verbose, bool):
        checks.count("verbose", verbose)
    target = targets.parse(topology)
    limit = _checked_limit(target, memory_limit, largest_batch)
    devices = target.devices()
    found = models.with_strategy(
        model_or_builder,
        shard_optimizer_state=shard_optimizer_state,
        shard_variables=shard_variables,
    )
    model, strategy, _ = found
    example = examples.batch_of(model, batch)
    with found.creation():
        planning.build(model, strategy, example)
    mesh = _mesh_like(strategy.replica_mesh, devices, topology)
    _check_host_memory(strategy, devices, topology)

    compiler = StepCompiler(target, is_shown=bool(verbose))

    def compile_for(batch: Any) -> DryRunReport:
        return _compile(model, strategy, compiler, target, mesh, limit, batch)

    report = compile_for(example)
    if not largest_batch or limit is None:
        return report
    largest = _largest_batch(report, compile_for, example, limit)
    return dataclasses.replace(report, largest_batch=largest)


def _checked_limit(
    target: Target, memory_limit: int | None, is_searching: bool
) -> int | None:
    """The bytes that a program may take on each device, where they are known."""
    if memory_limit is not None:
        return checks.count(
            "memory_limit",
            memory_limit,
            1,
            what="The memory that a program may take is a number of bytes.",
            fix="memory_limit=16 * 2**30",
            error=StructureTypeError,
        )
    limit = target.hardware.usable_bytes if target.hardware else None
    if is_searching and limit is None:
        raise ValueStructureError(
            "The largest batch that fits can be searched only where the size of the "
            "memory is known.",
            received=f"topology={target.name!r} without memory_limit.",
            fix="memory_limit=16 * 2**30",
        )
    return limit


def _largest_batch(
    report: DryRunReport,
    compile_for: Callable[[Any], DryRunReport],
    example: Any,
    limit: int,
) -> LargestBatch:
    """Searches the largest batch that fits, from the report on a first one."""
    reports = {report.batch: report}

    def needed_bytes(count: int) -> int:
        if count not in reports:
            reports[count] = compile_for(examples.with_rows(example, count))
        found = reports[count]
        # The compiler may refuse what the user's limit would allow.
        return max(found.needed_bytes, 0 if found.fits else limit + 1)

    fits, too_large, _ = fitting.largest(
        needed_bytes, limit, report.target.num_devices, report.batch
    )
    return LargestBatch(fits, too_large, compilations=len(reports))


def _check_host_memory(strategy: Strategy, devices: list[Any], topology: str) -> None:
    """Refuses variables in a memory that the compiler knows nothing of: the report
    would have them on the devices.
    """
    kind = strategy.placement.memory_kind
    if kind is None or any(m.kind == kind for m in devices[0].addressable_memories()):
        return
    raise DeviceError(
        f"A dry run for {topology} cannot have variables in host memory: GPUs that are "
        "not there have no such memory for JAX.",
        received=f"a model of {strategy}.",
        fix="a model without a strategy, whose report.memory says how large what would "
        'be in host memory is; or a TPU, such as topology="v5e:2x4".',
    )


def _mesh_like(own: ReplicaMesh, devices: list[Any], topology: str) -> ReplicaMesh:
    """A mesh over other devices whose replicas have as many logical devices as those of
    `own`, or are as many where a device has several.
    """
    if own.series is not None:
        if own.num_replicas % len(devices):
            raise DeviceError(
                f"The number of devices of {topology} does not divide that of the "
                "replicas of a deterministic strategy.",
                received=f"{len(devices)} devices, num_replicas={own.num_replicas}.",
                fix="another topology, or MirroredStrategy(deterministic=True, "
                f"num_replicas={len(devices)}).",
            )
        return ReplicaMesh.in_series(devices, own.num_replicas)
    size = own.num_logical
    if len(devices) % size:
        raise DeviceError(
            f"{topology} has no whole number of replicas of {size} logical devices.",
            received=f"{len(devices)} devices.",
            fix=f"a topology with a multiple of {size} devices.",
        )
    groups = [devices[i : i + size] for i in range(0, len(devices), size)]
    return ReplicaMesh.of_groups(groups)


def _compile(
    model: Any,
    strategy: Strategy,
    compiler: StepCompiler,
    target: Target,
    mesh: ReplicaMesh,
    limit: int | None,
    batch: Any,
) -> DryRunReport:
    """Compiles the step for one batch."""
    plan = planning.training_step(model, strategy, mesh, batch)
    counts = flops.of_program(plan.traced.jaxpr)
    rows, num_steps = examples.rows_of(batch), plan.num_steps
    outcome = compiler(plan.traced.lower(), f"the step of {rows} rows")
    if mesh.series is not None:
        # Replicas have equally many rows. Those of a device are in a loop that is
        # counted once.
        share = mesh.series.each**2 / mesh.num_replicas / num_steps
    else:
        # The part of the replica with the most rows, which its logical devices are
        # taken to share evenly.
        most_rows = -(-rows // mesh.num_replicas)
        share = most_rows / rows / mesh.num_logical / num_steps
    report = DryRunReport(
        target=target,
        num_logical=mesh.num_logical,
        batch=rows,
        num_processes=mesh.num_processes,
        num_steps=num_steps,
        needed_bytes=0,
        limit_bytes=limit,
        flops={dtype: count * share for dtype, count in counts.items()},
        num_gradients=len(plan.state.weights),
        compile_seconds=outcome.seconds,
        compiler_options=dict(outcome.options),
        was_compiled_before=outcome.is_kept,
        versions=_versions(target.platform),
    )
    if outcome.refused is not None:
        needed, available = outcome.refused
        available = min(available, limit or available)
        return dataclasses.replace(report, needed_bytes=needed, limit_bytes=available)
    compiled = outcome.compiled
    assert compiled is not None
    analysis = memory.of_program(compiled, plan)
    module = hlo.parse(compiled.as_text())
    moved = traffic.bytes_moved(module) / num_steps
    found = collectives.of_program(module, target.num_devices, mesh.num_logical)
    return dataclasses.replace(
        report,
        memory=analysis,
        needed_bytes=analysis.needed(target.platform),
        compiler_flops=(compiled.cost_analysis() or {}).get("flops"),
        bytes_moved=moved,
        collectives=tuple(found),
        unknown_loops=module.unknown_loops,
        estimate=estimate.of_step(target, report.flops, moved, found, num_steps),
        prediction=prediction.of_step(target, module, found, num_steps),
    )


def _versions(platform: str) -> dict[str, str]:
    versions = {"keras": keras.__version__, "jax": jax.__version__}
    for name in ("jaxlib", *targets.PACKAGES[platform]):
        versions[name] = importlib.metadata.version(name)
    return versions

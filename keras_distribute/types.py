"""What the public API is made of: its enums and frozen options, and where its objects
say they are. Knows nothing of JAX or Keras.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from keras_distribute import checks
from keras_distribute.errors import StructureTypeError, ValueStructureError


def publish(module: str, *things: Any) -> None:
    """Has classes and functions say that they come from where users find them, as
    `numpy` does, and not from the file that defines them.
    """
    for thing in things:
        if hasattr(thing, "__module__"):  # Modules have none.
            thing.__module__ = module


class VariableSynchronization(enum.StrEnum):
    """When the copies of a variable are made equal.

    `AUTO`: the strategy chooses. `NONE`: one copy only. `ON_WRITE`: at each assignment
    (a `MirroredVariable`). `ON_READ`: at each read across replicas (a
    `SyncOnReadVariable`). Source: `tf.VariableSynchronization`. They are the strings
    that Keras has for them, and `keras.Variable` takes either: `keras.Variable(1.0,
    synchronization="on_read")`.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.StrEnum):
    """How the replicas' values of a variable become one.

    Source: `tf.VariableAggregation`. They are the strings that Keras has for them, and
    `keras.Variable` takes either.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class ReduceOp(enum.Enum):
    """How a set of values is reduced to one. Source: `tf.distribute.ReduceOp`.

    Example:
        >>> import keras_distribute as kd
        >>> kd.ReduceOp.from_variable_aggregation(kd.VariableAggregation.MEAN)
        <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction that an aggregation stands for; only `SUM` and `MEAN` have one.

        Raises:
            ValueStructureError: For an aggregation that is no reduction.
            StructureTypeError: For what is no aggregation.
        """
        known = (VariableAggregation.SUM, VariableAggregation.MEAN)
        if isinstance(aggregation, str) and aggregation in known:
            return ReduceOp(aggregation.upper())
        right = isinstance(aggregation, VariableAggregation)
        raise (ValueStructureError if right else StructureTypeError)(
            "Only the aggregations SUM and MEAN are reductions.",
            received=f"{checks.shown(aggregation)}.",
            fix="ReduceOp.from_variable_aggregation(VariableAggregation.SUM), or "
            'ReduceOp("SUM").',
        )

    @staticmethod
    def parse(value: Any) -> ReduceOp:
        """A `ReduceOp` from itself or from its name in any case."""
        if isinstance(value, ReduceOp):
            return value
        if isinstance(value, str) and value.upper() in ReduceOp.__members__:
            return ReduceOp[value.upper()]
        error = ValueStructureError if isinstance(value, str) else StructureTypeError
        # TensorFlow's look like these.
        of = f" of {type(value).__module__}" if isinstance(value, enum.Enum) else ""
        raise error(
            "A reduction is ReduceOp.SUM or ReduceOp.MEAN.",
            received=f"{checks.shown(value)}{of}.",
            fix='kd.ReduceOp.SUM, or "SUM".',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `Strategy.run`. Source: `tf.distribute.RunOptions`.

    Args:
        experimental_enable_dynamic_batch_size: Accepted for compatibility. A program is
            compiled for each shape that is seen, whatever this says, so a changing
            batch size always works.
        experimental_bucketizing_dynamic_shape: Must be `False`: shapes are never padded
            to buckets, since padding rows would enter the numbers.
        experimental_xla_options: Compiler options for this program, as
            `jax.jit(compiler_options=...)` takes them.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("enable_dynamic_batch_size", "bucketizing_dynamic_shape"):
            name = f"experimental_{name}"
            checks.flag(name, getattr(self, name))
        checks.instance(
            "experimental_xla_options",
            self.experimental_xla_options,
            dict | None,
            "Compiler options are a dict.",
            'experimental_xla_options={"xla_cpu_enable_fast_math": True}, or None.',
        )
        if self.experimental_bucketizing_dynamic_shape:
            raise ValueStructureError(
                "Shapes are not padded to buckets: padding rows would enter the "
                "numbers.",
                received="experimental_bucketizing_dynamic_shape=True.",
                fix="leave it False; a program is compiled once for each shape.",
            )


class CommunicationImplementation(enum.Enum):
    """What moves values between processes. Source:
    `tf.distribute.experimental.CommunicationImplementation`.

    XLA has one for each kind of device, and the choice is not ours: NCCL on GPUs, ICI
    on TPUs, Gloo on CPUs. `AUTO` and `RING` take it; `NCCL` insists on GPUs.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """Options of a reduction or gather, or of a strategy. Source:
    `tf.distribute.experimental.CommunicationOptions`.

    Args:
        bytes_per_pack: Reductions of many values are packed into buffers of about this
            size; 0 means that the strategy chooses.
        timeout_seconds: For a strategy over several processes, how long one of them may
            be silent before the others raise an error. For one reduction it must be
            `None`: XLA's collectives have no timeout of their own.
        implementation: What moves the values; see `CommunicationImplementation`.

    Raises:
        ValueStructureError: For numbers that make no sense.
        StructureTypeError: For what is no number, and what is no implementation.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        what, fix = "bytes_per_pack is a number of bytes.", "a number >= 0."
        checks.count("bytes_per_pack", self.bytes_per_pack, what=what, fix=fix)
        if self.timeout_seconds is not None:
            what, fix = "timeout_seconds is a time.", "a number > 0, or None."
            checks.number("timeout_seconds", self.timeout_seconds, what=what, fix=fix)
        checks.instance(
            "implementation",
            self.implementation,
            CommunicationImplementation,
            "The implementation is one of CommunicationImplementation.",
            "kd.experimental.CommunicationImplementation.AUTO",
        )

    @staticmethod
    def checked(options: CommunicationOptions | None) -> CommunicationOptions:
        """The options; those by default for `None`."""
        what = "The options are CommunicationOptions."
        fix = "kd.experimental.CommunicationOptions(bytes_per_pack=2**22), or None."
        checks.instance("options", options, CommunicationOptions | None, what, fix)
        return options or CommunicationOptions()

    def refuse_for_one_collective(self) -> None:
        """Raises `ValueStructureError` for what only a whole strategy can have."""
        if self.timeout_seconds is not None:
            raise ValueStructureError(
                "One collective of an XLA program has no timeout of its own.",
                received=f"timeout_seconds={self.timeout_seconds}.",
                fix="leave it None, or pass it to "
                "kd.MultiWorkerMirroredStrategy(communication_options=...).",
            )


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """What `Strategy.experimental_distribute_values_from_function` tells its function.

    Source: `tf.distribute.experimental.ValueContext`.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        most = checks.count("num_replicas_in_sync", self.num_replicas_in_sync, 1) - 1
        replica = self.replica_id_in_sync_group
        checks.count("replica_id_in_sync_group", replica, most=most)

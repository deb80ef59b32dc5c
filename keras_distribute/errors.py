"""The exceptions of the package, and the form of their text. Knows nothing of JAX or
Keras.

    DistributeError                             everything below
    ├── BackendError(ImportError)               a version that cannot work
    ├── DeviceError(ValueError)                 a device that does not exist
    ├── ContextError(RuntimeError)              the wrong context, strategies mixed
    ├── ValueStructureError(ValueError)         values of the wrong shape or structure
    ├── StructureTypeError(TypeError)           an argument of the wrong type
    ├── VariableScopeError(ValueError,          a variable of another strategy
    │       RuntimeError)
    ├── AggregationError(ValueError)            an aggregation that forbids this
    ├── InputError(ValueError)                  data that cannot be distributed
    ├── OutOfRangeError(StopIteration)          get_next at the end of the data
    ├── ClusterError(ValueError, RuntimeError)  processes that cannot train together
    │   └── DuplicateTaskError(KeyError)        two resolvers name the same task
    ├── UnavailableError(ConnectionError)       a task that does not answer
    │   └── ReplacedWorkerError                 a worker that others stand in for
    ├── CancelledError(RuntimeError)            a function that was given up
    ├── RemoteError(RuntimeError)               what another task raised
    ├── NonFiniteError(FloatingPointError)      a NaN or infinite loss
    ├── OutOfMemoryError(MemoryError)           a step that no batch is small enough for
    ├── ReplicaConsistencyError(RuntimeError)   copies of a variable that differ
    └── CheckpointError(ValueError)             missing, or does not fit
        └── DamagedCheckpointError              incomplete, or not what was saved

Each subclasses the builtin that a TensorFlow user already catches.
"""

from __future__ import annotations

from typing import Any


class DistributeError(Exception):
    """Base of all errors raised by this package.

    The text says what failed, what was received, and what to write instead.

    Args:
        what: One sentence, with the values that matter.
        received: What the caller passed, or where the call was made.
        fix: Code or an action that works.
    """

    def __init__(
        self, what: str, *, received: str | None = None, fix: str | None = None
    ) -> None:
        lines = [what]
        if received is not None:
            lines.append(f"  Received: {received}")
        if fix is not None:
            lines.append(f"  Fix: {fix}")
        super().__init__("\n".join(lines))


class BackendError(DistributeError, ImportError):
    """Keras does not run on JAX, or a version of Keras or JAX cannot work."""


class DeviceError(DistributeError, ValueError):
    """A device does not exist, is named twice, or can no longer be set up."""


class ContextError(DistributeError, RuntimeError):
    """A call in the wrong context: strategies mixed, or a replica context missing or
    not wanted.
    """


class ValueStructureError(DistributeError, ValueError):
    """Per-replica values whose number, shapes or structure do not fit."""


class StructureTypeError(DistributeError, TypeError):
    """An argument of a type that has no meaning across replicas."""


class VariableScopeError(DistributeError, ValueError, RuntimeError):
    """A variable that belongs to another strategy, or to none."""


class AggregationError(DistributeError, ValueError):
    """A read or assignment that the variable's aggregation does not define."""


class InputError(DistributeError, ValueError):
    """A dataset that cannot be distributed, batches that do not fit together, or a
    position that cannot be had.
    """


class OutOfRangeError(DistributeError, StopIteration):
    """`DistributedIterator.get_next` at the end of the data."""


class ClusterError(DistributeError, ValueError, RuntimeError):
    """A cluster that makes no sense, an environment without one, or processes that
    cannot train together.
    """


class DuplicateTaskError(ClusterError, KeyError):
    """Two resolvers of a union name the same task."""

    __str__ = Exception.__str__  # `KeyError` would show the text's escapes.


class UnavailableError(DistributeError, ConnectionError):
    """A task of the cluster has ended, is frozen, cut off, or refuses this one."""


class ReplacedWorkerError(UnavailableError):
    """A worker was taken for dead, and others have its work; it is taken again."""


class CancelledError(DistributeError, RuntimeError):
    """A function that was given up, since another one raised an error."""


class RemoteError(DistributeError, RuntimeError):
    """What another task raised: its type, text and traceback."""


class NonFiniteError(DistributeError, FloatingPointError):
    """The loss of a training step is infinite, or no number; with `jax_debug_nans` or
    `jax_debug_infs`, anything that a program returns.
    """


class OutOfMemoryError(DistributeError, MemoryError):
    """A training step that takes more memory than there is, whatever the batch."""


class ReplicaConsistencyError(DistributeError, RuntimeError):
    """Copies of a variable, which have to be the same on all replicas, differ.

    Attributes:
        report: The `kd.ConsistencyReport` that names them.
    """

    report: Any

    def __init__(
        self,
        what: str,
        *,
        received: str | None = None,
        fix: str | None = None,
        report: Any = None,
    ) -> None:
        super().__init__(what, received=received, fix=fix)
        self.report = report


class StepReplayError(ReplicaConsistencyError):
    """A step gave other bits when it was run again on other devices.

    Attributes:
        report: The `kd.callbacks.StepReport` that says what differs, and which device
            computed it.
    """


class CheckpointError(DistributeError, ValueError):
    """A checkpoint that is missing, does not fit the objects it is restored into, or
    cannot be written.
    """


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are incomplete, or do not hold what was saved."""

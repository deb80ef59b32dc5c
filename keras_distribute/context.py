"""Which strategy is current, and in which of its contexts the caller stands. Knows
nothing of how steps compile.

Each thread has a stack of frames; an empty stack means the process-wide strategy, which
is the default strategy unless `experimental_set_strategy` changed it. The stack is
ours, not Keras's, so `keras.utils.clear_session()` does not touch it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from keras_distribute import checks
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import Placement
from keras_distribute.errors import ContextError

_S = TypeVar("_S", bound="AnyStrategy")


class Mode(enum.Enum):
    """Where code stands: `CROSS` sees all replicas, `REPLICA` is one of them, `UPDATE`
    updates one variable.
    """

    CROSS = "cross-replica"
    REPLICA = "replica"
    UPDATE = "update"


class AnyStrategy(Protocol):
    """What the rooms below `strategies/` ask of a strategy, which they get from users
    and hand back.
    """

    @property
    def placement(self) -> Placement:
        """Where its variables and programs are."""
        ...

    @property
    def replica_mesh(self) -> ReplicaMesh:
        """The devices of the replicas."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas share each step."""
        ...

    @property
    def top_frame(self) -> Frame:
        """The context of code that no `with` block surrounds."""
        ...

    @property
    def extended(self) -> Any:
        """The half for library code."""
        ...

    @property
    def programs(self) -> Any:
        """The compiled programs of `run`."""
        ...

    def make_replica_context(self) -> Any:
        """The context that a function sees inside `run`."""
        ...


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """The batch of a step of `fit`.

    Args:
        rows: How many it has.
        shards: Over how many replicas they are spread evenly; 1 where they are not.
        replicated: Whether each replica has all of them.
    """

    rows: int
    shards: int = 1
    replicated: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """One entry of the stack.

    Args:
        strategy: The current strategy.
        mode: Which of its contexts this is.
        replica_context: The replica's context, in `Mode.REPLICA`.
        per_replica: Whether values here are one replica's own, inside a program over
            all replicas (`Strategy.run`).
        batch: In a step of `fit`, its batch.
        placement: Where this is, instead of where the strategy is: a step is planned
            for devices that need not be there, and no value may be placed.
        named: Whether the user opened it with `scope()`: these guard against mixed
            strategies.
        gives_way: Whether a scope of another strategy may be opened inside.
        ragged: The trace, where the replicas of its program hold arrays of different
            shapes.
        scheduled: The trace of a function that workers will run: it takes what
            optimizers are given, since a parameter server will make the update.
        worker: Which worker runs the dataset function that is called here.
        updates: Whether optimizers make their updates here after all.
        accumulates: Whether gradients are added up on each replica here, and summed
            over the replicas where an optimizer updates.
        gather: From a variable that is divided over the replicas, and what this program
            has of it, to the whole value, in the dtype that is read.
        taken: By their ids, the variables whose values the step that is traced here
            takes: elsewhere than in its state they are those of another step.
    """

    strategy: AnyStrategy
    mode: Mode
    replica_context: Any = None
    per_replica: bool = False
    batch: GlobalBatch | None = None
    placement: Placement | None = None
    named: bool = False
    gives_way: bool = False
    ragged: Any = None
    scheduled: Any = None
    worker: int | None = None
    updates: bool = False
    accumulates: bool = False
    gather: Callable[[Any, Any], Any] | None = None
    taken: frozenset[int] = frozenset()


class _Thread(threading.local):
    """What a thread is in the middle of.

    Attributes:
        frames: Its stack.
        gives_away: Whether arrays that it assigns are used by nobody else.
        creates_accumulators: Whether variables that it creates add up gradients over
            micro-steps.
        read: By their ids, values of variables that were read beforehand.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.gives_away = self.creates_accumulators = False
        self.read: dict[int, Any] = {}


class _InForce:
    """What is in force.

    Attributes:
        thread: What this thread is in the middle of.
        strategy: The one that was set for all threads.
        make_default: How the default one is made, which lives in a room below.
        scopes: The scopes that are open, each in its thread.
    """

    def __init__(self) -> None:
        self.thread = _Thread()
        self.strategy: AnyStrategy | None = None
        self.make_default: Callable[[], AnyStrategy] | None = None
        self.scopes: weakref.WeakKeyDictionary[Frame, threading.Thread] = (
            weakref.WeakKeyDictionary()
        )


in_force = _InForce()


def register_default(make: Callable[[], AnyStrategy]) -> None:
    """Tells this room how to get the default strategy, which lives in a room below."""
    in_force.make_default = make


def default_strategy() -> AnyStrategy:
    """The strategy in force where the user chose none."""
    assert in_force.make_default is not None
    return in_force.make_default()


def frame() -> Frame:
    """The innermost frame of this thread."""
    if in_force.thread.frames:
        return in_force.thread.frames[-1]
    if in_force.strategy is not None:
        return Frame(in_force.strategy, Mode.CROSS)
    return default_strategy().top_frame


def placement_of(strategy: AnyStrategy) -> Placement | None:
    """Where steps of `strategy` are planned for in this thread, if they are."""
    for entry in reversed(in_force.thread.frames):
        if entry.placement is not None and entry.strategy is strategy:
            return entry.placement
    return None


def without_gathering() -> contextlib.AbstractContextManager[Any]:
    """Variables that are divided over the replicas are read in their parts."""
    current = frame()
    if current.gather is None:
        return contextlib.nullcontext()
    return entered(dataclasses.replace(current, gather=None))


def gradients_taker() -> Callable[..., None] | None:
    """What is called with optimizer, gradients and variables, in place of `apply`."""
    for entry in reversed(in_force.thread.frames):
        if entry.updates:
            return None
        if entry.scheduled is not None:
            return entry.scheduled.take_gradients
    return None


def is_taken(variable: Any) -> bool:
    """Whether a step is being traced that takes the value of this variable."""
    return any(id(variable) in entry.taken for entry in in_force.thread.frames)


def scheduled_trace() -> Any:
    """The trace of a scheduled function that this thread makes; `None`: none."""
    frames = reversed(in_force.thread.frames)
    return next((f.scheduled for f in frames if f.scheduled is not None), None)


def running_as(worker: int) -> contextlib.AbstractContextManager[Any]:
    """Code in this `with` block is a dataset function that `worker` runs."""
    own = default_strategy().top_frame
    return entered(dataclasses.replace(own, worker=worker))


def current_worker() -> int | None:
    """The worker whose dataset function runs here; `None` elsewhere."""
    frames = reversed(in_force.thread.frames)
    return next((f.worker for f in frames if f.worker is not None), None)


def in_ragged_program() -> bool:
    """Whether a program is being traced whose replicas hold different shapes, so that
    no count is known from one.
    """
    return ragged_trace() is not None


def ragged_trace() -> Any:
    """The trace of this thread, if its replicas hold different shapes."""
    traces = (entry.ragged for entry in reversed(in_force.thread.frames))
    return next((trace for trace in traces if trace is not None), None)


@contextlib.contextmanager
def entered(new: Frame) -> Generator[Frame]:
    """Makes `new` the innermost frame for a `with` block, whatever happens inside."""
    in_force.thread.frames.append(new)
    depth = len(in_force.thread.frames)
    try:
        yield new
    finally:
        del in_force.thread.frames[depth - 1 :]


def frames() -> list[Frame]:
    """This thread's frames, to hand to another thread."""
    return list(in_force.thread.frames)


@contextlib.contextmanager
def inherited(frames: list[Frame]) -> Generator[None]:
    """Gives this thread the frames of another one, for a `with` block."""
    before, in_force.thread.frames = in_force.thread.frames, list(frames)
    try:
        yield
    finally:
        in_force.thread.frames = before


class _Entered(threading.local):
    """The frames of one scope that a thread has entered and not left."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


class Scope(contextlib.AbstractContextManager[_S]):
    """What `Strategy.scope()` returns: a context manager that can be entered again,
    also inside itself and in several threads.
    """

    def __init__(self, strategy: _S) -> None:
        self._strategy = strategy
        self._entered = _Entered()

    def __enter__(self) -> _S:
        current = frame()
        if (
            current.mode is not Mode.CROSS
            and current is not default_strategy().top_frame
        ):
            raise ContextError(
                "A strategy's scope cannot be entered inside Strategy.run.",
                received=describe(current),
                fix="open `with strategy.scope():` around the call of strategy.run.",
            )
        is_own = current.strategy is self._strategy or current.gives_way
        if in_force.thread.frames and not is_own:
            raise ContextError(
                "Two strategies cannot be mixed: this scope was opened inside another "
                "strategy's.",
                received=f"{self._strategy!r} inside {current.strategy!r}.",
                fix="leave the outer `with strategy.scope():` first; one model, one "
                "strategy.",
            )
        own = Frame(self._strategy, Mode.CROSS, named=True)
        in_force.thread.frames.append(own)
        self._entered.frames.append(own)
        in_force.scopes[own] = threading.current_thread()
        return self._strategy

    def __exit__(self, *exc_info: object) -> None:
        entered = self._entered.frames
        own = entered.pop() if entered else None
        if own is not None:
            in_force.scopes.pop(own, None)
        if not in_force.thread.frames or in_force.thread.frames[-1] is not own:
            if own is not None and own in in_force.thread.frames:
                in_force.thread.frames.remove(own)
            raise ContextError(
                "Scopes were left in another order than they were entered.",
                received=f"the end of a scope of {self._strategy!r} that is not the "
                "innermost one.",
                fix="use `with strategy.scope():` blocks, which nest by themselves.",
            )
        in_force.thread.frames.pop()


def get_strategy() -> AnyStrategy:
    """The current strategy: that of the innermost scope, else the default strategy."""
    return frame().strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    return get_strategy() is not default_strategy()


def scope_strategy() -> AnyStrategy | None:
    """The strategy whose scope the user opened around this code, or set for the
    process; `None` for the default one.
    """
    named = [entry.strategy for entry in in_force.thread.frames if entry.named]
    chosen = named[-1] if named else in_force.strategy
    return None if chosen is default_strategy() else chosen


def in_cross_replica_context() -> bool:
    """Whether code here sees all replicas: in a scope, in a step of `fit`, in
    `merge_call`, and in an update.

    `False` inside `Strategy.run`, and, as in TensorFlow, where no strategy is in force.
    """
    return frame().mode is not Mode.REPLICA


def get_replica_context() -> Any:
    """The context of the running replica, inside `Strategy.run`; `None` in the
    cross-replica context.

    Where no strategy is in force, it is the context of the default strategy's only
    replica.
    """
    return frame().replica_context


def experimental_set_strategy(strategy: AnyStrategy | None) -> None:
    """Makes `strategy` the current one from here on, in every thread, without a `with`
    block; `None` undoes it.

    Raises:
        ContextError: Inside `Strategy.run`, and while this or another thread is in
            a scope.
        StructureTypeError: For anything that is not a strategy.
    """
    own = getattr(strategy, "top_frame", None)
    if strategy is not None and not isinstance(own, Frame):
        what = "experimental_set_strategy takes a strategy."
        checks.instance("strategy", strategy, (), what, "kd.MirroredStrategy()")
    scopes = list(in_force.scopes.items())
    opened = [(one, thread) for one, thread in scopes if thread.is_alive()]
    if in_force.thread.frames or opened:
        inside = describe(frame())
        if not in_force.thread.frames:
            one, thread = opened[0]
            inside = f"the thread {thread.name!r} in {describe(one)}"
        raise ContextError(
            "The strategy of the process cannot be changed inside a scope.",
            received=inside,
            fix="call experimental_set_strategy at the top level of the program, "
            "before its threads enter scopes.",
        )
    in_force.strategy = (
        None if strategy is None or strategy is default_strategy() else strategy
    )


def describe(current: Frame) -> str:
    """A frame in words, for error texts."""
    replicas = checks.counted(current.strategy.num_replicas_in_sync, "replica")
    name = type(current.strategy).__name__
    return f"the {current.mode.value} context of {name} ({replicas})."


def require_own(what: str, strategy: AnyStrategy) -> None:
    """Raises `ContextError` where another strategy than `strategy` is in force."""
    current = frame()
    if has_strategy() and current.strategy is not strategy:
        raise ContextError(
            f"{what} was called inside the scope of another strategy.",
            received=f"a method of {strategy!r} in {describe(current)}",
            fix=f"call it of kd.get_strategy(), which is {current.strategy!r}, or "
            "leave that one's scope first.",
        )


def require_cross_replica(
    what: str, fix: str, strategy: AnyStrategy | None = None
) -> None:
    """Raises `ContextError` unless called across replicas, or where none is in force.

    Args:
        what: Was called.
        fix: What to write in a replica instead.
        strategy: Whose method it is: another one must not be current, as in TensorFlow.
    """
    current = frame()
    if strategy is not None:
        require_own(what, strategy)
    if current.mode is not Mode.REPLICA or current.strategy is default_strategy():
        return
    raise ContextError(
        f"{what} was called inside a replica.", received=describe(current), fix=fix
    )

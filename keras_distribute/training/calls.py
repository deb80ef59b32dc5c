"""The public methods of trainers that a thread is in, and the feeds that
they opened.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

from keras_distribute._compat import epochs

GROUP_SIZES = "_keras_distribute_group_sizes"
_SEES_STEPS = "_keras_distribute_sees_steps"
_WATCHER = "_keras_distribute_watcher"
_STEP = "_keras_distribute_training_step"
_FUNCTIONS = "_keras_distribute_functions"


@dataclasses.dataclass
class Call:
    """A public method that is running.

    Attributes:
        trainer: Whose method it is.
        name: Of the method.
        synced: Keras's note whether the variables have the values of `state`.
        state: What Keras has got back from the last step.
    """

    trainer: Any
    name: str
    synced: bool = True
    state: Any = None


class _Stack(threading.local):
    """What a thread is in.

    Attributes:
        calls: Its calls, outermost first.
        feeds: Those that are open.
        batches: Those of the last step, or group of steps, while somebody wants to look
            at them.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.feeds: list[Any] = []
        self.batches: list[Any] | None = None


stack = _Stack()


def innermost() -> Call | None:
    """The method that runs."""
    return stack.calls[-1] if stack.calls else None


def of(trainer: Any) -> Call | None:
    """The innermost of the trainer's methods that runs steps."""
    for call in reversed(stack.calls):
        if call.trainer is trainer and call.name != "compile":
            return call
    return None


def follower() -> epochs.Follower | None:
    """Who follows the innermost `fit`."""
    fits = (call.trainer for call in reversed(stack.calls) if call.name == "fit")
    return next(map(epochs.follower_of, fits), None)


def followed_fit() -> epochs.Follower | None:
    """Who follows the method that runs, if it is a `fit`."""
    call = innermost()
    return follower() if call is not None and call.name == "fit" else None


def keep_batches(keep: bool) -> None:
    """Whether to keep the last step's batches in this thread's `stack.batches`."""
    stack.batches = [] if keep else None


def step_begins(batches: list[Any]) -> None:
    """A step, or a group of steps, begins on these batches."""
    if stack.batches is not None:
        stack.batches = batches


def group_sizes_of(trainer: Any) -> Any:
    """What sizes groups of steps, for `steps_per_execution="auto"`."""
    return getattr(trainer, GROUP_SIZES, None)


def group_sizes() -> epochs.Sizes | None:
    """What sizes the groups of steps of this method, if it is a `fit` that may group
    them: a step that is not compiled, or a function of the user's own, may take one
    batch of a group, and leave out the others.
    """
    call = innermost()
    if call is None or call.name != "fit" or getattr(call.trainer, _SEES_STEPS, False):
        return None
    made, compiled = _functions(call.trainer).get("train", (None, False))
    if not compiled or made() is not call.trainer.train_function:
        return None
    return group_sizes_of(call.trainer)


def set_sees_steps(trainer: Any, sees: bool) -> None:
    """Notes whether a callback of the trainer's `fit` is called with each step."""
    if trainer is not None:  # Not by Keras's `__setattr__`, which tracks attributes.
        object.__setattr__(trainer, _SEES_STEPS, sees)


def set_training_step(trainer: Any, step: Any) -> None:
    """Notes the `CompiledStep` that trains the model."""
    vars(trainer)[_STEP] = weakref.ref(step)  # It has the state of the model.


def unchanged_variables(trainer: Any) -> list[Any]:
    """The variables that no training step changes, once one has been compiled."""
    known = vars(trainer).get(_STEP)
    step = None if known is None else known()
    return [] if step is None else step.unchanged


def note_function(trainer: Any, kind: str, function: Any, *, compiled: bool) -> None:
    """Notes that `train_function`, `test_function` or `predict_function` is made by
    this package; what the model makes around it may take its place.

    Args:
        compiled: Whether its steps are. The model may be told otherwise since.
    """
    noted = weakref.ref(function), compiled
    vars(trainer).setdefault(_FUNCTIONS, {})[kind] = noted


def is_function_compiled(trainer: Any, kind: str) -> bool | None:
    """Whether the steps of a function are; `None` where none was made here."""
    noted = _functions(trainer).get(kind)
    return None if noted is None else noted[1]


def _functions(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = vars(trainer).get(_FUNCTIONS, {})
    return found


def forget_functions(trainer: Any) -> None:
    """Notes that they will be made anew: the model is compiled."""
    vars(trainer).pop(_FUNCTIONS, None)


def has_own_function(trainer: Any, kind: str) -> bool:
    """Whether the model has a `make_train_function`, or the like, of its own."""
    made = getattr(trainer, f"{kind}_function", None)
    return made is not None and kind not in _functions(trainer)


def watch_next_step(trainer: Any, watcher: Any) -> None:
    """Has the next training step run by `watcher`, a `watched_step.Watcher`."""
    vars(trainer)[_WATCHER] = watcher


def is_watched(trainer: Any) -> bool:
    """Whether the next training step is watched."""
    return _WATCHER in vars(trainer)


def asked_watcher(trainer: Any) -> Any:
    """Who watches this step; `None` if nobody does."""
    return vars(trainer).pop(_WATCHER, None)


def release(feed: Any) -> None:
    """Releases one of the feeds."""
    if feed in stack.feeds:
        stack.feeds.remove(feed)
        feed.release()


def release_feeds(kept: list[Any]) -> None:
    """Releases all of them but some."""
    for feed in reversed(stack.feeds[:]):
        if feed not in kept:
            release(feed)

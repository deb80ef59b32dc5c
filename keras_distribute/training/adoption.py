"""Which strategy a trainer belongs to, and what of its calls follows from that: their
context, their data, and whether this process is quiet.
"""

from __future__ import annotations

from typing import Any, cast

import keras

from keras_distribute import context
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.epochs import follower_of
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import ContextError, ValueStructureError
from keras_distribute.strategies.base import Strategy, refuse_keras_distribution
from keras_distribute.training import calls, feeds
from keras_distribute.training.steps.group_size import GroupSize
from keras_distribute.variables import DistributedVariable, is_due
from keras_distribute.variables import check_assigned as check_variables

_ATTRIBUTE = "_keras_distribute_strategy"
_CALLS = "_keras_distribute_calls"  # How many there were with a single batch.
_KINDS = {"fit": "train", "evaluate": "test", "predict": "predict"}  # Of functions.


def adopt(trainer: Any) -> None:
    """A trainer created or compiled under a scope remembers its strategy.

    Raises:
        ContextError: In the scope of another strategy than before.
    """
    current, own = _current_strategy(), getattr(trainer, _ATTRIBUTE, None)
    if current is None:
        return
    if own is not None and own is not current:
        raise ContextError(
            "A model belongs to the strategy under whose scope it was created.",
            received=f"a model of {own!r} in the scope of {current!r}.",
            fix="create the model again in this scope, and load its weights: "
            "model.load_weights(path).",
        )
    setattr(trainer, _ATTRIBUTE, current)


def strategy_of(trainer: Any) -> Strategy | None:
    """The strategy that the trainer was created or compiled under, or of the scope
    around, or of its variables.
    """
    return (
        getattr(trainer, _ATTRIBUTE, None)
        or _current_strategy()
        or strategy_of_variables(trainer)
    )


def strategy_of_variables(trainer: Any) -> Strategy | None:
    """The strategy under whose scope the variables of a model were created."""
    variables = [
        *getattr(trainer, "trainable_variables", []),
        *getattr(trainer, "non_trainable_variables", []),
    ]
    ours = (v for v in variables if isinstance(v, DistributedVariable))
    return next((v.distribute_strategy for v in ours), None)


def _current_strategy() -> Strategy | None:
    """The strategy whose scope is open; `None` in a Keras distribution in it."""
    if keras.distribution.distribution() is not None:
        return None
    return cast("Strategy | None", context.scope_strategy())


def frame_for(strategy: Strategy | None) -> Frame | None:
    """The context that a public method of a trainer runs in; `None`: the present one.

    Raises:
        ContextError: Inside a replica, or a scheduled function.
    """
    current = context.frame()
    if strategy is not None and context.scheduled_trace() is not None:
        raise ContextError(
            "A model's fit, evaluate and predict schedule functions by themselves.",
            received="a call inside a scheduled function.",
            fix="call them in the program of the coordinator; in the function, "
            "model(x, training=False) predicts.",
        )
    if strategy is None:
        if current.strategy is context.default_strategy():
            return None
        # A plain model, in a callback of another's fit.
        return context.default_strategy().top_frame
    if current.per_replica:
        raise ContextError(
            "A model's fit, evaluate and predict run on all replicas by themselves.",
            received=f"a call inside {context.describe(current)}",
            fix="call them outside strategy.run.",
        )
    refuse_keras_distribution(strategy)
    return Frame(strategy, Mode.CROSS)


def takes_host_batches() -> bool:
    """Whether steps of the current strategy place their batches by themselves."""
    return context.has_strategy() and keras.distribution.distribution() is None


def feed(trainer: Any, adapter: Any, per_epoch: int | None) -> Any:
    """The batches of one pass, ready for the steps; an iterator with `release`."""
    strategy = strategy_of(trainer)
    if strategy is None or strategy.placement.is_on_servers:
        return feeds.host_feed(adapter, per_epoch)
    followed, call = follower_of(trainer) is not None, calls.innermost()
    kind = _KINDS.get("" if call is None else call.name)
    compiled = None if kind is None else calls.is_function_compiled(trainer, kind)
    if compiled is None:
        compiled = compat.is_traced(trainer)
    form = feeds.Form.TRACED if compiled else feeds.Form.EAGER
    if kind is not None and calls.has_own_function(trainer, kind):
        form = feeds.Form.PLAIN
    has_loss = kind != "predict"
    return feeds.feed(
        adapter, strategy.replica_mesh, form, per_epoch, followed, has_loss
    )


def check_assigned(trainer: Any) -> None:
    """Raises where the processes have assigned different values to the variables of a
    trainer: by a callback, or between two calls of `fit`.
    """
    strategy = strategy_of(trainer)
    if strategy is None or strategy.replica_mesh.num_processes == 1:
        return
    optimizer = getattr(trainer, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    check_variables([*trainer.variables, *slots])


def check_assigned_by_now(trainer: Any) -> None:
    """`check_assigned` before some of the calls with a single batch."""
    count = vars(trainer).get(_CALLS, 0)
    vars(trainer)[_CALLS] = count + 1
    if is_due(count):
        check_assigned(trainer)


def refuse_empty() -> None:
    """Raises the error for data without a single batch."""
    raise ValueStructureError(
        "There is nothing to train, evaluate or predict on: the data has no batch.",
        received="arrays without rows, or a dataset that ends at once.",
        fix="pass at least one row; check the paths, filters and `take` of the "
        "dataset.",
    )


def group_sizes(trainer: Any) -> GroupSize | None:
    """What sizes groups of steps by itself, for `steps_per_execution="auto"`."""
    strategy = strategy_of(trainer)
    if strategy is None:
        return None
    # Several processes, which have to run the same programs, would measure different
    # times.
    if strategy.replica_mesh.num_processes == 1:
        return GroupSize()
    return GroupSize(sizes=(1,))


def is_quiet() -> bool:
    """Whether another process writes this `fit`'s files and progress bar."""
    return (
        context.has_strategy() and context.get_strategy().replica_mesh.process_index > 0
    )

"""Keras's trainer under a strategy: a subclass that `keras.Model` gets as its base.

Keras's loop, callbacks and history are used as they are. What is ours: how a step is
compiled (`steps/choose.py`), where batches come from (`epoch_iterator.py`), and who
holds the values of the variables (`steps/state.py`). A model without a strategy is
trained by Keras.

However a call ends, the thread is left as it was found: `called` puts back what the
call has opened with assignments that no exception from outside can come between.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras.callbacks import CallbackList

from keras_distribute import checks, context
from keras_distribute._compat import epochs, scopes
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.seams import Replacements
from keras_distribute._compat.trainer import JAXTrainer
from keras_distribute._compat.variables import in_stateless_scope
from keras_distribute.devices import bit_flips, timing
from keras_distribute.devices.launches import launches
from keras_distribute.errors import ContextError
from keras_distribute.training import adoption, calls
from keras_distribute.training.callback_list import StrategyCallbackList
from keras_distribute.training.calls import Call
from keras_distribute.training.epoch_iterator import StrategyEpochIterator
from keras_distribute.training.steps import choose
from keras_distribute.training.steps.plan import forget_mixed, plan_of
from keras_distribute.training.steps.state import StateGroup
from keras_distribute.training.steps.watched_step import WatchedStep
from keras_distribute.variables import given_away, read_before

# These use a model's metrics or change its weights.
_ALONE = ("fit", "evaluate", "train_on_batch", "test_on_batch", "find_batch_size")
_GROUPS = ("trainable_variables", "non_trainable_variables", "metrics_variables")
_OF_STEPS = frozenset(["_jax_state", "_jax_state_synced"])
_STATE, _SYNCED = "_keras_distribute_jax_state", "_keras_distribute_synced"
_CLAIM = "_keras_distribute_claim"  # Which thread trains the model, in which method.


def _of_each_call(name: str, outside: str, first: Any) -> Any:
    """An attribute that each call has its own of, by this name: several threads may
    predict with one model. Outside of calls it is the model's, `outside`.
    """

    def get(self: Any) -> Any:
        call = calls.of(self)
        return vars(self).get(outside, first) if call is None else getattr(call, name)

    def put(self: Any, value: Any) -> None:
        call = calls.of(self)
        vars(call or self)[name if call else outside] = value

    return property(get, put)


class StrategyTrainer(JAXTrainer):
    """The trainer of every `keras.Model`: on all replicas, if there is a strategy."""

    def __init__(self) -> None:
        adoption.adopt(self)
        super().__init__()

    @functools.wraps(JAXTrainer.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, "fit", super().fit, args, kwargs)

    @functools.wraps(JAXTrainer.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, "evaluate", super().evaluate, args, kwargs)

    @functools.wraps(JAXTrainer.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, "predict", super().predict, args, kwargs)

    @functools.wraps(JAXTrainer.train_on_batch)
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, "train_on_batch", super().train_on_batch, args, kwargs)

    @functools.wraps(JAXTrainer.test_on_batch)
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, "test_on_batch", super().test_on_batch, args, kwargs)

    @functools.wraps(JAXTrainer.predict_on_batch)
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, "predict_on_batch", super().predict_on_batch, args, kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        return _made(self, "train", force, super().make_train_function)

    def make_test_function(self, force: bool = False) -> Any:
        return _made(self, "test", force, super().make_test_function)

    def make_predict_function(self, force: bool = False) -> Any:
        return _made(self, "predict", force, super().make_predict_function)

    def _describe_training_step(self) -> str | None:
        """How a step is made, and why; `None` before `compile` and without strategy."""
        strategy: Any = adoption.strategy_of(self)
        if strategy is None or not self.compiled:
            return None
        if strategy.placement.is_on_servers:
            return strategy.describe_steps()
        if not compat.is_traced(self):
            return (
                "The training step runs operation by operation, since the model is "
                "compiled with run_eagerly=True or jit_compile=False."
            )
        return str(plan_of(self, strategy))

    def get_metrics_result(self) -> dict[str, Any]:
        """The results of the metrics; between steps, computed from values on the host.

        A result is a few operations on numbers: on arrays that every replica has, each
        of them would be a program on all devices.
        """
        strategy = adoption.strategy_of(self)
        if strategy is None or strategy.placement.is_on_servers or in_stateless_scope():
            return super().get_metrics_result()
        with read_before(self.metrics_variables):
            return super().get_metrics_result()

    def _get_jax_state(
        self,
        trainable_variables: bool = False,
        non_trainable_variables: bool = False,
        optimizer_variables: bool = False,
        metrics_variables: bool = False,
        purge_model_variables: bool = False,
    ) -> tuple[Any, ...]:
        """What Keras hands to a step: the values, which stay with their holders."""
        wanted = {
            "trainable_variables": trainable_variables,
            "non_trainable_variables": non_trainable_variables,
            "optimizer_variables": optimizer_variables,
            "metrics_variables": metrics_variables,
        }
        if adoption.strategy_of(self) is None:
            return super()._get_jax_state(
                **wanted, purge_model_variables=purge_model_variables
            )
        groups = [getattr(self, name) for name in _GROUPS if wanted[name]]
        if optimizer_variables:
            optimizer = self.optimizer
            groups.insert(-1 if metrics_variables else len(groups), optimizer.variables)
        return tuple(StateGroup(list(group)) for group in groups)

    def jax_state_sync(self) -> None:
        """Gives the variables the values of a step not ours; others have them."""
        state, strategy = self._jax_state, adoption.strategy_of(self)
        if strategy is None:
            compat.sync(self)
        elif state and not self._jax_state_synced:
            strategy.wait_for_steps(self)
            for group in state.values():
                if isinstance(group, StateGroup):
                    group.synchronized()
            if not all(isinstance(group, StateGroup) for group in state.values()):
                with given_away():
                    compat.sync(self)
            self._jax_state_synced = True

    state_sync = jax_state_sync  # Keras 3.16 calls it so.

    def __setattr__(self, name: str, value: Any) -> None:
        """Keras sets these for each step, and would track what is in them."""
        if name in _OF_STEPS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    _jax_state = _of_each_call("state", _STATE, None)
    _jax_state_synced = _of_each_call("synced", _SYNCED, True)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, StrategyEpochIterator) and data_batch is None:
            iterator = iterator.to_look_at()
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Of Keras 3.16, which reads the first batch from the adapter itself."""
        looks = isinstance(iterator, StrategyEpochIterator) and data_batch is None
        first = iterator.to_look_at() if looks else iterator
        if first is iterator:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
        else:
            super()._symbolic_build(iterator=first)


def install(replaced: Replacements) -> None:
    """Makes `StrategyTrainer` the trainer of all models."""
    compat.install(
        replaced, StrategyTrainer, StrategyEpochIterator, _around_compile, _host_batch
    )


def _around_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        adoption.adopt(self)
        sizes = adoption.group_sizes(self)
        named = compat.compile_arguments(args, kwargs)
        size = named.get("steps_per_execution", 1)
        automatic = isinstance(size, str) and size == "auto"
        if sizes is not None and not automatic:
            what = 'steps_per_execution is a number of steps, or "auto".'
            checks.count("steps_per_execution", size, 1, what=what)
        sizes = sizes if automatic else None
        if sizes is not None:
            # A model that is saved says 1, or plain Keras could not train it.
            args, kwargs = (), named | {"steps_per_execution": 1}
        called(self, "compile", functools.partial(original, self), args, kwargs)
        # One that raises leaves the steps that there were.
        calls.forget_functions(self)
        forget_mixed(self)
        object.__setattr__(self, calls.GROUP_SIZES, sizes)

    return compile


def _host_batch(original: Callable[..., Any], data: Any, layouts: Any) -> Any:
    """The batch as it is, but for Python numbers: Keras asks the leaves for a shape."""
    if not adoption.takes_host_batches():
        return original(data, layouts)
    return jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), data
    )


def called(
    trainer: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs what a user has called for a trainer, such as one of its public methods, in
    its strategy's context, and cleans up.
    """
    for each in (*args, *kwargs.values()):
        if type(each) is CallbackList:  # Made before the package was imported.
            each.__class__ = StrategyCallbackList
    frames, outer = context.in_force.thread.frames, calls.stack.calls
    # A callback may call us in a `fit`.
    others, batches = calls.stack.feeds[:] if outer else [], calls.stack.batches
    opened, thread, claim = scopes.Opened(), threading.current_thread(), None
    building: Any = contextlib.nullcontext()
    try:
        strategy = adoption.strategy_of(trainer)
        frame = adoption.frame_for(strategy)
        if strategy is not None and name in _ALONE:
            claim = threading.get_ident(), name, thread.name
            _check_alone(name, vars(trainer).setdefault(_CLAIM, claim))
        if strategy is not None and not trainer.built and name.startswith("predict"):
            building = launches.tracing  # Or each thread would create the variables.
        if name == "fit":
            epochs.fit_ended(trainer)  # Of a `fit` that was broken off while it ended.
        if frame is not None:
            context.in_force.thread.frames = [*frames, frame]
        calls.stack.calls = [*outer, Call(trainer, name)]
        if strategy is not None and name in ("train_on_batch", "test_on_batch"):
            adoption.check_assigned_by_now(trainer)
        with building:
            return method(*args, **kwargs)
    finally:
        context.in_force.thread.frames = frames
        calls.stack.calls = outer
        if name != "train_on_batch":  # Whose loop may look at its batch.
            calls.stack.batches = batches
        if claim is not None and vars(trainer).get(_CLAIM) is claim:
            del vars(trainer)[_CLAIM]
        opened.restore()
        if name == "fit":
            timing.stop(trainer)
            epochs.fit_ended(trainer)
            calls.asked_watcher(trainer)  # Of a step that did not come any more.
            bit_flips.asked(trainer)
        if not (outer and compat.is_validation(kwargs)):
            calls.release_feeds(others)


def _check_alone(name: str, owner: tuple[int, str, str]) -> None:
    ident, running, thread = owner
    if ident != threading.get_ident():
        raise ContextError(
            "A model is trained and evaluated by one thread at a time.",
            received=f"{name} in the thread {threading.current_thread().name!r}, while "
            f"the thread {thread!r} is in {running} of the same model.",
            fix="wait for it (a threading.Lock around both), or use a copy, in the "
            "strategy's scope: copy = keras.models.clone_model(model), and "
            "copy.set_weights(model.get_weights()); predict works from any thread.",
        )


def _made(trainer: Any, kind: str, force: bool, original: Callable[[bool], Any]) -> Any:
    """Sets the function that runs a step, or a group of steps, on the next batches."""
    name = f"{kind}_function"
    if getattr(trainer, name) is not None and not force:
        return getattr(trainer, name)
    step = choose.compile_step(trainer, kind)
    if step is None:
        return original(force)
    if kind == "train" and isinstance(step, choose.CompiledStep):
        step = WatchedStep(trainer, step)
    size: int | None = trainer.steps_per_execution
    if calls.group_sizes_of(trainer) is not None:
        size = None
    if kind == "predict":
        function = _joining(step, size or 1)
    elif size == 1 or isinstance(step, choose.EagerStep):
        function = _repeating(step, size or 1)
    else:
        function = _grouped(step.several, size)
    setattr(trainer, name, function)
    is_compiled = not isinstance(step, choose.EagerStep)
    calls.note_function(trainer, kind, function, compiled=is_compiled)
    return function


def _repeating(step: Any, size: int) -> Callable[..., Any]:
    """Runs `size` steps, or those that are left; the logs are the last one's."""
    if size == 1:
        return lambda state, iterator: step(state, next(iterator))

    def steps_of_a_group(state: Any, iterator: Iterator[Any]) -> Any:
        logs = None
        for batch in _next_of(iterator, size):
            logs, state = step(state, batch)
        return logs, state

    return steps_of_a_group


def _grouped(several: Callable[..., Any], every: int | None) -> Callable[..., Any]:
    """Runs `every` so many steps at once; `None`: as many as the group says."""

    def steps_of_a_group(state: Any, iterator: Iterator[Any]) -> Any:
        size = every or getattr(iterator, "size", 1)
        return several(state, list(_next_of(iterator, size)), size)

    return steps_of_a_group


def _joining(step: Any, size: int) -> Callable[..., Any]:
    """Runs `size` steps of `predict`, and joins what they predict."""
    if size == 1:
        return _repeating(step, 1)

    def steps_of_a_group(state: Any, iterator: Iterator[Any]) -> Any:
        outputs: list[Any] = []
        for batch in _next_of(iterator, size):
            output, state = step(state, batch)
            outputs.append(output)
        outputs = jax.tree.map(jnp.asarray, outputs)  # Waits for workers, where it has.
        with launches.lock:
            launches.settle()
            return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs), state

    return steps_of_a_group


def _next_of(iterator: Iterator[Any], size: int) -> Iterator[Any]:
    """The next `size` batches, or those that are left; `StopIteration` for none."""
    batches = [next(iterator)]
    with contextlib.suppress(StopIteration):
        while len(batches) < size:
            batches.append(next(iterator))
    return iter(batches)

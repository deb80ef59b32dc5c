"""The places of Keras's JAX trainer where a strategy takes over.

Keras's loop, callbacks, history and data adapters are used as they are. Replaced, for trainers with a strategy, are:

- `make_train_function`, `make_test_function`, `make_predict_function`: how a step is compiled;
- `JAXEpochIterator._get_iterator`: batches come from a feed, ready on the devices, but for the one that
  `_symbolic_build` and `predict` of an unbuilt model only look at;
- `EpochIterator._enumerate_iterator`: the steps of a `fit` that is saved and resumed; see `epochs.py`;
- `_distribute_data`: a single batch stays on the host until the step takes it;
- around `jax_state_sync`, variables take the arrays as they are;
- `_get_jax_state` takes the values out of the variables for an epoch; when the input or a callback raises before the
  first step, Keras never puts them back, so they are remembered and put back here;
- `compile` takes `steps_per_execution="auto"`;
- around each public method, and `__init__` and `compile`, the strategy's context is entered.

Methods are replaced on `JAXTrainer` itself, since `keras.Model` and bare trainers already inherit from it. Goes when
Keras lets a trainer choose how its steps are compiled.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from keras.src.backend.jax import trainer as jax_trainer
from keras.src.trainers import epoch_iterator
from keras.src.trainers import trainer as base_trainer

from keras_distribute import checks
from keras_distribute._compat import callbacks, epochs

Undo = Callable[[], None]
_REMEMBERED, _GROUP_SIZES = "_keras_distribute_state", "_keras_distribute_group_sizes"
_GROUPS = ("trainable_variables", "non_trainable_variables")
ENTRY_POINTS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class Seams(Protocol):
    """What the training room hands in."""

    def adopt(self, trainer: Any) -> None:
        """Notes the strategy of a trainer that is being created or compiled."""
        ...

    def entered(self, trainer: Any) -> contextlib.AbstractContextManager[Any]:
        """The trainer's strategy as the current one."""
        ...

    def given_away(self) -> contextlib.AbstractContextManager[Any]:
        """Around the assignment of a step's results to the variables."""
        ...

    def takes_host_batches(self) -> bool:
        """Whether the current strategy puts batches on devices by itself."""
        ...

    def looks(self, adapter: Any) -> bool:
        """Whether `look` is to be asked for the batch that a model is built with."""
        ...

    def look(self, adapter: Any) -> Iterator[Any]:
        """The first batch of the data, on the host."""
        ...

    def feed(self, trainer: Any, adapter: Any, per_epoch: int | None) -> Any:
        """The batches of one pass, ready for the steps of `trainer`; an iterator with `close`."""
        ...

    def read_by_us(self, adapter: Any) -> None:
        """Keeps the adapter from reading by itself."""
        ...

    def refuse_empty(self) -> None:
        """Raises the error for data without a single batch."""
        ...

    def host_batch(self, data: Any) -> Any:
        """A batch given to `train_on_batch` and its like, for the step."""
        ...

    def accumulators(self, trainer: Any) -> dict[int, Any]:
        """The values of those optimizer variables whose parts on the replicas a training step takes, by position."""
        ...

    def group_sizes(self, trainer: Any) -> Any:
        """What sizes groups of steps by itself; `None` for a trainer without a strategy."""
        ...

    def compile_step(self, trainer: Any, kind: str, step: Callable[..., Any]) -> Callable[..., Any] | None:
        """A compiled `step(state, data)`; `None` for a trainer without a strategy."""
        ...


def install(seams: Seams) -> Undo:
    """Puts the seams in place, and returns what takes them out again."""
    trainer, base, iterator = jax_trainer.JAXTrainer, base_trainer.Trainer, jax_trainer.JAXEpochIterator
    saved: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(new(original)))

    def in_context(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with seams.entered(self), _calls.entered(self, original.__name__):
                try:
                    return original(self, *args, **kwargs)
                except BaseException as error:
                    try:
                        with seams.given_away():
                            _put_back(self)
                    except Exception as failed:  # The first error is the one to know.
                        error.add_note(f"The variables could not be given their values back: {failed}")
                    raise
                finally:
                    _remember(self, None)
                    if original.__name__ == "fit":
                        epochs.fit_ended(self)

        return method

    def remembering(original: Any) -> Any:
        def method(self: Any, **which: bool) -> Any:
            groups = [getattr(self, name) for name in _GROUPS if which.get(name)]
            groups += [self.optimizer.variables] if which.get("optimizer_variables") else []
            groups += [self.metrics_variables] if which.get("metrics_variables") else []
            components = seams.accumulators(self) if which.get("optimizer_variables") else {}
            state = original(self, **which)
            for index, value in components.items():
                state[len(_GROUPS)][index] = value
            _remember(self, list(zip(groups, state, strict=True)))
            return state

        return method

    def adopting(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            seams.adopt(self)
            return original(self, *args, **kwargs)

        return method

    def grouping(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            sizes, size = seams.group_sizes(self), _steps_per_execution(args, kwargs)
            automatic = isinstance(size, str) and size == "auto"
            if sizes is not None and not automatic:
                what = 'steps_per_execution is a number of steps, or "auto".'
                checks.count("steps_per_execution", size, 1, what=what)
            sizes = sizes if automatic else None
            object.__setattr__(self, _GROUP_SIZES, sizes)
            # A model that is saved says 1, or plain Keras could not train it.
            return original(self, *args, **(kwargs if sizes is None else kwargs | {"steps_per_execution": 1}))

        return method

    def syncing(original: Any) -> Any:
        def method(self: Any) -> None:
            _take_apart(self)
            with seams.given_away():
                original(self)

        return method

    def feeding(original: Any) -> Any:
        def get_iterator(self: Any) -> Any:
            if _calls.only_looks(self) and seams.looks(self.data_adapter):
                return looked(self)
            if seams.takes_host_batches() or _calls.followed_fit() is not None:
                return epochs.Pass(self, opened, seams.refuse_empty)
            return original(self)

        def looked(self: Any) -> Generator[Any]:
            yield from seams.look(self.data_adapter)
            seams.refuse_empty()

        def opened(self: Any, last: Any) -> Any:
            _calls.release(last)  # Only one pass of an iterator is under way; the other was at its end, or given up.
            group = self.steps_per_execution
            per_epoch = -(-self.steps_per_epoch // group) * group if self.steps_per_epoch else None
            feed = seams.feed(_calls.trainer, self.data_adapter, per_epoch)
            _calls.feeds.append(feed)
            return feed

        return get_iterator

    def following(original: Any) -> Any:
        def enumerate_steps(self: Any) -> Any:
            follower = None if self is _calls.looked_at else _calls.follower()
            if follower is None:
                sizes = None if self is _calls.looked_at else _calls.group_sizes()
                return original(self) if sizes is None else epochs.grouped_steps(self, original(self), sizes)
            if _calls.followed_fit() is None:
                return epochs.test_steps(original(self), follower)
            seams.read_by_us(self.data_adapter)
            return epochs.train_steps(self, original, follower)

        return enumerate_steps

    def looking(original: Any) -> Any:
        def method(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
            with _calls.looking_at(iterator):
                return original(self, iterator=iterator, data_batch=data_batch)

        return method

    def makes(kind: str) -> Callable[[Any], Any]:
        function_name = f"{kind}_function"

        def new(original: Any) -> Any:
            def make(self: Any, force: bool = False) -> Any:
                if getattr(self, function_name) is not None and not force:
                    return getattr(self, function_name)
                step = seams.compile_step(self, kind, _predict(self) if kind == "predict" else _step(self, kind))
                if step is None:
                    return original(self, force)
                size, several = self.steps_per_execution, getattr(step, "several", None)
                size = None if getattr(self, _GROUP_SIZES, None) is not None else size
                if kind == "predict" or several is None or size == 1:
                    function = self._make_function(step, concatenate_outputs=kind == "predict")
                else:
                    function = _grouped(several, size)
                setattr(self, function_name, _forgetting(self, function))
                return getattr(self, function_name)

            return make

        return new

    for name in ENTRY_POINTS:
        replace(trainer, name, in_context)
    for kind in ("train", "test", "predict"):
        replace(trainer, f"make_{kind}_function", makes(kind))
    replace(trainer, "jax_state_sync", syncing)
    replace(trainer, "_get_jax_state", remembering)
    replace(trainer, "__init__", adopting)
    replace(base, "compile", lambda original: adopting(grouping(in_context(original))))
    replace(
        jax_trainer,
        "_distribute_data",
        lambda original: (
            lambda data, layouts=None: seams.host_batch(data) if seams.takes_host_batches() else original(data, layouts)
        ),
    )
    replace(iterator, "_get_iterator", feeding)
    replace(epoch_iterator.EpochIterator, "_enumerate_iterator", following)
    replace(base, "_symbolic_build", looking)

    def undo() -> None:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)

    return undo


class _Calls(threading.local):
    """The public methods that this thread is in, outermost first, and the feeds that they opened."""

    def __init__(self) -> None:
        self._stack: list[tuple[Any, str]] = []
        self.looked_at: Any = None
        self.feeds: list[Any] = []

    @property
    def trainer(self) -> Any:
        """The trainer of the innermost method."""
        return self._stack[-1][0]

    @contextlib.contextmanager
    def entered(self, trainer: Any, name: str) -> Generator[None]:
        """For the time of a public method; the outermost one releases all feeds, whatever happens."""
        self._stack.append((trainer, name))
        try:
            yield
        finally:
            self._stack.pop()
            while not self._stack and self.feeds:
                self.feeds.pop().release()

    def release(self, feed: Any) -> None:
        """Releases one of the feeds."""
        if feed in self.feeds:
            self.feeds.remove(feed)
            feed.release()

    def follower(self) -> epochs.Follower | None:
        """Who follows the innermost `fit`."""
        return next((epochs.follower_of(trainer) for trainer, name in reversed(self._stack) if name == "fit"), None)

    def group_sizes(self) -> epochs.Sizes | None:
        """What sizes the groups of steps of this method, if it is a `fit` that may group them."""
        trainer, name = self._stack[-1] if self._stack else (None, "")
        return getattr(trainer, _GROUP_SIZES, None) if name == "fit" and not callbacks.see_steps(trainer) else None

    def followed_fit(self) -> epochs.Follower | None:
        """Who follows this method, if it is a `fit`."""
        return self.follower() if self._stack and self._stack[-1][1] == "fit" else None

    @contextlib.contextmanager
    def looking_at(self, iterator: Any) -> Generator[None]:
        """While Keras takes a batch from an epoch iterator to see its form."""
        self.looked_at = iterator
        try:
            yield
        finally:
            self.looked_at = None

    def only_looks(self, iterator: Any) -> bool:
        """Whether the batch that is about to be taken is only looked at; `reset` follows."""
        if iterator is self.looked_at:
            return True
        if not self._stack:
            return False
        trainer, name = self._stack[-1]
        return name == "predict" and not all(layer.built for layer in trainer._flatten_layers())


_calls = _Calls()


def _steps_per_execution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """That argument of `compile`, by its name or in its place."""
    names = list(inspect.signature(base_trainer.Trainer.compile).parameters)[1:]
    return (dict(zip(names, args, strict=False)) | kwargs).get("steps_per_execution", 1)


def _remember(owner: Any, state: Any) -> None:
    object.__setattr__(owner, _REMEMBERED, state)  # Not Keras's `__setattr__`, which would track the arrays.


def _put_back(trainer: Any) -> None:
    """Gives the variables their values again after an exception: those of the last step, or the remembered ones."""
    trainer.jax_state_sync()
    for variables, values in getattr(trainer, _REMEMBERED, None) or []:
        for variable, value in zip(variables, values, strict=True):
            if variable._value is None and not getattr(value, "stacked", value).is_deleted():
                variable.assign(value)
    trainer._jax_state = None


def _take_apart(trainer: Any) -> None:
    """Puts Keras's groups of values in place of a state that is carried in another form."""
    state = getattr(trainer, "_jax_state", None)
    if not state or trainer._jax_state_synced:
        return
    carried = state.get("trainable_variables")
    if hasattr(carried, "groups"):
        groups = carried.groups()
        trainer._jax_state = None if groups is None else dict(zip(state, groups, strict=True))


def _grouped(several: Callable[..., Any], every: int | None) -> Callable[..., Any]:
    """Takes `every` so many batches at a time, or those that are left; `None`: as many as the group says."""

    def steps(state: Any, iterator: Iterator[Any]) -> Any:
        size = every or getattr(iterator, "size", 1)
        batches = [next(iterator)]
        with contextlib.suppress(StopIteration):
            while len(batches) < size:
                batches.append(next(iterator))
        return several(state, batches, size)

    return steps


def _forgetting(trainer: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """After the first step nobody needs the values from before it."""

    def steps(state: Any, iterator: Iterator[Any]) -> Any:
        result = function(state, iterator)
        _remember(trainer, None)
        return result

    return steps


def state_variables(trainer: Any, kind: str) -> list[list[Any]]:
    """The variables behind the groups of a step's state, in the order of Keras's state tuple."""
    groups = [trainer.trainable_variables, trainer.non_trainable_variables]
    if kind == "train":
        groups.append(trainer.optimizer.variables if trainer.optimizer is not None else [])
    if kind in ("train", "test"):
        groups.append(trainer.metrics_variables)
    return [list(group) for group in groups]


def is_traced(trainer: Any) -> bool:
    """Whether the trainer's steps are compiled."""
    return bool(not trainer.run_eagerly and trainer.jit_compile)


def _step(trainer: Any, kind: str) -> Callable[..., Any]:
    return getattr(trainer, f"{kind}_step")


def _predict(trainer: Any) -> Callable[..., Any]:
    def predict_step(state: Any, data: Any) -> Any:
        outputs, non_trainable_variables = trainer.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step

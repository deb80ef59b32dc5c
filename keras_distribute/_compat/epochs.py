"""Keras's epoch iterator: where `fit` stands in its data, and how an epoch begins in
the middle.

Keras can begin `fit` at an epoch (`Trainer._initial_epoch`), but not within one: its
loop counts steps from 0, and data adapters have no positions. So the iterator that
counts the steps (`EpochIterator._enumerate_iterator`) is replaced for a `fit` that
somebody follows. To go on after `k` steps it passes over so many, without their data,
moves the feed to its position, and then hands out step `k - 1` once more, for which the
step function returns the state as it is: `fit` needs a step's logs even where none is
left in the epoch. Goes when Keras can resume within an epoch.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

from keras_distribute._compat import adapters

_FOLLOWER, _LAST = "_keras_distribute_follower", "_keras_distribute_last"


class Place(NamedTuple):
    """Where a `fit` stands.

    Args:
        steps: The steps of the epoch that are done.
        within: Whether the loop of the epoch goes on; otherwise it has been left.
        data: What `position` returned.
    """

    steps: int
    within: bool
    data: dict[str, Any]


class Follower(Protocol):
    """What follows a `fit` from step to step."""

    def epoch_begins(self, epochs: Any) -> Place | None:
        """Called before the first step of an epoch; returns where to go on in it."""
        ...

    def moved(self) -> None:
        """Called when the data stands at its place, before the first batch is taken."""
        ...

    def replayed(self) -> None:
        """Called after the step that was handed out once more."""
        ...

    def step_ended(self, steps: int) -> None:
        """Called when `steps` of the epoch are done, and `fit` asks for the next."""
        ...

    def test_step_ended(self) -> None:
        """Called likewise within an `evaluate` or `predict` called in the `fit`."""
        ...

    def train_function(
        self, original: Callable[..., Any], state: Any, data: Any
    ) -> Any:
        """Runs a step of the trainer."""
        ...

    def fit_ended(self) -> None:
        """Called when `fit` is left, in whatever way."""
        ...


class Pass(Iterator[Any]):
    """One pass over the data of an epoch iterator; its feed is opened when the first
    batch is asked for.

    Args:
        epochs: The epoch iterator, which has to live as long as its steps.
        open_feed: Opens a feed for an epoch iterator, and releases the one before it,
            if any.
        refuse_empty: Raises the error for data without a batch.
        group: How many batches to give at once, where it is Keras that takes them.
    """

    def __init__(
        self,
        epochs: Any,
        open_feed: Callable[[Any, Any], Any],
        refuse_empty: Callable[[], None],
        group: int | None,
    ) -> None:
        # It holds its last pass: what that has read is to end with it.
        self._epochs = weakref.ref(epochs)
        self._open, self._refuse_empty = open_feed, refuse_empty
        self._any, self._group = False, group
        self.feed: Any = None

    def __next__(self) -> Any:
        try:
            feed = self.feed or self._opened()
            size = self._group
            batch = next(feed) if size is None else adapters.next_group(feed, size)
        except StopIteration:
            if not self._any:
                self._refuse_empty()
            raise
        self._any = True
        return batch

    def move_to(self, position: Any) -> None:
        """Goes on from a position, and starts to read."""
        self._opened().seek(position)
        self.feed.start()
        self._any = True

    def _opened(self) -> Any:
        epochs = self._epochs()
        last = getattr(epochs, _LAST, None)
        self.feed = self._open(epochs, None if last is None else last.feed)
        self._any = last is not None
        setattr(epochs, _LAST, self)
        return self.feed


def follow(trainer: Any, follower: Follower) -> None:
    """Lets `follower` follow the `fit` that has begun, until it is left."""
    original = trainer.train_function
    # Not Keras's `__setattr__`, which would track what is inside.
    object.__setattr__(trainer, _FOLLOWER, (follower, original))
    trainer.train_function = lambda state, data: follower.train_function(
        original, state, data
    )


def follower_of(trainer: Any) -> Follower | None:
    """Who follows the trainer's `fit`."""
    return getattr(trainer, _FOLLOWER, (None,))[0]


def fit_ended(trainer: Any) -> None:
    """Ends the following."""
    follower, original = getattr(trainer, _FOLLOWER, (None, None))
    if follower is not None:
        object.__setattr__(trainer, _FOLLOWER, (None, None))
        trainer.train_function = original
        follower.fit_ended()


def position(epochs: Any, *, within: bool) -> dict[str, Any]:
    """Where an epoch iterator stands in its data, between two steps or behind the last
    one.

    Args:
        within: Whether the loop of the epoch goes on.

    Raises:
        InputError: For data without positions.
    """
    last: Pass = getattr(epochs, _LAST)
    open_ = within or _is_open(epochs, last)
    return {
        "adapter": kind_of_data(epochs),
        "steps_seen": epochs._steps_seen,
        "num_batches": epochs._num_batches,
        "steps_per_epoch": epochs.steps_per_epoch,
        "open": open_,
        "epoch": adapters.epoch_of(epochs.data_adapter),
        "at": last.feed.position(ended=not open_),
    }


def kind_of_data(epochs: Any) -> str:
    """What the data of an epoch iterator are called: the same in one process and in
    several, if they are the same.
    """
    return getattr(
        epochs.data_adapter, "stands_for", type(epochs.data_adapter).__name__
    )


def _is_open(epochs: Any, last: Pass) -> bool:
    """Whether the next epoch goes on in the same pass, as with `steps_per_epoch`."""
    return epochs.steps_per_epoch is not None and epochs._current_iterator is last


def test_steps(original: Generator[Any], follower: Follower) -> Generator[Any]:
    """The steps of an `evaluate` in a `fit`."""
    for step in original:
        yield step
        follower.test_step_ended()


class Group(Iterator[Any]):
    """The batches of one group of steps."""

    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self._batches, self.size = batches, size

    def __next__(self) -> Any:
        return next(self._batches)


class Sizes(Protocol):
    """Says how many steps to run at once."""

    size: int

    def group_begins(self, size: int) -> None:
        """Called before each group."""
        ...

    def interrupted(self) -> None:
        """Called when the epoch is over."""
        ...


def grouped_steps(
    epochs: Any, steps: Generator[Any], sizes: Sizes
) -> Generator[tuple[int, int, Iterator[Any]]]:
    """The steps of an epoch, as many at once as `sizes` says and as the epoch is known
    to have left.
    """
    done = 0
    while True:
        # Behind the last step the iterator begins anew, so that is not asked for before
        # the group has run.
        left = (epochs.steps_per_epoch or epochs._num_batches or 0) - done
        if epochs._num_batches:
            left = min(
                left, epochs._num_batches - epochs._steps_seen % epochs._num_batches
            )
        entries = list(itertools.islice(steps, max(1, min(sizes.size, left))))
        if not entries:
            sizes.interrupted()
            return
        (begin, _, batches), (_, end, _) = entries[0], entries[-1]
        done += len(entries)
        sizes.group_begins(len(entries))
        yield begin, end, Group(batches, len(entries))


def train_steps(
    epochs: Any, enumerate_steps: Callable[[Any], Generator[Any]], follower: Follower
) -> Generator[tuple[int, int, Iterator[Any]]]:
    """The steps of an epoch of a `fit`, from where the follower wants to go on."""
    place = follower.epoch_begins(epochs)
    group = epochs.steps_per_execution
    steps: Iterator[Any] = iter(())
    if place is None:
        steps = enumerate_steps(epochs)
    elif place.within:
        adapters.set_epoch(epochs.data_adapter, place.data.get("epoch"))
        epochs._num_batches = place.data["num_batches"]
        steps = enumerate_steps(epochs)
        *_, (_, _, batches) = itertools.islice(steps, place.steps // group)
        epochs._steps_seen = place.data["steps_seen"]
        batches.move_to(place.data["at"])
    else:
        _move_between_passes(epochs, place)
        steps = steps if place.steps else enumerate_steps(epochs)
    if place is not None:
        follower.moved()
    if place is not None and place.steps:
        yield place.steps - group, place.steps - 1, iter(())
        follower.replayed()
    for begin, end, batches in steps:
        yield begin, end, batches
        follower.step_ended(end + 1)


def _move_between_passes(epochs: Any, place: Place) -> None:
    """As if the epochs before had been run: with `steps_per_epoch` they may have left a
    pass half read.
    """
    batches = epochs._get_iterator()
    batches.move_to(place.data["at"])
    epochs._num_batches = place.data["num_batches"]
    if place.data["open"]:
        epochs._current_iterator, epochs._steps_seen = batches, place.data["steps_seen"]
    else:
        # At its end. What the next pass depends on, such as the seed of a shuffle, is
        # where that left it.
        batches.feed.close()
    adapters.set_epoch(epochs.data_adapter, place.data.get("epoch"))

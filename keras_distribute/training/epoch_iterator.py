"""Keras's epoch iterator with batches that are ready on the devices.

`_get_iterator` gives one pass over the data: ours reads ahead and places the batches.
`_enumerate_iterator` counts the steps: ours may begin in the middle of an epoch
(`_compat/epochs.py`), and sizes groups of steps by itself.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from keras_distribute._compat import adapters, epochs
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.trainer import JAXEpochIterator
from keras_distribute.training import adoption, calls, feeds


class StrategyEpochIterator(JAXEpochIterator):
    """The batches of an epoch; Keras's own for a model without a strategy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        call = calls.innermost()
        # As Keras asks now. Some layers may never be built: no step calls them.
        self._builds = (
            call is not None
            and call.name == "predict"
            and compat.is_unbuilt(call.trainer)
        )

    def reset(self) -> None:
        self._builds = False
        super().reset()

    def to_look_at(self) -> Any:
        """What a model is built by: this iterator, or one over the first batch alone.

        The first batch is on the host then, and will be read again.
        """
        if not self._is_read_by_us():
            return self
        return iter([(0, 0, self._first_batch())])

    def _get_iterator(self) -> Any:
        if self._builds and self._is_read_by_us():
            return self._first_batch()  # To build the model; `reset` follows.
        ours = adoption.takes_host_batches()
        if ours or calls.followed_fit() is not None:
            group = None if ours else adapters.group_size(self.steps_per_execution)
            return epochs.Pass(self, _opened, adoption.refuse_empty, group)
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Any:
        follower = calls.follower()
        if follower is None:
            sizes, own = calls.group_sizes(), super()._enumerate_iterator()
            return own if sizes is None else epochs.grouped_steps(self, own, sizes)
        if calls.followed_fit() is None:
            return epochs.test_steps(super()._enumerate_iterator(), follower)
        feeds.claim(self.data_adapter)
        own = super()._enumerate_iterator
        return epochs.train_steps(self, lambda _: own(), follower)

    def _is_read_by_us(self) -> bool:
        ours = isinstance(self.data_adapter, feeds.DatasetAdapter)
        return ours or adoption.takes_host_batches()

    def _first_batch(self) -> Generator[Any]:
        yield from feeds.look(self.data_adapter)
        adoption.refuse_empty()


def _opened(iterator: Any, last: Any) -> Iterator[Any]:
    """A feed for one pass; only one pass of an iterator is under way."""
    calls.release(last)
    group = iterator.steps_per_execution
    per_epoch = iterator.steps_per_epoch
    if per_epoch:
        per_epoch = -(-per_epoch // group) * group
    call = calls.innermost()
    assert call is not None
    adoption.check_assigned(call.trainer)
    feed = adoption.feed(call.trainer, iterator.data_adapter, per_epoch or None)
    calls.stack.feeds.append(feed)
    return feed

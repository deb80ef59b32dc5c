"""Python generators: they can be read once, and no prefetched batch of one is lost."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

from keras_distribute._compat import adapters as compat
from keras_distribute.input.source import (
    Batch,
    IteratorReader,
    Reader,
    Source,
    copy_arrays,
    in_use,
)


class GeneratorSource(Source):
    """A Python generator: it can be read once, and every batch of it counts.

    Args:
        seen: The batches that Keras has peeked at in `fit`; each pass begins with them.
        batches: Opens an iterator over those and the rest.
        stream: Where the rest comes from.
    """

    kind = "a generator"

    def __init__(
        self, seen: list[Any], batches: Callable[[], Iterator[Any]], stream: Stream
    ) -> None:
        self._seen, self._batches, self._stream = seen, batches, stream

    @staticmethod
    def of(generator: Any) -> GeneratorSource:
        """The source of a generator that Keras does not read."""
        stream = Stream.of(generator)
        return GeneratorSource(
            [], lambda: compat.generator_batches(stream.read(generator)), stream
        )

    @property
    def example(self) -> Any:
        if not self._stream.readers:
            with contextlib.suppress(StopIteration):
                return self.peek().data
        return super().example

    def open(self) -> Reader:
        return _GeneratorReader(len(self._seen), self._batches, self._stream)


class _GeneratorReader(IteratorReader):
    why_no_position = "a generator cannot start in the middle."

    def __init__(
        self, num_seen: int, batches: Callable[[], Iterator[Any]], stream: Stream
    ) -> None:
        super().__init__("a generator", batches)
        self.reuses_arrays = False  # Its stream has copied them.
        self._left_of_seen, self._stream, self._taken = num_seen, stream, 0

    def start(self, ahead: int) -> None:
        super().start(ahead)
        self._stream.remember(ahead)
        self._stream.readers.add(self)

    def __next__(self) -> Batch:
        batch = super().__next__()
        if self._left_of_seen:
            self._left_of_seen -= 1
        else:
            self._taken += 1
        return batch

    def close(self, unread: int) -> None:
        self._stream.readers.discard(self)
        self._stream.give_back(min(unread, self._taken))


class Stream:
    """What was prefetched from a generator and not used, for what reads it next, such
    as another `fit`.

    Attributes:
        readers: The passes that are under way, perhaps in other threads.
    """

    def __init__(self) -> None:
        self.readers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: deque[Any] = deque(maxlen=1)
        self._returned: deque[Any] = deque()

    @classmethod
    def of(cls, generator: Any) -> Stream:
        """The only stream of a generator; forgotten with it."""
        return in_use.streams.setdefault(generator, cls())

    def read(self, generator: Any) -> Generator[Any]:
        """The batches of the generator, those that were given back first."""
        while True:
            try:
                item = self._returned.popleft() if self._returned else next(generator)
            except StopIteration:
                return
            item = copy_arrays(item)
            self._given.append(item)
            yield item

    def remember(self, count: int) -> None:
        """Keeps at least the last `count` batches that were read, to give them back."""
        self._given = deque(self._given, maxlen=max(count, self._given.maxlen or 1))

    def give_back(self, count: int) -> None:
        """Takes back the last `count` batches."""
        for _ in range(count):
            self._returned.appendleft(self._given.pop())

"""Grain datasets and loaders, whose iterators have positions of their own."""

from __future__ import annotations

from typing import Any

from keras_distribute.input.source import IteratorReader, Position, Reader, Source


class GrainSource(Source):
    """A Grain `MapDataset`, `IterDataset` or `DataLoader`."""

    kind = "Grain"

    def __init__(self, dataset: Any, batch_size: int | None, example: Any) -> None:
        self._dataset, self._batch_size, self._example = dataset, batch_size, example

    @property
    def example(self) -> Any:
        return self._example

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def open(self) -> Reader:
        return _GrainReader(self._dataset)


class _GrainReader(IteratorReader):
    def __init__(self, dataset: Any) -> None:
        super().__init__("Grain", lambda: iter(dataset))
        self.reuses_arrays = False
        self._sought: Position | None = None

    def start(self, ahead: int) -> None:
        super().start(ahead)
        if self._sought is not None:
            self._iterator.set_state(self._sought["state"])  # type: ignore[attr-defined]

    def position(self) -> Position:
        return {"state": self._iterator.get_state()}  # type: ignore[attr-defined]

    def seek(self, position: Position) -> None:
        self._sought = position

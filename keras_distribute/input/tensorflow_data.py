"""`tf.data` pipelines, whose positions are TensorFlow's own checkpoints."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from typing import Any

import jax

from keras_distribute._compat import adapters as compat
from keras_distribute._compat import tensorflow as compat_tf
from keras_distribute.errors import InputError
from keras_distribute.input.source import Batch, Part, Position, Reader, Source, rows_of


class TensorFlowSource(Source):
    """A `tf.data.Dataset`.

    Args:
        dataset: The pipeline, batched.
        batch_size: The rows of a full batch; by default what TensorFlow finds in the
            pipeline.
    """

    kind = "tf.data"

    def __init__(self, dataset: Any, batch_size: int | None = None) -> None:
        self.dataset = dataset
        if batch_size is None:
            batch_size = compat_tf.static_batch_size(dataset)
        self._batch_size = batch_size
        self.resumed: dict[str, bytes] | None = None

    @property
    def num_batches(self) -> int | None:
        count = int(self.dataset.cardinality())
        return count if count >= 0 else None

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    @property
    def example(self) -> Any:
        def spec(leaf: Any) -> Any:
            return None if type(leaf).__name__ == "NoneTensorSpec" else leaf

        return jax.tree.map(spec, self.dataset.element_spec)

    def open(self) -> Reader:
        return _TensorFlowReader(self)

    def only_rows(self, part: Part) -> Source:
        operations = compat_tf.unseeded(self.dataset)
        if operations:
            raise InputError(
                "Each process would shuffle this pipeline in another order.",
                received=f"{', '.join(sorted(set(operations)))} without a seed.",
                fix="dataset.shuffle(1000, seed=7) with one seed for all processes, or "
                "tf.random.set_seed(7) before the pipeline is made.",
            )
        return super().only_rows(part)


class _TensorFlowReader(Reader):
    """Its position is TensorFlow's checkpoint of the iterator, buffers included."""

    kind = "tf.data"
    cheap_position = False

    def __init__(self, source: TensorFlowSource) -> None:
        self._source, self._dataset = source, source.dataset
        self._iterator: Any = None
        self._sought: Position | None = None
        self._beginning: dict[str, bytes] = {}

    def start(self, ahead: int) -> None:
        source = self._source
        try:
            if source.resumed is not None:
                # The order of a pass depends on a count that the dataset keeps. The
                # position from which the pass before was resumed has restored that only
                # if its input had not ended; its beginning does so in any case.
                _restore(iter(self._dataset), source.resumed)
                source.resumed = None
            self._iterator = iter(self._dataset)
        except Exception as error:
            if "SHARD_HINT" not in str(error):
                raise
            raise InputError(
                "The pipeline has shard(SHARD_HINT, SHARD_HINT), which only "
                "AutoShardPolicy.HINT fills in.",
                received="a tf.data pipeline with a hint, under another policy.",
                fix="kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.HINT)",
            ) from error
        if self._sought is None:
            if self.followed:  # Saving takes 10 ms and more.
                # What cannot be saved raises when a position is asked for.
                with contextlib.suppress(InputError):
                    self._beginning = _saved(self._iterator)
            return
        _restore(self._iterator, self._sought["files"])
        self._beginning = source.resumed = self._sought["beginning"]

    def __next__(self) -> Batch:
        data = compat.tf_to_host(next(self._iterator))
        return Batch(data, rows_of(data))

    def position(self) -> Position:
        return {"files": _saved(self._iterator), "beginning": self._beginning}

    def seek(self, position: Position) -> None:
        self._sought = position

    def form(self) -> Any:
        return jax.tree.structure(self._source.example)


def _saved(iterator: Any) -> dict[str, bytes]:
    """What TensorFlow writes of an iterator, by the name of the file."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            compat_tf.save_iterator(iterator, os.path.join(folder, "iterator"))
        except Exception as error:
            raise InputError(
                "TensorFlow cannot save the position of this tf.data pipeline.",
                received=str(error).split("\n", 1)[0][:300],
                fix="leave out from_generator and py_function, or use arrays, Grain or "
                "a PyDataset.",
            ) from error
        paths = pathlib.Path(folder).glob("iterator*")
        return {path.name: path.read_bytes() for path in paths}


def _restore(iterator: Any, files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            pathlib.Path(folder, name).write_bytes(content)
        compat_tf.restore_iterator(iterator, os.path.join(folder, "iterator"))

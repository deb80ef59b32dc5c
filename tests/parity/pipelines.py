"""A `tf.data` pipeline written as JSON, so that the record can name its inputs and a
test can build them again.

A pipeline is a list of steps, each a list of a name and its arguments:

    ["range", 10]                   the numbers 0..9, int64
    ["generator", [4, 4, 2]]        one element a size: the next so many numbers, of a static shape (None,)
    ["text_lines"]                  the lines of the pipeline's files, read by one TextLineDataset
    ["tf_records"]                  the same rows from TFRecord files
    ["interleave", 2]               the same rows, one TextLineDataset a file, two files open at once
    ["batch", 4], ["batch", 4, "drop_remainder"], ["repeat", 2], ["repeat"], ["take", 3], ["skip", 3], ["prefetch", 2],
    ["cache"], ["unbatch"], ["shard", 2, 0], ["shuffle", 4, 7]
    ["shard_hint"]                  `shard` with `tf.data.experimental.SHARD_HINT` for both arguments
    ["padded_batch", 4], ["ragged_batch", 4], ["bucket", 4]     of rows [0], [1, 1], [2, 2, 2], [3], [4, 4], ...
    ["window", 4], ["window_batch", 4]      a dataset of datasets; the same, each batched and flattened
    ["map", "tuple"]                one of MAPS
    ["filter", "first is even"]     keeps the batches that begin with an even number
    ["zip", [STEPS, STEPS]], ["concatenate", STEPS]

Needs TensorFlow, as the recording does.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from .encoding import JSON, Pair

Steps = list[list[JSON]]
Files = dict[str, list[int]]

MAPS: dict[str, Callable[..., Any]] = {
    "same": lambda x: x,
    "plus one": lambda x: x + 1,
    "number": lambda x: tf.strings.to_number(x, tf.int64),
    "tuple": lambda x: (x, x * 10),
    "tuple of one": lambda x: (x,),
    "dict": lambda x: {"b": x, "a": x * 10},
    "named tuple": lambda x: Pair(x, x * 10),
    "nested": lambda x: {"x": (x, {"y": x * 10}), "z": Pair(x * 100, (x * 1000,))},
    "list": lambda x: [x, x * 10],
    "with none": lambda x: (x, None),
    "with empty tuple": lambda x: (x, ()),
    "with scalar": lambda x: (x, tf.constant(7)),
    "with constant row": lambda x: (x, tf.constant([1.0, 2.0, 3.0])),
    "with half": lambda x: (x, x[: tf.size(x) // 2]),
    "matrix": lambda x: tf.cast(x[:, None] * [1, 2, 3], tf.float32),
    "row": lambda x: tf.cast(x * [1, 2, 3], tf.float32),
    "row of its length": lambda x: tf.repeat(x, x % 3 + 1),
    "ragged": lambda x: tf.RaggedTensor.from_row_lengths(tf.repeat(x, x % 3), x % 3),
    "sparse": lambda x: tf.sparse.from_dense(x[:, None] * [0, 1]),
    "string": tf.strings.as_string,
    "bool": lambda x: x % 2 == 0,
    "all dtypes": lambda x: {dtype: tf.cast(x, dtype) for dtype in DTYPES},
}
DTYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bool",
)


def name_of(steps: Steps) -> str:
    """The pipeline as a line of code."""
    return ".".join(
        f"{name}({', '.join(map(_argument, arguments))})" for name, *arguments in steps
    )


def _argument(argument: JSON) -> str:
    if isinstance(argument, list) and argument and isinstance(argument[0], list):
        nested = isinstance(argument[0][0], list)
        return f"[{', '.join(map(name_of, argument))}]" if nested else name_of(argument)
    return str(argument)


def build(steps: Steps, files: Sequence[str] = ()) -> tf.data.Dataset:
    """The dataset that `steps` describe, on `files`, whose kind the first step names."""
    dataset: Any = None
    for name, *arguments in steps:
        dataset = _step(dataset, name, arguments, list(files))
    return dataset


def with_policy(dataset: tf.data.Dataset, policy: str) -> tf.data.Dataset:
    """The dataset with an AutoShardPolicy."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy[policy]
    )
    return dataset.with_options(options)


def write_files(files: Files, kind: str, folder: Path) -> list[str]:
    """Writes each file's numbers, one a row; gives the paths in their order."""
    paths = [str(folder / name) for name in files]
    for path, rows in zip(paths, files.values(), strict=True):
        if kind == "tf_records":
            with tf.io.TFRecordWriter(path) as writer:
                for row in rows:
                    writer.write(str(row).encode())
        else:
            Path(path).write_text("".join(f"{row}\n" for row in rows))
    return paths


def _step(
    dataset: Any, name: str, arguments: list[Any], files: list[str]
) -> tf.data.Dataset:
    match name:
        case "range":
            return tf.data.Dataset.range(*arguments)
        case "generator":
            return _generator(arguments[0])
        case "text_lines":
            return tf.data.TextLineDataset(files)
        case "tf_records":
            return tf.data.TFRecordDataset(files)
        case "interleave":
            paths = tf.data.Dataset.from_tensor_slices(files)
            return paths.interleave(
                tf.data.TextLineDataset, cycle_length=arguments[0], block_length=1
            )
        case "batch":
            return dataset.batch(arguments[0], drop_remainder=len(arguments) > 1)
        case "shuffle":
            return dataset.shuffle(arguments[0], seed=arguments[1])
        case "shard_hint":
            hint = tf.data.experimental.SHARD_HINT
            return dataset.shard(hint, hint)
        case "bucket":
            return dataset.bucket_by_sequence_length(
                tf.size, [3], [arguments[0], arguments[0] // 2]
            )
        case "window_batch":
            return dataset.window(arguments[0]).flat_map(
                lambda window: window.batch(arguments[0])
            )
        case "map":
            return dataset.map(MAPS[arguments[0]])
        case "filter":
            return dataset.filter(lambda x: x[0] % 2 == 0)
        case "zip":
            return tf.data.Dataset.zip(tuple(build(steps) for steps in arguments[0]))
        case "concatenate":
            return dataset.concatenate(build(arguments[0]))
        case _:
            return getattr(dataset, name)(*arguments)


def _generator(sizes: list[int]) -> tf.data.Dataset:
    ends = np.cumsum(sizes)

    def chunks() -> Any:
        for size, end in zip(sizes, ends, strict=True):
            yield np.arange(end - size, end, dtype=np.int64)

    return tf.data.Dataset.from_generator(
        chunks, output_signature=tf.TensorSpec((None,), tf.int64)
    )

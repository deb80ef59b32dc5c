"""Distributed datasets on our side: what comes out of them, the rules that say what
should, the same data as every kind.

The rules are arithmetic on the record's encoding: a test first shows that they say what
TensorFlow did, then relies on them where the two deliberately differ.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_distribute as kd
from keras_distribute.input.splitting import piece_sizes

from .differences import because
from .encoding import JSON, decode, encode, encode_array, is_error
from .ours import encoded

Entry = dict[str, JSON]
Elements = tuple[list[JSON], str]

CONTAINERS = ("list", "tuple", "dict", "Pair")
MOST = 40
IN_32_BITS = {"int64": "int32", "float64": "float32"}


@cache
def record() -> dict[str, list[Entry]]:
    """The whole record of input."""
    return json.loads(Path(__file__).with_name("tensorflow_input.json").read_text())


def entries(*topics: str, where: Callable[[Entry], bool] = lambda entry: True) -> Any:
    """Parametrises a test by the entries of topics, as `entry`."""
    return pytest.mark.parametrize(
        "entry", [pytest.param(e, id=i) for e, i in identified(topics) if where(e)]
    )


def identified(topics: Iterable[str]) -> Iterator[tuple[Entry, str]]:
    """Each entry of the topics, and what to call it."""
    for topic in topics:
        for entry in record()[topic]:
            said = (
                topic,
                *(
                    str(entry[k])
                    for k in ("name", "policy", "mode", "file_set", "strategy", "call")
                    if k in entry
                ),
            )
            devices = (
                f"{entry['replicas']} replicas"
                if "replicas" in entry
                else f"2 x {entry['devices']} devices"
            )
            yield entry, "-".join((*said, devices))


def elements_of(
    strategy: kd.Strategy, dataset: Iterable[Any], most: int = MOST
) -> Elements:
    """A distributed dataset's elements in the record's encoding; whether they ended."""
    elements: list[JSON] = []
    iterator = iter(dataset)
    while len(elements) < most:
        try:
            elements.append(encoded(strategy, next(iterator)))
        except StopIteration:
            return elements, "StopIteration"
    return elements, "more"


def end_of(entry: Entry) -> int:
    """How many elements were recorded of a pipeline, if it has no end."""
    return len(entry["elements"]) if entry["end"] == "more" else MOST


def mapped(fn: Callable[[JSON], JSON], value: JSON) -> JSON:
    """`fn` of everything in the record's containers that is none."""
    tag = next(iter(value)) if isinstance(value, dict) else None
    if tag in ("list", "tuple"):
        return {tag: [mapped(fn, item) for item in value[tag]]}
    if tag in ("dict", "Pair"):
        return {tag: {name: mapped(fn, item) for name, item in value[tag].items()}}
    return fn(value)


def leaves(value: JSON) -> list[JSON]:
    """Everything in the record's containers that is none, in order."""
    found: list[JSON] = []
    mapped(found.append, value)
    return found


def as_ours(elements: list[JSON], on_devices: bool = True) -> list[JSON]:
    """TensorFlow's elements as ours: always PerReplica, in JAX's dtypes, None where
    there is nothing.
    """

    def component(value: JSON) -> JSON:
        return in_32_bits(value) if on_devices else value

    def leaf(value: JSON) -> JSON:
        if value is None or value.get("PerReplica", [0])[0] is None:
            assert because("none in elements")
            return None
        if "PerReplica" in value:
            return {"PerReplica": [component(item) for item in value["PerReplica"]]}
        assert because("elements of one replica")
        return {"PerReplica": [component(value)]}

    return [mapped(leaf, element) for element in elements]


def in_32_bits(value: JSON) -> JSON:
    """An array in the dtype that JAX gives it."""
    tag = next(iter(value))
    if tag in IN_32_BITS:
        assert because("32-bit elements")
        return {
            IN_32_BITS[tag] if name == tag else name: content
            for name, content in value.items()
        }
    return value


# The rules


def rows_of(batch: JSON) -> set[int]:
    """The numbers of rows in a batch."""
    return {
        len(array)
        for array in map(array_of, leaves(batch))
        if array is not None and array.ndim
    }


def array_of(leaf: JSON) -> Any:
    """The array of a leaf, a ragged one filled up with zeros; None for what is none."""
    if (
        leaf is None
        or not isinstance(leaf, dict)
        or leaf.keys() & {"object", "SparseTensor"}
    ):
        return None
    if "RaggedTensor" not in leaf:
        return decode(leaf)
    assert because("ragged tensors")
    values, splits = map(decode, leaf["RaggedTensor"])
    rows = [values[start:stop] for start, stop in pairwise(splits)]
    width = max(map(len, rows), default=0)
    dense = [np.pad(row, (0, width - len(row))) for row in rows]
    return np.stack(dense) if dense else values[:0].reshape(0, width)


def per_replica(parts: list[JSON], on_devices: bool = True) -> JSON:
    """One element from the structure of each replica."""

    def group(*components: Any) -> Any:
        arrays = [encode_array(np.asarray(component)) for component in components]
        return {
            "PerReplica": [
                in_32_bits(array) if on_devices else array for array in arrays
            ]
        }

    return _zipped(group, parts)


def _zipped(group: Callable[..., JSON], parts: list[JSON]) -> JSON:
    first = parts[0]
    tag = next(iter(first)) if isinstance(first, dict) else None
    if tag in ("list", "tuple"):
        return {
            tag: [
                _zipped(group, list(items))
                for items in zip(*(part[tag] for part in parts), strict=True)
            ]
        }
    if tag in ("dict", "Pair"):
        return {
            tag: {
                name: _zipped(group, [part[tag][name] for part in parts])
                for name in first[tag]
            }
        }
    return None if array_of(first) is None else group(*map(array_of, parts))


def rows_between(batch: JSON, start: int, stop: int) -> JSON:
    """Some rows of each array; scalars are everyone's."""

    def cut(leaf: JSON) -> JSON:
        array = array_of(leaf)
        return (
            leaf
            if array is None
            else encode_array(array[start:stop] if array.ndim else array)
        )

    return mapped(cut, batch)


def split(batch: JSON, replicas: int) -> list[JSON]:
    """A global batch cut for the replicas: each takes ceil(rows / replicas) rows until
    none are left.
    """
    ends = np.cumsum([0, *piece_sizes(max(rows_of(batch), default=0), replicas)])
    return [
        rows_between(batch, int(start), int(stop)) for start, stop in pairwise(ends)
    ]


def by_split(batches: list[JSON], replicas: int, on_devices: bool = True) -> list[JSON]:
    """The elements of a dataset of global batches."""
    return [per_replica(split(batch, replicas), on_devices) for batch in batches]


def by_rounds(of_replicas: list[list[JSON]], on_devices: bool = True) -> list[JSON]:
    """The elements where replicas have their own batches; no rows for one without."""
    found = []
    for step in range(max(map(len, of_replicas))):
        taken = [
            batches[step] if step < len(batches) else None for batches in of_replicas
        ]
        given = next(batch for batch in taken if batch is not None)
        parts = [
            rows_between(given, 0, 0) if batch is None else batch for batch in taken
        ]
        found.append(per_replica(parts, on_devices))
    return found


def dealt(batches: list[JSON], replicas: int) -> list[list[JSON]]:
    """Consecutive batches for consecutive replicas."""
    return [batches[replica::replicas] for replica in range(replicas)]


# The form of elements


def spec_of(value: JSON) -> Any:
    """TensorFlow's element_spec as ours: one for all replicas, whose rows vary."""
    tag = next(iter(value)) if isinstance(value, dict) else None
    if tag == "tuple":
        return tuple(map(spec_of, value[tag]))
    if tag in ("dict", "Pair"):
        items = {name: spec_of(item) for name, item in value[tag].items()}
        return items if tag == "dict" else tuple(items.values())
    if tag == "PerReplica":
        return spec_of(value[tag][0])
    if tag == "object":
        return None if value[tag] == "NoneTensorSpec" else value[tag]
    shape = value["shape"]
    if shape and shape[0] is not None:
        assert because("static specs")
    return kd.ElementSpec((None, *shape[1:]) if shape else (), value["spec"])


def assert_spec(actual: Any, recorded: JSON) -> None:
    """Asserts that our element_spec is TensorFlow's."""
    expected = spec_of(recorded)
    ours, theirs = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, str):  # a RaggedTensorSpec or a SparseTensorSpec
            assert len(one.shape) == 2 and one.dtype == "int64"
        else:
            assert one == other


# The same data as every kind


def structure(batch: JSON) -> Any:
    """A batch with NumPy arrays."""
    return decode(
        mapped(
            lambda leaf: (
                leaf if array_of(leaf) is None else encode_array(array_of(leaf))
            ),
            batch,
        )
    )


def even(batches: list[Any]) -> int | None:
    """The size of the batches, if that is one size, but for a smaller last one."""
    sizes = [
        {len(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
        for batch in batches
    ]
    if any(len(size) != 1 for size in sizes) or not all(
        np.ndim(leaf) for b in batches for leaf in jax.tree.leaves(b)
    ):
        return None
    if not alike(batches):
        return None
    numbers = [size.pop() for size in sizes]
    full = all(number == numbers[0] for number in numbers[:-1])
    return numbers[0] if full and 0 < numbers[-1] <= numbers[0] else None


def alike(batches: list[Any]) -> bool:
    """Whether all batches can be joined: some are padded to another width."""
    return (
        len(
            {
                tuple(leaf.shape[1:] for leaf in jax.tree.leaves(batch))
                for batch in batches
            }
        )
        == 1
    )


def joined(batches: list[Any]) -> Any:
    """All rows of all batches."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def arrays(batches: list[Any]) -> Any:
    """A kd.ArrayDataset, which has batches of one size, and numbers only."""
    size = even(batches)
    if size is None or any(
        leaf.dtype.kind == "U" or leaf.ndim == 0 for leaf in jax.tree.leaves(batches)
    ):
        return None
    return kd.ArrayDataset(joined(batches), batch_size=size)


def grain_rows(batches: list[Any]) -> Any:
    """A Grain MapDataset of rows, batched by Grain."""
    import grain

    size = even(batches)
    if size is None or any(leaf.dtype.kind == "U" for leaf in jax.tree.leaves(batches)):
        return None
    whole = joined(batches)
    count = len(jax.tree.leaves(whole)[0])
    rows = [jax.tree.map(lambda array, i=i: array[i], whole) for i in range(count)]
    return grain.MapDataset.source(rows).batch(size)


def grain_batches(batches: list[Any]) -> Any:
    """A Grain IterDataset of ready batches; Keras takes no text or scalars from it."""
    import grain

    if any(
        leaf.dtype.kind == "U" or leaf.ndim == 0 for leaf in jax.tree.leaves(batches)
    ):
        return None
    return grain.MapDataset.source(batches).to_iter_dataset()


class Batches(keras.utils.PyDataset):
    """A PyDataset of ready batches."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def torch_rows(batches: list[Any]) -> Any:
    """A torch DataLoader of rows, with batches of any sizes."""
    import torch
    from torch.utils.data import DataLoader

    flat = jax.tree.leaves(batches)
    sizes = [
        {len(leaf) for leaf in jax.tree.leaves(batch) if leaf.ndim} for batch in batches
    ]
    if any(leaf.dtype.kind == "U" or leaf.ndim == 0 for leaf in flat) or any(
        len(size) != 1 for size in sizes
    ):
        return None
    if not alike(batches):
        return None
    whole = joined(batches)
    ends = np.cumsum([0, *(size.pop() for size in sizes)])
    order = [list(range(start, stop)) for start, stop in pairwise(ends)]

    def collate(rows: list[int]) -> Any:
        return jax.tree.map(lambda array: torch.from_numpy(array[rows]), whole)

    rows = range(int(ends[-1]))
    if even(batches):
        return DataLoader(rows, batch_size=even(batches), collate_fn=collate)
    return DataLoader(rows, batch_sampler=order, collate_fn=collate)


def generator(batches: list[Any]) -> Iterator[Any]:
    """A Python generator."""
    yield from batches


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "arrays": arrays,
    "Grain rows": grain_rows,
    "Grain batches": grain_batches,
    "PyDataset": Batches,
    "torch DataLoader": torch_rows,
    "generator": generator,
}
TUPLES_ONLY = ("PyDataset", "generator", "torch DataLoader")


def as_kind(kind: str, batches: list[JSON]) -> Any:
    """The same batches as another kind of dataset; None where it cannot express them.

    An empty dataset is left out: only a tf.data pipeline and an array say what its
    elements would have been.
    """
    return (
        KINDS[kind]([structure(batch) for batch in wrapped(kind, batches)])
        if batches
        else None
    )


def expressible(kind: str, batches: list[JSON]) -> bool:
    """Whether a kind can express these batches; many entries have the same ones."""
    return _expressible(kind, json.dumps(batches))


@cache
def _expressible(kind: str, batches: str) -> bool:
    return as_kind(kind, json.loads(batches)) is not None


def wrapped(kind: str, batches: list[JSON]) -> list[JSON]:
    """Batches as the kind yields them: some know tuples only."""
    if kind == "arrays":
        batches = [mapped(_in_floatx, batch) for batch in batches]
    bare = (
        kind in TUPLES_ONLY
        and batches
        and next(iter(batches[0])) not in ("tuple", "Pair", "dict")
    )
    bare = bare or (
        kind == "generator" and batches and next(iter(batches[0])) == "dict"
    )
    return [{"tuple": [batch]} for batch in batches] if bare else batches


def _in_floatx(leaf: JSON) -> JSON:
    """Keras converts floating arrays to `keras.config.floatx()`."""
    tag = next(iter(leaf or {"": 0}))
    return {"float32": leaf[tag]} if tag in ("float16", "float64") else leaf


def with_kinds(
    *topics: str, where: Callable[[Entry], bool] = lambda entry: True
) -> Any:
    """Parametrises a test by the entries of topics whose batches are known, and by the
    kinds that can express them.
    """
    cases = [
        pytest.param(entry, kind, id=f"{kind}-{name}")
        for entry, name in identified(topics)
        if entry.get("whole") and where(entry)
        for kind in KINDS
        if expressible(kind, entry["whole"])
    ]
    return pytest.mark.parametrize(("entry", "kind"), cases)


def pipeline(
    steps: JSON, policy: str = "AUTO", files: list[str] | None = None
) -> tf.data.Dataset:
    """The tf.data pipeline of an entry, with its policy."""
    from .pipelines import build, with_policy

    return with_policy(build(steps, files or []), policy)


def batches_of(steps: JSON) -> list[JSON]:
    """The elements of a pipeline, encoded; many entries have the same ones."""
    return list(_elements(json.dumps(steps)))


@cache
def _elements(steps: str) -> list[JSON]:
    dataset = pipeline(json.loads(steps))
    return [encode(element) for element in dataset.as_numpy_iterator()]


def raised_in(entry: Entry) -> bool:
    """Whether TensorFlow failed."""
    return is_error(entry["end"])


# Results of calls


def assert_result(strategy: kd.Strategy, value: Any, recorded: JSON) -> None:
    """Asserts that a call returned the numbers of the record, for each replica where
    there are several values.
    """
    ours, theirs = plain(encoded(strategy, value)), plain(recorded)
    if ours != theirs:
        assert because("elements of one replica")
        assert strategy.num_replicas_in_sync == 1
        assert _bare(ours) == _bare(theirs)


def plain(value: JSON) -> Any:
    """The numbers and texts of the record in lists; what was encoded twice is the same
    as what was encoded once.
    """
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()))
    if tag in ("list", "tuple", "PerReplica") and isinstance(content, list):
        return [plain(item) for item in content]
    return plain(content) if isinstance(content, dict) else content


def _bare(value: Any) -> Any:
    """Without the lists of one that stand for one replica."""
    if isinstance(value, list) and len(value) == 1:
        return _bare(value[0])
    return [_bare(item) for item in value] if isinstance(value, list) else value

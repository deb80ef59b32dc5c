"""An iterator goes on from a position with the very next batch: in this process, and in
a new one.
"""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_distribute as kd
from keras_distribute import errors
from keras_distribute._compat import adapters
from keras_distribute.input.kinds import source_of_adapter
from keras_distribute.input.prefetch import Feed
from tests.support import mirrored

from . import kinds

MAKE = (23, 4, True, 2, False)


def strategy() -> Any:
    return mirrored(2)


def ids(element: Any) -> list[int]:
    return np.concatenate([np.asarray(value) for value in element[0].values]).tolist()


def distributed(kind: str, ahead: int = 2) -> Any:
    options = kd.InputOptions(experimental_per_replica_buffer_size=ahead)
    return strategy().experimental_distribute_dataset(kinds.KINDS[kind](*MAKE), options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", [0, 2, 4])
@pytest.mark.parametrize("kind", kinds.RESUMABLE)
def test_goes_on_with_the_next_batch(kind: str, ahead: int) -> None:
    dataset = distributed(kind, ahead)
    next_pass = []
    for stop in (0, 1, 5, 11):
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        state = iterator.get_state()
        rest = [ids(element) for element in iterator]
        assert len(rest) == 12 - stop
        other = distributed(kind, ahead)
        resumed = iter(other)
        resumed.set_state(pickle.loads(pickle.dumps(state)))
        assert [ids(element) for element in resumed] == rest
        next_pass.append([ids(element) for element in other])
    # Each stop was in a new pass, and the pass after it is the next one.
    if kind == "arrays":
        assert len({json.dumps(each) for each in next_pass}) == len(next_pass)
        assert next_pass[0] == [
            ids(element) for element in _skipped(distributed(kind), 1)
        ]


def test_an_element_with_none_goes_on() -> None:
    def made() -> Any:
        pipeline = tf.data.Dataset.range(20).batch(4).map(lambda x: (x, None, x))
        return strategy().experimental_distribute_dataset(pipeline)

    assert made().element_spec[1] is None
    iterator = iter(made())
    next(iterator)
    state = iterator.get_state()
    rest = [ids(element) for element in iterator]
    resumed = iter(made())
    resumed.set_state(state)
    elements = list(resumed)
    assert [ids(element) for element in elements] == rest and len(rest) == 4
    assert all(element[1] is None for element in elements)


def _skipped(dataset: Any, passes: int) -> Any:
    for _ in range(passes):
        list(dataset)
    return iter(dataset)


def test_a_state_after_a_resumption_is_a_position_too() -> None:
    for kind in kinds.RESUMABLE:
        whole = [ids(element) for element in distributed(kind)]
        state, seen = None, []
        while True:
            iterator = iter(distributed(kind))
            if state is not None:
                iterator.set_state(state)
                assert iterator.get_state() is not None
            taken = [
                ids(element) for element, _ in zip(iterator, range(3), strict=False)
            ]
            seen += taken[:2] if len(taken) > 2 else taken
            if len(taken) < 3:
                break
            again = iter(distributed(kind))
            if state is not None:
                again.set_state(state)
            next(again), next(again)
            state = again.get_state()
        assert seen == whole, kind


CHILD = """
    import pickle, sys
    import keras_distribute as kd
    kd.config.set_cpu_devices(2)
    import numpy as np
    from tests.input import kinds
    from tests.input.test_resumption import distributed, ids

    what, path, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    positions, found = {}, {}
    if what == "resume":
        with open(path, "rb") as file:
            positions = pickle.load(file)
    for kind in kinds.RESUMABLE:
        dataset = distributed(kind)
        if what == "resume":
            iterator = iter(dataset)
            iterator.set_state(positions[kind])
            found[kind] = [ids(element) for element in iterator]
            continue
        list(dataset) if kind == "arrays" else None
        iterator = iter(dataset)
        first = [ids(next(iterator)) for _ in range(np.random.RandomState(seed + len(kind)).randint(1, 11))]
        positions[kind] = iterator.get_state()
        found[kind] = [first, [ids(element) for element in iterator]]
    if what == "stop":
        with open(path, "wb") as file:
            pickle.dump(positions, file)
    print("FOUND", __import__("json").dumps(found))
"""


def child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, 1])
def test_goes_on_in_a_new_process(seed: int, tmp_path: Any) -> None:
    """Stopped at a random step; the second process has only the position."""
    path = str(tmp_path / "positions")
    stopped = child("stop", path, str(seed))
    resumed = child("resume", path, str(seed))
    assert stopped.keys() == resumed.keys() == set(kinds.RESUMABLE)
    for kind, (first, rest) in stopped.items():
        assert len(first) + len(rest) == 12 and first, kind
        assert resumed[kind] == rest, kind


class Counting(adapters.ArrayDataAdapter):
    """Shuffles as Keras 3.16 does: by its count of epochs, whatever the version is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._epoch = 4


class Drawing(adapters.ArrayDataAdapter):
    """Shuffles as Keras 3.15 does: from NumPy's stream, whatever the version is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.__dict__.pop("_epoch", None)


def feed_of(adapter: Any) -> Any:
    """The rows of each batch that `fit` reads."""
    source = source_of_adapter(adapter)
    return Feed(source.open, lambda batch: np.ravel(batch.data).tolist(), ahead=2)


@pytest.mark.parametrize("shuffle", [True, "batch"])
@pytest.mark.parametrize("kind", [Counting, Drawing])
@pytest.mark.parametrize("goes_on", [Counting, Drawing])
def test_arrays_shuffled_by_fit_go_on(kind: Any, goes_on: Any, shuffle: Any) -> None:
    """Keras's order, as the reader of `fit` sees it; another version goes on in it."""

    def adapter(kind: Any) -> Any:
        return kind(np.arange(20), batch_size=3, shuffle=shuffle)

    np.random.seed(5)
    kept = adapter(kind)
    first = feed_of(kept)
    seen = [next(first) for _ in range(3)]
    state = first.position()
    rest, following = list(first), np.random.rand()
    np.random.seed(5 if kind is Counting else 77)
    other = adapter(goes_on)
    second = feed_of(other)
    second.seek(state)
    assert list(second) == rest and np.random.rand() == following
    assert sorted(itertools.chain(*seen, *rest)) == list(range(20))


def test_an_order_by_the_epoch_is_that_of_keras() -> None:
    for epoch in (4, 5):
        adapter = Counting(np.arange(7), batch_size=3, shuffle=True)
        adapter._epoch = epoch
        order = np.random.default_rng(epoch).permutation(7)
        assert list(itertools.chain(*feed_of(adapter))) == order.tolist()
        within = Counting(np.arange(7), batch_size=3, shuffle="batch")
        within._epoch = epoch
        starts = enumerate(([0, 1, 2], [3, 4, 5], [6]))
        rows = [
            np.random.default_rng(epoch + i).permutation(part).tolist()
            for i, part in starts
        ]
        assert list(feed_of(within)) == rows


class Changing(kinds.Batches):
    def on_epoch_end(self) -> None:
        self.order = self.order[::-1].copy()


class Saying(Changing):
    def get_state(self) -> Any:
        return {"order": self.order.copy()}

    def set_state(self, state: Any) -> None:
        self.order = np.asarray(state["order"])


def test_what_cannot_go_on_says_so() -> None:
    for kind, text in (
        ("generator", "a generator cannot start in the middle"),
        ("torch DataLoader", "StatefulData"),
    ):
        iterator = iter(distributed(kind))
        next(iterator)
        with pytest.raises(errors.InputError, match=text) as raised:
            iterator.get_state()
        assert "Fix:" in str(raised.value)
        assert len(list(iterator)) == 11, "the iterator is as usable as before"

    def py(cls: Any) -> Any:
        return strategy().experimental_distribute_dataset(
            cls(kinds.examples(12), 4, False, np.arange(12))
        )

    iterator = iter(py(Changing))
    with pytest.raises(
        errors.InputError, match="Changing cannot be resumed: it changes between epochs"
    ):
        iterator.get_state()
    first, second = py(Saying), py(Saying)
    list(first)
    iterator = iter(first)
    next(iterator)
    state = iterator.get_state()
    rest = [ids(element) for element in iterator]
    resumed = iter(second)
    resumed.set_state(state)
    assert [ids(element) for element in resumed] == rest == [[7, 6, 5, 4], [3, 2, 1, 0]]


def test_a_position_of_something_else_is_refused() -> None:
    arrays, data = distributed("arrays"), distributed("tf.data")
    iterator = iter(arrays)
    with pytest.raises(errors.InputError, match="This is not a position in arrays"):
        iterator.set_state(iter(data).get_state())
    with pytest.raises(errors.InputError, match="This is not a position in arrays"):
        iterator.set_state({})
    shorter = strategy().experimental_distribute_dataset(
        kd.ArrayDataset(np.arange(9), 4)
    )
    with pytest.raises(errors.InputError, match="rows=46 in the position, rows=9 here"):
        iter(shorter).set_state(iter(arrays).get_state())

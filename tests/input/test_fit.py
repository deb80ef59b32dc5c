"""`fit`, `evaluate` and `predict` on distributed datasets, and what reading ahead must
not change.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import errors
from tests.support import dense_model, mirrored

pytestmark = pytest.mark.sampled(6)

RNG = np.random.RandomState(0)
X = RNG.randn(45, 3).astype("float32")
Y = X.sum(1, keepdims=True)


def make() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def both(fit: Any, replicas: int = 4) -> tuple[Any, Any]:
    """Weights and history of `fit(model)`, on plain Keras and on replicas."""
    results = []
    for strategy in (None, mirrored(replicas)):
        if strategy is None:
            model = make()
        else:
            with strategy.scope():
                model = make()
        keras.utils.set_random_seed(1)
        history = fit(model)
        results.append(([np.asarray(w) for w in model.get_weights()], history.history))
    return results[0], results[1]


def assert_same(plain: Any, ours: Any) -> None:
    for a, b in zip(plain[0], ours[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert plain[1].keys() == ours[1].keys()
    for name in plain[1]:
        np.testing.assert_allclose(plain[1][name], ours[1][name], rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[0, 2])
def ahead(request: Any) -> Any:
    before = kd.config.prefetch_steps()
    kd.config.set_prefetch_steps(request.param)
    yield request.param
    kd.config.set_prefetch_steps(before)


def array_dataset() -> Any:
    return kd.ArrayDataset((X, Y), 8, shuffle=True, seed=3)


def tf_dataset() -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(45, seed=1).batch(8)


class Pairs(keras.utils.PyDataset):
    num_batches = 6

    def __getitem__(self, index: int) -> Any:
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], Y[rows]


@pytest.mark.parametrize("dataset", [array_dataset, tf_dataset, Pairs])
def test_fit_takes_a_distributed_dataset(dataset: Any) -> None:
    strategy = mirrored(2)

    def fit(model: Any) -> Any:
        data = strategy.experimental_distribute_dataset(dataset())
        history = model.fit(data, epochs=2, validation_data=data, verbose=0)
        history.history["evaluate"] = model.evaluate(data, verbose=0)
        history.history["predict"] = model.predict(
            strategy.experimental_distribute_dataset(Pairs()), verbose=0
        )
        return history

    assert_same(*both(fit))


def test_fit_takes_datasets_from_a_function_whole() -> None:
    """Three replicas' batches of 8 are a global batch of 24; the last round has one of
    8, one of 5, and nothing.
    """
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])

    def fit(model: Any) -> Any:
        data = strategy.distribute_datasets_from_function(
            lambda context: kd.ArrayDataset((X, Y), 8)
        )
        return model.fit(data, epochs=2, verbose=0)

    plain, ours = both(fit)
    assert_same(plain, ours)
    model = make()
    keras.utils.set_random_seed(1)
    model.fit(X, Y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), ours[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", [2, 4])
def test_several_steps_at_once_without_a_strategy(group: int) -> None:
    """Of arrays and of a distributed dataset, with groups that are not full at the end."""

    def distributed() -> Any:
        strategy = kd.MirroredStrategy(["cpu:0"])
        return strategy.experimental_distribute_dataset(array_dataset()), None

    for data in (lambda: (X, Y), distributed):
        results = []
        for steps in (1, group):
            (x, y), model = data(), make()
            model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps)
            keras.utils.set_random_seed(1)
            options: Any = {} if y is None else {"batch_size": 8}
            history = model.fit(x, y, epochs=2, verbose=0, **options).history
            results.append((model.get_weights(), history))
        assert_same(*results)


def test_targets_beside_a_distributed_dataset_are_refused() -> None:
    data = kd.MirroredStrategy(["cpu:0"]).experimental_distribute_dataset(
        array_dataset()
    )
    for name in ("y", "sample_weight", "class_weight"):
        with pytest.raises(
            errors.InputError, match=f"already holds all that a step needs; {name}"
        ):
            make().fit(
                data, **{name: {0: 1.0} if name == "class_weight" else Y}, verbose=0
            )


@pytest.mark.parametrize("shuffle", [True, "batch", False])
def test_shuffled_arrays_follow_the_seed_and_differ(shuffle: Any, ahead: int) -> None:
    """The orders are Keras's own, also where two calls of `fit` go on from one another."""

    def fit(model: Any) -> Any:
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=shuffle, verbose=0)
        return model.fit(
            X,
            Y,
            batch_size=8,
            epochs=2,
            shuffle=shuffle,
            validation_split=0.2,
            verbose=0,
        )

    assert_same(*both(fit))


def test_the_batches_of_a_py_dataset_are_shuffled_as_keras_does(ahead: int) -> None:
    def fit(model: Any) -> Any:
        return model.fit(Pairs(), epochs=3, shuffle=True, verbose=0)

    assert_same(*both(fit))


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_a_shuffled_pass_over_several_epochs_keeps_its_order(
    shuffle: Any, ahead: int
) -> None:
    def fit(model: Any) -> Any:
        options: Any = {"steps_per_epoch": 4, "initial_epoch": 1, "epochs": 4}
        return model.fit(X, Y, batch_size=8, shuffle=shuffle, verbose=0, **options)

    assert_same(*both(fit))


def endless() -> Any:
    i = 0
    while True:
        rows = np.arange(8 * i, 8 * i + 8) % 45
        yield X[rows], Y[rows]
        i += 1


def test_nothing_of_a_generator_is_lost_between_fits(ahead: int) -> None:
    def fit(model: Any) -> Any:
        batches = endless()
        model.fit(batches, steps_per_epoch=5, epochs=2, verbose=0)
        model.evaluate(batches, steps=3, verbose=0)
        return model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0)

    assert_same(*both(fit))


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            self.model.stop_training = True


def test_what_was_read_ahead_when_training_stopped_comes_next(ahead: int) -> None:
    def fit(model: Any) -> Any:
        batches = endless()
        model.fit(batches, steps_per_epoch=9, verbose=0, callbacks=[StopAfter(3)])
        return model.fit(batches, steps_per_epoch=4, epochs=2, verbose=0)

    assert_same(*both(fit))


@pytest.mark.parametrize("workers", [1, 2])
def test_py_datasets_see_their_epochs(workers: int, ahead: int) -> None:
    events: list[str] = []

    class Watched(Pairs):
        def on_epoch_begin(self) -> None:
            events.append("begin")

        def on_epoch_end(self) -> None:
            events.append("end")

        def __getitem__(self, index: int) -> Any:
            events.append(str(index))
            return super().__getitem__(index)

    model = dense_model(mirrored(2), 3)
    model.build((None, 3))
    model.fit(Watched(workers=1), epochs=1, verbose=0)
    events.clear()
    model.fit(Watched(workers=workers), epochs=2, shuffle=False, verbose=0)
    text = " ".join(events)
    text = text[text.index("begin") :]
    if workers == 1:
        assert text == "begin 0 1 2 3 4 5 end begin 0 1 2 3 4 5 end"
    else:
        parts = text.split("end")
        assert [sorted(part.split()) for part in parts[:2]] == [
            ["0", "1", "2", "3", "4", "5", "begin"]
        ] * 2


def test_reading_ahead_ends_with_what_it_was_for() -> None:
    def ours() -> list[str]:
        return [
            t.name for t in threading.enumerate() if t.name == "keras_distribute input"
        ]

    strategy = mirrored(2)
    with strategy.scope():
        model = make()
    model.fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0)
    model.fit(endless(), steps_per_epoch=3, verbose=0, callbacks=[StopAfter(1)])
    assert ours() == []

    iterator = iter(strategy.experimental_distribute_dataset(endless()))
    next(iterator)
    assert ours() != []
    del iterator
    gc.collect()
    deadline = time.monotonic() + 20
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ours() == []


def test_a_validation_of_some_steps_goes_on_in_the_next_epoch() -> None:
    def fit(model: keras.Model) -> Any:
        options = {"validation_data": Pairs(), "validation_steps": 2, "verbose": 0}
        return model.fit(X, Y, batch_size=45, epochs=2, **options)

    assert_same(*both(fit))


@pytest.mark.parametrize("kind", ["arrays", "one step an epoch"])
def test_a_lone_batch_is_read_without_a_thread(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirrored(2).scope():
        model = make()
    started: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    if kind == "arrays":
        model.fit(X, Y, batch_size=len(X), epochs=2, verbose=0)
    else:
        model.fit(endless(), steps_per_epoch=1, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2
    assert "keras_distribute input" not in started
    model.fit(X, Y, batch_size=len(X) // 2, verbose=0)
    assert "keras_distribute input" in started


def test_batches_are_ready_before_they_are_asked_for() -> None:
    reached = threading.Event()

    def batches() -> Any:
        for i in range(10):
            if i == 2:
                reached.set()
            yield (np.full((2, 1), i),)

    strategy = mirrored(2)
    options = kd.InputOptions(experimental_per_replica_buffer_size=2)
    iterator = iter(strategy.experimental_distribute_dataset(batches(), options))
    next(iterator)
    assert reached.wait(20), (
        "the second batch ahead was not read while the first was used"
    )
    iterator.close()
    assert next(iterator, None) is None


def test_a_pipeline_sees_the_strategy_and_the_policy_of_its_caller() -> None:
    seen = []

    def batches() -> Any:
        for _ in range(3):
            seen.append((kd.get_strategy(), keras.config.dtype_policy().name))
            yield X[:8], Y[:8]

    strategy = mirrored(2)
    with strategy.scope():
        model = make()
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model.fit(batches(), verbose=0)
        finally:
            keras.config.set_dtype_policy(before)
    assert set(seen) == {(strategy, "mixed_bfloat16")}


def test_a_scope_that_a_pipeline_opens_is_its_own() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Augments(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            inside.set()
            go_on.wait(60)

        def call(self, inputs: Any) -> Any:
            return inputs

    def batches() -> Any:
        yield X[:8], Y[:8]
        Augments(name="augments")(X[:8])

    strategy = mirrored(2)
    with strategy.scope():
        make()  # Opens scopes in this thread, too.
        iterator = iter(strategy.experimental_distribute_dataset(batches()))
        next(iterator)
        assert inside.wait(60)
        average = keras.Variable(1.0, trainable=False, name="average")
        go_on.set()
    assert next(iterator, None) is None
    assert isinstance(average, kd.MirroredVariable) and average.path == "average"


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_wrong_number_of_steps_ahead(value: Any) -> None:
    with pytest.raises(
        errors.ValueStructureError, match="Batches are made ready for a number of steps"
    ):
        kd.config.set_prefetch_steps(value)
    with pytest.raises(
        errors.ValueStructureError, match="The buffer is a number of steps"
    ):
        kd.InputOptions(experimental_per_replica_buffer_size=value)


def test_memory_does_not_grow() -> None:
    """10,000 steps of a custom loop hold no more than 1,000 did."""
    import resource

    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(
        kd.ArrayDataset(np.zeros((8000, 512), np.float32), 8)
    )
    peaks = []
    for _ in range(10):
        for element in dataset:
            del element
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert peaks[-1] - peaks[0] < 30, peaks  # One leaked array a step would be 160 MiB.


def numbers(count: int) -> Any:
    return ((np.full((2, 1), i, np.float32),) for i in range(count))


def firsts(elements: Any) -> list[int]:
    return [int(np.asarray(element[0].values[0])[0, 0]) for element in elements]


@pytest.mark.parametrize("taken", [0, 1, 2, 4])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_another_iterator_over_a_generator_goes_on(taken: int, how: str) -> None:
    strategy = mirrored(2)
    generator = numbers(9)
    dataset = strategy.experimental_distribute_dataset(generator)
    assert dataset.element_spec == (kd.ElementSpec((None, 1), "float32"),)
    iterator = iter(dataset)
    seen = firsts(next(iterator) for _ in range(taken))
    time.sleep(0.05)
    if how == "close":
        iterator.close()
    del iterator
    gc.collect()
    other = iter(dataset)
    seen += firsts(next(other) for _ in range(2))
    other.close()
    seen += firsts(strategy.experimental_distribute_dataset(generator))
    assert seen == list(range(9))


def test_the_form_of_a_generator_that_is_being_read() -> None:
    """Asked for in the middle it reads nothing; nothing is lost."""
    strategy = mirrored(2)
    generator = numbers(9)
    iterator = iter(strategy.experimental_distribute_dataset(generator))
    seen = firsts([next(iterator)])
    time.sleep(0.05)  # Reads ahead.
    assert iterator.element_spec == (kd.ElementSpec((None, 1), "float32"),)
    seen += firsts([next(iterator)])
    iterator.close()
    seen += firsts(strategy.experimental_distribute_dataset(generator))
    assert seen == list(range(9))


def test_the_form_of_a_generator_that_has_given_no_batch_yet() -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow() -> Any:
        reading.set()
        go_on.wait(60)
        yield from numbers(3)

    dataset = mirrored(2).experimental_distribute_dataset(slow())
    seen: list[int] = []
    loop = threading.Thread(target=lambda: seen.extend(firsts(dataset)), daemon=True)
    loop.start()
    assert reading.wait(60)
    with pytest.raises(errors.InputError, match="is known only when one has been read"):
        _ = dataset.element_spec
    go_on.set()
    loop.join(60)
    assert seen == [0, 1, 2]
    assert dataset.element_spec == (kd.ElementSpec((None, 1), "float32"),)


def test_an_interrupted_close_can_be_repeated() -> None:
    """As by a second Ctrl-C, while it waits for the thread that reads."""
    strategy = mirrored(2)
    reading, go_on = threading.Event(), threading.Event()

    def slow() -> Any:
        for i, batch in enumerate(numbers(9)):
            if i == 3:
                reading.set()
                go_on.wait(60)
            yield batch

    def interrupt() -> None:
        assert reading.wait(60)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    generator = slow()
    iterator = iter(strategy.experimental_distribute_dataset(generator))
    seen = firsts(next(iterator) for _ in range(2))
    assert reading.wait(60)  # One batch is ready, and the next one is being read.
    signals = threading.Thread(target=interrupt)
    # A process that was started in the background may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            iterator.close()
        signals.join()
    finally:
        signal.signal(signal.SIGINT, before)
    go_on.set()
    iterator.close()
    seen += firsts(strategy.experimental_distribute_dataset(generator))
    assert seen == list(range(9))


@pytest.mark.parametrize("mode", kd.InputReplicationMode)
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [5, 7, 8, 9])
def test_generators_in_rounds_go_on(count: int, taken: int, mode: Any) -> None:
    """Consecutive batches go to consecutive replicas, and the last round may be short."""
    strategy = mirrored(2)
    streams = [numbers(count), numbers(3)]
    left = [0] if mode is kd.InputReplicationMode.PER_WORKER else [0, 1]
    calls = iter(left * 2)

    def made(context: Any) -> Any:
        return streams[next(calls)]

    def values_of(element: Any) -> list[tuple[int, int]]:
        numbered = enumerate(element[0].values)
        return [
            (replica, int(value[0, 0]))
            for replica, value in numbered
            if np.asarray(value).shape[0]
        ]

    options = kd.InputOptions(
        experimental_replication_mode=mode, experimental_per_replica_buffer_size=3
    )
    dataset = strategy.distribute_datasets_from_function(made, options)
    iterator = iter(dataset)
    seen = [values_of(next(iterator)) for _ in range(taken)]
    time.sleep(0.05)  # Reads ahead, to the end and beyond.
    iterator.close()
    seen += [values_of(element) for element in dataset]
    assert not list(dataset)
    if mode is kd.InputReplicationMode.PER_WORKER:
        flat = [value for step in seen for _, value in step]
        assert flat == list(range(count))
        assert all(
            [replica for replica, _ in step] == list(range(len(step))) for step in seen
        )
    else:
        assert seen == [[(0, i), *([(1, i)] if i < 3 else [])] for i in range(count)]


def test_an_empty_generator_has_no_elements() -> None:
    dataset = mirrored(2).experimental_distribute_dataset(numbers(0))
    assert list(dataset) == []
    with pytest.raises(errors.InputError, match="is known only when one has been read"):
        _ = dataset.element_spec


@pytest.mark.parametrize("replicas", [None, 2])
def test_an_array_dataset_has_to_be_distributed_first(replicas: int | None) -> None:
    strategy = mirrored(replicas) if replicas else kd.get_strategy()
    with strategy.scope():
        model = make()
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(
            errors.InputError,
            match=r"(?s)arrays themselves.*ArrayDataset of 45 rows.*"
            r"strategy\.experimental_distribute_dataset\(dataset\)",
        ):
            call(kd.ArrayDataset((X, Y), 8), verbose=0)

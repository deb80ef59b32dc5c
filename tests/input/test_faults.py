"""What a broken pipeline does: each fault comes out where the user called, and nothing
hangs.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from typing import Any

import jax
import keras
import numpy as np
import pytest
import scipy.sparse

import keras_distribute as kd
from keras_distribute import errors
from tests.support import dense_model, mirrored

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


@pytest.fixture(params=[0, 2], ids=["read when due", "read ahead"])
def ahead(request: Any) -> Any:
    before = kd.config.prefetch_steps()
    kd.config.set_prefetch_steps(request.param)
    yield request.param
    kd.config.set_prefetch_steps(before)
    assert not [
        t
        for t in threading.enumerate()
        if t.name == "keras_distribute input" and t.is_alive()
    ]


def model() -> Any:
    return dense_model(mirrored(2), 3)


def distributed(dataset: Any, ahead: int) -> Any:
    options = kd.InputOptions(experimental_per_replica_buffer_size=ahead)
    return mirrored(2).experimental_distribute_dataset(dataset, options)


def the_users_own_function(index: int) -> Any:
    raise LookupError(f"no file for batch {index}")


class Broken(keras.utils.PyDataset):
    """Raises at one batch."""

    num_batches = 9

    def __init__(self, at: int, **options: Any) -> None:
        super().__init__(**options)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        return the_users_own_function(index) if index == self.at else (X, Y)


def broken_generator(at: int) -> Any:
    for index in range(9):
        yield the_users_own_function(index) if index == at else (X, Y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize(
    "make", [Broken, broken_generator, lambda at: Broken(at, workers=2)]
)
def test_an_exception_of_the_pipeline_in_fit(make: Any, at: int, ahead: int) -> None:
    trained = model()
    with pytest.raises(LookupError, match=f"no file for batch {at}") as raised:
        trained.fit(make(at), shuffle=False, verbose=0)
    assert "the_users_own_function" in "".join(traceback.format_exception(raised.value))
    assert int(trained.optimizer.iterations) == at, (
        "the batches before it were trained on"
    )
    trained.fit(X, Y, verbose=0)
    assert int(trained.optimizer.iterations) == at + 1


@pytest.mark.parametrize("make", [Broken, broken_generator])
def test_an_exception_of_the_pipeline_in_a_loop(make: Any, ahead: int) -> None:
    iterator, seen = iter(distributed(make(4), ahead)), 0
    with pytest.raises(LookupError, match="no file for batch 4") as raised:
        for _ in iterator:
            seen += 1
    assert seen == 4
    assert "the_users_own_function" in "".join(traceback.format_exception(raised.value))
    assert next(iterator, "the end") == "the end"


def test_an_exception_of_tf_data(ahead: int) -> None:
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.range(20).map(
        lambda i: tf.debugging.check_numerics(
            1.0 / (10.0 - tf.cast(i, tf.float32)), "bad"
        )
    )
    iterator = iter(distributed(dataset.batch(4), ahead))
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
        list(iterator)
    assert list(iterator) == []
    whole = list(distributed(dataset.ignore_errors().batch(4), ahead))
    assert sum(part.shape[0] for each in whole for part in each.values) == 19


@pytest.mark.parametrize(
    "second",
    [(X,), {"x": X, "y": Y}, ((X, X), Y)],
    ids=["fewer parts", "a dict", "another nesting"],
)
def test_another_structure_in_a_loop(second: Any, ahead: int) -> None:
    def batches() -> Any:
        yield X, Y
        yield X, Y
        yield second

    iterator = iter(distributed(batches(), ahead))
    next(iterator), next(iterator)
    with pytest.raises(
        errors.InputError, match="The elements of a dataset have one structure"
    ) as raised:
        next(iterator)
    assert "after PyTreeDef((*, *))" in str(
        raised.value
    ) and "Fix: yield the same structure" in str(raised.value)


def test_another_structure_in_fit_means_what_it_means_on_one_device(ahead: int) -> None:
    def batches() -> Any:
        yield X, Y
        yield X, Y
        yield X, Y, np.full(8, 2.0, np.float32)

    keras.utils.set_random_seed(0)
    ours = model()
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.set_weights(ours.get_weights())
    ours.fit(batches(), verbose=0)
    plain.fit(batches(), verbose=0)
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_arrays_of_different_lengths_in_one_batch(ahead: int) -> None:
    def batches() -> Any:
        for _ in range(3):
            yield X, Y[:5]

    with pytest.raises(
        errors.InputError, match="The arrays of a batch have different numbers of rows"
    ) as raised:
        list(distributed(batches(), ahead))
    assert "(8, 3), (5, 1)" in str(raised.value)


def test_arrays_of_different_lengths_in_the_batch_of_one_replica(ahead: int) -> None:
    def batches() -> Any:
        yield X, Y
        yield X, Y[:5]

    options = kd.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = mirrored(2).distribute_datasets_from_function(
        lambda context: batches(), options
    )
    with pytest.raises(
        errors.InputError, match="The arrays of a batch have different numbers of rows"
    ) as raised:
        list(dataset)
    assert "(8, 3), (5, 1)" in str(raised.value)


def test_texts_of_torch_are_rows(ahead: int) -> None:
    import torch.utils.data

    rows = [{"x": np.float32(i), "name": f"row {i}"} for i in range(7)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    batches = list(distributed(loader, ahead))
    found = [
        [(float(x), str(name)) for x, name in zip(*parts, strict=True)]
        for batch in batches
        for parts in zip(batch["x"].values, batch["name"].values, strict=True)
    ]
    assert [len(part) for part in found] == [2, 2, 2, 1]
    rows_found = list(itertools.chain.from_iterable(found))
    assert rows_found == [(float(i), f"row {i}") for i in range(7)]


def test_an_empty_batch(ahead: int) -> None:
    def batches() -> Any:
        yield X, Y
        yield X[:0], Y[:0]
        yield X, Y
        yield X[:1], Y[:1]

    elements = list(distributed(batches(), ahead))
    assert [[len(v) for v in x.values] for x, _ in elements] == [
        [4, 4],
        [0, 0],
        [4, 4],
        [1, 0],
    ]
    trained = model()
    with pytest.raises(errors.InputError, match="A batch without rows has no loss"):
        trained.fit(batches(), verbose=0)
    assert int(trained.optimizer.iterations) == 1
    with pytest.raises(errors.InputError, match="A batch without rows has no loss"):
        trained.evaluate(batches(), verbose=0)


class _AddSums(keras.layers.Layer):
    """Adds the sums of other rows, of which there may be none, to each row."""

    def call(self, rows: Any, others: Any) -> Any:
        return rows + keras.ops.sum(others, 0, keepdims=True)

    def compute_output_shape(self, rows_shape: Any, others_shape: Any) -> Any:
        return rows_shape


def test_an_empty_array_beside_others() -> None:
    """A graph without edges, say, is trained on as by plain Keras."""

    def batches() -> Any:
        for others in (2, 0, 3):
            yield (X, np.ones((others, 3), "float32")), Y

    def trained() -> Any:
        inputs = [keras.Input((3,)), keras.Input((3,))]
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(_AddSums()(*inputs))
        ours = keras.Model(inputs, outputs)
        ours.compile("sgd", "mse")
        ours.fit(batches(), verbose=0)
        return ours.get_weights(), ours.evaluate(batches(), verbose=0)

    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        found = trained()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(trained()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_sparse_batch_of_zeros() -> None:
    """It has rows, of which nothing is stored."""
    table = scipy.sparse.csr_matrix(np.diag([1.0, 2.0, 0.0, 0.0]).astype("float32"))
    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ours = keras.Sequential(
            [keras.Input((4,), sparse=True), keras.layers.Dense(1, use_bias=False)]
        )
        ours.compile("sgd", "mse")
    ours.fit(table, np.ones((4, 1)), batch_size=2, shuffle=False, verbose=0)
    assert int(ours.optimizer.iterations) == 2


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_an_empty_batch_of_a_prediction(steps: int, options: Any, ahead: int) -> None:
    """Whose rows are those of the others, as of plain Keras."""

    def batches() -> Any:
        for rows in (3, 0, 2, 0):
            yield (X[:rows] * np.arange(rows)[:, None],)

    with kd.MirroredStrategy(["cpu:0", "cpu:1"], **options).scope():
        ours = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ours.compile(steps_per_execution=steps)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.set_weights(ours.get_weights())
    found = ours.predict(batches(), verbose=0)
    np.testing.assert_allclose(found, plain.predict(batches(), verbose=0), rtol=1e-6)
    assert found.shape == (5, 1)


def test_data_that_ends_early(ahead: int) -> None:
    def batches() -> Any:
        for _ in range(4):
            yield X, Y

    trained = model()
    with pytest.warns(UserWarning, match="ran out of data"):
        trained.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0)
    assert int(trained.optimizer.iterations) == 4


def test_data_that_never_ends(ahead: int) -> None:
    read = []

    def batches() -> Any:
        while True:
            read.append(len(read))
            yield X, Y

    trained = model()
    trained.fit(
        batches(),
        steps_per_epoch=4,
        epochs=2,
        validation_data=batches(),
        validation_steps=2,
        verbose=0,
    )
    assert int(trained.optimizer.iterations) == 8
    iterator = iter(distributed(batches(), ahead))
    assert len([next(iterator) for _ in range(5)]) == 5
    iterator.close()
    assert next(iterator, None) is None


def test_no_data(ahead: int) -> None:
    assert list(distributed(kd.ArrayDataset(X[:0], 4), ahead)) == []
    iterator = iter(distributed(kd.ArrayDataset(X[:0], 4), ahead))
    with pytest.raises(
        errors.OutOfRangeError, match="The dataset has no more elements"
    ):
        iterator.get_next()
    optional = iterator.get_next_as_optional()
    assert not optional.has_value()
    with pytest.raises(
        errors.ValueStructureError, match="The dataset had no more elements"
    ):
        optional.get_value()
    with pytest.raises(
        errors.ValueStructureError, match="The data has no batch|nothing to train"
    ):
        model().fit(distributed(kd.ArrayDataset((X[:0], Y[:0]), 4), ahead), verbose=0)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (lambda: X, "Arrays do not say how many rows a batch has"),
        (lambda: (X, Y), "Arrays do not say how many rows a batch has"),
        (lambda: 5, "This cannot be distributed as a dataset"),
        (lambda: "data", "This cannot be distributed as a dataset"),
        (lambda: [1, 2], "This cannot be distributed as a dataset"),
        (lambda: lambda: X, "This cannot be distributed as a dataset"),
        (lambda: None, "This cannot be distributed as a dataset"),
    ],
)
def test_what_is_no_dataset(dataset: Any, text: str) -> None:
    with pytest.raises(errors.InputError, match=text) as raised:
        distributed(dataset(), 2)
    assert "kd.ArrayDataset((x, y), batch_size=64)" in str(raised.value)


def test_a_dataset_that_tensorflow_has_distributed() -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    theirs = tf.distribute.get_strategy().experimental_distribute_dataset(data)
    assert isinstance(theirs, tf.data.Dataset)  # By the default strategy.
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    for theirs in (
        strategy.experimental_distribute_dataset(data),
        strategy.distribute_datasets_from_function(lambda _: data),
    ):
        with pytest.raises(errors.InputError, match="Received: a DistributedDataset"):
            model().fit(theirs, verbose=0)


def test_a_distributed_dataset_is_not_distributed_twice() -> None:
    dataset = distributed(kd.ArrayDataset(X, 4), 2)
    with pytest.raises(errors.InputError, match="This dataset is distributed already"):
        distributed(dataset, 2)
    with pytest.raises(
        errors.InputError, match="One dataset has one pipeline in each process"
    ):
        kd.MirroredStrategy(["cpu:0"]).experimental_distribute_dataset(
            kd.ArrayDataset(X, 4),
            kd.InputOptions(
                experimental_replication_mode=kd.InputReplicationMode.PER_REPLICA
            ),
        )


class Table:
    """Columns like those of pandas' `DataFrame`, which has no dtype of its own."""

    def __init__(self, **columns: Any) -> None:
        self.columns = np.stack([*columns.values()], axis=1)
        self.shape = self.columns.shape
        self.dtypes = [column.dtype for column in columns.values()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.columns, dtype)


def test_a_table_is_an_array() -> None:
    table = Table(a=np.arange(4), b=np.arange(4.0) / 2)
    [batch] = kd.ArrayDataset((table, table.columns[:, 0]), 4)
    np.testing.assert_array_equal(batch[0], [[0, 0], [1, 0.5], [2, 1], [3, 1.5]])


WRONG = [
    {"batch_size": 0},
    {"batch_size": 2.0},
    {"arrays": (X, Y[:3])},
    {"arrays": ()},
    {"arrays": np.array(["a", "b"])},
    {"arrays": np.array(["2026-01-01", "2026-01-02"], "datetime64[D]")},
    {"arrays": Table(a=np.arange(2.0), b=np.array(["a", "b"], object))},
]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_array_dataset(arguments: Any) -> None:
    with pytest.raises(errors.InputError, match="Fix:"):
        kd.ArrayDataset(**{"arrays": X, "batch_size": 4, **arguments})


def test_inside_run_there_is_no_dataset() -> None:
    strategy = mirrored(2)

    def step() -> Any:
        return strategy.experimental_distribute_dataset(kd.ArrayDataset(X, 4))

    with pytest.raises(errors.ContextError, match="experimental_distribute_dataset"):
        strategy.run(step)


def test_a_generator_of_several_processes_needs_a_word() -> None:
    from keras_distribute.input import sharing

    def share(policy: Any) -> Any:
        mesh = kd.MirroredStrategy(["cpu:0"]).replica_mesh
        options = kd.InputOptions(auto_shard_policy=policy)
        return sharing.distribute(
            broken_generator(-1), mesh, kd.InputContext(2, 1, 2), options
        )

    with pytest.raises(
        errors.InputError, match="Several processes cannot share a generator"
    ):
        share(None)
    assert "keeps its rows of each batch (DATA)" in repr(share(kd.AutoShardPolicy.DATA))
    assert "reads all of its own data (OFF)" in repr(share(kd.AutoShardPolicy.OFF))
    with pytest.raises(errors.InputError, match="FILE is for tf.data pipelines"):
        share(kd.AutoShardPolicy.FILE)


def test_several_threads_share_an_iterator(ahead: int) -> None:
    """Each element goes to one of them, and all of them end."""
    iterator = iter(distributed(kd.ArrayDataset(np.arange(40), 2), ahead))
    seen: list[list[int]] = [[], [], []]

    def take(into: list[int]) -> None:
        into.extend(int(element.values[0][0]) for element in iterator)

    threads = [
        threading.Thread(target=take, args=(into,), daemon=True) for into in seen
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(itertools.chain(*seen)) == list(range(0, 40, 2))


def test_closing_wakes_a_loop_that_waits() -> None:
    gate, waiting, taken = threading.Event(), threading.Event(), threading.Event()

    def slow() -> Any:
        yield (X,)
        waiting.set()
        gate.wait(60)
        yield (X,)

    iterator = iter(distributed(slow(), 2))
    seen: list[int] = []

    def take() -> None:
        for _ in iterator:
            seen.append(1)
            taken.set()

    loop = threading.Thread(target=take, daemon=True)
    loop.start()
    assert waiting.wait(60) and taken.wait(60)
    closing = threading.Thread(target=iterator.close, daemon=True)
    closing.start()
    loop.join(20)
    ended = not loop.is_alive()
    gate.set()
    closing.join(60)
    assert ended and not closing.is_alive() and seen == [1]


@pytest.mark.parametrize("kind", ["generator", "torch", "arrays"])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_off_reads_all_of_a_process(kind: str, taken: int) -> None:
    """Two replicas of two processes: each cuts its own data, also without positions."""
    import torch.utils.data

    from keras_distribute.input import sharing

    x = np.arange(24, dtype=np.float32)[:, None]
    made: dict[str, Any] = {
        "generator": ((x[i : i + 8],) for i in range(0, 24, 8)),
        "torch": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.from_numpy(x)), 8
        ),
        "arrays": kd.ArrayDataset((x,), 8),
    }
    options = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF)
    mesh = mirrored(2).replica_mesh
    dataset = sharing.distribute(made[kind], mesh, kd.InputContext(2, 1, 4), options)

    def rows(element: Any) -> list[float]:
        return (
            np.concatenate([np.asarray(value) for value in element[0].values])
            .ravel()
            .tolist()
        )

    iterator = iter(dataset)
    seen = [row for _ in range(taken) for row in rows(next(iterator))]
    assert seen == list(range(len(seen)))
    iterator.close()
    rest = [row for element in dataset for row in rows(element)]
    # What was read for nobody comes again; the batch that was used in part does not.
    if kind == "generator":
        assert rest == list(range(-(-len(seen) // 8) * 8, 24))
    else:
        assert rest == list(range(24))


def unseeded(kind: str) -> Any:
    import tensorflow as tf
    import torch.utils.data

    numbers = tf.data.Dataset.range(12)
    return {
        "arrays": lambda: kd.ArrayDataset(X, 4, shuffle=True),
        "torch": lambda: torch.utils.data.DataLoader(list(range(12)), 4, shuffle=True),
        "shuffle": lambda: numbers.shuffle(12).batch(4),
        "shuffle once": lambda: numbers.shuffle(
            12, reshuffle_each_iteration=False
        ).batch(4),
        "shuffle in a function": lambda: numbers.batch(4).flat_map(
            lambda x: tf.data.Dataset.from_tensors(x).shuffle(2)
        ),
        "random": lambda: tf.data.Dataset.random().take(12).batch(4),
        "sampled": lambda: tf.data.Dataset.sample_from_datasets(
            [numbers, numbers]
        ).batch(4),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "arrays",
        "torch",
        "shuffle",
        "shuffle once",
        "shuffle in a function",
        "random",
        "sampled",
    ],
)
def test_processes_must_shuffle_alike(kind: str) -> None:
    import tensorflow as tf

    from keras_distribute.input import sharing

    # As in a program that has set none; keras.utils.set_random_seed sets TensorFlow's, too.
    tf.random.set_seed(None)

    mesh = kd.MirroredStrategy(["cpu:0"]).replica_mesh
    with pytest.raises(
        errors.InputError,
        match=r"(?s)Each process would shuffle.*in another order.*Fix:.*7",
    ):
        sharing.distribute(unseeded(kind), mesh, kd.InputContext(2, 1, 2), None)
    assert (
        sharing.distribute(unseeded(kind), mesh, kd.InputContext(1, 0, 1), None)
        is not None
    )


def test_a_seed_lets_processes_shuffle_alike() -> None:
    import tensorflow as tf

    from keras_distribute.input import sharing

    mesh = kd.MirroredStrategy(["cpu:0"]).replica_mesh
    numbers = tf.data.Dataset.range(12)
    for dataset in (
        numbers.shuffle(12, seed=0).batch(4),
        numbers.shuffle(12, seed=3).repeat(2).batch(4),
        tf.data.Dataset.sample_from_datasets([numbers, numbers], seed=2).batch(4),
    ):
        parts = [
            sharing.distribute(dataset, mesh, kd.InputContext(2, worker, 2), None)
            for worker in (0, 1)
        ]
        seen = [[np.asarray(part).tolist() for part in each] for each in parts]
        assert [len(a + b) for a, b in zip(*seen, strict=True)] == [
            len(batch) for batch in dataset
        ]


@pytest.mark.parametrize(("size", "fix"), [(1, "use 2, or"), (3, "use 2 or 4, or")])
def test_a_global_batch_that_does_not_divide_names_those_that_do(
    size: int, fix: str
) -> None:
    with pytest.raises(errors.ValueStructureError, match=f"Fix: {fix} let"):
        kd.InputContext(1, 0, 2).get_per_replica_batch_size(size)

"""The readers of docs/guide/datasets.md in two processes: each row once, and from a
position with the very next row. Each library is a test, skipped where it is absent.
"""

import io
import json
import pathlib
import re
import tarfile

import numpy as np
import pytest

import keras_distribute as kd

pytestmark = pytest.mark.timeout(240)
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/datasets.md").read_text()
# Of the files one is the longest; no batch is full twice.
ROWS, BATCH, FILES = (53, 8, 4)
SIZES = (17, 13, 12, 11)
READERS = {
    "hf_rows": ("datasets", "grain"),
    "hf_stream": ("datasets", "grain", "pyarrow"),
    "array_record": ("array_record", "grain"),
    "parquet_arrays": ("pyarrow",),
    "parquet_stream": ("pyarrow", "grain"),
    "tfrecords": ("tensorflow",),
    "webdataset": ("webdataset",),
}
OWN = {"hf_stream", "parquet_stream", "webdataset"}
SHUFFLED = {"hf_rows", "array_record", "parquet_arrays"}


def reader_of_the_page(name):
    found = re.search(rf'^```py title="{name}"\n(.*?)^```', PAGE, re.M | re.S)
    assert found is not None, name
    names = {"kd": kd, "np": np, "json": json}
    exec(found[1], names)
    return names[name]


def parts():
    """The rows of each file: `x` begins with the number of the row."""
    first = 0
    for size in SIZES:
        ids = np.arange(first, first + size, dtype="float32")
        yield np.stack([ids, -ids], 1), np.stack([2 * ids, ids * 0], 1)
        first += size


def parquet(folder):
    import pyarrow
    import pyarrow.parquet

    for number, (x, y) in enumerate(parts()):
        table = pyarrow.table({"x": x.tolist(), "y": y.tolist()})
        pyarrow.parquet.write_table(table, folder / f"train-{number}.parquet")


def hf_rows(folder):
    import datasets

    x, y = (np.concatenate(arrays).tolist() for arrays in zip(*parts(), strict=True))
    datasets.Dataset.from_dict({"x": x, "y": y}).save_to_disk(folder / "saved")


def array_record(folder):
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, arrays in enumerate(parts()):
        path = folder / f"train.array_record-{number:05}-of-{FILES:05}"
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for x, y in zip(*arrays, strict=True):
            writer.write(np.stack([x, y]).tobytes())
        writer.close()


def tfrecords(folder):
    import tensorflow as tf

    def floats(values):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    for number, arrays in enumerate(parts()):
        path = folder / f"rows-train.tfrecord-{number:05}-of-{FILES:05}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for x, y in zip(*arrays, strict=True):
                feature = {"x": floats(x), "y": floats(y)}
                features = tf.train.Features(feature=feature)
                writer.write(tf.train.Example(features=features).SerializeToString())


def webdataset(folder):
    for number, arrays in enumerate(parts()):
        with tarfile.open(folder / f"train-{number}.tar", "w") as tar:
            for index, (x, y) in enumerate(zip(*arrays, strict=True)):
                for name, value in (("x", x), ("y", y)):
                    data = io.BytesIO()
                    np.save(data, value)
                    entry = tarfile.TarInfo(f"{index:04}.{name}.npy")
                    entry.size = data.tell()
                    data.seek(0)
                    tar.addfile(entry, data)


WRITERS = {
    "hf_rows": hf_rows,
    "hf_stream": parquet,
    "array_record": array_record,
    "parquet_arrays": parquet,
    "parquet_stream": parquet,
    "tfrecords": tfrecords,
    "webdataset": webdataset,
}


def in_a_process(name, reader_name, folder):
    """The rows of a pass, those of `fit`, and those after a position."""
    import keras

    strategy = kd.MultiWorkerMirroredStrategy()
    reader = reader_of_the_page(name)
    if reader_name == "saved":
        import datasets

        data = datasets.load_from_disk(f"{folder}/saved")
    else:
        data = sorted(str(path) for path in pathlib.Path(folder).iterdir())
    policy = kd.AutoShardPolicy.OFF if name in OWN else kd.AutoShardPolicy.AUTO
    options = kd.InputOptions(auto_shard_policy=policy)

    def distributed(**seed):
        return strategy.experimental_distribute_dataset(
            reader(data, BATCH, **seed), options
        )

    def rows(batches):
        for batch in batches:
            yield [int(row[0]) for row in strategy.gather(batch[0], axis=0)]

    said = {"pass": list(rows(distributed()))}
    if name in SHUFFLED:
        said["shuffled"] = list(rows(distributed(seed=3)))

    class Noted(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.sums = self.add_weight(
                shape=(2,), initializer="zeros", trainable=False
            )

        def call(self, x):
            self.sums.assign_add(
                keras.ops.stack([keras.ops.sum(x[:, 0]), 1.0 * keras.ops.shape(x)[0]])
            )
            return x

    with strategy.scope():
        layer = Noted()
        model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    as_it_is = name not in OWN | {"parquet_arrays"}
    given = reader(data, BATCH) if as_it_is else distributed()
    model.fit(given, verbose=0)
    said["fit"] = np.asarray(layer.sums).tolist()
    iterator = iter(distributed())
    before = [next(rows([next(iterator)])) for _ in range(3)]
    try:
        state = iterator.get_state()
    except kd.errors.InputError as error:
        said["position"] = str(error)
        return said
    after = list(rows(iterator))
    again = iter(distributed())
    again.set_state(state)
    said["position"] = [before + after, list(rows(again)) == after]
    return said


def joined(batches):
    return [row for batch in batches for row in batch]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", READERS)
def test_each_row_comes_once_and_the_next_one_after_a_position(name, tmp_path):
    for library in READERS[name]:
        pytest.importorskip(library, reason=f"needs pip install {library}")
    WRITERS[name](tmp_path)
    kind = "saved" if name == "hf_rows" else "files"
    first, second = kd.testing.run_in_processes(
        in_a_process, 2, name, kind, str(tmp_path), cpu_devices=1, timeout=200
    )
    assert first == second
    everyone = list(range(ROWS))
    assert sorted(joined(first["pass"])) == everyone
    if name not in OWN | {"tfrecords"}:
        sizes = [len(batch) for batch in first["pass"]]
        assert joined(first["pass"]) == everyone and sizes[:-1] == [BATCH] * 6
    if name in SHUFFLED:
        shuffled = joined(first["shuffled"])
        assert shuffled != everyone and sorted(shuffled) == everyone
    assert first["fit"] == [sum(everyone), ROWS]
    if name == "webdataset":
        assert "cannot be resumed" in first["position"]
        return
    batches, exactly = first["position"]
    assert exactly and batches == first["pass"]

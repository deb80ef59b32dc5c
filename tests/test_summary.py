"""`Strategy.summary`: its numbers against the arrays on the devices, and every form in
which it is shown.
"""

import io
import xml.etree.ElementTree as ElementTree

import jax
import keras
import numpy as np
import pytest
from rich.console import Console

import keras_distribute as kd
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.summary import facts, picture, tables
from tests.support import mirrored


def built(strategy):
    """A model with everything that a step carries; no step has run."""
    with strategy.scope():
        layers = [
            keras.layers.Dense(16, name="wide"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3, name="narrow"),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers], name="model")
        model.compile(keras.optimizers.Adam(name="adam"), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def arrays_of(model):
    groups = (model.weights, model.optimizer.variables, model.metrics_variables)
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    return [variable.stored for group in (*groups, seeds) for variable in group]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("divided", [False, True])
def test_bytes_are_those_of_the_arrays_on_each_device(replicas, divided):
    strategy = mirrored(replicas, shard_optimizer_state=divided)
    model = built(strategy)
    summary = strategy.summary(model)
    arrays = arrays_of(model)
    for device, claimed in zip(
        strategy.replica_mesh.devices, summary.bytes_on_each, strict=True
    ):
        shards = [
            shard.data
            for array in arrays
            for shard in array.addressable_shards
            if shard.device == device
        ]
        assert claimed == sum(shard.nbytes for shard in shards)
    assert len(summary.variables) == len(arrays)
    values = [
        np.asarray(v.value)
        for v in (*model.weights, *model.optimizer.variables, *model.metrics_variables)
    ]
    seeds = 8  # One seed generator of two 32-bit numbers.
    assert (
        sum(v.num_bytes for v in summary.variables)
        == sum(value.nbytes for value in values) + seeds
    )


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_kinds_and_groups(replicas):
    strategy = mirrored(replicas, shard_optimizer_state=True)
    model = built(strategy)
    kinds = {
        v.path.split("/", 1)[-1]: (v.group, v.kind)
        for v in strategy.summary(model).variables
    }
    assert kinds["wide/kernel"] == ("weights", "mirrored")
    assert kinds["norm/moving_mean"] == ("state", "sync-on-read (mean)")
    assert kinds["iteration"] == ("optimizer", "mirrored")
    assert kinds["total"] == ("metrics", "sync-on-read (sum)")
    slots = [
        v
        for v in strategy.summary(model).variables
        if "momentum" in v.path and "wide_kernel" in v.path
    ]
    assert {(v.group, v.kind) for v in slots} == {
        ("optimizer", "divided" if replicas > 1 else "mirrored")
    }
    assert slots[0].bytes_on == (8 * 16 * 4 // replicas,) * replicas


def test_devices_and_rows_of_the_batch():
    summary = mirrored(4).summary(batch_size=70)
    assert [(d.name, d.replica, d.process) for d in summary.devices] == [
        (f"cpu:{i}", i, 0) for i in range(4)
    ]
    assert summary.rows == (18, 18, 18, 16) and summary.num_replicas == 4
    assert "A global batch of 70 rows: 18, 18, 18, 16." in str(summary)
    assert "A global batch of 64 rows: 16 on each." in str(
        mirrored(4).summary(batch_size=64)
    )
    assert summary.bytes_on_each == (0, 0, 0, 0) and summary.variables == ()


def test_rows_are_those_that_a_loop_gets():
    strategy = mirrored(8)
    batch = next(
        iter(
            strategy.experimental_distribute_dataset(
                kd.ArrayDataset(np.arange(13), batch_size=13)
            )
        )
    )
    assert strategy.summary(batch_size=13).rows == tuple(
        len(part) for part in batch.values
    )


def test_the_parts_of_a_loop():
    strategy = mirrored(2)
    with strategy.scope():
        layer, optimizer, metric = (
            keras.layers.Dense(2),
            keras.optimizers.SGD(name="sgd"),
            keras.metrics.Mean(),
        )
        layer.build((None, 3))
        counter = keras.Variable(0, trainable=False, dtype="int32")
    summary = strategy.summary(layer, optimizer, metric, counter, layer.kernel)
    assert [v.group for v in summary.variables] == ["weights"] * 2 + ["state"] + [
        "optimizer"
    ] * 2 + ["metrics"] * 2
    assert "sgd is not built yet: it makes variables when it is used first." in str(
        summary
    )


def test_variables_from_outside_the_scope_are_named():
    optimizer = keras.optimizers.SGD(name="outside")
    summary = mirrored(4).summary(optimizer)
    assert {v.kind for v in summary.variables} == {"not of this strategy"}
    assert summary.bytes_on_each == (8, 0, 0, 0)
    assert (
        "2 variables not of this strategy: outside/iteration, outside/learning_rate. Create what a step uses inside"
        in str(summary)
    )
    with mirrored(2).scope():
        other = keras.Variable(np.zeros(3), name="of_two")
    assert "1 variable not of this strategy: of_two." in str(mirrored(4).summary(other))


def test_the_default_strategy_has_keras_own_variables():
    summary = kd.get_strategy().summary(keras.optimizers.SGD())
    assert {v.kind for v in summary.variables} == {"Keras's own"}
    assert summary.num_replicas == 1 and len(summary.notes) == 1


def test_in_a_callback_it_sees_the_state_of_the_moment():
    strategy, seen = mirrored(2), []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(strategy.summary(self.model).bytes_on_each)

    model = built(strategy)
    model.fit(
        np.ones((12, 8)),
        np.ones((12, 3)),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[Look()],
    )
    assert seen[1] == strategy.summary(model).bytes_on_each and len(set(seen[1])) == 1


def test_text_lists_the_largest_variables_of_many():
    strategy = mirrored(2)
    text = strategy.summary(built(strategy)).text(max_variables=2)
    assert (
        "The 2 largest of " in text
        and "model/wide/kernel" in text
        and "adam/learning_rate" not in text
    )
    whole = strategy.summary(built(strategy)).text(max_variables=None)
    assert "Each variable" in whole and "adam/learning_rate" in whole


def test_a_terminal_gets_the_same_words():
    strategy = mirrored(2)
    summary = strategy.summary(built(strategy), batch_size=8)
    console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    console.print(summary)
    shown = console.export_text()
    for word in (
        "MirroredStrategy: 2 replicas",
        "4 on each",
        "sync-on-read (mean)",
        "adam/learning_rate",
        "together",
    ):
        assert word in shown and word in str(summary)


def test_text_is_returned_in_a_notebook_too(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    strategy = mirrored(2)
    assert "model/wide/kernel" in strategy.summary(built(strategy)).text()


def test_a_notebook_gets_tables_and_a_picture():
    strategy = mirrored(8)
    with strategy.scope():
        odd = keras.Variable(np.zeros(3), name="a_and_b")
    page = ElementTree.fromstring(strategy.summary(odd, batch_size=13)._repr_html_())
    words = " ".join(page.itertext())
    assert "MirroredStrategy: 8 replicas" in words and "a_and_b" in words
    boxes = page.findall(".//{http://www.w3.org/2000/svg}rect")
    # A frame and its fill, for eight replicas, for the batch and the variable.
    assert len(boxes) == 2 * 8 * 2


def test_the_picture_of_many_devices_says_what_it_leaves_out():
    devices = [facts.DeviceFacts(f"tpu:{i}", "TPU v5", i, i // 4) for i in range(16)]
    drawn = picture.draw("MirroredStrategy", devices, (1,) * 16, ())
    assert (
        "replica 7" in drawn
        and "replica 8" not in drawn
        and "8 more devices are not drawn" in drawn
    )


def test_a_file_has_its_own_colours(tmp_path):
    mirrored(2).summary(batch_size=8).plot(tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert (
        root.get("fill") == "#1f2328"
        and root.find("{http://www.w3.org/2000/svg}rect").get("fill") == "#ffffff"
    )
    with pytest.raises(
        ValueStructureError,
        match=r"SVG file.\n  Received: plot\('a.png'\).\n  Fix: summary.plot",
    ):
        mirrored(2).summary().plot("a.png")


def test_memory_and_processes_are_shown_where_they_are_known():
    devices = [
        facts.DeviceFacts(
            "gpu:0", "H100", 0, 0, bytes_in_use=3 * 2**30, bytes_limit=80 * 2**30
        ),
        facts.DeviceFacts("gpu:1", "H100", 1, 1),
    ]
    table = tables.of_devices(devices, ())
    assert table.header == ("replica", "device", "model", "process", "memory in use")
    assert table.rows == (
        ("0", "gpu:0", "H100", "0", "3.00 GiB of 80.00 GiB"),
        ("1", "gpu:1", "H100", "1", ""),
    )


def test_memory_is_asked_of_own_devices_only():
    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 5, "bytes_limit": 7}

    assert facts._memory(Device(), True) == (5, 7)
    assert facts._memory(Device(), False) == (None, None)
    assert facts._memory(jax.local_devices()[0], True) == (None, None)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (15.75 * 2**30, "15.75 GiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_bytes_in_words(count, words):
    assert tables.bytes_in_words(count) == words


def test_what_has_no_variables_is_refused():
    with pytest.raises(
        StructureTypeError,
        match=r"things that have variables.\n  Received: 'model', a str.\n  Fix: strategy.summ",
    ):
        mirrored(2).summary("model")
    with pytest.raises(
        ValueStructureError, match=r"at least one row.\n  Received: batch_size=0."
    ):
        mirrored(2).summary(batch_size=0)

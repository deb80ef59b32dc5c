"""Checkpoints of tables that no process but the servers can hold: their rows travel in
blocks, and nobody has more of them than one block.
"""

import gc
import os
import pathlib

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.variables import Blocks, blocks, drawing

PARTS = kd.experimental.partitioners.FixedShardsPartitioner
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 503, (60, 3)).astype("int32")
Y = RANDOM.normal(size=(60, 1)).astype("float32")
MB = 10**6
EVERY_CASE = bool(os.environ.get("EVERY_CASE"))


@pytest.fixture
def small_blocks(monkeypatch):
    """What is large, and its blocks: of ten rows."""
    monkeypatch.setattr(drawing, "LARGE", 4000)
    monkeypatch.setattr(blocks, "_BYTES", 160)


def recommender(strategy=None):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else kd.get_strategy().scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(503, 4),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def values_of(model):
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


def assert_equal(model, expected):
    for ours, value in zip(values_of(model), expected, strict=True):
        np.testing.assert_array_equal(ours, value)


def trained(strategy):
    model = recommender(strategy)
    model.fit(IDS, Y, batch_size=5, verbose=0, shuffle=False)
    return model


def test_on_any_number_of_servers_and_none(make, small_blocks, tmp_path):
    """The table and its slots; also into a model that has never trained, which then
    goes on as the first one.
    """
    strategy = make(1, variable_partitioner=PARTS(2))
    model = trained(strategy)
    table = model.layers[0].embeddings
    path = kd.Checkpoint(model=model).save(tmp_path / "a")
    files = [tmp_path / "a-1" / "tables" / f"{i}.npy" for i in (0, 1)]
    saved = values_of(model)
    np.testing.assert_array_equal(np.load(files[0]), table.numpy())
    slot = next(v for v in model.optimizer.variables if v.shape == (503, 4))
    np.testing.assert_array_equal(np.load(files[1]), slot.numpy())
    model.fit(IDS, Y, batch_size=5, verbose=0, shuffle=False)
    after = values_of(model)
    kd.Checkpoint(model=model).restore(path)
    assert_equal(model, saved)
    model.fit(IDS, Y, batch_size=5, verbose=0, shuffle=False)
    assert_equal(model, after)
    strategy.close()
    for parts in (1, 3) if EVERY_CASE else (3,):
        strategy = make(1, variable_partitioner=PARTS(parts))
        model = recommender(strategy)
        kd.Checkpoint(model=model).restore(path)
        of_table, of_slot = (
            [
                (part.server, part.start)
                for part in strategy.cluster.served.place_of(v).parts
            ]
            for v in (model.layers[0].embeddings, model.optimizer.variables[2])
        )
        assert of_table == of_slot
        assert_equal(model, saved)
        model.fit(IDS, Y, batch_size=5, verbose=0, shuffle=False)
        for ours, value in zip(values_of(model), after, strict=True):
            np.testing.assert_allclose(ours, value, rtol=1e-5)
        strategy.close()
    plain = recommender()
    plain.optimizer.build(plain.trainable_variables)
    kd.Checkpoint(model=plain).restore(path)
    assert_equal(plain, saved)


def test_a_table_that_was_never_drawn(make, small_blocks, tmp_path):
    """It is drawn in blocks, as servers would; whole ones are restored in blocks."""
    strategy = make(1, variable_partitioner=PARTS(2))
    with strategy.scope():
        options = {"shape": (503, 4)}
        uniform = keras.Variable(keras.initializers.RandomUniform(seed=3), **options)
        ones = keras.Variable(keras.initializers.Ones(), dtype="bfloat16", **options)
        plain = keras.Variable(RANDOM.normal(size=(503, 4)))
    assert uniform.drawing and ones.drawing
    checkpoint = kd.Checkpoint(uniform=uniform, ones=ones, plain=plain)
    path = checkpoint.save(tmp_path / "a")
    assert uniform.drawing and ones.drawing
    files = sorted((tmp_path / "a-1" / "tables").iterdir())
    assert [np.load(file).dtype.name for file in files] == ["float32", "uint8"]
    saved = [each.numpy() for each in (uniform, ones, plain)]
    np.testing.assert_array_equal(np.load(files[0]), saved[0])
    for each in (uniform, ones, plain):
        each.assign(np.zeros((503, 4)))
    checkpoint.restore(path)
    for each, value in zip((uniform, ones, plain), saved, strict=True):
        np.testing.assert_array_equal(each.numpy(), value)


def test_a_save_is_of_one_moment(make, small_blocks, tmp_path):
    """Training goes on while the rest is written in the background."""
    strategy = make(1, variable_partitioner=PARTS(2))
    model = trained(strategy)
    manager = kd.CheckpointManager(
        kd.Checkpoint(model=model), tmp_path / "all", max_to_keep=2
    )
    saved = values_of(model)
    manager.save()
    model.fit(IDS, Y, batch_size=5, verbose=0)
    manager.restore()
    assert_equal(model, saved)


class Ends(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 8:
            raise KeyboardInterrupt


def test_a_fit_that_is_broken_off_goes_on(make, small_blocks, tmp_path):
    def fit(folder, *callbacks):
        strategy = make(1, variable_partitioner=PARTS(2))
        model = recommender(strategy)
        backup = kd.callbacks.BackupAndRestore(str(folder), save_freq=5)
        options = {"batch_size": 5, "verbose": 0, "shuffle": False, "epochs": 2}
        try:
            model.fit(IDS, Y, callbacks=[backup, *callbacks], **options)
            return values_of(model)
        finally:
            strategy.close()

    whole = fit(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "b", Ends())
    for ours, value in zip(fit(tmp_path / "b"), whole, strict=True):
        np.testing.assert_array_equal(ours, value)


def test_a_server_that_dies_in_a_save(own_cluster, small_blocks, tmp_path, monkeypatch):
    """Nothing is left of that save; the last one serves."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver, PARTS(2))
    model = trained(strategy)
    manager = kd.CheckpointManager(kd.Checkpoint(model=model), tmp_path / "all")
    manager.save()
    saved, read = values_of(model), Blocks.between

    def between(self, start, stop):
        for i, each in enumerate(read(self, start, stop)):
            if i == 20:
                own_cluster.kill("ps", 1)
            yield each

    with monkeypatch.context() as patched:
        patched.setattr(Blocks, "between", between)
        with pytest.raises(kd.errors.UnavailableError, match="ps:1"):
            manager.save()
    own_cluster.start("ps", 1)
    strategy.reconnect(30.0)
    assert manager.all_steps() == [0]
    assert not [p for p in (tmp_path / "all").iterdir() if "tmp" in p.name]
    manager.restore()
    assert_equal(model, saved)
    manager.save()
    manager.wait()
    assert manager.all_steps() == [0, 1]
    strategy.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_table_is_named(make, small_blocks, tmp_path, how):
    strategy = make(1)
    model = trained(strategy)
    path = kd.Checkpoint(model=model).save(tmp_path / "a")
    before = values_of(model)
    file = pathlib.Path(path) / "tables" / "0.npy"
    content = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    else:
        content[4000] ^= 1
        file.write_bytes(content if how == "flipped" else content[:-8])
    with pytest.raises(kd.errors.DamagedCheckpointError) as found:
        kd.Checkpoint(model=model).restore(path)
    assert "embeddings" in str(found.value)
    assert "0.npy" in str(found.value)
    assert_equal(model, before)


def peak(pid):
    """The largest memory since `forget`, in bytes."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget(pid):
    """Lets the peak begin with what the process has now; returns that."""
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_nobody_has_more_than_a_block(make, cluster, monkeypatch, tmp_path):
    """Each of two servers has a half of the table, and never more; the coordinator and
    the worker have none of it.
    """
    rows, spare = (5 * 10**6, 350 * MB) if EVERY_CASE else (15 * 10**5, 45 * MB)
    if not EVERY_CASE:
        monkeypatch.setattr(drawing, "LARGE", 2**26)
        monkeypatch.setattr(blocks, "_BYTES", 2**21)
    strategy = make(1, variable_partitioner=PARTS(2))
    with strategy.scope():
        table = keras.Variable(
            keras.initializers.RandomUniform(seed=3), shape=(rows, 64)
        )
    half = rows * 64 * 4 // 2
    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    ids = np.arange(0, rows, rows // 50)
    read = lambda ids: keras.ops.take(table, ids, axis=0)  # noqa: E731
    expected = coordinator.schedule(read, (ids,)).fetch()
    checkpoint = kd.Checkpoint(table=table)
    kd.Checkpoint(v=keras.Variable(0.0)).save(tmp_path / "b")  # Loads Orbax.
    tasks = cluster._tasks.items()
    pids = {name: task.workers[0].process.pid for name, task in tasks}
    gc.collect()
    before = {name: forget(pid) for name, pid in pids.items()}
    mine = forget(os.getpid())
    path = checkpoint.save(tmp_path / "a")
    checkpoint.restore(path)
    found = {name: peak(pid) for name, pid in pids.items()}
    assert peak(os.getpid()) - mine < spare
    for name, most in found.items():
        if name.startswith("ps"):
            assert before[name] > half
            assert most < 1.5 * half + 350 * MB
        assert most - before[name] < spare
    np.testing.assert_array_equal(coordinator.schedule(read, (ids,)).fetch(), expected)

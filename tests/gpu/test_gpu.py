"""On the GPUs of this machine, however many: the numbers of one GPU without a strategy,
and what only real GPUs have: kernels of cuDNN, host memory beside them, an allocator
that runs out.

    python -m pytest --noconftest tests/gpu

Without `--noconftest` the tests' devices are virtual ones of the CPU, and these are
skipped.
"""

import functools
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd
from keras_distribute.testing import ParameterServerCluster

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        jax.default_backend() != "gpu",
        reason="needs a GPU: python -m pytest --noconftest tests/gpu",
    ),
]
RANDOM = np.random.default_rng(0)
ROWS, BATCH = 40, 16  # A last batch of eight rows.
IMAGES = RANDOM.normal(size=(ROWS, 8, 8, 3)).astype("float32")
VECTORS = RANDOM.normal(size=(ROWS, 6)).astype("float32")
SERIES = RANDOM.normal(size=(ROWS, 12, 8)).astype("float32")
TOKENS = RANDOM.integers(0, 50, (ROWS, 64)).astype("int32")
LABELS = RANDOM.integers(0, 3, ROWS)
DATA = {"batch_size": BATCH, "verbose": 0}


@pytest.fixture(autouse=True)
def exact_products():
    """Without TF32, which rounds factors to ten bits."""
    with jax.default_matmul_precision("highest"):
        yield
    keras.mixed_precision.set_dtype_policy("float32")


def mlp():
    hidden = [layers.Dense(16, "relu"), layers.Dense(16, "relu")]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def recurrent():
    body = [
        layers.LSTM(16, return_sequences=True),
        layers.Bidirectional(layers.LSTM(8)),
    ]
    return keras.Sequential([keras.Input((12, 8)), *body, layers.Dense(3)])


def transformer():
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(50, 32)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 16)(x, x)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(3)(x))


MODELS = {
    "mlp": (mlp, VECTORS),
    "cnn": (cnn, IMAGES),
    "recurrent": (recurrent, SERIES),
    "transformer": (transformer, TOKENS),
}


def compiled(build, policy="float32", **options):
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy(policy)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def under(strategy, *args, **options):
    with strategy.scope():
        return compiled(*args, **options)


def trained(model, x):
    weights = np.linspace(0.5, 1.5, ROWS).astype("float32")
    told = model.fit(
        x, LABELS, sample_weight=weights, epochs=2, shuffle=False, **DATA
    ).history
    return {
        "losses": told["loss"],
        "evaluated": model.evaluate(x, LABELS, **DATA),
        "predicted": model.predict(x, **DATA),
        "weights": np.concatenate([np.ravel(w) for w in model.get_weights()]),
    }


@functools.cache
def plain(name, policy="float32"):
    build, x = MODELS[name]
    return trained(compiled(build, policy), x)


def assert_like(found, expected, atol=1e-4):
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.asarray(found[name], "float32"),
            np.asarray(value, "float32"),
            rtol=1e-4,
            atol=atol,
            err_msg=name,
        )


def test_the_devices_are_all_gpus():
    strategy = kd.MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.devices("gpu"))
    assert {d.platform for d in strategy.replica_mesh.devices} == {"gpu"}
    text = str(strategy.summary())
    assert "gpu:0" in text and "GiB" in text


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_one_gpu(name):
    build, x = MODELS[name]
    assert_like(trained(under(kd.MirroredStrategy(), build), x), plain(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_a_cpu(name):
    build, x = MODELS[name]
    on_cpu = trained(under(kd.OneDeviceStrategy("cpu:0"), build), x)
    assert_like(trained(under(kd.MirroredStrategy(), build), x), on_cpu, atol=1e-3)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", ["cnn", "transformer", "recurrent"])
def test_in_16_bits(name, policy):
    build, x = MODELS[name]
    found = trained(under(kd.MirroredStrategy(), build, policy), x)
    # JAX calls cuDNN's LSTM in 32 bits alone, and plain Keras 3.15 fails with it.
    expected = plain(name, "float32" if name == "recurrent" else policy)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0.05)
    assert np.isfinite(found["weights"]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"shard_optimizer_state": True},
        {"shard_variables": True, "min_shard_bytes": 1},
        {"communication_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_divided_state(options):
    strategy = kd.MirroredStrategy(**options)
    many = "communication_dtype" in options and strategy.num_replicas_in_sync > 1
    found = trained(under(strategy, mlp), VECTORS)
    assert_like(found, plain("mlp"), atol=0.02 if many else 1e-4)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_several_steps_in_a_program(name):
    build, x = MODELS[name]
    model = under(kd.MirroredStrategy(), build, steps_per_execution=3)
    assert_like(trained(model, x), plain(name))


def test_dropout_is_drawn_as_on_one_gpu():
    def build():
        body = [layers.Dense(64, "relu"), layers.Dropout(0.5), layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *body])

    expected = trained(compiled(build), VECTORS)
    assert_like(trained(under(kd.MirroredStrategy(), build), VECTORS), expected)


def test_own_loop():
    strategy = kd.MirroredStrategy()
    model = under(strategy, mlp)
    data = strategy.experimental_distribute_dataset(
        kd.ArrayDataset((VECTORS, LABELS), BATCH)
    )

    def step(element):
        x, y = element

        def loss_of():
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return kd.nn.compute_average_loss(losses, global_batch_size=BATCH)

        loss, grads = kd.value_and_grad(loss_of, model.trainable_variables)()
        model.optimizer.apply(grads, model.trainable_variables)
        return loss

    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=(element,)), axis=None))
        for _ in range(3)
        for element in data
    ]
    assert losses[-1] < losses[0]
    gathered = strategy.gather(strategy.run(lambda: ops.ones((2, 3))), axis=0)
    assert gathered.shape == (2 * strategy.num_replicas_in_sync, 3)


def test_saved_and_loaded(tmp_path):
    strategy = kd.MirroredStrategy()
    model = under(strategy, cnn)
    model.fit(IMAGES, LABELS, **DATA)
    model.save(tmp_path / "model.keras")
    expected = model.predict(IMAGES, **DATA)
    for scope in (strategy, kd.OneDeviceStrategy("cpu:0"), kd.get_strategy()):
        with scope.scope():
            loaded = keras.saving.load_model(tmp_path / "model.keras")
        found = loaded.predict(IMAGES, **DATA)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_goes_on(tmp_path):
    strategy = kd.MirroredStrategy()
    model = under(strategy, mlp)
    model.fit(VECTORS, LABELS, shuffle=False, **DATA)
    path = kd.Checkpoint(model=model).save(tmp_path / "at")
    expected = model.fit(VECTORS, LABELS, shuffle=False, **DATA).history["loss"]
    again = under(strategy, mlp)
    kd.Checkpoint(model=again).restore(path)
    found = again.fit(VECTORS, LABELS, shuffle=False, **DATA).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def wide():
    hidden = [layers.Dense(1024, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])


def in_use():
    """Bytes of the first GPU."""
    return jax.local_devices()[0].memory_stats()["bytes_in_use"]


def test_central_storage_leaves_gpus_free():
    """Between steps all variables are in the host's memory, pinned."""

    def after_training(strategy):
        before = in_use()
        model = under(strategy, wide)
        losses = model.fit(VECTORS, LABELS, shuffle=False, **DATA).history["loss"]
        size = sum(v.value.nbytes for v in (*model.weights, *model.optimizer.variables))
        kinds = {v.stored.sharding.memory_kind for v in model.trainable_variables}
        return losses, (in_use() - before) / size, kinds

    there, share, kinds = after_training(kd.MirroredStrategy())
    assert share > 0.9 and kinds == {"device"}
    here, share, kinds = after_training(kd.experimental.CentralStorageStrategy())
    assert share < 0.1 and kinds == {"pinned_host"}
    np.testing.assert_allclose(here, there, rtol=1e-4)


def bits_of(strategy, name):
    build, x = MODELS[name]
    return {key: np.asarray(v) for key, v in trained(under(strategy, build), x).items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_each_time(name):
    first, again = (
        bits_of(kd.MirroredStrategy(deterministic=True), name) for _ in range(2)
    )
    for key, value in first.items():
        assert value.tobytes() == again[key].tobytes(), key
    assert_like(first, plain(name), atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_replicas_in_series_compute_their_own_rows(name):
    """Kernels of cuDNN, too."""
    build, x = MODELS[name]
    strategy = kd.MirroredStrategy(deterministic=True)
    model = under(strategy, build)
    model.fit(x[:BATCH], LABELS[:BATCH], **DATA)
    assert "one replica's rows after" in str(strategy.summary(model))
    assert "whole" not in str(strategy.summary(model))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_the_same_bits_on_one_and_several(name):
    counts = [1, 1 << (len(jax.devices()).bit_length() - 1)]
    one, several = (
        bits_of(
            kd.MirroredStrategy([f"gpu:{i}" for i in range(n)], deterministic=True),
            name,
        )
        for n in counts
    )
    for key, value in one.items():
        assert value.tobytes() == several[key].tobytes(), key


def test_the_largest_batch():
    """The allocator really runs out."""

    def build():
        options = {"padding": "same", "activation": "relu"}
        convolved = [layers.Conv2D(64, 3, **options) for _ in range(4)]
        pooled = [layers.GlobalAveragePooling2D(), layers.Dense(3)]
        return keras.Sequential([keras.Input((128, 128, 3)), *convolved, *pooled])

    x = RANDOM.normal(size=(4, 128, 128, 3)).astype("float32")
    model = under(kd.MirroredStrategy(), build)
    before = model.get_weights()
    found = kd.find_batch_size(
        model, x, LABELS[:4], starting_batch_size=64, steps_per_trial=1
    )
    print(found)
    assert 64 <= found.recommended <= found.largest < found.too_large
    for ours, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, value)
    rows = found.recommended
    few = np.resize(x, (rows, *x.shape[1:]))
    model.fit(few, np.zeros(rows), batch_size=rows, verbose=0)


def test_step_times(capsys):
    report = kd.callbacks.StepTimeReport(num_steps=10, skip=2)
    model = under(kd.MirroredStrategy(), mlp)
    model.fit(VECTORS, LABELS, epochs=6, callbacks=[report], **DATA)
    said = capsys.readouterr().out
    print(said)
    assert "ms" in said


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_no_alarm_without_reason(name):
    """Checks for wrong hardware find none; a device alone has no other to compare with."""
    build, x = MODELS[name]
    watching = [kd.callbacks.ReplicaConsistency(every=1), kd.callbacks.RaiseOnNaN()]
    if len(jax.devices()) > 1:
        watching.append(kd.callbacks.StepReplay(every=2))
    model = under(kd.MirroredStrategy(deterministic=True), build)
    model.fit(x, LABELS, epochs=2, callbacks=watching, **DATA)


def test_a_coordinator_has_the_gpu_and_its_cluster_has_none():
    """Tasks of a local cluster compute on CPUs, and take none of the GPU's memory."""
    with ParameterServerCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kd.ParameterServerStrategy(cluster.cluster_resolver)
        model = under(strategy, mlp)
        told = model.fit(VECTORS, LABELS, epochs=8, **DATA).history
        strategy.close()
    assert told["loss"][-1] < told["loss"][0]


LAUNCHED = """
import numpy as np
import keras_distribute as kd
import keras
strategy = kd.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
x = np.arange(48.0).reshape(8, 6) / 48
model.fit(x, x[:, :3], batch_size=4, verbose=0)
print("REPLICAS", strategy.num_replicas_in_sync, flush=True)
"""


@pytest.mark.parametrize("options", [[], ["--cpu-devices", "1"]], ids=str)
def test_more_processes_than_gpus(tmp_path, options):
    """On CPUs they train; of GPUs, each needs one of its own."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    processes = len(jax.devices()) + 1
    command = [sys.executable, "-m", "keras_distribute.launch"]
    command += ["--nproc", str(processes), *options, str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )
    said = done.stdout + done.stderr
    print(said)
    if options:
        assert done.returncode == 0 and f"REPLICAS {processes}" in said
    else:
        assert done.returncode != 0
        assert f"share {len(jax.devices())} GPU(s), which NCCL refuses" in said


SERVED = """
import numpy as np
import keras_distribute as kd
import keras
strategy = kd.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
x = np.arange(48.0).reshape(8, 6) / 48
told = model.fit(x, x[:, :3], batch_size=2, epochs=8, verbose=0).history["loss"]
print("FELL", told[-1] < told[0], flush=True)
"""


def test_workers_beside_servers_have_the_gpus(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SERVED)
    command = [sys.executable, "-m", "keras_distribute.launch", "--ps", "1"]
    command += ["--workers", str(len(jax.devices()) + 1), str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )
    said = done.stdout + done.stderr
    print(said)
    assert done.returncode == 0 and "FELL True" in said


def test_a_dry_run_beside_gpus():
    report = kd.dry_run(lambda: compiled(mlp), BATCH, topology="cpu:1", verbose=0)
    print(report)
    assert report.to_json()["topology"]

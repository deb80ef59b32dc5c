"""Steps compiled for TPUs that are not there. Needs libtpu: `pip install
'keras-distribute[dry-run-tpu]'`, then `python -m pytest tests/dry_run/test_tpu.py`; `-m
slow` compiles ResNet-50, too, in some minutes.
"""

import importlib.util
import math
import os
import subprocess
import sys
import textwrap
from collections import defaultdict

import jax
import keras
import pytest

import keras_distribute as kd
from keras_distribute.dry_run import answers, targets
from keras_distribute.dry_run.hardware import Hardware
from keras_distribute.errors import BackendError, DeviceError
from keras_distribute.tpu import system
from tests import logical
from tests.dry_run import models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'keras-distribute[dry-run-tpu]'",
)


@pytest.fixture(autouse=True)
def without_flags_for_cpus(monkeypatch):
    """libtpu ends the process at a flag that it does not know."""
    monkeypatch.delenv("TESTS_XLA_FLAGS", raising=False)


TOPOLOGIES = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v6e:2x2")


@pytest.mark.parametrize("name", models.EVERY)
def test_the_test_models_compile_for_every_topology(name, compiled_twice):
    for topology in TOPOLOGIES:
        report = kd.dry_run(getattr(models, name), 256, topology=topology)
        said = compiled_twice[-1].memory_analysis()
        assert report.memory.arguments == said.argument_size_in_bytes
        assert report.memory.temporary == said.temp_size_in_bytes
        assert report.memory.peak == said.peak_memory_in_bytes == report.needed_bytes
        assert report.fits is True
        assert report.estimate.at_least > 0
        assert report.unknown_loops == 0
        expected = 0 if report.num_devices == 1 else 1
        assert expected <= report.count("all-reduce") <= 3 * expected
        assert all(each.group_size == report.num_devices for each in report.collectives)


def test_a_step_is_compiled_once_for_all_processes(monkeypatch, tmp_path):
    """With JAX's persistent compilation cache, and however often in this process."""
    monkeypatch.setattr(answers, "folder", lambda: tmp_path)
    first = kd.dry_run(models.mlp, 256, topology="v5e:2x2")
    assert not first.was_compiled_before and len(list(tmp_path.iterdir())) == 1
    answers.forget()  # As another process.
    monkeypatch.setattr(subprocess, "run", None)
    second = kd.dry_run(models.mlp, 256, topology="v5e:2x2")
    assert second.was_compiled_before
    assert second.memory == first.memory and second.prediction == first.prediction


def test_a_prediction_is_made_of_the_cycles_that_libtpu_expects():
    report = kd.dry_run(models.cnn, 1024, topology="v5e:2x2")
    found = report.prediction
    assert found.low < found.seconds < found.high
    assert found.seconds == max(found.work, found.overlapped) + found.exposed
    assert found.work > max(report.estimate.compute, report.estimate.memory) / 2
    assert "PREDICTION" in str(report) and "~ " in str(report)
    assert report.to_json()["prediction"]["seconds"] == found.seconds


def test_hosts_and_other_generations():
    assert kd.dry_run(models.mlp, 256, topology="v5e:4x4").num_processes == 4
    assert kd.dry_run(models.mlp, 256, topology="v5e:2x4").num_processes == 1
    for topology in ("v2:2x2", "v4:2x2x1", "v5p:2x2x1", "tpu7x:2x2x1"):
        report = kd.dry_run(models.mlp, 256, topology=topology)
        assert report.memory is not None and report.fits


def test_a_batch_that_does_not_fit_is_reported_with_both_sizes():
    rows = 2**28
    batch = (
        jax.ShapeDtypeStruct((rows, 16), "float32"),
        jax.ShapeDtypeStruct((rows,), "int32"),
    )
    report = kd.dry_run(models.mlp, batch, topology="v5e:1x1")
    assert report.fits is False and report.memory is None
    assert report.limit_bytes == int(15.75 * 2**30)
    assert report.needed_bytes > report.limit_bytes
    assert "does NOT fit" in str(report)


def test_a_slice_that_does_not_exist_is_said():
    with pytest.raises(DeviceError, match="not divisible"):
        kd.dry_run(models.mlp, 256, topology="v5e:3x5")


def test_a_compiler_that_ends_its_process_leaves_this_one(monkeypatch):
    """libtpu aborts for an axis of more than 16 chips, which is refused by its name."""
    with pytest.raises(DeviceError, match="largest slice of v5e has 16x16 chips"):
        kd.dry_run(models.mlp, 256, topology="v5e:32x1")
    monkeypatch.setattr(Hardware, "has_slice", lambda self, shape: True)
    with pytest.raises(BackendError) as caught:
        kd.dry_run(models.mlp, 256, topology="v5e:32x1")
    text = str(caught.value)
    assert "The compiler for v5e:32x1 ended its process (SIGABRT)" in text
    assert "Check failed: Topology()->chip_bounds().x <= 16 (32 vs. 16)" in text
    assert "pip install -U libtpu" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_gradients_of_resnet_50_are_reduced_at_once(topology, compiled_twice):
    """214 trained weights, of 320; batch normalization averages its statistics over the
    replicas, too.
    """
    report = kd.dry_run(
        models.resnet50, 64 * targets.parse(topology).num_devices, topology=topology
    )
    said = compiled_twice[-1].memory_analysis()
    assert report.memory.arguments == said.argument_size_in_bytes
    assert report.memory.temporary == said.temp_size_in_bytes
    assert report.needed_bytes == report.memory.peak == said.peak_memory_in_bytes
    assert report.num_gradients == 214
    assert (
        (report.num_devices > 1)
        <= report.count("all-reduce")
        <= 4 * (report.num_devices > 1)
    )
    assert report.fits is True


class _MixesRows(keras.Layer):
    def call(self, inputs):
        return inputs + keras.ops.flip(inputs, axis=0)


@pytest.mark.parametrize(
    ("topology", "mixes"), [("v5e:2x2", False), ("v6e:2x2", True), ("v3:2x2", False)]
)
def test_attention_by_the_kernel_on_each_replicas_rows(topology, mixes):
    """XLA cannot divide the kernel. A v3 has XLA's operations."""

    def build():
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
        try:
            inputs = keras.Input((256, 64))
            attend = keras.layers.MultiHeadAttention(2, 64)
            x = attend(inputs, inputs, use_causal_mask=True)
            x = _MixesRows()(x) if mixes else x
            x = keras.layers.GlobalAveragePooling1D()(x)
            model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(x))
            model.compile("sgd", "mse")
        finally:
            keras.mixed_precision.set_global_policy("float32")
        return model

    report = kd.dry_run(build, 64, topology=topology)
    gradients = [c for c in report.collectives if c.kind == "all-reduce"]
    # XLA sums them in 16 bits where it divides the program. The bias of the keys has no
    # gradient.
    whole = report.memory.parameters / (2 if mixes else 1)
    reduced = sum(each.num_bytes for each in gradients)
    assert reduced == pytest.approx(whole, rel=0.01)
    # The logits of all heads of a replica's rows, which the kernel never has at once.
    logits = 2 * (64 // 4) * 2 * 256 * 256
    is_small = report.memory.temporary < 3 * logits
    assert mixes or len(gradients) == 1
    assert is_small or topology.startswith("v3")


def test_logical_devices_on_chips():
    """Two chips a replica; images' heights and a dense layer's units divided."""
    with logical.tpu_strategy(2, layout_map=logical.HIDDEN).scope():
        model = logical.image_classifier([1, 2, 1, 1])
    report = kd.dry_run(model, 64, topology="v5e:2x4")
    assert report.num_logical == 2
    assert report.memory.parameters == 4 * (
        3 * 3 * 3 * 4 + 4 + 2 * 4 + (4 * 16 + 16) // 2 + 16 * 3 + 3
    )
    borders = [each for each in report.collectives if each.kind == "collective-permute"]
    assert borders and {each.num_replicas for each in borders} == {1}
    assert {
        each.num_replicas for each in report.collectives if each.kind == "all-reduce"
    } == {1, 4}
    assert [point.num_devices for point in report.scaling()][:3] == [4, 8, 16]


class _OwnStep(keras.Sequential):
    def train_step(self, state, data):
        return super().train_step(state, data)


def divided(kind: str) -> keras.Model:
    """Four divided kernels, in half precision."""
    blocks = [keras.layers.Dense(2048, "relu") for _ in range(4)]
    if kind == "dropout":
        blocks.insert(2, keras.layers.Dropout(0.1))
    of_kind = _OwnStep if kind == "own step" else keras.Sequential
    options = {"shard_variables": True, "communication_dtype": "bfloat16"}
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        with kd.MirroredStrategy(["cpu:0"], **options).scope():
            model = of_kind([keras.Input((2048,)), *blocks])
            adam = keras.optimizers.Adam()
            if kind == "scaled loss":
                adam = keras.optimizers.LossScaleOptimizer(adam)
            model.compile(adam, "mse")
            return model
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["plain", "dropout", "own step", "scaled loss"])
@pytest.mark.parametrize(
    ("topology", "dimensions"),
    [
        ("v5e:2x4", (8,)),
        ("v6e:2x4", (8,)),
        ("v5e:4x4", (4, 4)),
        ("v6e:4x4", (4, 4)),
        ("v3:4x4", (4, 4, 2)),
        ("v4:2x2x4", (4, 2, 2)),
        ("v5p:2x2x2", (2, 2, 2)),
    ],
)
def test_divided_weights_are_gathered_twice_and_gradients_scattered(
    topology, dimensions, kind
):
    """In half precision: three times the weights' bytes, no gradient is ever whole
    after it is summed: along one dimension of the slice after the other.
    """

    report = kd.dry_run(divided(kind), 4096, topology=topology)
    bytes_of = defaultdict(int)
    for each in report.collectives:
        bytes_of[each.kind] += each.num_bytes
    kernels, replicas = 4 * 2048 * 2048 * 2, math.prod(dimensions)
    # The first layer's weight is not needed in the backward pass, and the last one's
    # is needed there at once: the compiler may gather it for both.
    kernel = 2048 * 2048 * 2
    gathered = bytes_of["all-gather"] * replicas
    assert gathered in (2 * kernels - kernel, 2 * kernels - 2 * kernel)
    # A dimension leaves the next one a part of the bytes.
    given = [kernels // math.prod(dimensions[:i]) for i in range(len(dimensions))]
    if topology.startswith("v6e") or len(dimensions) == 1:
        assert bytes_of["reduce-scatter"] == sum(given)
    else:  # Some are padded, by which the compiler shifts them to their chips.
        assert sum(given) <= bytes_of["reduce-scatter"] < 1.05 * sum(given)
    assert bytes_of["all-reduce"] < 4 * 2048 * 4 + 1024  # Biases, and the loss.
    sent = sum(each.bytes_sent * each.times for each in report.collectives)
    assert sent < 1.05 * (gathered + kernels) * (1 - 1 / replicas)


@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:4x4", "v4:2x2x4"])
def test_few_rows_travel_in_place_of_weights(topology):
    report = kd.dry_run(divided("dropout"), 64, topology=topology)
    kinds = {each.kind for each in report.collectives}
    assert {"all-gather", "reduce-scatter", "all-to-all"} <= kinds
    sent = sum(each.bytes_sent * each.times for each in report.collectives)
    kernels, replicas = 4 * 2048 * 2048 * 2, report.num_devices
    assert sent < 0.2 * 3 * kernels * (1 - 1 / replicas)


@pytest.mark.timeout(300)
def table_of_many_rows():
    policy = "mixed_bfloat16"
    ids = keras.Input((20,), dtype="int32")
    table = keras.layers.Embedding(100_000, 64, dtype=policy)
    x = keras.layers.GlobalAveragePooling1D(dtype=policy)(table(ids))
    for units in (512, 256):
        x = keras.layers.Dense(units, "relu", dtype=policy)(x)
    model = keras.Model(ids, keras.layers.Dense(10)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


@pytest.mark.parametrize("rows", [256, 4096])
def test_no_copies_of_a_table_are_made_for_its_step(rows):
    """A chip has its long axis innermost: the gradient comes so, too."""
    found = kd.dry_run(table_of_many_rows, rows, topology="v5e:2x2")
    assert found.memory.temporary < 100_000 * 64 * 4


def test_weights_are_gathered_while_the_layer_before_is_computed():
    """Where the compiler can: for v5e by itself, beside a product that is large enough.
    The first weight has none before it.
    """
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        with kd.MirroredStrategy(["cpu:0"], shard_variables=True).scope():
            blocks = [keras.layers.Dense(2048, "relu") for _ in range(8)]
            model = keras.Sequential([keras.Input((2048,)), *blocks])
            model.compile("adam", "mse")
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    report = kd.dry_run(model, 65_536, topology="v5e:4x4")
    gathers = [each for each in report.collectives if each.kind == "all-gather"]
    assert len(gathers) >= 14
    assert sum(each.overlaps for each in gathers) >= 9


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4"])
def test_a_decoder_of_a_billion_weights_fits(topology):
    """And what it sends is three times its weights in half precision."""
    report = kd.dry_run(models.decoder_of_a_billion, 64, topology=topology)
    assert report.fits
    kinds = {each.kind for each in report.collectives if each.num_bytes > 2**20}
    assert {"all-gather", "reduce-scatter"} <= kinds
    assert "all-reduce" not in kinds
    weights = report.memory.parameters * 16 / 4
    assert weights > 1e9
    sent = sum(each.bytes_sent * each.times for each in report.collectives)
    assert sent == pytest.approx(3 * 2 * weights * 15 / 16, rel=0.05)


@pytest.mark.parametrize(
    ("name", "shape", "tasks", "replicas"),
    [
        ("v5e:1x1", [1, 1, 1, 1], 1, 1),
        ("v5e:2x4", [2, 4, 1, 1], 1, 8),
        ("v2:2x2", [2, 2, 1, 2], 1, 8),
        ("v4:2x2x1", [2, 2, 1, 1], 1, 4),
    ],
)
def test_a_strategy_finds_the_chips_of_one_machine(
    name, shape, tasks, replicas, monkeypatch
):
    """Notebooks and TPU machines: one or eight devices, as libtpu describes them."""
    chips = targets.parse(name).devices()
    monkeypatch.setattr(jax, "devices", lambda *platform: chips)
    topology = kd.tpu.experimental.initialize_tpu_system(
        kd.cluster_resolver.TPUClusterResolver("local")
    )
    assert topology.mesh_shape.tolist() == shape
    assert (topology.num_tasks, topology.num_tpus_per_task) == (tasks, replicas)
    strategy = kd.TPUStrategy(tpu="local")
    assert (
        repr(strategy)
        == f"TPUStrategy({replicas} replica(s) x 1 logical device(s), tpu)"
    )
    assert list(strategy.replica_mesh.devices) == chips


def test_the_hosts_of_a_slice_have_each_their_chips():
    chips = targets.parse("v5e:4x4").devices()
    groups = [[chip for chip in chips if chip.process_index == i] for i in range(4)]
    topology = system.topology_of(groups)
    assert (
        topology.mesh_shape.tolist(),
        topology.num_tasks,
        topology.num_tpus_per_task,
    ) == ([4, 4, 1, 1], 4, 4)
    assignment = kd.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[2, 1, 1, 1], num_replicas=8
    )
    hosts = {
        tuple(topology.task_ordinal_at_coordinates(place) for place in replica)
        for replica in assignment.core_assignment
    }
    assert hosts == {(i, i) for i in range(4)}  # No replica spans two hosts.


@pytest.mark.parametrize(
    "first",
    [
        "kd.config.set_cpu_devices(2)",
        "kd.dry_run(tests.dry_run.models.mlp, 8, 'v5e:1x1')",
    ],
)
def test_profiling_works_where_libtpu_is_installed(first, tmp_path):
    """JAX would load libtpu's profiler, which ends the process where there is no TPU."""
    code = f"""
        import keras_distribute as kd
        import tests.dry_run.models
        {first}
        import jax
        with jax.profiler.trace({str(tmp_path)!r}):
            jax.numpy.ones(3).block_until_ready()
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.xplane.pb"))

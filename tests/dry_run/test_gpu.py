"""Steps compiled for GPUs that are not there. Needs JAX's CUDA plugin, and no GPU: `pip
install 'keras-distribute[dry-run-cuda]'`, then `python -m pytest
tests/dry_run/test_gpu.py`.
"""

import importlib.util

import jax
import keras
import pytest

import keras_distribute as kd
from tests.dry_run import models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="JAX's CUDA plugin is not installed: pip install 'keras-distribute[dry-run-cuda]'",
)


@pytest.mark.parametrize("name", models.EVERY)
@pytest.mark.parametrize("topology", ["h100:1", "h100:8"])
def test_the_test_models_compile_for_gpus(name, topology, compiled_twice):
    report = kd.dry_run(getattr(models, name), 256, topology=topology)
    said = compiled_twice[-1].memory_analysis()
    memory = report.memory
    assert memory.arguments == said.argument_size_in_bytes
    assert memory.temporary == said.temp_size_in_bytes
    assert report.needed_bytes >= memory.arguments + memory.temporary
    assert report.fits is True and report.limit_bytes == int(0.75 * 84_942_979_072)
    assert report.versions["jax-cuda12-plugin"]
    assert report.estimate.at_least > 0 and "ESTIMATE" in str(report)
    expected = 0 if report.num_devices == 1 else 1
    assert expected <= report.count("all-reduce") <= 4 * expected


def test_a_batch_that_does_not_fit_is_reported_with_both_sizes():
    rows = 2**31 // 16
    batch = (
        jax.ShapeDtypeStruct((rows, 16), "float32"),
        jax.ShapeDtypeStruct((rows,), "int32"),
    )
    report = kd.dry_run(models.mlp, batch, topology="v100:1")
    assert report.fits is False
    assert report.needed_bytes > report.limit_bytes == int(0.75 * 16_935_682_048)
    assert "does NOT fit" in str(report)


def attention_over_patches():
    """The attention of ViT-B/16 in half precision."""
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        patches = x = keras.Input((196, 768))
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(12, 64)(y, y)
        x = keras.layers.GlobalAveragePooling1D()(x)
        model = keras.Model(patches, keras.layers.Dense(10)(x))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def test_a_step_that_xla_finds_no_tiles_for_is_compiled_with_other_kernels():
    """XLA of jaxlib 0.10.2: "INTERNAL: Couldn't find output tile sizes"."""
    report = kd.dry_run(attention_over_patches, 64, topology="h100:8")
    if jax.version.__version_info__ < (0, 10, 3):
        assert report.compiler_options == {"xla_gpu_enable_triton_gemm": False}
        assert "xla_gpu_enable_triton_gemm=False, without which XLA" in str(report)
    assert report.fits is True and report.count("all-reduce") >= 1
    prediction = report.prediction
    assert prediction.low < prediction.seconds < prediction.high
    assert prediction.seconds > report.estimate.at_least
    again = kd.dry_run(attention_over_patches, 64, topology="h100:8")
    assert again.was_compiled_before
    assert again.compiler_options == report.compiler_options


def test_divided_weights_are_gathered_and_their_gradients_summed_in_parts():
    with kd.MirroredStrategy(["cpu:0"], shard_variables=True).scope():
        model = keras.Sequential([keras.Input((2048,)), keras.layers.Dense(2048)])
        model.compile("adam", "mse")
    report = kd.dry_run(model, 64, topology="h100:8")
    assert report.count("all-gather") == 1
    assert report.count("reduce-scatter") == 1

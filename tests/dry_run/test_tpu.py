"""Steps compiled for TPUs that are not there. Needs libtpu: `pip install 'keras-distribute[dry-run-tpu]'`, then
`python -m pytest tests/dry_run/test_tpu.py`; `-m slow` compiles ResNet-50, too, in some minutes.
"""

import importlib.util

import jax
import pytest

import keras_distribute as kd
from keras_distribute.errors import DeviceError
from tests.dry_run import models
from tests.dry_run.test_dry_run import compiled  # noqa: F401 - a fixture.

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'keras-distribute[dry-run-tpu]'",
)
TOPOLOGIES = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v6e:2x2")


@pytest.mark.parametrize("name", models.EVERY)
def test_the_test_models_compile_for_every_topology(name, compiled):  # noqa: F811
    for topology in TOPOLOGIES:
        report = kd.dry_run(getattr(models, name), 256, topology=topology)
        said = compiled[-1].memory_analysis()
        assert report.memory.arguments == said.argument_size_in_bytes
        assert report.memory.temporary == said.temp_size_in_bytes
        assert report.memory.peak == said.peak_memory_in_bytes == report.needed_bytes
        assert report.fits is True
        assert report.estimate.at_least > 0
        assert report.unknown_loops == 0
        expected = 0 if report.num_devices == 1 else 1
        assert expected <= report.count("all-reduce") <= 3 * expected
        assert all(each.group_size == report.num_devices for each in report.collectives)


def test_hosts_and_other_generations():
    assert kd.dry_run(models.mlp, 256, topology="v5e:4x4").num_processes == 4
    assert kd.dry_run(models.mlp, 256, topology="v5e:2x4").num_processes == 1
    for topology in ("v2:2x2", "v4:2x2x1", "v5p:2x2x1", "tpu7x:2x2x1"):
        report = kd.dry_run(models.mlp, 256, topology=topology)
        assert report.memory is not None and report.fits


def test_a_batch_that_does_not_fit_is_reported_with_both_sizes():
    rows = 2**28
    batch = (jax.ShapeDtypeStruct((rows, 16), "float32"), jax.ShapeDtypeStruct((rows,), "int32"))
    report = kd.dry_run(models.mlp, batch, topology="v5e:1x1")
    assert report.fits is False and report.memory is None
    assert report.limit_bytes == int(15.75 * 2**30)
    assert report.needed_bytes > report.limit_bytes
    assert "does NOT fit" in str(report)


def test_a_slice_that_does_not_exist_is_said():
    with pytest.raises(DeviceError, match="not divisible"):
        kd.dry_run(models.mlp, 256, topology="v5e:3x5")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gradients_of_resnet_50_are_reduced_at_once():
    report = kd.dry_run(models.resnet50, 256, topology="v5e:2x2")
    assert report.num_gradients == 214
    assert report.count("all-reduce") <= 4
    assert report.fits is True

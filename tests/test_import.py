"""Importing chooses the JAX backend, and refuses what cannot work."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from keras_distribute import errors
from keras_distribute._compat import versions


def run(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "XLA_FLAGS", "NPROC")}
    env |= {k: v for k, v in environment.items() if v is not None}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)


def test_chooses_jax_when_nothing_is_chosen():
    result = run("import keras_distribute, keras; print(keras.config.backend())")
    assert result.stdout.strip().endswith("jax"), result.stderr


def test_starts_no_jax_client():
    result = run(
        "import keras_distribute as kd, keras\n"
        "kd.has_strategy(), kd.get_strategy()\n"
        "kd.config.set_cpu_devices(3)\n"
        "print(kd.MirroredStrategy().num_replicas_in_sync)"
    )
    assert result.stdout.strip().endswith("3"), result.stderr


def test_refuses_another_backend_in_the_environment():
    result = run("import keras_distribute", KERAS_BACKEND="tensorflow")
    assert result.returncode != 0
    assert "keras_distribute needs Keras on JAX." in result.stderr
    assert 'Fix: set os.environ["KERAS_BACKEND"] = "jax"' in result.stderr


def test_refuses_a_keras_that_already_runs_on_another_backend():
    script = (
        "import os; os.environ['KERAS_BACKEND'] = 'numpy'\n"
        "import keras\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras_distribute"
    )
    result = run(script)
    assert result.returncode != 0
    assert "the 'numpy' backend of an already imported Keras." in result.stderr


@pytest.mark.parametrize(("package", "old"), [("keras", "3.14.2"), ("jax", "0.9.1")])
def test_refuses_old_versions(monkeypatch, package, old):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old if name == package else real(name))
    with pytest.raises(errors.BackendError, match=rf"needs {package} .*\n  Received: {package} {old}") as caught:
        versions.check_versions()
    assert f"Fix: pip install '{package}>=" in str(caught.value)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["3.15.0", "3.15.1", "3.16.0rc1", "4.0", "3.15.0.dev20260101"])
def test_newer_versions_pass(monkeypatch, version):
    monkeypatch.setattr(versions, "MINIMUM", {"keras": (3, 15)})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    versions.check_versions()

"""`kd.notebook_launcher`: functions that are in no file, in several processes."""

import dataclasses
import tempfile
import threading

import jax
import pytest

import keras_distribute as kd
from keras_distribute._compat import jax_internals

pytestmark = pytest.mark.timeout(120)


def test_what_a_function_uses_is_sent_along_and_the_processes_train_together(capsys):
    start = 3

    def training(more):
        strategy = kd.MultiWorkerMirroredStrategy()
        print("here is", kd.process_index())
        total = strategy.reduce(
            "SUM", strategy.run(lambda: jax.numpy.float32(start + more)), axis=None
        )
        return float(total), strategy.num_replicas_in_sync

    assert kd.notebook_launcher(training, (1,), num_processes=2, cpu_devices=2) == (
        16.0,
        4,
    )
    out = capsys.readouterr().out
    assert "[0] here is 0" in out and "[1] here is 1" in out


def test_arguments_and_results_may_be_of_classes_of_the_notebook():
    @dataclasses.dataclass
    class Config:
        size: int

    def doubled(config):
        assert isinstance(config, Config)
        return Config(2 * config.size)

    found = kd.notebook_launcher(doubled, (Config(7),), 1, cpu_devices=1)
    assert found == Config(14)


def test_what_cannot_be_sent_is_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TypeError, match="cannot pickle"):
        kd.testing.run_in_processes(print, 1, threading.Lock())
    said = r"(?s)StructureTypeError: What the function returns cannot be pickled.*lock"
    with pytest.raises(kd.errors.ClusterError, match=said):
        kd.testing.run_in_processes(threading.Lock, 1)
    assert list(tmp_path.iterdir()) == []


def test_one_that_fails_ends_all():
    def waiting():
        import os
        import time

        if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1":
            raise KeyError("of process 1")
        time.sleep(3)
        os._exit(43)  # As one that ends because of another.

    with pytest.raises(
        kd.errors.ClusterError, match="(?s)process 1 with exit code 1.*of process 1"
    ):
        kd.notebook_launcher(waiting, num_processes=2, cpu_devices=1)


def test_accelerators_that_the_notebook_uses_are_refused(monkeypatch):
    monkeypatch.setattr(jax_internals, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(kd.errors.ClusterError, match="could not have them"):
        kd.notebook_launcher(print)

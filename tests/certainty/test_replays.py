"""A step that is run again on other devices: what differs, which device erred, and no
false alarms.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.commands import replay as replay_command
from keras_distribute.consistency import kept_steps
from keras_distribute.consistency.replays import erring
from tests.support import mirrored, pack_from, without_tensorflow

from . import training

pytestmark = pytest.mark.timeout(300)


def reports_of(
    model: Any, *faults: Any, every: int = 1, num_rows: int = len(training.X)
) -> list[Any]:
    replay = kd.callbacks.StepReplay(every=every, action="report")
    history = training.fitted(model, *faults, replay, num_rows=num_rows)
    differing = [report for report in replay.reports if report.differing]
    assert history.history["replays_that_differ"] == [len(differing)]
    return replay.reports


def flip(what: str, replica: int, variable: Any = None, step: int = 3) -> Any:
    where = {"replica": replica, "element": 5, "bit": 29}
    return kd.testing.Fault("flip", step=step, what=what, variable=variable, **where)


PLACES = [(2, 0), (2, 1), (4, 2), (8, 7)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("what", "replicas", "replica"),
    [
        ("batch", 1, 0),  # A single replica's gradient is the sum.
        *(("batch", *place) for place in PLACES),
        *(("gradient", *place) for place in PLACES),
    ],
)
def test_the_device_that_erred_is_named(what: str, replicas: int, replica: int) -> None:
    model = training.built(mirrored(replicas))
    kernel = model.layers[0].kernel if what == "gradient" else None
    fault = flip(what, replica, kernel)
    reports = reports_of(model, fault, every=3, num_rows=training.WITHOUT_TAIL)
    (found,) = [report for report in reports if report.differing]
    assert (found.step, found.devices) == (3, (f"cpu:{replica}",))
    assert found.is_certain
    gradients = [name for name in found.differing if name.startswith("gradient of ")]
    path = model.layers[0].kernel.path  # Of its own, or one of a long weight.
    assert any(path in name for name in gradients) or what == "batch"
    assert "computed wrongly by cpu:" in str(found)


def test_where_many_weights_are_one() -> None:
    keras.utils.set_random_seed(0)
    with mirrored(4).scope():
        hidden = [keras.layers.Dense(6, activation="tanh") for _ in range(40)]
        model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    fault = flip("gradient", 3, hidden[5].kernel)
    reports = reports_of(model, fault, every=3, num_rows=training.WITHOUT_TAIL)
    (found,) = [report for report in reports if report.differing]
    assert (found.step, found.devices) == (3, ("cpu:3",))
    assert any("small weights together" in name for name in found.differing)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"shard_optimizer_state": True}, id="divided slots"),
        pytest.param(
            {"shard_variables": True, "min_shard_bytes": 1}, id="divided weights"
        ),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"num_logical_devices": 2}, id="logical devices"),
    ],
)
def test_clean_steps_are_clean_and_stay_what_they_are(options: Any) -> None:
    def built() -> Any:
        count = 4 * options.get("num_logical_devices", 1)
        devices = [f"cpu:{i}" for i in range(count)]
        return training.built(kd.MirroredStrategy(devices, **options))

    model, plain = built(), built()
    reports = reports_of(model, every=2, num_rows=training.WITHOUT_TAIL)
    assert len(reports) == 3 and not any(report.differing for report in reports)
    training.fitted(plain, num_rows=training.WITHOUT_TAIL)
    assert training.bits_of(model) == training.bits_of(plain)


def test_other_devices_compute_what_is_on_those_of_a_single_replica() -> None:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], num_logical_devices=2)
    model = training.built(strategy)
    replay = kd.callbacks.StepReplay(every=4)
    training.fitted(model, replay, num_rows=training.WITHOUT_TAIL)
    assert replay.reports and not any(report.differing for report in replay.reports)
    (program,) = replay._programs.values()
    own, *others = [program.moved(by).devices for by in range(3)]
    assert not any((own == other).any() for other in others)
    assert not (others[0] == others[1]).any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param({"steps_per_execution": 3}, id="groups"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
    ],
)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_in_other_kinds_of_steps(compiled: Any, policy: str) -> None:
    strategy = mirrored(4)
    if "gradient_accumulation_steps" in compiled:
        with strategy.scope():
            compiled = {"optimizer": keras.optimizers.SGD(0.1, **compiled)}
    model = training.built(strategy, compiled=compiled, policy=policy)
    reports = reports_of(model, every=3)
    assert reports and not any(report.differing for report in reports)


def test_a_step_over_the_global_batch() -> None:
    class Sorted(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return jax.numpy.cumsum(x, axis=0)

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 2048)).astype("float32")
    with mirrored(4).scope():
        model = keras.Sequential([keras.Input((2048,)), Sorted()])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
    replay = kd.callbacks.StepReplay(every=1)
    model.fit(x, x[:, 0], batch_size=64, verbose=0, callbacks=[replay])
    assert not replay.reports[0].differing


def test_the_error_and_the_step_on_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_from(monkeypatch, None)
    model = training.built(mirrored(4))
    kernel = model.layers[0].kernel
    replay = kd.callbacks.StepReplay(every=1, folder=tmp_path)
    with pytest.raises(kd.errors.StepReplayError) as caught:
        training.fitted(model, flip("gradient", 2, kernel), replay)
    first, *_, fix = str(caught.value).splitlines()
    kept = tmp_path / "step-0000003"
    assert first.startswith("Step 3, run again, gave other bits in ")
    assert first.endswith("computed wrongly by cpu:2.")
    assert f"kept in {kept}" in str(caught.value)
    assert fix == "  Fix: go on from a checkpoint of an earlier step, without cpu:2."
    assert caught.value.report.folder == str(kept)

    def replayed(*more: str) -> Any:
        command = [sys.executable, "-m", "keras_distribute", "replay", str(kept), *more]
        env = without_tensorflow()
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=200
        )

    ran = replayed("--cpu-devices", "4")
    assert ran.returncode == 1, ran.stderr
    line = f"gradient of {kernel.path}: cpu:2 had other bits than cpu:2 here."
    assert line in ran.stdout
    assert "not the same bits as when it was kept." in ran.stdout
    few = replayed("--cpu-devices", "2")
    assert few.returncode == 2
    assert "ran on 4 devices" in few.stderr and "--cpu-devices 4" in few.stderr
    # What the faulty device had is forgotten: now the bits are the same.
    about = json.loads((kept / "step.json").read_text())
    names = [f"gradient of {name}" for name in about["own_names"]]
    assert f"gradient of {kernel.path}" in names
    (kept / "arrays-0.npz").unlink()
    missing = replayed("--cpu-devices", "4")
    assert missing.returncode == 2 and "elements are missing" in missing.stderr
    (kept / "program.bin").write_bytes((kept / "program.bin").read_bytes()[:100])
    with pytest.raises(kd.errors.CheckpointError, match="missing or damaged"):
        kept_steps.read(kept)
    (kept / "program.bin").unlink()
    assert replay_command.main([str(kept)]) == 2


def test_a_step_that_cannot_be_kept_is_told_nevertheless(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with mirrored(3).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    fault = kd.testing.Fault(
        "flip",
        step=1,
        what="gradient",
        variable=model.weights[0],
        replica=1,
        element=2,
        bit=30,
    )
    replay = kd.callbacks.StepReplay(every=1, folder=tmp_path / "file")
    x = np.ones((6, 3))
    with pytest.raises(
        kd.errors.StepReplayError, match=r"wrongly by cpu:1\."
    ) as caught:
        model.fit(x, x[:, :1], 3, verbose=0, callbacks=[fault, replay])
    assert caught.value.report.folder is None
    assert "Step 1 could not be kept" in caplog.text


def test_cpu_devices_take_the_place_of_an_accelerator() -> None:
    """Which JAX would show alone."""
    code = (
        "import jax; from keras_distribute.commands import replay;"
        "code = replay.main(['nowhere', '--cpu-devices', '2']);"
        "print(code, jax.config.jax_platforms)"
    )
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert ran.stdout == "2 cpu\n", ran.stderr


def test_a_warning_and_the_next_steps(caplog: Any) -> None:
    model = training.built(mirrored(4))
    with caplog.at_level(logging.WARNING, "keras_distribute"):
        reports = reports_of(model, flip("gradient", 1, model.weights[0]))
    assert [bool(report.differing) for report in reports] == [False] * 3 + [True] + [
        False
    ] * 2
    assert "computed wrongly by cpu:1" in caplog.text


def test_two_devices_that_err_and_one_that_always_does() -> None:
    right = np.arange(12, dtype=np.uint64).reshape(4, 3)
    devices = [np.roll(jax.devices()[:4], -by) for by in (0, 1, 2)]

    def tables(wrong: dict[int, int]) -> list[Any]:
        """Of devices with an error of their own, in the runs that the bits name."""
        found = []
        for run, order in enumerate(devices):
            table = right.copy()
            for place, device in enumerate(order):
                if wrong.get(device.id, 0) >> run & 1:
                    table[place, 1] = 100 + device.id
            found.append(table)
        return found

    def erred(wrong: dict[int, int]) -> tuple[list[int], bool]:
        found, is_certain = erring(tables(wrong), devices, [1])
        return [device.id for device in found], is_certain

    assert erred({2: 0b111}) == ([2], True)
    assert erred({2: 0b001}) == ([2], True)
    assert erred({0: 0b010}) == ([0], True)
    assert erred({0: 0b001, 2: 0b001}) == ([0, 2], True)
    two = [np.roll(jax.devices()[:2], -by) for by in (0, 1, 0)]
    always = [right[:2].copy() for _ in two]
    for table, order in zip(always, two, strict=True):
        table[[d.id for d in order].index(0), 0] = 100
    found, is_certain = erring(always, two, [0])
    assert len(found) == 2 and not is_certain
    # Of the rows of one replica alone, too: two results of the same device.
    always = [right[:2].copy() for _ in two]
    always[0][0, 0] = always[2][0, 0] = 100
    found, is_certain = erring(always, two, [0])
    assert len(found) == 2 and not is_certain
    once = [right[:2].copy() for _ in two]
    once[0][1, 0] = 100
    assert erring(once, two, [0]) == ([jax.devices()[1]], True)


def test_what_cannot_be_replayed() -> None:
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(kd.errors.ContextError, match="synchronous strategy") as caught:
        training.fitted(plain, kd.callbacks.StepReplay())
    assert "Fix: create and compile the model in the scope" in str(caught.value)
    model = training.built(mirrored(2), compiled={"run_eagerly": True})
    with pytest.raises(kd.errors.ContextError, match="run_eagerly=True"):
        training.fitted(model, kd.callbacks.StepReplay())


def test_bits_that_cannot_flip() -> None:
    refused = kd.errors.ValueStructureError
    with pytest.raises(refused, match="what='batch', variable="):
        kd.testing.Fault("flip", what="batch", variable="kernel")
    with pytest.raises(refused, match="what='gradient', variable=None"):
        kd.testing.Fault("flip", what="gradient")
    with pytest.raises(refused, match="flips in `fit`"):
        kd.testing.Fault("flip", what="batch").now(0)
    model = training.built(mirrored(2))
    statistics = model.layers[1].moving_mean
    with pytest.raises(refused, match="where the gradients are .*kernel"):
        training.fitted(model, flip("gradient", 0, statistics))
    model = training.built(mirrored(2))
    with pytest.raises(refused, match=r"replica=2\."):
        training.fitted(model, flip("gradient", 2, model.weights[0]))
    model = training.built(mirrored(3))
    with pytest.raises(refused, match="a step over the global batch"):
        training.fitted(model, flip("gradient", 0, model.weights[0]))
    model = training.built(mirrored(2))
    with pytest.raises(refused, match=r"element is below 24 here"):
        fault = kd.testing.Fault("flip", what="batch", replica=1, element=24)
        training.fitted(model, fault)


def test_of_two_processes() -> None:
    found = kd.testing.run_in_processes(
        training.replayed_on_processes, 2, cpu_devices=2, timeout=220
    )
    assert found[0] == found[1]
    assert found[0]["devices"] == [(), ("last",)]
    assert found[0]["steps"] == [0, 3]

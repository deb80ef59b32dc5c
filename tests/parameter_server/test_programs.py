"""Programs that travel: how often they are made."""

import threading
import time
import types

import jax
import keras
import numpy as np
import pytest

from keras_distribute.remote.credentials import Credentials
from keras_distribute.scheduling.served import Part
from keras_distribute.scheduling.updates import Updates
from keras_distribute.scheduling.workers import Worker
from keras_distribute.servers import programs
from keras_distribute.servers.runner import Runner
from keras_distribute.servers.store import Store

SHAPES = [jax.ShapeDtypeStruct((3,), "float32")] * 3
ARRAYS = [np.full(3, i, "float32") for i in (1, 2, 4)]


@pytest.mark.parametrize(
    ("function", "used", "times"),
    [
        (lambda a, b, c: [a + b * c], [0, 1], 1),
        (lambda a, b, c: [b * c], [1], 2),
        (lambda a, b, c: [a + b], [0, 1], 2),
    ],
)
def test_a_program_that_takes_all_is_made_once(monkeypatch, function, used, times):
    """What comes after the droppable arguments is always taken."""
    made, export = [], jax.export.export
    monkeypatch.setattr(
        jax.export, "export", lambda *a, **k: made.append(a) or export(*a, **k)
    )
    blob, found = programs.exported(function, SHAPES, ["cpu"], droppable=2)
    assert (found, len(made)) == (used, times)
    given = [ARRAYS[i] for i in used] + ARRAYS[2:]
    np.testing.assert_array_equal(
        programs.loaded(blob)(*given)[0], function(*ARRAYS)[0]
    )


def test_threads_of_several_workers_make_an_update_once(monkeypatch):
    """Each with a number of its own."""
    updates, sent = Updates([], None, False, None), []
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD()
    weight = keras.Variable(0.0)

    def send(optimizer, weights, sizes, server, parts, number):
        time.sleep(0.05)
        sent.append((optimizer, number))

    monkeypatch.setattr(updates, "_send", send)
    found = {}

    def ask(thread, optimizer):
        part = Part(0, 1)
        found[thread] = updates._number(optimizer, [weight], [None], 0, [(0, part)])

    threads = [
        threading.Thread(target=ask, args=(i, optimizer))
        for i, optimizer in enumerate([adam, sgd, adam, sgd])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(number for _, number in sent) == [1, 2]
    assert {optimizer for optimizer, _ in sent} == {adam, sgd}
    assert found[0] == found[2] != found[1] == found[3]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_worker_on_other_hardware_gets_programs_for_it(make, monkeypatch, platform):
    """The coordinator needs no such device. The workers here have none either."""
    given = property(
        lambda worker: vars(worker)["told"] and platform,
        lambda worker, told: vars(worker).update(told=told),
    )
    monkeypatch.setattr(Worker, "platform", given, raising=False)
    strategy = make(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    with pytest.raises(Exception, match=rf"exported for platforms '\('{platform}'"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(("version", "name"), [("cuda 12", "cuda"), ("ROCm", "rocm")])
def test_tasks_say_what_programs_are_to_be_exported_for(monkeypatch, version, name):
    """A device says "gpu", which `jax.export` does not know."""
    client = types.SimpleNamespace(platform_version=f"PJRT C API\n{version}")
    gpu = types.SimpleNamespace(platform="gpu", client=client)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    header = {"worker": 0, "incarnation": 1, "servers": [], "timeout": 1.0}
    worker = Runner(Credentials("token"), lambda: None)
    for task in (worker, Store()):
        told, _ = task._begin(header, [])
        assert told["platform"] == name


def test_programs_may_call_what_jax_promises_nothing_of():
    """Kernels of cuDNN, for example: all tasks have the same version."""

    def function(x):
        return [jax.ffi.ffi_call("a kernel", jax.ShapeDtypeStruct((3,), "float32"))(x)]

    blob, _ = programs.exported(function, SHAPES[:1], ["cuda"])
    assert b"a kernel" in jax.export.deserialize(bytearray(blob)).mlir_module().encode()

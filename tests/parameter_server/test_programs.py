"""Programs that travel: how often they are made."""

import threading
import time

import jax
import numpy as np
import pytest

from keras_distribute.scheduling.served import Part
from keras_distribute.scheduling.updates import Updates
from keras_distribute.servers import programs

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

    def send(optimizer, weights, sizes, server, parts, number):
        time.sleep(0.05)
        sent.append((optimizer, number))

    monkeypatch.setattr(updates, "_send", send)
    found = {}

    def ask(thread, optimizer):
        part = Part(0, 1)
        found[thread] = updates._number(optimizer, [], [None], 0, [(0, part)])

    threads = [
        threading.Thread(target=ask, args=(i, optimizer))
        for i, optimizer in enumerate(["adam", "sgd", "adam", "sgd"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(number for _, number in sent) == [1, 2]
    assert {optimizer for optimizer, _ in sent} == {"adam", "sgd"}
    assert found[0] == found[2] != found[1] == found[3]

"""A batch that does not divide needs no more memory on a device than a full one that
does.

Both in the step over the global batch: with local gradients, which a tail cannot have,
a full batch needs less.
"""

import dataclasses

import keras
import numpy as np
import pytest

from keras_distribute import context
from keras_distribute.training import adoption, batches
from keras_distribute.training.steps import choose
from tests.support import mirrored


def temporary_bytes(model, strategy, rows):
    """What the compiled training step for `rows` rows needs on each device, beside its
    arguments and results.
    """
    x, y = np.zeros((rows, 32, 32, 3), "float32"), np.zeros((rows, 10), "float32")
    with context.entered(adoption.frame_for(strategy)):
        model.train_on_batch(x, y)
        placed = batches.place((x, y, None), strategy.replica_mesh)
        program = choose.compile_step(model, "train").executable(placed).compile()
        return program.memory_analysis().temp_size_in_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tail", [62, 61, 33])
def test_a_tail_needs_no_more_than_a_full_batch(tail, monkeypatch):
    plan_of = choose.plan_of
    monkeypatch.setattr(
        choose, "plan_of", lambda *of: dataclasses.replace(plan_of(*of), is_local=False)
    )
    strategy = mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        model.compile("sgd", "mse")
    assert temporary_bytes(model, strategy, tail) <= 1.02 * temporary_bytes(
        model, strategy, 64
    )

"""What rounds of local steps refuse."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from tests.parameter_server.test_fit import Largest, network
from tests.parameter_server.test_local_steps import X, Y


@pytest.mark.parametrize("workers", [1, 2])
def test_a_metric_that_is_no_sum(make, workers):
    strategy = make(workers, local_steps=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse", metrics=[Largest()])
    x = np.arange(30.0, dtype="float32")[::-1, None].copy()
    if workers == 1:
        history = model.fit(x, x, batch_size=7, shuffle=False, verbose=0).history
        assert history["largest"] == [29.0]
    else:
        with pytest.raises(kd.errors.StructureTypeError, match=r"largest/value"):
            model.fit(x, x, batch_size=7, verbose=0)


SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"local_steps": 0}, ValueError, "local_steps is an integer of at least 1"),
        ({"local_steps": 2.0}, TypeError, "local_steps is an integer of at least 1"),
        ({"local_steps": True}, TypeError, "local_steps is an integer of at least 1"),
        ({"outer_optimizer": SGD()}, ValueError, "(.|\n)*Fix: local_steps=20"),
        (
            {"local_steps": 2, "outer_optimizer": "sgd"},
            TypeError,
            "outer optimizer is one of Keras's(.|\n)*'sgd'(.|\n)*Fix: keras.opt",
        ),
        (
            {
                "local_steps": 2,
                "outer_optimizer": keras.optimizers.LossScaleOptimizer(SGD()),
            },
            TypeError,
            "do not scale losses",
        ),
        (
            {"local_steps": 2, "outer_optimizer": SGD(use_ema=True)},
            ValueError,
            "keeps no average(.|\\n)*use_ema=True(.|\\n)*Fix",
        ),
        ({"local_slots": True}, ValueError, "(.|\n)*local_steps=1(.|\n)*Fix: local_s"),
        ({"local_slots": 1}, TypeError, "local_slots is a flag"),
        (
            {"local_steps": 2, "max_staleness": 3},
            ValueError,
            "max_staleness=3, local_steps=2(.|\n)*Fix: one of the two",
        ),
    ],
)
def test_wrong_arguments(make, options, error, text):
    with pytest.raises(error, match=text):
        make(**options)


def test_accumulated_gradients_are_refused(make):
    strategy = make(local_steps=2)
    with strategy.scope():
        model = network(SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(
        kd.errors.StructureTypeError, match=r"not accumulated(.|\n)*Fix: an optimizer"
    ):
        model.fit(X, Y, verbose=0)

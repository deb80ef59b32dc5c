"""What a pass has read ends with the pass, without a garbage collection: pipelines hold
threads and large buffers.
"""

import gc
import weakref

import grain
import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_distribute.input.source import in_use
from keras_distribute.threads import dropped
from tests.support import dense_model, mirrored

X, Y = np.ones((70, 6), "float32"), np.ones((70, 3), "float32")


def tf_data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def unknown_length():
    return tf_data().filter(lambda x, y: True)


def grain_data():
    return (
        grain.MapDataset.source([(x, y) for x, y in zip(X, Y, strict=True)])
        .batch(16)
        .to_iter_dataset()
    )


@pytest.fixture
def no_collection():
    gc.collect()
    dropped.settle()
    before = list(in_use.works)
    gc.disable()
    yield lambda: [work for work in in_use.works if work not in before]
    gc.enable()


def failing(x):
    raise ValueError("an error of the user's")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "data", [tf_data, unknown_length, grain_data], ids=lambda data: data.__name__
)
def test_by_the_methods_of_a_model(data, no_collection):
    strategy = mirrored(2)
    model = dense_model(strategy, 6, 3)
    for call in (
        lambda: model.fit(data(), epochs=2, verbose=0),
        lambda: model.fit(data(), validation_data=data(), verbose=0),
        lambda: model.fit(data(), steps_per_epoch=2, verbose=0),
        lambda: model.evaluate(data(), verbose=0),
        lambda: model.predict(data(), verbose=0),
    ):
        call()
        dropped.settle()
        assert not no_collection()


def test_by_methods_in_a_callback(no_collection):
    with mirrored(2).scope():
        models = [
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            for _ in range(2)
        ]
        for model in models:
            model.compile("sgd", "mse")
    left, alive = [], []

    class Calls(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            x = X.copy()
            models[0].predict(x, batch_size=16, verbose=0)
            alive.append(weakref.ref(x))
            models[0].evaluate(unknown_length(), verbose=0)
            models[1].fit(
                tf_data(),
                epochs=2,
                steps_per_epoch=2,
                validation_data=tf_data(),
                validation_steps=2,
                verbose=0,
            )
            del x
            dropped.settle()
            left.append(len(no_collection()))

    models[0].fit(tf_data(), validation_data=tf_data(), callbacks=[Calls()], verbose=0)
    assert left == [1] * 5  # That of the outer `fit`.
    assert [watched() for watched in alive] == [None] * 5
    dropped.settle()
    assert not no_collection()


def test_arrays_end_with_fit(no_collection):
    model = dense_model(mirrored(2), 6, 3)
    x = X.copy()
    watched = weakref.ref(x)
    model.fit(x, Y, batch_size=16, verbose=0)
    del x
    assert watched() is None


def test_by_loops(no_collection):
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(unknown_length())
    for _ in dataset:
        pass
    for _ in dataset:
        break
    dropped.settle()
    assert not no_collection()


def test_by_a_pass_that_fails(no_collection):
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(
        tf_data().map(lambda x, y: tf.py_function(failing, [x], tf.float32))
    )
    try:
        list(dataset)
    except Exception as error:
        assert "an error of the user's" in str(error)
    else:
        pytest.fail("no error")
    dropped.settle()
    assert not no_collection()

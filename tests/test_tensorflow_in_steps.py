"""TensorFlow in and around a function given to `run`, as it is left over in programs that
used `tf.distribute`: never run once in silence, always an error that says what to write.
"""

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import errors
from tests.support import distributed, mirrored

tf = pytest.importorskip("tensorflow")

X = np.ones((4, 2), "float32")


@pytest.fixture(scope="module")
def strategy():
    return mirrored(2)


def test_run_in_a_tf_function(strategy):
    """It would train once, and return the same loss for ever."""
    with strategy.scope():
        steps = keras.Variable(0, dtype="int32")
    dataset = strategy.experimental_distribute_dataset(kd.ArrayDataset(X, 2))

    def step(x):
        steps.assign_add(1)
        return x

    @tf.function(autograph=False)
    def train(iterator):
        return strategy.run(step, args=(next(iterator),))

    @tf.function(autograph=False)
    def update():
        return strategy.extended.update(steps, lambda v: v.assign(5))

    text = (
        r"(?s)another traced function.*TensorFlow traces.*Fix: .* outside .*tf.functi"
    )
    for call in (lambda: train(iter(dataset)), update):
        with pytest.raises(Exception, match=text):
            call()
    assert int(steps) == 0
    per_replica = distributed(strategy, np.float32)
    with pytest.raises(errors.StructureTypeError, match="without tf.function"):
        tf.function(lambda x: strategy.run(step, args=(x,)))(per_replica)
    # Nothing is traced in a function of Python that a pipeline calls.
    eager = tf.py_function(lambda: strategy.run(lambda: X).values[0], [], tf.float32)
    np.testing.assert_array_equal(eager, X)


counter = tf.Variable(0)
elements = iter(tf.data.Dataset.range(9))


@tf.function
def add_one(x=0.0):
    return x + 1.0


def taped(x):
    with tf.GradientTape() as tape:
        loss = keras.ops.sum(x)
    return tape.gradient(loss, [x])


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + tf.random.normal([2]).numpy(),
        lambda x: counter.assign_add(1),
        lambda x: x + counter.numpy(),
        lambda x: x * float(next(elements)),
        lambda x: tf.print("step"),
        lambda x: add_one(),
        lambda x: tf.reduce_sum(x),
        lambda x: tf.cast(x, "float32"),
        lambda x: tf.nn.compute_average_loss(x, global_batch_size=4),
        taped,
        add_one,
    ],
    ids=[
        "normal",
        "variable",
        "read",
        "next",
        "print",
        "function",
        "sum",
        "cast",
        "average",
        "tape",
        "step",
    ],
)
def test_operations_in_a_step(strategy, step):
    text = "(?s)^TensorFlow computes nothing in a program of JAX.*Received.*Fix: .*keras.ops"
    with pytest.raises(errors.ContextError, match=text):
        strategy.run(step, args=(X,))
    # Outside of steps TensorFlow is left alone.
    assert tf.random.normal([2]).shape == 2


def test_a_step_that_is_a_tf_function_is_not_traced_by_tensorflow(strategy):
    traced = []
    step = tf.function(lambda: traced.append(1))
    with pytest.raises(errors.ContextError, match="(?s)Received: a tf.function.*Fix"):
        strategy.run(step)
    assert not traced


def test_constants_and_errors_of_other_origin_are_left_alone(strategy):
    found = strategy.run(lambda x: x + (tf.range(2.0) * 2).numpy(), args=(X,))
    np.testing.assert_array_equal(found.values[1], [[1.0, 3.0]] * 4)
    with pytest.raises(KeyError, match="mine"):
        strategy.run(lambda x: {}["mine"], args=(X,))

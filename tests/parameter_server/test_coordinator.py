"""`ClusterCoordinator` by TensorFlow's rules: the cases of its own test
(`cluster_coordinator_test.py` of TensorFlow 2.21), and what differs.
"""

import gc
import time
import weakref

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
)
from keras_distribute.threads import dropped


@pytest.fixture
def coordinator(strategy):
    return ClusterCoordinator(strategy)


def numbers(count=None):
    """A dataset function: 1.0, 2.0, and so on."""

    def dataset():
        value = 0.0
        while count is None or value < count:
            value += 1.0
            yield np.float32(value)

    return dataset


@pytest.fixture
def behind_a_gate(tmp_path):
    """Makes a dataset function stop before its end until `open()` is called: no worker
    may fail while a test still schedules.
    """
    gate = tmp_path / "open"

    def behind(dataset, error=None):
        def waiting():
            yield from dataset()
            while not gate.exists():
                time.sleep(0.01)
            if error is not None:
                raise error

        return waiting

    behind.open = gate.touch
    return behind


def test_there_is_one_coordinator_of_a_strategy(strategy, coordinator):
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy


def test_join_and_done_without_work(coordinator):
    coordinator.join()
    assert coordinator.done()


def test_fetch_of_a_result(coordinator):
    value = coordinator.schedule(lambda: keras.ops.convert_to_tensor(1.5))
    assert isinstance(value, RemoteValue)
    assert isinstance(value.get(), jax.Array)
    assert isinstance(value.fetch(), np.ndarray)
    assert value.fetch() == 1.5
    coordinator.join()
    assert coordinator.done()


def test_fetch_of_a_structure(coordinator):
    value = coordinator.schedule(lambda x: {"a": (x, 2 * x), "b": "text"}, (3.0,))
    plain = coordinator.fetch({"deep": [value, 7]})
    assert plain["deep"][1] == 7
    assert plain["deep"][0]["b"] == "text"
    assert plain["deep"][0]["a"] == (3.0, 6.0)


def test_what_was_fetched_is_the_callers_to_change(coordinator):
    value = coordinator.schedule(lambda x: x + 1.0, (np.ones(2, "float32"),))
    first = value.fetch()
    first += 1.0
    assert first.tolist() == [3.0, 3.0]
    assert value.fetch().tolist() == coordinator.fetch(value).tolist() == [2.0, 2.0]


class Shared:
    """An array of another library, which shares its memory."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)


@pytest.mark.parametrize("kind", [np.asarray, Shared])
def test_arguments_by_name_and_arrays_are_copied(strategy, coordinator, kind):
    x = np.ones(3, "float32")
    with strategy.cluster.queue._condition.lock:  # No worker takes it before the end.
        value = coordinator.schedule(lambda x, y: x + y, (kind(x),), {"y": kind(x)})
        x[:] = 5.0
    np.testing.assert_array_equal(value.fetch(), [2.0, 2.0, 2.0])


def test_an_array_may_be_donated_after_it_was_scheduled(strategy, coordinator):
    x = jax.numpy.ones(3)
    with strategy.cluster.queue._condition.lock:  # No worker takes it before the end.
        value = coordinator.schedule(lambda x: x + 1.0, (x,))
        jax.jit(lambda x: x * 2.0, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(value.fetch(), [2.0, 2.0, 2.0])


def test_an_assignment(strategy, coordinator):
    with strategy.scope():
        v = keras.Variable(3.0)
    coordinator.schedule(lambda: v.assign(7.0))
    coordinator.join()
    assert v.numpy() == 7.0


def test_additions_of_all_workers_count(strategy, coordinator):
    with strategy.scope():
        v = keras.Variable(np.zeros(4, "float32"))
        counter = keras.Variable(0, dtype="int32")

    def add(x):
        v.assign_add(x)
        counter.assign_add(1)

    for i in range(200):
        coordinator.schedule(add, (np.full(4, i, "float32"),))
    coordinator.join()
    np.testing.assert_array_equal(v.numpy(), [sum(range(200))] * 4)
    assert counter.numpy() == 200


class Largest(keras.metrics.Metric):
    """A metric that is no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, values):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(values)))

    def result(self):
        return self.most.value


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_no_sum_is_changed_by_one_function_after_the_other(make, workers):
    strategy = make(workers)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        largest, count = Largest(), keras.Variable(0, dtype="int32")
        turn = keras.Variable(0, dtype="int32")

    def step(x):
        largest.update_state(x)
        turn.assign((turn.value * 2 + 1) % 5)
        count.assign_add(1)

    def add(number):
        turn.assign_add(number)

    expected = 0
    for i in range(12):
        coordinator.schedule(step, (np.full(3, 7.0 * i % 11, "float32"),))
        coordinator.schedule(add, (np.int32(1),))
        expected = (expected * 2 + 1) % 5 + 1
    coordinator.join()
    assert float(largest.result()) == 10.0
    assert (int(turn.value), int(count.value)) == (expected, 12)


def test_what_is_always_added_comes_after_what_is_no_sum(strategy, coordinator):
    with strategy.scope():
        turn = keras.Variable(1, dtype="int32")

    def double():
        turn.assign(turn.value * 2)

    def add():
        turn.assign_add(1)
        return turn.value

    found = []
    for _ in range(4):
        coordinator.schedule(double)
        found.append(coordinator.schedule(add))
    assert list(map(int, coordinator.fetch(found))) == [3, 7, 15, 31]
    assert int(turn.value) == 31


def test_one_worker_returns_what_all_functions_before_have_added(one_worker):
    coordinator = ClusterCoordinator(one_worker)
    with one_worker.scope():
        mean, count = keras.metrics.Mean(), keras.Variable(0, dtype="int32")

    def step(x):
        mean.update_state(x)
        count.assign_add(keras.ops.cast(x, "int32"))
        return mean.result(), count.value

    values = [coordinator.schedule(step, (float(i),)) for i in range(8)]
    found = coordinator.fetch(values)
    assert [float(each) for each, _ in found] == [i / 2 for i in range(8)]
    assert [int(each) for _, each in found] == [sum(range(i + 1)) for i in range(8)]


def test_what_the_coordinator_assigns_is_seen_by_what_it_schedules(
    strategy, coordinator
):
    with strategy.scope():
        v = keras.Variable(0.0)

    def read(x):
        return v.value + x

    for i in range(20):
        v.assign(float(i))
        assert coordinator.schedule(read, (0.5,)).fetch() == i + 0.5


def test_what_has_finished_is_seen_after_join(strategy, coordinator):
    with strategy.scope():
        v = keras.Variable(0.0)

    def add():
        v.assign_add(1.0)

    def read():
        return v.value + 0.0

    for i in range(1, 11):
        coordinator.schedule(add)
        coordinator.join()
        found = [coordinator.schedule(read) for _ in range(4)]
        assert coordinator.fetch(found) == [i] * 4


def test_an_iterator_on_each_worker(strategy, coordinator):
    dataset = coordinator.create_per_worker_dataset(numbers())
    iterator = iter(dataset)
    with strategy.scope():
        total = keras.Variable(0.0)

    def step(iterator):
        x = next(iterator)
        total.assign_add(x)
        return x

    values = coordinator.fetch(
        [coordinator.schedule(step, (iterator,)) for _ in range(30)]
    )
    assert total.numpy() == sum(values)
    steps = [worker.steps for worker in strategy.cluster.workers]
    assert sorted(values) == sorted(i + 1.0 for n in steps for i in range(n))


def test_numbers_of_64_bits_that_the_coordinator_alone_has(strategy, coordinator):
    third, whole = np.float64(1) / 3, 2**40
    with jax.enable_x64(True), strategy.scope():
        variable = keras.Variable(third, dtype="float64")
        iterator = iter(
            coordinator.create_per_worker_dataset(lambda: iter([np.full(2, third)]))
        )

        def step(factor, iterator):
            variable.assign_add(factor * keras.ops.sum(next(iterator)))
            return variable + 0.0

        result = coordinator.schedule(step, (np.float64(3), iterator))
        assert result.fetch() == variable.numpy() == third + 3 * (third + third)
        product = coordinator.schedule(lambda x: x * 2, (np.array(whole),))
        assert product.fetch() == 2 * whole
    assert coordinator.schedule(lambda x: x, (np.ones(2),)).fetch().dtype == "float32"


def test_iterators_are_independent(coordinator):
    dataset = coordinator.create_per_worker_dataset(numbers())

    def step(iterator):
        return next(iterator)

    for _ in range(3):
        assert coordinator.schedule(step, (iter(dataset),)).fetch() == 1.0


def test_one_program_for_all_iterators_of_a_form(strategy, coordinator):
    """And workers drop those that the user has dropped."""
    dataset = coordinator.create_per_worker_dataset(numbers())
    traced = []

    def step(iterator):
        traced.append(1)
        return next(iterator)

    for _ in range(4):
        assert coordinator.schedule(step, (iter(dataset),)).fetch() == 1.0
    assert len(traced) == 2  # Once to learn what it reads.
    gc.collect()
    coordinator.schedule(step, (iter(dataset),)).fetch()
    assert len(strategy.cluster.dropped) >= 4
    assert all(len(worker._sent) <= 6 for worker in strategy.cluster.workers)


def test_several_batches_in_a_function(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(numbers()))
    value = coordinator.schedule(lambda it: next(it) + 10 * next(it), (iterator,))
    assert value.fetch() == 21.0


@pytest.mark.parametrize("of_function", [True, False])
def test_a_dataset_function_that_asks_the_strategy(strategy, coordinator, of_function):
    """As in TensorFlow's tutorial of parameter servers."""

    def dataset_fn(inputs):
        rows = inputs.get_per_replica_batch_size(4 * strategy.num_replicas_in_sync)
        x = np.arange(8, dtype="float32")
        return kd.ArrayDataset((x, 2 * x), batch_size=rows)

    def per_worker_dataset_fn():
        if of_function:
            return strategy.distribute_datasets_from_function(dataset_fn)
        dataset = dataset_fn(kd.InputContext())
        return strategy.experimental_distribute_dataset(dataset)

    def step(iterator):
        x, y = next(iterator)
        return x, x + y

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
    x, total = coordinator.schedule(step, (iterator,)).fetch()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert total.tolist() == [0.0, 3.0, 6.0, 9.0]


def test_a_dataset_of_tensorflow_whose_last_batch_is_smaller(coordinator):
    def dataset():
        import tensorflow as tf

        x = tf.range(10.0)
        return tf.data.Dataset.from_tensor_slices((x, {"y": 2 * x})).batch(4)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def step(iterator):
        x, more = next(iterator)
        return keras.ops.sum(x), keras.ops.sum(more["y"])

    values = [coordinator.schedule(step, (iterator,)).fetch() for _ in range(3)]
    values = {tuple(map(float, value)) for value in values}
    assert values <= {(6.0, 12.0), (22.0, 44.0), (17.0, 34.0)}


def test_the_end_of_a_dataset_is_an_error(coordinator, behind_a_gate):
    dataset = coordinator.create_per_worker_dataset(behind_a_gate(numbers(2)))
    iterator = iter(dataset)

    def step(iterator):
        return next(iterator)

    values = [coordinator.schedule(step, (iterator,)) for _ in range(5)]
    behind_a_gate.open()
    for method in (lambda: coordinator.fetch(values), coordinator.join):
        text = r"at its end(.|\n)*repeat"
        with pytest.raises(kd.errors.OutOfRangeError, match=text):
            method()
    coordinator.join()


def test_the_first_error_is_raised_once_and_the_others_cancelled(
    coordinator, behind_a_gate
):
    broken = behind_a_gate(numbers(1), OSError("the disk is gone"))
    iterator = iter(coordinator.create_per_worker_dataset(broken))

    def step(iterator):
        return next(iterator)

    values = [coordinator.schedule(step, (iterator,)) for _ in range(50)]
    behind_a_gate.open()
    with pytest.raises(kd.errors.RemoteError, match=r"OSError in the task worker:\d"):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    failed = 0
    for value in values:
        try:
            assert value.fetch() == 1.0
        except kd.errors.DistributeError:
            failed += 1
    assert failed >= 48
    assert coordinator.schedule(lambda: keras.ops.ones(())).fetch() == 1.0


@pytest.mark.parametrize("method", ["schedule", "done"])
def test_other_methods_raise_the_error_too(coordinator, behind_a_gate, method):
    dataset = coordinator.create_per_worker_dataset(behind_a_gate(numbers(1)))
    iterator = iter(dataset)

    def step(iterator):
        return next(iterator)

    def call():
        if method == "schedule":
            return coordinator.schedule(lambda: keras.ops.ones(()))
        return coordinator.done()

    for _ in range(4):
        coordinator.schedule(step, (iterator,))
    behind_a_gate.open()
    with pytest.raises(kd.errors.OutOfRangeError):
        for _ in range(500):
            call()
            time.sleep(0.01)
    coordinator.join()


def test_a_mistake_in_the_function_is_raised_where_it_is_scheduled(coordinator):
    with pytest.raises(TypeError, match="unsupported operand"):
        coordinator.schedule(lambda x: x + "text", (1.0,))
    coordinator.join()


def test_values_of_each_worker(strategy, coordinator):
    own = PerWorkerValues([10.0, 20.0])
    values = coordinator.fetch(
        [coordinator.schedule(lambda x, y: x + y, (own, 1.0)) for _ in range(40)]
    )
    steps = [worker.steps for worker in strategy.cluster.workers]
    assert sorted(values) == [11.0] * steps[0] + [21.0] * steps[1]


def test_values_of_each_worker_that_share_one(coordinator):
    ones, twos, threes = (np.full(2, i, "float32") for i in (1, 2, 3))
    args = PerWorkerValues([ones, twos]), PerWorkerValues([ones, threes])
    twos[:] = 7  # The values are copies.

    def both(a, b):
        return a, b

    values = [coordinator.schedule(both, args) for _ in range(20)]
    found = {(float(a[0]), float(b[0])) for a, b in coordinator.fetch(values)}
    assert found <= {(1.0, 1.0), (2.0, 3.0)}


def test_remote_values_are_no_arguments(coordinator):
    value = coordinator.schedule(lambda: keras.ops.ones(()))
    with pytest.raises(ValueError, match=r"RemoteValue(.|\n)*value.fetch\(\)"):
        coordinator.schedule(lambda x: x, ((value,),))


def training(strategy, kind="Adam"):
    """A model, its optimizer, a metric, and a step over them."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = getattr(keras.optimizers, kind)(0.05)
        optimizer.epsilon = 1e-3
        metric = keras.metrics.Mean()
    loss_of = keras.losses.MeanSquaredError()
    both = kd.value_and_grad(
        lambda x, y: loss_of(y, model(x)), model.trainable_variables
    )

    def step(x, y):
        loss, grads = both(x, y)
        optimizer.apply(grads, model.trainable_variables)
        metric.update_state(loss)
        return loss

    return model, optimizer, metric, step


@pytest.mark.parametrize("kind", ["Adam", "Nadam"])  # Nadam makes a number, too.
def test_a_custom_loop_with_one_worker_is_that_of_one_device(one_worker, kind):
    coordinator = ClusterCoordinator(one_worker)
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(2, 8, 4)).astype("float32") for _ in range(20)]
    model, optimizer, metric, step = training(one_worker, kind)
    values = [coordinator.schedule(step, (x, y[:, :2])) for x, y in batches]
    losses = coordinator.fetch(values)
    plain, plain_optimizer, plain_metric, plain_step = training(kd.get_strategy(), kind)
    expected = [float(plain_step(x, y[:, :2])) for x, y in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(
        model.get_weights()[0], plain.get_weights()[0], rtol=1e-5, atol=1e-7
    )
    assert metric.result() == pytest.approx(float(plain_metric.result()))
    assert optimizer.iterations.numpy() == plain_optimizer.iterations.numpy() == 20


def test_the_replica_of_a_worker(strategy, coordinator):
    """TensorFlow's tutorial of parameter servers, and what a replica can ask."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        accuracy = keras.metrics.MeanSquaredError()
    each_loss = keras.losses.MeanSquaredError(reduction=None)
    x = np.arange(12, dtype="float32").reshape(4, 3) / 12
    y = x.sum(axis=1, keepdims=True)
    before = model.get_weights()

    def of_replica(x, y):
        replica = kd.get_replica_context()
        assert (replica.strategy, replica.num_replicas_in_sync) == (strategy, 1)
        assert not kd.in_cross_replica_context()

        def loss_of():
            predicted = model(x, training=True)
            accuracy.update_state(y, predicted)
            return kd.nn.compute_average_loss(each_loss(y, predicted))

        loss, grads = kd.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        total = replica.all_reduce("sum", replica.replica_id_in_sync_group + x)
        return loss, total, replica.merge_call(lambda s, v: s.reduce("sum", v, 0), (y,))

    def step(x, y):
        loss, total, merged = strategy.run(of_replica, (x, y))
        assert kd.in_cross_replica_context()
        mean = strategy.reduce("mean", x, axis=0)
        return strategy.reduce("sum", loss, axis=None), total, merged, mean

    loss, total, merged, mean = coordinator.schedule(step, (x, y)).fetch()
    np.testing.assert_array_equal(total, x)
    np.testing.assert_allclose(merged, y.sum(0))
    np.testing.assert_allclose(mean, x.mean(0))
    error = x @ before[0] + before[1] - y
    np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(accuracy.result(), (error**2).mean(), rtol=1e-5)
    kernel = before[0] - 0.1 * 2 * x.T @ error / 4
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-4, atol=1e-6)


def test_values_that_python_looks_at_in_a_scheduled_function(
    strategy, coordinator, tmp_path
):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    checkpoint = kd.Checkpoint(model=model)
    weight = model.weights[0]
    looks = [
        lambda: float(keras.ops.sum(weight)),
        lambda: 1.0 if keras.ops.max(weight) > 0 else 0.0,
        lambda: weight.numpy(),
        lambda: model.get_weights(),
        lambda: checkpoint.save(tmp_path / "it"),
        lambda: model.save_weights(tmp_path / "it.weights.h5"),
    ]
    for look in looks:
        with pytest.raises(kd.errors.ContextError, match="have no values") as found:
            coordinator.schedule(look)
        assert "Fix: in the function keras.ops" in str(found.value)
    for look in (lambda x: int(x[0]), lambda x: x[x > 0], lambda x: [0][x[0]]):
        with pytest.raises(kd.errors.ContextError, match="have no values"):
            coordinator.schedule(look, (np.zeros(4, "int32"),))
    assert coordinator.fetch(coordinator.schedule(lambda: weight.value)).shape == (2, 1)
    checkpoint.save(tmp_path / "it")


def test_strategy_run_belongs_into_a_scheduled_function(strategy, coordinator):
    def step(x):
        return strategy.run(lambda y: 2 * y, (x,))

    assert coordinator.schedule(step, (4.0,)).fetch() == 8.0
    with pytest.raises(kd.errors.ContextError, match=r"coordinator.schedule\(step\)"):
        strategy.run(lambda: 1)


def test_a_weight_is_not_read_after_its_gradient(strategy, coordinator):
    step = training(strategy)[-1]

    def two_steps(x, y):
        step(x, y)
        return step(x, y)

    x = np.ones((4, 4), "float32")
    with pytest.raises(kd.errors.ContextError, match=r"schedule one step a call"):
        coordinator.schedule(two_steps, (x, x[:, :2]))


def test_the_count_of_steps_is_not_read_after_a_gradient(strategy, coordinator):
    _, optimizer, _, step = training(strategy)

    def counted(x, y):
        return step(x, y), optimizer.iterations.value

    x = np.ones((4, 4), "float32")
    with pytest.raises(
        kd.errors.ContextError, match=r"iteration.*(.|\n)*read it befor"
    ):
        coordinator.schedule(counted, (x, x[:, :2]))


@pytest.mark.parametrize("shapes", [[(4, 2)], [(4, 3), (2,)]])
def test_gradients_that_are_not_those_of_the_weights(strategy, coordinator, shapes):
    model, optimizer, _, _ = training(strategy)

    def step():
        grads = [keras.ops.ones(shape) for shape in shapes]
        optimizer.apply(grads, model.trainable_variables)

    with pytest.raises(kd.errors.StructureTypeError, match=r"one gradient, or None"):
        coordinator.schedule(step)


def test_no_gradient_at_all(strategy, coordinator):
    model, optimizer, _, _ = training(strategy)
    with pytest.raises(ValueError, match=r"No gradients provided"):
        coordinator.schedule(
            lambda: optimizer.apply([None, None], model.trainable_variables)
        )


def test_variables_of_another_scope(coordinator):
    """What is scheduled afterwards runs."""
    other = keras.Variable(1.0)
    for function in (lambda: other + 1.0, lambda: other.assign(2.0)):
        with pytest.raises(kd.errors.VariableScopeError, match=r"scope(.|\n)*Fix"):
            coordinator.schedule(function)
    assert coordinator.schedule(lambda: 1.0).fetch() == 1.0


def test_typed_keys_do_not_travel(coordinator):
    key = jax.random.key(0)
    for function, args in ((lambda key: 1.0, (key,)), (lambda: key, ())):
        with pytest.raises(kd.errors.StructureTypeError, match=r"key_data"):
            coordinator.schedule(function, args)


def test_a_function_that_creates_variables_each_time(coordinator):
    def make():
        return keras.Variable("ones", shape=()).value

    with pytest.raises(kd.errors.VariableScopeError, match=r"create models, metrics"):
        coordinator.schedule(make)


def test_a_function_that_creates_a_variable_of_a_value(strategy, coordinator, tmp_path):
    """As what loads a model does."""
    path = tmp_path / "model.keras"
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.save(path)
    made = r"that workers run creates a variable, or (.|\n)*Variable\(0\) (.|\n)*Fix"
    for function in (lambda: keras.Variable(0), lambda: keras.models.load_model(path)):
        with pytest.raises(kd.errors.VariableScopeError, match=made):
            coordinator.schedule(function)
    assert coordinator.schedule(lambda: 1.0).fetch() == 1.0


def test_layers_may_be_built_by_the_first_call(strategy, coordinator):
    with strategy.scope():
        dense = keras.layers.Dense(2, kernel_initializer="ones")
    x = np.ones((1, 3), "float32")
    assert coordinator.schedule(dense, (x,)).fetch().tolist() == [[3.0, 3.0]]


def test_an_iterator_is_read_in_functions_alone(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(numbers()))
    with pytest.raises(kd.errors.ContextError, match=r"is an argument of the function"):
        next(iterator)


def test_datasets_that_cannot_be_had(coordinator):
    with pytest.raises(kd.errors.InputError, match="no batch"):
        coordinator.create_per_worker_dataset(lambda: iter(()))
    with pytest.raises(kd.errors.InputError, match=r"iterated\.\n  Received: None\."):
        coordinator.create_per_worker_dataset(lambda: None)
    lock = __import__("threading").Lock()
    message = r"computes with numbers\.(.|\n)*dtype <U1\.(.|\n)*StringLookup"
    with pytest.raises(kd.errors.InputError, match=message):
        coordinator.create_per_worker_dataset([{"x": np.ones(1), "name": ["a", "b"]}])
    with pytest.raises(kd.errors.InputError, match="cannot be sent"):
        coordinator.create_per_worker_dataset(lambda: [lock])


def test_wrong_arguments(strategy, coordinator):
    with pytest.raises(kd.errors.StructureTypeError, match="is a function"):
        coordinator.schedule(3)
    with pytest.raises(kd.errors.StructureTypeError, match="ParameterServerStrategy"):
        ClusterCoordinator(kd.MirroredStrategy(["cpu:0"]))
    with pytest.raises(kd.errors.StructureTypeError, match="one shape and one dtype"):
        PerWorkerValues([np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match=r"3 values for 2 worker"):
        coordinator.schedule(lambda x: x, (PerWorkerValues([1.0, 2.0, 3.0]),))
    with pytest.raises(kd.errors.ContextError, match="inside a scheduled function"):
        coordinator.schedule(lambda: coordinator.join())
    with pytest.raises(kd.errors.ClusterError, match="has no ps task"):
        cluster = kd.cluster_resolver.ClusterSpec({"worker": ["a:1"]})
        kd.ParameterServerStrategy(kd.cluster_resolver.SimpleClusterResolver(cluster))


@pytest.mark.parametrize("method", ["fit", "predict", "train_on_batch"])
def test_methods_of_models_inside_functions_are_refused(strategy, coordinator, method):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = [np.ones((4, 2), "float32")] * (1 if method == "predict" else 2)
    with pytest.raises(kd.errors.ContextError, match=r"(.|\n)*a scheduled function\."):
        coordinator.schedule(lambda: getattr(model, method)(*data))


def test_closed_strategies_leave_nothing(cluster):
    from tests.parameter_server.conftest import resolver_of

    for _ in range(3):
        strategy = kd.ParameterServerStrategy(resolver_of(cluster, 2))
        assert ClusterCoordinator(strategy).schedule(lambda: 1.0).fetch() == 1.0
        threads = strategy.cluster.workers
        strategy.close()
        assert not any(thread.is_alive() for thread in threads)
        gc.collect()


def test_dropped_strategies_leave_nothing(cluster):
    strategy = kd.ParameterServerStrategy(cluster.cluster_resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
    iterator = iter(coordinator.create_per_worker_dataset(numbers()))
    coordinator.schedule(lambda iterator: next(iterator), (iterator,)).fetch()
    threads, known = list(strategy.cluster.workers), weakref.ref(strategy.cluster)
    del strategy, coordinator, model, iterator
    gc.collect()
    dropped.settle()
    assert known() is None
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("bound", [0, 2])
def test_gradients_that_are_too_old_are_computed_again(cluster, bound):
    """Each push adds the value that the step has pulled, and one: with a bound of 0
    every step has seen the one before, and the numbers are those of one worker.
    """
    strategy = kd.ParameterServerStrategy(cluster.cluster_resolver, max_staleness=bound)
    try:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            v = keras.Variable(0.0)
            n = keras.Variable(0, dtype="int32")

        def double():
            v.assign(2 * v.value + 1.0)
            n.assign_add(1)

        for _ in range(20):
            coordinator.schedule(double)
        coordinator.join()
        assert n.numpy() == 20
        if bound == 0:
            assert v.numpy() == 2.0**20 - 1.0
    finally:
        strategy.close()


def test_batches_of_other_forms(one_worker):
    """In their order, and with what a program adds for its own number of rows."""
    coordinator = ClusterCoordinator(one_worker)
    with one_worker.scope():
        seen = keras.metrics.Mean()
        order = keras.Variable(0.0)

    def step(batch):
        x = next(batch)
        seen.update_state(x)
        order.assign(order.value * 3 + x[0])

    def sizes():
        for i in range(6):
            yield np.full(4 if i % 3 else 2, i, "float32")

    iterator = iter(coordinator.create_per_worker_dataset(sizes))
    for _ in range(6):
        coordinator.schedule(step, (iterator,))
    coordinator.join()
    assert order.numpy() == sum(i * 3.0 ** (5 - i) for i in range(6))
    assert seen.count.numpy() == 20
    assert seen.total.numpy() == sum(i * (4 if i % 3 else 2) for i in range(6))


def test_batches_of_other_forms_for_which_other_variables_are_read(one_worker):
    """On the coordinator and on a server, with what was added before."""
    coordinator = ClusterCoordinator(one_worker)
    with one_worker.scope():
        a = keras.Variable(5, dtype="int32", trainable=False)
        b = keras.Variable(7, dtype="int32", trainable=False)
        seen = keras.Variable(0, dtype="int32", trainable=False)
        w = keras.Variable(0.5)

    def step(batch):
        rows = next(batch).shape[0]
        found = a.value * 1.0 if rows == 4 else b.value + 100 * seen.value + w.value
        seen.assign_add(rows)
        return found

    def last(batch):
        rows = next(batch).shape[0]
        return a.value * 1 if rows == 4 else a.value + b.value

    sizes = [4, 2, 2, 4, 2]

    def batches():
        return (np.ones(size, "float32") for size in sizes)

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    found = [coordinator.schedule(step, (iterator,)).fetch() for _ in sizes]
    assert found == [5.0, 407.5, 607.5, 5.0, 1207.5]
    assert seen.numpy() == sum(sizes)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    values = [coordinator.schedule(last, (iterator,)) for _ in sizes]
    assert coordinator.fetch(values) == [5, 12, 12, 5, 12]


def test_a_function_that_cannot_take_a_batch(one_worker):
    """What comes after it does not wait for its program."""
    coordinator = ClusterCoordinator(one_worker)

    def step(batch):
        x = next(batch)
        if x.shape == (2,):
            raise ValueError("of two rows")
        return x.sum()

    def sizes():
        for i in range(6):
            yield np.ones(2 if i == 1 else 4, "float32")

    iterator = iter(coordinator.create_per_worker_dataset(sizes))
    with pytest.raises(ValueError, match="of two rows"):
        for _ in range(6):
            coordinator.schedule(step, (iterator,))
        coordinator.join()
    assert coordinator.schedule(step, (iterator,)).fetch() == 4.0


def test_numbers_of_64_bits_for_the_thread_that_schedules(one_worker):
    """The update of a server has them, and a step for batches of another form."""
    coordinator, third = ClusterCoordinator(one_worker), np.float64(1) / 3

    def sizes():
        return iter([np.full(size, third) for size in (2, 1)])

    with jax.enable_x64(True), one_worker.scope():
        weight = keras.Variable(third, dtype="float64")
        optimizer = keras.optimizers.SGD(0.5)

        def step(iterator):
            gradient = next(iterator).sum()
            optimizer.apply([gradient], [weight])
            return gradient

        iterator = iter(coordinator.create_per_worker_dataset(sizes))
        steps = [coordinator.schedule(step, (iterator,)) for _ in range(2)]
        assert coordinator.fetch(steps) == [2 * third, third]
        coordinator.join()
        assert weight.numpy() == third - third - third / 2


def test_the_precision_of_products_for_the_thread_that_schedules(one_worker):
    coordinator, seen = ClusterCoordinator(one_worker), []

    def step(iterator):
        rows = next(iterator)
        seen.append((len(rows), jax.config.jax_default_matmul_precision))
        return keras.ops.sum(rows @ rows.T)

    def sizes():
        return iter([np.ones((size, 2), "float32") for size in (2, 1)])

    iterator = iter(coordinator.create_per_worker_dataset(sizes))
    with jax.default_matmul_precision("highest"):
        steps = [coordinator.schedule(step, (iterator,)) for _ in range(2)]
        assert coordinator.fetch(steps) == [8, 2]
    assert set(seen) == {(2, "highest"), (1, "highest")}


def test_a_new_function_in_each_call_is_warned_about(coordinator):
    with pytest.warns(UserWarning, match=r"^coordinator\.schedule has compiled .* 8"):
        for _ in range(8):
            coordinator.schedule(lambda: 1)
    coordinator.join()


def test_a_coordinator_with_a_gpu_takes_no_kernels_of_it_for_workers_on_cpus(
    coordinator, monkeypatch
):
    """Keras asks JAX for its devices when a function is traced."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen = []

    def function():
        seen.append((jax.default_backend(), jax.devices()[0].platform))
        return 1

    assert coordinator.schedule(function).fetch() == 1
    assert set(seen) == {("cpu", "cpu")}
    assert jax.default_backend() == "gpu"


def test_tensorflow_in_a_scheduled_function(strategy):
    """It would run once, and its result would be a constant of the program."""
    tf = pytest.importorskip("tensorflow")
    coordinator = ClusterCoordinator(strategy)
    doubled = tf.function(lambda x: 2 * x, autograph=False)
    for function in (lambda x: x * tf.random.normal([]).numpy(), doubled, tf.square):
        with pytest.raises(
            kd.errors.ContextError, match="(?s)TensorFlow computes.*Fix"
        ):
            coordinator.schedule(function, (np.float32(2),))

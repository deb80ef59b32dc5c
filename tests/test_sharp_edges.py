"""Uses at the edge of what a traced program allows: right, or refused with a remedy."""

import contextlib
import itertools
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers

import keras_distribute as kd
from keras_distribute import errors
from tests.support import dense_model, distributed, mirrored

X = np.ones((4, 2), "float32")


@pytest.fixture
def strategy():
    return mirrored(4)


def test_variables_read_inside_transformed_functions(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), layers.Dense(1, kernel_initializer="ones")]
        )
        k = keras.Variable(1.0)

    def body(carry, _):
        return carry + k.value, None

    remat = jax.checkpoint(model)
    jitted = jax.jit(lambda x: model(x))
    for _ in range(2):  # Also when another signature has been traced in between.
        for rows in (4, 2):
            for fn in (remat, jitted, lambda x: lax.cond(x[0, 0] > 0, model, model, x)):
                result = strategy.run(lambda x, fn=fn: fn(x), (X[:rows],)).values[3]
                np.testing.assert_array_equal(result, np.full((rows, 1), 2.0))
    assert float(strategy.run(lambda: lax.scan(body, 0.0, None, 3)[0]).values[0]) == 3.0
    value, grads = strategy.run(
        lambda x: kd.value_and_grad(
            lambda: jnp.sum(jax.checkpoint(model)(x)), model.trainable_variables
        )(),
        (X,),
    )
    assert float(value.values[0]) == 8.0
    np.testing.assert_array_equal(grads[0].values[1], [[4.0], [4.0]])


def test_methods_are_told_apart(strategy):
    def timed(f):
        def wrapper(self, *args):
            return f(self, *args)

        return wrapper

    class Loop:
        @timed
        def train(self, x):
            return x + 1

        @timed
        def evaluate(self, x):
            return x * 100

        def step(self, x):
            return x + 1

    class Child(Loop):
        def step(self, x):
            return x * 100

        def both(self):
            return self.step, super().step

    loop, x = Child(), np.float32(3)
    methods = [loop.train, loop.evaluate, *loop.both()]
    methods += [types.MethodType(lambda self, x, n=n: x * 0 + n, loop) for n in (1, 2)]
    assert [float(strategy.run(m, (x,)).values[0]) for m in methods] == [
        4,
        300,
        300,
        4,
        1,
        2,
    ]


@pytest.mark.parametrize(
    "make",
    [lambda x: layers.Dense(2)(x), lambda x: layers.Dropout(0.5)(x, training=True)],
    ids=["layer", "seed"],
)
def test_variables_made_at_each_call_are_refused(strategy, make):
    with pytest.raises(
        errors.VariableScopeError,
        match="(?s)creates variables each time it is called.*Fix: make it once",
    ):
        strategy.run(make, (X,))


def test_a_model_that_is_loaded_at_each_call_is_refused(strategy, tmp_path):
    path = str(tmp_path / "model.keras")
    keras.Sequential([keras.Input((X.shape[-1],)), layers.Dense(1)]).save(path)
    with pytest.raises(
        errors.VariableScopeError, match=r"each time it is called(.|\n)*is loaded there"
    ):
        strategy.run(lambda x: keras.saving.load_model(path)(x), (X,))


@pytest.mark.parametrize("name", ["Adafactor", "Nadam"])
def test_optimizers_that_are_not_built_make_numbers_in_run(name):
    """Their variables begin with values, not with initializers."""
    found = []
    for strategy in (mirrored(2), kd.get_strategy()):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
            optimizer = getattr(keras.optimizers, name)(0.01)

        def step(x, model=model, optimizer=optimizer):
            weights = model.trainable_variables
            loss = lambda: keras.ops.mean(model(x) ** 2)  # noqa: E731
            _, gradients = kd.value_and_grad(loss, weights)()
            count = kd.get_strategy().num_replicas_in_sync
            optimizer.apply([g / count for g in gradients], weights)

        x = np.arange(12, dtype="float32").reshape(4, 3)
        data = strategy.experimental_distribute_dataset(kd.ArrayDataset(x, 4))
        for _ in range(3):
            for batch in data:
                strategy.run(step, (batch,))
        found.append(model.get_weights())
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "look",
    [
        lambda x, i: x if i == 0 else -x,
        lambda x, i: [x, -x, x, -x][i],
        lambda x, i: float(keras.ops.sum(x)),
        lambda x, i: np.sort(x),
    ],
    ids=["if", "index", "float", "numpy"],
)
def test_values_that_python_looks_at_are_refused(strategy, look):
    def step(x):
        return look(x, kd.get_replica_context().replica_id_in_sync_group)

    text = (
        r"(?s)no values that Python could look at.*Received: \w+Error: .*Fix: .*where"
    )
    with pytest.raises(errors.ContextError, match=text) as raised:
        strategy.run(step, (X,))
    assert isinstance(raised.value.__cause__, jax.errors.JAXTypeError)


def test_the_sum_of_a_number_that_each_replica_returns(strategy):
    number = strategy.run(lambda x: x.shape[0], (X,))
    assert number == X.shape[0]
    with pytest.raises(
        errors.ValueStructureError, match=r"convert_to_tensor\(x.shape\[0\]\)"
    ):
        strategy.reduce("SUM", number, axis=None)
    rows = strategy.run(lambda x: keras.ops.convert_to_tensor(x.shape[0]), (X,))
    total = strategy.num_replicas_in_sync * X.shape[0]
    assert int(strategy.reduce("SUM", rows, axis=None)) == total


def test_communication_that_only_some_replicas_would_reach_is_refused(strategy):
    def in_condition():
        context = kd.get_replica_context()
        first = context.replica_id_in_sync_group == 0
        return lax.cond(
            first, lambda: context.all_reduce("SUM", 1.0), lambda: jnp.float32(0)
        )

    def in_loop():
        context = kd.get_replica_context()
        rounds = context.replica_id_in_sync_group
        return lax.fori_loop(
            0, rounds, lambda i, c: context.all_reduce("SUM", c), jnp.float32(1)
        )

    for fn in (in_condition, in_loop):
        with pytest.raises(
            errors.ContextError,
            match="(?s)wait for each other forever.*Fix: communicate outside",
        ):
            strategy.run(fn)
    assert float(kd.MirroredStrategy(["cpu:0"]).run(in_condition).values[0]) == 1.0


_APART = {
    "cond": lambda assign: jax.lax.cond(True, assign, lambda: jnp.zeros(2)),
    "keras-cond": lambda assign: keras.ops.cond(
        jnp.asarray(True), assign, lambda: jnp.zeros(2)
    ),
    "scan": lambda assign: jax.lax.scan(
        lambda carry, _: (carry, assign()), 0, None, length=2
    ),
    "jit": lambda assign: jax.jit(assign)(),
    "checkpoint": lambda assign: jax.checkpoint(assign)(),
    "vmap": lambda assign: jax.vmap(lambda one: assign(one))(jnp.ones(3)),
    "grad": lambda assign: jax.grad(lambda one: assign(one)[0])(1.0),
}


@pytest.mark.parametrize("how", _APART)
def test_assignments_in_functions_that_jax_traces_apart_are_refused(strategy, how):
    """They would be lost, or be made in any case, as of a branch that is not taken."""
    with strategy.scope():
        variable = keras.Variable(np.ones(2, "float32"), name="apart")
        weight = keras.Variable(3.0)

    def step(x):
        outside = x[0, :2] * 0

        def assign(factor=1.0):
            # In a branch also what is computed outside of it.
            return variable.assign(outside if how == "cond" else outside + factor)

        _APART[how](assign)
        return weight * weight

    def gradient(x):
        return kd.value_and_grad(lambda: step(x), [weight])()

    text = r"(?s)was assigned in a function that JAX traces apart.*lax\.scan.*Fix"
    for run in (
        lambda: strategy.run(step, (X,)),
        lambda: strategy.run(gradient, (X,)),
        lambda: gradient(jnp.asarray(X)),
    ):
        with pytest.raises(errors.VariableScopeError, match=text):
            run()
    np.testing.assert_array_equal(variable, [1, 1])


def test_assignments_under_transformations_of_what_they_do_not_depend_on(strategy):
    with strategy.scope():
        variable, seed = keras.Variable(1.0), keras.random.SeedGenerator(0)
    before = seed.state.numpy()

    def step():
        jax.grad(lambda one: (variable.assign(variable * 2), one)[1])(1.0)
        return jax.vmap(lambda one: keras.random.uniform((), seed=seed) + one)(X[:, 0])

    with jax.checking_leaks():
        strategy.run(step)
    assert float(variable) == 2
    assert not np.array_equal(seed.state, before)


def test_references_and_callbacks_prove_nothing(strategy):
    with strategy.scope():
        v = keras.Variable(0.0)

    def through_reference():
        reference = jax.new_ref(jnp.float32(0))
        reference[...] = lax.axis_index("replica").astype("float32")
        v.assign(jax.freeze(reference))

    with pytest.raises(errors.AggregationError, match="different values"):
        strategy.run(through_reference)


def test_components_read_while_tracing(strategy):
    with strategy.scope():
        v = keras.Variable(1.0)

    def fn():
        return v.values[0] * 1.0

    assert float(strategy.run(fn).values[0]) == 1.0
    v.assign(9.0)
    assert float(strategy.run(fn).values[0]) == 9.0
    value = strategy.run(lambda: jnp.float32(1))
    with pytest.raises(errors.StructureTypeError, match="not one array"):
        strategy.run(lambda: jnp.asarray(value) + 1)
    assert int(value.values[0]) == 1


def test_arrays_from_elsewhere_and_keys(strategy):
    x = jax.device_put(jnp.ones(3), jax.devices()[6])
    np.testing.assert_array_equal(
        strategy.run(lambda x: x + 1, (x,)).values[2], [2, 2, 2]
    )
    key = jax.random.key(0)
    np.testing.assert_array_equal(
        strategy.run(lambda k: jax.random.normal(k, (2,)), (key,)).values[1],
        jax.random.normal(key, (2,)),
    )


def test_reductions_of_unusual_values(strategy):
    def all_of(value):
        return strategy.experimental_distribute_values_from_function(lambda c: value)

    assert float(strategy.reduce("MEAN", all_of(np.float16(30000)), axis=None)) == 30000
    assert int(strategy.reduce("SUM", all_of(np.bool_(True)), axis=None)) == 4
    for whole in (np.int8(100), np.uint8(200), np.int32(2_000_000_000)):
        for value, axis in ((whole, None), (np.full(3, whole), 0)):
            mean = strategy.reduce("MEAN", all_of(value), axis=axis)
            assert (mean.dtype, float(mean)) == ("float32", float(whole))
    assert strategy.gather(all_of(np.zeros((0, 2))), axis=0).shape == (0, 2)
    with pytest.raises(errors.StructureTypeError, match="Only arrays can be reduced"):
        strategy.reduce("SUM", all_of(np.array(["a"])), axis=None)
    with pytest.raises(
        errors.ValueStructureError, match="Each axis can be reduced once"
    ):
        strategy.reduce("SUM", all_of(np.zeros((2, 2))), axis=(0, 0))
    for number in (2**40, -(2**70)):
        with pytest.raises(
            errors.ValueStructureError,
            match=f"(?s)32-bit integers, and these do not fit.*values from {number} to"
            ".*Fix: jax.config",
        ):
            all_of(number)


def test_scalar_losses_and_penalties_are_shares(strategy):
    a = np.arange(4, dtype="float32")[:, None]

    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean((y_true - y_pred) ** 2)

    loss = Own()
    shares = strategy.run(
        lambda p: loss(0 * p, p), (distributed(strategy, a[:, None]),)
    )
    assert float(strategy.reduce("SUM", shares, axis=None)) == pytest.approx(
        float(loss(0 * a, a))
    )
    with strategy.scope():
        dense = layers.Dense(
            1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(1.0)
        )
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile("sgd", "mse")
    shares = strategy.run(
        lambda p: model.compute_loss(x=p, y=p, y_pred=model(p)),
        (distributed(strategy, a[:, None]),),
    )
    assert float(strategy.reduce("SUM", shares, axis=None)) == pytest.approx(1.0)


def mean_free(z):
    return z - keras.ops.mean(z, axis=0)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Softmax(axis=0),
        lambda: layers.UnitNormalization(axis=0),
        lambda: layers.Activation(mean_free),
        lambda: layers.Dense(6, activation=mean_free),
        lambda: layers.Dropout(0.5, noise_shape=(16, 6), seed=1),
    ],
    ids=["softmax", "unit normalization", "activation", "dense", "fixed noise"],
)
def test_accumulation_with_layers_that_mix_rows(strategy, layer):
    def train():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), layer(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        rng = np.random.default_rng(0)
        return model.fit(
            rng.normal(size=(32, 6)),
            rng.normal(size=(32, 1)),
            batch_size=16,
            shuffle=False,
            verbose=0,
            epochs=2,
        ).history["loss"]

    with strategy.scope():
        ours = train()
    np.testing.assert_allclose(ours, train(), rtol=1e-5)


def test_batch_normalization_of_what_is_not_the_batch(strategy):
    """Per replica only where its rows are the batch's: a table of weights, or two
    batches joined, are one group.
    """

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(momentum=0.0)
            self.out = layers.Dense(1)

        def call(self, x, training=False):
            both = self.norm(keras.ops.concatenate([x, 100 + x]), training=training)
            return self.out(both)[: x.shape[0]]

    def train():
        keras.utils.set_random_seed(0)
        model = Model()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        x = np.random.RandomState(0).randn(8, 3).astype("float32")
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        return model.norm.moving_variance.numpy()

    with strategy.scope():
        ours = train()
    np.testing.assert_allclose(ours, train(), rtol=1e-4)
    assert ours.min() > 2000


def test_models_around_and_beside(strategy):
    """A model of a scope's parts runs on replicas; a plain one stays plain."""
    with strategy.scope():
        backbone = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    extractor = keras.Model(backbone.inputs, backbone.layers[0].output)
    extractor.make_predict_function()
    seams_step = extractor.predict(np.ones((8, 2)), verbose=0)
    np.testing.assert_allclose(
        seams_step, backbone.predict(np.ones((8, 2)), verbose=0), rtol=1e-6
    )
    mixed = keras.Sequential([backbone, layers.Dense(1)])
    mixed.build((None, 2))
    with pytest.raises(errors.VariableScopeError, match="2 variable.*do not belong"):
        mixed.predict(np.ones((8, 2)), verbose=0)
    plain = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    seen = []

    class Beside(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(plain.predict(np.ones((3, 2)), verbose=0))
            made = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
            seen.append(made.predict(np.ones((3, 2)), verbose=0))

    model = dense_model(strategy, 2)
    model.fit(X, X[:, :1], verbose=0, callbacks=[Beside()])
    assert [s.shape for s in seen] == [(3, 1), (3, 1)]
    assert type(plain.weights[0]) is keras.Variable


def test_reading_a_variable_in_the_middle_of_an_epoch(strategy):
    """It has the value that the last step gave it, wherever it is read."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            value = model.weights[0].numpy()
            np.testing.assert_array_equal(strategy.run(step).values[0], value)
            model.jax_state_sync()
            np.testing.assert_array_equal(model.weights[0].numpy(), value)
            seen.append(value)

    model = dense_model(strategy, 2)

    def step():
        return model.weights[0].value

    model.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=[Look()])
    assert all((a != b).any() for a, b in itertools.pairwise(seen))
    np.testing.assert_array_equal(seen[-1], model.weights[0].numpy())


def test_arrays_that_another_program_has_deleted(strategy):
    """A model without a strategy gives the arrays of its variables to its steps, also
    those that it was given: the state says so, and is not launched with.
    """
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        counter = keras.Variable(1.0, aggregation="sum")
    model.fit(X, X[:, :1], verbose=0)
    beside = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    for own, other in zip(beside.variables, model.variables, strict=True):
        own.assign(other)
    beside.predict(X, verbose=0)
    lost = "'.*/kernel' is lost: a program that was given it has deleted it"
    for _ in range(2):
        with pytest.raises(errors.ContextError, match=lost):
            model.fit(X, X[:, :1], verbose=0)
    with pytest.raises(errors.ContextError, match=lost):
        model.get_weights()
    model.set_weights([np.ones(v.shape) for v in model.weights])
    beside.set_weights(model.get_weights())
    beside.predict(X, verbose=0)
    assert model.fit(X, X[:, :1], verbose=0).history["loss"] == [4.0]

    def count():
        counter.assign_add(1.0)

    strategy.run(count)
    jax.jit(lambda value: value + 1, donate_argnums=0)(counter.value)
    with pytest.raises(errors.ContextError, match="is lost: a program that was given"):
        strategy.run(count)


def test_a_state_that_a_step_has_deleted(strategy):
    """Of a loop that keeps the arrays by itself, and goes back to old ones."""
    model = dense_model(strategy, 2)
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([jnp.array(v.value) for v in group] for group in groups)
    batch = X, X[:, :1]
    for _ in range(3):  # From the second call on without Python.
        before = state
        _, state = model.train_function(state, iter([batch]))
    deleted = r"array of shape \(2, 1\)(.|\n)*Fix: the state that the last step"
    with pytest.raises(errors.ContextError, match=deleted):
        model.train_function(before, iter([batch]))
    model.train_function(state, iter([batch]))


def test_programs_that_are_not_to_be_compiled_are_refused(strategy):
    model = dense_model(strategy, 2)
    refused = pytest.raises(errors.ContextError, match=r"Received: jax.disable_jit\(\)")
    for _ in range(2):  # New, and known.
        with jax.disable_jit(), refused:
            model.fit(X, X[:, :1], verbose=0)
        model.fit(X, X[:, :1], verbose=0)
    with jax.disable_jit(), refused:
        strategy.run(lambda: kd.get_replica_context().replica_id_in_sync_group + 1)


def test_reduce_inside_a_step_of_fit(strategy):
    class Model(keras.Sequential):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return kd.get_strategy().reduce("SUM", keras.ops.mean(y_pred), axis=None)

    with strategy.scope():
        model = Model([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd")
    with pytest.raises(
        errors.ContextError, match="(?s)nothing to reduce.*Fix: use the value as it is"
    ):
        model.fit(X, X[:, :1], verbose=0)


def test_many_python_values_are_warned_about(strategy):
    def fn(x, i):
        return x + i

    with pytest.warns(
        UserWarning, match=r"(?s)has compiled .*fn' 8 times.*np.int32\(step\)"
    ):
        for i in range(8):
            strategy.run(fn, (X, i))


def test_a_list_of_callbacks_that_was_made_before_the_import_takes_part():
    """Such a list is of Keras's class, ours a subclass that replaces it."""
    plain = kd.training.callback_list.CallbackList
    assert issubclass(keras.callbacks.CallbackList, plain)
    assert plain is not keras.callbacks.CallbackList
    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    report = kd.callbacks.StepTimeReport(num_steps=2, skip=1, verbose=0)
    seen = []
    history = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(made.callbacks[0])
    )
    made = plain([history, report], True, model=model, epochs=1, verbose=0)
    x = np.ones((4, 2), "float32")
    model.fit(x, x[:, :1], batch_size=1, verbose=0, callbacks=made)
    assert seen == [report]  # Which is moved to the front.
    assert report.milliseconds


class WithMore(keras.Model):
    """A model whose list of metrics may grow."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(3), layers.Dense(1)
        self.__dict__["more"] = []

    def call(self, x):
        return self.last(self.first(x))

    @property
    def metrics(self):
        return super().metrics + self.__dict__["more"]


def test_a_metric_that_comes_after_the_first_fit(strategy):
    rows = np.arange(16, dtype="float32").reshape(8, 2) / 16
    results = []
    for each in (None, strategy):
        with each.scope() if each else contextlib.nullcontext():
            keras.utils.set_random_seed(0)
            model = WithMore()
            model.compile("adam", "mse", metrics=["mae"])
            model.fit(rows, rows[:, :1], verbose=0)
            model.__dict__["more"].append(keras.metrics.Mean(name="more"))
        logs = model.fit(rows, rows[:, :1], verbose=0).history
        results.append({name: values[0] for name, values in logs.items()})
    assert results[0].keys() == results[1].keys() == {"loss", "mae", "more"}
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_layer_frozen_or_thawed_without_compiling(strategy, trainable):
    with strategy.scope():
        model = WithMore()
        model.first.trainable = not trainable
        model.compile("sgd", "mse")
    model.fit(X, X[:, :1], verbose=0)
    model.first.trainable = trainable
    with pytest.raises(errors.ValueStructureError, match="call model.compile") as told:
        model.fit(X, X[:, :1], verbose=0)
    assert "have changed since its step was compiled" in str(told.value)
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], verbose=0)

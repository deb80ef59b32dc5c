"""Custom loops: gradients, optimizers, losses, batch normalization and metrics inside
`run`, against one device.
"""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras.src.backend.common.masking import set_keras_mask

import keras_distribute as kd
from keras_distribute import errors
from tests import support
from tests.support import mirrored

pytestmark = pytest.mark.sampled(12)

RNG = np.random.RandomState(0)
ROWS = 24
X = RNG.randn(4, ROWS, 5).astype("float32")
Y = RNG.randn(4, ROWS, 2).astype("float32")
REPLICAS = [1, 2, 3, 8]


def distributed(strategy, array):
    rows = len(array) // strategy.num_replicas_in_sync
    return support.distributed(strategy, lambda i: array[i * rows :][:rows])


def make_model(spectral=False, **batch_norm):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Dense(6, activation="tanh")]
    if spectral:
        layers[1] = keras.layers.SpectralNormalization(layers[1])
    if batch_norm:
        layers.append(keras.layers.BatchNormalization(**batch_norm))
    return keras.Sequential([*layers, keras.layers.Dense(2)])


def train(
    strategy,
    make_optimizer,
    loss=keras.losses.MeanSquaredError,
    steps=4,
    scaled=False,
    **batch_norm,
):
    """Four steps of a custom loop; the default strategy is one device of plain Keras."""
    with strategy.scope():
        model = make_model(**batch_norm)
        optimizer = make_optimizer()
        metric = keras.metrics.MeanSquaredError()
        loss_object = loss()
        optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss_fn():
            predictions = model(x, training=True)
            metric.update_state(y, predictions)
            value = loss_object(y, predictions)
            return (optimizer.scale_loss(value) if scaled else value), value

        (_, value), grads = kd.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )()
        optimizer.apply(grads, model.trainable_variables)
        return value

    losses = [
        float(
            strategy.reduce(
                "SUM",
                strategy.run(
                    step, args=(distributed(strategy, x), distributed(strategy, y))
                ),
                axis=None,
            )
        )
        for x, y in zip(X[:steps], Y[:steps], strict=True)
    ]
    state = [np.asarray(v) for v in (*model.variables, *optimizer.variables)]
    return losses, float(metric.result()), state


def plain(make_optimizer, loss=keras.losses.MeanSquaredError, steps=4, **batch_norm):
    """The same with Keras on one device, written with JAX alone."""
    model, optimizer, loss_object = make_model(**batch_norm), make_optimizer(), loss()
    metric = keras.metrics.MeanSquaredError()
    optimizer.build(model.trainable_variables)
    state = [
        [v.value for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    losses = []

    @jax.jit
    def step(state, x, y):
        trained, others, slots = state

        def loss_fn(trained, others):
            predictions, others = model.stateless_call(
                trained, others, x, training=True
            )
            value = loss_object(y, predictions)
            return value, (predictions, others)

        (value, (predictions, others)), grads = jax.value_and_grad(
            loss_fn, has_aux=True
        )(trained, others)
        trained, slots = optimizer.stateless_apply(slots, grads, trained)
        return value, predictions, (trained, others, slots)

    for x, y in zip(X[:steps], Y[:steps], strict=True):
        value, predictions, state = step(state, x, y)
        metric.update_state(y, predictions)
        losses.append(float(value))
    for group, values in zip(
        (model.trainable_variables, model.non_trainable_variables, optimizer.variables),
        state,
        strict=True,
    ):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    return (
        losses,
        float(metric.result()),
        [np.asarray(v) for v in (*model.variables, *optimizer.variables)],
    )


def assert_equal(ours, theirs, rtol=2e-5):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=rtol)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=rtol)
    for a, b in zip(ours[2], theirs[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, gradient_accumulation_steps=2
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
}


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, n):
    assert_equal(train(mirrored(n), OPTIMIZERS[name]), plain(OPTIMIZERS[name]))


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("inner", ["adam", "accumulation"])
def test_loss_scaling(inner, n):
    def make():
        return keras.optimizers.LossScaleOptimizer(
            OPTIMIZERS[inner](), initial_scale=8.0, dynamic_growth_steps=3
        )

    ours = train(mirrored(n), make, scaled=True)
    theirs = train(mirrored(1), make, scaled=True)
    unscaled = plain(OPTIMIZERS[inner])
    assert_equal(ours, theirs)
    np.testing.assert_allclose(ours[0], unscaled[0], rtol=2e-5)


@pytest.mark.parametrize("accumulation", [None, 2])
def test_an_overflow_on_one_replica_skips_the_step_on_all(accumulation):
    strategy = mirrored(4)
    with strategy.scope():
        variable = keras.Variable(1.0)
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
        optimizer.build([variable])

    def step(overflow):
        i = kd.get_replica_context().replica_id_in_sync_group
        optimizer.apply([jnp.where((i == 2) & overflow, jnp.inf, 4.0)], [variable])

    strategy.run(step, args=(np.bool_(True),))
    assert float(variable.numpy()) == 1.0
    assert float(optimizer.dynamic_scale.numpy()) == 2.0
    strategy.run(step, args=(np.bool_(False),))
    strategy.run(step, args=(np.bool_(False),))
    # Each replica's gradient is 4 / 2; four of them; twice, or once averaged over two
    # micro-steps.
    assert float(variable.numpy()) == pytest.approx(
        1.0 - 0.1 * 8 * (2 if accumulation is None else 1)
    )


@pytest.mark.parametrize("steps", [None, 2])
def test_scales_of_float8_are_those_of_all_replicas(steps):
    """They are largest values, of which the optimizer takes the newest: no sums."""

    def scales(replicas):
        strategy = mirrored(replicas)
        with strategy.scope():
            model = make_model()
            model.quantize("float8")
            rule = keras.optimizers.SGD(0.01, gradient_accumulation_steps=steps)
            rule.build(model.trainable_variables)

        def step(x, y):
            def loss():
                return keras.losses.MeanSquaredError()(y, model(x, training=True))

            _, grads = kd.value_and_grad(loss, model.trainable_variables)()
            rule.apply(grads, model.trainable_variables)

        for x, y in zip(X, Y, strict=True):
            strategy.run(
                step, args=(distributed(strategy, x), distributed(strategy, y))
            )
        kept = [v for v in model.weights if "scale" in v.path or "amax" in v.path]
        return [np.asarray(v) for v in kept]

    found = scales(4)
    assert len(found) == 12
    for a, b in zip(found, scales(1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_a_mean_communicates_only_to_count_what_a_mask_leaves(masked):
    """How many rows all replicas have together is known."""
    strategy = mirrored(2)
    loss = keras.losses.MeanSquaredError()

    def step(x):
        values = keras.ops.square(x)
        if masked:
            set_keras_mask(values, x[:, 0] > 0)
        return loss(keras.ops.zeros_like(values), values)

    x = distributed(strategy, X[0])
    strategy.run(step, args=(x,))
    (program,) = strategy.programs.programs_of(step).values()
    text = program.jitted.lower([], [], [x.stacked]).as_text()
    assert ("all_reduce" in text) == masked


def test_accumulation_communicates_only_when_it_updates():
    strategy = mirrored(2)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        optimizer.build(model.trainable_variables)

    def step(x):
        _, grads = kd.value_and_grad(
            lambda: keras.ops.sum(model(x) ** 2), model.trainable_variables
        )()
        optimizer.apply(grads, model.trainable_variables)

    x = distributed(strategy, X[0])
    strategy.run(step, args=(x,))
    program = next(iter(strategy.programs.programs_of(step).values()))
    compiled = program.jitted.lower(
        [program.variables[i].stored for i in program.written],
        [program.variables[i].stored for i in program.read],
        [x.stacked],
    ).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert "conditional" in entry
    assert "all-reduce" not in entry, (
        "a collective outside the conditional would run at each micro-step"
    )
    assert "all-reduce" in compiled.as_text()
    accumulators = [
        v for v in optimizer.variables if v.path.endswith("gradient_accumulator")
    ]
    first, second = (np.asarray(c) for c in accumulators[0].values)
    assert np.abs(first - second).max() > 0, (
        "each replica accumulates its own gradients"
    )


def test_an_eager_update_builds_an_optimizer_that_accumulates():
    with mirrored(2).scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        values = []
        for gradient in (1.0, 3.0):
            optimizer.apply_gradients([(keras.ops.full((2,), gradient), variable)])
            values.append(np.asarray(variable))
    np.testing.assert_array_equal(values, [[1, 2], [0, 1]])


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [2, 8])
def test_losses_are_shares_of_the_global_loss(reduction, weighted, masked, n):
    """Weights and masks are spread unevenly: the first replica has most of them."""
    strategy, loss = mirrored(n), keras.losses.MeanSquaredError(reduction=reduction)
    weights = np.linspace(3, 0.1, ROWS).astype("float32") if weighted else None
    mask = np.arange(ROWS) < 7 if masked else None

    def value(w, x, y, weights, mask):
        predictions = x * w
        if mask is not None:
            set_keras_mask(predictions, mask)
        return loss(y, predictions, sample_weight=weights)

    def step(x, y, *rest):
        rest = list(rest)
        own_weights = rest.pop(0) if weighted else None
        own_mask = rest.pop(0) if masked else None
        return jax.value_and_grad(value)(jnp.float32(1.5), x, y, own_weights, own_mask)

    arrays = [X[0], X[1]] + [a for a in (weights, mask) if a is not None]
    result, grad = strategy.run(
        step, args=tuple(distributed(strategy, a) for a in arrays)
    )
    expected, expected_grad = jax.value_and_grad(value)(
        jnp.float32(1.5), jnp.asarray(X[0]), X[1], weights, mask
    )
    np.testing.assert_allclose(
        strategy.reduce("SUM", result, axis=None), expected, rtol=1e-5
    )
    np.testing.assert_allclose(
        strategy.reduce("SUM", grad, axis=None), expected_grad, rtol=1e-5
    )


@pytest.mark.parametrize("n", REPLICAS)
def test_synchronized_batch_normalization(n):
    make = OPTIMIZERS["sgd"]
    assert_equal(
        train(mirrored(n), make, synchronized=True),
        plain(make, momentum=0.99),
        rtol=5e-5,
    )


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_synchronized_statistics_with_a_mask(n, masked):
    strategy = mirrored(n)
    x = RNG.randn(ROWS, 5, 3).astype("float32")
    mask = RNG.rand(ROWS, 5) < 0.6 if masked else None
    layer = keras.layers.BatchNormalization()
    expected = layer(x, training=True, mask=mask)
    with strategy.scope():
        ours = keras.layers.BatchNormalization(synchronized=True)
        ours.build(x.shape)
    if masked:
        args = (distributed(strategy, x), distributed(strategy, mask))
        result = strategy.run(lambda x, m: ours(x, training=True, mask=m), args=args)
    else:
        result = strategy.run(
            lambda x: ours(x, training=True), args=(distributed(strategy, x),)
        )
    np.testing.assert_allclose(
        strategy.gather(result, axis=0), expected, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        ours.moving_mean.numpy(), layer.moving_mean.numpy(), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        ours.moving_variance.numpy(),
        layer.moving_variance.numpy(),
        rtol=1e-5,
        atol=1e-6,
    )


def test_batch_normalization_per_replica():
    strategy = mirrored(4)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=1e-3)
        layer.build((None, 5))
    result = strategy.run(
        lambda x: layer(x, training=True), args=(distributed(strategy, X[0]),)
    )
    parts = X[0].reshape(4, -1, 5)
    for component, part in zip(result.values, parts, strict=True):
        np.testing.assert_allclose(
            component,
            (part - part.mean(0)) / np.sqrt(part.var(0) + 1e-3),
            rtol=1e-4,
            atol=1e-5,
        )
    np.testing.assert_allclose(
        layer.moving_mean.numpy(), 0.5 * parts.mean(1).mean(0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        layer.moving_variance.numpy(), 0.5 + 0.5 * parts.var(1).mean(0), rtol=1e-5
    )


def test_synchronized_is_a_keras_argument():
    layer = keras.layers.BatchNormalization(synchronized=True)
    assert (
        keras.layers.BatchNormalization.from_config(layer.get_config()).synchronized
        is True
    )
    np.testing.assert_allclose(
        layer(X[0], training=True),
        keras.layers.BatchNormalization()(X[0], training=True),
    )


@pytest.mark.parametrize("n", [2, 3])
def test_spectral_normalization(n):
    """Its state follows from the kernel, and is the same on all replicas."""
    make = OPTIMIZERS["momentum"]
    one = train(kd.get_strategy(), make, steps=2, spectral=True)
    assert_equal(train(mirrored(n), make, steps=2, spectral=True), one)


def test_recurrent_layers():
    strategy = mirrored(2)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layer = keras.layers.LSTM(3)
        layer.build((None, 4, 5))
    x = RNG.randn(8, 4, 5).astype("float32")

    def step(x):
        return kd.value_and_grad(
            lambda: keras.ops.sum(layer(x)), layer.trainable_variables
        )()

    value, grads = strategy.run(step, args=(distributed(strategy, x),))
    keras.utils.set_random_seed(0)
    plain_layer = keras.layers.LSTM(3)
    plain_layer.build((None, 4, 5))
    expected, expected_grads = kd.value_and_grad(
        lambda: keras.ops.sum(plain_layer(x)), plain_layer.trainable_variables
    )()
    np.testing.assert_allclose(
        strategy.reduce("SUM", value, axis=None), expected, rtol=1e-5
    )
    for grad, other in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(
            strategy.reduce("SUM", grad, axis=None), other, rtol=1e-4, atol=1e-5
        )


def test_value_and_grad_outside_run_keeps_updates():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    metric = keras.metrics.Mean()
    before = model.layers[1].seed_generator.state.numpy()

    def loss_fn(x, scale):
        loss = keras.ops.mean(model(x, training=True) ** 2) * scale
        metric.update_state(loss)
        return loss, {"scale": scale}

    (loss, aux), grads = kd.value_and_grad(
        loss_fn, model.trainable_variables, has_aux=True
    )(X[0], scale=2.0)
    assert aux == {"scale": 2.0}
    assert float(metric.result()) == pytest.approx(float(loss))
    assert not np.array_equal(model.layers[1].seed_generator.state.numpy(), before)
    assert np.abs(model.layers[0].moving_mean.numpy()).max() > 0
    assert [g.shape for g in grads] == [v.shape for v in model.trainable_variables]


@dataclasses.dataclass
class Outputs:
    logits: Any
    name: str


def test_value_and_grad_returns_any_structure_beside_the_loss():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(3.0)

    def loss_fn():
        beside = types.MappingProxyType({"twice": variable * 2})
        return variable * variable, (Outputs(variable * 4, "a"), beside, "b", None)

    def step():
        return kd.value_and_grad(loss_fn, [variable], has_aux=True)()

    (loss, aux), grads = step()
    assert (float(loss), float(grads[0])) == (9, 6)
    assert aux == (Outputs(12, "a"), {"twice": 6}, "b", None)
    (loss, (outputs, beside, *others)), grads = strategy.run(step)
    assert [float(v.values[1]) for v in (loss, outputs.logits, beside["twice"])] == [
        9,
        12,
        6,
    ]
    assert (outputs.name, others, float(grads[0].values[0])) == ("a", ["b", None], 6)


def test_value_and_grad_of_a_variable_that_is_listed_twice():
    """As with `tf.GradientTape.gradient`: two models that share a layer."""
    shared = keras.layers.Dense(4)
    models = [keras.Sequential([keras.Input((5,)), shared]) for _ in range(2)]
    listed = [v for model in models for v in model.trainable_variables]

    def loss_fn():
        return sum(keras.ops.sum(model(X[0])) for model in models)

    _, expected = kd.value_and_grad(loss_fn, shared.trainable_variables)()
    _, grads = kd.value_and_grad(loss_fn, listed)()
    for grad, other in zip(grads, [*expected, *expected], strict=True):
        np.testing.assert_array_equal(grad, other)
    assert np.abs(grads[0]).max() > 0


def test_value_and_grad_in_a_stateless_scope_has_the_values_of_that_scope():
    """Also of variables that are no targets, and what was assigned before; with
    Keras's own variables and with mirrored ones.
    """
    for strategy in (kd.get_strategy(), mirrored(2)):
        with strategy.scope():
            weight, factor = keras.Variable(2.0), keras.Variable(1.0)
            total = keras.metrics.Sum()
        assert _two_losses_in_a_stateless_scope(weight, factor, total) == (
            [250, 750, 100],
            [30, 7 + 250 + 750],
        )


def _two_losses_in_a_stateless_scope(weight, factor, total):
    """Two losses and a gradient, and the factor and the total after them."""
    variables = [weight, factor, *total.variables]

    def loss():
        value = weight * weight * factor
        total.update_state(value)
        return value

    @jax.jit
    def step(values):
        with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
            value, (grad,) = kd.value_and_grad(loss, [weight])()
            factor.assign(factor * 3)
            again, _ = kd.value_and_grad(loss, [weight])()
        return [value, again, grad], [scope.get_current_value(v) for v in variables[1:]]

    found, after = step([jnp.float32(v) for v in (5, 10, 7)])
    return list(map(float, found)), list(map(float, after))


def test_value_and_grad_refusals():
    variable = keras.Variable([1.0, 2.0])
    with pytest.raises(
        errors.ValueStructureError,
        match="(?s)no variable to differentiate by.*Fix: build the model",
    ):
        kd.value_and_grad(lambda: 1.0, [])
    with pytest.raises(errors.StructureTypeError, match="with respect to variables"):
        kd.value_and_grad(lambda: 1.0, [3.0])
    with pytest.raises(errors.StructureTypeError, match="int32, which has no gradient"):
        kd.value_and_grad(lambda: 1.0, [keras.Variable(1, dtype="int32")])
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)Only a scalar has gradients.*shape \(2,\).*Fix: reduce it",
    ):
        kd.value_and_grad(lambda: variable * 2, [variable])()
    for loss, text in (
        (lambda: 3, r"Only a floating number.*dtype int32.*Fix: keras.ops.cast"),
        (lambda: keras.ops.sum(variable) * 1j, r"dtype complex64.*keras.ops.real"),
        (lambda: None, "A loss is a number.*None"),
    ):
        with pytest.raises(errors.StructureTypeError, match=f"(?s){text}"):
            kd.value_and_grad(loss, [variable])()
    scalar = keras.Variable(2.0)
    with pytest.raises(errors.StructureTypeError, match="(?s)returns a pair.*Fix"):
        kd.value_and_grad(lambda: scalar * 2, [scalar], has_aux=True)()


class Slotted:
    __slots__ = "prediction"


@pytest.mark.parametrize("kind", [types.SimpleNamespace, Slotted])
def test_value_and_grad_refuses_objects_that_hold_arrays(kind):
    """They would end with the trace of the gradients. What belongs to the trace around
    it may be in them.
    """
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(2.0)

    def made_by(prediction_of):
        def step(x):
            def loss_fn():
                made = kind()
                made.prediction = prediction_of(x)
                return variable * x, made

            (_, made), _ = kd.value_and_grad(loss_fn, [variable], has_aux=True)()
            return made.prediction + 1

        return step

    for run in (strategy.run, lambda step, args: step(*args)):
        with pytest.raises(
            errors.StructureTypeError, match="(?s)kd.value_and_grad.*holds arrays.*Fix"
        ):
            run(made_by(lambda x: variable * x), (np.float32(3),))
    result = strategy.run(made_by(lambda x: x), (np.float32(3),))
    assert [float(v) for v in result.values] == [4, 4]


def test_average_loss_and_regularization():
    strategy = mirrored(4)
    losses = distributed(strategy, np.arange(8, dtype="float32"))
    weights = distributed(strategy, np.linspace(0, 1, 8).astype("float32"))

    def fn(x, w):
        return {
            "mean": kd.nn.compute_average_loss(x),
            "sized": kd.nn.compute_average_loss(x, global_batch_size=16),
            "weighted": kd.nn.compute_average_loss(x, sample_weight=w),
            "empty": kd.nn.compute_average_loss(x[:0], global_batch_size=0),
            "penalty": kd.nn.scale_regularization_loss([1.0, 2.0]),
        }

    result = strategy.reduce("SUM", strategy.run(fn, args=(losses, weights)), axis=None)
    expected = {
        "mean": 3.5,
        "sized": 1.75,
        "weighted": np.mean(np.arange(8) * np.linspace(0, 1, 8)),
        "empty": 0.0,
        "penalty": 3.0,
    }
    for name, value in expected.items():
        assert float(result[name]) == pytest.approx(value, rel=1e-6), name
    with strategy.scope():
        for call in (kd.nn.compute_average_loss, kd.nn.scale_regularization_loss):
            with pytest.raises(
                errors.ContextError,
                match="(?s)called in a replica.*cross-replica context.*Fix.*ops.mean",
            ):
                call([1.0])
    with pytest.raises(errors.StructureTypeError, match="number of examples"):
        kd.nn.compute_average_loss([1.0], global_batch_size=1.5)
    with pytest.raises(errors.ValueStructureError, match="cannot be negative"):
        kd.nn.compute_average_loss([1.0], global_batch_size=-1)
    with pytest.raises(errors.ValueStructureError, match="one number"):
        kd.nn.compute_average_loss([1.0], global_batch_size=[1, 2])


@pytest.mark.parametrize("sizes", [[8], [3, 5], [4, 4], [5, 0, 3], [1] * 8])
@pytest.mark.parametrize("masked", [False, True])
def test_the_losses_of_several_outputs(sizes, masked):
    """`compute_loss` keeps a metric an output: the mean of all rows, as one device."""
    ends = np.cumsum([0, *sizes])
    weights = RNG.rand(8).astype("float32")

    def history(strategy):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            inputs = keras.Input((5,))
            outputs = {
                name: keras.layers.Dense(2, name=name)(inputs)
                for name in ("first", "second")
            }
            model = keras.Model(inputs, outputs)
            losses = {
                "first": "mse",
                "second": keras.losses.MeanAbsoluteError(reduction="sum"),
            }
            model.compile("sgd", losses, loss_weights={"first": 2.0, "second": 0.5})

        def step(x, y, weight):
            predictions = model(x)
            if masked:
                set_keras_mask(predictions["first"], x[:, 0] > 0)
            targets = {"first": y, "second": y + 1}
            return model.compute_loss(
                x, targets, predictions, {"first": weight, "second": weight}
            )

        if strategy.num_replicas_in_sync == 1:
            total = step(X[0][:8], Y[0][:8], weights)
        else:
            arguments = [
                support.distributed(strategy, lambda i, a=a: a[ends[i] : ends[i + 1]])
                for a in (X[0][:8], Y[0][:8], weights)
            ]
            total = strategy.reduce(
                "SUM", strategy.run(step, args=arguments), axis=None
            )
        tracked = {
            metric.name: metric.result() for metric in model._compile_loss.metrics
        }
        assert len(tracked) == 2
        return {"total": total, **tracked}

    expected = history(kd.get_strategy())
    actual = history(mirrored(len(sizes)))
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)

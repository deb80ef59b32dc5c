"""`Strategy.run` on replicas with different numbers of rows, or none, against plain
Keras on the whole batch.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras.src.backend.common.masking import set_keras_mask

import keras_distribute as kd
from keras_distribute import errors
from tests import support

pytestmark = pytest.mark.sampled(16)

RNG = np.random.RandomState(0)
SPLITS = [
    (3, 2),
    (8, 0),
    (2, 2, 2, 0),
    (1, 1, 1, 0),
    (5, 0, 0, 3),
    (2, 2, 2, 2, 2, 2, 2, 1),
    (8, 0, 0, 0, 0, 0, 0, 0),
]
FEW = [(3, 2), (2, 2, 2, 0)]
identify = functools.partial(pytest.mark.parametrize, "sizes", ids=str)


mirrored = functools.cache(support.mirrored)


def split(strategy, value, sizes):
    """Consecutive rows of arrays in any structure as `PerReplica`s."""
    ends = np.cumsum(sizes)
    return support.distributed(
        strategy,
        lambda i: jax.tree.map(lambda a: a[ends[i] - sizes[i] :][: sizes[i]], value),
    )


def ragged(parts):
    return support.distributed(mirrored(len(parts)), parts)


def assert_copies_equal(variables):
    for variable in variables:
        if isinstance(variable, kd.MirroredVariable):
            first, *others = [
                np.asarray(shard.data).tobytes()
                for shard in variable.stored.addressable_shards
            ]
            assert all(other == first for other in others), variable.path


def image_rows(rows):
    return RNG.randn(rows, 6, 6, 2).astype("float32"), RNG.randn(rows, 2).astype(
        "float32"
    )


def rows_of(rows):
    return RNG.randn(rows, 5).astype("float32"), RNG.randn(rows, 2).astype("float32")


def sequence_rows(rows):
    x = RNG.randn(rows, 4, 3).astype("float32")
    x[rows // 2 :, 2:] = 0.0
    return x, RNG.randn(rows, 2).astype("float32")


def class_rows(rows):
    return (
        RNG.randn(rows, 5).astype("float32"),
        np.eye(2, dtype="float32")[RNG.randint(0, 2, rows)],
        RNG.rand(rows).astype("float32"),
    )


def dense():
    return [keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)]


def regularized():
    l2 = keras.regularizers.L2(0.1)
    return [
        keras.Input((5,)),
        keras.layers.Dense(6, kernel_regularizer=l2),
        keras.layers.Dropout(0.0),
        keras.layers.Dense(2),
    ]


def normalized():
    return [
        keras.Input((5,)),
        keras.layers.Dense(6),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.ReLU(),
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Dense(2),
    ]


def convolutional():
    return [
        keras.Input((6, 6, 2)),
        keras.layers.Conv2D(3, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(2),
    ]


def softmax():
    return [keras.Input((5,)), keras.layers.Dense(2, activation="softmax")]


def recurrent(layer):
    return lambda: [
        keras.Input((4, 3)),
        keras.layers.Masking(),
        layer(4),
        keras.layers.Dense(2),
    ]


def checkpointed():
    return [keras.Input((5,)), Checkpointed(), keras.layers.Dense(2)]


class Checkpointed(keras.layers.Layer):
    """Normalized by the mean over all replicas, and computed again for its gradient."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x):
        @jax.checkpoint
        def block(x, kernel):
            y = jnp.tanh(x @ kernel)
            context = kd.get_replica_context()
            if context is None:  # Keras asks for the shape of the output.
                return y
            total, count = context.all_reduce("SUM", (jnp.sum(y, 0), y.shape[0]))
            return y - total / count

        return block(x, jnp.asarray(self.kernel.value))


LOSSES = {
    "mse": keras.losses.MeanSquaredError,
    "sum": functools.partial(keras.losses.MeanSquaredError, reduction="sum"),
    "crossentropy": keras.losses.CategoricalCrossentropy,
    "weighted": functools.partial(
        keras.losses.CategoricalCrossentropy, reduction="mean_with_sample_weight"
    ),
}


def train(strategy, steps, layers, make_optimizer, loss="mse", masked=False):
    """A custom loop over batches and how each is spread; without a strategy, plain
    Keras on the whole batches.
    """
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(layers())
        optimizer = make_optimizer()
        loss_object = LOSSES[loss]()
        metrics = [
            keras.metrics.Mean(),
            keras.metrics.MeanSquaredError(),
            keras.metrics.CategoricalAccuracy(),
        ]
        metrics += [keras.metrics.AUC()] if layers is softmax else []
        optimizer.build(model.trainable_variables)
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    replicas = strategy.num_replicas_in_sync if strategy else 1

    def step(batch):
        x, y, weight = (*batch, None)[:3]

        def loss_fn():
            predictions = model(x, training=True)
            if masked:
                set_keras_mask(predictions, x[:, 0] > 0)
            value = loss_object(y, predictions, sample_weight=weight)
            value += sum(model.losses) / replicas if model.losses else 0.0
            metrics[0].update_state(predictions)
            for metric in metrics[1:]:
                metric.update_state(y, predictions, sample_weight=weight)
            return (optimizer.scale_loss(value) if scaled else value), value

        (_, value), grads = kd.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )()
        optimizer.apply(grads, model.trainable_variables)
        return value

    losses = []
    for batch, sizes in steps:
        if strategy is None:
            losses.append(float(step(batch)))
        else:
            result = strategy.run(step, args=(split(strategy, batch, sizes),))
            losses.append(float(strategy.reduce("SUM", result, axis=None)))
    variables = [*model.variables, *optimizer.variables]
    assert_copies_equal([*variables, *(v for m in metrics for v in m.variables)])
    return {
        "losses": losses,
        "metrics": [float(metric.result()) for metric in metrics],
        "variables": [np.asarray(variable) for variable in variables],
    }


def check(layers, optimizer, sizes, data=rows_of, reference=None, **options):
    """Full and ragged batches mixed, on the replicas of `sizes` and on one device."""
    n = len(sizes)
    even, other = (2,) * n, (*sizes[1:], sizes[0])
    steps = [(data(sum(s)), s) for s in (even, sizes, other, even, sizes)]
    ours = train(mirrored(n), steps, layers, optimizer, **options)
    theirs = train(
        reference,
        [(batch, (sum(s),)) for batch, s in steps],
        layers,
        optimizer,
        **options,
    )
    for name, expected in theirs.items():
        for a, b in zip(ours[name], expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)
    return ours


ADAM = functools.partial(keras.optimizers.Adam, 0.01, epsilon=1e-3)
MOMENTUM = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
OPTIMIZERS = {
    "clipnorm": functools.partial(MOMENTUM, clipnorm=0.05),
    "global_clipnorm": functools.partial(ADAM, global_clipnorm=0.05),
    "accumulation": functools.partial(MOMENTUM, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        MOMENTUM(), initial_scale=8.0, dynamic_growth_steps=2
    ),
    "scaled accumulation": lambda: keras.optimizers.LossScaleOptimizer(
        MOMENTUM(gradient_accumulation_steps=2),
        initial_scale=8.0,
        dynamic_growth_steps=2,
    ),
    "ema": functools.partial(MOMENTUM, use_ema=True, ema_overwrite_frequency=2),
    "weight decay": functools.partial(
        keras.optimizers.AdamW, 0.01, weight_decay=0.1, epsilon=1e-3
    ),
}


@identify(SPLITS)
def test_adam(sizes):
    check(dense, ADAM, sizes)


@identify(FEW)
def test_momentum_and_a_regularizer(sizes):
    check(regularized, MOMENTUM, sizes)


@identify(FEW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, sizes):
    # Keras's loss scaling only works while it is traced.
    check(
        dense,
        OPTIMIZERS[name],
        sizes,
        reference=mirrored(1) if "scale" in name else None,
    )


@identify(FEW)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", ["sum", "crossentropy", "weighted"])
def test_losses_with_weights_and_masks(loss, masked, sizes):
    check(softmax, ADAM, sizes, class_rows, loss=loss, masked=masked)


@identify(SPLITS)
def test_synchronized_batch_normalization(sizes):
    check(normalized, MOMENTUM, sizes)


@identify(FEW)
@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_recurrent_layers(layer, sizes):
    check(recurrent(layer), ADAM, sizes, sequence_rows)


@identify(FEW)
def test_convolutions(sizes):
    check(convolutional, MOMENTUM, sizes, image_rows)


@identify(FEW)
def test_collectives_in_a_block_that_is_computed_again(sizes):
    n = len(sizes)
    steps = [(rows_of(sum(s)), s) for s in (sizes, (2,) * n, sizes)]
    ours = train(mirrored(n), steps, checkpointed, ADAM)
    theirs = train(
        mirrored(1), [(batch, (sum(s),)) for batch, s in steps], checkpointed, ADAM
    )
    for a, b in zip(ours["variables"], theirs["variables"], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@identify([(3, 2), (2, 2, 2, 0), (3, 0)])
def test_batch_normalization_of_each_replicas_own_rows(sizes):
    strategy = mirrored(len(sizes))
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=1e-3)
        layer.build((None, 3))
    x = (3 * RNG.randn(sum(sizes), 3) + 1).astype("float32")
    result = strategy.run(
        lambda x: layer(x, training=True), args=(split(strategy, x, sizes),)
    )
    parts = np.split(x, np.cumsum(sizes)[:-1])
    for i, (part, out) in enumerate(zip(parts, result.values, strict=True)):
        assert out.shape == part.shape
        mean, variance = (
            (part.mean(0), part.var(0)) if len(part) else (np.zeros(3), np.ones(3))
        )
        np.testing.assert_allclose(
            out, (part - mean) / np.sqrt(variance + 1e-3), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            layer.moving_mean.values[i], 0.5 * mean, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            layer.moving_variance.values[i], 0.5 + 0.5 * variance, rtol=1e-5
        )


@identify(FEW)
def test_masked_synchronized_batch_normalization(sizes):
    x = RNG.randn(sum(sizes), 4, 3).astype("float32")
    mask = RNG.rand(sum(sizes), 4) > 0.4

    def call(strategy, x, mask, sizes):
        with strategy.scope():
            layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
            layer.build((None, 4, 3))
        result = strategy.run(
            lambda x, mask: layer(x, training=True, mask=mask),
            args=split(strategy, (x, mask), sizes),
        )
        return [
            strategy.gather(result, 0),
            *(np.asarray(v) for v in layer.non_trainable_variables),
        ]

    plain = keras.layers.BatchNormalization(momentum=0.5)
    expected = [
        plain(x, training=True, mask=mask),
        *(np.asarray(v) for v in plain.non_trainable_variables),
    ]
    for a, b in zip(call(mirrored(len(sizes)), x, mask, sizes), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@identify(SPLITS)
def test_results_keep_their_true_shapes(sizes):
    strategy = mirrored(len(sizes))
    x = RNG.randn(sum(sizes), 3).astype("float32")

    def fn(batch):
        x = batch["x"][0]
        return {
            "rows": 2 * x,
            "outer": x @ x.T,
            "sum": jnp.sum(x),
            "count": jnp.asarray(x.shape[0]),
            "text": "a",
        }

    result = strategy.run(fn, args=({"x": [split(strategy, x, sizes)]},))
    parts = np.split(x, np.cumsum(sizes)[:-1])
    assert result["text"] == "a"
    assert [v.shape for v in result["rows"].values] == [p.shape for p in parts]
    for i, local in enumerate(strategy.experimental_local_results(result)):
        np.testing.assert_array_equal(local["rows"], 2 * parts[i])
        np.testing.assert_allclose(
            local["outer"], parts[i] @ parts[i].T, rtol=1e-4, atol=1e-5
        )
    assert [int(v) for v in result["count"].values] == list(sizes)
    np.testing.assert_array_equal(strategy.gather(result["rows"], axis=0), 2 * x)
    np.testing.assert_allclose(
        strategy.reduce("MEAN", result["rows"], axis=0),
        2 * x.mean(0),
        rtol=1e-5,
        atol=1e-6,
    )
    again = strategy.run(
        lambda x, y: jnp.sum(x, 1) + y[:, 0],
        args=(result["rows"], split(strategy, x, sizes)),
    )
    np.testing.assert_allclose(
        strategy.gather(again, axis=0), 2 * x.sum(1) + x[:, 0], rtol=1e-5, atol=1e-6
    )


def test_several_ragged_arguments_beside_even_and_common_ones():
    strategy = mirrored(4)
    a, b = (
        [np.arange(n + 1.0) for n in (1, 0, 1, 2)],
        [np.ones((2, n)) for n in (1, 1, 3, 1)],
    )
    even, common = ragged([np.float32(i) for i in range(4)]), np.float32(100)
    result = strategy.run(
        lambda a, b, c, d: jnp.sum(a) + jnp.sum(b) + c + d,
        args=(ragged(a), ragged(b), even, common),
    )
    assert [float(v) for v in result.values] == [
        a[i].sum() + b[i].sum() + i + 100 for i in range(4)
    ]
    assert ragged(a).stacked is None
    assert ragged(a).padded.shape == (4, 3)
    assert ragged(a).shapes == ((2,), (1,), (2,), (3,))


def test_gradients_of_each_replica_are_those_of_its_rows():
    strategy = mirrored(4)
    with strategy.scope():
        kernel = keras.Variable(RNG.randn(3, 2).astype("float32"))
    x = RNG.randn(5, 3).astype("float32")

    def fn(x):
        return kd.value_and_grad(lambda: jnp.sum((x @ kernel.value) ** 2), [kernel])()

    _, (grads,) = strategy.run(fn, args=(split(strategy, x, (3, 0, 1, 1)),))
    for part, grad in zip(np.split(x, [3, 3, 4]), grads.values, strict=True):
        np.testing.assert_allclose(
            grad, 2 * part.T @ (part @ np.asarray(kernel)), rtol=1e-4, atol=1e-5
        )


def test_gradients_through_collectives():
    strategy = mirrored(2)
    x, w = (
        [np.ones((3, 2), "float32"), np.ones((1, 2), "float32")],
        np.array([1.0, 10.0], "float32"),
    )

    def fn(x, w):
        return jax.grad(
            lambda x: (
                w * jnp.sum(kd.get_replica_context().all_reduce("SUM", jnp.sum(x, 0)))
            )
        )(x)

    result = strategy.run(fn, args=(ragged(x), ragged(list(w))))
    assert [v.shape for v in result.values] == [(3, 2), (1, 2)]
    assert all((np.asarray(v) == 11).all() for v in result.values)


def test_counts_are_summed_and_not_multiplied():
    strategy = mirrored(4)
    sizes = (3, 1, 1, 0)
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")
    table = {n: jnp.float32(n) for n in range(4)}

    def fn(x):
        context = kd.get_replica_context()
        total.assign_add(table[x.shape[0]])
        merged = context.merge_call(
            lambda strategy, x: strategy.reduce("MEAN", x, axis=(0, 1)), args=(x,)
        )
        return (
            kd.nn.compute_average_loss(jnp.sum(x, 1)),
            context.all_reduce("SUM", {"a": x.shape[0], "b": table[x.shape[0]]}),
            context.all_reduce("MEAN", np.float32(x.shape[0])),
            merged,
        )

    x = RNG.randn(5, 2).astype("float32")
    share, counts, mean, merged = strategy.run(fn, args=(split(strategy, x, sizes),))
    np.testing.assert_allclose(
        strategy.reduce("SUM", share, axis=None), x.sum(1).mean(), rtol=1e-5
    )
    for value in (*counts["a"].values, *counts["b"].values):
        assert float(value) == 5
    assert [float(v) for v in mean.values] == [1.25] * 4
    np.testing.assert_allclose(np.asarray(merged.values), x.mean(), rtol=1e-5)
    assert float(total.numpy()) == 5


def test_a_loss_of_one_number_weighs_by_its_rows():
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean((y_true - y_pred) ** 2)

    strategy, own, kernel = mirrored(4), Own(), np.float32(2)
    y, p = RNG.randn(5, 2).astype("float32"), RNG.randn(5, 2).astype("float32")

    def fn(y, p):
        return jax.value_and_grad(lambda k: own(y, k * p))(kernel)

    value, grad = strategy.run(fn, args=split(strategy, (y, p), (3, 1, 1, 0)))
    np.testing.assert_allclose(
        strategy.reduce("SUM", value, axis=None), np.mean((y - 2 * p) ** 2), rtol=1e-5
    )
    np.testing.assert_allclose(
        strategy.reduce("SUM", grad, axis=None), np.mean(2 * (2 * p - y) * p), rtol=1e-4
    )
    unknown = functools.partial(
        keras.src.losses.loss.reduce_weighted_values, reduction="mean"
    )
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)loss of one number does not say.*Fix: return one loss",
    ):
        strategy.run(
            lambda y: unknown(keras.ops.mean(y)),
            args=(split(strategy, y, (3, 1, 1, 0)),),
        )


def test_dropout_is_that_of_the_true_shape():
    strategy = mirrored(2)
    sizes = (5, 2)
    masks = []
    for rows in (sizes, (5, 5), (2, 2)):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=1)
        x = ragged([np.ones((n, 8), "float32") for n in rows])
        masks.append(
            [
                np.asarray(v)
                for v in strategy.run(
                    lambda x, f=layer: f(x, training=True), args=(x,)
                ).values
            ]
        )
    np.testing.assert_array_equal(masks[0][0], masks[1][0])
    np.testing.assert_array_equal(masks[0][1], masks[2][1])


def test_two_steps_of_the_same_shapes_compile_once(compilations):
    strategy = mirrored(4)
    with strategy.scope():
        model = keras.Sequential(normalized())
        optimizer = ADAM()
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.Mean()
    loss = keras.losses.MeanSquaredError()
    traced = []

    def step(x, y):
        traced.append(x.shape)

        def loss_fn():
            value = loss(y, model(x, training=True))
            metric.update_state(value)
            return value

        value, grads = kd.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return value, 2 * x

    def batch(sizes):
        return split(strategy, rows_of(sum(sizes)), sizes)

    batches = [
        batch(s)
        for s in ((2, 2, 2, 0), (2, 2, 2, 0), (2, 2, 0, 2), (2, 2, 2, 0), (2, 2, 0, 2))
    ]
    strategy.run(step, args=batches[0])
    traces, before = len(traced), len(compilations)
    strategy.run(step, args=batches[1])
    assert (len(traced), len(compilations)) == (traces, before)
    strategy.run(step, args=batches[2])  # Other replicas, another program.
    traces, before = len(traced), len(compilations)
    for again in batches[3:]:
        strategy.run(step, args=again)
    assert (len(traced), len(compilations)) == (traces, before)


def test_layers_built_in_the_function_and_variables_of_some_shapes_only():
    strategy = mirrored(2)
    with strategy.scope():
        layer = keras.layers.Dense(2)
        many, few = keras.metrics.Sum(), keras.metrics.Sum()

    def fn(x):
        (many if x.shape[0] > 1 else few).update_state(jnp.sum(x))
        return layer(x)

    x = RNG.randn(4, 3).astype("float32")
    result = strategy.run(fn, args=(split(strategy, x, (3, 1)),))
    np.testing.assert_allclose(
        strategy.gather(result, axis=0),
        x @ np.asarray(layer.kernel),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        [float(many.result()), float(few.result())],
        [x[:3].sum(), x[3:].sum()],
        rtol=1e-4,
    )


def test_update_with_ragged_arguments():
    strategy = mirrored(2)
    with strategy.scope():
        own = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
        common = keras.Variable(1.0)
    value = ragged([np.arange(3.0), np.ones(1)])
    strategy.extended.update(own, lambda v, x: v.assign_add(jnp.sum(x)), args=(value,))
    assert [float(v) for v in own.values] == [3, 1]
    with pytest.raises(
        errors.AggregationError, match="(?s)different values to 1 mirrored.*Fix"
    ):
        strategy.extended.update(
            common, lambda v, x: v.assign(jnp.sum(x)), args=(value,)
        )


def test_effects_happen_on_each_replica(capfd):
    def fn(x):
        jax.debug.print("rows: {n} sum: {s}", n=x.shape[0], s=jnp.sum(x))

    mirrored(4).run(fn, args=(split(mirrored(4), np.ones(3), (2, 1, 0, 0)),))
    jax.effects_barrier()
    lines = sorted(
        line for line in capfd.readouterr().out.splitlines() if line.startswith("rows")
    )
    assert lines == [
        "rows: 0 sum: 0.0",
        "rows: 0 sum: 0.0",
        "rows: 1 sum: 1.0",
        "rows: 2 sum: 2.0",
    ]


def test_a_value_that_two_rounds_of_communication_need():
    def fn(x):
        own = jnp.sum(x)
        total = lax.psum(own, "replica")
        return lax.cond(
            total > 0, lambda v: lax.psum(2 * v, "replica"), lambda v: v, own
        )

    result = mirrored(2).run(fn, args=(ragged([np.ones(3), np.ones(2)]),))
    assert [float(v) for v in result.values] == [10, 10]


def test_random_keys_of_each_row_outlast_communication():
    def fn(x, total=lambda s: lax.psum(s, "replica")):
        keys = jax.random.split(jax.random.key(7), x.shape[0] + 1)
        return jax.vmap(jax.random.uniform)(keys) * total(jnp.sum(x)), keys

    parts = [np.ones(3, "float32"), np.ones(1, "float32"), np.ones(0, "float32")]
    results, keys = mirrored(3).run(fn, args=(ragged(parts),))
    again = mirrored(3).run(lambda k: k, args=(ragged(list(keys.values)),))
    for i, part in enumerate(parts):
        assert (
            jax.random.key_data(keys.values[i]) == jax.random.key_data(again.values[i])
        ).all()
        expected, expected_keys = fn(part, lambda s: 4)
        np.testing.assert_allclose(results.values[i], expected, rtol=1e-6)
        assert (
            jax.random.key_data(keys.values[i]) == jax.random.key_data(expected_keys)
        ).all()


def assigned(what, **options):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(1.0, **options)
    strategy.run(
        lambda x: variable.assign(what(x)), args=(ragged([np.ones(3), np.ones(2)]),)
    )
    return float(variable.numpy())


def test_equal_values_of_a_mirrored_variable_are_those_that_are_computed_alike():
    assert (
        assigned(lambda x: kd.get_replica_context().all_reduce("SUM", x.shape[0])) == 5
    )
    assert assigned(lambda x: lax.pmax(jnp.sum(x), "replica") * 2) == 6
    assert assigned(lambda x: x.shape[0], aggregation="mean") == 2.5
    for what in (
        lambda x: x.shape[0],
        jnp.sum,
        lambda x: lax.psum(jnp.sum(x), "replica") / x.shape[0],
        lambda x: (
            lax.pmax(x.shape[0], "replica")
            if x.shape[0] > 2
            else lax.pmax(x.shape[0], "replica") + 1
        ),
    ):
        with pytest.raises(
            errors.AggregationError, match=r"(?s)different values to 1 mirrored.*Fix"
        ):
            assigned(what)


def gather(x):
    return kd.get_replica_context().all_gather(x, axis=0)


GATHER = jax.jit(gather)


def scanned(x):
    return lax.scan(lambda c, row: (c + lax.psum(row, "replica"), None), 0.0, x)[0]


def reshaped(x):
    return jnp.reshape(x, (x.shape[0], -1, 1))[0]


REFUSED = {
    "gathered by JAX": (
        lambda x: lax.all_gather(x, "replica"),
        r"replica 0: all_gather of float32\[3\]; replica 1: .*Fix: kd.get_replica_context\(\).all_gather",
    ),
    "gathered along another axis": (
        lambda x: kd.get_replica_context().all_gather(x[None], axis=0),
        r"gathered along axis 0; .*float32\[1, 3\], float32\[1, 2\].*Fix: gather along the axis whose size differs",
    ),
    "gathered ranks": (
        lambda x: kd.get_replica_context().all_gather(
            x if x.shape[0] > 2 else x[None], axis=0
        ),
        r"must be equal.*float32\[3\], float32\[1, 2\].*Fix",
    ),
    "gathered dtypes": (
        lambda x: kd.get_replica_context().all_gather(
            x if x.shape[0] > 2 else x.astype("int32"), axis=0
        ),
        r"must be equal.*float32\[3\], int32\[2\].*Fix",
    ),
    "gathered structures": (
        lambda x: kd.get_replica_context().all_gather([x] * x.shape[0], axis=0),
        r"structures of different numbers of values.*3 on replica 0, 2 on replica 1.*Fix: gather the same structure",
    ),
    "gathered in a loop": (
        lambda x: lax.scan(
            lambda c, _: (c + jnp.sum(gather(x)), None), 0.0, None, length=2
        ),
        r"scan of .*Fix: communicate outside of it, or all_gather the rows before",
    ),
    "gathered by a function that JAX traces once for two calls": (
        lambda x: [
            GATHER(part)
            for part in ((x, x[:1], x) if x.shape[0] > 2 else (x, x, x[:1]))
        ],
        r"replica 0: all_gather of float32\[1\]; replica 1: a joining all_gather of float32\[3\].*Fix",
    ),
    "reduced rows": (
        lambda x: kd.get_replica_context().all_reduce("SUM", x),
        r"Fix: reduce over the rows first",
    ),
    "one more": (
        lambda x: gather(jnp.sum(x)[None]) if x.shape[0] > 2 else x,
        r"all_gather of float32\[1\]; replica 1: nothing more.*Fix: communicate in the same order",
    ),
    "another": (
        lambda x: (
            lax.pmax(jnp.sum(x), "replica")
            if x.shape[0] > 2
            else lax.pmin(jnp.sum(x), "replica")
        ),
        r"pmax of float32\[\]; replica 1: pmin of float32\[\].*Fix: communicate in the same order",
    ),
    "in a loop over the rows": (scanned, r"scan of .*Fix: communicate outside of it"),
    "a number": (
        lambda x: x.shape[0],
        r"different results.*3 from replica 0, 2 from replica 1.*Fix.*convert_to_tensor",
    ),
    "a rank": (
        lambda x: x if x.shape[0] > 2 else x[None],
        r"float32 array of 1 dimension\(s\) from replica 0",
    ),
    "a structure": (lambda x: x if x.shape[0] > 2 else [x], "different structures"),
    "a folded sum": (
        lambda x: lax.psum(x.shape[0], "replica"),
        r"3 on replica 0, 2 on 1.*Fix: kd.get_replica_context",
    ),
    "a folded mean": (
        lambda x: lax.pmean(float(x.shape[0]), "replica"),
        "known while tracing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    fn, text = REFUSED[name]
    with pytest.raises(errors.ValueStructureError, match=f"(?s){text}"):
        mirrored(2).run(
            fn, args=(ragged([np.ones(3, "float32"), np.ones(2, "float32")]),)
        )


def unlike_each_time():
    lengths = itertools.count(1)
    return lambda x: gather(jnp.ones(next(lengths)))


def test_gathering_something_else_in_each_trace_is_refused():
    x = ragged([np.ones(3), np.ones(2)])
    with pytest.raises(
        errors.ValueStructureError,
        match=r"(?s)other shapes each time it is traced.*Fix: let what",
    ):
        mirrored(2).run(unlike_each_time(), args=(x,))


GATHERED = {
    "a replica without rows": ([3, 0], 0, "float32"),
    "no rows at all": ([0, 0], 0, "float32"),
    "few rows of many replicas": ([1, 2, 3, 0, 0, 1, 2, 5], 0, "int32"),
    "columns": ([2, 1, 0, 4], 1, "bool"),
    "from the end": ([2, 1, 3, 1], -1, "int8"),
    "rows from the end": ([1, 4], -3, "bfloat16"),
    "one size": ([2, 2, 2, 2], 1, "float16"),
    "one replica": ([3], 0, "complex64"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", GATHERED)
def test_all_gather_joins_what_differs_in_size(name):
    sizes, axis, dtype = GATHERED[name]
    parts = [
        np.moveaxis((5 * RNG.randn(size, 2, 3)).astype(dtype), 0, axis)
        for size in sizes
    ]

    def fn(x):
        joined = kd.get_replica_context().all_gather(
            {"x": x, "nested": (x[:1],)}, axis=axis
        )
        # Its size is known from the first one.
        twice = gather(jnp.ravel(joined["x"])[: x.size])
        merged = kd.get_replica_context().merge_call(
            lambda s, x: s.gather(x, axis=axis), args=(x,)
        )
        return joined, twice, merged

    joined, twice, merged = mirrored(len(sizes)).run(fn, args=(ragged(parts),))
    whole = np.concatenate(parts, axis)
    firsts = np.concatenate([part[:1] for part in parts], axis)
    flat = np.concatenate([np.ravel(whole)[: part.size] for part in parts])
    for results, values in (
        (joined["x"], whole),
        (joined["nested"][0], firsts),
        (twice, flat),
        (merged, whole),
    ):
        for value in results.values:
            assert value.dtype == values.dtype
            np.testing.assert_array_equal(np.asarray(value), values)
    np.testing.assert_array_equal(
        np.asarray(mirrored(len(sizes)).gather(ragged(parts), axis=axis)), whole
    )


def test_keys_of_random_numbers_are_gathered():
    keys = ragged([jax.random.split(jax.random.key(i), i + 1) for i in range(2)])
    data = mirrored(2).run(lambda x: jax.random.key_data(gather(x)), args=(keys,))
    expected = np.concatenate([jax.random.key_data(part) for part in keys.values])
    for value in data.values:
        np.testing.assert_array_equal(value, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes", [(3, 1), (2, 0, 1, 0), (1, 2, 3, 0, 2, 1, 0, 1)], ids=str
)
def test_gradients_through_rows_that_are_gathered_are_those_of_one_device(sizes):
    """A contrastive loss: each replica's rows against those of all."""
    parts = [RNG.randn(size, 4).astype("float32") for size in sizes]
    start = RNG.randn(4, 3).astype("float32")
    rows, count = np.concatenate(parts), len(sizes)

    def loss_of(own, every, first):
        scores = own @ every.T
        targets = jnp.arange(len(every)) == first + jnp.arange(len(own))[:, None]
        return jnp.sum(
            jax.nn.logsumexp(scores, 1) - jnp.sum(jnp.where(targets, scores, 0.0), 1)
        ) / len(rows)

    def on_one_device(kernel, rows):
        every = jnp.sin(rows @ kernel)
        return loss_of(every, every, 0)

    strategy = mirrored(count)
    with strategy.scope():
        kernel = keras.Variable(start, name="kernel")
    firsts = ragged([np.int32(sum(sizes[:i])) for i in range(count)])

    def step(x, first):
        def loss(x):
            own = jnp.sin(x @ kernel.value)
            return loss_of(own, gather(own), first)

        value, (gradient,) = kd.value_and_grad(lambda: loss(x), [kernel])()
        total = kd.get_replica_context().all_reduce("SUM", gradient)
        by_rows = (
            jax.grad(loss)(x),
            jax.grad(lambda x: loss(jax.checkpoint(jnp.tanh)(x)))(x),
        )
        kernel.assign(kernel - total)
        return value, total, *by_rows

    value, total, own, again = strategy.run(step, args=(ragged(parts), firsts))
    expected, (by_kernel, by_rows) = jax.value_and_grad(on_one_device, (0, 1))(
        start, rows
    )
    by_tanh = jax.grad(lambda rows: on_one_device(start, jnp.tanh(rows)))(rows)
    np.testing.assert_allclose(
        strategy.reduce("SUM", value, axis=None), expected, rtol=1e-5
    )
    for gradient in total.values:
        np.testing.assert_allclose(gradient, by_kernel, rtol=1e-4, atol=1e-5)
    assert_copies_equal([kernel])
    np.testing.assert_allclose(kernel.numpy(), start - by_kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        strategy.gather(own, axis=0), by_rows, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        strategy.gather(again, axis=0), by_tanh, rtol=1e-4, atol=1e-5
    )


def test_gathering_where_all_replicas_decide_alike():
    def fn(x):
        every = gather(x)
        twice = lax.cond(
            jnp.sum(every) > 3,
            lambda y: gather(y[:2]) + 1,
            lambda y: gather(-y[:2]),
            every,
        )
        _, sums = lax.scan(
            lambda c, _: (c + 1, jnp.sum(gather(c))), every[:1], None, length=2
        )
        return (
            twice,
            sums,
            jax.vmap(gather, in_axes=1, out_axes=1)(jnp.stack([x, 2 * x], 1)),
        )

    twice, sums, columns = mirrored(2).run(
        fn, args=(ragged([np.ones(3, "float32"), np.ones(1, "float32")]),)
    )
    for value, expected in (
        (twice, [2, 2, 2, 2]),
        (sums, [2, 4]),
        (columns, [[1, 2]] * 4),
    ):
        for component in value.values:
            np.testing.assert_array_equal(component, expected)


class Centred(keras.layers.Layer):
    """Made of layers that are built when it is called, before and after it gathers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(2)

    def call(self, x):
        x = self.first(x)
        return self.last(x - keras.ops.mean(gather(x), axis=0))


def test_a_layer_is_built_while_it_gathers():
    with mirrored(2).scope():
        layer = Centred()
    parts = [RNG.randn(size, 4).astype("float32") for size in (3, 1)]
    result = mirrored(2).run(layer, args=(ragged(parts),))
    x = np.concatenate(parts) @ layer.first.kernel.numpy()
    expected = (x - x.mean(0)) @ layer.last.kernel.numpy()
    assert [v.path for v in layer.variables] == [
        f"{layer.name}/{part}"
        for part in (
            f"{layer.first.name}/kernel",
            f"{layer.first.name}/bias",
            f"{layer.last.name}/kernel",
            f"{layer.last.name}/bias",
        )
    ]
    np.testing.assert_allclose(
        mirrored(2).gather(result, axis=0), expected, rtol=1e-4, atol=1e-5
    )
    assert sorted(len(v) for v in result.values) == [1, 3]


def test_gathering_in_a_function_that_makes_layers_each_time_is_refused():
    with pytest.raises(
        errors.VariableScopeError, match="creates variables each time it is called"
    ):
        mirrored(2).run(
            lambda x: gather(keras.layers.Dense(2)(x)),
            args=(ragged([np.ones((2, 3)), np.ones((1, 3))]),),
        )


def test_a_sum_of_ones_is_the_number_of_replicas():
    result = mirrored(2).run(
        lambda x: jnp.sum(x) * lax.psum(1, "replica"),
        args=(ragged([np.ones(3), np.ones(2)]),),
    )
    assert [float(v) for v in result.values] == [6, 4]


def test_a_function_that_needs_rows():
    def reads(x):
        if not x.shape[0]:
            raise LookupError("the first row")
        return x[0]

    def raises(x):
        raise LookupError("mine")

    x = ragged([np.ones(3), np.ones(0)])
    text = r"(?s)failed for arrays without rows, which replica\(s\) 1 got.*LookupError: the first row.*Fix: drop"
    with pytest.raises(errors.ValueStructureError, match=text) as raised:
        mirrored(2).run(reads, args=(x,))
    assert isinstance(raised.value.__cause__, LookupError)
    with pytest.raises(LookupError, match="mine"):
        mirrored(2).run(raises, args=(x,))


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "float16"])
@pytest.mark.parametrize("axes", [0, (0, 1), -2, (1, 0)])
def test_reduce_on_the_devices(axes, dtype):
    parts = [(10 * RNG.randn(n, 2)).astype(dtype) for n in (3, 0, 1, 1)]
    value = ragged(parts)
    whole = np.concatenate(parts)
    with jax.transfer_guard_device_to_host("disallow"):
        results = [mirrored(4).reduce(op, value, axis=axes) for op in ("SUM", "MEAN")]
    axis = tuple(a % 2 for a in (axes if isinstance(axes, tuple) else (axes,)))
    kind = "float32" if dtype in ("int32", "bool") else dtype
    np.testing.assert_allclose(
        results[0], whole.astype("float32").sum(axis), rtol=2e-3, atol=1e-2
    )
    np.testing.assert_allclose(
        results[1], whole.astype("float32").mean(axis), rtol=2e-3, atol=1e-2
    )
    assert results[1].dtype == kind
    assert np.issubdtype(results[0].dtype, np.integer) == (dtype in ("int32", "bool"))


def test_reduce_ignores_what_fills_up():
    padded = jax.device_put(
        np.full((2, 3), np.nan, "float32"), mirrored(2).replica_mesh.split
    )
    padded = padded.at[0, :].set(1.0).at[1, 0].set(5.0)
    value = kd.PerReplica(
        padded=jax.device_put(padded, mirrored(2).replica_mesh.split),
        shapes=((3,), (1,)),
    )
    assert float(mirrored(2).reduce("MEAN", value, axis=0)) == 2.0
    np.testing.assert_array_equal(mirrored(2).gather(value, axis=0), [1, 1, 1, 5])
    assert (
        float(
            mirrored(2).reduce(
                "SUM", mirrored(2).run(jnp.sum, args=(value,)), axis=None
            )
        )
        == 8.0
    )


def test_gather_on_the_devices():
    parts = [RNG.randn(2, n).astype("float32") for n in (1, 3, 0)]
    value = ragged(parts)
    with jax.transfer_guard_device_to_host("disallow"):
        result = mirrored(3).gather(value, axis=1)
    np.testing.assert_array_equal(result, np.concatenate(parts, 1))
    empty = ragged([np.zeros((n, 0), "float32") for n in (1, 2)])
    assert mirrored(2).gather(empty, axis=0).shape == (3, 0)


# Functions drawn at random, as a list of operations. Each is given twice: on one
# replica's values inside `run`, and on the list of all replicas' values in NumPy. A
# state is `(rows, vector)`: an array of this replica's rows, and a vector.

WIDTH = 3
WEIGHTS = RNG.randn(WIDTH, WIDTH).astype("float32")


def on_each(f):
    return lambda states: [f(np, rows, vector) for rows, vector in states]


def over_all(f):
    def apply(states):
        vectors = f([vector for _, vector in states])
        return [
            (rows, vector) for (rows, _), vector in zip(states, vectors, strict=True)
        ]

    return apply


def local(f):
    return (lambda rows, vector: f(jnp, rows, vector)), on_each(f)


def count_in_replica(rows, vector):
    return rows, vector / (
        1 + kd.get_replica_context().all_reduce("SUM", rows.shape[0])
    )


def count_of_all(states):
    count = 1 + sum(len(rows) for rows, _ in states)
    return [(rows, vector / count) for rows, vector in states]


def if_agreed(rows, vector):
    """A collective under a condition that is the same everywhere."""
    agreed = lax.pmax(vector[0], "replica") > 0
    return rows, lax.cond(
        agreed, lambda v: lax.psum(v, "replica"), lambda v: -v, vector
    )


def if_agreed_of_all(states):
    vectors = [vector for _, vector in states]
    agreed = max(vector[0] for vector in vectors) > 0
    return [(rows, sum(vectors) if agreed else -vector) for rows, vector in states]


def looped(rows, vector):
    """Collectives in a loop."""
    return rows, lax.fori_loop(
        0, 2, lambda i, v: jnp.tanh(lax.psum(v, "replica") + v), vector
    )


def looped_of_all(states):
    vectors = [vector for _, vector in states]
    for _ in range(2):
        vectors = [np.tanh(sum(vectors) + vector) for vector in vectors]
    return [(rows, vector) for (rows, _), vector in zip(states, vectors, strict=True)]


OPERATIONS = {
    "tanh": local(lambda m, rows, vector: (m.tanh(rows), vector)),
    "matmul": local(lambda m, rows, vector: (rows @ WEIGHTS, vector)),
    "sum rows": local(lambda m, rows, vector: (rows, vector + m.sum(rows, 0))),
    "add to rows": local(lambda m, rows, vector: (rows + vector, vector)),
    "cumulate": local(lambda m, rows, vector: (m.cumsum(rows, 0), vector)),
    "double rows": local(
        lambda m, rows, vector: (m.concatenate([rows, -rows]), vector)
    ),
    "drop a row": local(lambda m, rows, vector: (rows[1:], vector)),
    "gram": local(lambda m, rows, vector: (m.tanh((rows @ rows.T) @ rows), vector)),
    "squash": local(lambda m, rows, vector: (rows, m.tanh(vector))),
    "number of rows": local(lambda m, rows, vector: (rows, vector * rows.shape[0])),
    "jit": (
        lambda rows, vector: (
            jax.jit(lambda r, v: r * lax.psum(v, "replica"))(rows, jnp.tanh(vector)),
            vector,
        ),
        lambda states: [
            (rows * sum(np.tanh(v) for _, v in states), vector)
            for rows, vector in states
        ],
    ),
    "psum": (
        lambda rows, vector: (rows, lax.psum(vector, "replica")),
        over_all(lambda vectors: [sum(vectors)] * len(vectors)),
    ),
    "pmax": (
        lambda rows, vector: (rows, lax.pmax(vector, "replica")),
        over_all(lambda vectors: [np.max(vectors, 0)] * len(vectors)),
    ),
    "all_gather": (
        lambda rows, vector: (
            rows,
            jnp.max(lax.all_gather(vector, "replica"), 0) - vector,
        ),
        over_all(lambda vectors: [np.max(vectors, 0) - vector for vector in vectors]),
    ),
    "gather rows": (
        lambda rows, vector: (rows, jnp.tanh(vector + jnp.sum(gather(rows)[::2], 0))),
        lambda states: [
            (
                rows,
                np.tanh(
                    vector + np.sum(np.concatenate([r for r, _ in states])[::2], 0)
                ),
            )
            for rows, vector in states
        ],
    ),
    "ppermute": (
        lambda rows, vector: (
            rows,
            lax.ppermute(vector, "replica", [(i, (i + 1) % 4) for i in range(4)]),
        ),
        over_all(lambda vectors: vectors[-1:] + vectors[:-1]),
    ),
    "count": (count_in_replica, count_of_all),
    "agreed": (if_agreed, if_agreed_of_all),
    "loop": (looped, looped_of_all),
}


@pytest.mark.parametrize("seed", range(25))
def test_random_functions(seed):
    random = np.random.RandomState(seed)
    sizes = [int(n) for n in random.randint(0, 4, 4)]
    sizes[0] += len(set(sizes)) == 1
    names = [str(name) for name in random.choice(list(OPERATIONS), 9)]
    parts = [random.randn(n, WIDTH).astype("float32") for n in sizes]
    states = [
        (part, np.full(WIDTH, 0.1 * i, "float32")) for i, part in enumerate(parts)
    ]

    def fn(rows, vector):
        for name in names:
            rows, vector = OPERATIONS[name][0](rows, vector)
        return rows, vector

    strategy = mirrored(4)
    rows, vectors = strategy.run(
        fn, args=(ragged(parts), ragged([vector for _, vector in states]))
    )
    for name in names:
        states = OPERATIONS[name][1](states)
    for ours, (theirs, _) in zip(rows.values, states, strict=True):
        assert ours.shape == theirs.shape, names
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-3, atol=1e-4, err_msg=str(names)
        )
    for ours, (_, theirs) in zip(vectors.values, states, strict=True):
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-3, atol=1e-4, err_msg=str(names)
        )

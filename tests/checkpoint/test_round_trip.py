"""What is restored is what was saved: on as many replicas bit for bit, training
included, on others by value.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest

from keras_distribute._compat.checkpoint import stored_array
from keras_distribute.checkpoint import Checkpoint

from .support import (
    Loop,
    assert_close,
    assert_same_bits,
    bits,
    build,
    data,
    fit,
    made,
    numbers,
    optimizer_of,
    scope,
    strategy_of,
)

pytestmark = pytest.mark.sampled(3)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("place", "optimizer"),
    [(0, "accumulating"), (4, "accumulating"), (2, "loss_scale_ema"), (8, "sgd")],
)
def test_fit_goes_on_bit_for_bit(place: int, optimizer: str, tmp_path: Any) -> None:
    """Two epochs of three steps (accumulation is in the middle of its four), saved, one
    more: in a new model, too.
    """
    model = made(place, optimizer)
    fit(model, 2)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    saved = bits(model=model)
    history = fit(model, 3, 2)
    final = bits(model=model)

    other = made(place, optimizer, seed=99)
    status = Checkpoint(model=other).restore(path)
    status.assert_consumed().assert_existing_objects_matched().expect_partial()
    assert set(status.restored) | set(status.unbuilt) == set(saved)
    now = bits(model=other)
    assert_same_bits(now, {name: saved[name] for name in now})
    assert fit(other, 3, 2) == history
    assert_same_bits(bits(model=other), final)

    Checkpoint(model=model).restore(path)
    assert_same_bits(bits(model=model), saved)
    assert fit(model, 3, 2) == history
    assert_same_bits(bits(model=model), final)


@pytest.mark.parametrize("place", [1, 4])
def test_a_custom_loop_goes_on_bit_for_bit(place: int, tmp_path: Any) -> None:
    """Model, optimizer, metric, seed, a sync-on-read sum and a dictionary, in the
    middle of an epoch.
    """
    loop = Loop(place)
    loop.run(2)
    path = Checkpoint(**loop.objects).save(tmp_path / "ckpt")
    saved = bits(**loop.objects)
    loop.run(2)
    final, result = bits(**loop.objects), float(loop.metric.result())

    other = Loop(place)
    Checkpoint(**other.objects).restore(path).assert_consumed()
    assert other.progress == {"step": 2}
    assert_same_bits(bits(**other.objects), saved)
    other.run(2)
    assert_same_bits(bits(**other.objects), final)
    assert float(other.metric.result()) == result


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("source", "target"), [(0, 4), (8, 0), (1, 8), (4, 2)])
def test_on_any_number_of_replicas(source: int, target: int, tmp_path: Any) -> None:
    """All reads as it did, gradients half way to an update included, and the next epoch
    is the same to rounding.
    """
    keras.utils.set_random_seed(1)

    def model_of(place: int) -> keras.Model:
        with scope(place):
            normalization = keras.layers.BatchNormalization(synchronized=True)
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(5),
                    normalization,
                    keras.layers.Dense(3),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer_of("accumulating"), loss, metrics=["accuracy"])
        return model

    model, other = model_of(source), model_of(target)
    fit(model, 2)
    fit(other, 1)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    Checkpoint(model=other).restore(path).assert_consumed()
    assert_close(numbers(model=other), numbers(model=model))
    history = fit(model, 3, 2)
    np.testing.assert_allclose(fit(other, 3, 2)["loss"], history["loss"], rtol=1e-5)
    assert_close(numbers(model=other), numbers(model=model), rtol=1e-4)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4])
def test_from_eight_replicas_to_others_and_back(place: int, tmp_path: Any) -> None:
    """Weights and optimizer state are the same bits all the way; moving statistics are
    the same numbers.
    """
    source, between, back = (
        made(8, "loss_scale_ema"),
        made(place, "loss_scale_ema"),
        made(8, "loss_scale_ema", seed=3),
    )
    fit(source, 1)
    Checkpoint(model=between).restore(Checkpoint(model=source).save(tmp_path / "a"))
    Checkpoint(model=back).restore(Checkpoint(model=between).save(tmp_path / "b"))
    expected = {
        name: value
        for name, value in numbers(model=source).items()
        if "/metrics/" not in name
    }
    for model in (between, back):
        actual = {
            name: value
            for name, value in numbers(model=model).items()
            if "/metrics/" not in name
        }
        assert_close(actual, expected)
        exact = [name for name in expected if "/moving_" not in name]
        assert_same_bits(
            {name: actual[name] for name in exact},
            {name: expected[name] for name in exact},
        )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sum", 10.0), ("mean", 2.5), ("only_first_replica", 1.0)],
)
def test_sync_on_read_variables_follow_tensorflow(
    aggregation: str, expected: float, tmp_path: Any
) -> None:
    """`sum` keeps the sum and `mean` the mean wherever they go; each replica gets its
    own back where it can.
    """
    strategy = strategy_of(4)

    def variable_in(place: int) -> Any:
        with scope(place):
            return keras.Variable(
                0.0, synchronization="on_read", aggregation=aggregation, trainable=False
            )

    variable = variable_in(4)
    strategy.run(lambda: variable.assign(strategy_replica() + 1.0))
    path = Checkpoint(v=variable).write(tmp_path / "ckpt")
    for place in (0, 1, 2, 4, 8):
        other = variable_in(place)
        Checkpoint(v=other).restore(path)
        assert float(other.value) == expected
    same = variable_in(4)
    Checkpoint(v=same).restore(path)
    assert [float(v) for v in same.values] == [1.0, 2.0, 3.0, 4.0]


def strategy_replica() -> Any:
    import keras_distribute as kd

    return keras.ops.cast(kd.get_replica_context().replica_id_in_sync_group, "float32")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", [0, 2])
def test_a_mean_of_components_does_not_overflow(target: int, tmp_path: Any) -> None:
    arguments = {"synchronization": "on_read", "aggregation": "mean"}
    with scope(4):
        half = keras.Variable(np.float16(0), dtype="float16", **arguments)
        whole = keras.Variable(0, dtype="int32", trainable=False, **arguments)

    def step(part: Any) -> None:
        half.assign(60000 + 64 * part)
        whole.assign(2**30 + 256 * part)

    strategy = strategy_of(4)
    part = strategy.experimental_distribute_values_from_function(
        lambda context: np.int32(context.replica_id_in_sync_group)
    )
    strategy.run(step, args=(part,))
    path = Checkpoint(half=half, whole=whole).save(tmp_path / "ckpt")
    with scope(target):
        half_there = keras.Variable(np.float16(0), dtype="float16", **arguments)
        whole_there = keras.Variable(0, dtype="int32", trainable=False, **arguments)
    Checkpoint(half=half_there, whole=whole_there).restore(path)
    assert float(half_there.numpy()) == float(half.numpy()) == 60096
    assert int(whole_there.numpy()) == int(whole.numpy()) == 2**30 + 384


def test_components_without_aggregation_fit_as_many_replicas_only(
    tmp_path: Any,
) -> None:
    from keras_distribute.errors import CheckpointError

    def variable_in(place: int) -> Any:
        with scope(place):
            return keras.Variable(
                0.0, synchronization="on_read", aggregation="none", trainable=False
            )

    variable = variable_in(4)
    strategy_of(4).run(lambda: variable.assign(strategy_replica()))
    path = Checkpoint(v=variable).write(tmp_path / "ckpt")
    same = variable_in(4)
    Checkpoint(v=same).restore(path)
    assert [float(v) for v in same.values] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(CheckpointError, match="only fit 4 replicas"):
        Checkpoint(v=variable_in(2)).restore(path)


@pytest.mark.parametrize("place", [0, 4])
def test_saved_and_restored_by_a_callback_in_the_middle_of_an_epoch(
    place: int, tmp_path: Any
) -> None:
    """While `fit` has the variables' values: the metrics of the epoch go on, too."""

    class Saving(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.path = Checkpoint(model=model).write(tmp_path / "ckpt")

    class Restoring(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.status = Checkpoint(model=other).restore(tmp_path / "ckpt")

    x, y = data(64)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model = made(place)
    history = model.fit(x, y, callbacks=[Saving()], **options).history
    other = made(place, seed=5)
    restoring = Restoring()
    rest = other.fit(x[32:], y[32:], callbacks=[restoring], **options).history
    assert restoring.status.unbuilt == ()
    assert rest == history
    assert_same_bits(bits(model=other), bits(model=model))


@pytest.mark.parametrize("place", [0, 2])
def test_what_was_saved_before_training_undoes_training(
    place: int, tmp_path: Any
) -> None:
    """The optimizer's variables are saved before the first step; metrics are reset."""
    model = made(place)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    history = fit(model, 1)
    final = bits(model=model)
    Checkpoint(model=model).restore(path).assert_consumed()
    assert float(model.optimizer.iterations.value) == 0
    assert all(
        not np.any(v) for name, v in numbers(model=model).items() if "/metrics/" in name
    )
    assert fit(model, 1) == history
    assert_same_bits(bits(model=model), final)


def test_restoring_compiles_nothing_and_keeps_the_placement(tmp_path: Any) -> None:
    """The next step finds arrays of the kind that its program was compiled for."""
    loop = Loop(4)
    loop.run(2)
    path = Checkpoint(**loop.objects).save(tmp_path / "ckpt")
    before = {name: stored_array(v).sharding for name, v in trackable(loop).items()}
    Checkpoint(**loop.objects).restore(path)
    loop.run(1)
    Checkpoint(**loop.objects).restore(path)
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        compiled.append(
            event
        ) if event == "/jax/core/compile/backend_compile_duration" else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        loop.run(1)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    for name, variable in trackable(loop).items():
        array = stored_array(variable)
        assert array.sharding.is_equivalent_to(before[name], array.ndim), name
        assert not array.weak_type, name


def trackable(loop: Loop) -> dict[str, Any]:
    from keras_distribute.checkpoint.tracking import track

    return track(loop.objects).variables


def test_an_optimizer_that_is_not_built_gets_its_variables(tmp_path: Any) -> None:
    """In a new process nothing has trained yet; with one model it is clear what for."""
    loop = Loop(2)
    loop.run(1)
    path = Checkpoint(model=loop.model, optimizer=loop.optimizer).save(
        tmp_path / "ckpt"
    )
    other = Loop(2)
    assert not other.optimizer.built
    Checkpoint(model=other.model, optimizer=other.optimizer).restore(
        path
    ).assert_consumed()
    assert_same_bits(bits(o=other.optimizer), bits(o=loop.optimizer))


def test_layers_derive_again_what_they_derive_from_variables(tmp_path: Any) -> None:
    x = np.random.default_rng(0).normal(3, 5, (20, 2)).astype("float32")

    def model_of() -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Normalization()])

    model, other = model_of(), model_of()
    model.layers[0].adapt(x)
    path = Checkpoint(model).write(tmp_path / "ckpt")
    Checkpoint(other).restore(path)
    np.testing.assert_array_equal(other(x), model(x))


def test_half_precision_and_odd_types(tmp_path: Any) -> None:
    dtypes = [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "int8",
        "uint8",
        "bool",
        "int32",
        "uint32",
    ]
    values = {f"v{i}": np.arange(6).reshape(2, 3) % 2 for i in range(len(dtypes))}

    def variables(factor: int) -> dict[str, Any]:
        named = {
            name: keras.Variable(
                (value * factor).astype("int32"), dtype=dtype, trainable=False
            )
            for (name, value), dtype in zip(values.items(), dtypes, strict=True)
        }
        return named | {"empty": keras.Variable(np.zeros((0, 3)), trainable=False)}

    with strategy_of(2).scope():
        source, target = variables(1), variables(0)
    path = Checkpoint(**source).save(tmp_path / "ckpt")
    Checkpoint(**target).restore(path)
    assert_same_bits(bits(**target), bits(**source))


def test_keeps_random_state_of_layers(tmp_path: Any) -> None:
    """`Dropout` draws the masks that it would have drawn."""
    keras.utils.set_random_seed(3)
    layer, x = keras.layers.Dropout(0.5), np.ones((4, 8), "float32")
    layer(x, training=True)
    path = Checkpoint(layer=layer).write(tmp_path / "ckpt")
    expected = np.array(layer(x, training=True))
    other = keras.layers.Dropout(0.5)
    other.build((4, 8))
    Checkpoint(layer=other).restore(path)
    np.testing.assert_array_equal(other(x, training=True), expected)


def test_numbering_of_save(tmp_path: Any) -> None:
    """`save` counts, `write` does not, `restore` brings the count back, and `read` does
    not. TF's habit.
    """
    v = keras.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    assert checkpoint.restore(None).path is None
    paths = [checkpoint.save(tmp_path / "a"), checkpoint.save(tmp_path / "a")]
    assert [p[-3:] for p in paths] == ["a-1", "a-2"]
    checkpoint.write(tmp_path / "b")
    other = Checkpoint(v=v)
    other.read(paths[1])
    assert other.save_counter == 0
    other.restore(paths[1])
    assert other.save_counter == 2


def test_models_in_one_process(tmp_path: Any) -> None:
    """The counters in names differ between models of one kind, and do not matter."""
    first, second = build(), build()
    path = Checkpoint(model=first).write(tmp_path / "ckpt")
    Checkpoint(model=second).restore(path).assert_consumed()
    np.testing.assert_array_equal(second.layers[0].kernel, first.layers[0].kernel)

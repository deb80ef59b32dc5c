"""`kd.find_batch_size`: what it finds, and that the model is left as it was."""

import contextlib
import gc
import os

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.batch_size import example, trials
from keras_distribute.variables import SyncOnReadVariable
from tests.interruptions import Interrupter
from tests.logical import tpu_strategy
from tests.support import central, mirrored, pack_from

from .models import Hungry, X, Y, bits, build, trained

STRATEGIES = {
    "none": lambda: None,
    "one device": lambda: kd.OneDeviceStrategy("cpu:0"),
    "1 replica": lambda: mirrored(1),
    "2 replicas": lambda: mirrored(2),
    "4 replicas": lambda: mirrored(4),
    "8 replicas": lambda: mirrored(8),
    "divided slots": lambda: mirrored(4, shard_optimizer_state=True),
    "divided weights": lambda: mirrored(4, shard_variables=True, min_shard_bytes=16),
    "deterministic": lambda: mirrored(2, deterministic=True, num_replicas=4),
    "central storage": lambda: central(2),
    "several workers": kd.MultiWorkerMirroredStrategy,
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_largest_batch_that_ran(name):
    """A step really runs out of memory; the model goes on as if never searched."""
    strategy = STRATEGIES[name]()
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    model, twin = (trained(strategy, Hungry(40)) for _ in range(2))
    before = bits(model)
    assert before == bits(twin)
    result = kd.find_batch_size(
        model, X, Y, starting_batch_size=40, max_batch_size=48, steps_per_trial=1
    )
    assert result.largest == 40
    assert result.too_large == 40 + replicas
    assert result.recommended == 38 // replicas * replicas
    assert result.gradient_accumulation_steps == 1
    assert bits(model) == before
    for each in (model, twin):
        each.fit(X[:32], Y[:32], batch_size=16, shuffle=False, verbose=0)
    assert bits(model) == bits(twin)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [0, 2, 4])
def test_a_limit_in_bytes(replicas, compilations, monkeypatch):
    """Batches over it are compiled, and not run; each size is compiled once, and
    nothing stays behind.
    """
    pack_from(monkeypatch, None)  # What fills a buffer is compiled, too.
    strategy = mirrored(replicas) if replicas else None
    model = trained(strategy)
    for each in (*model.variables, *model.metrics_variables):
        if isinstance(each, SyncOnReadVariable):
            each.assign(each.components)  # By small programs, which are not to count.
            assert np.isfinite(each.numpy()).all()
    before, limit = bits(model), 2**20
    gc.collect()
    held = sum(array.nbytes for array in jax.live_arrays())
    del compilations[:]
    result = kd.find_batch_size(model, X, Y, memory_limit=limit, steps_per_trial=2)
    assert len(compilations) == result.num_trials
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= held
    assert bits(model) == before
    assert result.too_large is not None
    assert (
        0
        < result.too_large - result.largest
        <= max(2 * (replicas or 1), result.largest // 16)
    )
    assert result.recommended <= 0.95 * result.largest
    if strategy is not None:  # Beside the batches that `fit` has ready.
        report = kd.dry_run(model, result.too_large, f"cpu:{replicas}")
        ahead = 2 * report.memory.batch
        assert report.needed_bytes + ahead > limit > 0.9 * report.needed_bytes + ahead
    less = kd.find_batch_size(model, X, Y, memory_limit=limit // 2, steps_per_trial=1)
    assert less.largest < result.largest


def test_with_a_margin_and_without():
    model = trained(mirrored(2), Hungry(40))
    exact = kd.find_batch_size(model, X, Y, max_batch_size=99, margin=0)
    assert exact.recommended == exact.largest == 40
    half = kd.find_batch_size(model, X, Y, max_batch_size=99, margin=0.5)
    assert half.recommended == 20
    all_ran = kd.find_batch_size(model, X, Y, max_batch_size=33)
    assert (all_ran.largest, all_ran.recommended, all_ran.too_large) == (32, 32, None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [0, 4])
def test_a_batch_in_parts(replicas):
    """Trained with what was found, the update is that of the whole batch."""
    strategy = mirrored(replicas) if replicas else None
    model = trained(strategy, Hungry(20))
    result = kd.find_batch_size(model, X, Y, global_batch_size=96, steps_per_trial=1)
    assert result.recommended * result.gradient_accumulation_steps == 96
    assert result.largest == 20
    assert (result.recommended, result.gradient_accumulation_steps) == (16, 6)
    small = kd.find_batch_size(model, X, Y, global_batch_size=20, steps_per_trial=1)
    assert (small.recommended, small.gradient_accumulation_steps) == (20, 1)
    assert small.num_trials == 1


def test_what_was_found_is_an_update_of_the_whole_batch():
    """Its batch and its steps of accumulation, given to Keras."""
    result = kd.find_batch_size(
        trained(mirrored(4), Hungry(20)), X, Y, global_batch_size=96
    )
    weights = []
    for size, parts in (
        (96, None),
        (result.recommended, result.gradient_accumulation_steps),
    ):
        keras.utils.set_random_seed(0)
        with mirrored(4).scope():
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=parts)
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
        model.fit(X, Y, batch_size=size, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(*weights, atol=1e-6)


def test_several_logical_devices():
    """Weights that a layout map divides go back divided."""
    strategy = tpu_strategy(2)
    model = trained(strategy, Hungry(40))
    before = bits(model)
    result = kd.find_batch_size(model, X, Y, max_batch_size=64, steps_per_trial=1)
    assert result.largest == 40 and strategy.num_replicas_in_sync == 4
    assert bits(model) == before


def test_copies_that_differ_stay_different():
    model = trained(mirrored(2))
    kernel = model.layers[0].kernel
    kd.testing.Fault("flip", variable=kernel, replica=1, bit=3).now(0)
    before = bits(model)
    kd.find_batch_size(model, X, Y, max_batch_size=16, steps_per_trial=1)
    assert bits(model) == before
    with pytest.raises(kd.errors.ReplicaConsistencyError, match="bit 3"):
        kernel.distribute_strategy.check_consistency(model)


def test_accumulators_take_memory_too(monkeypatch):
    """A limit with room for a batch alone, and not for accumulators beside it."""
    pack_from(monkeypatch, None)  # A step with accumulators has no buffers.
    model = trained(mirrored(2))
    unlimited = kd.find_batch_size(model, X, Y, memory_limit=2**20, margin=0)
    parts = kd.find_batch_size(
        model, X, Y, memory_limit=2**20, margin=0, global_batch_size=2**16
    )
    assert parts.largest < unlimited.largest
    assert parts.recommended * parts.gradient_accumulation_steps == 2**16


def test_several_steps_in_one_dispatch():
    model = trained(mirrored(2), Hungry(40), steps_per_execution=4)
    before = bits(model)
    result = kd.find_batch_size(model, X, Y, max_batch_size=64, steps_per_trial=4)
    assert result.largest == 40
    assert bits(model) == before


def test_a_model_with_packed_state():
    """Weights in buffers, after steps that left some."""
    strategy = mirrored(2)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(4, "relu") for _ in range(40)]
        model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=32, verbose=0)
    before = bits(model)
    held = sum(array.nbytes for array in jax.live_arrays())
    kd.find_batch_size(model, X, Y, max_batch_size=32, steps_per_trial=1)
    assert bits(model) == before
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= 1.5 * held
    model.fit(X, Y, batch_size=32, verbose=0)
    assert bits(model) != before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_is_not_built(replicas):
    scope = mirrored(2).scope() if replicas > 1 else contextlib.nullcontext()
    with scope:
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    result = kd.find_batch_size(model, X, Y, max_batch_size=64, steps_per_trial=1)
    assert result.largest == 64
    assert int(model.optimizer.iterations) == 0


def test_random_streams_are_left_alone():
    model = trained(mirrored(2))
    keras.utils.set_random_seed(3)
    first = [np.random.random(), np.asarray(keras.random.uniform((2,))).tolist()]
    keras.utils.set_random_seed(3)
    kd.find_batch_size(model, X, Y, max_batch_size=32, steps_per_trial=1)
    assert [
        np.random.random(),
        np.asarray(keras.random.uniform((2,))).tolist(),
    ] == first


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


def generator():
    for i in range(4):
        yield X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize("kind", ["PyDataset", "tf.data", "weights", "distributed"])
def test_data_of_every_kind(kind, replicas):
    strategy = mirrored(replicas) if replicas else None
    model = trained(strategy)
    given = {
        "PyDataset": lambda: (Batches(),),
        "tf.data": lambda: (_tf_dataset(),),
        "weights": lambda: (X, Y, np.ones(len(X))),
        "distributed": lambda: (
            (strategy or mirrored(1)).experimental_distribute_dataset(
                kd.ArrayDataset((X, Y), batch_size=8)
            ),
        ),
    }[kind]()
    result = kd.find_batch_size(model, *given, max_batch_size=16, steps_per_trial=1)
    assert result.largest == 16


def _tf_dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def test_a_generator_is_read_again_by_fit():
    model = trained(mirrored(2))
    batches = generator()
    kd.find_batch_size(model, batches, max_batch_size=16, steps_per_trial=1)
    steps = []
    counted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    model.fit(batches, verbose=0, callbacks=[counted])
    assert len(steps) == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [0, 2])
def test_memory_of_the_host(replicas, monkeypatch):
    model = trained(mirrored(replicas) if replicas else None)
    before, whole = bits(model), example.repeated

    def repeated(batch, rows):
        if rows > 24:
            raise MemoryError
        return whole(batch, rows)

    monkeypatch.setattr(example, "repeated", repeated)
    assert kd.find_batch_size(model, X, Y, max_batch_size=64).largest == 24
    assert bits(model) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [0, 2])
def test_an_error_in_a_step_leaves_the_model_as_it_was(replicas):
    class Broken(keras.layers.Layer):
        def call(self, x):
            if x.shape[0] > 40:
                raise OSError("a disk is full")
            return x

        def compute_output_shape(self, input_shape):
            return input_shape

    model = trained(mirrored(replicas) if replicas else None, Broken())
    before = bits(model)
    with pytest.raises(OSError, match="a disk is full"):
        kd.find_batch_size(model, X, Y, max_batch_size=64, steps_per_trial=1)
    assert bits(model) == before
    model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.timeout(300)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [0, 2])
def test_an_interruption_leaves_the_model_as_it_was(replicas):
    model = trained(mirrored(replicas) if replicas else None, Hungry(8))
    before, inside = bits(model), "keras_distribute/batch_size"

    def search():
        kd.find_batch_size(model, X, Y, max_batch_size=16, steps_per_trial=1)

    counted = Interrupter(None, inside=inside)
    assert not counted(search)
    places = 40 if os.environ.get("EVERY_CASE") else 4
    for i in range(places):
        place = i * counted.count // places
        interrupter = Interrupter(place, inside=inside)
        # A later search may be shorter, by what the first one has made.
        assert interrupter(search) or 0.9 * counted.count < interrupter.count <= place
        assert bits(model) == before, interrupter.where
        assert not kd.has_strategy()
    search()
    assert bits(model) == before


def test_what_is_out_of_memory_and_what_is_not():
    error = jax.errors.JaxRuntimeError
    for text in (
        "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.",
        "INTERNAL: CUBLAS_STATUS_ALLOC_FAILED",
        "INTERNAL: failed to allocate 5 bytes: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ):
        assert trials.ran_out(error(text))
    assert trials.ran_out(MemoryError())
    assert not trials.ran_out(error("INTERNAL: a bug"))
    assert not trials.ran_out(ValueError("out of memory"))
    assert not trials.ran_out(kd.errors.OutOfMemoryError("nothing fits"))


def test_devices_that_say_what_they_have():
    class Device:
        def __init__(self, stats):
            self._stats = stats

        def memory_stats(self):
            return self._stats

    assert (
        trials.bytes_of([Device({"bytes_limit": 9}), Device({"bytes_limit": 7})]) == 7
    )
    assert trials.bytes_of([Device(None)]) is None
    assert trials.bytes_of([Device({})]) is None


def raised(error, *args, **options):
    with pytest.raises(error) as caught:
        kd.find_batch_size(*args, **options)
    return str(caught.value)


def test_errors_say_what_to_do():
    model = trained(mirrored(2), Hungry(40))
    text = raised(ValueError, model, X, Y)
    assert text == (
        "CPUs do not say when their memory ends: the system ends the process, without "
        "an error.\n"
        "  Received: neither memory_limit nor max_batch_size.\n"
        "  Fix: memory_limit=4 * 2**30 for the bytes of each device, or "
        "max_batch_size=4096."
    )
    text = raised(ValueError, model, X, Y, max_batch_size=1)
    assert "has a row for each of 2 replicas" in text
    assert "Received: 1 rows." in text and "max_batch_size=2" in text
    assert "Fix: margin=0.05" in raised(ValueError, model, X, Y, margin=1.0)
    assert "Fix: memory_limit=16 * 2**30" in raised(
        TypeError, model, X, Y, memory_limit="1 GB"
    )
    text = raised(MemoryError, model, X, Y, memory_limit=10)
    assert text.startswith("Not even a batch of 2 row(s), one a replica, has memory")
    assert "Received: 10 bytes of each." in text
    assert 'set_dtype_policy("mixed_bfloat16")' in text
    plain = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    assert 'model.compile("adam", loss) first' in raised(TypeError, plain, X, Y)
    plain.compile("sgd", "mse", run_eagerly=True)
    assert "Received: run_eagerly=True" in raised(TypeError, plain, X, Y)
    assert "There is nothing to train" in raised(ValueError, model, np.ones((0, 16)))
    batches = iter([(X[:0], Y[:0]), (X, Y)])
    text = raised(ValueError, model, (b for b in batches), max_batch_size=16)
    assert "The first batch has no rows" in text


def test_not_in_a_fit_of_the_same_model():
    model = trained(mirrored(2))
    search = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: kd.find_batch_size(model, X, Y, max_batch_size=8)
    )
    with pytest.raises(kd.errors.ContextError, match="in fit of the same model"):
        model.fit(X, Y, verbose=0, callbacks=[search])


def test_not_in_a_distribution_of_keras():
    model = build()
    with keras.distribution.DataParallel().scope():
        text = raised(kd.errors.ContextError, model, X, Y, max_batch_size=8)
    assert "keras.distribution.set_distribution(None)" in text


def test_not_under_parameter_servers(monkeypatch):
    model = build()
    strategy = object.__new__(kd.ParameterServerStrategy)
    monkeypatch.setattr(kd.ParameterServerStrategy, "__repr__", lambda _: "servers")
    monkeypatch.setattr(
        "keras_distribute.training.adoption.strategy_of", lambda _: strategy
    )
    text = raised(kd.errors.ContextError, model, X, Y, max_batch_size=8)
    assert "there is no global batch to search" in text
    assert "kd.MirroredStrategy() on one worker's devices" in text

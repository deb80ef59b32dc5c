"""What several processes do together; each function runs in every one of them, and
returns what its test compares.
"""

import gc
import os
import random
import tempfile
import time
import traceback

import jax
import keras
import numpy as np

import keras_distribute as kd
from keras_distribute._compat import jax_internals
from tests.support import without_tensorflow

RNG = np.random.RandomState(0)
X = RNG.randn(46, 5).astype("float32")
Y = RNG.randint(0, 3, 46)


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def linear(steps_per_execution=1):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.1), loss, steps_per_execution=steps_per_execution
    )
    return model


def weights_of(model):
    return [np.asarray(w) for w in model.get_weights()]


def contracts(folder):
    """The contracts of every strategy, by the name of the test; `None` where one holds."""
    without_tensorflow()
    from tests.contract import test_every_strategy as contract

    strategy = kd.MultiWorkerMirroredStrategy()
    model = contract.make_model()
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    plain = history, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), model
    held = {}
    for name, test in {
        "training": lambda: contract.test_training_gives_the_numbers_of_one_device(
            strategy, plain, folder
        ),
        "custom loop": lambda: (
            contract.test_a_custom_loop_gives_the_numbers_of_one_device(
                strategy, contract.loop_of_plain_keras()
            )
        ),
        "contexts": lambda: contract.test_scope_and_contexts(strategy),
    }.items():
        try:
            test()
            held[name] = None
        except BaseException:
            held[name] = traceback.format_exc()
    return (
        strategy.num_replicas_in_sync,
        jax.process_count(),
        jax.local_device_count(),
        held,
    )


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[16 * index : 16 * index + 16], Y[16 * index : 16 * index + 16]


def batches_of(rows, size):
    for start in range(0, len(rows), size):
        yield X[rows[start : start + size]], Y[rows[start : start + size]]


def connected():
    """Between which devices Gloo has connected the processes before their first step."""
    strategy = kd.MultiWorkerMirroredStrategy()
    client = jax_internals.coordination_client()
    found = {key for key, _ in client.key_value_dir_get_bytes("cpu:gloo")}
    devices = ",".join(str(device.id) for device in strategy.replica_mesh.devices)
    return found, [f"cpu:gloo/{devices}/{i}" for i in range(4)]


def kinds_of_data(distributed=True):
    """One epoch of `fit` and a `predict` over each kind, under the strategy or without:
    the weights, the history and the predictions.
    """
    strategy = kd.MultiWorkerMirroredStrategy() if distributed else kd.get_strategy()
    same = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.DATA)

    def distribute(batches):
        if not distributed:
            return batches
        return strategy.experimental_distribute_dataset(batches, same)

    arrays, rows = (X, Y), np.arange(46)
    kinds = {
        "arrays, shuffled": (arrays, {"batch_size": 16}),
        "fewer rows than replicas": ((X[:3], Y[:3]), {"batch_size": 2}),
        "a PyDataset": ((Squares(),), {}),
        "a generator": ((distribute(batches_of(rows, 16)),), {}),
        "steps_per_epoch": (
            (distribute(batches_of(rows, 10)),),
            {"steps_per_epoch": 3},
        ),
        "groups of 2 steps": (arrays, {"batch_size": 8}),
        "groups of auto steps": (arrays, {"batch_size": 8}),
        "validation": (arrays, {"batch_size": 16, "validation_split": 0.3}),
    }
    seen = {}
    for name, (positional, named) in kinds.items():
        group = name.split()[2] if name.startswith("groups") and distributed else "1"
        with strategy.scope():
            model = linear(int(group) if group.isdigit() else group)
        history = model.fit(*positional, verbose=0, **named).history
        predictions = model.predict(X[:7], batch_size=3, verbose=0)
        seen[name] = weights_of(model), history, predictions
    return seen


def own_data(unequal):
    """Each process reads data of its own, of another length: the steps, the history and
    the weights.
    """
    strategy = kd.MultiWorkerMirroredStrategy()
    process, count = kd.process_index(), kd.process_count()
    lengths = [3 + 2 * i if unequal else 4 for i in range(count)]
    first = 5 * sum(lengths[:process])
    own = (first + np.arange(5 * lengths[process])) % 46
    off = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF)
    with strategy.scope():
        model = linear()
    steps = []
    counting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    dataset = strategy.experimental_distribute_dataset(
        kd.ArrayDataset((X[own], Y[own]), 5), off
    )
    history = model.fit(dataset, epochs=2, verbose=0, callbacks=[counting]).history
    loop = []
    for x, _ in strategy.experimental_distribute_dataset(batches_of(own, 5), off):
        rows = strategy.run(lambda x: jax.numpy.asarray(x.shape[0]), args=(x,))
        total = strategy.run(lambda x: x.sum(), args=(x,))
        loop.append(
            (
                int(strategy.reduce("SUM", rows, axis=None)),
                float(strategy.reduce("SUM", total, axis=None)),
                np.asarray(strategy.gather(x, axis=0)).shape,
            )
        )
    return {
        "steps": steps,
        "history": history,
        "weights": weights_of(model),
        "loop": loop,
        "own": own,
    }


def loops_broken_off(broken_off):
    """Loops over a generator that each process has, one of them far fewer batches,
    broken off behind each of these numbers of steps: the first rows, and the rest.
    """
    strategy = kd.MultiWorkerMirroredStrategy()
    return [loop_broken_off(strategy, taken) for taken in broken_off]


def orders():
    """The batches of each epoch where the chief draws in between; and whether processes
    with data of their own keep the streams that they have seeded.
    """
    strategy = kd.MultiWorkerMirroredStrategy()
    streams = random.getstate(), np.random.get_state()
    taken = [[]]

    class Batches(Squares):
        def __getitem__(self, index):
            taken[-1].append(index)
            return super().__getitem__(index)

    class Draws(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            taken.append([])

        def on_epoch_end(self, epoch, logs=None):
            if kd.is_chief():
                random.random()

    with strategy.scope():
        model = linear()
    model.fit(Batches(), epochs=3, verbose=0, callbacks=[Draws()])
    random.seed(kd.process_index())
    np.random.seed(kd.process_index())
    options = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF)
    data = ((np.zeros(4),) for _ in range(2))
    for _ in strategy.experimental_distribute_dataset(data, options):
        pass
    own = random.random(), np.random.rand()
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    return taken, own


def loop_broken_off(strategy, taken):
    count = 4 * (1 + 4 * kd.process_index())
    own = np.arange(count, dtype=np.float32)[:, None] + 100 * kd.process_index()
    off = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF)
    dataset = strategy.experimental_distribute_dataset(
        ((own[i : i + 4],) for i in range(0, count, 4)), off
    )
    passes = []
    for most in (taken, 100):
        steps = [element[0] for _, element in zip(range(most), dataset, strict=False)]
        passes.append(
            [
                np.asarray(strategy.experimental_local_results(x)[0]).ravel().tolist()
                for x in steps
            ]
        )
    return own.ravel().tolist(), passes


def shared_files(paths):
    """A `tf.data` pipeline over files of unequal lengths: the numbers that this process
    reads, and those of all.
    """
    import tensorflow as tf

    strategy = kd.MultiWorkerMirroredStrategy()
    lines = tf.data.Dataset.from_tensor_slices(paths).interleave(
        tf.data.TextLineDataset, cycle_length=1
    )
    pipeline = lines.map(lambda line: tf.strings.to_number(line)).batch(4)
    own, everyone = [], []
    for element in strategy.experimental_distribute_dataset(pipeline):
        own += [
            float(x)
            for part in strategy.experimental_local_results(element)
            for x in np.asarray(part)
        ]
        everyone += np.asarray(strategy.gather(element, axis=0)).tolist()
    return {"own": own, "everyone": everyone}


def values():
    """Reductions, gathers, values and variables: what each process sees."""
    strategy = kd.MultiWorkerMirroredStrategy()
    n, own = strategy.num_replicas_in_sync, strategy.replica_mesh.local_replicas
    even = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32([c.replica_id_in_sync_group, 1])
    )
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(c.replica_id_in_sync_group, dtype="float32")
    )
    unlike = strategy.experimental_distribute_values_from_function(
        lambda c: np.zeros((1,) * (1 + c.replica_id_in_sync_group), "float32")
    )
    texts = strategy.experimental_distribute_values_from_function(
        lambda c: f"replica {c.replica_id_in_sync_group}"
    )
    data = kd.ArrayDataset(np.arange(7.0), batch_size=7)
    options = kd.InputOptions(experimental_fetch_to_device=False)
    on_host = next(iter(strategy.experimental_distribute_dataset(data, options)))
    names = np.array([f"{10**i}" for i in range(2 + kd.process_index())])
    off = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF)
    named = strategy.experimental_distribute_dataset(
        ((names, np.zeros(len(names))) for _ in range(1 + kd.process_index())), off
    )
    with strategy.scope():
        mirrored = keras.Variable(np.arange(3.0))
        on_read = keras.Variable(2.0, synchronization="on_read", aggregation="sum")
        unseeded = keras.layers.Dense(2)
        unseeded.build((None, 2))

    def step(value):
        context = kd.get_replica_context()
        on_read.assign_add(context.replica_id_in_sync_group + 1.0)
        mirrored.assign_add(context.all_reduce("MEAN", value.sum()) * np.ones(3))
        return {"sum": value.sum(), "id": context.replica_id_in_sync_group}

    def joining(value):
        joined = kd.get_replica_context().all_gather(value, axis=0)
        gradient = jax.grad(
            lambda x: jax.numpy.sum(kd.get_replica_context().all_gather(x, axis=0) ** 2)
        )(value)
        return joined, gradient

    joined, gradient = strategy.run(joining, args=(ragged,))
    result = strategy.run(step, args=(even,))
    errors = {}
    for name, wrong in {
        "reduce": lambda: strategy.reduce("SUM", unlike, axis=0),
        "gather": lambda: strategy.gather(texts, axis=0),
    }.items():
        try:
            wrong()
        except (ValueError, TypeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    structures = strategy.experimental_local_results({"a": result["sum"], "b": 1})
    return {
        "own": list(own),
        "context": (
            strategy.input_context.num_input_pipelines,
            strategy.input_context.input_pipeline_id,
        ),
        "gathered": np.asarray(strategy.gather(even, axis=0)).tolist(),
        "ragged": np.asarray(strategy.gather(ragged, axis=0)).tolist(),
        "joined": [np.asarray(v).tolist() for v in joined.values],
        "gradient": np.asarray(strategy.gather(gradient, axis=0)).tolist(),
        "on host": np.asarray(strategy.gather(on_host, axis=0)).tolist(),
        "ragged sum": float(strategy.reduce("SUM", ragged, axis=0)),
        "mean": np.asarray(strategy.reduce("MEAN", even, axis=None)).tolist(),
        "local": [
            np.asarray(v).tolist() for v in strategy.experimental_local_results(even)
        ],
        "texts": list(texts.values),
        "names": [[value.tolist() for value in name.values] for name, _ in named],
        "structures": [(float(s["a"]), s["b"]) for s in structures],
        "ids": [int(v) for v in result["id"].values],
        "mirrored": mirrored.numpy().tolist(),
        "on_read": float(on_read.numpy()),
        "components": [float(v) for v in on_read.values],
        "reprs": [repr(strategy), repr(mirrored), repr(on_read)],
        "eager": np.asarray(mirrored + jax.numpy.ones(3)).tolist(),
        "unseeded": np.asarray(unseeded.kernel).tolist(),
        "numpy": np.random.rand(3).tolist(),
        "n": n,
        "errors": errors,
    }


def single_batches():
    """`*_on_batch` takes the global batch, the same in every process."""
    strategy = kd.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = linear()
    losses = [float(model.train_on_batch(X[:n], Y[:n])) for n in (16, 7, 1)]
    losses.append(float(model.test_on_batch(X[:6], Y[:6])))
    predictions = model.predict_on_batch(X[:5])
    plain = linear()
    expected = [float(plain.train_on_batch(X[:n], Y[:n])) for n in (16, 7, 1)]
    expected.append(float(plain.test_on_batch(X[:6], Y[:6])))
    try:
        model.train_on_batch(X[:8] + kd.process_index(), Y[:8])
        error = "none"
    except ValueError as caught:
        error = str(caught)
    return (
        losses,
        expected,
        np.asarray(predictions),
        plain.predict_on_batch(X[:5]),
        error,
    )


def narrow_sums(dtype):
    """Gradients of 1/3 and more on each replica, summed in another dtype: what one step
    takes off, and one of `fit`.
    """
    strategy = kd.MultiWorkerMirroredStrategy(communication_dtype=dtype)
    with strategy.scope():
        weight = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            ]
        )
        model.compile(keras.optimizers.SGD(1.0), lambda y, prediction: y * prediction)

    def step():
        own = kd.get_replica_context().replica_id_in_sync_group + jax.numpy.full(
            2, 1 / 3, "float32"
        )
        optimizer.apply([own], [weight])

    strategy.run(step)
    x = np.arange(4, dtype="float32")[:, None] + np.float32(1 / 3)
    model.fit(x, np.ones((4, 1), "float32"), batch_size=4, verbose=0)
    return weight.numpy().tolist(), float(model.weights[0].numpy()[0, 0])


def a_nan():
    """A value that is no number, in a row of process 1: what each process is told, and
    when Keras's callback ends.
    """
    strategy = kd.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = linear()
    x = X[:32].copy()
    x[27] = np.nan  # In the third quarter of the second batch.
    try:
        model.fit(
            x,
            Y[:32],
            batch_size=16,
            shuffle=False,
            verbose=0,
            callbacks=[kd.callbacks.RaiseOnNaN()],
        )
        error = "none"
    except FloatingPointError as caught:
        error = str(caught)
    with strategy.scope():
        model = linear()
    stops = keras.callbacks.TerminateOnNaN()
    history = model.fit(
        x, Y[:32], batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[stops]
    ).history
    return error, int(model.optimizer.iterations), len(history["loss"])


def interrupted(tries):
    """A `fit` that is interrupted at the same place in all processes; and what is left."""
    without_tensorflow()
    from tests.interruptions import Interrupter

    gc.disable()  # Finalizers would be counted, and do not run at the same place in all.
    with kd.MultiWorkerMirroredStrategy().scope():
        model = make_model()

    def fit(*callbacks):
        model.fit(
            X,
            Y,
            batch_size=16,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(state())

    def state():
        return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    def set_state(values):
        for variable, value in zip(
            (*model.variables, *model.optimizer.variables), values, strict=True
        ):
            variable.assign(value)

    fit()
    begin = state()
    states = [begin]
    fit(Note())
    counter = Interrupter(None, inside="steps/compiled_step.py")
    set_state(begin)
    counter(fit)
    outcomes = []
    for i in range(tries):
        set_state(begin)
        interrupter = Interrupter(
            (2 * i + 1) * counter.count // (2 * tries), inside="steps/compiled_step.py"
        )
        was = interrupter(fit)
        left = state()
        whole = [all(map(np.array_equal, left, other)) for other in states]
        set_state(begin)
        fit()
        again = all(map(np.array_equal, state(), states[-1]))
        outcomes.append(
            (was, whole.index(True) if any(whole) else None, again, interrupter.where)
        )
    return outcomes


def different_programs():
    """What is said where the processes do not do the same."""
    without_tensorflow()
    strategy = kd.MultiWorkerMirroredStrategy()
    errors = {}

    def tried(name, action):
        try:
            action()
            errors[name] = "none"
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    tried(
        "other lengths",
        lambda: strategy.experimental_distribute_dataset(
            kd.ArrayDataset(np.arange(10 + 10 * kd.process_index()), 5)
        ),
    )
    data = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.DATA)
    dataset = strategy.experimental_distribute_dataset(
        ((np.arange(4.0 + kd.process_index()),) for _ in range(2)), data
    )
    tried("other rows", lambda: list(dataset))
    own = kd.AutoShardPolicy.OFF if kd.process_index() else kd.AutoShardPolicy.DATA
    tried(
        "other policies",
        lambda: strategy.experimental_distribute_dataset(
            kd.ArrayDataset(np.arange(8), 4), kd.InputOptions(auto_shard_policy=own)
        ),
    )
    errors |= different_rows(strategy)
    tried("orbax", lambda: fit_with_orbax(strategy))
    tried("eager", lambda: eager_fit(strategy))
    tried("own function", lambda: fit_by_own_function(strategy))
    errors |= different_assignments(strategy)
    errors |= different_steps(strategy)
    tried("chief raises", lambda: kd.run_on_chief(int, "x"))
    with strategy.scope():
        wrong = keras.Variable(float(kd.process_index()), name="wrong")
    tried("other values", lambda: strategy.run(lambda: wrong.assign_add(1.0)))
    with strategy.scope(), tempfile.TemporaryDirectory() as folder:
        saved = linear()
        if kd.is_chief():
            tried("chief saves", lambda: saved.save(f"{folder}/alone.keras"))
        else:
            tried("chief saves", lambda: kd.barrier("it is saved"))
    on_chief = kd.run_on_chief(os.getpid)
    kd.barrier("same place")
    tried("other places", lambda: kd.barrier(f"place {kd.process_index()}"))
    return errors, on_chief, os.getpid()


class Ordered(keras.utils.PyDataset):
    """Batches in a new order after each pass, whose workers draw random numbers, in each
    process how fast it likes.
    """

    num_batches = 40

    def __init__(self):
        super().__init__(workers=2, max_queue_size=2)
        self.order = np.arange(self.num_batches)

    def __getitem__(self, index):
        time.sleep(0.002 * ((7 * index + 5 * kd.process_index()) % 4))
        batch = self.order[index]
        np.random.normal(size=1 + batch % 3)
        return (np.full((4, 1), batch, "float32"),)

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def orders_of_workers():
    """The numbers of the batches of an `Ordered` in each process, three a pass."""
    keras.utils.set_random_seed(3)
    strategy = kd.MultiWorkerMirroredStrategy()
    dataset = strategy.experimental_distribute_dataset(Ordered())
    passes = []
    for _ in range(4):
        iterator = iter(dataset)
        batches = [next(iterator)[0].values[0] for _ in range(3)]
        iterator.close()
        passes.append([float(np.asarray(batch)[0, 0]) for batch in batches])
    return passes


class Rows(keras.utils.PyDataset):
    """Batches of so many rows each."""

    def __init__(self, *rows, dtype="float32"):
        super().__init__()
        self.rows, self.dtype = rows, dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return (np.zeros((self.rows[index], 5), self.dtype),)


def different_rows(strategy):
    """What is said where the processes take as many steps, but of other rows, and how
    many batches they have got before.
    """
    chief, found = kd.is_chief(), {}
    for name, data in {
        "arrays of other rows": kd.ArrayDataset(np.arange(32 if chief else 30), 4),
        "arrays of other batches": kd.ArrayDataset(
            *((np.arange(32), 4) if chief else (np.arange(16), 2))
        ),
        "arrays of another width": kd.ArrayDataset(np.zeros((8, 3 if chief else 2)), 4),
        "arrays in another order": kd.ArrayDataset(
            (np.zeros((99, 2)), np.arange(99)[:: 1 if chief else -1]), 4
        ),
        "arrays of another value": kd.ArrayDataset(
            {"x": np.full((9, 50), np.nan), "y": np.append(np.ones(8), 2 + chief)}, 4
        ),
        "arrays of another rounding": kd.ArrayDataset(
            np.linspace(-1.0, 1.0, 60) + (1e-7 if chief else 0.0), 4
        ),
        "batches of another dtype": Rows(4, 4, dtype="int32" if chief else "float16"),
        "another shuffle": kd.ArrayDataset(np.arange(8), 4, shuffle=chief, seed=1),
        "another seed": kd.ArrayDataset(np.arange(8), 4, shuffle=True, seed=int(chief)),
        "another first batch": Rows(4 if chief else 2, 4),
        "another last batch": Rows(4, 4, 4 if chief else 2),
        "another batch": Rows(*[4] * 9, 4 if chief else 2, *[4] * 30),
    }.items():
        taken = 0
        try:
            for _ in strategy.experimental_distribute_dataset(data):
                taken += 1
        except kd.errors.InputError as error:
            found[name] = f"{taken} {type(error).__name__}: {error}"
        else:
            found[name] = f"{taken} batches"
    return found


def fit_with_orbax(strategy):
    with strategy.scope():
        model = linear()
    model.fit(
        X,
        Y,
        verbose=0,
        callbacks=[keras.callbacks.OrbaxCheckpoint("never_written", save_freq="epoch")],
    )


def eager_fit(strategy):
    with strategy.scope():
        model = linear()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    model.fit(X, Y, verbose=0)


def different_steps(strategy):
    """What is said where the processes compute different things in one place."""
    chief, found = kd.is_chief(), {}

    def fitted(loss="mse", momentum=0.5, activation=None):
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.01, momentum)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.add(keras.layers.Activation(activation))
            model.compile(optimizer, loss)
        model.fit(X, Y, batch_size=16, verbose=0)

    def total(x):
        return keras.ops.sum(x)

    def printing(x):
        if chief:
            jax.debug.print("{}", keras.ops.max(x) + 1)
        return keras.ops.sum(x)

    def named(x):
        keras.layers.Identity()
        return keras.ops.sum(x)

    own = np.full(3, float(chief))
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(3, float(context.replica_id_in_sync_group), "float32")
    )

    def run(function):
        results = strategy.run(function, (value,))
        return float(strategy.reduce("SUM", results, axis=None))

    for name, action in {
        "own loss": lambda: fitted("mse" if chief else "mae"),
        "own momentum": lambda: fitted(momentum=0.5 + 0.1 * chief),
        "own layer": lambda: fitted(activation="relu" if chief else "tanh"),
        "own number": lambda: run(lambda x: x * (2.0 + chief)),
        "own array": lambda: run(lambda x: x * own),
        "own branch": lambda: run(total if chief else lambda x: x),
        "own argument": lambda: strategy.run(lambda x, n: x * n, (value, 1 + chief)),
        "own prints": lambda: run(printing),
        "own names": lambda: run(total if chief else named),
    }.items():
        try:
            action()
            found[name] = "none"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def different_assignments(strategy):
    """What is said where one process alone gives a value to a variable: in a callback,
    and between two calls of `fit`; nothing, if it has that value.
    """

    class OwnRate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.1
            if kd.process_index() == 1 and epoch == 1:
                self.model.optimizer.learning_rate = 0.5

    with strategy.scope():
        model = linear()
    weights = [np.array(w) for w in model.get_weights()]
    found = {}
    for name, callbacks in (("own rate", [OwnRate()]), ("own weights", [])):
        model.fit(X, Y, verbose=0)
        if kd.is_chief():
            model.set_weights(weights if name == "own weights" else model.get_weights())
        try:
            model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
        except kd.errors.VariableScopeError as error:
            found[name] = f"{type(error).__name__}: {error}"
        model.optimizer.learning_rate = 0.1
    return found | assignments_between_steps(strategy)


def assignments_between_steps(strategy):
    """The same, where no `fit` begins: what is said, and before which step."""
    with strategy.scope():
        model = linear()
        total = keras.Variable(0.0, name="total")
    found = {}

    def add():
        total.assign_add(1.0)

    for name, step, assign in (
        (
            "own rate between",
            lambda: model.train_on_batch(X[:8], Y[:8]),
            lambda: setattr(model.optimizer, "learning_rate", 0.7),
        ),
        ("own value between", lambda: strategy.run(add), lambda: total.assign(7.0)),
    ):
        for i in range(9):
            if i == 5 and kd.is_chief():
                assign()
            try:
                step()
            except kd.errors.VariableScopeError as error:
                found[name] = f"{i} {type(error).__name__}: {error}"
                break
    return found


class OwnFunction(keras.Sequential):
    """A model that makes itself what Keras calls for each batch."""

    def make_train_function(self, force=False):
        self.train_function = lambda state, batches: (next(batches), state)


def fit_by_own_function(strategy):
    with strategy.scope():
        model = OwnFunction([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(X, Y, verbose=0)


def different_seeds(seed):
    """Seeds that differ, or are missing: what each process draws afterwards."""
    without_tensorflow()
    if seed is not None:
        keras.utils.set_random_seed(
            seed + int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
        )
    kd.MultiWorkerMirroredStrategy()
    return np.random.rand(2).tolist(), float(keras.random.normal(()))


def runtime_of_ones_own(seed):
    """The program starts JAX's runtime itself, and names no cluster: who takes part,
    and what each draws.
    """
    without_tensorflow()
    names = [
        f"KERAS_DISTRIBUTION_{name}"
        for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
    ]
    address, count, index = (os.environ.pop(name) for name in names)
    keras.utils.set_random_seed(seed + int(index))
    jax.distributed.initialize(
        address, int(count), int(index), cluster_detection_method="deactivate"
    )
    strategies = [kd.MultiWorkerMirroredStrategy() for _ in range(2)]
    resolver = strategies[0].cluster_resolver
    assert resolver.topology() == kd.cluster_resolver.Topology(
        int(index), int(count), address
    )
    with strategies[1].scope():
        model = linear()
    model.fit(X, Y, batch_size=16, verbose=0)
    return (
        strategies[1].num_replicas_in_sync,
        type(resolver).__name__,
        np.random.rand(2).tolist(),
        weights_of(model),
    )


def different_devices():
    """One device in process 0, two in process 1: what each is told."""
    kd.config.set_cpu_devices(1 + int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]))
    try:
        kd.MultiWorkerMirroredStrategy()
    except ValueError as error:
        return str(error)
    return "none"


def several(calls):
    """Several of these in one job, which starts once: by name what each returned."""
    return {name: globals()[name](*arguments) for name, arguments in calls.items()}


def checkpoint(folder, what):
    """Trains with a checkpoint in the middle, or goes on from one: the weights, and
    what each process saw.
    """
    without_tensorflow()
    strategy = kd.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    manager = kd.CheckpointManager(
        kd.Checkpoint(model=model), f"{folder}/manager", max_to_keep=2
    )
    if what == "save":
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
        single = kd.Checkpoint(model=model).save(f"{folder}/single")
        for step in range(3):
            manager.save(step)
        manager.wait()
        before = weights_of(model)
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
        after = weights_of(model)
        return before, after, manager.all_steps(), single
    assert manager.restore_or_initialize() is not None
    before = weights_of(model)
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return before, weights_of(model), manager.all_steps(), None


def save_under_way(folder):
    """Steps and errors as each process sees them, while process 0 is still writing."""
    from keras_distribute.checkpoint import manifest

    def to_bytes(*args):
        time.sleep(0.5)
        if failing:
            raise OSError(28, "No space left on device")
        return original(*args)

    def told(function):
        try:
            return function()
        except kd.errors.CheckpointError as error:
            return str(error).split("\n")[0]

    failing, original, manifest.to_bytes = [], manifest.to_bytes, to_bytes
    with kd.MultiWorkerMirroredStrategy().scope():
        variable = keras.Variable(1.0)
    checkpoint = kd.Checkpoint(v=variable)
    manager = kd.CheckpointManager(checkpoint, folder, max_to_keep=1)
    steps = lambda: (manager.all_steps(), manager.latest_checkpoint)  # noqa: E731
    seen = []
    for step in (1, 2):
        variable.assign(float(step))
        manager.save(step)
        seen.append(steps())
        variable.assign(9.0)
        checkpoint.restore(manager.latest_checkpoint)
        seen.append(float(variable.numpy()))
    failing.append(True)
    manager.save(3)
    seen.append(steps())
    reader = kd.Checkpoint(v=variable)
    seen.append(told(lambda: reader.restore(manager.latest_checkpoint)))
    seen.append(steps())
    seen.append(told(lambda: manager.save(4)))
    failing.clear()
    manager.save(4)
    manager.close()  # Each process by itself; process 0 alone waits.
    seen.append(steps())
    seen.append(kd.CheckpointManager(checkpoint, folder).restore().step)
    manifest.to_bytes = original
    return seen


def files(folder):
    """A `fit` with callbacks that write: the files, and what was printed where."""
    strategy = kd.MultiWorkerMirroredStrategy()
    if not kd.is_chief():
        keras.Sequential()  # Models have other names here.
    with strategy.scope():
        model = make_model()
    own = f"{folder}/model.keras"
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            f"{folder}/deep/best.keras", save_best_only=True, monitor="loss"
        ),
        keras.callbacks.ModelCheckpoint(
            f"{folder}/weights/{{epoch}}.weights.h5", save_weights_only=True
        ),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.BackupAndRestore(
            f"{folder}/keras_backup", delete_checkpoint=False
        ),
        kd.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False),
    ]
    model.fit(
        X, Y, batch_size=16, epochs=2, shuffle=False, verbose=2, callbacks=callbacks
    )
    model.save(own)
    exists = os.path.exists(own)
    loaded = keras.models.load_model(own)
    same = np.allclose(
        loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6
    )
    try:
        model.save(f"{folder}/missing/model.keras")
        error = "none"
    except OSError as caught:
        error = type(caught).__name__
    return exists, bool(same), error


def values_of_replicas():
    strategy = kd.MultiWorkerMirroredStrategy()
    return strategy.run(lambda: 1.0 * kd.get_replica_context().replica_id_in_sync_group)

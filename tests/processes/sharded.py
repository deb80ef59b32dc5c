"""What a strategy over several processes does whose slots are divided; runs in each of
them.
"""

import jax
import keras
import numpy as np

import keras_distribute as kd
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.training.steps import packed_state
from keras_distribute.values import reductions
from tests.support import without_tensorflow

RNG = np.random.RandomState(0)
X, Y = RNG.randn(84, 32).astype("float32"), RNG.randint(0, 4, 84)


def built(strategy, make=lambda: keras.optimizers.Adam(1e-3)):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        blocks = [
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(64, activation="tanh"),
        ]
        model = keras.Sequential([keras.Input((32,)), *blocks, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss, metrics=["accuracy"])
    return model


def fitted(model, epochs=2, callbacks=()):
    model.fit(
        X,
        Y,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def numbers(model):
    """The weights and slots, as this process reads them."""
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def share_of_slots(model):
    """Which part of the slots' bytes is on a device of this process."""
    arrays = [v.stored for v in model.optimizer.variables]
    return sum(a.addressable_shards[0].data.nbytes for a in arrays) / sum(
        a.nbytes for a in arrays
    )


def in_a_loop(model):
    strategy = model.optimizer.iterations.distribute_strategy

    def step(x, y):
        def loss_of():
            return model.compute_loss(x, y, model(x, training=True))

        loss, grads = kd.value_and_grad(loss_of, model.trainable_variables)()
        model.optimizer.apply(grads, model.trainable_variables)
        return loss

    for element in strategy.experimental_distribute_dataset(
        kd.ArrayDataset((X[:64], Y[:64]), 16)
    ):
        strategy.run(step, args=element)
    return model


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 8:
            raise KeyboardInterrupt


def resumed(strategy, folder):
    """A `fit` that is interrupted in all processes, and goes on in a new model."""
    backup = {"backup_dir": f"{folder}/backup", "save_freq": 3}
    try:
        fitted(
            built(strategy), callbacks=[kd.callbacks.BackupAndRestore(**backup), Stop()]
        )
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        return fitted(
            built(strategy), callbacks=[kd.callbacks.BackupAndRestore(**backup)]
        )


def num_sums(strategy, *shapes):
    """In how many reductions gradients of these shapes are summed."""
    gradients = [
        jax.ShapeDtypeStruct((strategy.num_replicas_in_sync, *shape), "float32")
        for shape in shapes
    ]
    ops, mesh = strategy.extended.cross_device_ops, strategy.replica_mesh

    def summed(gradients):
        return reductions.sum_gradients(ops, [each[0] for each in gradients], None)

    program = over_replicas(
        mesh, summed, in_specs=(mesh.split.spec,), out_specs=mesh.replicated.spec
    )
    return str(jax.make_jaxpr(program)(gradients)).count("psum")


def of_few_rows(options):
    """The weights of models whose batch is small beside their tables, of which four
    replicas divide the rows and the columns, and beside their kernels.
    """
    return [few_rows(kd.MultiWorkerMirroredStrategy(**options), n) for n in (500, 502)]


def few_rows(strategy, tokens):
    ids = np.random.RandomState(0).randint(0, tokens, (40, 4))
    keras.utils.set_random_seed(3)
    with strategy.scope():
        wide = [keras.layers.Dense(256, "tanh"), keras.layers.Dense(64)]
        table = keras.layers.Embedding(tokens, 64)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), table, *wide])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    y = np.random.RandomState(1).randn(40, 4, 64)
    model.fit(ids, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [v.numpy() for v in model.variables]


def disagreeing(options):
    """Gives divided variables another value in each process, or in one process only,
    and reads them in programs.
    """
    without_tensorflow()
    strategy = kd.MultiWorkerMirroredStrategy(**options)
    with strategy.scope():
        value = np.full((64, 64), jax.process_index(), "float32")
        apart = keras.Variable(value, name="apart")
        alone = keras.Variable(np.zeros((64, 64)), name="alone")
    strategy.run(lambda: alone.value.sum())
    if kd.is_chief():
        alone.assign(np.ones((64, 64)))
    texts = []
    for variable in (apart, alone):
        try:
            strategy.run(lambda variable=variable: variable.value.sum())
            texts.append("nothing was noticed")
        except kd.errors.VariableScopeError as error:
            texts.append(str(error))
    return texts


def alone(folder, options):
    """The errors of what the chief alone cannot do, and a `fit`'s loss after them."""
    without_tensorflow()
    model = fitted(built(kd.MultiWorkerMirroredStrategy(**options)), epochs=1)
    kernel = model.layers[0].kernel
    tried = {
        "weights": model.get_weights,
        "save": lambda: model.save(f"{folder}/alone.keras"),
        "array": lambda: np.array(kernel),
        "computed": lambda: float(keras.ops.sum(kernel)),
        "trained": lambda: model.train_on_batch(X[:8], Y[:8]),
        "nothing": lambda: kd.is_chief() and kernel.shape[0],
    }
    found = {}
    for name, function in tried.items():
        try:
            found[name] = kd.run_on_chief(
                lambda function=function: function() is not None
            )
        except kd.errors.ContextError as error:
            found[name] = str(error)
    return found, fitted(model, epochs=1).history.history["loss"]


def training(folder, options):
    """Trains with divided and with whole slots; saves, loads, and goes on."""
    without_tensorflow()
    whole = kd.MultiWorkerMirroredStrategy()
    strategy = kd.MultiWorkerMirroredStrategy(**options)
    model = built(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    shares = [share_of_slots(model)]
    fitted(model)
    shares.append(share_of_slots(model))
    slot = max(model.optimizer.variables, key=lambda variable: variable.numpy().size)
    model.save(f"{folder}/model.keras")
    path = kd.Checkpoint(model=model).write(f"{folder}/checkpoint")
    other = built(strategy)
    with strategy.scope():
        other.optimizer.build(other.trainable_variables)
    kd.Checkpoint(model=other).read(path)
    loaded = keras.models.load_model(f"{folder}/model.keras")
    with strategy.scope():
        again = keras.models.load_model(f"{folder}/model.keras")
    before = numbers(model)
    slot.assign(np.ones(slot.shape))
    ones = slot.numpy()
    few, packed_state.MANY = packed_state.MANY, 4
    packed = numbers(fitted(built(strategy)))
    packed_state.MANY = few
    return {
        "replicas": strategy.num_replicas_in_sync,
        "shares": shares,
        "shapes": [v.shape for v in slot.values],
        "slot": (slot.shape, repr(slot), float(ones.min()), share_of_slots(model)),
        "divided": before,
        "whole": numbers(fitted(built(whole))),
        "packed": packed,
        "read": (numbers(other), share_of_slots(other)),
        "loaded": numbers(loaded),
        "again": (numbers(again), share_of_slots(again)),
        "resumed": numbers(resumed(strategy, folder)),
        "loops": [numbers(in_a_loop(built(each))) for each in (strategy, whole)],
        "sums": (
            num_sums(whole, *[(100, 100)] * 20),
            num_sums(whole, (100, 100), (2048, 1024), (100, 100)),
        ),
        "processes": jax.process_count(),
    }

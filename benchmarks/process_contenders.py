"""Who takes part in `processes.py`: contenders in jobs of several processes that stay
alive.

What runs on JAX shares the processes of one job, so that neither their memory nor their
connections favour anyone; TensorFlow has a job of its own. The contenders take turns,
so that whatever else the machine does meets all of them. All processes of a job are
told who is to take how many steps; the time of the slowest one counts. Each process has
a device, and its rows of the global batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROWS = 64  # Of each process.
RATE = 1e-4
TITLES = {
    "ours": "keras_distribute, `fit`",
    "by_hand": "`jax.distributed` loop by hand, gradients summed as one buffer",
    "by_hand_each": "`jax.distributed` loop by hand, each gradient summed by itself",
    "tensorflow": "`tf.distribute.MultiWorkerMirroredStrategy`, `run` in a loop",
}
Run = Callable[[int], None]


class Model(NamedTuple):
    """A dense model with relu in between, whose loss is the mean squared error.

    Args:
        title: In words.
        widths: Of the inputs and of each layer.
        steps: Of a long round.
    """

    title: str
    widths: tuple[int, ...]
    steps: int

    @property
    def num_gradients(self) -> int:
        return 2 * (len(self.widths) - 1)


MODELS = {
    "mlp": Model("A dense model 784-256-128-1", (784, 256, 128, 1), 320),
    "small": Model(
        "100 dense layers of 100, gradients of 40 KB", (100,) * 101 + (1,), 80
    ),
}


class Place(NamedTuple):
    """What one process is: of which contender and model, which one, and where the
    others are.
    """

    contender: str
    model: str
    process: int
    addresses: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.addresses)


# In the processes of a contender.
# --------------------------------------------------------------------------------------


def rows_of(place: Place, steps: int, *, own: bool) -> tuple[Any, Any]:
    """Inputs and targets of so many steps: those of all processes, or of this one."""
    import numpy as np

    total = ROWS * place.count
    x = (
        np.random.default_rng(0)
        .normal(size=(total, MODELS[place.model].widths[0]))
        .astype("float32")
    )
    if own:
        x = x[ROWS * place.process : ROWS * (place.process + 1)]
    return np.tile(x, (steps, 1)), np.tile(x[:, :1], (steps, 1))


def keras_model(model: Model) -> Any:
    """The model as Keras has it."""
    import keras

    keras.utils.set_random_seed(0)
    inner = [
        keras.layers.Dense(n, activation="relu", kernel_initializer="he_normal")
        for n in model.widths[1:-1]
    ]
    return keras.Sequential(
        [keras.Input((model.widths[0],)), *inner, keras.layers.Dense(model.widths[-1])]
    )


def ours(place: Place, steps: int) -> Run:
    """`fit` over arrays in memory, which hold the global batches."""
    import keras_distribute as kd

    strategy = kd.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == place.count
    with strategy.scope():
        model = keras_model(MODELS[place.model])
        import keras

        model.compile(keras.optimizers.SGD(RATE), "mse")
    x, y = rows_of(place, steps, own=False)
    batch = ROWS * place.count

    def run(steps: int) -> None:
        model.fit(
            x[: steps * batch],
            y[: steps * batch],
            batch_size=batch,
            shuffle=False,
            verbose=0,
        )

    return run


def by_hand(place: Place, steps: int) -> Run:
    """A `jax.jit` of a `shard_map`, fed with the rows of this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if place.count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if not jax.distributed.is_initialized():
            jax.distributed.initialize(place.addresses[0], place.count, place.process)
    assert jax.device_count() == place.count
    mesh = Mesh(np.asarray(jax.devices()), ("replica",))
    same, split = PartitionSpec(), PartitionSpec("replica")
    replicated, divided = NamedSharding(mesh, same), NamedSharding(mesh, split)
    flat, widths = place.contender == "by_hand", MODELS[place.model].widths
    rng = np.random.default_rng(0)
    shapes = [shape for a, b in itertools.pairwise(widths) for shape in ((a, b), (b,))]
    values = [
        rng.normal(size=s).astype("float32") * (2 / s[0]) ** 0.5 * (len(s) == 2)
        for s in shapes
    ]
    weights = [
        jax.make_array_from_callback(v.shape, replicated, lambda index, v=v: v[index])
        for v in values
    ]

    def step(weights: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = x
            for i in range(0, len(weights) - 2, 2):
                hidden = jax.nn.relu(hidden @ weights[i] + weights[i + 1])
            return jnp.mean((hidden @ weights[-2] + weights[-1] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        if flat:
            whole, back = ravel_pytree(grads)
            grads = back(lax.psum(whole, "replica"))
        else:
            grads = lax.psum(grads, "replica")
        n = lax.axis_size("replica")
        return [
            w - RATE * g / n for w, g in zip(weights, grads, strict=True)
        ], lax.psum(value, "replica") / n

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(same, split, split),
        out_specs=(same, same),
        check_vma=False,
    )
    program = jax.jit(mapped, donate_argnums=0)
    data = rows_of(place, steps, own=True)

    def run(steps: int) -> None:
        nonlocal weights
        value = None
        for i in range(steps):
            own = slice(ROWS * i, ROWS * (i + 1))
            batch = (
                jax.make_array_from_process_local_data(divided, whole[own])
                for whole in data
            )
            weights, value = program(weights, *batch)
        jax.block_until_ready((weights, value))

    return run


def tensorflow(place: Place, steps: int) -> Run:
    """A loop of `run` with Keras's layers and optimizer; each process reads its own
    rows, as TensorFlow advises.

    Not `fit`: that of Keras 3.15 on TensorFlow 2.21 ends with "Attempt to convert a
    value (PerReplica:...) with an unsupported type" under this strategy, when it builds
    the model's loss, whether the dataset is distributed or not.
    """
    if place.count > 1:
        cluster = {"worker": list(place.addresses)}
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": place.process}}
        )
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == place.count
    with strategy.scope():
        model = keras_model(MODELS[place.model])
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    x, y = rows_of(place, steps, own=True)

    def dataset(steps: int) -> Any:
        return strategy.distribute_datasets_from_function(
            lambda _: tf.data.Dataset.from_tensor_slices(
                (x[: steps * ROWS], y[: steps * ROWS])
            ).batch(ROWS)
        )

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                tf.reduce_mean((model(x, training=True) - y) ** 2, -1)
            )
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce(
            "SUM", strategy.run(replica_step, args=(x, y)), axis=None
        )

    def run(steps: int) -> None:
        loss = None
        for element in dataset(steps):
            loss = step(*element)
        float(loss)  # type: ignore[arg-type]

    return run


PREPARE = {
    "ours": ours,
    "by_hand": by_hand,
    "by_hand_each": by_hand,
    "tensorflow": tensorflow,
}


def work(places: Sequence[Place], steps: int) -> None:
    """Has a contender take as many steps as a line says, at most `steps`; answers with
    the seconds.
    """
    runs = {place.contender: PREPARE[place.contender](place, steps) for place in places}
    for line in sys.stdin:
        name, count = line.split()
        start = time.perf_counter()
        runs[name](int(count))
        print("seconds", time.perf_counter() - start, flush=True)


# In the process that measures.
# --------------------------------------------------------------------------------------


class Job:
    """Processes in which contenders take steps on demand.

    Args:
        names: Of the contenders.
        model: Of the model.
        count: How many processes.
        steps: The most steps of a round.
        log: Where they write what they say beside.
    """

    def __init__(
        self, names: Sequence[str], model: str, count: int, steps: int, log: Path
    ) -> None:
        from keras_distribute.cluster.ports import free_ports

        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        root = str(Path(__file__).resolve().parents[1])
        environment = os.environ | {
            "KERAS_BACKEND": "tensorflow" if "tensorflow" in names else "jax",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join(
                [root, os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": addresses[0],
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(count),
        }
        self._names, self._log = tuple(names), log.open("w")
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    ",".join(names),
                    model,
                    str(i),
                    str(steps),
                    *addresses,
                ],
                env=environment | {"KERAS_DISTRIBUTION_PROCESS_ID": str(i)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            for i in range(count)
        ]

    def seconds(self, name: str, steps: int) -> float:
        """How long so many steps of a contender take, in the slowest process."""
        for process in self._processes:
            assert process.stdin is not None
            print(name, steps, file=process.stdin, flush=True)
        return max(map(self._answer, self._processes))

    def _answer(self, process: subprocess.Popen[str]) -> float:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(
            f"{', '.join(self._names)} ended with status {process.wait()}; see "
            f"{self._log.name}."
        )

    def close(self) -> None:
        """Kills the processes: they would end by waiting for each other."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._log.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contenders", help="with commas between them")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("process", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("addresses", nargs="+")
    given = parser.parse_args()
    addresses = tuple(given.addresses)
    work(
        [
            Place(name, given.model, given.process, addresses)
            for name in given.contenders.split(",")
        ],
        given.steps,
    )

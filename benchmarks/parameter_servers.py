"""Steps a second with parameter servers: `kd.ParameterServerStrategy` beside
TensorFlow's, and Keras in one process.

    # Writes results/parameter_servers.md and .json:
    pip install tf_keras && python benchmarks/parameter_servers.py
    # Quicker and rougher:
    python benchmarks/parameter_servers.py --rounds 3

Two workloads: an MLP with one server, and a table of which a step looks up rows with
two. Two workers and the servers are processes of this machine, in TensorFlow's case
others;
who has no turn is idle. CPU time is that of all processes of a contender together. In
each round every contender has a turn, in another order each time; a ratio is the median
of the rounds' own ratios. TensorFlow runs `tf_keras`, since Keras 3 does not run under
its strategy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, COLUMNS, HIDDEN, CLASSES = 64, 784, 128, 10
TABLE, WIDTH, IDS = 200_000, 64, 32
TITLES = {
    "ours_loop": "ours, a loop of `schedule`",
    "ours_fit": "ours, `fit`",
    "ours_fit_ten": "ours, `fit`, ten steps a function",
    "ours_read_ten": "ours, `fit` of a `DatasetCreator`, ten steps a function",
    "tf_loop": "TensorFlow, a loop of `schedule`",
    "tf_loop_ten": "TensorFlow, a loop, ten steps a function",
    "tf_fit": "TensorFlow, `fit`",
    "keras_fit": "Keras, `fit` in one process",
}
Turn = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        text: In words.
        num_ps: How many servers.
        optimizer: Its name.
        steps: Of a turn.
        limits: Ours, the other, and how many times as fast ours has to be.
    """

    text: str
    num_ps: int
    optimizer: str
    steps: int
    limits: tuple[tuple[str, str, float], ...]


WORKS = {
    "mlp": Work(
        f"An MLP {COLUMNS}-{HIDDEN}-{CLASSES}, Adam, batches of {ROWS}; two workers "
        "and one server.",
        1,
        "adam",
        400,
        (
            ("ours_loop", "tf_loop", 3.0),
            ("ours_fit_ten", "tf_loop_ten", 2.0),
            ("ours_read_ten", "tf_loop_ten", 2.0),
            ("ours_fit", "tf_fit", 4.0),
        ),
    ),
    "table": Work(
        f"A table of {TABLE:,} × {WIDTH}, divided, Adagrad, {ROWS * IDS} rows of it a "
        "step; two workers and two servers.",
        2,
        "adagrad",
        100,
        (
            ("ours_loop", "tf_loop", 2.5),
            ("ours_fit_ten", "tf_loop_ten", 2.0),
            ("ours_read_ten", "tf_loop_ten", 2.0),
            ("ours_fit", "keras_fit", 6.0),
        ),
    ),
}


def data(work: Work) -> tuple[Any, Any]:
    """Random examples and labels, a batch for each step of a turn."""
    import numpy as np

    rng = np.random.default_rng(0)
    count = work.steps * ROWS
    labels = rng.integers(0, CLASSES, count).astype("int32")
    if work is WORKS["mlp"]:
        return rng.random((count, COLUMNS), "float32"), labels
    return rng.integers(0, TABLE, (count, IDS)).astype("int32"), labels


class Ours:
    """The contenders on JAX, in this process."""

    def __init__(self, work: Work) -> None:
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        import keras_distribute as kd

        self._cluster = kd.testing.ParameterServerCluster(2, work.num_ps)
        partitioner = kd.experimental.partitioners.MinSizePartitioner(
            max_shards=work.num_ps
        )
        self._strategy = kd.ParameterServerStrategy(
            self._cluster.cluster_resolver, partitioner
        )
        self._coordinator = kd.coordinator.ClusterCoordinator(self._strategy)
        self._data = data(work)
        with self._strategy.scope():
            self._models = {size: _model(keras, work) for size in (1, 10)}
            self._looped = _model(keras, work)
            self._optimizer = keras.optimizers.get(work.optimizer)
            self._optimizer.build(self._looped.trainable_variables)
        self._plain = _model(keras, work)
        for size, model in (*self._models.items(), (1, self._plain)):
            model.compile(work.optimizer, _loss(keras), steps_per_execution=size)
        loss = _loss(keras)
        both = kd.value_and_grad(
            lambda x, y: loss(y, self._looped(x)), self._looped.trainable_variables
        )

        def step(iterator: Any) -> Any:
            value, grads = both(*next(iterator))
            self._optimizer.apply(grads, self._looped.trainable_variables)
            return value

        self._step = step
        x, y = self._data
        rows, ten = ROWS, (x[: 10 * ROWS], y[: 10 * ROWS])

        def batches() -> Any:
            x, y = ten
            while True:
                for i in range(0, len(x), rows):
                    yield x[i : i + rows], y[i : i + rows]

        self._iterator = iter(self._coordinator.create_per_worker_dataset(batches))
        # TensorFlow's contenders read on the workers, too.
        self._read = kd.experimental.DatasetCreator(lambda context: batches())

    def pids(self) -> list[int]:
        """Of all processes."""
        tasks = self._cluster._tasks.values()
        return [os.getpid(), *(task.workers[0].process.pid for task in tasks)]

    def turns(self) -> dict[str, Turn]:
        """What runs a number of steps."""
        x, y = self._data

        def loop(steps: int) -> None:
            for _ in range(steps):
                self._coordinator.schedule(self._step, args=(self._iterator,))
            self._coordinator.join()

        def fit(model: Any) -> Turn:
            return lambda steps: model.fit(
                x[: steps * ROWS], y[: steps * ROWS], ROWS, verbose=0, shuffle=False
            )

        def read(steps: int) -> None:
            self._models[10].fit(self._read, steps_per_epoch=steps, verbose=0)

        return {
            "ours_loop": loop,
            "ours_fit": fit(self._models[1]),
            "ours_fit_ten": fit(self._models[10]),
            "ours_read_ten": read,
            "keras_fit": fit(self._plain),
        }

    def close(self) -> None:
        """Ends the processes."""
        self._strategy.close()
        self._cluster.close()


def _model(keras: Any, work: Work) -> Any:
    if work is WORKS["table"]:
        return keras.Sequential(
            [
                keras.Input((IDS,), dtype="int32"),
                keras.layers.Embedding(TABLE, WIDTH),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(CLASSES),
            ]
        )
    return keras.Sequential(
        [
            keras.Input((COLUMNS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def _loss(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tensorflow(work: Work) -> None:
    """The chief of TensorFlow's cluster: reads names and numbers of steps."""
    import tensorflow as tf
    import tf_keras

    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        max_shards=work.num_ps
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    x, y = data(work)
    with strategy.scope():
        looped = _model(tf_keras, work)
        optimizer = tf_keras.optimizers.get(work.optimizer)
        optimizer.build(looped.trainable_variables)
        fitted = _model(tf_keras, work)
        fitted.compile(work.optimizer, _loss(tf_keras))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits

    def batches() -> Any:
        ten = x[: 10 * ROWS], y[: 10 * ROWS]
        dataset = tf.data.Dataset.from_tensor_slices(ten).repeat()
        return dataset.batch(ROWS, drop_remainder=True).prefetch(2)

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def one(iterator: Any) -> Any:
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(labels, looped(images)))
        grads = tape.gradient(value, looped.trainable_variables)
        optimizer.apply_gradients(zip(grads, looped.trainable_variables, strict=True))
        return value

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(one, (iterator,))

    @tf.function
    def ten(iterator: Any) -> Any:
        for _ in tf.range(10):
            strategy.run(one, (iterator,))

    creator = tf_keras.utils.experimental.DatasetCreator(lambda context: batches())
    turns: dict[str, Turn] = {
        "tf_loop": lambda steps: _scheduled(coordinator, step, iterator, steps),
        "tf_loop_ten": lambda n: _scheduled(coordinator, ten, iterator, n // 10),
        "tf_fit": lambda steps: fitted.fit(creator, steps_per_epoch=steps, verbose=0),
    }
    assert cluster
    print("ready", flush=True)
    for line in sys.stdin:
        name, steps = line.split()
        start = time.perf_counter()
        turns[name](int(steps))
        print(f"seconds {time.perf_counter() - start}", flush=True)


def _scheduled(coordinator: Any, step: Any, iterator: Any, count: int) -> None:
    for _ in range(count):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()


def task() -> None:
    """A worker or a server of TensorFlow's cluster."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()


class Theirs:
    """TensorFlow's contenders, in processes of their own."""

    def __init__(self, work: str) -> None:
        from keras_distribute.launch.roles import addresses

        cluster = addresses(2, WORKS[work].num_ps, with_chief=True)
        self._processes: list[subprocess.Popen[str]] = []
        for job, index, what in (
            ("worker", 0, "--task"),
            ("worker", 1, "--task"),
            *(("ps", i, "--task") for i in range(WORKS[work].num_ps)),
            ("chief", 0, "--tensorflow"),
        ):
            config = {"cluster": cluster, "task": {"type": job, "index": index}}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, what, "--work", work],
                    env={
                        **os.environ,
                        "TF_CONFIG": json.dumps(config),
                        "TF_CPP_MIN_LOG_LEVEL": "3",
                        "KERAS_BACKEND": "tensorflow",
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        self._answer("ready")

    def _answer(self, word: str) -> list[str]:
        chief = self._processes[-1].stdout
        assert chief is not None
        for line in chief:
            if line.startswith(word):
                return line.split()
        raise RuntimeError("TensorFlow's chief has ended.")

    def pids(self) -> list[int]:
        """Of all processes."""
        return [process.pid for process in self._processes]

    def turns(self) -> dict[str, Turn]:
        """What runs a number of steps."""

        def turn(name: str) -> Turn:
            def run(steps: int) -> None:
                chief = self._processes[-1].stdin
                assert chief is not None
                chief.write(f"{name} {steps}\n")
                chief.flush()
                self._answer("seconds")

            return run

        return {name: turn(name) for name in ("tf_loop", "tf_loop_ten", "tf_fit")}

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def cpu_seconds(pids: list[int]) -> float:
    """Of all threads of some processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", choices=WORKS, help="only this one; writes nothing")
    parser.add_argument("--dry", action="store_true", help="writes nothing")
    parser.add_argument("--tensorflow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tensorflow:
        tensorflow(WORKS[given.work])
    elif given.task:
        task()
    else:
        names = [given.work] if given.work else list(WORKS)
        texts, found = [], {}
        for name in names:
            rates, costs = compare(name, given.rounds)
            found[name] = {"steps": rates, "cpu": costs}
            texts.append(_markdown(WORKS[name], rates, costs, given.rounds))
        text = "\n".join(texts)
        if given.dry or given.work:
            print(text)
        else:
            import report

            report.write("parameter_servers", found, text)


def compare(
    name_of_work: str, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Steps a second and CPU time, ms a step, of all contenders in each round."""
    work = WORKS[name_of_work]
    ours, theirs = Ours(work), Theirs(name_of_work)
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    try:
        contenders = [
            (name, turn, side.pids())
            for side in (ours, theirs)
            for name, turn in side.turns().items()
        ]
        for name, turn, _ in contenders:  # Compiles.
            turn(40)
            rates[name], costs[name] = [], []
        for number in range(rounds):
            random.Random(number).shuffle(contenders)
            for name, turn, pids in contenders:
                own = pids[:1] if name == "keras_fit" else pids
                before, start = cpu_seconds(own), time.perf_counter()
                turn(work.steps)
                rates[name].append(work.steps / (time.perf_counter() - start))
                costs[name].append(1000 * (cpu_seconds(own) - before) / work.steps)
    finally:
        ours.close()
        theirs.close()
    return rates, costs


def _markdown(
    work: Work,
    rates: dict[str, list[float]],
    costs: dict[str, list[float]],
    rounds: int,
) -> str:
    lines = [
        f"{work.text} Medians of {rounds} rounds of {work.steps} steps "
        "(slowest–fastest); CPU time is of all processes together.",
        "",
        "| | steps a second | CPU, ms a step |",
        "| --- | --- | --- |",
    ]
    for name, title in TITLES.items():
        rate = rates[name]
        lines.append(
            f"| {title} | {statistics.median(rate):.0f} "
            f"({min(rate):.0f}–{max(rate):.0f}) | "
            f"{statistics.median(costs[name]):.1f} |"
        )
    lines += [
        "",
        "| | times as fast | wanted | CPU time |",
        "| --- | --- | --- | --- |",
    ]
    for one, other, limit in work.limits:
        pairs = zip(rates[one], rates[other], strict=True)
        cpu = zip(costs[one], costs[other], strict=True)
        lines.append(
            f"| {TITLES[one]}, to {TITLES[other]} | "
            f"{statistics.median(a / b for a, b in pairs):.2f} | {limit} | "
            f"{statistics.median(a / b for a, b in cpu):.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

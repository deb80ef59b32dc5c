"""Steps a second with parameter servers: `kd.ParameterServerStrategy` beside
TensorFlow's, and Keras in one process.

    # Writes results/parameter_servers.md and .json:
    pip install tf_keras && python benchmarks/parameter_servers.py
    # Quicker and rougher:
    python benchmarks/parameter_servers.py --rounds 3

Two workers and one server are processes of this machine, in TensorFlow's case others;
who has no turn is idle. CPU time is that of all processes of a contender together. In
each round every contender has a turn, in another order each time; a ratio is the median
of the rounds' own ratios. TensorFlow runs `tf_keras`, since Keras 3 does not run under
its strategy.
"""

from __future__ import annotations

import argparse
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
STEPS = 400
TITLES = {
    "ours_loop": "ours, a loop of `schedule`",
    "ours_fit": "ours, `fit`",
    "ours_fit_ten": "ours, `fit`, ten steps a function",
    "tf_loop": "TensorFlow, a loop of `schedule`",
    "tf_loop_ten": "TensorFlow, a loop, ten steps a function",
    "tf_fit": "TensorFlow, `fit`",
    "keras_fit": "Keras, `fit` in one process",
}
# Ours, the other, and how many times as fast ours has to be.
LIMITS = (
    ("ours_loop", "tf_loop", 3.0),
    ("ours_fit_ten", "tf_loop_ten", 2.0),
    ("ours_fit", "tf_fit", 4.0),
)
Turn = Callable[[int], None]


def data() -> tuple[Any, Any]:
    """Random images and labels, a batch for each step of a turn."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.random((STEPS * ROWS, COLUMNS), "float32")
    return x, rng.integers(0, CLASSES, len(x)).astype("int32")


class Ours:
    """The contenders on JAX, in this process."""

    def __init__(self) -> None:
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        import keras_distribute as kd

        self._cluster = kd.testing.ParameterServerCluster(num_workers=2, num_ps=1)
        self._strategy = kd.ParameterServerStrategy(self._cluster.cluster_resolver)
        self._coordinator = kd.coordinator.ClusterCoordinator(self._strategy)
        self._data = data()
        with self._strategy.scope():
            self._models = {size: _model(keras) for size in (1, 10)}
            self._looped = _model(keras)
            self._optimizer = keras.optimizers.Adam()
            self._optimizer.build(self._looped.trainable_variables)
        self._plain = _model(keras)
        for size, model in (*self._models.items(), (1, self._plain)):
            model.compile("adam", _loss(keras), steps_per_execution=size)
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

        return {
            "ours_loop": loop,
            "ours_fit": fit(self._models[1]),
            "ours_fit_ten": fit(self._models[10]),
            "keras_fit": fit(self._plain),
        }

    def close(self) -> None:
        """Ends the processes."""
        self._strategy.close()
        self._cluster.close()


def _model(keras: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((COLUMNS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def _loss(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tensorflow() -> None:
    """The chief of TensorFlow's cluster: reads names and numbers of steps."""
    import tensorflow as tf
    import tf_keras

    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    x, y = data()
    with strategy.scope():
        looped, optimizer = _model(tf_keras), tf_keras.optimizers.Adam()
        optimizer.build(looped.trainable_variables)
        fitted = _model(tf_keras)
        fitted.compile("adam", _loss(tf_keras))
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

    def __init__(self) -> None:
        from keras_distribute.launch.job import free_port

        def address() -> str:
            return f"127.0.0.1:{free_port()}"

        cluster = {
            "chief": [address()],
            "worker": [address(), address()],
            "ps": [address()],
        }
        self._processes: list[subprocess.Popen[str]] = []
        for job, index, what in (
            ("worker", 0, "--task"),
            ("worker", 1, "--task"),
            ("ps", 0, "--task"),
            ("chief", 0, "--tensorflow"),
        ):
            config = {"cluster": cluster, "task": {"type": job, "index": index}}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, what],
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
    parser.add_argument("--dry", action="store_true", help="writes nothing")
    parser.add_argument("--tensorflow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tensorflow:
        tensorflow()
    elif given.task:
        task()
    else:
        compare(given.rounds, given.dry)


def compare(rounds: int, dry: bool) -> None:
    """Measures all contenders, and writes or prints the results."""
    import report

    ours, theirs = Ours(), Theirs()
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
                turn(STEPS)
                rates[name].append(STEPS / (time.perf_counter() - start))
                costs[name].append(1000 * (cpu_seconds(own) - before) / STEPS)
    finally:
        ours.close()
        theirs.close()
    text = _markdown(rates, costs, rounds)
    if dry:
        print(text)
    else:
        report.write("parameter_servers", {"steps": rates, "cpu": costs}, text)


def _markdown(
    rates: dict[str, list[float]], costs: dict[str, list[float]], rounds: int
) -> str:
    lines = [
        f"An MLP {COLUMNS}-{HIDDEN}-{CLASSES}, Adam, batches of {ROWS}; two workers "
        f"and one server. Medians of {rounds} rounds of {STEPS} steps "
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
    for one, other, limit in LIMITS:
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

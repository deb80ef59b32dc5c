"""What local steps save: `kd.ParameterServerStrategy(local_steps=20)`, also with
`local_slots=True` and data that workers read themselves, beside the same without, on
the digits of scikit-learn.

    # Writes results/local_steps.md and .json:
    python benchmarks/local_steps.py
    # Quicker and rougher:
    python benchmarks/local_steps.py --rounds 3 --dry

Four workers and two servers are processes of this machine; who has no turn is idle. In
each round all contenders have a turn of the same epochs, in another order each time; a
ratio is the median of the rounds' own ratios. Bytes are those of arrays: through the
servers (weights that workers pull, gradients and updates that they push), and between
the coordinator and the workers (batches, and what the groups of local steps know).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

ROWS, BATCH, LOCAL_STEPS, WORKERS, SERVERS, EPOCHS = 1280, 16, 20, 4, 2, 6
STEPS = ROWS // BATCH * EPOCHS
ROUNDS = f"local_steps={LOCAL_STEPS}"
SLOTS = f"{ROUNDS}, local_slots=True"
READING = f"{SLOTS}, a DatasetCreator"
OPTIONS: dict[str, dict[str, Any]] = {
    "a push each step": {},
    ROUNDS: {"local_steps": LOCAL_STEPS},
    SLOTS: {"local_steps": LOCAL_STEPS, "local_slots": True},
    READING: {"local_steps": LOCAL_STEPS, "local_slots": True},
}
PARTS = {
    "servers": "through the servers",
    "batches": "batches to the workers",
    "groups": "all else to and from the workers",
}


class Contender:
    """One model under a strategy of its own.

    Args:
        kd: The package.
        resolver: Of the cluster.
        train: Examples and labels.
        options: Of the strategy.
        reads: Whether each worker reads its part of them by itself.
    """

    def __init__(
        self, kd: Any, resolver: Any, train: Any, options: Any, reads: bool
    ) -> None:
        import keras

        self._data: dict[str, Any] = {"x": train[0], "y": train[1], "batch_size": BATCH}
        self._bytes = 0 if reads else train[0].nbytes + train[1].nbytes
        if reads:
            creator = kd.experimental.DatasetCreator(reading(*train))
            self._data = {"x": creator, "steps_per_epoch": ROWS // BATCH}
        self._strategy = kd.ParameterServerStrategy(resolver, **options)
        keras.utils.set_random_seed(5)
        with self._strategy.scope():
            self._model = keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(128, activation="relu"),
                    keras.layers.Dense(10),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])

    def turn(self, epochs: int) -> tuple[float, dict[str, int]]:
        """Seconds, and the bytes of each part."""
        strategy = self._strategy
        servers, workers = strategy.bytes_of_servers, strategy.bytes_of_workers
        start = time.perf_counter()
        self._model.fit(**self._data, epochs=epochs, verbose=0)
        seconds = time.perf_counter() - start
        batches = self._bytes * epochs
        found = {
            "servers": strategy.bytes_of_servers - servers,
            "batches": batches,
            "groups": strategy.bytes_of_workers - workers - batches,
        }
        return seconds, found

    def accuracy(self, test: Any) -> float:
        """On examples that it was not trained on."""
        return self._model.evaluate(*test, verbose=0)[1]

    def close(self) -> None:
        """Lets go of the cluster."""
        self._strategy.close()


def reading(x: Any, y: Any) -> Any:
    """What makes the dataset of a worker: its part, in another order each time."""

    def dataset_fn(context: Any) -> Any:
        import numpy as np

        worker = context.input_pipeline_id
        own = np.arange(worker, len(x), context.num_input_pipelines)
        generator = np.random.default_rng(worker)
        while True:
            order = generator.permutation(own)
            for i in range(0, len(order), BATCH):
                rows = order[i : i + BATCH]
                yield x[rows], y[rows]

    return dataset_fn


def digits() -> tuple[Any, Any]:
    """Examples and labels, to train and to test."""
    import numpy as np
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order].astype("int32")
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])


def compare(rounds: int) -> dict[str, Any]:
    """Steps a second in each round, bytes a step by parts, and accuracies."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras_distribute as kd

    train, test = digits()
    rates: dict[str, list[float]] = {name: [] for name in OPTIONS}
    used: dict[str, dict[str, float]] = {}
    accuracies: dict[str, float] = {}
    clusters = {
        name: kd.testing.ParameterServerCluster(WORKERS, SERVERS) for name in OPTIONS
    }
    contenders = {
        name: Contender(
            kd, clusters[name].cluster_resolver, train, options, name == READING
        )
        for name, options in OPTIONS.items()
    }
    try:
        for contender in contenders.values():  # Compiles, and sends the weights.
            contender.turn(1)
        for number in range(rounds):
            names = list(OPTIONS)
            random.Random(number).shuffle(names)
            for name in names:
                seconds, found = contenders[name].turn(EPOCHS)
                rates[name].append(STEPS / seconds)
                used[name] = {part: n / STEPS for part, n in found.items()}
                if not number:
                    accuracies[name] = contenders[name].accuracy(test)
    finally:
        for name in OPTIONS:
            contenders[name].close()
            clusters[name].close()
    return {"steps": rates, "bytes": used, "accuracy": accuracies}


def markdown(found: dict[str, Any], rounds: int) -> str:
    """The tables."""
    rates, used = found["steps"], found["bytes"]
    lines = [
        f"Local steps: an MLP 64-128-10, Adam, batches of {BATCH}, the digits of "
        f"scikit-learn; {WORKERS} workers and {SERVERS} servers. Medians of {rounds} "
        f"rounds of {STEPS} steps (slowest–fastest); accuracy after the first, "
        f"{EPOCHS + 1} epochs.",
        "",
        "| | steps a second | times as fast | accuracy |",
        "| --- | --- | --- | --- |",
    ]
    first = next(iter(OPTIONS))
    for name in OPTIONS:
        rate = rates[name]
        pairs = zip(rate, rates[first], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        lines.append(
            f"| {name} | {statistics.median(rate):.0f} "
            f"({min(rate):.0f}–{max(rate):.0f}) | {ratio:.2f} | "
            f"{found['accuracy'][name]:.3f} |"
        )
    lines += [
        "",
        f"| kB a batch | {' | '.join(OPTIONS)} |",
        f"| --- |{' --- |' * len(OPTIONS)}",
    ]
    wholes = [sum(used[name].values()) for name in OPTIONS]
    rows = [(text, [used[n][part] for n in OPTIONS]) for part, text in PARTS.items()]
    rows.append(("all", wholes))
    left = [
        whole - used[n]["batches"] for n, whole in zip(OPTIONS, wholes, strict=True)
    ]
    rows.append(("all but the batches", left))
    for text, (single, *others) in rows:
        cells = [f"{single / 1e3:.2f}"]
        for other in others:
            share = f" (1/{single / other:.1f})" if 0 < other < single else ""
            cells.append(f"{other / 1e3:.2f}{share}")
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="writes nothing")
    given = parser.parse_args()
    found = compare(given.rounds)
    text = markdown(found, given.rounds)
    if given.dry:
        print(text)
    else:
        import report

        report.write("local_steps", found, text)


if __name__ == "__main__":
    main()

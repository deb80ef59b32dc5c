"""What local steps save: `kd.ParameterServerStrategy(local_steps=20)` beside the same
without, on the digits of scikit-learn.

    # Writes results/local_steps.md and .json:
    python benchmarks/local_steps.py
    # Quicker and rougher:
    python benchmarks/local_steps.py --rounds 3 --dry

Four workers and two servers are processes of this machine; who has no turn is idle. In
each round both contenders have a turn of the same epochs, in another order each time; a
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
NAMES = ("single", "local")
TITLES = {
    "single": "a push each step",
    "local": f"local_steps={LOCAL_STEPS}",
}
PARTS = {
    "servers": "through the servers",
    "batches": "batches to the workers",
    "groups": "all else to and from the workers",
}


def counted(channels: Any) -> Any:
    """Makes the coordinator's channels to workers count the bytes of arrays; returns
    the count.
    """
    from keras_distribute.scheduling import workers

    class Counting(channels.Channel):
        def send(self, header: Any, arrays: Any = ()) -> int:
            count["bytes"] += sum(map(_size, arrays)) * (header["op"] == "run")
            return super().send(header, arrays)

        def receive(self, *args: Any, **kwargs: Any) -> Any:
            reply = super().receive(*args, **kwargs)
            count["bytes"] += 0 if reply is None else sum(map(_size, reply[2]))
            return reply

    count = {"bytes": 0}
    workers.Channel = Counting
    return count


def _size(array: Any) -> int:
    import numpy as np

    return np.asarray(array).nbytes


class Contender:
    """One model under a strategy of its own.

    Args:
        kd: The package.
        resolver: Of the cluster.
        train: Examples and labels.
        options: Of the strategy.
    """

    def __init__(self, kd: Any, resolver: Any, train: Any, options: Any) -> None:
        import keras

        self._train = train
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

    def turn(self, epochs: int, count: Any) -> tuple[float, dict[str, int]]:
        """Seconds, and the bytes of each part."""
        servers, here = self._strategy.bytes_of_servers, count["bytes"]
        start = time.perf_counter()
        self._model.fit(*self._train, BATCH, epochs=epochs, verbose=0)
        seconds = time.perf_counter() - start
        x, y = self._train
        batches = (x.nbytes + y.nbytes) * epochs
        found = {
            "servers": self._strategy.bytes_of_servers - servers,
            "batches": batches,
            "groups": count["bytes"] - here - batches,
        }
        return seconds, found

    def accuracy(self, test: Any) -> float:
        """On examples that it was not trained on."""
        return self._model.evaluate(*test, verbose=0)[1]

    def close(self) -> None:
        """Lets go of the cluster."""
        self._strategy.close()


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
    from keras_distribute.remote import channel

    count, (train, test) = counted(channel), digits()
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    used: dict[str, dict[str, float]] = {}
    accuracies: dict[str, float] = {}
    options = {"single": {}, "local": {"local_steps": LOCAL_STEPS}}
    clusters = {
        name: kd.testing.ParameterServerCluster(WORKERS, SERVERS) for name in NAMES
    }
    contenders = {
        name: Contender(kd, clusters[name].cluster_resolver, train, options[name])
        for name in NAMES
    }
    try:
        for contender in contenders.values():  # Compiles, and sends the weights.
            contender.turn(1, count)
        for number in range(rounds):
            names = list(NAMES)
            random.Random(number).shuffle(names)
            for name in names:
                seconds, found = contenders[name].turn(EPOCHS, count)
                rates[name].append(STEPS / seconds)
                used[name] = {part: n / STEPS for part, n in found.items()}
                if not number:
                    accuracies[name] = contenders[name].accuracy(test)
    finally:
        for name in NAMES:
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
        "| | steps a second | accuracy |",
        "| --- | --- | --- |",
    ]
    for name in NAMES:
        rate = rates[name]
        lines.append(
            f"| {TITLES[name]} | {statistics.median(rate):.0f} "
            f"({min(rate):.0f}–{max(rate):.0f}) | {found['accuracy'][name]:.3f} |"
        )
    pairs = zip(rates["local"], rates["single"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    lines += [
        f"| {TITLES['local']}, times as fast | {ratio:.2f} | |",
        "",
        f"| kB a batch | {' | '.join(TITLES[n] for n in NAMES)} | a part of |",
        "| --- | --- | --- | --- |",
    ]
    rows = [(text, [used[n][part] for n in NAMES]) for part, text in PARTS.items()]
    rows.append(("all", [sum(used[n].values()) for n in NAMES]))
    rows.append(
        (
            "all but the batches",
            [sum(used[n].values()) - used[n]["batches"] for n in NAMES],
        )
    )
    for text, (single, local) in rows:
        share = f"1/{single / local:.1f}" if single > local else ""
        lines.append(f"| {text} | {single / 1e3:.2f} | {local / 1e3:.2f} | {share} |")
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

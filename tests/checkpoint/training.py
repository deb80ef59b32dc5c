"""A training script as a user would write it, to be killed, preempted and started
again.

    python -m tests.checkpoint.training FOLDER [--whole] [--gated] [--grace SECONDS] [--pause SECONDS] KIND...

For each kind it trains in `fit` or in a loop of its own, prints a line for each step,
and writes what came out to `FOLDER/KIND.pickle`. With `--whole` it saves no checkpoints
on the way: the reference. With `--gated` it does as many steps as a line on its input
says, and waits for the next one.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import keras_distribute as kd

kd.config.set_cpu_devices(8)
import keras

from tests.support import without_tensorflow

from . import interrupting, support
from .support import data

EPOCHS, BATCH = 8, 8
STEPS = EPOCHS * 6


@dataclasses.dataclass
class Pace:
    """What happens after each step: a line, a pause, and the wait for leave to go on."""

    pause: float
    gated: bool
    allowed: int = 0

    def step(self, *where: int) -> None:
        """A step is done."""
        print("step", *where, flush=True)
        time.sleep(self.pause)
        if self.gated and not self.allowed:
            self.allowed = int(sys.stdin.readline())
        self.allowed -= 1


class Say(keras.callbacks.Callback):
    """Tells of each step of a `fit`."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace, self._epoch = pace, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._pace.step(self._epoch, batch)


# Kinds of `fit`.
# -----------------------------------------------------------------------------------------------------


def arrays(model: Any, **options: Any) -> Any:
    """Shuffled anew each epoch by NumPy's stream, the last batch of 4 rows."""
    x, y = data(44)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1)
    options["callbacks"] = [plateau, *options["callbacks"]]
    return model.fit(
        x, y, batch_size=BATCH, validation_data=(x[:16], y[:16]), **options
    )


def tf_data(model: Any, **options: Any) -> Any:
    """Another order in each epoch."""
    import tensorflow as tf

    return model.fit(
        tf.data.Dataset.from_tensor_slices(data(44)).shuffle(44, seed=5).batch(BATCH),
        **options,
    )


def grain(model: Any, **options: Any) -> Any:
    import grain

    x, y = data(44)
    source = (
        grain.MapDataset.source(range(44))
        .seed(1)
        .shuffle()
        .map(lambda i: (x[i], y[i]))
        .batch(BATCH)
    )
    return model.fit(source, **options)


FITS: dict[str, tuple[Callable[..., Any], str, int]] = {
    "arrays": (arrays, "adam", 1),
    "tf.data": (tf_data, "loss_scale_ema", 1),
    "Grain": (grain, "accumulating", 1),
    "arrays, four steps an execution": (arrays, "adam", 4),
}


KINDS = [*FITS, "loop"]


def fit(
    kind: str, folder: pathlib.Path | None, pace: Pace, config: Any
) -> dict[str, Any]:
    """Trains on two replicas with `BackupAndRestore`; the weights, the history, and all
    that a callback saw.
    """
    train, optimizer, group = FITS[kind]
    options = {"epochs": EPOCHS, "verbose": 0}
    return interrupting.run(
        2,
        lambda model, callbacks: train(
            model, callbacks=[*callbacks, Say(pace)], **options
        ),
        folder,
        make=lambda: interrupting.build(optimizer, group),
        backup={"save_freq": 2, "termination_config": config},
    )


# A loop of one's own.
# ------------------------------------------------------------------------------------------------


class Batches:
    """Epochs of a distributed dataset, as one object that a checkpoint can keep."""

    def __init__(self, dataset: kd.DistributedDataset) -> None:
        self._dataset, self._iterator = dataset, iter(dataset)

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._dataset)
            return next(self._iterator)

    def get_state(self) -> Any:
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        self._iterator.set_state(state)


def loop(folder: pathlib.Path | None, pace: Pace, config: Any) -> dict[str, Any]:
    """Trains with `Strategy.run` and a `PreemptionCheckpointHandler`; the weights, and
    the loss of every step.
    """
    own = support.Loop(2)
    batches = Batches(
        own.strategy.experimental_distribute_dataset(
            kd.ArrayDataset(data(44), BATCH, True, 4)
        )
    )
    own.progress["losses"] = []

    def train_step() -> None:
        losses = own.strategy.run(own.step, args=next(batches))
        own.progress["losses"].append(
            float(own.strategy.reduce("SUM", losses, axis=None))
        )
        own.progress["step"] += 1
        pace.step(own.progress["step"])

    run, save = (lambda function: function()), (lambda: None)
    if folder is not None:
        manager = kd.CheckpointManager(
            kd.Checkpoint(**own.objects, batches=batches),
            folder,
            2,
            save_interval_steps=2,
        )
        handler = kd.experimental.PreemptionCheckpointHandler(
            None, manager, termination_config=config
        )
        run, save = handler.run, lambda: manager.save(own.progress["step"])
    while own.progress["step"] < STEPS:
        run(train_step)
        save()
    del own.model.optimizer  # Not in use; saving gives it variables.
    return {"bits": support.bits(**own.objects), "losses": own.progress["losses"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--grace", type=float)
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    if "tf.data" not in arguments.kinds:
        without_tensorflow()
    config = (
        None
        if arguments.grace is None
        else kd.experimental.TerminationConfig(grace_period=arguments.grace)
    )
    pace = Pace(arguments.pause, arguments.gated)
    for kind in arguments.kinds:
        print("begun", kind, flush=True)
        folder = None if arguments.whole else arguments.folder / "checkpoints"
        if kind == "loop":
            result = loop(folder, pace, config)
        else:
            result = fit(kind, folder, pace, config)
        (arguments.folder / f"{kind}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()

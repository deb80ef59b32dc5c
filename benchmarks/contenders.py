"""Who takes part: each contender is a process that stays alive, and runs a round when
it is told to.

Contenders are measured in turn, round after round, so that whatever else the machine
does meets all of them. A round is one call of `fit`, `evaluate` or `predict` over
arrays in memory, or the same number of steps of a loop; of the kind "call", one call of
`fit` over a single batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peers
from workloads import WORKLOADS, Workload

FUSED = 10
THREADS_PER_DEVICE = 4  # Of XLA's pool, as keras_distribute has it.
TITLES = {
    "plain": "Keras `fit`, one device",
    "plain_fused": f"Keras `fit`, one device, steps_per_execution={FUSED}",
    "data_parallel": "`keras.distribution.DataParallel`",
    "tf_one": "Keras on TensorFlow, one device",
    "tf_mirrored": "`tf.distribute.MirroredStrategy`",
    "by_hand": "`shard_map` loop by hand",
    "by_hand_again": "`shard_map` loop by hand, in another process",
    "by_hand_flat": "`shard_map` loop by hand, flat state",
    "by_hand_scan": f"`shard_map` loop by hand, {FUSED} steps in a scan",
    "ours": "keras_distribute",
    "ours_fused": f"keras_distribute, steps_per_execution={FUSED}",
    "ours_central": "keras_distribute, `CentralStorageStrategy`",
    "ours_deterministic": "keras_distribute, `deterministic=True`",
    **peers.TITLES,
}
LOSS_TOLERANCE = 1e-3
KINDS = ("fit", "call", "evaluate", "predict", "run")


class Task(NamedTuple):
    """What one process does."""

    contender: str
    workload: str
    devices: int
    kind: str = "fit"
    threads: int = THREADS_PER_DEVICE
    platform: str = "cpu"

    @property
    def steps(self) -> int:
        """Of a round."""
        return 1 if self.kind == "call" else WORKLOADS[self.workload].steps


# In the process of a contender.
# --------------------------------------------------------------------------------------


def prepared(task: Task) -> tuple[Callable[[], Any], int]:
    """A function that runs one round, and how many steps that is.

    Of a `fit` it returns the mean loss, where the contender says it.
    """
    name, workload = task.contender, WORKLOADS[task.workload]
    if name.startswith("tf_"):
        return _tensorflow(task, workload), task.steps
    if name.startswith("ours"):
        import keras_distribute as kd

        if task.platform == "cpu":
            kd.config._THREADS_PER_DEVICE = task.threads
            kd.config.set_cpu_devices(task.devices)
    import jax
    import keras

    alone = name.startswith("plain") or name == "torch_ddp"
    if task.platform == "cpu" and not alone and not name.startswith("ours"):
        jax.config.update("jax_num_cpu_devices", task.devices)
    alone = alone and task.platform == "cpu"
    assert len(jax.devices()) == (1 if alone else task.devices)
    if name == "data_parallel":
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=keras.distribution.list_devices())
        )
    if name == "model_parallel":
        peers.set_model_parallel(workload)
    keras.utils.set_random_seed(0)
    fused = FUSED if name.endswith("fused") else 1
    if name.startswith("ours"):
        import keras_distribute as kd

        if name == "ours_central":
            strategy = kd.experimental.CentralStorageStrategy()
        else:
            strategy = kd.MirroredStrategy(deterministic=name == "ours_deterministic")
        with strategy.scope():
            model = _compiled(workload, fused)
        if task.kind == "run":
            return _run_loop(strategy, model, workload), task.steps
    else:
        model = _compiled(workload, fused)
    if name == "nnx":
        return peers.nnx(model, workload), task.steps
    if name == "torch_ddp":
        return peers.TorchDDP(model, workload, task.devices), task.steps
    if name.startswith("by_hand"):
        return _by_hand(name, task.kind, model, workload), task.steps
    round_ = _keras(task.kind, model, workload)
    if name == "model_parallel":
        return peers.divided(round_, model, workload), task.steps
    return round_, task.steps


def _compiled(workload: Workload, fused: int) -> Any:
    import keras

    model = workload.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, steps_per_execution=fused)
    return model


def _keras(kind: str, model: Any, workload: Workload) -> Callable[[], Any]:
    x, y = workload.data()
    if kind == "call":
        x, y = x[: workload.batch], y[: workload.batch]
    if kind == "evaluate":
        return lambda: model.evaluate(x, y, batch_size=workload.batch, verbose=0)
    if kind == "predict":
        return lambda: model.predict(x, batch_size=workload.batch, verbose=0)

    def fit() -> float:
        options: dict[str, Any] = {"shuffle": False, "verbose": 0}
        told = model.fit(x, y, batch_size=workload.batch, **options)
        return told.history["loss"][-1]

    return fit


def _tensorflow(task: Task, workload: Workload) -> Callable[[], Any]:
    import tensorflow as tf

    count = task.devices if task.contender == "tf_mirrored" else 1
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
    if count == 1 and task.contender == "tf_one":
        return _keras(task.kind, _compiled(workload, 1), workload)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    with strategy.scope():
        model = _compiled(workload, 1)
    return _keras(task.kind, model, workload)


def _run_loop(strategy: Any, model: Any, workload: Workload) -> Callable[[], None]:
    """A custom loop of `strategy.run` over a distributed dataset."""
    import jax

    import keras_distribute as kd

    x, y = workload.data()
    data = kd.ArrayDataset((x, y), workload.batch)
    dataset = strategy.experimental_distribute_dataset(data)

    def step(element: Any) -> Any:
        x, y = element

        def loss_of() -> Any:
            return model.compute_loss(x, y, model(x, training=True))

        loss, grads = kd.value_and_grad(loss_of, model.trainable_variables)()
        model.optimizer.apply(grads, model.trainable_variables)
        return loss

    def round_() -> None:
        loss = None
        for element in dataset:
            loss = strategy.run(step, args=(element,))
        jax.block_until_ready(loss.stacked)  # type: ignore[union-attr]

    return round_


@dataclasses.dataclass
class ByHand:
    """The loop that one would write in JAX: local statistics in BatchNormalization,
    gradients averaged, Adam. A call is a round of it.

    Args:
        program: From the state and a batch to the next state, or to predictions.
        state: Of the model and the optimizer, and the sum of the losses.
        data: Of a round.
        width: How many along axis 0 of the data a call of the program takes.
        sharding: Of a batch.
        predicts: Whether the program makes predictions.
    """

    program: Any
    state: Any
    data: tuple[Any, ...]
    width: int
    sharding: Any
    predicts: bool = False

    def __call__(self) -> None:
        import jax
        import numpy as np

        program, width, sharding = self.program, self.width, self.sharding
        starts = range(0, len(self.data[0]) - len(self.data[0]) % width, width)
        state = self.state
        if self.predicts:
            (x,) = self.data
            parts = [
                program(state, jax.device_put(x[i : i + width], sharding))
                for i in starts
            ]
            np.concatenate([np.asarray(part) for part in parts])
            return
        x, y = self.data
        for i in starts:
            rows = x[i : i + width], y[i : i + width]
            state = program(state, *jax.device_put(rows, sharding))
        self.state = jax.block_until_ready(state)


def _by_hand(name: str, kind: str, model: Any, workload: Workload) -> ByHand:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    x, y = workload.data()
    optimizer, loss_of, batch = model.optimizer, model.loss, workload.batch
    optimizer.build(model.trainable_variables)
    mesh = Mesh(np.asarray(jax.devices()), ("replica",))
    replicated, split = (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("replica")),
    )
    stacked = NamedSharding(mesh, PartitionSpec(None, "replica"))
    everywhere, by_replica = PartitionSpec(), PartitionSpec("replica")
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    trainable, others, slots = [[v.value for v in group] for group in groups]
    shapes = [value.shape for value in trainable]
    ends = np.cumsum([value.size for value in trainable])[:-1].tolist()

    def parts(flat: Any) -> list[Any]:
        return [
            part.reshape(shape)
            for part, shape in zip(jnp.split(flat, ends), shapes, strict=True)
        ]

    def joined(values: list[Any]) -> Any:
        return jnp.concatenate([jnp.ravel(value) for value in values])

    if name == "by_hand_flat":
        import keras

        weight = keras.Variable(joined(trainable))
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build([weight])
        trainable, slots = [weight.value], [v.value for v in optimizer.variables]

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, others, slots, total = state
        weights = parts(trainable[0]) if name == "by_hand_flat" else trainable

        def loss_fn(weights: Any) -> Any:
            logits, new_others = model.stateless_call(weights, others, x, training=True)
            return loss_of(y, logits), new_others

        (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        grads = [joined(grads)] if name == "by_hand_flat" else grads
        others = [
            lax.pmean(v, "replica") if v.dtype.name == "float32" else v for v in others
        ]
        loss, grads = lax.pmean((loss, grads), "replica")
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return trainable, others, slots, total + loss

    def evaluation(state: Any, x: Any, y: Any) -> Any:
        logits, _ = model.stateless_call(state[0], state[1], x, training=False)
        return (*state[:3], state[3] + lax.pmean(loss_of(y, logits), "replica"))

    def prediction(state: Any, x: Any) -> Any:
        return model.stateless_call(state[0], state[1], x, training=False)[0]

    def mapped(
        function: Any, inputs: Any, outputs: Any, donate: tuple[int, ...] = (0,)
    ) -> Any:
        program = jax.shard_map(
            function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return jax.jit(program, donate_argnums=donate)

    state = jax.device_put((trainable, others, slots, 0.0), replicated)
    if kind == "predict":
        program = mapped(prediction, (everywhere, by_replica), by_replica, ())
        return ByHand(program, state, (x,), batch, split, predicts=True)

    if name == "by_hand_scan":

        def steps(state: Any, x: Any, y: Any) -> Any:
            return lax.scan(
                lambda state, data: (step(state, *data), None), state, (x, y)
            )[0]

        inner = PartitionSpec(None, "replica")
        program = mapped(steps, (everywhere, inner, inner), everywhere)
        stacks = [each[: len(x) - len(x) % (batch * FUSED)] for each in (x, y)]
        data = tuple(a.reshape(-1, batch, *a.shape[1:]) for a in stacks)
        return ByHand(program, state, data, FUSED, stacked)
    program = mapped(
        evaluation if kind == "evaluate" else step,
        (everywhere, by_replica, by_replica),
        everywhere,
    )
    return ByHand(program, state, (x, y), batch, split)


def _peak_mib(platform: str) -> float:
    if platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    import jax

    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**20


def work(task: Task) -> None:
    """Runs one round for each line that arrives; answers with milliseconds a step by
    the clock and of the processors, the peak memory so far, of a GPU its own, and the
    loss, which is not a number where nobody says it.
    """
    round_, steps = prepared(task)
    for _ in sys.stdin:
        begun, start = time.process_time(), time.perf_counter()
        loss = round_()
        elapsed = 1000 * (time.perf_counter() - start)
        processors = 1000 * (time.process_time() - begun)
        is_loss = task.kind == "fit" and isinstance(loss, float)
        told = (
            elapsed / steps,
            processors / steps,
            _peak_mib(task.platform),
            loss if is_loss else math.nan,
        )
        print("ms", *told, flush=True)
    if isinstance(round_, peers.TorchDDP):
        round_.close()


# In the process that measures.
# --------------------------------------------------------------------------------------


POOLED = (
    "data_parallel",
    "model_parallel",
    "by_hand",
    "by_hand_again",
    "by_hand_flat",
    "by_hand_scan",
    "nnx",
)


class Contender:
    """A process that runs rounds on demand.

    Attributes:
        peak_mib: The peak memory of the process; where it has GPUs, of the first.
        processor_ms: Of each round, milliseconds of the processors a step.
        losses: Of each round.
    """

    def __init__(self, task: Task) -> None:
        root = str(Path(__file__).resolve().parents[1])
        environment = os.environ | {
            "KERAS_BACKEND": "tensorflow"
            if task.contender.startswith("tf_")
            else "jax",
            "JAX_PLATFORMS": task.platform,
            # Of a GPU, each contender takes the memory that it needs.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join(
                [root, os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
        }
        if task.platform == "cpu" and task.contender in POOLED:
            # keras_distribute does this by itself.
            environment["NPROC"] = str(task.threads * task.devices)
        self.peak_mib = 0.0
        self.processor_ms: list[float] = []
        self.losses: list[float] = []
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, task)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def round(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ms "):
                took, processors, self.peak_mib, loss = map(float, line.split()[1:])
                self.processor_ms.append(processors)
                self.losses.append(loss)
                return took
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")[-2000:]
        raise RuntimeError(
            f"{self._process.args} ended with status {status}, and said:\n{said}"
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


class Measured(NamedTuple):
    """What was found of one contender.

    Args:
        all_ms: Milliseconds a step of each round, but the first two.
        first_ms: Of the first round, all steps together, which compiles.
        peak_mib: The peak memory of the process; where it has GPUs, of the first.
        processor_ms: What a step takes of the processors, the median of the rounds;
            `None` in results from before it was measured, and of several processes.
    """

    all_ms: list[float]
    first_ms: float
    peak_mib: float
    processor_ms: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.all_ms)

    def over(self, other: Measured) -> float:
        """How many times as long it takes as another one, in the median round."""
        pairs = zip(self.all_ms, other.all_ms, strict=True)
        return statistics.median(own / theirs for own, theirs in pairs)


def measure(tasks: Sequence[Task], rounds: int) -> dict[str, Measured]:
    """All contenders of one comparison, in turn, by name."""
    contenders = {task.contender: Contender(task) for task in tasks}
    try:
        first = {
            name: contender.round() * tasks[0].steps
            for name, contender in contenders.items()
        }
        for contender in contenders.values():
            contender.round()
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds):
            # In another order each time: none always follows the same one.
            order = random.Random(number).sample(list(contenders), len(contenders))
            for name in order:
                times[name].append(contenders[name].round())
        _check_losses({name: each.losses for name, each in contenders.items()})
        found = {}
        for name, own in contenders.items():
            processors: float | None = statistics.median(own.processor_ms[2:])
            if name == "torch_ddp":  # Its other processes are not counted.
                processors = None
            found[name] = Measured(times[name], first[name], own.peak_mib, processors)
        return found
    finally:
        for contender in contenders.values():
            contender.close()


def _check_losses(losses: dict[str, list[float]]) -> None:
    """Raises where somebody does not train, or not what the others train."""
    known = {name: each for name, each in losses.items() if not math.isnan(each[0])}
    for name, each in known.items():
        if each[-1] >= each[0]:
            raise RuntimeError(f"The loss of {name} does not fall: {each}.")
        alike = abs(each[0] - known.get("plain", each)[0]) < LOSS_TOLERANCE
        if name in peers.TITLES and not alike:
            raise RuntimeError(f"{name} trains something else: {known}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=TITLES)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("devices", type=int)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("threads", type=int)
    parser.add_argument("platform")
    work(Task(**vars(parser.parse_args())))

"""Of what a step of a small model consists, beside a loop by hand: the program,
bringing a batch, and the code of the host.

    # Writes results/step_parts.md and .json:
    python benchmarks/step_parts.py
    # Quicker and rougher, and writes nothing:
    python benchmarks/step_parts.py --rounds 3 --dry

All contenders are in one process and take turns. A part is measured by itself: the
program with a batch that is there, the batch without a program, and the code of the
host with a program and a transfer that do nothing. In a whole step they overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import contenders
import report
from contenders import FUSED, TITLES, ByHand, Task
from workloads import WORKLOADS

import keras_distribute as kd

DEVICES = 4

kd.config.set_cpu_devices(DEVICES)

import jax
import jax.numpy as jnp
import keras

from keras_distribute.devices.launches import Executable
from keras_distribute.devices.mesh import ReplicaMesh

WORKLOAD = WORKLOADS["mlp"]
PARTS = {
    "whole": "whole step",
    "program": "program alone",
    "batch": "batch alone",
    "host": "code of the host",
}
KERAS = "Keras's loop alone"
KINDS = {
    "fit": ("`fit`", "by_hand", "ours"),
    "fused": (f"`fit`, {FUSED} steps in one program", "by_hand_scan", "ours_fused"),
    "evaluate": ("`evaluate`", "by_hand", "ours"),
    "predict": ("`predict`", "by_hand", "ours"),
    "run": ("`run`", "by_hand", "ours"),
}
Round = Callable[[], Any]


class Launched(NamedTuple):
    """One launch of a program.

    Args:
        call: The compiled program.
        arguments: What it took; the first are arrays that it ends.
        outputs: What it returned beside their successors.
    """

    call: Any
    arguments: tuple[Any, ...]
    outputs: Any

    def run(self, times: int) -> None:
        """Calls the program, each time on what the last call has left."""
        state, others = self.arguments[0], self.arguments[1:]
        outputs, state = self.call(jax.tree.map(jnp.copy, state), *others)
        for _ in range(times - 1):
            outputs, state = self.call(state, *others)
        jax.block_until_ready((outputs, state))


def last_launch(round_: Round) -> Launched:
    """The last launch of a round."""
    original, found = Executable.launch, list[Launched]()

    def launch(self: Any, landing: Any, *arguments: Any) -> None:
        kept = (jax.tree.map(jnp.copy, arguments[0]), *arguments[1:])
        original(self, landing, *arguments)
        found[:] = [Launched(self._direct, kept, landing[-1][0])]

    with mock.patch.object(Executable, "launch", launch):
        round_()
    return found[0]


def without_devices(round_: Round, outputs: Any) -> None:
    """A round whose programs return `outputs`, and whose batches are arrays that were
    there before.
    """
    transfer, known = ReplicaMesh._rows_of_host, dict[Any, Any]()

    def nothing(self: Any, landing: Any, *arguments: Any) -> None:
        landing.append((outputs, arguments[0]))

    def same(self: Any, parts: Any) -> Any:
        form = parts[0].shape, parts[0].dtype
        if form not in known:
            known[form] = transfer(self, parts)
        return known[form]

    with (
        mock.patch.object(Executable, "launch", nothing),
        mock.patch.object(ReplicaMesh, "_rows_of_host", same),
    ):
        round_()


def prepared(kind: str, contender: str) -> Any:
    """What runs a round."""
    name = "fit" if kind == "fused" else kind
    # A platform of which nothing is set: the devices are there.
    task = Task(contender, "mlp", DEVICES, name, platform="virtual")
    round_, _ = contenders.prepared(task)
    for _ in range(2):
        round_()
    return round_


def parts_by_hand(loop: ByHand) -> dict[str, Round]:
    """What runs each part of a loop by hand, as often as a round does."""
    rows = [each[: loop.width] for each in loop.data]
    times = len(loop.data[0]) // loop.width
    placed = jax.device_put(rows, loop.sharding)
    copied = jax.tree.map(jnp.copy, loop.state)
    outputs = loop.program(jax.tree.map(jnp.copy, copied), *placed)

    def program() -> None:
        state = jax.tree.map(jnp.copy, copied)
        made = None
        for _ in range(times):
            if loop.predicts:
                made = loop.program(state, *placed)
            else:
                state = loop.program(state, *placed)
        jax.block_until_ready((made, state))

    def batch() -> None:
        for _ in range(times):
            jax.block_until_ready(jax.device_put(rows, loop.sharding))

    def nothing(state: Any, *_: Any) -> Any:
        return outputs if loop.predicts else state

    void = dataclasses.replace(loop, program=nothing, state=copied)

    def host() -> None:
        with mock.patch.object(jax, "device_put", lambda rows, sharding: placed):
            void()

    return {"whole": loop, "program": program, "batch": batch, "host": host}


def parts_of_ours(kind: str, round_: Round) -> dict[str, Round]:
    """What runs each part of a round of ours."""
    launched = last_launch(round_)
    size, steps = FUSED if kind == "fused" else 1, WORKLOAD.steps
    x, y = (each[: WORKLOAD.batch] for each in WORKLOAD.data())
    batches = [x] if kind == "predict" else [x, y]
    mesh = kd.MirroredStrategy().replica_mesh

    def batch() -> None:
        for _ in range(steps):
            jax.block_until_ready([mesh.put_split(each) for each in batches])

    return {
        "whole": round_,
        "program": lambda: launched.run(steps // size),
        "batch": batch,
        "host": lambda: without_devices(round_, launched.outputs),
    }


def kerass_loop(kind: str) -> Round | None:
    """A round of Keras's trainer on one device with steps that do nothing."""
    if kind == "run":
        return None
    keras.utils.set_random_seed(0)
    model = contenders._compiled(WORKLOAD, FUSED if kind == "fused" else 1)
    name = "fit" if kind == "fused" else kind
    round_ = contenders._keras(name, model, WORKLOAD)
    round_()
    outputs = jnp.zeros((WORKLOAD.batch, 10))
    logs: Any = outputs if kind == "predict" else {"loss": jnp.zeros(())}

    def nothing(state: Any, iterator: Any) -> Any:
        return logs, state

    function = {"fit": "train", "evaluate": "test"}.get(name, name)
    setattr(model, f"{function}_function", nothing)
    return round_


def measured(kind: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The milliseconds a step of each part in each round, by contender."""
    _, by_hand, ours = KINDS[kind]
    every = {by_hand: parts_by_hand(prepared(kind, by_hand))}
    every[ours] = parts_of_ours(kind, prepared(kind, ours))
    loop = kerass_loop(kind)
    if loop is not None:
        every[KERAS] = {"host": loop}
    found = {name: {part: list[float]() for part in own} for name, own in every.items()}
    for number in range(rounds + 1):
        for part in PARTS:
            names = [name for name, own in every.items() if part in own]
            for name in sorted(names, reverse=bool(number % 2)):
                begin = time.perf_counter()
                every[name][part]()
                took = 1000 * (time.perf_counter() - begin) / WORKLOAD.steps
                if number:
                    found[name][part].append(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    facts, rows = dict[str, Any](), list[list[str]]()
    for kind, (title, *_) in KINDS.items():
        facts[kind] = measured(kind, arguments.rounds)
        for name, parts in facts[kind].items():
            cells = [
                f"{statistics.median(parts[part]):.3f}" if part in parts else ""
                for part in PARTS
            ]
            rows.append([f"{title}: {TITLES.get(name, name)}", *cells])
    header = ["", *PARTS.values()]
    note = (
        f"{WORKLOAD.title}, {WORKLOAD.batch} rows, {DEVICES} virtual CPU devices: "
        f"milliseconds a step, medians of {arguments.rounds} rounds of "
        f"{WORKLOAD.steps} steps in turn, in one process. Each part is measured by "
        "itself; in a whole step they overlap. The code of the host is what is left "
        "of a step whose program and transfers do nothing; that of Keras's loop, on "
        "one device, has no batches either."
    )
    text = f"{report.table(header, rows, 'lrrrr')}\n\n{note}"
    if arguments.dry:
        print(text)
    else:
        report.write("step_parts", facts, text)


if __name__ == "__main__":
    main()

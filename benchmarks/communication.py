"""What a training step sends on a TPU slice, by three programs compiled for it: that
of `fit`, the same model's step over the global batch, as XLA divides it, and a
`shard_map` loop by hand. Nothing is run.

    # All of it, about a quarter of an hour on two idle cores:
    python benchmarks/communication.py
    # One model; the other results stay:
    python benchmarks/communication.py embedding

Writes results/communication.md and .json. Needs `pip install
'keras-distribute[dry-run-tpu]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from workloads import resnet50

LARGEST = 1200  # Seconds that one program may take.
PROGRAMS = {
    "ours": "keras_distribute",
    "ours_16": 'keras_distribute, `communication_dtype="bfloat16"`',
    "whole": "over the global batch",
    "by_hand": "`shard_map` by hand",
    "whole_mean": "over the global batch, which keeps the mean of the loss",
    "by_hand_mean": "`shard_map` by hand, which keeps the mean of the loss",
}
TOLERANCE = 1.02  # Of the bytes: a loss and a few counts are sent, too.


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Args:
        title: Of its rows.
        build: Makes it.
        rows: On each device.
        topology: To compile for.
    """

    title: str
    build: Callable[[], Any]
    rows: int
    topology: str = "v5e:2x2"


def transformer() -> Any:
    """Twelve blocks of 256, four heads, 128 tokens."""
    import keras
    from keras import layers

    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(8192, 256)(tokens)
    for _ in range(12):
        attended = layers.MultiHeadAttention(4, 64)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        hidden = layers.Dense(1024, activation="gelu")(x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(256)(hidden)]))
    pooled = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(10, dtype="float32")(pooled))


def embedding() -> Any:
    """A table of 100,000 × 64, of which an example looks up 20 rows, and three dense
    layers.
    """
    import keras
    from keras import layers

    ids = keras.Input((20,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(100_000, 64)(ids))
    for units in (512, 256):
        x = layers.Dense(units, activation="relu")(x)
    return keras.Model(ids, layers.Dense(10, dtype="float32")(x))


CASES = {
    "embedding": Case("embedding, 100,000 × 64", embedding, 1024),
    "few": Case("embedding, 100,000 × 64, few rows", embedding, 64),
    "transformer": Case("transformer, 12 blocks", transformer, 16),
    "resnet50": Case("ResNet-50, 64 × 64", resnet50, 32),
}


def compiled_model(case: Case) -> Any:
    """In mixed precision, with momentum."""
    import keras

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = case.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def lowered(name: str, case: Case) -> Any:
    """One of the programs, ready to compile for the topology's devices."""
    from keras_distribute.dry_run import api, examples, models, planning, targets

    target = targets.parse(case.topology)
    devices = target.devices()
    if not name.startswith("ours"):
        return _of_jax(name, case, devices)
    dtype = "bfloat16" if name == "ours_16" else None
    found = models.with_strategy(
        lambda: compiled_model(case), communication_dtype=dtype
    )
    batch = examples.batch_of(found.model, case.rows * len(devices))
    with found.creation():
        planning.build(found.model, found.strategy, batch)
    mesh = api._mesh_like(found.strategy.replica_mesh, devices, case.topology)
    plan = planning.training_step(found.model, found.strategy, mesh, batch)
    return plan.traced.lower()


def _of_jax(name: str, case: Case, devices: Any) -> Any:
    """The step of a model of plain Keras, from shapes alone."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    model = compiled_model(case)
    optimizer, loss_of = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)
    mesh = Mesh(np.asarray(devices), ("replica",))
    everywhere, by_replica = PartitionSpec(), PartitionSpec("replica")
    is_mapped, keeps_mean = name.startswith("by_hand"), name.endswith("_mean")

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, others, slots, mean = state

        def loss_fn(weights: Any) -> Any:
            logits, new = model.stateless_call(weights, others, x, training=True)
            return loss_of(y, logits), new

        (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        if is_mapped:
            others = [
                lax.pmean(v, "replica") if v.dtype.name == "float32" else v
                for v in others
            ]
            loss, grads = lax.pmean((loss, grads), "replica")
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        mean = [a + b for a, b in zip(mean, (loss * rows, rows), strict=False)]
        return loss, (trainable, others, slots, mean)

    def form(array: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = [[form(v.value, everywhere) for v in group] for group in groups]
    state.append([form(np.float32(0), everywhere)] * 2 if keeps_mean else [])
    rows = case.rows * len(devices)
    x = np.empty((rows, *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    batch = form(x, by_replica), form(np.empty(rows, "int32"), by_replica)
    specs = (everywhere, by_replica, by_replica)
    program: Any = step
    if is_mapped:
        program = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
    same = NamedSharding(mesh, everywhere)
    return jax.jit(program, donate_argnums=0, out_shardings=same).lower(
        tuple(state), *batch
    )


def one(model: str, name: str, path: str) -> None:
    """Compiles one program, and writes what it sends, when, and what it needs."""
    from keras_distribute.dry_run import collectives, hlo, targets

    case = CASES[model]
    program = lowered(name, case).compile()
    module = hlo.parse(program.as_text())
    count = targets.parse(case.topology).num_devices
    found = collectives.of_program(module, count)
    entry = module.computations[module.entry]
    order = {each.name: i for i, each in enumerate(entry)}
    large = max(each.num_bytes for each in found) if found else 0
    # Where in the program, which is in the order it runs in, gradients begin to move.
    begins = [
        order[c.name] / len(entry)
        for c in found
        if c.name in order and c.num_bytes > large / 100
    ]
    facts = {
        "collectives": len(found),
        "kinds": sorted({each.kind for each in found}),
        "bytes": sum(each.num_bytes * each.times for each in found),
        "sent": sum(each.bytes_sent * each.times for each in found),
        "begins": begins,
        "temporary": program.memory_analysis().temp_size_in_bytes,
    }
    Path(path).write_text(json.dumps(facts), encoding="utf-8")


def markdown(cases: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The table of all programs, and whether ours sends no more than the others."""
    header = [
        "",
        "step",
        "collectives",
        "sent by a device, MiB",
        "begin at",
        "temporary memory, MiB",
    ]
    rows: list[list[str]] = []
    lines: list[str] = []
    for model, programs in cases.items():
        for name, facts in programs.items():
            begins = [f"{100 * each:.0f} %" for each in facts["begins"]]
            more = f" and {len(begins) - 3} more" if len(begins) > 3 else ""
            rows.append(
                [
                    CASES[model].title,
                    PROGRAMS[name],
                    f"{facts['collectives']} ({', '.join(facts['kinds'])})",
                    f"{facts['sent'] / 2**20:,.1f}",
                    ", ".join(begins[:3]) + more,
                    f"{facts['temporary'] / 2**20:,.1f}",
                ]
            )
        if set(programs) == set(PROGRAMS):
            lines += _judged(CASES[model].title, programs)
    notes = (
        "Compiled by libtpu for 4 chips of v5e, mixed_bfloat16, SGD with momentum; "
        "nothing was run. Sent: by the algorithms of a ring. Begin: where in the "
        "program, which is written in the order that it runs in, what is large begins "
        "to be summed. XLA sums in 16 bits what it divides by itself; ours does where "
        "the user says so, since a sum of rounded sums differs from one device's. "
        "The mean of the loss, as a total and a count of rows, is what Keras's `fit` "
        "keeps and ours does; a step that keeps it is the same but for two numbers, so "
        "a difference in memory is what the compiler chooses to hold in the chip's "
        "own."
    )
    said = "\n".join(lines)
    return f"{report.table(header, rows, 'llrrrr')}\n\n{notes}\n\n{said}"


def _judged(title: str, programs: dict[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    judged = (
        ("ours", "sent", "bytes sent", ("by_hand",)),
        ("ours_16", "sent", "bytes sent", ("whole", "by_hand")),
        ("ours", "temporary", "temporary memory", ("whole", "by_hand")),
    )
    for own, key, what, others in judged:
        best = min(others, key=lambda name: programs[name][key])
        ratio = programs[own][key] / programs[best][key]
        reached = "reached" if ratio <= TOLERANCE else "**missed**"
        lines.append(
            f"- {title}: {what}, {PROGRAMS[own]} / {PROGRAMS[best]}: {ratio:.2f}, to "
            f"be at most {TOLERANCE:.2f}: {reached}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=[[], *CASES])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        one(*given.child)
        return
    known = report.known_cases("communication")
    for model in given.which or CASES:
        known[model] = {
            name: report.from_child(__file__, model, name, seconds=LARGEST)
            for name in PROGRAMS
        }
        cases = {model: known[model] for model in CASES if model in known}
        report.write("communication", {"cases": cases}, markdown(cases), how="Compiled")


if __name__ == "__main__":
    main()

"""Compiles training steps for TPUs that are not there, and writes the lines that say
what a device does.

    pip install 'keras-distribute[dry-run-tpu]'
    JAX_PLATFORMS=cpu python scripts/tpu_program.py

`docs/guide/tpu.md` shows the files that it writes beside it.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import keras_distribute as kd  # First: it chooses Keras's backend.

# isort: split
import keras

from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.dry_run import examples, planning, targets

ROWS, TOPOLOGY = 64, "v5e:2x4"
LAYOUTS = {".*hidden/kernel": (None, "logical"), ".*hidden/bias": ("logical",)}


class Divided(keras.layers.Layer):
    """Divides the height of images over the logical devices of a replica."""

    def call(self, x: Any) -> Any:
        strategy: Any = kd.get_strategy()
        return strategy.experimental_split_to_logical_devices(
            x, [1, strategy.num_logical_devices, 1, 1]
        )


def classifier() -> keras.Model:
    """Convolutions over divided images, and dense layers."""
    layers = [
        keras.Input((64, 64, 3)),
        Divided(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu", name="first"),
        keras.layers.Conv2D(
            128, 3, strides=2, padding="same", activation="relu", name="second"
        ),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1024, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="last"),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def compiled(num_logical: int) -> str:
    """The text of the executable of one training step on eight chips."""
    resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
    assignment = kd.tpu.experimental.DeviceAssignment.build(
        kd.tpu.experimental.initialize_tpu_system(resolver),
        computation_shape=[1, num_logical, 1, 1],
        num_replicas=8 // num_logical,
    )
    strategy = kd.TPUStrategy(resolver, assignment, layout_map=LAYOUTS)
    with strategy.scope():
        model = classifier()
    # Chips in the order that the assignment gave the CPU devices.
    places = {tuple(chip.coords): chip for chip in targets.parse(TOPOLOGY).devices()}
    groups = [
        [places[tuple(core[:3])] for core in replica]
        for replica in assignment.core_assignment.tolist()
    ]
    batch = examples.batch_of(model, ROWS)
    planning.build(model, strategy, batch)
    plan = planning.training_step(model, strategy, ReplicaMesh.of_groups(groups), batch)
    return plan.traced.lower().compile().as_text()


def as_it_stands(text: str) -> list[str]:
    """The first convolution and the largest messages, word for word, but for the
    compiler's settings at the end.
    """
    lines = [line.strip() for line in text.splitlines()]
    first = next(
        line for line in lines if " convolution(" in line and "jvp(first)/" in line
    )
    sent = max(
        (line for line in lines if re.search(r" all-reduce(-start)?\(", line)), key=len
    )
    chosen = (
        first,
        *[line for line in lines if " collective-permute-start(" in line][:1],
        sent,
    )
    return [
        re.sub(
            r" stack_frame_id=\d+|, (frontend_attributes|backend_config)=.*$", "", line
        )
        for line in chosen
    ]


def described(text: str) -> list[str]:
    """The inputs of a device, its convolutions and products, and what it sends."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", text, re.DOTALL)
    assert layout is not None
    inputs = re.findall(r"\w+\[[\d,]*\]", re.sub(r"/\*.*?\*/", "", layout.group(1)))
    lines = [
        "inputs of one device: "
        + ", ".join(f"{inputs.count(i)} x {i}" for i in dict.fromkeys(inputs))
    ]
    kinds = (
        r"(convolution|all-reduce(?:-start)?|collective-permute(?:-start)?|"
        r"all-gather(?:-start)?)\("
    )
    groups = (
        r"(?:replica_groups|source_target_pairs)="
        r"(mesh\[.*?\] \{.*?\}|\S+?)(, |$)"
    )
    for line in text.splitlines():
        found = re.search(rf"= (.*?) {kinds}", line)
        if found:
            name = re.search(r'op_name="([^"]*)"', line)
            between = re.search(groups, line)
            shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", found.group(1))
            lines.append(
                f"{found.group(2)} {shape}"
                + (f" between {between.group(1)}" if between else "")
            )
            lines += (
                [f"    of {name.group(1).removeprefix('jit(global_step)/')}"]
                if name
                else []
            )
    return lines


def main() -> None:
    kd.config.set_cpu_devices(8)
    pages = pathlib.Path(__file__).parents[1] / "docs" / "guide"
    for num_logical, name in (
        (1, "tpu-one-logical-device"),
        (2, "tpu-two-logical-devices"),
    ):
        text = compiled(num_logical)
        (pages / f"{name}.txt").write_text("\n".join(described(text)) + "\n")
        (pages / f"{name}-text.txt").write_text("\n".join(as_it_stands(text)) + "\n")


if __name__ == "__main__":
    main()

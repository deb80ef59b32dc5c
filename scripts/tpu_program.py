"""Compiles training steps for TPUs that are not there, and writes the lines that say what a device does.

    pip install libtpu
    JAX_PLATFORMS=cpu python scripts/tpu_program.py

`docs/guide/tpu.md` shows the files that it writes beside it. A strategy's programs are made for the devices of its
mesh; here these are the devices of a described TPU, which can be compiled for, and nothing is ever placed on them.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import keras_distribute as kd  # First: it chooses Keras's backend.

# isort: split
import jax
import keras
import numpy as np
from jax.experimental import topologies

from keras_distribute import context
from keras_distribute._compat import trainer as compat
from keras_distribute.context import Frame, Mode
from keras_distribute.mesh import ReplicaMesh
from keras_distribute.training import sharding
from keras_distribute.training.batches import WHOLE, Placed
from keras_distribute.training.steps import TrainerSeams

ROWS, TOPOLOGY = 64, "v5e:2x4"
LAYOUTS = {".*hidden/kernel": (None, "logical"), ".*hidden/bias": ("logical",)}


class Divided(keras.layers.Layer):
    """Divides the height of images over the logical devices of a replica."""

    def call(self, x: Any) -> Any:
        strategy: Any = kd.get_strategy()
        return strategy.experimental_split_to_logical_devices(x, [1, strategy.num_logical_devices, 1, 1])


def classifier() -> keras.Model:
    """Convolutions over divided images, and dense layers."""
    layers = [
        keras.Input((64, 64, 3)),
        Divided(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu", name="first"),
        keras.layers.Conv2D(128, 3, strides=2, padding="same", activation="relu", name="second"),
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
        model.optimizer.build(model.trainable_variables)
        model.train_on_batch(np.zeros((8, 64, 64, 3), "float32"), np.zeros(8, "int32"))  # Creates the metrics.
    # Chips in the order that the assignment gave the CPU devices.
    host = {"chips_per_host_bounds": (2, 4, 1)}  # All of them on one host.
    chips = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY, **host).devices
    places = {tuple(chip.coords): chip for chip in chips}
    groups = [[places[tuple(core[:3])] for core in replica] for replica in assignment.core_assignment.tolist()]
    mesh = jax.sharding.Mesh(
        np.asarray(groups, object).reshape(strategy.replica_mesh.mesh.devices.shape),
        strategy.replica_mesh.mesh.axis_names,
        axis_types=strategy.replica_mesh.mesh.axis_types,
    )
    strategy._mesh = ReplicaMesh(mesh)
    with context.entered(Frame(strategy, Mode.CROSS)):
        step: Any = TrainerSeams().compile_step(model, "train", model.train_step)
        state = tuple(
            [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=own) for v, own in zip(*group, strict=True)]
            for group in zip(
                compat.state_variables(model, "train"),
                sharding.of_state(compat.state_variables(model, "train"), strategy.replica_mesh),
                strict=True,
            )
        )
        forms = [((ROWS, 64, 64, 3), "float32"), ((ROWS,), "int32")]
        data = tuple(jax.ShapeDtypeStruct(s, d, sharding=strategy.replica_mesh.split) for s, d in forms)
        placed = Placed(data, (WHOLE, WHOLE), (ROWS, strategy.num_replicas_in_sync))
        return step.program.lower(state, *placed).compile().as_text()


def described(text: str) -> list[str]:
    """The inputs of a device, its convolutions and matrix products, and what it sends."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", text, re.DOTALL)
    assert layout is not None
    inputs = re.findall(r"\w+\[[\d,]*\]", re.sub(r"/\*.*?\*/", "", layout.group(1)))
    lines = ["inputs of one device: " + ", ".join(f"{inputs.count(i)} x {i}" for i in dict.fromkeys(inputs))]
    kinds = r"(convolution|all-reduce(?:-start)?|collective-permute-start|collective-permute|all-gather(?:-start)?)\("
    for line in text.splitlines():
        found = re.search(rf"= (.*?) {kinds}", line)
        if found:
            name = re.search(r'op_name="([^"]*)"', line)
            between = re.search(r"(?:replica_groups|source_target_pairs)=(mesh\[.*?\] \{.*?\}|\S+?)(, |$)", line)
            shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", found.group(1))
            lines.append(f"{found.group(2)} {shape}" + (f" between {between.group(1)}" if between else ""))
            lines += [f"    of {name.group(1).removeprefix('jit(global_step)/')}"] if name else []
    return lines


def main() -> None:
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    kd.config.set_cpu_devices(8)
    pages = pathlib.Path(__file__).parents[1] / "docs" / "guide"
    for num_logical, name in ((1, "tpu-one-logical-device.txt"), (2, "tpu-two-logical-devices.txt")):
        (pages / name).write_text("\n".join(described(compiled(num_logical))) + "\n")


if __name__ == "__main__":
    main()

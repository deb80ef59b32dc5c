"""The bytes of Adam's slots on one device, divided among the replicas and not, and how
far the weights are apart.

python benchmarks/optimizer_memory.py  # writes results/optimizer_memory.md and .json
"""

from __future__ import annotations

from typing import Any

import report

import keras_distribute as kd

DEVICES, STEPS, BATCH = 8, 20, 64

kd.config.set_cpu_devices(DEVICES)

import jax
import keras
import numpy as np


def trained(replicas: int, divided: bool) -> tuple[int, int, list[Any]]:
    """Slots' bytes on one device and in all, and the weights after training."""
    keras.utils.set_random_seed(0)
    strategy = kd.MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas)], shard_optimizer_state=divided
    )
    with strategy.scope():
        layers = [
            keras.layers.Dense(512, "relu"),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential([keras.Input((784,)), *layers])
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 784)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    arrays = [
        jax.tree.leaves(variable.value)[0] for variable in model.optimizer.variables
    ]
    own = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    return (
        own,
        sum(array.nbytes for array in arrays),
        [np.asarray(weight) for weight in model.get_weights()],
    )


def main() -> None:
    rows: list[list[str]] = []
    facts: dict[str, Any] = {}
    for replicas in (2, 4, DEVICES):
        whole, _, expected = trained(replicas, False)
        own, total, weights = trained(replicas, True)
        apart = max(
            float(np.max(np.abs(a - b))) for a, b in zip(weights, expected, strict=True)
        )
        facts[str(replicas)] = {
            "whole": whole,
            "divided": own,
            "total": total,
            "apart": apart,
        }
        share = f"{own / whole:.4f} (1/{replicas} = {1 / replicas:.4f})"
        rows.append([str(replicas), f"{whole:,}", f"{own:,}", share, f"{apart:.1e}"])
    header = [
        "replicas",
        "bytes on a device, whole",
        "divided",
        "share",
        f"weights apart after {STEPS} steps",
    ]
    note = (
        "Adam on a dense model 784-512-256-10. Weights apart: the largest difference "
        "of any weight of the two runs."
    )
    report.write(
        "optimizer_memory", facts, f"{report.table(header, rows, 'rrrrr')}\n\n{note}"
    )


if __name__ == "__main__":
    main()

"""Time of a step over several processes: `fit`, and a loop written by hand on `jax.distributed`.

    python benchmarks/processes.py [--processes 1,2,4] [--steps 300]

Weak scaling: each process has the same number of rows. The loop by hand is a jitted `shard_map` that sums all gradients
as one buffer, or each by itself; it holds the same model and the same plain SGD, and puts the rows of each step on the
device, as `fit` does. All run in one job, in turn, and the median of three rounds is shown. A `fit` costs some tens of
milliseconds beside its steps, in which the processes agree on it and read the metrics: with few steps that is what is
measured. Trust the ratios, of a machine with a core for each process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import keras_distribute as kd  # isort: skip

ROWS, FEATURES = 64, 64


def model_of(depth: int, width: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])


def by_hand(model: Any, strategy: Any, x: Any, y: Any, *, flat: bool) -> Any:
    """A function that takes so many steps."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import PartitionSpec

    mesh = strategy.replica_mesh
    weights = [mesh.put_replicated(w) for w in model.get_weights()]

    def step(weights: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = x
            for i in range(0, len(weights) - 2, 2):
                hidden = jax.nn.relu(hidden @ weights[i] + weights[i + 1])
            return jnp.mean((hidden @ weights[-2] + weights[-1] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        if flat:
            whole, back = ravel_pytree(grads)
            grads = back(lax.psum(whole, "replica"))
        else:
            grads = lax.psum(grads, "replica")
        n = lax.axis_size("replica")
        return [w - 0.01 * g / n for w, g in zip(weights, grads, strict=True)], lax.psum(value, "replica") / n

    same, split = PartitionSpec(), PartitionSpec("replica")
    mapped = jax.shard_map(step, mesh=mesh.mesh, in_specs=(same, split, split), out_specs=(same, same), check_vma=False)
    program = jax.jit(mapped, donate_argnums=0)

    def run(steps: int) -> None:
        nonlocal weights
        for i in range(steps):
            rows = slice(ROWS * i, ROWS * (i + 1))
            data = (jax.make_array_from_process_local_data(mesh.split, whole[rows]) for whole in (x, y))
            weights, value = program(weights, *data)
        jax.block_until_ready((weights, value))

    return run


def job(depth: int, width: int, steps: int) -> dict[str, float]:
    """Milliseconds a step, by way."""
    import numpy as np

    strategy = kd.MultiWorkerMirroredStrategy()
    n = strategy.num_replicas_in_sync
    x = np.random.RandomState(0).randn(ROWS * n, FEATURES).astype("float32")
    y = x[:, :1]
    own = slice(ROWS * strategy.replica_mesh.process_index, ROWS * (strategy.replica_mesh.process_index + 1))
    own_x, own_y = np.tile(x[own], (steps, 1)), np.tile(y[own], (steps, 1))
    with strategy.scope():
        model = model_of(depth, width)
        model.compile("sgd", "mse")
    whole = kd.ArrayDataset((np.tile(x, (steps, 1)), np.tile(y, (steps, 1))), ROWS * n)
    dataset = strategy.experimental_distribute_dataset(whole)
    ways = {
        "fit": lambda steps: model.fit(dataset, epochs=1, verbose=0),
        "by hand, one buffer": by_hand(model, strategy, own_x, own_y, flat=True),
        "by hand, each gradient": by_hand(model, strategy, own_x, own_y, flat=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(4):
        for name, run in ways.items():
            begin = time.perf_counter()
            run(steps)
            if round_:  # The first one compiles.
                times[name].append(1000 * (time.perf_counter() - begin) / steps)
    return {name: statistics.median(measured) for name, measured in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()
    print("| model | processes | fit, ms | by hand, one buffer | by hand, each gradient | fit / the better one |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, depth, width in (("4 gradients of up to 256 KB", 1, 1024), ("102 gradients of up to 16 KB", 50, 64)):
        for count in map(int, chosen.processes.split(",")):
            measured = kd.testing.run_in_processes(job, count, depth, width, chosen.steps, timeout=280)[0]
            fit, flat, each = measured.values()
            ratio = fit / min(flat, each)
            print(f"| {name} | {count} | {fit:.1f} | {flat:.1f} | {each:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()

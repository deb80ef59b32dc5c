"""Peers that need more than a few lines: Keras's `ModelParallel` in two dimensions,
Flax NNX, and PyTorch's `DistributedDataParallel`.

They train the same model as the others, from the same weights, on the same batches, by
Adam with the same constants; `contenders.measure` compares the loss of the first round.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from typing import Any

from workloads import Workload

TITLES = {
    "model_parallel": "`keras.distribution.ModelParallel`, 2 × 2",
    "nnx": "Flax NNX, `nnx.jit` over a mesh",
    "torch_ddp": "PyTorch DDP on gloo, a process each",
}
NEEDS = {
    "nnx": ("flax", "optax"),
    "torch_ddp": ("torch",),
    "tf_one": ("tensorflow",),
    "tf_mirrored": ("tensorflow",),
}
RATE, EPSILON = 1e-3, 1e-7  # Those of Keras's Adam.
# How the model axis divides variables: the first layer of a pair by columns, the second
# by rows, so that the two need one sum; attention by heads.
LAYOUTS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "MLP": {
        r"(.*/)?dense/kernel": (None, "model"),
        r"(.*/)?dense/bias": ("model",),
        r"(.*/)?dense_1/kernel": ("model", None),
    },
    "transformer": {
        r".*/(query|key|value)/kernel": (None, "model", None),
        r".*/(query|key|value)/bias": ("model", None),
        r".*/attention_output/kernel": ("model", None, None),
        r"(.*/)?dense(_2)?/kernel": (None, "model"),
        r"(.*/)?dense(_2)?/bias": ("model",),
        r"(.*/)?dense_[13]/kernel": ("model", None),
    },
}


def missing(contender: str) -> str | None:
    """The package that a contender needs and that is not installed."""
    for package in NEEDS.get(contender, ()):
        if importlib.util.find_spec(package) is None:
            return package
    return None


def set_model_parallel(workload: Workload) -> None:
    """Makes Keras divide batches by two and variables by two."""
    from keras import distribution

    devices = distribution.list_devices()
    mesh = distribution.DeviceMesh((2, 2), ("batch", "model"), devices)
    layouts = distribution.LayoutMap(mesh)
    for path, layout in _layouts(workload).items():
        layouts[path] = layout
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )


def _layouts(workload: Workload) -> dict[str, tuple[str | None, ...]]:
    return LAYOUTS[workload.title.split()[0].rstrip(",")]


def divided(
    round_: Callable[[], Any], model: Any, workload: Workload
) -> Callable[[], Any]:
    """A round after which weights and slots must be divided as was said."""

    def run() -> Any:
        loss = round_()
        for variables in (model.trainable_variables, model.optimizer.variables):
            parts = [v for v in variables if not v.value.sharding.is_fully_replicated]
            if len(parts) < len(_layouts(workload)):
                raise RuntimeError(f"ModelParallel has divided {len(parts)} variables.")
        return loss

    return run


def nnx(model: Any, workload: Workload) -> Callable[[], float]:
    """A loop of Flax NNX over the MLP of a Keras model, as its guides write it."""
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.hidden = nnx.Linear(784, 128, rngs=rngs)
            self.out = nnx.Linear(128, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(nnx.relu(self.hidden(x)))

    own = MLP(nnx.Rngs(0))
    layers = (own.hidden, own.out)
    arrays = [array for layer in layers for array in (layer.kernel, layer.bias)]
    for array, weight in zip(arrays, model.get_weights(), strict=True):
        assert array.shape == weight.shape
        array[...] = weight
    optimizer = nnx.Optimizer(own, optax.adam(RATE, eps=EPSILON), wrt=nnx.Param)
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = nnx.state((own, optimizer))
    replicated = NamedSharding(mesh, PartitionSpec())
    nnx.update((own, optimizer), jax.device_put(state, replicated))

    @nnx.jit
    def step(own: Any, optimizer: Any, total: Any, x: Any, y: Any) -> Any:
        def loss_of(own: Any) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(own(x), y)
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_of)(own)
        optimizer.update(own, grads)
        return total + loss

    cached = nnx.cached_partial(step, own, optimizer)  # Their faster way to call it.
    x, y = workload.data()

    def round_() -> float:
        total = jax.device_put(np.zeros((), np.float32), replicated)
        for start in range(0, len(x), workload.batch):
            rows = slice(start, start + workload.batch)
            total = cached(total, *jax.device_put((x[rows], y[rows]), split))
        return float(total) / workload.steps

    return round_


class TorchDDP:
    """A round of PyTorch's DDP: this process is rank 0, and starts the others."""

    def __init__(self, model: Any, workload: Workload, processes: int) -> None:
        import torch
        from torch import distributed

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._others = torch.multiprocessing.spawn(
            _follow, (port, processes, workload.title), nprocs=processes - 1, join=False
        )
        self._round = _ddp_round(0, port, processes, workload, model.get_weights())
        self._go = torch.ones(())
        self._broadcast = distributed.broadcast

    def __call__(self) -> float:
        self._broadcast(self._go, 0)
        return self._round()

    def close(self) -> None:
        """Ends the other processes."""
        self._go.zero_()
        self._broadcast(self._go, 0)
        self._others.join()


def _follow(index: int, port: int, processes: int, title: str) -> None:
    """Ranks 1 and more: a round for each that rank 0 begins."""
    import torch
    from torch import distributed
    from workloads import WORKLOADS

    workload = next(each for each in WORKLOADS.values() if each.title == title)
    round_ = _ddp_round(index + 1, port, processes, workload, None)
    go = torch.ones(())
    distributed.broadcast(go, 0)
    while go:
        round_()
        distributed.broadcast(go, 0)


def _ddp_round(
    rank: int, port: int, processes: int, workload: Workload, weights: Any
) -> Callable[[], float]:
    """What one process does in a round; the weights are those of rank 0."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=processes
    )
    own = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    if weights is not None:
        with torch.no_grad():
            for parameter, weight in zip(own.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(weight.T))
    model = DistributedDataParallel(own)
    optimizer = torch.optim.Adam(model.parameters(), RATE, eps=EPSILON)
    loss_of = nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(array) for array in workload.data())
    y, each = y.long(), workload.batch // processes

    def round_() -> float:
        total = torch.zeros(())
        for start in range(rank * each, len(x), workload.batch):
            rows = slice(start, start + each)
            optimizer.zero_grad()
            loss = loss_of(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        distributed.all_reduce(total)
        return float(total) / workload.steps / processes

    return round_

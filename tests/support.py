"""What tests of many rooms share: strategies by their size, values of each replica."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

import keras_distribute as kd
from keras_distribute.devices.launches import Executable
from keras_distribute.training.steps import packed_state

if TYPE_CHECKING:
    import pytest


def without_tensorflow() -> None:
    """In processes that tests start: Keras would import TensorFlow for
    `set_random_seed`, which is 40 % (3 s) of the time that such a process takes. Not in
    the process of the tests themselves, where some compare with TensorFlow.
    """
    if os.environ.get("TESTS_PROCESS") == str(os.getpid()):
        return
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]


def without_what_is_not_named(text: str) -> dict[str, str]:
    """The environment in which a program of this text starts without the libraries that
    Keras would import, and that it does not name; with `EVERY_CASE` as for users.
    """
    libraries = ("sklearn", "matplotlib", "tensorflow", "IPython")
    missing = [name for name in libraries if name not in text]
    return {} if os.environ.get("EVERY_CASE") else {"TESTS_WITHOUT": " ".join(missing)}


def mirrored(replicas: int, *args: Any, **options: Any) -> kd.MirroredStrategy:
    """The strategy on the first `replicas` CPU devices; the rest goes to its class."""
    return kd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], *args, **options)


def central(replicas: int, *args: Any) -> kd.experimental.CentralStorageStrategy:
    """`CentralStorageStrategy` on the first `replicas` CPU devices."""
    devices = [f"cpu:{i}" for i in range(replicas)]
    return kd.experimental.CentralStorageStrategy(devices, *args)


def pack_from(patch: pytest.MonkeyPatch, many: int | None) -> None:
    """So many small arrays share a buffer, on any device; for `None` none do."""
    for name in ("MANY", "MANY_WEIGHTS_ON_CPUS", "MANY_METRICS_ON_CPUS"):
        patch.setattr(packed_state, name, many or sys.maxsize)


def mirrored_or_default(replicas: int) -> kd.Strategy:
    """The strategy of that many replicas; for 0 the default one, which is plain Keras."""
    return mirrored(replicas) if replicas else kd.get_strategy()


def dense_model(strategy: kd.Strategy, inputs: int, outputs: int = 1) -> Any:
    """A small compiled model of a strategy."""
    with strategy.scope():
        dense = keras.layers.Dense(outputs)
        model = keras.Sequential([keras.Input((inputs,)), dense])
        model.compile("sgd", "mse")
    return model


def distributed(
    strategy: kd.Strategy, components: Sequence[Any] | Callable[[int], Any]
) -> Any:
    """A value with a component for each replica: an item of a sequence, or what a
    function makes of the replica's number.
    """
    component = components if callable(components) else components.__getitem__
    return strategy.experimental_distribute_values_from_function(
        lambda context: component(context.replica_id_in_sync_group)
    )


class OnFirstDevice:
    """Looks, in the `with` block, at how many arrays of a shape are on this process's
    first device, in all their parts, whenever a function of the package or of Keras's
    files has been called.
    """

    _WHERE = ("/keras_distribute/", "/keras/src/saving/", "/keras/src/backend/common/")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __enter__(self) -> OnFirstDevice:
        gc.collect()
        self.before = self.most = self._now()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    @property
    def more(self) -> float:
        """The most that there were beside those before."""
        return self.most - self.before

    def _look(self, frame: Any, event: str, _: Any) -> None:
        if event == "return" and any(
            each in frame.f_code.co_filename for each in self._WHERE
        ):
            self.most = max(self.most, self._now())

    def _now(self) -> float:
        device, size = jax.local_devices()[0], math.prod(self._shape)
        return sum(
            math.prod(array.sharding.shard_shape(array.shape)) / size
            for array in jax.live_arrays()
            if array.shape == self._shape
            and device in array.sharding.addressable_devices
        )


def assert_close(actual: Iterable[Any], expected: Iterable[Any]) -> None:
    """Whether arrays are others up to rounding."""
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def numbers_of(model: Any, x: Any, y: Any) -> list[Any]:
    """Of a training by batches of 16 rows, an evaluation and a prediction."""
    data = {"batch_size": 16, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **data).history
    return [
        history["loss"],
        model.evaluate(x, y, **data),
        model.predict(x, **data),
        *model.get_weights(),
    ]


def traced_programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that are made from now on, as they are traced; the list grows."""
    programs: list[Any] = []
    original = Executable.__init__

    def noting(self: Any, *args: Any) -> None:
        original(self, *args)
        programs.append(self.traced)

    monkeypatch.setattr(Executable, "__init__", noting)
    return programs


def assert_the_same_bits_in_series(
    model_of: Callable[[kd.Strategy], Any], x: Any, y: Any, batch_size: int
) -> None:
    """Whether four replicas train to the same weights on 1, 2 and 4 devices."""

    def weights(devices: int) -> Any:
        model = model_of(mirrored(devices, num_replicas=4, deterministic=True))
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    one, two, four = weights(1), weights(2), weights(4)
    for a, b, c in zip(one, two, four, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)

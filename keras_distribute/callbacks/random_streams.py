"""The global random streams that `fit` draws from: NumPy's, Python's and Keras's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from keras_distribute._compat import callbacks as compat


def get_state() -> dict[str, Any]:
    """The states. NumPy's shuffles arrays, Python's the batches of a `PyDataset`."""
    version, numbers, gauss = random.getstate()
    return {
        "numpy": np.random.get_state(legacy=False),
        "python": (version, np.array(numbers, np.uint64), gauss),
        "keras": compat.global_seed(),
    }


def set_state(state: dict[str, Any]) -> None:
    """Restores them."""
    np.random.set_state(state["numpy"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    compat.set_global_seed(state["keras"])

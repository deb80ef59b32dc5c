"""Keras's seeds: `rng_utils.get_random_seed` says whether the user has set one, which
no public function does.

`keras.utils.set_random_seed` imports TensorFlow to seed it, wherever it is installed;
here only what is in use is seeded.
"""

from __future__ import annotations

import random
import sys

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils


def global_seed() -> int | None:
    """What `keras.utils.set_random_seed` was given; `None` if it was not called."""
    return rng_utils.get_random_seed()


def set_all(seed: int) -> None:
    """`keras.utils.set_random_seed`; TensorFlow's seed only where it is imported."""
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    random.seed(seed)
    np.random.seed(seed)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        tensorflow.random.set_seed(seed)

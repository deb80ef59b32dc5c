"""What the devices of all processes have, told by each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_distribute.cluster import agreement


def told_by_all(
    topic: str, arrays: Sequence[jax.Array], num_processes: int
) -> list[np.ndarray[Any, Any]]:
    """What the devices of all processes have of arrays that are split over them. Each
    process tells it, without a program that devices would have to be trusted with.
    """
    if num_processes == 1:
        return list(map(np.asarray, arrays))
    own = [
        {
            shard.index[0].start or 0: np.asarray(shard.data)
            for shard in a.addressable_shards
        }
        for a in arrays
    ]
    said = agreement.exchange(topic, own, num_processes)
    merged = [
        {k: v for each in said for k, v in each[i].items()} for i in range(len(own))
    ]
    return [np.concatenate([all_[k] for k in sorted(all_)]) for all_ in merged]

"""Which rows of a batch go to which replica: TensorFlow's rules, as arithmetic. Knows
no arrays but their rows.
"""

from __future__ import annotations


def even_sizes(rows: int, parts: int) -> list[int]:
    """`rows` over `parts`, evenly, the larger ones first: 5 over 2 is `[3, 2]`."""
    return [rows // parts + (i < rows % parts) for i in range(parts)]


def piece_sizes(rows: int, parts: int) -> list[int]:
    """How many rows of one batch go to each of `parts` replicas.

    Each takes `ceil(rows / parts)` rows, in order, until none are left: 5 over 4 is
    `[2, 2, 1, 0]`. A last batch that is not full is split like any other. Source:
    recorded from `tf.distribute` (the split of a dataset on one host, and of its `DATA`
    policy).

    Returns:
        One size for each replica; they add up to `rows`.
    """
    size = -(-rows // parts)
    return [min(size, max(rows - i * size, 0)) for i in range(parts)]


def worker_sizes(
    batch_size: int, num_workers: int, num_replicas: int, worker: int
) -> list[int]:
    """The sizes into which one worker cuts the batches of its own data, in turn.

    Each step takes the next `num_replicas` of them; over all workers a step's sizes add
    up to `batch_size`. Source: TensorFlow's `batch_sizes_for_worker`.

    Args:
        batch_size: The global batch size.
        num_workers: The number of workers.
        num_replicas: The number of replicas of each worker.
        worker: Which worker this is, from 0.

    Returns:
        `num_workers * num_replicas` sizes that add up to `batch_size`.
    """
    sizes = even_sizes(batch_size, num_workers * num_replicas)
    first = worker * num_replicas
    return sizes[first:] + sizes[:first]

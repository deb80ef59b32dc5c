"""Records what each of two workers gets of a dataset: real processes, a TF_CONFIG each,
MultiWorkerMirroredStrategy.

Each entry has both workers' results in "workers", by task index. A worker's element
holds the values of its own replicas. Every entry starts two processes of its own,
because collectives that failed stay failed.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from json import dumps
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from ..encoding import JSON
from ..pipelines import Files, Steps, build, name_of, with_policy, write_files
from ..scenarios.functions import attributes
from .datasets import POLICIES
from .elements import ENDLESS, elements_of, plain, said_of
from .session import Entry, encoded, result_of, start_devices

WORKERS = 2
DEVICES = (1, 2)
TIMEOUT = 15.0
STEPS = 16

Work = Callable[[tf.distribute.Strategy], JSON]

PIPELINES: list[Steps] = [
    [["range", 16], ["batch", 8]],
    [["range", 16], ["batch", 4]],
    [["range", 10], ["batch", 4]],
    [["range", 10], ["batch", 8]],
    [["range", 11], ["batch", 4]],
    [["range", 13], ["batch", 6]],
    [["range", 10], ["batch", 5]],
    [["range", 7], ["batch", 3]],
    [["range", 3], ["batch", 1]],
    [["range", 1], ["batch", 4]],
    [["range", 0], ["batch", 4]],
    [["range", 10], ["batch", 4, "drop_remainder"]],
    [["range", 10], ["batch", 5, "drop_remainder"]],
    [["range", 10], ["batch", 4], ["repeat", 2]],
    [["range", 10], ["repeat", 2], ["batch", 4]],
    [["range", 10], ["batch", 4], ["repeat"]],
    [["range", 10], ["batch", 4], ["prefetch", 2]],
    [["generator", [4, 4, 2]]],
    [["generator", [5, 3, 1]]],
    [["range", 10]],
    [["range", 5], ["batch", 4], ["map", "dict"]],
    [["range", 5], ["batch", 4], ["map", "matrix"]],
]
HINTED: list[Steps] = [
    [["range", 10], ["shard_hint"], ["batch", 4]],
    [["range", 11], ["shard_hint"], ["batch", 4]],
    [["range", 16], ["batch", 4], ["shard_hint"]],
]

FILES: dict[str, Files] = {
    "four": {
        "a": list(range(7)),
        "b": list(range(10, 13)),
        "c": list(range(20, 24)),
        "d": [30, 31],
    },
    "two": {"a": list(range(7)), "b": list(range(10, 13))},
    "three": {"a": list(range(4)), "b": list(range(10, 14)), "c": list(range(20, 24))},
    "one": {"a": list(range(10))},
    "one and an empty one": {"a": list(range(6)), "b": []},
}
FILE_PIPELINES: list[Steps] = [
    [["text_lines"], ["map", "number"], ["batch", 4]],
    [["tf_records"], ["map", "number"], ["batch", 4]],
    [["interleave", 2], ["map", "number"], ["batch", 4]],
    [["text_lines"], ["map", "number"], ["batch", 3]],
    [["text_lines"], ["map", "number"], ["batch", 4, "drop_remainder"]],
    [["text_lines"], ["map", "number"], ["batch", 4], ["repeat", 2]],
    [["text_lines"], ["map", "number"], ["repeat", 2], ["batch", 4]],
]


def for_all_devices(function: Callable[[int], Iterator[Entry]]) -> list[Entry]:
    """The entries of a topic for every number of devices of a worker."""
    return [entry for devices in DEVICES for entry in function(devices)]


def dataset(devices: int) -> Iterator[Entry]:
    """Numbers under every AutoShardPolicy; SHARD_HINT under all of them."""
    for policy in POLICIES:
        for steps in PIPELINES if policy in ("AUTO", "DATA", "OFF") else PIPELINES[:3]:
            yield _dataset(devices, steps, policy)
        for steps in HINTED:
            yield _dataset(devices, steps, policy)


def files(devices: int) -> Iterator[Entry]:
    """Rows of files under every AutoShardPolicy."""
    for policy in ("AUTO", "FILE", "DATA", "OFF"):
        for name in FILES:
            yield _dataset(devices, FILE_PIPELINES[0], policy, name)
        if policy in ("AUTO", "FILE"):
            for steps in FILE_PIPELINES[1:]:
                yield _dataset(devices, steps, policy, "four")


def _dataset(
    devices: int, steps: Steps, policy: str, file_set: str | None = None
) -> Entry:
    content = FILES[file_set] if file_set else {}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(content, str(steps[0][0]), Path(folder))

        def whole() -> tf.data.Dataset:
            return with_policy(build(steps, paths), policy)

        def work(strategy: tf.distribute.Strategy) -> Entry:
            entry = said_of(
                lambda: strategy.experimental_distribute_dataset(whole()), _most(steps)
            )
            if ["shard_hint"] not in steps:
                entry["whole"] = plain(whole(), _most(steps))
            return entry

        files = {"file_set": file_set, "files": content} if file_set else {}
        entry = {
            "devices": devices,
            "name": name_of(steps),
            "policy": policy,
            "dataset": steps,
            **files,
        }
        results = _on_workers(devices, work)
        plains = [result.pop("whole") for result in results if "whole" in result]
        return entry | ({"whole": plains[0]} if plains else {}) | {"workers": results}


FUNCTIONS: list[tuple[Steps, ...]] = [
    ([["range", 8], ["batch", 2]],) * 2,
    ([["range", 7], ["batch", 2]],) * 2,
    ([["range", 8], ["batch", 2, "drop_remainder"]],) * 2,
    ([["range", 7], ["batch", 2, "drop_remainder"]],) * 2,
    ([["range", 3], ["batch", 2]], [["range", 8], ["batch", 2]]),
    ([["range", 8], ["batch", 2]], [["range", 0], ["batch", 2]]),
    (
        [["range", 4], ["batch", 2, "drop_remainder"]],
        [["range", 8], ["batch", 2, "drop_remainder"]],
    ),
    ([["range", 5]], [["range", 3]]),
    ([["range", 8], ["batch", 2], ["repeat"]],) * 2,
    (
        [["range", 3], ["batch", 2], ["map", "nested"]],
        [["range", 8], ["batch", 2], ["map", "nested"]],
    ),
]


def function(devices: int) -> Iterator[Entry]:
    """`distribute_datasets_from_function`: the context of each worker, and workers
    whose data end apart.
    """
    for by_worker in FUNCTIONS:

        def work(
            strategy: tf.distribute.Strategy, by_worker: tuple[Steps, ...] = by_worker
        ) -> Entry:
            contexts: list[JSON] = []

            def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
                contexts.append(attributes(context))
                return build(by_worker[context.input_pipeline_id])

            return said_of(
                lambda: strategy.distribute_datasets_from_function(dataset_fn),
                _most(by_worker[0]),
                contexts=contexts,
            )

        yield {
            "devices": devices,
            "name": " and ".join(map(name_of, by_worker)),
            "datasets": list(by_worker),
            "workers": _on_workers(devices, work),
        }
    sharded: Steps = [["range", 10]]

    def by_hand(strategy: tf.distribute.Strategy) -> Entry:
        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            part = build(sharded).shard(
                context.num_input_pipelines, context.input_pipeline_id
            )
            return part.batch(context.get_per_replica_batch_size(8))

        return elements_of(
            lambda: strategy.distribute_datasets_from_function(dataset_fn), STEPS
        )

    yield {
        "devices": devices,
        "name": "range(10).shard(of the context).batch(per replica of 8)",
        "workers": _on_workers(devices, by_hand),
    }


def misc(devices: int) -> Iterator[Entry]:
    """Sums over all workers, optionals, and options that no two workers take."""
    PER_REPLICA = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
    )
    placed = tf.distribute.InputOptions(experimental_place_dataset_on_device=True)
    host = tf.distribute.InputOptions(experimental_fetch_to_device=False)

    def numbers(rows: int = 10) -> tf.data.Dataset:
        return tf.data.Dataset.range(rows).batch(4)

    def of_each(call: Callable[[tf.distribute.Strategy, Any], Any]) -> Work:
        return lambda strategy: [
            encoded(call(strategy, element))
            for element in strategy.experimental_distribute_dataset(numbers())
        ]

    def optionals(strategy: tf.distribute.Strategy) -> JSON:
        iterator = iter(strategy.experimental_distribute_dataset(numbers()))
        return [bool(iterator.get_next_as_optional().has_value()) for _ in range(5)]

    def get_next_at_end(strategy: tf.distribute.Strategy) -> JSON:
        iterator = iter(strategy.experimental_distribute_dataset(numbers()))
        for _ in iterator:
            pass
        return result_of(iterator.get_next)

    def reduced(strategy: tf.distribute.Strategy) -> JSON:
        distributed = strategy.experimental_distribute_dataset(numbers())
        return encoded(
            distributed.reduce(
                tf.constant(0, tf.int64),
                lambda state, x: state + strategy.reduce("SUM", x, axis=0),
            )
        )

    def with_options(options: Any, from_function: bool) -> Work:
        def work(strategy: tf.distribute.Strategy) -> JSON:
            if from_function:
                return elements_of(
                    lambda: strategy.distribute_datasets_from_function(
                        lambda c: numbers(), options
                    )
                )
            return elements_of(
                lambda: strategy.experimental_distribute_dataset(numbers(), options)
            )

        return work

    cases: dict[str, Work] = {
        "reduce SUM of each element": of_each(
            lambda strategy, element: strategy.reduce("SUM", element, axis=0)
        ),
        "reduce MEAN of each element": of_each(
            lambda strategy, element: strategy.reduce("MEAN", element, axis=0)
        ),
        "gather of each element": of_each(
            lambda strategy, element: strategy.gather(element, axis=0)
        ),
        "get_next_as_optional has_value": optionals,
        "get_next at the end": get_next_at_end,
        "dataset.reduce": reduced,
        "PER_REPLICA, dataset": with_options(PER_REPLICA, False),
        "PER_REPLICA, function": with_options(PER_REPLICA, True),
        "place on device, dataset": with_options(placed, False),
        "place on device, function": with_options(placed, True),
        "fetch to host, dataset": with_options(host, False),
        "fetch to host, function": with_options(host, True),
        "num_replicas_in_sync": lambda strategy: strategy.num_replicas_in_sync,
    }
    for name, work in cases.items():
        yield {"devices": devices, "name": name, "workers": _on_workers(devices, work)}


def _most(steps: Steps) -> int:
    return ENDLESS if ["repeat"] in steps else STEPS


def _on_workers(devices: int, work: Work) -> list[JSON]:
    """What `work` returns on each of two new processes, by task index.

    "hangs" says that nothing came within TIMEOUT: the worker waits for another that has
    failed.
    """
    fork = get_context("fork")
    addresses = _free_addresses()
    pipes, processes = [], []
    for index in range(WORKERS):
        here, there = fork.Pipe()
        process = fork.Process(
            target=_be_worker, args=(index, addresses, devices, work, there)
        )
        process.start()
        pipes.append(here)
        processes.append(process)
    results = [pipe.recv() if pipe.poll(TIMEOUT) else "hangs" for pipe in pipes]
    for process in processes:  # both have sent all they had
        process.kill()
        process.join()
    return results


def _be_worker(
    index: int, addresses: list[str], devices: int, work: Work, answers: Connection
) -> None:
    logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = dumps({"cluster": {"worker": addresses}, "task": task})
    start_devices(devices)
    # The strategy counts GPUs and TPUs only, and takes one CPU where there are none.
    collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices = (
        lambda self, resolver, worker: (
            tuple(f"{worker}/device:CPU:{device}" for device in range(devices)),
            "CPU",
        )
    )
    answers.send(work(tf.distribute.MultiWorkerMirroredStrategy()))
    answers.recv()  # until this process is ended


def _free_addresses() -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    return addresses

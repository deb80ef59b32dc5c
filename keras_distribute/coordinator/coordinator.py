"""`ClusterCoordinator`: functions scheduled on workers, and their results."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_distribute import checks, context
from keras_distribute.errors import (
    ContextError,
    InputError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.input.creator import batches_of
from keras_distribute.run.arguments import Call
from keras_distribute.scheduling import traces
from keras_distribute.scheduling.values import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
)
from keras_distribute.strategies.extended import check_arguments
from keras_distribute.strategies.parameter_server import ParameterServerStrategy
from keras_distribute.values import structures


class ClusterCoordinator:
    """Schedules functions on the workers of a `kd.ParameterServerStrategy`.

    A function is traced once for each form of its arguments, and runs on whichever
    worker is free. Its steps count once, also where a worker dies and another one runs
    it again.

    Source: `tf.distribute.coordinator.ClusterCoordinator`. Differs from TF: what an
    optimizer is given is applied by the parameter servers, after the function; a
    worker that is frozen or cut off is given up after 5 s, where TensorFlow waits.

    Args:
        strategy: There is one coordinator for each: making another returns the first.

    Raises:
        StructureTypeError: For another strategy.

    Example:
        >>> coordinator = kd.coordinator.ClusterCoordinator(strategy)  # doctest: +SKIP
        >>> def step(iterator):  # doctest: +SKIP
        ...     x, y = next(iterator)
        ...     loss, grads = loss_and_grads(x, y)
        ...     optimizer.apply(grads, model.trainable_variables)
        ...     return loss
        >>> losses = [coordinator.schedule(step, args=(iterator,))  # doctest: +SKIP
        ...           for _ in range(100)]
        >>> coordinator.join()  # doctest: +SKIP
    """

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        checks.instance(
            "strategy",
            strategy,
            ParameterServerStrategy,
            "A coordinator schedules functions on the workers of a "
            "ParameterServerStrategy.",
            "ClusterCoordinator(kd.ParameterServerStrategy(cluster_resolver))",
        )
        known = strategy.coordinator
        if known is None:
            known = strategy.coordinator = super().__new__(cls)
        return known

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> RemoteValue:
        """Puts a function into the queue of the workers, and returns at once.

        Args:
            fn: Traced on its first use, like a function under `jax.jit`: it may read
                and assign variables of the strategy, apply gradients by an optimizer,
                and take `next` of an iterator of the workers.
            args: Arrays, iterators of the workers, `PerWorkerValues`, of which each
                worker gets its own, and other objects, which are part of the program.
            kwargs: Named arguments, likewise.

        Returns:
            A `RemoteValue` of what `fn` returns.

        Raises:
            ValueStructureError: For a `RemoteValue` among the arguments.
            Exception: The first error of a function scheduled before.
        """
        fix = "coordinator.schedule(step, args=(x,))"
        checks.function("fn", fn, "What is scheduled is a function.", fix)
        check_arguments("coordinator.schedule", args, kwargs, fix)
        self._check_context("schedule")
        cluster = self._strategy.cluster
        cluster.queue.check()
        call, iterators = self._call(tuple(args), dict(kwargs or {}))
        program = cluster.program(fn, call)
        # Of several workers none knows what the others add meanwhile.
        returns_sums = len(cluster.workers) == 1 and any(program.partial)
        alone = returns_sums or bool(program.ordered)
        return cluster.schedule(program, fn, [call], iterators, alone=alone)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, list[PerWorkerIterator]]:
        """The arguments, with one iterator of a form as good as another."""
        own: dict[int, PerWorkerValues] = {}
        iterators: list[PerWorkerIterator] = []
        workers = len(self._strategy.cluster.workers)

        def prepared(leaf: Any) -> Any:
            if isinstance(leaf, RemoteValue):
                raise ValueStructureError(
                    "A RemoteValue cannot be an argument of a scheduled function.",
                    received=f"{leaf!r}.",
                    fix="pass what it holds: value.fetch().",
                )
            if isinstance(leaf, PerWorkerValues):
                leaf.check_number(workers)
                first = leaf.values[0].copy()  # Others may hold the same array.
                own[id(first)] = leaf
                return first
            if isinstance(leaf, PerWorkerIterator):
                iterators.append(leaf)
                return leaf.dataset.argument(len(iterators) - 1)
            return leaf

        args, kwargs = structures.mapped(prepared, (args, kwargs), _is_ours)
        call = Call(args, kwargs, self._strategy.replica_mesh)
        traces.refuse_keys(call.arrays)
        # Read when their turn comes: by then the memory may have been used again, and
        # an array of JAX donated.
        call.arrays = [
            own[id(each)] if id(each) in own else each.copy() for each in call.arrays
        ]
        return call, iterators

    def join(self) -> None:
        """Waits until all functions that were scheduled before have returned.

        Raises:
            Exception: The first error of any of them.
            UnavailableError: Where a parameter server is gone.
        """
        self._check_context("join")
        self._strategy.cluster.join()

    def done(self) -> bool:
        """Whether all functions have returned.

        Raises:
            Exception: The first error of any of them.
            UnavailableError: Where a parameter server is gone.
        """
        cluster = self._strategy.cluster
        cluster.queue.check()
        done = cluster.queue.num_pending == 0
        if done:
            cluster.synchronize()
        else:
            cluster.look(False)
            cluster.queue.check()
        return done

    def fetch(self, val: Any) -> Any:
        """Waits for results.

        Args:
            val: A `RemoteValue`, or a structure of them and of other objects.

        Returns:
            NumPy arrays in the place of the `RemoteValue`s.

        Raises:
            CancelledError: For a function that was given up.
            Exception: A function's own error.
        """
        return structures.mapped(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf,
            val,
            _is_ours,
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """A dataset on each worker.

        The workers are taken to be alike: each reads the dataset by itself, so shuffle
        it, repeat it and count the steps.

        Args:
            dataset_fn: A function without arguments that returns a dataset: of
                `tf.data`, Grain, torch, or anything that can be iterated. It is pickled
                (cloudpickle) and called on each worker; here it is called once, and
                asked for one batch, to learn the form of batches. Or a dataset that
                can be pickled.

        Returns:
            A `PerWorkerDataset`; `iter` of it makes an iterator on each worker.

        Raises:
            InputError: For a dataset without a batch, or one that cannot be pickled.
        """
        self._check_context("create_per_worker_dataset")
        function: Callable[[], Any] = (
            dataset_fn if callable(dataset_fn) else lambda: dataset_fn
        )
        try:
            pickled = np.frombuffer(_pickled(function), np.uint8)
        except Exception as error:
            raise InputError(
                "The dataset cannot be sent to the workers.",
                received=f"{dataset_fn!r}: {error}.",
                fix="pass a function that makes it: "
                "coordinator.create_per_worker_dataset(lambda: make_dataset())",
            ) from error
        with context.running_as(0):
            element = next(batches_of(function()), None)
        if element is None:
            raise InputError(
                "The dataset of the workers has no batch.",
                received=f"{dataset_fn!r}.",
                fix="a dataset with at least one batch; .repeat() for any number.",
            )
        return self._strategy.cluster.dataset(pickled, element)

    def _check_context(self, what: str) -> None:
        if traces.is_tracing():
            raise ContextError(
                f"coordinator.{what} was called inside a scheduled function.",
                received="a call on a worker.",
                fix="call it in the program of the coordinator.",
            )
        context.require_own(f"coordinator.{what}", self._strategy)


def _pickled(function: Callable[[], Any]) -> bytes:
    """A dataset function; where it asks the strategy, it will ask a worker's own."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ParameterServerStrategy):
                return context.default_strategy, ()
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(function)
    return file.getvalue()


def _is_ours(value: Any) -> bool:
    kinds = RemoteValue | PerWorkerValues | PerWorkerIterator
    return isinstance(value, kinds) or value is None


def experimental_get_current_worker_index() -> int:
    """The number of the worker that runs a dataset function.

    For functions given to `ClusterCoordinator.create_per_worker_dataset`, so that each
    worker can read a part of the data of its own. On the coordinator, which calls such
    a function once to learn the form of batches, it is 0.

    Source: `tf.distribute.coordinator.experimental_get_current_worker_index`. Differs
    from TF: a scheduled function is one program for all workers, and does not know on
    which it runs.

    Returns:
        The index of the worker among those of the cluster, from 0.

    Raises:
        ContextError: Outside of a dataset function.
        StructureTypeError: In a scheduled function.

    Example:
        >>> def dataset_fn():
        ...     index = kd.coordinator.experimental_get_current_worker_index()
        ...     rows = np.arange(8)[index::2]
        ...     return kd.ArrayDataset(rows, batch_size=2)
        >>> dataset = coordinator.create_per_worker_dataset(  # doctest: +SKIP
        ...     dataset_fn)
    """
    what = "Cannot retrieve the worker index: "
    if traces.is_tracing():
        raise StructureTypeError(
            f"{what}a scheduled function is one program for all workers, and does not "
            "know on which it runs.",
            received="experimental_get_current_worker_index() in a scheduled function.",
            fix="PerWorkerValue(list(range(num_workers))) as an argument: each worker "
            "gets its own number.",
        )
    index = context.current_worker()
    if index is None:
        raise ContextError(
            f"{what}this code runs on no worker.",
            received="experimental_get_current_worker_index() outside of a dataset "
            "function.",
            fix="call it in the function given to "
            "ClusterCoordinator.create_per_worker_dataset.",
        )
    return index

"""`ParameterServerStrategy`: asynchronous training, with variables on servers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import keras
import numpy as np

from keras_distribute import checks, context
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import check_cluster
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import Placement
from keras_distribute.errors import ClusterError, ContextError, ValueStructureError
from keras_distribute.input.options import InputContext, InputOptions
from keras_distribute.remote import credentials
from keras_distribute.scheduling import cluster as clusters
from keras_distribute.scheduling import traces
from keras_distribute.servers.local import ParameterServerCluster
from keras_distribute.strategies.base import Strategy, check_communication_dtype
from keras_distribute.strategies.default import default_strategy
from keras_distribute.threads import dropped
from keras_distribute.types import RunOptions
from keras_distribute.variables import Blocks


class Unfinished(Protocol):
    """Steps of a model that wait for more."""

    def are_of(self, trainer: Any) -> bool:
        """Whether they are those of a model."""
        ...

    def finish(self) -> None:
        """Makes them, and waits for their end."""

    def drop(self) -> None:
        """Forgets them."""


class ParameterServerStrategy(Strategy):
    """Trains one model on workers that come and go, each at its own speed, with the
    variables on servers.

    Workers pull values, compute gradients, and push them; a server applies each with
    the optimizer as it comes. With one worker the numbers are those of one device; with
    several, the order is that in which they push.

    Source: `tf.distribute.ParameterServerStrategy`. Differs from TF: Keras 3 has `fit`,
    `evaluate` and `predict` with any dataset, each batch once; workers and servers need
    none of the user's code; a variable goes to the server with the fewest bytes, when
    it is first used by a function.

    Args:
        cluster_resolver: Says where the tasks are: those of type `"worker"` and `"ps"`
            have to run `kd.Server`. `None` starts two workers and a parameter server on
            this host.
        variable_partitioner: Divides large variables over the servers: one of
            `kd.experimental.partitioners`, or a function of `shape` and `dtype` that
            returns the number of parts of each axis. A variable stays whole whose
            constraint looks at several rows together, as `UnitNorm(axis=0)` does.
        max_staleness: How many pushes a server may have applied between a worker's pull
            and its push; a gradient that is older is computed again. `None`: any.
        lazy_rows: Where a step only looks rows of a table up (`keras.layers.Embedding`,
            `keras.ops.take` along axis 0), those rows alone travel, and the gradients
            of those, if the optimizer leaves a row as it is whose gradient is zero:
            SGD without momentum and Adagrad do. With `True` also under the others,
            such as Adam, whose slots then go on for those rows alone, as in
            TensorFlow Addons' `LazyAdam`: the numbers are not those of one device.
        communication_dtype: `"bfloat16"` or `"float16"`: gradients are rounded to it by
            the workers, and travel so. Weights travel as they are.
        local_steps: With more than 1, `fit` trains in rounds: each group of batches is
            that many steps of the model's own optimizer on a copy of the weights; then
            `outer_optimizer` is given the mean of the differences, as a gradient
            (DiLoCo, https://arxiv.org/abs/2311.08105). There are as many groups in a
            round as workers. Functions of `ClusterCoordinator` are as without.
        local_slots: Whether a group's slots of the model's optimizer (momentum) stay on
            the worker that has trained it last, which saves most of what travels. They
            come to the coordinator when they are read, or saved in a checkpoint, as
            they are after the last round that has ended; of a worker that dies, the
            next one goes on with those of the last time.
        outer_optimizer: A Keras optimizer, of which each model that is trained gets a
            copy. `None`: SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.

    Raises:
        ClusterError: For a cluster without workers or servers, or a job without a
            token.
        UnavailableError: Where a server does not answer within two minutes.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> strategy = kd.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones(64), verbose=0)
        >>> strategy.close()
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        max_staleness: int | None = None,
        lazy_rows: bool = False,
        communication_dtype: str | None = None,
        local_steps: int = 1,
        local_slots: bool = False,
        outer_optimizer: Any = None,
    ) -> None:
        _check_arguments(
            cluster_resolver,
            variable_partitioner,
            max_staleness,
            lazy_rows,
            communication_dtype,
        )
        self.local_steps = checks.count("local_steps", local_steps, 1)
        checks.flag("local_slots", local_slots)
        self.local_slots = bool(local_slots)
        _check_rounds(self.local_steps, local_slots, outer_optimizer, max_staleness)
        if self.local_steps > 1 and outer_optimizer is None:
            outer_optimizer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        self.outer_optimizer = outer_optimizer
        self.unfinished: dict[int, Unfinished] = {}
        self._outer_optimizers: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        self._own: ParameterServerCluster | None = None
        if cluster_resolver is None:
            self._own = ParameterServerCluster()
            cluster_resolver = self._own.cluster_resolver
            dropped.when_dropped(self, self._own.close)
        self._resolver = cluster_resolver
        spec = _checked(cluster_resolver)
        # One that has started the tasks knows what proves them.
        own: Any = getattr(cluster_resolver, "credentials", None)
        known = credentials.of_job() if own is None else own
        mesh = ReplicaMesh.of(jax.local_devices()[:1])
        super().__init__(mesh)
        self._placement = Placement(mesh, is_on_servers=True)
        self.cluster = clusters.Cluster(
            self,
            spec,
            cluster_resolver.cluster_spec,
            known,
            variable_partitioner,
            max_staleness,
            lazy_rows,
            communication_dtype,
        )
        self.coordinator: Any = None

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What found the cluster."""
        return self._resolver

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` on the worker that runs the scheduled function around it, in the
        context of the only replica.

        Raises:
            ContextError: Outside of a scheduled function.
        """
        if not traces.is_tracing():
            raise ContextError(
                "strategy.run of a ParameterServerStrategy belongs into a function "
                "that a worker runs.",
                received=context.describe(context.frame()),
                fix="coordinator.schedule(step), and strategy.run in `step`; or "
                "model.fit.",
            )
        self._check_run(fn, args, kwargs, options)
        with context.entered(Frame(self, Mode.REPLICA, self.make_replica_context())):
            return fn(*args, **(kwargs or {}))

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """As that of `Strategy`; in a dataset function of the workers, each of which
        reads by itself, `dataset`.
        """
        if context.current_worker() is None:
            return super().experimental_distribute_dataset(dataset, options)
        return default_strategy().experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """As that of `Strategy`; in a dataset function of the workers, each of which
        reads by itself, what `dataset_fn` returns for one replica.
        """
        if context.current_worker() is None:
            return super().distribute_datasets_from_function(dataset_fn, options)
        return default_strategy().distribute_datasets_from_function(dataset_fn, options)

    @property
    def steps_of_workers(self) -> dict[str, int]:
        """How many steps each worker has finished, by its task: `{"worker:0": 12}`."""
        return {worker.name: worker.steps for worker in self.cluster.workers}

    @property
    def bytes_of_servers(self) -> int:
        """The bytes of all arrays that went to the servers and came from them."""
        return self.cluster.bytes_of_servers()

    @property
    def bytes_of_workers(self) -> int:
        """The bytes of all arrays, such as batches, that went from here to workers, and
        came from them; since the servers were last taken anew.
        """
        return sum(worker.traffic for worker in self.cluster.workers)

    def describe_steps(self) -> str:
        """Where the steps of `fit` are made."""
        if self.local_steps == 1:
            return "Each training step is scheduled on a worker, with its batch."
        return (
            f"Training steps are scheduled in rounds: {len(self.cluster.workers)} "
            f"group(s) of {self.local_steps} steps, each group on one worker, and then "
            "an update by the outer optimizer."
        )

    def wait_for_steps(self, trainer: Any = None) -> None:
        if traces.is_tracing():
            raise traces.no_values("a checkpoint, or what else looks at all steps.")
        for steps in list(self.unfinished.values()):
            if trainer is None or steps.are_of(trainer):
                steps.finish()
        self.cluster.join()

    def _optimizers_of(self, model: Any) -> dict[str, Any]:
        """With local steps, the model's copy of the outer optimizer: one for each
        optimizer that it was compiled with.
        """
        known, own = self._outer_optimizers, getattr(model, "optimizer", None)
        if self.local_steps == 1 or own is None:
            return {}
        if own not in known:
            with self.scope():
                outer = compat_optimizer.unbuilt(self.outer_optimizer, np.asarray)
                compat_optimizer.build(outer, model.trainable_variables)
            known[own] = outer  # Not before it is built, which may fail.
        return {"outer_optimizer": known[own]}

    def _values_of_groups(self, variable: Any) -> list[Any] | None:
        return self.cluster.slots.values_of(variable)

    def _assign_groups(self, variable: Any, values: Sequence[Any]) -> bool:
        if self.local_steps == 1 or len(values) != len(self.cluster.workers):
            return False
        for group, value in enumerate(values):
            self.cluster.slots.set(variable, group, value)
        return True

    def _blocks_of(self, variable: Any) -> Blocks | None:
        return self.cluster.served.blocks_of(variable)

    def _assign_blocks(
        self, variable: Any, blocks: Blocks, optimizers: Sequence[Any]
    ) -> bool:
        if self.local_steps > 1:  # The coordinator has what groups have.
            return False
        return self.cluster.assign_blocks(variable, blocks, optimizers)

    def reconnect(self, timeout_seconds: float = 600.0) -> None:
        """Takes the parameter servers anew, after one of them was lost and has been
        started again.

        All begin empty. What they had is to be restored before it is used: by
        `kd.CheckpointManager`, or by `fit` with `kd.callbacks.BackupAndRestore`, which
        goes on with the very next batch after its last save. What was scheduled is
        cancelled. Models, optimizers and programs stay as they are.

        Source: none; with TensorFlow the program has to be started again.

        Args:
            timeout_seconds: How long to wait for each server.

        Raises:
            UnavailableError: Where a server does not answer until then.

        Example:
            >>> while True:  # doctest: +SKIP
            ...     backup = kd.callbacks.BackupAndRestore("backup", save_freq=100)
            ...     try:
            ...         model.fit(dataset, epochs=10, callbacks=[backup])
            ...         break
            ...     except kd.errors.UnavailableError:
            ...         strategy.reconnect()
        """
        checks.number("timeout_seconds", timeout_seconds)
        for steps in list(self.unfinished.values()):
            steps.drop()
        self.cluster.begin_again(timeout_seconds)

    def close(self, end_tasks: bool = False) -> None:
        """Lets go of the workers and servers, which take the next strategy; those that
        this strategy has started end. At the end of the program all end by themselves.

        Args:
            end_tasks: Whether they are to end now: `kd.Server.join` returns there.
        """
        checks.flag("end_tasks", end_tasks)
        self.cluster.close(end_tasks)
        if self._own is not None:
            self._own.close()

    def __repr__(self) -> str:
        workers, servers = len(self.cluster.workers), len(self.cluster.servers)
        return f"ParameterServerStrategy({workers} worker(s), {servers} server(s))"


def _check_arguments(
    cluster_resolver: Any,
    variable_partitioner: Any,
    max_staleness: Any,
    lazy_rows: Any,
    communication_dtype: Any,
) -> None:
    checks.instance(
        "cluster_resolver",
        cluster_resolver,
        ClusterResolver | None,
        "A cluster resolver says where the workers and parameter servers are.",
        "kd.cluster_resolver.TFConfigClusterResolver(), or None for a cluster on "
        "this host",
    )
    if variable_partitioner is not None:
        what = "A partitioner is a function of a shape and a dtype."
        fix = "kd.experimental.partitioners.MinSizePartitioner()"
        checks.function("variable_partitioner", variable_partitioner, what, fix)
    if max_staleness is not None:
        checks.count("max_staleness", max_staleness)
    checks.flag("lazy_rows", lazy_rows)
    check_communication_dtype(communication_dtype)


def _check_rounds(
    local_steps: int, local_slots: bool, outer_optimizer: Any, max_staleness: int | None
) -> None:
    if local_slots and local_steps == 1:
        raise ValueStructureError(
            "Slots stay on workers between rounds of local steps, and there are none: "
            "of single steps the servers have them.",
            received="local_slots=True, local_steps=1.",
            fix="local_steps=20, or no local_slots.",
        )
    if outer_optimizer is not None:
        checks.instance(
            "outer_optimizer",
            outer_optimizer,
            keras.optimizers.Optimizer,
            "The outer optimizer is one of Keras's.",
            "keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)",
        )
        traces.refuse_loss_scaling(outer_optimizer)
        if outer_optimizer.use_ema:
            raise ValueStructureError(
                "An outer optimizer keeps no average of the weights: nobody would put "
                "it in their place at the end.",
                received=f"{outer_optimizer!r} with use_ema=True.",
                fix="use_ema of the model's own optimizer, or of none.",
            )
        if local_steps == 1:
            raise ValueStructureError(
                "An outer optimizer updates the weights after a round of local steps, "
                "and there are none.",
                received=f"outer_optimizer={outer_optimizer!r}, local_steps=1.",
                fix="local_steps=20, or no outer_optimizer.",
            )
    if local_steps > 1 and max_staleness is not None:
        raise ValueStructureError(
            "max_staleness is for gradients of single steps: in rounds of local steps "
            "all groups begin with the same weights.",
            received=f"max_staleness={max_staleness}, local_steps={local_steps}.",
            fix="one of the two.",
        )


def _checked(resolver: ClusterResolver) -> ClusterSpec:
    cluster = resolver.cluster_spec()
    check_cluster(cluster, None, None)
    missing = [job for job in ("worker", "ps") if job not in cluster.jobs]
    if missing:
        raise ClusterError(
            f"The cluster has no {' and no '.join(missing)} task.",
            received=f"{cluster!r}.",
            fix='{"chief": [...], "worker": ["host0:2222"], "ps": ["host1:2222"]}',
        )
    return cluster

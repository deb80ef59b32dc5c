"""`Strategy`: the API that all strategies share. Knows no strategy by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import jax
import keras

from keras_distribute import checks, consistency, context
from keras_distribute.cluster import agreement
from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.consistency import ConsistencyReport
from keras_distribute.context import Frame, Mode, Scope
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import name_of
from keras_distribute.devices.placement import MIN_SHARD_BYTES, Placement
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.input import sharing
from keras_distribute.input.options import InputContext, InputOptions
from keras_distribute.run import program, replica_context
from keras_distribute.run.replica_context import ReplicaContext
from keras_distribute.strategies import reducing
from keras_distribute.strategies.deprecated import DeprecatedMethods
from keras_distribute.strategies.extended import (
    StrategyExtended,
    check_arguments,
    is_value,
)
from keras_distribute.strategies.layout_maps import LayoutMap, LayoutMapLayouts
from keras_distribute.summary import StrategySummary
from keras_distribute.summary.facts import groups_of
from keras_distribute.types import ReduceOp, RunOptions, ValueContext
from keras_distribute.values import arrays, structures
from keras_distribute.values.cross_device_ops import CrossDeviceOps, NcclAllReduce
from keras_distribute.values.per_replica import DistributedValues, PerReplica
from keras_distribute.variables import Blocks, DistributedVariable

_COMMUNICATION_DTYPES = ("bfloat16", "float16")


class Strategy(DeprecatedMethods):
    """How a model is spread over devices. Use a subclass, such as
    `kd.MirroredStrategy`.

    Source: `tf.distribute.Strategy`.
    """

    def __init__(
        self,
        mesh: ReplicaMesh | None,
        cross_device_ops: CrossDeviceOps | None = None,
        shard_optimizer_state: bool = False,
        communication_dtype: str | None = None,
        shard_variables: bool = False,
        min_shard_bytes: int = MIN_SHARD_BYTES,
        layout_map: LayoutMap | None = None,
    ) -> None:
        nothing = mesh is None and type(self) is Strategy
        what, fix = "Strategy is the base of the strategies.", "kd.MirroredStrategy()"
        checks.instance("mesh", mesh, () if nothing else ReplicaMesh | None, what, fix)
        checks.instance(
            "cross_device_ops",
            cross_device_ops,
            CrossDeviceOps | None,
            "cross_device_ops says how values are reduced over the replicas.",
            "kd.NcclAllReduce(), kd.HierarchicalCopyAllReduce(), "
            "kd.ReductionToOneDevice(), or None.",
        )
        checks.flag("shard_optimizer_state", shard_optimizer_state)
        checks.flag("shard_variables", shard_variables)
        checks.count("min_shard_bytes", min_shard_bytes, 1)
        check_communication_dtype(communication_dtype)
        self._placement = None
        if mesh is not None:
            if mesh.series and shard_variables:
                raise ValueStructureError(
                    "A deterministic strategy computes with whole weights.",
                    received="deterministic=True and shard_variables=True.",
                    fix="shard_optimizer_state=True with deterministic=True; or "
                    "shard_variables=True alone.",
                )
            layouts = None
            if layout_map is not None:
                layouts = LayoutMapLayouts(layout_map, mesh)
            self._placement = Placement(
                mesh,
                layouts=layouts,
                shard_optimizer_state=shard_optimizer_state,
                communication_dtype=communication_dtype,
                shard_variables=shard_variables,
                min_shard_bytes=min_shard_bytes,
            )
        self.programs = program.ProgramCache()
        self._extended = StrategyExtended(
            self, cross_device_ops or NcclAllReduce(num_packs=0)
        )

    @property
    def replica_mesh(self) -> ReplicaMesh:
        """The devices of the replicas."""
        return self.placement.mesh

    @property
    def placement(self) -> Placement:
        """Where its variables and programs are."""
        planned = context.placement_of(self)
        if planned is not None:
            return planned
        assert self._placement is not None
        return self._placement

    @property
    def top_frame(self) -> Frame:
        """The context of code that no `with` block surrounds, where this strategy is in
        force.
        """
        return Frame(self, Mode.CROSS)

    @property
    def extended(self) -> StrategyExtended:
        """The methods for library code: updates, reductions to a
        destination, devices.
        """
        return self._extended

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What found the cluster that the strategy runs on; `None` on a single host."""
        return None

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas share each step."""
        return self.replica_mesh.num_replicas

    def scope(self) -> Scope[Self]:
        """A context manager under which variables are created on all replicas, and this
        strategy is current.

        Build and compile the model in it; `fit`, `evaluate`, `predict` and saving work
        inside and outside. It can be entered again, also inside itself.

        Raises:
            ContextError: Inside a `keras.distribution`; on entering it inside the scope
                of another strategy, or inside `run`.

        Example:
            >>> import keras, keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.layers.Dense(1)])
            ...     model.compile("sgd", "mse")
        """
        refuse_keras_distribution(self)
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn` on every replica, as one compiled program.

        `fn` is traced by JAX, like a function under `jax.jit`, and compiled once for
        each function object and for each structure, shape and dtype of its arguments.
        Python numbers, strings and other objects among the arguments are part of the
        program: another value compiles another one. `fn` may read and assign variables
        of this strategy, and call layers, losses, metrics and optimizers statefully.

        Args:
            fn: The function of one replica. `kd.get_replica_context()` inside it is
                that replica's context.
            args: Positional arguments. Of a `PerReplica`, each replica gets its
                component; arrays are the same on all.
            kwargs: Named arguments, likewise.
            options: `kd.RunOptions`.

        Returns:
            The structure that `fn` returns, with a `PerReplica` for each array; other
            objects as they are.

        Raises:
            ContextError: Inside another `run` (but in its `merge_call`), or inside a
                function that JAX traces.
            ValueStructureError: For components whose ranks or dtypes differ, and for
                communication that would differ.
            VariableScopeError: When `fn` assigns variables that are not this
                strategy's.
            AggregationError: When the replicas would assign different values to a
                mirrored variable.
            StructureTypeError: For a generator function or a coroutine, and when `fn`
                returns an object that holds arrays and is no structure.

        Example:
            >>> import keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def fn(x):
            ...     return 2 * x + kd.get_replica_context().replica_id_in_sync_group
            >>> strategy.run(fn, args=(np.ones(2),))
            PerReplica(
              0: Array([2., 2.], dtype=float32),
              1: Array([3., 3.], dtype=float32)
            )
        """
        self._check_run(fn, args, kwargs, options)
        if context.frame().per_replica:
            return replica_context.run_in_merge_call(
                self, fn, tuple(args), dict(kwargs or {})
            )
        return program.run(self, fn, tuple(args), dict(kwargs or {}), options=options)

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """One array from a value that differs per replica.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: A `PerReplica`, or a structure of them. What is the same on all
                replicas can only be averaged.
            axis: `None`: element by element over the replicas. A number or several:
                over those dimensions of the components too, whose sizes may differ; the
                mean divides by the true number of elements.

        Returns:
            An array on every replica. The mean of integers is a float.

        Raises:
            ContextError: Inside `run`; use `all_reduce` of the replica context there.
            ValueStructureError: For a dimension that does not exist, and for the sum of
                a common value.

        Example:
            >>> import keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda context: np.arange(2.0) + context.replica_id_in_sync_group)
            >>> strategy.reduce("SUM", value, axis=None)
            Array([1., 3.], dtype=float32)
            >>> strategy.reduce("MEAN", value, axis=0)
            Array(1., dtype=float32)
        """
        op = ReduceOp.parse(reduce_op)
        self._require_cross_replica(
            "strategy.reduce",
            f'kd.get_replica_context().all_reduce("{op.name}", value)',
        )
        several = isinstance(axis, list | tuple)
        axes: Any = () if axis is None else tuple(axis) if several else (axis,)
        for one in axes:
            if not checks.is_integer(one):
                checks.instance("axis", one, (), "An axis is an integer.", "axis=0")
        return structures.mapped(
            lambda leaf: reducing.reduce_one(self, op, leaf, axes), value, is_value
        )

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' components joined along `axis`, in replica order.

        Args:
            value: A `PerReplica` whose components have one shape but for `axis`, or a
                structure of them. What is the same on all replicas is returned as it
                is, as in TensorFlow.
            axis: The dimension to join along.

        Returns:
            An array, on every replica.

        Raises:
            ContextError: Inside `run`; use `all_gather` of the replica context there.
            ValueStructureError: For scalars, and for shapes that differ elsewhere.

        Example:
            >>> import keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda context: np.arange(context.replica_id_in_sync_group + 1.0))
            >>> strategy.gather(value, axis=0)
            Array([0., 0., 1.], dtype=float32)
        """
        self._require_cross_replica(
            "strategy.gather",
            f"kd.get_replica_context().all_gather(value, axis={axis})",
        )

        return structures.mapped(
            lambda leaf: reducing.gather_one(self, leaf, axis), value, is_value
        )

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of `value` on this process's replicas, in replica order;
        `(value,)` if it has none.

        Args:
            value: A result of `run`, a distributed variable, or anything else. Of a
                structure, the structure of each replica.
        """
        if isinstance(value, DistributedValues | DistributedVariable):
            return value.values
        if not structures.is_structure(value):
            return (value,)
        leaves, structure = structures.flatten(value, is_value)
        count = len(self.replica_mesh.local_replicas)
        parts = [
            leaf.values
            if isinstance(leaf, DistributedValues | DistributedVariable)
            else (leaf,) * count
            for leaf in leaves
        ]
        return tuple(
            jax.tree.unflatten(structure, [part[i] for part in parts])
            for i in range(count)
        )

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """A `PerReplica` of what `value_fn` returns for each replica.

        Args:
            value_fn: Called once for each replica of this process with a
                `kd.experimental.ValueContext`. Returns an array, any other object, or a
                structure of them, of the same structure for each replica.

        Raises:
            ContextError: Inside `run`.
            ValueStructureError: Where the replicas' structures differ.
        """
        self._check_value_fn(value_fn)
        mesh = self.replica_mesh
        made = [
            value_fn(ValueContext(i, mesh.num_replicas)) for i in mesh.local_replicas
        ]

        def distributed(components: Sequence[Any]) -> PerReplica:
            components = list(map(arrays.from_library, components))
            own = list(map(arrays.form_of, components))
            forms = agreement.exchange(
                "experimental_distribute_values_from_function", own, mesh.num_processes
            )
            now = list(map(arrays.kept, components))
            return PerReplica.of(now, mesh, [form for part in forms for form in part])

        return structures.regroup(made, distributed)

    def _check_value_fn(self, value_fn: Any) -> None:
        name = "experimental_distribute_values_from_function"
        self._require_cross_replica(name)
        what = "Values are made by a function of a ValueContext."
        checks.function("value_fn", value_fn, what, f"strategy.{name}(value_fn)")

    @property
    def input_context(self) -> InputContext:
        """The place of this process's input among that of all processes."""
        mesh = self.replica_mesh
        return InputContext(mesh.num_processes, mesh.process_index, mesh.num_replicas)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """A dataset of global batches as one whose elements have a component for each
        replica.

        Each batch is split over the replicas as TensorFlow does: each takes `ceil(rows
        / num_replicas)` rows, in order, until none are left; the last ones may get
        fewer, or none. `run` takes such elements as they are.

        Args:
            dataset: A `tf.data.Dataset`, a Grain `MapDataset`, `IterDataset` or
                `DataLoader`, a torch `DataLoader`, a `keras.utils.PyDataset`, a
                generator of tuples, or a `kd.ArrayDataset`; batched, by global batches.
            options: `kd.InputOptions`.

        Returns:
            A `kd.DistributedDataset`; under the default strategy `dataset` itself.

        Raises:
            ContextError: Inside `run`.
            InputError: For what is no dataset, and for arrays, which say no batch size.

        Example:
            >>> import numpy as np, keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> data = kd.ArrayDataset(np.arange(10), batch_size=5)
            >>> dataset = strategy.experimental_distribute_dataset(data)
            >>> [[len(part) for part in batch.values] for batch in dataset]
            [[3, 2], [3, 2]]
        """
        self._require_cross_replica("experimental_distribute_dataset")
        return sharing.distribute(
            dataset, self.replica_mesh, self.input_context, options
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """A distributed dataset from a function that makes the pipeline of one process.

        Args:
            dataset_fn: Called once in each process, with its `kd.InputContext`; returns
                a dataset of per-replica batches. Consecutive batches go to consecutive
                replicas.
            options: `kd.InputOptions`; with `InputReplicationMode.PER_REPLICA` the
                function is called once for each replica of the process, and each gets
                the batches of its own dataset.

        Returns:
            A `kd.DistributedDataset`; under the default strategy what `dataset_fn`
            returns.

        Raises:
            ContextError: Inside `run`.
            StructureTypeError: For what is no function.

        Example:
            >>> import numpy as np, keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def dataset_fn(context):
            ...     rows = context.get_per_replica_batch_size(4)
            ...     return kd.ArrayDataset(np.arange(8), batch_size=rows)
            >>> dataset = strategy.distribute_datasets_from_function(dataset_fn)
            >>> [[part.tolist() for part in batch.values] for batch in dataset]
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        """
        self._require_cross_replica("distribute_datasets_from_function")
        return sharing.distribute_from_function(
            dataset_fn, self.replica_mesh, self.input_context, options
        )

    def summary(self, *objects: Any, batch_size: int | None = None) -> StrategySummary:
        """The replicas, and what stands on each: print it, or let a notebook show it.

        Args:
            *objects: What has variables: models, layers, optimizers, metrics,
                variables. Of a compiled model, those of its optimizer and metrics are
                included; an optimizer makes its slots in the first step. For a loop of
                your own name them all: `strategy.summary(model, optimizer, accuracy)`.
            batch_size: Of the global batch, to see how many rows each replica gets of
                it.

        Returns:
            A `kd.StrategySummary`.

        Raises:
            StructureTypeError: For anything that has no variables.
            ValueStructureError: For a batch without rows.
            ContextError: Where a running `fit` has the values of the variables.

        Example:
            >>> import keras, keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            >>> print(strategy.summary(model))
            MirroredStrategy: 2 replicas on 2 devices (cpu)
            <BLANKLINE>
            Replicas
              replica  device  model
              ──────────────────────
                    0  cpu:0   cpu
                    1  cpu:1   cpu
            <BLANKLINE>
            Variables
                        kind      variables  their values  on each device
              ───────────────────────────────────────────────────────────
              weights   mirrored          2          32 B            32 B
              ───────────────────────────────────────────────────────────
              together                    2          32 B            32 B
            <BLANKLINE>
            Each variable
              variable      shape   dtype    kind      on each device
              ───────────────────────────────────────────────────────
              dense/kernel  (3, 2)  float32  mirrored            24 B
              dense/bias    (2,)    float32  mirrored             8 B
        """
        return StrategySummary(self, objects, batch_size)

    def check_consistency(
        self, *objects: Any, action: str = "raise", step: int | None = None
    ) -> ConsistencyReport:
        """Whether all replicas have the same of what has to be the same on them: finds
        replicas that have drifted apart, and memory or arithmetic that errs.

        Each device hashes its own copy of each array, where it is; 64 bits a variable
        are compared, in one process and over several, which all call this. Any change
        of one element is found, and so of any single bit; any other but once in 2^64.
        Numbers are compared by their bits: a NaN is equal to itself. Looked at closely
        is only what differs.

        Compared are mirrored variables: weights, slots, seeds, counters; and, while
        `fit` runs or after it, what it has of metrics and moving statistics. Left out
        is what differs by right, or exists once: slots under
        `shard_optimizer_state=True`, variables whose replicas have components of their
        own (`synchronization="on_read"`), and what rests in host memory or is with
        parameter servers. A report names them as `skipped`.

        Works between two steps of `fit`, as `kd.callbacks.ReplicaConsistency` does, and
        anywhere in a loop. Differs from TensorFlow, which has no such check.

        Args:
            *objects: What has variables: models, layers, optimizers, metrics,
                variables. Of a compiled model, those of its optimizer and metrics are
                included. For a loop of your own name them all:
                `strategy.check_consistency(model, optimizer, accuracy)`.
            action: `"raise"` an error where copies differ; `"report"`: return what was
                found; `"repair"`: put the copy that more than half of the devices have
                in the place of the others, and return what was found.
            step: Of the training, for the text.

        Returns:
            A `kd.ConsistencyReport`.

        Raises:
            ReplicaConsistencyError: Where copies differ; with `"repair"` where none is
                that of more than half of the devices, as of two that differ.
            ContextError: Inside `run`; where a step that failed has used up a value.
            StructureTypeError: For anything that has no variables.
            ValueStructureError: Without objects, and for an unknown action.

        Example:
            >>> import keras, keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
            >>> with strategy.scope():
            ...     weight = keras.Variable(np.arange(4.0), name="weight")
            >>> flip = kd.testing.Fault("flip", variable=weight, replica=1, bit=30)
            >>> flip.now(0)
            >>> print(strategy.check_consistency(weight, action="repair"))
            1 variable is not the same on all 3 replicas, of 1.
              weight on replica 1 (cpu:1, process 0) differs from most others, as
              replica 0 (cpu:0, process 0), in 1 of 4 element(s) by up to 2:
              [0] 2.0 here, 0.0 there (bit 30).
              The right copies were put in their places.
            >>> print(strategy.check_consistency(weight))
            1 variable is the same on all 3 replicas.
        """
        self._require_cross_replica("strategy.check_consistency")
        checks.one_of("action", action, consistency.ACTIONS)
        if step is not None:
            checks.count("step", step)
        if not objects:
            raise ValueStructureError(
                "A check of consistency is of something.",
                received="no objects.",
                fix="strategy.check_consistency(model)",
            )
        found: dict[int, Any] = {}
        for thing in objects:
            of_thing = groups_of(thing, "A check of consistency", "check_consistency")
            for variable in itertools.chain(*(group for _, group in of_thing)):
                is_own = isinstance(variable, DistributedVariable)
                if is_own and variable.distribute_strategy is self:
                    found.setdefault(id(variable), variable)
        variables = list(found.values())
        return consistency.check(self.replica_mesh, variables, action, step)

    def group(self, value: Any, name: str | None = None) -> Any:
        """`value` itself: updates are ordered by the data they use, so there is nothing
        to group.
        """
        return value

    def wait_for_steps(self, trainer: Any = None) -> None:
        """Waits for steps of `fit` that run elsewhere, whose state is then that of the
        variables.

        Args:
            trainer: Whose; `None`: of all models.
        """

    def _optimizers_of(self, model: Any) -> dict[str, Any]:
        """The optimizers that the strategy has for a model, beside the model's own."""
        return {}

    def _values_of_groups(self, variable: Any) -> list[Any] | None:
        """What each group of local steps has of a variable; `None` for a variable of
        which there is one value.
        """
        return None

    def _assign_groups(self, variable: Any, values: Sequence[Any]) -> bool:
        """Gives groups of local steps their values again; whether there are as many."""
        return False

    def _blocks_of(self, variable: Any) -> Blocks | None:
        """The rows of a variable too large for this process; `None` for one here."""
        return None

    def _assign_blocks(
        self, variable: Any, blocks: Blocks, optimizers: Sequence[Any]
    ) -> bool:
        """Assigns a variable that may be too large for this process; returns whether it
        did.

        Args:
            optimizers: Those that may have it, as a weight or a slot.
        """
        return False

    def make_replica_context(self) -> ReplicaContext:
        """The context that a function sees inside `run`."""
        return ReplicaContext(self)

    def _require_cross_replica(
        self, what: str, fix: str = "call it outside strategy.run"
    ) -> None:
        context.require_cross_replica(what, fix, self)

    def _check_run(self, fn: Any, args: Any, kwargs: Any, options: Any) -> None:
        context.require_cross_replica(
            "strategy.run",
            "call the function directly: it already runs on every replica.",
        )
        current = context.frame()
        foreign = context.has_strategy() and current.strategy is not self
        if (
            current.mode is Mode.UPDATE
            or foreign
            or (current.per_replica and current.strategy is not self)
        ):
            raise ContextError(
                "strategy.run was called inside the program or the scope of another "
                "call or strategy.",
                received=context.describe(current),
                fix="call strategy.run in the scope of the same strategy, or in none.",
            )
        fix = "strategy.run(step, args=(x,))"
        checks.function("fn", fn, "strategy.run runs a function.", fix)
        check_arguments("strategy.run", args, kwargs, fix)
        what = "The options of strategy.run are RunOptions."
        checks.instance("options", options, RunOptions | None, what, "kd.RunOptions()")

    def __copy__(self) -> Strategy:
        return self

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self

    def __reduce__(self) -> Any:
        raise StructureTypeError(
            "A strategy and its variables belong to the devices of their process, and "
            "cannot be pickled.",
            received=f"{self!r}.",
            fix="make both where they are used; send model.get_weights(), or a whole "
            "model: pickle.dumps(model).",
        )

    def __repr__(self) -> str:
        devices = ", ".join(map(name_of, self.replica_mesh.devices))
        return f"{type(self).__name__}([{devices}])"


def refuse_keras_distribution(strategy: Strategy) -> None:
    """Raises `ContextError` where a `keras.distribution` is in force: both would place
    variables and batches.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ContextError(
            "A Keras distribution and a strategy cannot both say where variables and "
            "batches go.",
            received=f"{distribution!r} around {strategy!r}.",
            fix="keras.distribution.set_distribution(None) first.",
        )


def check_communication_dtype(dtype: Any) -> None:
    """Raises `StructureTypeError` for what is no dtype that gradients may travel in."""
    if not isinstance(dtype, str | None) or dtype not in (None, *_COMMUNICATION_DTYPES):
        raise StructureTypeError(
            "communication_dtype is a narrower float, in which gradients are summed "
            "over the replicas.",
            received=f"communication_dtype={checks.shown(dtype)}.",
            fix='"bfloat16", "float16", or None for the dtype that they have.',
        )


def get_loss_reduction() -> ReduceOp:
    """How to combine the replicas' losses: `ReduceOp.SUM`, since each replica's loss is
    a share of the global one.

    Source: `tf.compat.v1.distribute.get_loss_reduction`.
    """
    return ReduceOp.SUM


def get_strategy() -> Strategy:
    """The current strategy: that of the innermost scope, else the default strategy.

    Example:
        >>> import keras_distribute as kd
        >>> kd.get_strategy().num_replicas_in_sync
        1
    """
    return cast(Strategy, context.get_strategy())

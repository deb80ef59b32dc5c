"""The programs of a step over a global batch: one for each form of a batch, and for
several batches in one dispatch. Knows no values of variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute import context
from keras_distribute._compat.jax_internals import settings
from keras_distribute.context import Frame, GlobalBatch, Mode
from keras_distribute.devices import (
    divided,
    exports,
    jaxprs,
    on_cpus,
    scatters,
)
from keras_distribute.devices.convolutions import is_convolution
from keras_distribute.devices.launches import Executable, launches
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh, copied_to_devices
from keras_distribute.devices.rewriting import Rewriting, all_rewritten
from keras_distribute.errors import ValueStructureError
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import batches
from keras_distribute.training.steps import state_shardings
from keras_distribute.training.steps.packed_state import (
    Packed,
    Packing,
    Place,
    State,
    form_of,
    order_of,
)

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class CarriedStep:
    """A step, and how it carries its state.

    Args:
        step: From the state and the global batch to the logs and the new state.
        packing: How the state is carried that `step` takes; `None` for Keras's groups
            of values.
        shardings: Of the new state, where it is not on every replica.
        components: Where in the groups the variables are whose components on the
            replicas `step` takes.
        is_local: Whether it says how gradients of divided weights are summed, where the
            rows divide; else XLA does. The trace of a step may show that.
    """

    step: Step
    packing: Packing | None = None
    shardings: Any = None
    components: Collection[Place] = ()
    is_local: Callable[[], bool] = lambda: False


class StepPrograms:
    """What a step is compiled to."""

    def __init__(
        self, strategy: Strategy, carried: CarriedStep, groups: Sequence[list[Any]]
    ) -> None:
        self._mesh, self._strategy = strategy.replica_mesh, strategy
        self._step, self._packing = carried.step, carried.packing
        self._shardings, self._components = carried.shardings, carried.components
        self._groups, self._is_local = groups, carried.is_local
        self._scans: dict[Any, bool] = {}
        self._is_whole: dict[Any, bool] = {}
        self._executables: dict[Any, Executable] = {}
        self.latest: batches.Placed | None = None  # A batch, as shapes.
        self._taken = frozenset(id(v) for group in groups for v in group)
        _, self._structure = order_of(groups, self._packing)

    def executable(self, placed: batches.Placed, size: int = 1) -> Executable:
        """The program for a batch of this form, or for `size` of them at once."""
        key = (size, form_of_batch(placed))
        if key not in self._executables:
            with launches.tracing:  # Another thread may have made it meanwhile.
                if key not in self._executables:
                    self._executables[key] = self._made(placed, size)
        return self._executables[key]

    def _made(self, placed: batches.Placed, size: int) -> Executable:
        self.latest = placed._replace(data=jax.tree.map(form_of_array, placed.data))
        options = self.compiler_options(placed)
        state, data = self._form_of_state(), placed.data
        data = data if size == 1 else [data] * size
        program, found = self._program(placed, size, state, data)
        made = Executable(program, state, data)
        if self.compiler_options(placed) != options:  # The trace has shown that.
            return self._made(placed, size)
        made.logs = found["logs"]
        return made

    def compiler_options(self, placed: batches.Placed) -> dict[str, Any] | None:
        """How a program for this form is compiled, where not as XLA likes."""
        _, shards = placed.spread
        placement = self._strategy.placement
        if self._is_local() and shards == self._mesh.num_replicas:
            return placement.compiler_options
        return placement.apart_options

    def exported(self, placed: batches.Placed) -> jax.export.Exported:
        """The program for a batch of this form, for other devices of the same kind,
        too: its results are the arrays of the logs, then those of the state.
        """
        state, data = self._form_of_state(), jax.tree.map(form_of_array, placed.data)
        program, _ = self._program(placed, 1, state, data)
        platforms = [exports.platform_of(self._mesh.devices[0])]
        with launches.tracing:
            return exports.exported(program, platforms)(state, data)

    def unchanged(self, step: Step) -> list[Any]:
        """The variables that no training step changes: frozen weights, and those of
        other layers that have no gradient. None before the first program.

        Known from the traced step, which returns what it was given. A list of frozen
        layers would not do: a `train_step` may assign to them, as to the weights of a
        target network.

        Args:
            step: What the programs compute, on Keras's groups of values.
        """
        if self.latest is None:
            return []
        on_rows = self._on_true_rows(step, self.latest)

        def new_state(state: Any, data: Any) -> Any:
            return tuple(map(list, on_rows(state, data)[1]))

        state = tuple(map(list, form_of(self._groups)))
        with launches.tracing:
            traced = jax.make_jaxpr(new_state)(state, self.latest.data).jaxpr
        variables = [variable for group in self._groups for variable in group]
        given = traced.invars[: len(variables)]
        return [
            variable
            for variable, old, new in zip(variables, given, traced.outvars, strict=True)
            if old is new
        ]

    def names_of_state(self) -> list[str]:
        """What each array of the state is, in words."""
        paths = tuple([v.path for v in group] for group in self._groups)
        if self._packing is None:
            return jax.tree.leaves(paths)
        buffers = [
            _in_words([paths[g][i] for (g, i), _, _ in places])
            for places in self._packing.parts_of_buffers()
        ]
        rest = self._packing.without_packed(paths)
        return jax.tree.leaves(Packed(buffers, rest))

    def traced(
        self, state: State, placed: batches.Placed, size: int
    ) -> tuple[Any, int]:
        """The program that a call with such arrays runs, traced but not run: the
        devices need not be there.

        Args:
            state: The groups of Keras's state, each array as a `jax.ShapeDtypeStruct`
                with its sharding.
            placed: A batch, likewise; `batches.placed_form` makes it.
            size: Of steps in one dispatch.

        Returns:
            A `jax.stages.Traced`, and how many steps it is.
        """
        carried = jax.tree.leaves(self._carried(state))
        group = [placed] * size
        if size > 1 and self.can_scan(group, carried):
            data = [each.data for each in group]
            program, _ = self._program(placed, size, carried, data)
            return program.trace(carried, data), size
        program, _ = self._program(placed, 1, carried, placed.data)
        return program.trace(carried, placed.data), 1

    def _program(
        self, placed: batches.Placed, size: int, state: list[Any], data: Any
    ) -> tuple[Any, dict[str, Any]]:
        """As `_jitted`, with what the trace shows that XLA does not do otherwise, or
        not quickly: some operations are written so, or all rows are on each replica.

        Where rows are divided unevenly over some of the mesh's axes, and there are
        logical devices, too, XLA adds up rows that do not exist wherever the step
        scatters (JAX 0.10.2: the gradient of an `Embedding` is wrong for token 0). Of
        75 kinds of operation in such a program, those that scatter were wrong alone.
        """
        made, found = self._jitted(placed, size)
        if self._mesh.series is not None:  # Divided by this package alone.
            return made, found
        with launches.tracing:
            traced = made.trace(state, data)
        key = form_of_batch(placed)
        if key not in self._is_whole:
            scatters_rows = (
                bool(self._mesh.logical_axes)
                and not _is_even(placed)
                and jaxprs.has(traced.jaxpr, scatters.is_scatter)
            )
            self._is_whole[key] = scatters_rows
            if scatters_rows:
                return self._jitted(placed, size)
        program = all_rewritten(traced.jaxpr, self._rewritings(placed))
        if program is traced.jaxpr:
            return made, found
        structure = jax.tree.structure(traced.out_info)

        def again(leaves: list[Any], data: Any) -> Any:
            results = core.jaxpr_as_fun(program)(*jax.tree.leaves((leaves, data)))
            return jax.tree.unflatten(structure, results)

        again.__name__ = made.__name__
        return self._compiled(again, placed, size), found

    def _rewritings(self, placed: batches.Placed) -> Sequence[Rewriting]:
        """What may be in the program and is written otherwise."""
        on_cpu = self._mesh.platform == "cpu"
        if len(self._mesh.devices) == 1:
            return on_cpus.OF_ONE_DEVICE if on_cpu else ()
        if self._is_whole[form_of_batch(placed)]:
            return ()
        if self._mesh.logical_axes:
            return divided.rewritings(None)
        known = divided.rewritings(placed.spread[0])
        return (*on_cpus.OF_EACH_ROW, *known) if on_cpu else known

    def _jitted(self, placed: batches.Placed, size: int) -> tuple[Any, dict[str, Any]]:
        """The program for a form of batch, and where its trace leaves the logs."""
        is_whole = self._is_whole.get(form_of_batch(placed), False)
        function = self._on_true_rows(self._step, placed, is_whole)
        if size > 1:
            function = self._repeated(function)
        structure, found = self._structure, dict[str, Any]()

        def program(leaves: list[Any], data: Any) -> tuple[list[Any], list[Any]]:
            if self._shardings is not None:
                leaves = copied_to_devices(leaves, jax.tree.leaves(self._shardings))
            old = jax.tree.unflatten(structure, leaves)
            logs, new = function(old, data)
            outputs, found["logs"] = jax.tree.flatten(logs)
            return outputs, _leaves_like(old, new)

        program.__name__ = "global_steps" if size > 1 else "global_step"
        return self._compiled(program, placed, size), found

    def _compiled(
        self, program: Callable[..., Any], placed: batches.Placed, size: int
    ) -> Any:
        """A program of the leaves of the state and the data, to be compiled."""
        outputs = self._mesh.replicated if size > 1 else self._outputs(placed)
        # The state comes back as it went in, or the second call would compile again.
        shardings = self._mesh.replicated
        if self._shardings is not None:
            shardings = jax.tree.leaves(self._shardings)
        return jax.jit(
            program,
            donate_argnums=self._strategy.placement.donated,
            out_shardings=(outputs, shardings),
            compiler_options=self.compiler_options(placed),
        )

    def _on_true_rows(
        self, step: Step, placed: batches.Placed, is_whole: bool = False
    ) -> Step:
        """A step on batches of this form, whose true rows it takes."""
        mesh, strategy, (_, rows, spread) = self._mesh, self._strategy, placed
        if is_whole:
            batch = GlobalBatch(spread[0], replicated=True)
            own = mesh.replicated
        else:
            batch = GlobalBatch(*spread)
            own = mesh.split
        frame = Frame(strategy, Mode.CROSS, batch=batch, taken=self._taken)

        def global_step(state: Any, data: Any) -> Any:
            with context.entered(frame):
                return step(state, batches.trim(data, rows, own))

        return global_step

    def _repeated(self, step: Step) -> Step:
        """Steps on several batches, one after the other on the devices."""
        mesh = self._mesh

        def global_steps(state: Any, data: Sequence[Any]) -> Any:
            turns, batch_of = _turns(data, mesh)

            def body(state: Any, turn: Any) -> Any:
                logs, new = step(state, batch_of(turn))
                return jax.tree.unflatten(
                    self._structure, _leaves_like(state, new)
                ), logs

            state, logs = lax.scan(body, state, turns)
            return jax.tree.map(lambda values: values[-1], logs), state

        return global_steps

    def _outputs(self, placed: batches.Placed) -> Any:
        """Where logs and predictions are: as XLA likes, unless that is unreadable."""
        # An uneven split cannot leave a program; of what is split over processes, no
        # one of them could read all.
        is_free = _is_even(placed) and self._mesh.num_processes == 1
        return None if is_free else self._mesh.replicated

    def can_scan(
        self, group: list[batches.Placed], carried: list[Any] | None = None
    ) -> bool:
        """Whether a loop on the device is as fast as one here: XLA runs convolutions in
        a loop slowly on a CPU.
        """
        key = form_of_batch(group[0])
        if key not in self._scans:
            self._scans[key] = self._is_fast_in_a_loop(group[0], carried)
        return self._scans[key]

    def _is_fast_in_a_loop(
        self, placed: batches.Placed, carried: list[Any] | None
    ) -> bool:
        on_cpu = self._mesh.platform == "cpu"
        if _is_even(placed) and not on_cpu:
            return True
        state = carried or self._form_of_state()
        program, _ = self._program(placed, 1, state, placed.data)
        with launches.tracing:
            traced = program.trace(state, placed.data)
        convolves = on_cpu and jaxprs.has(traced.jaxpr, is_convolution)
        return not convolves and not self._is_whole.get(form_of_batch(placed), False)

    def _form_of_state(self) -> list[Any]:
        """The arrays of the state, as shapes with their shardings."""
        return jax.tree.leaves(self._carried(self.form_of_groups(self._mesh)))

    def form_of_groups(self, mesh: ReplicaMesh) -> State:
        """Keras's groups of values on `mesh`, as shapes with their shardings."""
        own = state_shardings.of_state(self._groups, mesh)
        return tuple(
            [
                self._form_of(variable, where, (g, i))
                for i, (variable, where) in enumerate(zip(group, places, strict=True))
            ]
            for g, (group, places) in enumerate(zip(self._groups, own, strict=True))
        )

    def _form_of(self, variable: Any, where: Any, place: Place) -> jax.ShapeDtypeStruct:
        shape, dtype = tuple(variable.shape), variable.dtype
        if place in self._components:
            shape, where = (self._mesh.num_replicas, *shape), variable.sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def _carried(self, form: State) -> Any:
        return form if self._packing is None else self._packing.form_packed(form)


def form_of_array(array: Any) -> jax.ShapeDtypeStruct:
    """All that is known of an array but its values."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _leaves_like(old: Any, new: Any) -> list[Any]:
    """The new state's arrays, in the form of the old one's: a step may be the user's
    own.
    """
    if isinstance(old, tuple) and isinstance(new, tuple | list):
        new = tuple(list(group) for group in new)
    before, structure = jax.tree.flatten(old)
    after, returned = jax.tree.flatten(new)
    shapes = [[jnp.shape(array) for array in arrays] for arrays in (before, after)]
    if returned != structure or shapes[0] != shapes[1]:
        raise ValueStructureError(
            "A step returns the state that it was given, with new values.",
            received=f"{returned} with the shapes {shapes[1]}, for {structure} with "
            f"the shapes {shapes[0]}.",
            fix="return (logs, state) from train_step and test_step, with a list of "
            "values for each group in the order that they came in.",
        )
    return [jnp.asarray(a, b.dtype) for a, b in zip(after, before, strict=True)]


def _in_words(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more, in one buffer" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def alike(group: Sequence[batches.Placed]) -> bool:
    return all(form_of_batch(placed) == form_of_batch(group[0]) for placed in group)


def form_of_batch(placed: batches.Placed) -> Any:
    """What two batches have in common that one program can take."""
    leaves, structure = jax.tree.flatten(placed.data)
    return (
        settings(),
        structure,
        tuple((leaf.shape, leaf.dtype) for leaf in leaves),
        placed.rows,
        placed.spread,
    )


def _turns(data: Sequence[Any], mesh: ReplicaMesh) -> tuple[Any, Callable[..., Any]]:
    """What a loop over batches has for each turn, and how it gets its batch from that.

    On CPUs a batch is chosen: to stack them first takes 5 % of a small step. A GPU
    would have to tell the host which one is next.
    """
    if mesh.platform == "cpu":
        each = [lambda batch=batch: batch for batch in data]
        return jnp.arange(len(data)), lambda turn: lax.switch(turn, each)
    stacked = jax.tree.map(lambda *leaves: _stacked(leaves, mesh), *data)
    return stacked, lambda batch: batch


def _stacked(leaves: Sequence[Any], mesh: ReplicaMesh) -> Any:
    stacked = jnp.stack(leaves)
    if leaves[0].ndim and not leaves[0].shape[0] % mesh.num_replicas:
        split = NamedSharding(mesh.mesh, PartitionSpec(None, REPLICA_AXIS))
        stacked = lax.with_sharding_constraint(stacked, split)
    return stacked


def _is_even(placed: batches.Placed) -> bool:
    """Whether the replicas have the same number of rows of all that is divided."""
    return all(count == batches.WHOLE for count in placed.rows)

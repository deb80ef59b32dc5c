"""One compiled step over a global batch, and several of them in one dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute import context, timing
from keras_distribute.cluster import liveness
from keras_distribute.context import Frame, Mode
from keras_distribute.mesh import REPLICA_AXIS
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import batches
from keras_distribute.training.packing import Carried, Packing, State

Step = Callable[[Any, Any], tuple[Any, Any]]
_PLACE = "in fit, evaluate or predict"
_kept: list[batches.Placed] | None = None  # The batches of the last call, while somebody wants to look at them.


def keep_batches(keep: bool) -> None:
    """Whether to keep the batches of the last step, or group of steps, of which `kept_batches` tells."""
    global _kept
    _kept = [] if keep else None


def kept_batches() -> list[batches.Placed]:
    """The batches of the last step, or group of steps."""
    return _kept or []


class CompiledStep:
    """A step compiled for the global batch: `program(state, placed batch, true rows, spread)`.

    Args:
        strategy: Where it runs.
        step: From the state and the global batch to the logs and the new state.
        packing: How the state is carried that `step` takes; `None` for Keras's groups of values.
        shardings: Of the new state, where it is not on every replica.
    """

    def __init__(self, strategy: Strategy, step: Step, packing: Packing | None = None, shardings: Any = None) -> None:
        self._mesh = mesh = strategy.replica_mesh
        self._packing = packing
        self._scans: dict[Any, bool] = {}
        self._scatters: dict[Any, bool] = {}

        def global_step(state: Any, data: Any, rows: batches.Rows, spread: batches.Spread) -> Any:
            with context.entered(Frame(strategy, Mode.CROSS, rows=spread[0], groups=spread[1])):
                return step(state, batches.trim(data, rows, mesh.split))

        def whole_step(state: Any, data: Any, rows: batches.Rows, spread: batches.Spread) -> Any:
            with context.entered(Frame(strategy, Mode.CROSS, rows=spread[0], whole=True)):
                return step(state, batches.trim(data, rows, mesh.replicated))

        def global_steps(state: Any, data: Sequence[Any], rows: batches.Rows, spread: batches.Spread) -> Any:
            def body(state: Any, data: Any) -> Any:
                logs, new = global_step(state, data, rows, spread)
                return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), state, new), logs

            state, logs = lax.scan(body, state, jax.tree.map(lambda *leaves: _stacked(leaves, mesh), *data))
            return jax.tree.map(lambda values: values[-1], logs), state

        def compiled(function: Any, outputs: Any) -> Any:
            # The state comes back as it went in, or the second call would compile again.
            out = (outputs, shardings or mesh.replicated)
            return jax.jit(function, static_argnums=(2, 3), donate_argnums=0, out_shardings=out)

        # Of what is split over processes, no one of them could read all.
        self.program = compiled(global_step, None if mesh.num_processes == 1 else mesh.replicated)
        self.uneven = compiled(global_step, mesh.replicated)  # An uneven split cannot leave a program.
        self.whole = compiled(whole_step, mesh.replicated)
        self.fused = compiled(global_steps, mesh.replicated)

    def __call__(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs one step."""
        placed = batches.place_whole(data, self._mesh)
        if _kept is not None:
            _kept[:] = [placed]
        logs, carried = self._one(self._taken(state), placed)
        return logs, self._given(carried, len(state))

    def several(self, state: State, data: Sequence[Any], size: int) -> tuple[Any, State]:
        """Runs a step for each batch: `size` of one form in one dispatch, where that is no slower.

        Returns:
            The logs of the last one, and the new state.
        """
        carried, logs = self._taken(state), None
        left = [batches.place_whole(batch, self._mesh) for batch in data]
        if _kept is not None:
            _kept[:] = left
        while left:
            group = left[:size]
            if len(group) == size and _alike(group) and self._can_scan(carried, group):
                liveness.at(_PLACE, self._mesh.num_processes)
                with timing.of("dispatch"):
                    logs, carried = self.fused(carried, [each.data for each in group], group[0].rows, group[0].spread)
                del left[:size]
            else:
                logs, carried = self._one(carried, left.pop(0))
        return logs, self._given(carried, len(state))

    def traced(self, state: State, placed: batches.Placed, size: int = 1) -> tuple[Any, int]:
        """The program that a call with such arrays runs, traced but not run: the devices need not be there.

        Args:
            state: The groups of Keras's state, each array as a `jax.ShapeDtypeStruct` with its sharding.
            placed: A batch, likewise; `planning.placed_form` makes it.
            size: As for `several`.

        Returns:
            A `jax.stages.Traced`, and how many steps it is.
        """
        carried, group = self._form_taken(state), [placed] * size
        if size > 1 and self._can_scan(carried, group):
            return self.fused.trace(carried, [each.data for each in group], placed.rows, placed.spread), size
        return self._for(carried, placed).trace(carried, *placed), 1

    def _one(self, carried: Any, placed: batches.Placed) -> Any:
        liveness.at(_PLACE, self._mesh.num_processes)
        with timing.of("dispatch"):
            return self._for(carried, placed)(carried, *placed)

    def _for(self, carried: Any, placed: batches.Placed) -> Any:
        if all(count == batches.WHOLE for count in placed.rows):
            return self.program
        return self.whole if self._scatters_wrongly(carried, placed) else self.uneven

    def _scatters_wrongly(self, carried: Any, placed: batches.Placed) -> bool:
        """Whether the step scatters rows that are divided unevenly over some of the mesh's axes.

        XLA then adds up rows that do not exist (JAX 0.10.2: the gradient of an `Embedding` is wrong for token 0), where
        there are logical devices, too. Of 75 kinds of operation in such a program, those that scatter were wrong alone.
        """
        if not self._mesh.logical_axes:
            return False
        key = _form(placed)
        if key not in self._scatters:
            self._scatters[key] = _has(self.uneven.trace(carried, *placed).jaxpr, "scatter")
        return self._scatters[key]

    def _can_scan(self, carried: Any, group: list[batches.Placed]) -> bool:
        """Whether a loop on the device is as fast as one here: XLA runs convolutions in a loop slowly on a CPU."""
        key = _form(group[0])
        if key not in self._scans:
            on_cpu = self._mesh.devices[0].platform == "cpu"
            slow = on_cpu and _has(self.program.trace(carried, *group[0]).jaxpr, "conv_general_dilated")
            self._scans[key] = not slow and self._for(carried, group[0]) is not self.whole
        return self._scans[key]

    def _taken(self, state: State) -> Any:
        return state[0].value if state and isinstance(state[0], Carried) else self._of_groups(state)

    def _form_taken(self, state: State) -> Any:
        """`_taken` of shapes alone."""
        return state if self._packing is None else self._packing.form_packed(state)

    def _given(self, carried: Any, groups: int) -> State:
        return Carried(carried, self._to_groups), *[()] * (groups - 1)

    def _of_groups(self, state: State) -> Any:
        """What the program takes, from Keras's groups of values."""
        return state if self._packing is None else self._packing.pack_now(state)

    def _to_groups(self, carried: Any) -> State:
        """The reverse."""
        return carried if self._packing is None else self._packing.unpack_now(carried)


def _alike(group: Sequence[batches.Placed]) -> bool:
    return all(_form(placed) == _form(group[0]) for placed in group)


def _form(placed: batches.Placed) -> Any:
    leaves, structure = jax.tree.flatten(placed.data)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves), placed.rows, placed.spread


def _stacked(leaves: Sequence[Any], mesh: Any) -> Any:
    stacked = jnp.stack(leaves)
    if leaves[0].ndim and not leaves[0].shape[0] % mesh.num_replicas:
        split = NamedSharding(mesh.mesh, PartitionSpec(None, REPLICA_AXIS))
        stacked = lax.with_sharding_constraint(stacked, split)
    return stacked


def _has(jaxpr: Any, primitive: str) -> bool:
    """Whether a traced program has a primitive whose name starts so."""
    return any(
        eqn.primitive.name.startswith(primitive)
        or any(_has(inner, primitive) for inner in core.jaxprs_in_params(eqn.params))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )

"""Where the value of a variable is while a program has it: in the program's state.

A step is given the arrays of its variables, and XLA deletes them: only what the step
returns is left. So the variables do not keep arrays while a program is called again and
again; a `Holder` does, and each of its variables has a link to its place there. Nothing
has to be put back when a loop ends, in whatever way: a variable that is read asks its
holder, at any time, and one that is assigned leaves it, and is taken again by the next
step.

Each of these is one assignment, so that an exception which comes from outside, as
Ctrl-C does, finds a value either before or after it:

- the holder's state after a program (`launches.Executable.launch`);
- a variable's `_link`, or its own array and no link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute._compat import jax_internals
from keras_distribute.devices.launches import launches
from keras_distribute.devices.placement import Placement
from keras_distribute.errors import ContextError
from keras_distribute.variables.on_devices import Part, Standing

Place = Any
Link = tuple["Holder", Place]


class Holder:
    """The values of some variables, between two calls of a program.

    Args:
        variables: With their places.
        placement: Where they are between two calls.

    Attributes:
        landing: What the program's results are appended to; empty before the first
            call.
        changed: The variables, by their places, that are to be taken (again).
        is_running: Whether Keras's loop goes on, which has not synchronized yet.
    """

    def __init__(
        self, variables: Iterable[tuple[Place, Any]], placement: Placement | None = None
    ) -> None:
        device = None if placement is None else placement.parameter_device
        self._rest = None if device is None else placement
        self.landing: launches.Landing = []
        self.changed: MutableMapping[Place, Any] = dict(variables)
        self.is_running = False
        self._thread: int | None = None
        self._is_shown = False  # Whether somebody has arrays of the state, too.

    def take(self) -> Any:
        """The state for the next call, with all that was assigned since the last one.

        The caller holds `launches.lock`, and calls the program before releasing it.

        Raises:
            ContextError: If another program was given an array of the state, and has
                deleted it.
        """
        launches.settle()
        self._thread = threading.get_ident()
        self.is_running = True
        if self.changed or not self.landing:
            changed = dict(self.changed)
            self.landing[:] = [(None, self._with(changed))]
            for place, variable in changed.items():
                variable._link_to(self, place)
                del self.changed[place]
            self._is_shown = True
        state = self.landing[-1][1]
        if self._is_shown:
            deleted = first_deleted(state)
            if deleted is not None:
                raise _lost(self._name_at(deleted, state[deleted]))
            self._is_shown = False
        if self._rest is not None:
            state = list(map(self._rest.mesh.brought, state))
        return state

    def landed(self) -> Any:
        """What the call returned beside the state."""
        outputs, state = self.landing[-1]
        if self._rest is not None:
            state = _rested(state, self._rest)
        self.landing[:] = [(None, state)]  # Outputs may be large, and are the caller's.
        return outputs

    def stored(self, place: Place, variable: Any) -> Any:
        """The array of one of the variables."""
        return self._read(place, variable, self._array)

    def forget(self, place: Place) -> None:
        """Drops the array of a variable that another holder has taken: two references
        to one array would have it copied before it is given away."""

    def across(self, place: Place, variable: Any) -> Any:
        """What the variable reads across replicas, if the state has it, or `None`."""
        return None

    def standing(self, links: Sequence[tuple[Place, Any]]) -> list[Standing]:
        """The arrays on the devices behind some of its variables, with their places;
        none for those that are elsewhere. The caller holds `launches.lock`.
        """
        return []

    def _standing_at(self, index: int, parts: Sequence[Part]) -> Standing:
        """One of the arrays of the state."""
        array = self.landing[-1][1][index]
        if array is None or array.is_deleted():
            raise lost_error(parts[0].variable)

        def replace(new: jax.Array) -> None:
            outputs, state = self.landing[-1]
            # Another list: what was read of the old one is known by it.
            changed = [*state[:index], new, *state[index + 1 :]]
            self.landing[:] = [(outputs, changed)]

        return Standing(array, tuple(parts), replace)

    def _read(self, place: Place, variable: Any, find: Callable[..., Any]) -> Any:
        with launches.lock:
            launches.settle()
            if not jax_internals.is_tracing():
                return self._checked(find(place, variable), variable)
            with jax.ensure_compile_time_eval():  # It takes 15 µs.
                return self._checked(find(place, variable), variable)

    def _checked(self, array: Any, variable: Any) -> Any:
        if isinstance(array, np.ndarray):  # A copy.
            return array
        if array is None or array.is_deleted():
            raise lost_error(variable)
        # The thread that launches the next step gives the state's own arrays away.
        if self._thread != threading.get_ident():
            return _copied(array)
        self._is_shown = True
        return array

    def _name_at(self, index: int, array: Any) -> str:
        """What one of the arrays of the state is."""
        return f"a variable of shape {array.shape}"

    def _with(self, changed: dict[Place, Any]) -> Any:
        """The state with the values of these variables: all, at the first call."""
        raise NotImplementedError

    def _array(self, place: Place, variable: Any) -> Any:
        """The array at a place as the variable stores it; `None` without one."""
        raise NotImplementedError


def _rested(state: list[jax.Array], placement: Placement) -> list[jax.Array]:
    """What is on every replica, where it rests."""
    whole = placement.mesh.replicated
    rest = placement.at_rest(whole)
    where = [rest if a.sharding == whole else a.sharding for a in state]
    return jax.device_put(state, where)


def copied(array: jax.Array) -> jax.Array:
    """A copy on the same devices, made by this process alone."""
    if jax_internals.is_tracing():
        with jax.ensure_compile_time_eval():
            return _copied(array)
    return _copied(array)


def _copied(array: jax.Array) -> jax.Array:
    if array.is_fully_addressable:
        return jnp.copy(array)
    # Of several processes this one alone reads: no program of all of them may run.
    parts = [jnp.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def first_deleted(state: Sequence[Any]) -> int | None:
    """Where an array is that no program may be given any more: JAX does not look where
    it calls a program from C++, and the process would end.
    """
    for index, array in enumerate(state):
        if array is not None and array.is_deleted():
            return index
    return None


def lost_error(variable: Any) -> ContextError:
    """The error for a variable whose memory was given to a program, and not given back:
    a step that failed, or one that knows nothing of the variable.
    """
    return _lost(repr(variable.path))


def _lost(name: str) -> ContextError:
    return ContextError(
        f"The value of {name} is lost: a program that was given it has deleted it.",
        received="an error while a step ran on the devices, after it had begun; or "
        "donate_argnums, or a step of a model without a strategy, with an array that "
        "is this variable's, too.",
        fix="restore a checkpoint, load_weights(path), or create the model again; to "
        "another model, give copies: other.set_weights(model.get_weights()).",
    )

"""A checkpoint that was read and verified, on its way into the objects."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from keras_distribute.checkpoint import adapted, tracking, values
from keras_distribute.checkpoint.manifest import Manifest
from keras_distribute.checkpoint.matching import Match, RestoreStatus
from keras_distribute.checkpoint.tracking import Tracked
from keras_distribute.cluster import encoding, processes
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.errors import CheckpointError

# The key of a state that was another one in each process: a list of them is under it.
EACH_PROCESS = "state of each process"
# A method of objects: makes the state of this process from the states of another number
# of processes.
_MERGE_STATES = "_keras_distribute_state_of_all"


@dataclasses.dataclass(frozen=True)
class Reading:
    """A checkpoint that was read and verified.

    Args:
        objects: What it is restored into, by name.
        tracked: Their variables and states.
        match: Which of these are in the checkpoint, too.
        manifest: What the checkpoint says about itself.
        status: What `assign` restores.
    """

    objects: dict[str, Any]
    tracked: Tracked
    match: Match
    manifest: Manifest
    arrays: Arrays
    status: RestoreStatus

    def state_of(self, name: str) -> Any:
        """The saved state of an object that is no variable, as a new structure; the one
        that this process saved, if each saved its own.

        Raises:
            CheckpointError: Where each process saved a state of its own, and now there
                is another number of processes.
        """
        state = encoding.decode(self.manifest.objects[name], self.arrays)
        if not isinstance(state, dict) or state.keys() != {EACH_PROCESS}:
            return state
        states, count = state[EACH_PROCESS], processes.process_count()
        if len(states) == count:
            return states[processes.process_index()]
        merge = getattr(self.tracked.stateful[name], _MERGE_STATES, None)
        if merge is not None:
            return merge(states)
        raise CheckpointError(
            f"{name!r} was saved with a state of its own in each of {len(states)} "
            "processes.",
            received=f"a restore in {count}.",
            fix=f"{len(states)} processes, or restore(..., partial=True) of the other "
            "objects.",
        )

    def assign(self) -> None:
        """Gives the objects their state; may be called again.

        Raises:
            CheckpointError: Where the devices have then something else.
        """
        tracking.synchronize(self.objects)
        named = {name: self.tracked.stateful[name] for name in self.match.objects}
        states = {name: self.state_of(name) for name in named}
        # Objects first: these may refuse, and then no variable has changed, and no
        # dictionary.
        dictionaries = {n: v for n, v in named.items() if isinstance(v, dict)}
        for name, value in named.items():
            if name not in dictionaries:
                value.set_state(states[name])
        for name, value in dictionaries.items():
            value.clear()
            value.update(states[name])
        for name, model in self.tracked.models.items():
            if f"{name}/metrics/" in self.manifest.unbuilt:
                model.reset_metrics()
        optimizers = list(self.tracked.optimizers.values())
        for name in self.match.variables:
            record = self.manifest.variables[name]
            variable, array = self.tracked.variables[name], self.arrays[name]
            values.assign(variable, array, record, optimizers)
        values.check_assigned(
            {name: self.tracked.variables[name] for name in self.match.variables},
            self.manifest.variables,
        )
        for value in self.objects.values():
            if isinstance(value, keras.layers.Layer):
                adapted.refresh(value)

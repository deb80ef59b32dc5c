"""The state of the other callbacks of a `fit`: what a checkpoint keeps of them, and gives back.

A callback's state are its attributes that a checkpoint can keep: `None`, booleans, numbers, strings, bytes, arrays, and
lists, tuples and dictionaries of them. What was given to its constructor is no state, unless it is a list or a
dictionary. A callback with `get_state()` and `set_state(state)` says itself what its state is.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter, deque
from typing import Any

import keras
import numpy as np

from keras_distribute._compat import callbacks as compat
from keras_distribute.checkpoint import structures
from keras_distribute.checkpoint.tracking import is_stateful
from keras_distribute.errors import CheckpointError

_NO_STATE = frozenset({"params", "_model", "model", "validation_data"})


def named(callbacks: list[Any]) -> dict[str, Any]:
    """The callbacks by class, with a number where there are several of one."""
    counts: Counter[str] = Counter()
    names: dict[str, Any] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] += 1
        names[kind if counts[kind] == 1 else f"{kind}#{counts[kind]}"] = callback
    return names


def get_state(callbacks: list[Any]) -> dict[str, Any]:
    """The states by name; those of callbacks that have any."""
    states = {name: _state_of(callback) for name, callback in named(callbacks).items()}
    return {name: state for name, state in states.items() if state}


def set_state(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Gives the callbacks their states.

    Raises:
        CheckpointError: If the checkpoint has the state of a callback that is missing here.
    """
    present = named(callbacks)
    missing = sorted(states.keys() - present.keys())
    if missing:
        raise CheckpointError(
            f"The checkpoint has the state of {', '.join(missing)}, which this fit lacks.",
            received=f"callbacks {', '.join(present) or 'none'}.",
            fix="pass the same callbacks to fit as when it was saved, or start anew in another folder.",
        )
    for name, state in states.items():
        _give(present[name], state)


def before_training(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Keeps callbacks from deleting, when the training begins, what they wrote before it was interrupted."""
    for name, callback in named(callbacks).items():
        if isinstance(callback, keras.callbacks.CSVLogger) and "file_bytes" in states.get(name, {}):
            callback.append = True
            if os.path.exists(callback.filename):
                size = min(os.path.getsize(callback.filename), states[name]["file_bytes"])
                os.truncate(callback.filename, size)
        elif isinstance(callback, keras.callbacks.OrbaxCheckpoint):
            compat.forget_steps_after(callback, states.get(name, {}).get("last_step"))


def _state_of(callback: Any) -> dict[str, Any]:
    if is_stateful(callback):
        return {"own": callback.get_state()}
    if isinstance(callback, keras.callbacks.CSVLogger):
        file = callback.csv_file
        return {"keys": callback.keys, "file_bytes": 0 if file is None else os.path.getsize(callback.filename)}
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return {"target": callback.target}
    chosen = _constructor_names(callback)
    attributes = {
        name: value
        for name, value in vars(callback).items()
        if name not in _NO_STATE and (name not in chosen or isinstance(value, list | dict)) and _can_keep(value)
    }
    state: dict[str, Any] = {"attributes": attributes} if attributes else {}
    if compat.has_monitor(callback):
        state["monitors"] = True
    if isinstance(callback, keras.callbacks.OrbaxCheckpoint):
        state["last_step"] = compat.last_step(callback)
    return state


def _give(callback: Any, state: dict[str, Any]) -> None:
    if "own" in state:
        callback.set_state(state["own"])
        return
    if state.get("monitors"):
        compat.choose_monitor(callback)  # Changes attributes that follow.
    if isinstance(callback, keras.callbacks.CSVLogger | keras.callbacks.ProgbarLogger):
        vars(callback).update({name: value for name, value in state.items() if name != "file_bytes"})
    for name, value in state.get("attributes", {}).items():
        own = vars(callback).get(name)
        if isinstance(own, dict) and isinstance(value, dict):  # In place: others may hold it, and it keeps its type.
            own.clear()
            own.update(value)
        elif isinstance(own, list) and isinstance(value, list):
            own[:] = value
        else:
            vars(callback)[name] = deque(value, own.maxlen) if isinstance(own, deque) else value


def _constructor_names(callback: Any) -> set[str]:
    try:
        names = set(inspect.signature(type(callback).__init__).parameters)
    except (TypeError, ValueError):
        return set()
    return names | {f"_{name}" for name in names}


def _can_keep(value: Any) -> bool:
    if isinstance(value, deque):
        value = list(value)
    try:
        structures.encode(value, "", _Nowhere())
    except CheckpointError:
        return False
    return True


class _Nowhere(dict[str, np.ndarray[Any, Any]]):
    """Arrays that are not kept."""

    def __setitem__(self, name: str, array: Any) -> None:
        pass

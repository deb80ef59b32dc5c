"""The state of the other callbacks of a `fit`, to checkpoint and to restore.

A callback's state are its attributes that a checkpoint can keep: `None`, booleans,
numbers, strings, bytes, arrays, and lists, tuples and dictionaries of them. Arguments
of its constructor are no state, unless they are lists or dictionaries. A callback with
`get_state()` and `set_state(state)` defines its own.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections import deque
from typing import Any

import keras

from keras_distribute._compat import callbacks as compat
from keras_distribute.checkpoint.names import numbered
from keras_distribute.checkpoint.tracking import is_stateful
from keras_distribute.cluster import encoding

_NO_STATE = frozenset({"params", "_model", "model", "validation_data"})


def named(callbacks: list[Any]) -> dict[str, Any]:
    """The callbacks by class, with a number where there are several of one."""
    return numbered([type(callback).__name__ for callback in callbacks], callbacks)


def get_state(callbacks: list[Any]) -> dict[str, Any]:
    """The states by name; those of callbacks that have any."""
    states = {name: _state_of(callback) for name, callback in named(callbacks).items()}
    return {name: state for name, state in states.items() if state}


def set_state(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Restores the states of the callbacks that are in both."""
    present = named(callbacks)
    for name, state in states.items():
        if name in present:
            _restore(present[name], state)


def before_training(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Cuts files back to what callbacks had written when the state was saved, since the
    rest will be written again; warns of states whose callback is missing.
    """
    present = named(callbacks)
    missing = sorted(states.keys() - present.keys() - {"ProgbarLogger"})
    if missing:
        warnings.warn(
            f"The training was interrupted with {', '.join(missing)} among its "
            "callbacks, which this fit lacks. It goes on without.",
            stacklevel=2,
        )
    for name, callback in present.items():
        state = states.get(name, {})
        if isinstance(callback, keras.callbacks.CSVLogger) and "file_bytes" in state:
            callback.append = True
            if os.path.exists(callback.filename):
                size = os.path.getsize(callback.filename)
                os.truncate(callback.filename, min(size, state["file_bytes"]))
        elif "last_step" in state and isinstance(
            callback, keras.callbacks.OrbaxCheckpoint
        ):
            compat.forget_orbax_steps(callback, state["last_step"])


def _state_of(callback: Any) -> dict[str, Any]:
    if is_stateful(callback):
        return {"own": callback.get_state()}
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return {"target": callback.target}
    arguments = _constructor_names(callback)
    left_out = _NO_STATE | compat.of_this_process(callback)
    attributes: dict[str, Any] = {}
    for name, value in vars(callback).items():
        value = list(value) if isinstance(value, deque) else value
        is_state = name not in arguments or isinstance(value, list | dict)
        if is_state and name not in left_out and encoding.can_encode(value):
            attributes[name] = value
    state: dict[str, Any] = {"attributes": attributes} if attributes else {}
    if isinstance(callback, keras.callbacks.CSVLogger):
        unopened = callback.csv_file is None
        size = 0 if unopened else os.path.getsize(callback.filename)
        state |= {"keys": callback.keys, "file_bytes": size}
    if compat.has_monitor(callback):
        state["monitors"] = True
    if isinstance(callback, keras.callbacks.OrbaxCheckpoint):
        state["last_step"] = compat.last_orbax_step(callback)
    return state


def _restore(callback: Any, state: dict[str, Any]) -> None:
    if "own" in state:
        callback.set_state(state["own"])
        return
    if state.get("monitors"):
        compat.choose_monitor(callback)  # Changes attributes that follow.
    if isinstance(callback, keras.callbacks.CSVLogger | keras.callbacks.ProgbarLogger):
        vars(callback).update({n: state[n] for n in ("keys", "target") if n in state})
    left_out = compat.of_this_process(callback)
    for name, value in state.get("attributes", {}).items():
        if name in left_out:  # Of an earlier version.
            continue
        # In place where it can be: others may hold it, and it keeps its type.
        own = vars(callback).get(name)
        if isinstance(own, dict) and isinstance(value, dict):
            own.clear()
            own.update(value)
        elif isinstance(own, list) and isinstance(value, list):
            own[:] = value
        elif isinstance(own, deque):
            vars(callback)[name] = deque(value, own.maxlen)
        else:
            vars(callback)[name] = value


def _constructor_names(callback: Any) -> set[str]:
    names: set[str] = set()
    for kind in type(callback).__mro__:
        try:
            parameters = inspect.signature(kind.__init__).parameters
        except (TypeError, ValueError):
            break
        names |= parameters.keys()
        kinds = {parameter.kind for parameter in parameters.values()}
        # What a constructor takes as `**kwargs` are arguments of the next one.
        if not kinds & {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }:
            break
    return names | {f"_{name}" for name in names}

"""What Keras and JAX note of the code that runs in this thread: stacks of open scopes.

A scope is taken off its stack by Python code, which an exception from outside can break
off, as a second Ctrl-C does. Whatever is left would change all that follows: a variable
that is read in a stateless scope that nobody closes has no value. So who calls the
user's or Keras's code as a whole puts the stacks back to how they were.

- `global_state.GLOBAL_STATE_TRACKER`: where Keras keeps them. Goes when Keras's scopes
  are `contextvars`.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.common import global_state

from keras_distribute._compat import jax_internals

_SCOPES = (
    "stateless_scope",
    "symbolic_scope",
    "autocast_scope",
    "current_call_ctx",
    "in_tf_graph_scope",
    "tracking_on",
)
_STACKS = ("name_scope_stack", "remat_scope_stack")


class Opened:
    """The scopes that are open in this thread when it is made."""

    def __init__(self) -> None:
        self._thread = vars(global_state.GLOBAL_STATE_TRACKER)
        self._scopes = {
            name: self._thread[name] for name in _SCOPES if name in self._thread
        }
        self._new = [name for name in _SCOPES if name not in self._thread]
        self._stacks = [
            (self._thread[name], list(self._thread[name]))
            for name in _STACKS
            if name in self._thread
        ]
        self._trace = jax_internals.current_trace()

    def restore(self) -> None:
        """Closes those that were opened since."""
        self._thread.update(self._scopes)
        for name in self._new:
            self._thread.pop(name, None)
        for stack, entries in self._stacks:
            stack[:] = entries
        jax_internals.go_back_to(self._trace)


def thread_state() -> dict[str, Any]:
    """Keras's state of this thread but for what is open: the dtype policy, the
    distribution, the global seed generator.
    """
    state = vars(global_state.GLOBAL_STATE_TRACKER)
    return {name: state[name] for name in state if name not in (*_SCOPES, *_STACKS)}


def set_thread_state(state: dict[str, Any]) -> None:
    """Gives this thread the state of another one."""
    vars(global_state.GLOBAL_STATE_TRACKER).update(state)

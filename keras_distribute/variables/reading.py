"""Values read beforehand, with all processes, for code that one process runs by itself:
it saves a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import jax.numpy as jnp

from keras_distribute.devices.mesh import on_host
from keras_distribute.variables.thread import thread


def known(variable: Any) -> Any:
    """The value that was read before; `None` where none was."""
    return thread.read.get(id(variable))


@contextlib.contextmanager
def read_before(variables: Sequence[Any]) -> Generator[None]:
    """Reads the values of `variables` now, with all processes; in the `with` block each
    can read on its own.
    """
    read = {
        id(v): on_host(v._read_stored())
        for v in variables
        if v.is_read_together and v.is_initialized
    }
    before = thread.read
    thread.read = {key: jnp.asarray(value) for key, value in read.items()}
    try:
        yield
    finally:
        thread.read = before

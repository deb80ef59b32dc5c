"""Values read beforehand, with all processes, for code that one process runs by itself:
it saves a file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Any

import jax.numpy as jnp

from keras_distribute.devices.mesh import on_host


class _Known(threading.local):
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}


_known = _Known()


def known(variable: Any) -> Any:
    """The value that was read before; `None` where none was."""
    return _known.values.get(id(variable))


@contextlib.contextmanager
def read_before(variables: Sequence[Any]) -> Generator[None]:
    """Reads the values of `variables` now, with all processes; in the `with` block each
    can read on its own.
    """
    read = {
        id(v): on_host(v._read_stored())
        for v in variables
        if v.is_read_together and v.stored is not None
    }
    before, _known.values = (
        _known.values,
        {key: jnp.asarray(value) for key, value in read.items()},
    )
    try:
        yield
    finally:
        _known.values = before

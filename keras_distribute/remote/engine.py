"""ZeroMQ and msgpack, which only clusters with parameter servers need."""

from __future__ import annotations

import importlib
from typing import Any

from keras_distribute import checks


def _found(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


zmq, msgpack = _found("zmq"), _found("msgpack")
monitor, z85 = _found("zmq.utils.monitor"), _found("zmq.utils.z85")


def check_installed() -> None:
    """Raises `BackendError` where they are not installed."""
    fix = "pip install 'keras-distribute[parameter-server]', in all tasks."
    for name in ("zmq", "msgpack"):
        checks.imported(name, "Parameter servers need ZeroMQ and msgpack.", fix)

"""How a process finds the module of a function that another one has named."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def module_of(name: str, file: str | None) -> Any:
    """The module of this name, or for that of a program the one of its file."""
    if name != "__main__":
        return importlib.import_module(name)
    assert file is not None
    spec = importlib.util.spec_from_file_location("keras_distribute_main", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for it, and pickle.
    spec.loader.exec_module(module)
    return module

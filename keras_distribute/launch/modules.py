"""How a process finds the module of a function that another one has named, and the
classes of what another one has pickled.

The program of a process that starts others is `__main__` there. In these it is a module
of another name, since they run a program of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from typing import Any

MAIN = "__main__"
_MAIN_ELSEWHERE = "keras_distribute_main"


def module_of(name: str, file: str | None) -> Any:
    """The module of this name, or for that of a program the one of its file."""
    if name != MAIN:
        return importlib.import_module(name)
    if _MAIN_ELSEWHERE in sys.modules:
        return sys.modules[_MAIN_ELSEWHERE]
    assert file is not None
    spec = importlib.util.spec_from_file_location(_MAIN_ELSEWHERE, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for it, and pickle.
    spec.loader.exec_module(module)
    return module


def file_of_main() -> str | None:
    """The file of this process's program; `None` where it is in none, as a notebook."""
    return getattr(sys.modules[MAIN], "__file__", None)


def loaded(pickled: bytes, main: str | None = None) -> Any:
    """What another process has pickled.

    Args:
        pickled: By a process that this one has started; or by that which has started
            this one.
        main: The file of the latter's program.
    """
    return _Unpickler(pickled, main).load()


class _Unpickler(pickle.Unpickler):
    """Finds the classes of the program under the name that it has here."""

    def __init__(self, pickled: bytes, main: str | None) -> None:
        super().__init__(io.BytesIO(pickled))
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module == MAIN and self._main is not None:
            module = module_of(MAIN, self._main).__name__
        elif module == _MAIN_ELSEWHERE and module not in sys.modules:
            module = MAIN
        return super().find_class(module, name)

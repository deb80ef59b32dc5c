"""What each process of a `MultiProcessRunner` runs: finds the function, calls it, and writes what came of it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any


def main(folder: Path) -> int:
    """Calls the function that `folder` describes; returns the exit code."""
    call = pickle.loads((folder / "call").read_bytes())
    sys.path[:] = list(dict.fromkeys([*call["path"], *sys.path]))
    value: Any = None
    caught: BaseException | None = None
    error: str | None = None
    try:
        function: Any = module_of(call["module"], call["file"])
        for name in call["name"].split("."):
            function = getattr(function, name)
        args, kwargs = pickle.loads(call["arguments"])
        value = function(*args, **kwargs)
    except BaseException as failure:
        caught, error = failure, traceback.format_exc()
    result = folder / f"result-{os.environ['KERAS_DISTRIBUTION_PROCESS_ID']}"
    part = result.with_suffix(".part")
    part.write_bytes(pickle.dumps((value, error)))
    part.rename(result)
    if caught is None:
        return 0
    sys.excepthook(type(caught), caught, caught.__traceback__)  # As for a script.
    return 1


def module_of(name: str, file: str | None) -> Any:
    """The module of this name, or for that of a program the one of its file."""
    if name != "__main__":
        return importlib.import_module(name)
    assert file is not None
    spec = importlib.util.spec_from_file_location("keras_distribute_main", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    if code:  # Without the end of JAX's runtime, which would wait for the other processes.
        sys.stderr.flush()
        os._exit(code)

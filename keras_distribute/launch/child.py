"""What each process of a `MultiProcessRunner` runs."""

from __future__ import annotations

import operator
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from keras_distribute import checks
from keras_distribute.errors import StructureTypeError
from keras_distribute.launch.folders import check_private
from keras_distribute.launch.modules import loaded, module_of


def main(folder: Path) -> int:
    """Calls the function that `folder` names; returns the exit code."""
    check_private(folder)
    result = folder / f"result-{os.environ['KERAS_DISTRIBUTION_PROCESS_ID']}"
    call = pickle.loads((folder / "call").read_bytes())
    sys.path[:] = list(dict.fromkeys([*call["path"], *sys.path]))
    caught: BaseException | None = None
    dumps: Any = pickle.dumps
    try:
        if call["function"] is not None:
            import cloudpickle

            function, dumps = pickle.loads(call["function"]), cloudpickle.dumps
        else:
            module = module_of(call["module"], call["main"])
            function = operator.attrgetter(call["name"])(module)
        args, kwargs = loaded(call["arguments"], call["main"])
        said = _as_bytes(function(*args, **kwargs), dumps)
    except BaseException as failure:
        caught, said = failure, pickle.dumps((None, traceback.format_exc()))
    part = result.with_suffix(".part")
    part.write_bytes(said)
    part.rename(result)
    if caught is None:
        return 0
    if isinstance(caught, SystemExit):
        raise caught  # It ends a script without `sys.excepthook`.
    sys.excepthook(type(caught), caught, caught.__traceback__)  # As for a script.
    return 1


def _as_bytes(value: Any, dumps: Any) -> bytes:
    try:
        return dumps((value, None))
    except Exception as error:
        raise StructureTypeError(
            "What the function returns cannot be pickled, to be sent to its caller.",
            received=f"{checks.shown(value)}: {error}",
            fix="return NumPy arrays, numbers or texts; of a distributed value "
            "[np.asarray(v) for v in strategy.experimental_local_results(value)].",
        ) from error


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    if code:
        # Skips the end of JAX's runtime, which would wait for the other processes.
        sys.stderr.flush()
        os._exit(code)

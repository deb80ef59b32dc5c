"""Compiles for hardware in a process of its own, since a compiler may end its process.

libtpu aborts where it has no plan for a topology ("Check failed: ..."), and nothing can
catch that. The program goes to the child as what JAX would give the compiler here, and
what comes back is what the compiler says of it there. The child uses no accelerator.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jax.errors import JaxRuntimeError

from keras_distribute._compat import compiling, topologies
from keras_distribute.dry_run import targets
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import BackendError

_CHILD = "from keras_distribute.dry_run import compiling; compiling.main()"
_LAST_LINES = 12


def compiled(target: Target, lowered: Any) -> Any:
    """What the compiler of `target` makes of a `jax.stages.Lowered`.

    Raises:
        BackendError: Where the compiler ends its process, with its last lines.
        JaxRuntimeError: For a program that it refuses.
    """
    if target.platform == "cpu":  # The compiler that every program of JAX uses here.
        return lowered.compile()
    program = compiling.program_of(lowered)
    if not isinstance(program, compiling.Program):
        return program
    given = pickle.dumps((target, program))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=given,
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise _ended(target, done.returncode, done.stderr)
    result: compiling.Compiled | str = pickle.loads(done.stdout)
    if isinstance(result, str):
        raise JaxRuntimeError(result)
    return result


def _ended(target: Target, code: int, said: bytes) -> BackendError:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = said.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    text = "\n    ".join(dict.fromkeys(lines)) or "nothing"
    return BackendError(
        f"The compiler for {target.name} ended its process ({how}); this one goes on.",
        received=f"its last lines:\n    {text}",
        fix="another topology or batch, or a newer compiler: pip install -U "
        f"{' '.join(targets.PACKAGES[target.platform])}",
    )


def main() -> None:
    """In the child: compiles what comes in, and returns what the compiler says."""
    # Compilers print; what is printed must not get between the bytes of the result.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    given: tuple[Target, compiling.Program] = pickle.load(sys.stdin.buffer)
    target, program = given
    result: compiling.Compiled | str
    devices: Sequence[Any] = target.devices()
    try:
        with topologies.assembler():
            result = compiling.compiled_for(devices, program)
    except JaxRuntimeError as error:
        result = str(error)
    with out:
        pickle.dump(result, out)

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
from collections.abc import Mapping
from typing import Any

from jax.errors import JaxRuntimeError

from keras_distribute._compat import compiling, topologies
from keras_distribute.devices.launches import launches
from keras_distribute.dry_run import targets
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import BackendError

_CHILD = "from keras_distribute.dry_run import compiling; compiling.main()"
_LAST_LINES = 12


def compiled(
    target: Target, lowered: Any, options: Mapping[str, Any] | None = None
) -> Any:
    """What the compiler of `target` makes of a `jax.stages.Lowered`.

    Raises:
        BackendError: Where the compiler ends its process, with its last lines.
        JaxRuntimeError: For a program that it refuses.
    """
    # For CPUs it is the compiler of every program here.
    if target.platform == "cpu":
        return lowered.compile(dict(options) if options else None)
    with launches.tracing:
        program = compiling.program_of(lowered, options)
    if not isinstance(program, compiling.Program):
        return program
    search_path = os.pathsep.join(filter(None, sys.path))
    settings = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    # The compilers of TPUs end the process at a flag of XLA's that they do not know.
    flags = os.environ.get("XLA_FLAGS", "").split()
    settings["XLA_FLAGS"] = " ".join(f for f in flags if "xla_cpu" not in f)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps((target, program)),
        capture_output=True,
        env={**os.environ, **settings, "PYTHONPATH": search_path},
        check=False,
    )
    if done.returncode:
        raise _ended(target, done.returncode, done.stderr)
    result: compiling.Compiled | str = pickle.loads(done.stdout)
    if isinstance(result, str):
        raise JaxRuntimeError(result)
    return result


def _ended(target: Target, code: int, output: bytes) -> BackendError:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = output.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    text = "\n    ".join(dict.fromkeys(lines)) or "nothing"
    packages = " ".join(targets.PACKAGES[target.platform])
    return BackendError(
        f"The compiler for {target.name} ended its process ({how}); this one goes on.",
        received=f"its last lines:\n    {text}",
        fix="another topology or batch, or a newer compiler: pip install -U "
        f"{packages}",
    )


def main() -> None:
    """In the child: compiles what comes in, and returns what the compiler says."""
    # Compilers print, which must not get between the bytes of the result.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    target, program = pickle.load(sys.stdin.buffer)
    devices = target.devices()
    try:
        with topologies.assembler():
            result = compiling.compiled_for(devices, program)
    except JaxRuntimeError as error:
        result = str(error)
    with out:
        pickle.dump(result, out)

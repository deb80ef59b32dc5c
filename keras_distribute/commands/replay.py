"""`keras-distribute replay`: runs a step that was kept again, on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import sys
import traceback
from collections.abc import Sequence

import jax
import numpy as np

from keras_distribute import config
from keras_distribute.consistency import kept_steps
from keras_distribute.devices.names import name_of
from keras_distribute.errors import DistributeError


def main(
    arguments: Sequence[str] | None = None, prog: str = "keras-distribute replay"
) -> int:
    """The command line; returns the exit code: 1 where bits differ, 2 where the step
    cannot run here.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Runs a step that kd.callbacks.StepReplay(folder=...) has kept "
        "again, on as many devices of this machine, and compares the bits of all its "
        "results. They are to be the same on devices of the same kind with the same "
        "versions. The exit code is 1 where they are not.",
    )
    parser.add_argument("folder", type=pathlib.Path, help="such as steps/step-0000042")
    text = "use so many virtual CPU devices, in place of what JAX finds"
    parser.add_argument("--cpu-devices", type=int, metavar="N", help=text)
    options = parser.parse_args(arguments)
    try:
        if options.cpu_devices is not None:
            jax.config.update("jax_platforms", "cpu")
            config.set_cpu_devices(options.cpu_devices)
        kept = kept_steps.read(options.folder)
    except DistributeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    program, said = kept.program, kept.about
    mesh, kind = program.mesh, program.mesh.devices[0].device_kind
    now = (kind, jax.__version__, importlib.metadata.version("jaxlib"))
    before = (said["device_kind"], said["jax"], said["jaxlib"])
    if now != before:
        sys.stdout.write(f"Kept on {_in_words(before)}; this is {_in_words(now)}.\n")
    try:
        found = program.hashes(program.run_on_mesh(kept.inputs, kept.specs))
    except Exception:  # Python would end with 1, as where bits differ.
        traceback.print_exc()
        return 2
    wrong = np.argwhere(found != kept.hashes)
    names = program.result_names
    for place, column in wrong[:20]:
        sys.stdout.write(
            f"{names[column]}: {said['devices'][place]} had other bits than "
            f"{name_of(mesh.devices[place])} here.\n"
        )
    if len(wrong) > 20:
        sys.stdout.write(f"... and {len(wrong) - 20} more.\n")
    result = "not the same" if len(wrong) else "the same"
    sys.stdout.write(
        f"Step {said['step']}: {len(names)} results on {len(mesh.devices)} device(s), "
        f"{result} bits as when it was kept.\n"
    )
    return int(bool(len(wrong)))


def _in_words(system: tuple[str, str, str]) -> str:
    kind, jax_version, jaxlib_version = system
    return f"{kind}, JAX {jax_version}, jaxlib {jaxlib_version}"

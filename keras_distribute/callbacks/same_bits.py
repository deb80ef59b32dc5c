"""What must be equal beside the program for a `fit` of a deterministic strategy to go
on with the same bits elsewhere; `docs/guide/deterministic.md` lists it for users.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import warnings
from typing import Any

import jax
import keras

from keras_distribute import config
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import adoption

_MOST = re.compile(r"--xla_cpu_max_isa=(\w+)")
# Of the many that a CPU names, those with which arithmetic is compiled.
_SETS = re.compile(r"avx|fma|amx|sve|asimd")


def conditions(model: Any) -> dict[str, str]:
    """They, in words, in this process; none where bits were not promised."""
    strategy = adoption.strategy_of(model)
    if not isinstance(strategy, Strategy) or strategy.replica_mesh.series is None:
        return {}
    device = strategy.replica_mesh.devices[0]
    found = {
        "replicas": str(strategy.num_replicas_in_sync),
        "device": device.device_kind,
        "Keras": keras.__version__,
        "JAX": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    if device.platform == "cpu":
        found["threads in XLA's pool (NPROC)"] = str(config.pool()[0])
        found["instruction sets"] = _instruction_sets()
    return found


def warn_of_others(saved: dict[str, str], model: Any) -> None:
    """Warns if a `fit` that was saved under some conditions goes on under others."""
    here = conditions(model)
    both = [name for name in saved if name in here and saved[name] != here[name]]
    if both:
        then = ", ".join(f"{name}: {saved[name]}" for name in both)
        now = ", ".join(f"{name}: {here[name]}" for name in both)
        warnings.warn(
            "This fit of a deterministic strategy goes on where bits may differ from "
            f"those that it would have had. Saved with {then}; here {now}. Its numbers "
            "are right up to rounding. For the same bits, go on under the conditions "
            "that it was saved under.",
            stacklevel=2,
        )


def _instruction_sets() -> str:
    """What XLA may compile for on this CPU, as far as Linux tells."""
    if most := _MOST.search(os.environ.get("XLA_FLAGS", "")):
        return f"up to {most[1]}"
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    named = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(sorted(filter(_SETS.match, named.partition(":")[2].split())))

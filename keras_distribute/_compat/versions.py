"""Chooses the JAX backend for Keras, and refuses versions that cannot work. Runs before Keras is imported."""

from __future__ import annotations

import importlib.metadata
import os
import sys

from keras_distribute.errors import BackendError

MINIMUM = {"keras": (3, 15), "jax": (0, 10)}


def choose_backend() -> None:
    """Sets `KERAS_BACKEND=jax` when the user has chosen nothing; refuses another choice.

    A `~/.keras/keras.json` is not a choice: Keras writes that file by itself.

    Raises:
        BackendError: When Keras already runs on, or is told to use, another backend.
    """
    loaded = sys.modules.get("keras")
    backend = getattr(getattr(loaded, "config", None), "backend", None)
    chosen = backend() if callable(backend) else os.environ.get("KERAS_BACKEND", "jax")
    if chosen != "jax":
        raise BackendError(
            "keras_distribute needs Keras on JAX.",
            received=f"the {chosen!r} backend"
            + (" of an already imported Keras." if loaded is not None else " in KERAS_BACKEND."),
            fix='set os.environ["KERAS_BACKEND"] = "jax" before the first `import keras`, '
            "or import keras_distribute first.",
        )
    os.environ["KERAS_BACKEND"] = "jax"


def check_versions() -> None:
    """Refuses a Keras or JAX that is too old.

    Raises:
        BackendError: With the command that installs a version that works.
    """
    for package, minimum in MINIMUM.items():
        installed = importlib.metadata.version(package)
        if _release(installed) < minimum:
            wanted = ".".join(map(str, minimum))
            raise BackendError(
                f"keras_distribute needs {package} {wanted} or newer.",
                received=f"{package} {installed}.",
                fix=f"pip install '{package}>={wanted}'",
            )


def _release(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)

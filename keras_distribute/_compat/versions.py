"""Chooses the JAX backend for Keras, and refuses versions that cannot work. Runs before
Keras is used.
"""

from __future__ import annotations

import os
import sys
import warnings

from packaging.version import Version

from keras_distribute.errors import BackendError

MINIMUM = {"keras": "3.15", "jax": "0.10"}
# The newest that tests were run with: `scripts/newest`. See the README for how many.
TESTED = {"keras": "3.16.0.dev2026102704", "jax": "0.12.0.1"}


def choose_backend() -> None:
    """Sets `KERAS_BACKEND=jax` when the user has chosen nothing; refuses another
    choice.

    A `~/.keras/keras.json` is not a choice: Keras writes that file by itself.
    """
    loaded = sys.modules.get("keras")
    backend = getattr(getattr(loaded, "config", None), "backend", None)
    # To Keras, too, an empty variable is no choice.
    in_environment = os.environ.get("KERAS_BACKEND") or "jax"
    chosen = backend() if callable(backend) else in_environment
    if chosen != "jax":
        raise BackendError(
            "keras_distribute needs Keras on JAX.",
            received=f"the {chosen!r} backend"
            + (
                " of an already imported Keras."
                if loaded is not None
                else " in KERAS_BACKEND."
            ),
            fix='set os.environ["KERAS_BACKEND"] = "jax" before the first `import '
            "keras`, or import keras_distribute first.",
        )
    os.environ["KERAS_BACKEND"] = "jax"


def check_versions() -> None:
    """Refuses a Keras or JAX that is too old, and warns of one that is newer than any
    that was tested.
    """
    untested: list[str] = []
    for package, version in _versions().items():
        if Version(version).release < Version(MINIMUM[package]).release:
            raise BackendError(
                f"keras_distribute needs {package} {MINIMUM[package]} or newer.",
                received=f"{package} {version}.",
                fix=f"pip install '{package}>={MINIMUM[package]}'",
            )
        if _is_beyond(Version(version), Version(TESTED[package])):
            untested.append(f"{package} {version}")
    if untested:
        warnings.warn(
            f"keras_distribute was not tested with {' and '.join(untested)}; the "
            "newest that were tested are "
            f"{newest_tested()}. To have those: pip install {requirements()}",
            stacklevel=3,
        )


def installed() -> str:
    """The versions of Keras and JAX that are in use, as text."""
    return ", ".join(f"{package} {version}" for package, version in _versions().items())


def newest_tested() -> str:
    """The newest versions that were tested, as text."""
    return ", ".join(f"{package} {version}" for package, version in TESTED.items())


def requirements() -> str:
    """What to give to `pip install` for versions that were tested."""
    # A nightly is another package: `keras` has releases alone.
    limits = {
        package: f"<{Version(version).base_version}"
        if Version(version).is_prerelease
        else f"<={version}"
        for package, version in TESTED.items()
    }
    return " ".join(
        f"'{package}>={MINIMUM[package]},{limit}'" for package, limit in limits.items()
    )


def _versions() -> dict[str, str]:
    # As the modules say it: `keras-nightly` has another name among the packages.
    import jax
    import keras

    return {"keras": keras.__version__, "jax": jax.__version__}


def _is_beyond(version: Version, tested: Version) -> bool:
    """Whether a version is of a later release than the tested one, or later than the
    nightly that was.
    """
    if tested.is_prerelease:
        return version > tested
    return version.release[:2] > tested.release[:2]

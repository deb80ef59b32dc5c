"""What compilers have said of programs, kept so that none is asked twice: in this
process, and in the folder of JAX's persistent compilation cache where one is set
(`jax_compilation_cache_dir`).

JAX's own cache has executables, which cannot be read back for devices that are not
there; kept here is what a dry run reads of them. Programs for CPU devices are in JAX's
cache anyway, and here only for the time of the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from keras_distribute._compat.compiling import Compiled
from keras_distribute.dry_run import targets
from keras_distribute.dry_run.targets import Target

# The most answers of a process: a program's text has up to some 10 MB, a tenth of that
# compressed.
_MOST_KEPT = 32
# The paths of JAX's names, with those of layers, in a program's text; other locations
# are files, and functions of Python.
_NAMES = re.compile(r'loc\("([^"/][^"]*/[^"]*)"')
# What else compilers listen to.
_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")

_kept: OrderedDict[str, bytes] = OrderedDict()
_lock = threading.Lock()


def key_of(target: Target, lowered: Any, options: Mapping[str, Any]) -> str:
    """A name for a program and all that decides what its compiler makes of it.

    The lines of Python that a program comes from are no part of it, the names of layers
    are: a report shows them.
    """
    names = sorted(set(_NAMES.findall(lowered.as_text(debug_info=True))))
    packages = ("jax", "jaxlib", *targets.PACKAGES[target.platform])
    parts = [
        target.name.lower(),
        lowered.as_text(),
        *names,
        *(f"{name}={value}" for name, value in sorted(options.items())),
        *(f"{name} {importlib.metadata.version(name)}" for name in packages),
        *(f"{name}={os.environ.get(name)}" for name in _SETTINGS),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def kept(target: Target, key: str) -> Compiled | str | None:
    """The answer of an earlier compilation: the program, or why it was refused."""
    packed = _kept.get(key)
    if packed is None and (path := _path(target, key)) is not None:
        with contextlib.suppress(OSError):
            packed = path.read_bytes()
    if packed is None:
        return None
    # A file that is broken, or of another version, is none.
    with contextlib.suppress(zlib.error, ValueError, TypeError):
        answer = json.loads(zlib.decompress(packed))
        _remember(key, packed)
        return answer if isinstance(answer, str) else Compiled(**answer)
    return None


def keep(target: Target, key: str, answer: Compiled | str) -> None:
    """Keeps an answer; a folder that cannot be written to is left alone."""
    said = answer if isinstance(answer, str) else answer._asdict()
    packed = zlib.compress(json.dumps(said).encode(), 1)
    _remember(key, packed)
    path = _path(target, key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed)
            # Whole or not at all: another process may read it.
            Path(name).replace(path)
        except BaseException:
            os.unlink(name)
            raise


def forget() -> None:
    """Forgets what this process keeps; files stay."""
    _kept.clear()


def _remember(key: str, packed: bytes) -> None:
    with _lock:
        _kept[key] = packed
        _kept.move_to_end(key)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)


def folder() -> Path | None:
    """Where answers are kept for other processes; `None` without a persistent
    compilation cache on this machine.
    """
    name = jax.config.values["jax_compilation_cache_dir"]
    is_on = jax.config.values["jax_enable_compilation_cache"]
    return Path(name) if name and is_on and "://" not in name else None


def _path(target: Target, key: str) -> Path | None:
    """The file of an answer."""
    if target.platform == "cpu" or (inside := folder()) is None:
        return None
    return inside / f"dry-run-{key}.json.z"

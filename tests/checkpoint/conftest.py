"""Programs are compiled once for all tests of this folder and the processes that they
start: it is what takes time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(autouse=True, scope="session")
def compilation_cache(tmp_path_factory: Any) -> Any:
    """JAX's cache on disk, shared by the workers of pytest-xdist."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    base = tmp_path_factory.getbasetemp()
    folder = str(
        (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    )
    settings = {"jax_compilation_cache_dir": folder, **CACHE}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    os.environ |= {name.upper(): str(value) for name, value in settings.items()}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        os.environ.pop(name.upper(), None)
    compilation_cache.reset_cache()

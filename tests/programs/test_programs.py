"""Each program gives on replicas what it gives on one device."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pathlib
from typing import Any

import jax
import pytest

from . import comparing

pytestmark = pytest.mark.timeout(600)

FILES = pathlib.Path(__file__).parent.glob("*.py")
NAMES = sorted(
    path.stem
    for path in FILES
    if path.stem not in ("__init__", "comparing") and not path.stem.startswith("test_")
)
REPLICAS = (2, 4, 8) if os.environ.get("EVERY_CASE") else (4,)


def program_of(name: str) -> comparing.Program:
    """The program of a file; skips where a library is missing that it needs."""
    return importlib.import_module(f".{name}", __package__).program


@functools.cache
def plain(name: str) -> Any:
    """Its outcome on one device."""
    return comparing.outcome(program_of(name))


@pytest.fixture(autouse=True)
def compiled_programs_end():
    """Nothing of one is used by the next, and all together would fill the memory."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.mark.sampled(28)
@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("name", NAMES)
def test_program(name: str, num_replicas: int) -> None:
    """All that it returns is equal: losses, weights, optimizer state, predictions."""
    expected = plain(name)
    comparing.assert_same(comparing.outcome(program_of(name), num_replicas), expected)

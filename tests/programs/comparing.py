"""Run a program plain or on replicas, and bring what it returns into a form to compare.

The comparison itself is that of `tests/exactness/harness.py`. A program returns a
structure of numbers, models and optimizers; of a model the weights count, and its
optimizer's variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from tests.exactness import harness

Program = Callable[[], Any]


def outcome(program: Program, num_replicas: int | None = None) -> Any:
    """The numbers of a program, run wholly in a scope of so many devices, or none."""
    keras.utils.set_random_seed(harness.SEED)
    if num_replicas is None:
        return numbers(program())
    strategy = harness.mirrored(num_replicas)
    with strategy.scope():
        returned = program()
    for model in models(returned):
        harness.assert_devices_agree(model)
        assert_on_devices(model, num_replicas)
    return numbers(returned)


def assert_same(actual: Any, expected: Any) -> None:
    """All numbers agree, and are numbers."""
    assert_finite(expected, "result")
    harness.assert_close_tree(actual, expected, "result")


def assert_on_devices(model: keras.Model, num_devices: int) -> None:
    """Each weight is on so many devices: the program did train on replicas."""
    for variable in model.weights:
        assert isinstance(variable.value, jax.Array)
        devices = len(variable.value.sharding.device_set)
        assert devices == num_devices, f"{variable.path} is on {devices} devices"


def models(returned: Any) -> list[keras.Model]:
    """The models in a structure."""
    if isinstance(returned, keras.Model):
        return [returned]
    if isinstance(returned, dict):
        returned = list(returned.values())
    if isinstance(returned, (list, tuple)):
        return [model for item in returned for model in models(item)]
    return []


def numbers(returned: Any) -> Any:
    """The structure with arrays in place of models, optimizers and histories."""
    if isinstance(returned, keras.Model):
        optimizer = getattr(returned, "optimizer", None)
        weights = values(returned.variables)
        return {
            "variables": weights,
            "optimizer": values(optimizer.variables) if optimizer is not None else [],
        }
    if isinstance(returned, keras.optimizers.Optimizer):
        return values(returned.variables)
    if isinstance(returned, keras.callbacks.History):
        return numbers(returned.history)
    if isinstance(returned, dict):
        return {str(key): numbers(value) for key, value in returned.items()}
    if isinstance(returned, (list, tuple)):
        return [numbers(item) for item in returned]
    return np.asarray(returned)


def values(variables: list[keras.Variable]) -> list[list[np.ndarray]]:
    """Their values; each in a list, as shapes differ."""
    return [[value] for _, value in harness.snapshot(variables)]


def assert_finite(found: Any, what: str) -> None:
    """No NaN and no infinity: what went wrong on one device would compare equal."""
    if isinstance(found, dict):
        for key, value in found.items():
            assert_finite(value, f"{what}[{key!r}]")
    elif isinstance(found, list):
        for index, value in enumerate(found):
            assert_finite(value, f"{what}[{index}]")
    elif found.dtype.kind == "f":
        assert np.isfinite(found).all(), f"{what} is not finite"

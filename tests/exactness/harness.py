"""Train the same thing on one device and under a strategy, and compare all that can be
seen of it.

`observe` builds a model and runs something with it, once; `equals_one_device` does so
twice and compares the two outcomes. What is compared: initial weights, final weights,
optimizer state, and whatever the run returned (history, evaluation, predictions,
numbers recorded by callbacks). On the way it checks that every device holds the same
bits of every variable that the strategy replicates. It builds no models: those are in
`zoo` and in the tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from keras import tree

from tests.support import mirrored

SEED = 1301
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

RTOL = 1e-5
# Rounding is relative to the terms of a sum, not to the sum: an entry near zero carries
# the error of terms as large as its array's largest entry. 1e-6 of that entry is about
# eight float32 roundings (2**-23 each).
FLOOR = 1e-6

Build = Callable[[], keras.Model]
Run = Callable[[keras.Model], Any]


@dataclass(frozen=True)
class Outcome:
    """What one training run left behind; lists of `(path, value)` in creation order."""

    initial: list[tuple[str, np.ndarray]]
    weights: list[tuple[str, np.ndarray]]
    optimizer: list[tuple[str, np.ndarray]]
    result: Any
    model: keras.Model


def snapshot(variables: list[keras.Variable]) -> list[tuple[str, np.ndarray]]:
    """Paths and NumPy values of the variables.

    A variable whose buffer is gone is NaN: after `fit` with `use_ema`, Keras lets a
    weight and its average share one buffer, which `evaluate` then donates. The average
    equals the weight there, so nothing goes unchecked.
    """
    found = []
    for variable in variables:
        gone = isinstance(variable.value, jax.Array) and variable.value.is_deleted()
        found.append(
            (variable.path, np.array(np.nan) if gone else np.array(variable.value))
        )
    return found


def observe(
    build: Build, run: Run, strategy: Any = None, fit_in_scope: bool = False
) -> Outcome:
    """Build in the strategy's scope (or in none), run, and record the outcome."""
    keras.utils.set_random_seed(SEED)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
    initial = snapshot(model.weights)
    keras.utils.set_random_seed(SEED + 1)
    with (
        strategy.scope()
        if strategy is not None and fit_in_scope
        else contextlib.nullcontext()
    ):
        result = run(model)
    if strategy is not None:
        assert_devices_agree(model)
    optimizer = getattr(model, "optimizer", None)
    return Outcome(
        initial=initial,
        weights=snapshot(model.weights),
        optimizer=snapshot(optimizer.variables) if optimizer is not None else [],
        result=result,
        model=model,
    )


def equals_one_device(
    build: Build,
    run: Run,
    num_replicas: int = 4,
    *,
    rtol: float = RTOL,
    floor: float = FLOOR,
    reference: Outcome | None = None,
    fit_in_scope: bool = False,
) -> Outcome:
    """Run on one device and under a strategy, assert that the outcomes are equal,
    return the strategy's.
    """
    expected = reference if reference is not None else observe(build, run)
    actual = observe(build, run, mirrored(num_replicas), fit_in_scope=fit_in_scope)
    assert_same_outcome(actual, expected, rtol=rtol, floor=floor)
    return actual


def assert_same_outcome(
    actual: Outcome, expected: Outcome, *, rtol: float = RTOL, floor: float = FLOOR
) -> None:
    """Every weight, optimizer variable and returned number agrees."""
    assert len(actual.initial) == len(expected.initial), (
        "one of the models was built before, the other was not"
    )
    for (_, ours), (path, theirs) in zip(actual.initial, expected.initial, strict=True):
        assert_close(ours, theirs, f"initial {path}", rtol=0.0, floor=0.0)
    assert_close_tree(actual.result, expected.result, "result", rtol=rtol, floor=floor)
    for (_, ours), (path, theirs) in zip(actual.weights, expected.weights, strict=True):
        assert not np.isnan(theirs).any(), f"{path} diverges: NaNs agree with any NaNs"
        assert_close(ours, theirs, path, rtol=rtol, floor=floor)
    for (_, ours), (path, theirs) in zip(
        actual.optimizer, expected.optimizer, strict=True
    ):
        if np.isnan(theirs).all():  # Gone on one device: see `snapshot`.
            continue
        assert_close(ours, theirs, f"optimizer {path}", rtol=rtol, floor=floor)


def assert_close_tree(
    actual: Any, expected: Any, what: str, *, rtol: float = RTOL, floor: float = FLOOR
) -> None:
    """Two structures of numbers agree, keys included."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and sorted(actual) == sorted(expected), (
            f"{what}: {actual} != {expected}"
        )
        for key in expected:
            assert_close_tree(
                actual[key], expected[key], f"{what}[{key!r}]", rtol=rtol, floor=floor
            )
    elif isinstance(expected, (list, tuple)) and any(
        isinstance(item, (list, tuple, dict)) for item in expected
    ):
        assert len(actual) == len(expected), (
            f"{what}: {len(actual)} entries, {len(expected)} expected"
        )
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_close_tree(ours, theirs, f"{what}[{index}]", rtol=rtol, floor=floor)
    elif isinstance(expected, (list, tuple)) and any(
        np.ndim(item) > 0 for item in expected
    ):
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_close(
                np.asarray(ours),
                np.asarray(theirs),
                f"{what}[{index}]",
                rtol=rtol,
                floor=floor,
            )
    elif expected is None or isinstance(expected, (str, type)):
        assert actual == expected, f"{what}: {actual!r} != {expected!r}"
    else:
        assert_close(
            np.asarray(actual), np.asarray(expected), what, rtol=rtol, floor=floor
        )


def assert_close(
    actual: np.ndarray, expected: np.ndarray, what: str, *, rtol: float, floor: float
) -> None:
    """One array agrees: shape, type, NaNs, and each entry within `rtol` of itself plus
    `floor` of the largest.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    assert actual.dtype == expected.dtype, (
        f"{what}: {actual.dtype}, expected {expected.dtype}"
    )
    if expected.size == 0 or expected.dtype.kind not in "fV":
        assert np.array_equal(actual, expected), f"{what}: {actual} != {expected}"
        return
    ours, theirs = actual.astype("float64"), expected.astype("float64")
    largest = np.max(np.abs(theirs), initial=1.0, where=np.isfinite(theirs))
    limit = rtol * np.abs(np.where(np.isfinite(theirs), theirs, 0.0)) + floor * largest
    with np.errstate(invalid="ignore"):
        wrong = ~(
            (np.abs(ours - theirs) <= limit)
            | (ours == theirs)
            | (np.isnan(ours) & np.isnan(theirs))
        )
    if np.any(wrong):
        where = (
            tuple(int(index[0]) for index in np.nonzero(wrong)) if wrong.ndim else ()
        )
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} entries differ, first at {where}:"
            f" {ours[where]!r}, expected {theirs[where]!r};"
            f" largest difference {np.nanmax(np.abs(ours - theirs)):.3e}"
        )


def assert_devices_agree(model: keras.Model) -> None:
    """Shards of the same part of a variable hold the same bits on every device."""
    optimizer = getattr(model, "optimizer", None)
    for variable in [
        *model.variables,
        *(optimizer.variables if optimizer is not None else []),
    ]:
        value = variable.value
        if not isinstance(value, jax.Array) or value.is_deleted():
            continue
        first: dict[str, np.ndarray] = {}
        for shard in value.addressable_shards:
            bits = np.asarray(shard.data)
            expected = first.setdefault(str(shard.index), bits)
            assert bits.tobytes() == expected.tobytes(), (
                f"{variable.path} differs on {shard.device}"
            )


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that XLA compiles in the block, one for each."""
    names: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == COMPILE_EVENT:
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def error_class(action: Callable[[], Any]) -> type[BaseException] | None:
    """The class of the error that the action raises, or None."""
    try:
        action()
    except Exception as error:
        return type(error)
    return None


def fit_evaluate_predict(
    x: Any, y: Any, *, batch_size: int = 32, epochs: int = 2, **options: Any
) -> Run:
    """A run on arrays: fit without shuffling, then evaluate and predict on them."""
    weights = options.get("sample_weight")

    def run(model: keras.Model) -> dict[str, Any]:
        settings = {"shuffle": False, **options}
        history = model.fit(
            x, y, batch_size=batch_size, epochs=epochs, verbose=0, **settings
        ).history
        evaluation = model.evaluate(
            x,
            y,
            batch_size=batch_size,
            sample_weight=weights,
            return_dict=True,
            verbose=0,
        )
        predictions = model.predict(x, batch_size=batch_size, verbose=0)
        return {
            "history": history,
            "evaluation": evaluation,
            "predictions": predictions,
        }

    return run


def fit_only(
    x: Any, y: Any, *, batch_size: int = 32, epochs: int = 2, **options: Any
) -> Run:
    """A run on arrays: fit without shuffling and nothing else, where compiling the rest
    would only cost time.
    """

    def run(model: keras.Model) -> dict[str, Any]:
        settings = {"shuffle": False, "verbose": 0, **options}
        return model.fit(x, y, batch_size=batch_size, epochs=epochs, **settings).history

    return run


def table(
    num_rows: int, num_columns: int = 6, num_classes: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Normal features and integer classes that depend on them."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(num_rows, num_columns)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(num_columns, num_classes)), axis=-1).astype(
        "int32"
    )
    return x, y


def sizes(structure: Any) -> list[int]:
    """The leading sizes of a structure's arrays."""
    return [len(leaf) for leaf in tree.flatten(structure)]

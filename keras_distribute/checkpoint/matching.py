"""Whether a checkpoint fits the objects that it is restored into, and the outcome."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute.checkpoint.manifest import ArrayRecord, Manifest
from keras_distribute.checkpoint.tracking import Tracked
from keras_distribute.errors import CheckpointError

_LISTED = 50


@dataclasses.dataclass(frozen=True)
class RestoreStatus:
    """What `Checkpoint.restore` did. Names are those of the checkpoint:
    `model/variables/dense/kernel`.

    Restoring is strict, so without `partial=True` nothing is missing and nothing is
    unexpected. The methods are those that `tf.train.Checkpoint.restore` promises of its
    result.

    Args:
        path: The folder restored from; `None` if there was none.
        step: The step that a `CheckpointManager` saved it for.
        metrics: The numbers given to `CheckpointManager.save` along with it.
        restored: Names of variables and objects that have the checkpoint's values now.
        missing: Names that the objects have and the checkpoint lacks; they are as
            before.
        unexpected: Names that the checkpoint has and the objects lack.
        unbuilt: Names of metrics given to `compile` that have no variables before the
            first batch. They are left out, since `fit`, `evaluate` and `train_on_batch`
            reset them before they use them. And names of the outer optimizer of local
            steps, where there are none.
        damaged: With `fallback=True`, the folders that were passed over, and why.

    Source: `tf.train.Checkpoint.restore`.
    """

    path: str | None = None
    step: int | None = None
    metrics: dict[str, float] | None = None
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unbuilt: tuple[str, ...] = ()
    damaged: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def assert_consumed(self) -> RestoreStatus:
        """Raises `CheckpointError` unless checkpoint and objects hold the same
        variables.
        """
        if self.missing or self.unexpected:
            raise mismatch(self.path, self.missing, self.unexpected)
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Raises `CheckpointError` if the checkpoint lacks a variable that the objects
        have.
        """
        if self.missing:
            raise mismatch(self.path, self.missing)
        return self

    def expect_partial(self) -> RestoreStatus:
        """Does nothing: `partial=True` says it before anything is restored."""
        return self


@dataclasses.dataclass(frozen=True)
class Match:
    """Which names are in both, and which in one only."""

    variables: list[str]
    objects: list[str]
    missing: list[str]
    unexpected: list[str]
    unbuilt: list[str]


def match(
    path: str,
    manifest: Manifest,
    arrays: dict[str, ArrayRecord],
    tracked: Tracked,
    *,
    partial: bool = False,
) -> Match:
    """Compares names, shapes and types.

    Args:
        path: The checkpoint's folder, for error texts.
        arrays: Shapes and types of its arrays.
        tracked: What the objects hold.
        partial: Whether names may be in one of them only.

    Raises:
        CheckpointError: With the name of each variable that does not fit.
    """
    saved = manifest.variables.keys() | manifest.objects.keys()
    present = tracked.variables.keys() | tracked.stateful.keys()
    extra, absent = sorted(saved - present), sorted(present - saved)
    unbuilt = [
        name
        for name in extra
        if name.startswith(tuple(tracked.unbuilt)) or _is_outer(name)
    ]
    unexpected = [name for name in extra if name not in set(unbuilt)]
    missing = [
        name
        for name in absent
        if not name.startswith(tuple(manifest.unbuilt)) and not _is_outer(name)
    ]
    variables = [name for name in tracked.variables if name in manifest.variables]
    here = {name: _form(variable) for name, variable in tracked.variables.items()}
    there = {name: _saved_form(manifest, arrays, name) for name in manifest.variables}
    differing = [
        f"{name}: {there[name]} in the checkpoint, {here[name]} here"
        for name in variables
        if there[name] != here[name]
    ]
    differing += [
        f"{name}: a variable in one, an object with a state in the other"
        for name in saved & present
        if (name in manifest.variables) != (name in tracked.variables)
    ]
    older = _of_older_version(missing, manifest)
    needed = [name for name in missing if name not in older]
    if differing or (not partial and (needed or unexpected)):
        raise mismatch(
            path,
            _described(missing, here, tracked.variables),
            _described(unexpected, there, manifest.variables),
            sorted(differing),
            _other_optimizers(manifest, tracked),
        )
    if older and not partial:
        warnings.warn(
            f"The checkpoint {path!r} does not say to which data "
            f"{checks.listed(older)} was adapted: keras_distribute 0.1 saved that with "
            "no model. Adapt to the same data as then, and save once more.",
            stacklevel=2,
        )
    objects = [name for name in tracked.stateful if name in manifest.objects]
    return Match(variables, objects, missing, unexpected, unbuilt)


def _of_older_version(missing: Sequence[str], manifest: Manifest) -> list[str]:
    """What is missing of adapted layers, in a checkpoint that has that of none."""
    if any(map(_is_adapted, manifest.objects)):
        return []
    return [name for name in missing if _is_adapted(name)]


def _is_adapted(name: str) -> bool:
    return name.split("/")[1:2] == ["adapted"]


def _is_outer(name: str) -> bool:
    """Whether a variable is one of an outer optimizer, which only local steps have."""
    return name.split("/")[1:2] == ["outer_optimizer"]


def mismatch(
    path: str | None,
    missing: Sequence[str],
    unexpected: Sequence[str] = (),
    differing: Sequence[str] = (),
    optimizers: Sequence[str] = (),
) -> CheckpointError:
    """The error for a checkpoint of something else."""
    parts = [
        ("missing in the checkpoint", missing),
        ("in the checkpoint only", unexpected),
        ("of another shape or type", differing),
    ]
    counted = ", ".join(f"{len(names)} {what}" for what, names in parts if names)
    lines = [f"The checkpoint {path!r} is of something else: {counted}.", *optimizers]
    for what, names in parts:
        lines += [f"{what}: {name}" for name in names[:_LISTED]]
        if len(names) > _LISTED:
            lines.append(f"{what}: and {len(names) - _LISTED} more")
    return CheckpointError(
        "\n    ".join(lines),
        fix="build the same objects as when it was saved (an optimizer of a custom "
        "loop with optimizer.build(model.trainable_variables)), or restore(..., "
        "partial=True) for what has the same name.",
    )


def _other_optimizers(manifest: Manifest, tracked: Tracked) -> list[str]:
    here = {name: type(each).__name__ for name, each in tracked.optimizers.items()}
    return [
        f"{name}: {manifest.optimizers[name]} in the checkpoint, {here[name]} here"
        for name in sorted(manifest.optimizers.keys() & here.keys())
        if manifest.optimizers[name] != here[name]
    ]


def _described(
    names: list[str], forms: dict[str, str], variables: Mapping[str, Any]
) -> list[str]:
    return [f"{n} {forms[n]} ({variables[n].path})" if n in forms else n for n in names]


def _form(variable: Any) -> str:
    # A "float64" of Keras is a float32 of JAX, unless that has x64.
    return f"{tuple(variable.shape)} {jax.dtypes.canonicalize_dtype(variable.dtype)}"


def _saved_form(manifest: Manifest, arrays: dict[str, ArrayRecord], name: str) -> str:
    record, has_components = arrays[name], manifest.variables[name].replicas is not None
    shape = record.shape[1:] if has_components else record.shape
    return f"{shape} {record.dtype}"

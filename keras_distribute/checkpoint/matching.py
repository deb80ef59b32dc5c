"""Whether a checkpoint fits the objects that it is to be restored into, and what became
of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
            reset them before they use them.
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
            raise mismatch(
                str(self.path), list(self.missing), list(self.unexpected), [], []
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Raises `CheckpointError` if the checkpoint lacks a variable that the objects
        have.
        """
        if self.missing:
            raise mismatch(str(self.path), list(self.missing), [], [], [])
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
        manifest: What the checkpoint holds.
        arrays: Shapes and types of its arrays.
        tracked: What the objects hold.
        partial: Whether names may be in one of them only.

    Raises:
        CheckpointError: With the name of each variable that does not fit.
    """
    saved = manifest.variables.keys() | manifest.objects.keys()
    present = tracked.variables.keys() | tracked.stateful.keys()
    unbuilt = [
        name for name in saved - present if name.startswith(tuple(tracked.unbuilt))
    ]
    missing = [
        name for name in present - saved if not name.startswith(tuple(manifest.unbuilt))
    ]
    unexpected = [name for name in saved - present if name not in set(unbuilt)]
    shapes = [
        f"{name}: {_form(*saved_form)} in the checkpoint, {_form(*form)} here"
        for name, variable in tracked.variables.items()
        if name in manifest.variables
        for saved_form, form in [
            (
                _saved_form(manifest, arrays, name),
                (tuple(variable.shape), variable.dtype),
            )
        ]
        if saved_form != form
    ]
    shapes += [
        f"{name}: a variable in one, an object with a state in the other"
        for name in saved & present
        if (name in manifest.variables) != (name in tracked.variables)
    ]
    if shapes or (not partial and (missing or unexpected)):
        described = [_described(name, tracked) for name in sorted(missing)]
        named = [_saved_as(name, manifest, arrays) for name in sorted(unexpected)]
        raise mismatch(
            path, described, named, sorted(shapes), _other_optimizers(manifest, tracked)
        )
    return Match(
        variables=[name for name in tracked.variables if name in manifest.variables],
        objects=[name for name in tracked.stateful if name in manifest.objects],
        missing=sorted(missing),
        unexpected=sorted(unexpected),
        unbuilt=sorted(unbuilt),
    )


def mismatch(
    path: str,
    missing: list[str],
    unexpected: list[str],
    shapes: list[str],
    optimizers: list[str],
) -> CheckpointError:
    """The error for a checkpoint of something else."""
    parts = [
        ("missing in the checkpoint", missing),
        ("in the checkpoint only", unexpected),
        ("of another shape or type", shapes),
    ]
    counted = ", ".join(f"{len(names)} {what}" for what, names in parts if names)
    lines = [
        f"The checkpoint {path!r} is of something else: {counted}.",
        *(f"    {line}" for line in optimizers),
    ]
    for what, names in parts:
        lines += [f"    {what}: {name}" for name in names[:_LISTED]]
        lines += (
            [f"    {what}: and {len(names) - _LISTED} more"]
            if len(names) > _LISTED
            else []
        )
    return CheckpointError(
        "\n".join(lines),
        fix="build the same objects as when it was saved (an optimizer of a custom "
        "loop with "
        "optimizer.build(model.trainable_variables)), or restore(..., partial=True) "
        "for what has the same name.",
    )


def _other_optimizers(manifest: Manifest, tracked: Tracked) -> list[str]:
    here = {
        name: type(optimizer).__name__ for name, optimizer in tracked.optimizers.items()
    }
    return [
        f"{name}: {manifest.optimizers[name]} in the checkpoint, {here[name]} here"
        for name in sorted(manifest.optimizers.keys() & here.keys())
        if manifest.optimizers[name] != here[name]
    ]


def _saved_form(
    manifest: Manifest, arrays: dict[str, ArrayRecord], name: str
) -> tuple[tuple[int, ...], str]:
    record = arrays[name]
    return record.shape[1:] if manifest.variables[
        name
    ].replicas is not None else record.shape, record.dtype


def _form(shape: tuple[int, ...], dtype: str) -> str:
    return f"{shape} {dtype}"


def _described(name: str, tracked: Tracked) -> str:
    variable: Any = tracked.variables.get(name)
    return (
        name
        if variable is None
        else f"{name} {_form(tuple(variable.shape), variable.dtype)} ({variable.path})"
    )


def _saved_as(name: str, manifest: Manifest, arrays: dict[str, ArrayRecord]) -> str:
    if name not in manifest.variables:
        return name
    return f"{name} {_form(*_saved_form(manifest, arrays, name))} ({manifest.variables[name].path})"

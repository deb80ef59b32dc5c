"""How variables are divided over the logical devices of a replica: Keras's `LayoutMap`,
in the axes of our mesh.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_distribute.devices.mesh import LOGICAL_AXIS, ReplicaMesh
from keras_distribute.devices.placement import Layout
from keras_distribute.errors import StructureTypeError, ValueStructureError

_SHOWN = 6
LayoutMap = keras.distribution.LayoutMap | Mapping[str, tuple[str | None, ...]]


class LayoutMapLayouts:
    """What a layout map says of the variables of a strategy.

    Args:
        layout_map: Keras's, or a dictionary: from regular expressions of paths to a
            name or `None` for each dimension. `"logical"` names all logical devices. Of
            a map with a `DeviceMesh`, whose shape must be `(num_replicas, logical
            devices of each)`, the name of the second axis does.
        mesh: Of the strategy.

    Raises:
        StructureTypeError: For anything else.
        ValueStructureError: For another name, and for another mesh.
    """

    def __init__(self, layout_map: Any, mesh: ReplicaMesh) -> None:
        self._mesh = mesh
        self._map = _as_layout_map(layout_map)
        self._names: dict[str, tuple[str, ...]] = {LOGICAL_AXIS: mesh.logical_axes}
        self._names |= {name: (name,) for name in mesh.logical_axes}
        own = self._map.device_mesh
        if own is not None:
            expected = (mesh.num_replicas, mesh.num_logical)
            if tuple(own.shape) != expected:
                raise ValueStructureError(
                    "The mesh of the layout map has an axis for the replicas and one "
                    "for the logical devices of each.",
                    received=f"a DeviceMesh of shape {tuple(own.shape)}, for "
                    f"{expected[0]} replica(s) x {expected[1]} logical device(s).",
                    fix="keras.distribution.LayoutMap(None), with layouts like (None, "
                    '"logical")',
                )
            self._names[own.axis_names[1]] = mesh.logical_axes
        for pattern in self._map:
            self._axes(pattern, self._map[pattern].axes)
        self._unused = set(self._map)

    def of(self, path: str, shape: tuple[int, ...]) -> Layout:
        """The layout of one variable.

        Raises:
            ValueStructureError: Where it does not fit the variable's shape.
        """
        found = self._map[path]
        if found is None:
            return Layout()
        self._unused -= {
            key for key in self._unused if key == path or re.fullmatch(key, path)
        }
        layout = tuple(found.axes)
        axes = self._axes(path, layout)
        if len(axes) != len(shape):
            raise ValueStructureError(
                f"The layout of {path!r} has {len(axes)} dimension(s), the variable "
                f"{len(shape)}.",
                received=f"the layout {layout} for the shape {shape}.",
                fix="a name or None for each dimension of the variable.",
            )
        for i, (names, size) in enumerate(zip(axes, shape, strict=True)):
            parts = math.prod(self._mesh.mesh.shape[name] for name in names or ())
            if size % parts:
                raise ValueStructureError(
                    f"Dimension {i} of {path!r} does not divide over {parts} logical "
                    "devices.",
                    received=f"the layout {layout} for the shape {shape}.",
                    fix=f"a multiple of {parts}, or None in the layout.",
                )
        return Layout(
            tuple(names[0] if names and len(names) == 1 else names for names in axes)
        )

    def warn_of_unused(self, paths: Sequence[str]) -> None:
        """Warns, once, of layouts that no variable has so far; a pattern matches the
        whole path of a variable.

        Args:
            paths: Of the variables of a model that is about to be trained.
        """
        unused, self._unused = sorted(self._unused), set[str]()
        if not unused:
            return
        named = [f"{each!r}{_closest(each, paths)}" for each in unused]
        warnings.warn(
            f"No variable has the layout of {', '.join(named)} in the "
            "strategy's layout_map: what they "
            "were meant for is whole on every logical device. A pattern matches the "
            "whole path of a variable; the model has "
            f"{', '.join(paths[:_SHOWN])}{', ...' if len(paths) > _SHOWN else ''}.",
            stacklevel=2,
        )

    def _axes(self, path: str, layout: Any) -> list[tuple[str, ...] | None]:
        unknown = [
            name for name in layout if name is not None and name not in self._names
        ]
        if unknown:
            raise ValueStructureError(
                f"A variable cannot be divided over {unknown[0]!r}.",
                received=f"the layout {tuple(layout)} of {path!r}.",
                fix=f"one of {', '.join(map(repr, self._names))}, or None for a "
                "dimension that is not divided.",
            )
        axes = [
            self._names[name] or None if name is not None else None for name in layout
        ]
        used = [name for names in axes for name in names or ()]
        if len(set(used)) < len(used):
            raise ValueStructureError(
                "The same logical devices cannot divide two dimensions of a variable.",
                received=f"the layout {tuple(layout)} of {path!r}.",
                fix="None for one dimension, or an axis for each: "
                f"{', '.join(self._mesh.logical_axes)}.",
            )
        return axes


def _as_layout_map(given: Any) -> Any:
    if isinstance(given, keras.distribution.LayoutMap):
        return given
    if not isinstance(given, Mapping):
        raise StructureTypeError(
            "Layouts come as a LayoutMap, or a dictionary.",
            received=f"{given!r}.",
            fix='layout_map={".*dense.*kernel": (None, "logical")}',
        )
    own: Any = keras.distribution.LayoutMap(None)
    for pattern, axes in given.items():
        if (
            not isinstance(pattern, str)
            or not isinstance(axes, tuple | list)
            or not _is_pattern(pattern)
        ):
            raise StructureTypeError(
                "A layout_map goes from regular expressions to a name or None for each "
                "dimension.",
                received=f"{{{pattern!r}: {axes!r}}}.",
                fix='layout_map={".*dense.*kernel": (None, "logical")}',
            )
        own[pattern] = tuple(axes)
    return own


def _closest(pattern: str, paths: Sequence[str]) -> str:
    """The path that a pattern was perhaps meant for, in words; else empty.

    Compared as text, without what stands for any text; with the ends of paths, too,
    since models and layers are numbered in front.
    """
    text = re.sub(r"\.[*+?]|\[[^]]*\][*+?]?|[\\^$?()]", "", pattern).strip("/")
    ends = {
        "/".join(parts[i:]): path
        for path in reversed(paths)
        for parts in [path.split("/")]
        for i in range(len(parts))
    }
    found = difflib.get_close_matches(text, ends, n=1)
    return f" (closest: {ends[found[0]]!r})" if found else ""


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True

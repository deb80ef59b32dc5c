"""How the weights of one model are divided over the logical devices of a replica: a
table that is checked whenever it changes. `ready_layouts.py` fills it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NamedTuple

from keras_distribute.devices.mesh import LOGICAL_AXIS, ReplicaMesh
from keras_distribute.errors import ValueStructureError
from keras_distribute.strategies.layout_maps import LayoutMapLayouts
from keras_distribute.summary import formats
from keras_distribute.summary.tables import Table, bytes_in_words

Axes = tuple[str | None, ...]


class Weight(NamedTuple):
    """A weight of the model that a plan is for.

    Args:
        pattern: For it, and for others like it.
        why_whole: What the table says of it beside that it is whole.
    """

    path: str
    pattern: str
    shape: tuple[int, ...]
    num_bytes: int
    why_whole: str


class LayoutPlan(MutableMapping[str, Axes]):
    """How the weights of a model are divided over the logical devices of a replica:
    what `kd.layout_plan` makes, and a strategy takes as its `layout_map`.

    A dictionary from patterns, which match whole paths of variables, to a name or
    `None` for each dimension. Printed, it is a table of all weights. Whatever is
    changed has to fit the model that the plan is for: an error says at once what does
    not. A new pattern takes the place of those that match nothing else than it does.

    Example:
        >>> import keras, keras_distribute as kd
        >>> def build():
        ...     ids = keras.Input((8,), dtype="int32")
        ...     table = keras.layers.Embedding(96, 32, name="tokens")
        ...     dense = keras.layers.Dense(64, name="up")
        ...     return keras.Model(ids, dense(table(ids)))
        >>> plan = kd.layout_plan(build, num_logical_devices=2)
        >>> plan["tokens/embeddings"] = (None, "logical")
        >>> del plan["up/bias"]
        >>> dict(plan)
        {'up/kernel': (None, 'logical'), 'tokens/embeddings': (None, 'logical')}
    """

    def __init__(
        self, weights: Sequence[Weight], layouts: dict[str, Axes], num_logical: int
    ) -> None:
        self._weights = tuple(weights)
        self._layouts = layouts
        self._mesh = ReplicaMesh.without_devices(num_logical)

    def __getitem__(self, pattern: str) -> Axes:
        return self._layouts[pattern]

    def __setitem__(self, pattern: str, layout: Axes) -> None:
        checked = LayoutMapLayouts({pattern: layout}, self._mesh)
        own = self._matched(pattern)
        if not own:
            raise ValueStructureError(
                "No weight of the model that the plan is for has this layout.",
                received=f"{pattern!r}: {layout!r}.",
                fix=self._closest(pattern),
            )
        for weight in own:
            checked.of(weight.path, weight.shape)
        replaced = [key for key in self._layouts if self._matched(key) <= own]
        for key in set(self._layouts) - {*replaced, pattern}:
            both = self._matched(key) & own
            if both:
                raise ValueStructureError(
                    f"Two patterns match {min(both).path!r}: a variable has one "
                    "layout.",
                    received=f"{pattern!r} beside {key!r} of the plan.",
                    fix=f"del plan[{key!r}] first, or another pattern.",
                )
        for key in replaced:
            if key != pattern:
                del self._layouts[key]
        self._layouts[pattern] = tuple(layout)

    def __delitem__(self, pattern: str) -> None:
        del self._layouts[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __repr__(self) -> str:
        return (
            f"LayoutPlan({self._layouts!r}, "
            f"num_logical_devices={self._mesh.num_logical})"
        )

    def __str__(self) -> str:
        rows: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        divided, whole, kept = 0, 0, 0
        for weight in self._weights:
            key, parts = self._parts(weight)
            layout = str(self._layouts[key]) if key else f"whole{weight.why_whole}"
            line = (key or weight.pattern, weight.shape, layout)
            rows.setdefault(line, []).append(weight.num_bytes // parts)
            divided += bool(key)
            whole += weight.num_bytes
            kept += weight.num_bytes // parts
        lines = [
            (path, str(shape), str(len(sizes)), layout, bytes_in_words(sum(sizes)))
            for (path, shape, layout), sizes in rows.items()
        ]
        lines.append(
            ("together", "", str(len(self._weights)), "", bytes_in_words(kept))
        )
        header = ("path", "shape", "variables", "layout", "on each device")
        table = Table("Weights", header, tuple(lines), frozenset({2, 4}), total=True)
        heading = (
            f"Layouts for {self._mesh.num_logical} logical devices a replica: "
            f"{divided} of {len(self._weights)} weights are divided, "
            f"{bytes_in_words(kept)} of {bytes_in_words(whole)} on each device"
        )
        return formats.as_text(heading, [], [table])

    def _matched(self, pattern: str) -> set[Weight]:
        return {
            each
            for each in self._weights
            if pattern == each.path or re.fullmatch(pattern, each.path)
        }

    def _parts(self, weight: Weight) -> tuple[str, int]:
        """The pattern that matches a weight, or nothing; how many parts it makes."""
        for key, layout in self._layouts.items():
            if weight in self._matched(key):
                return key, _number_of_parts(layout, self._mesh)
        return "", 1

    def _closest(self, pattern: str) -> str:
        known = list(dict.fromkeys(each.pattern for each in self._weights))
        found = difflib.get_close_matches(pattern, known, n=3) or known[:3]
        return f"a pattern for the whole path of a weight, such as {found}."


def _number_of_parts(layout: Axes, mesh: ReplicaMesh) -> int:
    sizes = {LOGICAL_AXIS: mesh.num_logical} | dict(mesh.mesh.shape)
    return math.prod(sizes[name] for name in layout if name is not None)

"""Names for variables that are the same in every process that builds the same objects.

Keras numbers what was given no name: the first `Dense` of a process is `dense`, the
next `dense_1`. The numbers depend on what else the process has built, so here they are
counted again, within the layer or model that has them. Names that the user chose stay.
A variable's `path` would not do: it also keeps the name of the model that built it
first.
"""

from __future__ import annotations

import collections
import re
from typing import Any

from keras_distribute._compat import checkpoint as compat
from keras_distribute._compat import optimizer as compat_optimizer

# Named by Keras after the class, which depends on the strategy.
_UNNAMED = re.compile(r"^(?:mirrored_|sync_on_read_)?variable(?:_\d+)?$")


def layer_names(layer: Any) -> dict[str, Any]:
    """The variables and seeds of a layer and of all layers in it: `dense/kernel`,
    `block_1/dropout/...`.

    Where several would have one name, the later ones have `#2`, `#3`, ... after it.
    """
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()

    def walk(layer: Any, prefix: str) -> None:
        children = compat.inner_layers(layer)
        inner = {id(variable) for child in children for variable in child.variables}
        for variable in layer.variables:
            if id(variable) not in inner and id(variable) not in seen:
                seen.add(id(variable))
                name = "variable" if _UNNAMED.match(variable.name) else variable.name
                found.append((prefix + name, variable))
        for child, name in zip(children, _chosen_or_counted(children), strict=True):
            if id(child) not in seen:
                seen.add(id(child))
                walk(child, f"{prefix}{name}/")

    walk(layer, "")
    return dict(
        zip(
            _unique([name for name, _ in found]),
            [variable for _, variable in found],
            strict=True,
        )
    )


def metric_names(metrics: list[Any]) -> dict[str, Any]:
    """The variables of metrics: `mean_absolute_error/total`."""
    variables = [variable for metric in metrics for variable in metric.variables]
    owners = [
        inner
        for metric in metrics
        for inner in (metric, *getattr(metric, "metrics", []))
    ]
    renamed: dict[str, str] = dict(
        zip([owner.name for owner in owners], _chosen_or_counted(owners), strict=True)
    )
    paths: list[list[str]] = [variable.path.split("/") for variable in variables]
    names = _unique(
        ["/".join([renamed.get(part, part) for part in path]) for path in paths]
    )
    return dict(zip(names, variables, strict=True))


def optimizer_names(optimizer: Any, labels: dict[int, str]) -> dict[str, Any]:
    """The variables of an optimizer by name: `Adam/iteration`,
    `Adam/momentum/dense/kernel`.

    Args:
        optimizer: A Keras optimizer; one that wraps another has both in its names.
        labels: Names of model variables by `id`; others are named by their position in
            the optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    inner_ids = (
        {id(variable) for variable in inner.variables}
        if inner is not None
        else set[int]()
    )
    own = [
        variable for variable in optimizer.variables if id(variable) not in inner_ids
    ]
    references = compat_optimizer.built_variables(optimizer) if optimizer.built else []
    slots: dict[str, str] = {}
    for index, reference in enumerate(references):
        # Source: `BaseOptimizer.add_variable_from_reference`.
        slots.setdefault(
            reference.path.replace("/", "_"), labels.get(id(reference), str(index))
        )
    kind = type(optimizer).__name__
    names = _unique([f"{kind}/{_slot_name(variable.name, slots)}" for variable in own])
    named = dict(zip(names, own, strict=True))
    if inner is not None:
        named |= {
            f"{kind}/{name}": variable
            for name, variable in optimizer_names(inner, labels).items()
        }
    return named


def _chosen_or_counted(instances: list[Any]) -> list[str]:
    """The name of each, or the one that Keras would have given it, had it begun to
    count here.
    """
    counts: collections.Counter[str] = collections.Counter()
    names: list[str] = []
    for instance in instances:
        name, base = instance.name, compat.default_name(instance)
        if re.fullmatch(rf"{re.escape(base)}(_\d+)?", name):
            name = base if not counts[base] else f"{base}_{counts[base]}"
            counts[base] += 1
        names.append(name)
    return names


def _slot_name(name: str, slots: dict[str, str]) -> str:
    for end in [i for i, letter in enumerate(name) if letter == "_"][::-1]:
        if name[:end] in slots:
            return f"{name[end + 1 :]}/{slots[name[:end]]}"
    return name


def _unique(names: list[str]) -> list[str]:
    counts: collections.Counter[str] = collections.Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique

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
    for prefix, each in layers_in(layer):
        children = compat.inner_layers(each)
        inner = {id(variable) for child in children for variable in child.variables}
        for variable in each.variables:
            if id(variable) not in inner and id(variable) not in seen:
                seen.add(id(variable))
                name = "variable" if _UNNAMED.match(variable.name) else variable.name
                found.append((prefix + name, variable))
    return numbered([name for name, _ in found], [variable for _, variable in found])


def layers_in(layer: Any) -> list[tuple[str, Any]]:
    """A layer and all layers in it, each once, with the beginning of their variables'
    names: `""`, `dense/`, `block_1/dropout/`.
    """
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()

    def walk(layer: Any, prefix: str) -> None:
        found.append((prefix, layer))
        children = compat.inner_layers(layer)
        for child, name in zip(children, _counted_names(children), strict=True):
            if id(child) not in seen:
                seen.add(id(child))
                walk(child, f"{prefix}{name}/")

    walk(layer, "")
    return found


def metric_names(metrics: list[Any]) -> dict[str, Any]:
    """The variables of metrics: `mean_absolute_error/total`."""
    owners = [
        owner
        for metric in metrics
        for owner in (metric, *getattr(metric, "metrics", []))
    ]
    renamed: dict[str, str] = dict(
        zip([owner.name for owner in owners], _counted_names(owners), strict=True)
    )
    variables = [variable for metric in metrics for variable in metric.variables]
    paths: list[list[str]] = [variable.path.split("/") for variable in variables]
    names = ["/".join([renamed.get(part, part) for part in path]) for path in paths]
    return numbered(names, variables)


def optimizer_names(optimizer: Any, labels: dict[int, str]) -> dict[str, Any]:
    """The variables of an optimizer by name: `Adam/iteration`,
    `Adam/momentum/dense/kernel`.

    Args:
        optimizer: A Keras optimizer; one that wraps another has both in its names.
        labels: Names of model variables by `id`; others are named by their position in
            the optimizer.
    """
    kind, inner = type(optimizer).__name__, getattr(optimizer, "inner_optimizer", None)
    of_inner = {} if inner is None else optimizer_names(inner, labels)
    inner_ids = {id(variable) for variable in of_inner.values()}
    own = [v for v in optimizer.variables if id(v) not in inner_ids]
    built = compat_optimizer.built_variables(optimizer) if optimizer.built else []
    slots: dict[str, str] = {}
    for index, variable in enumerate(built):
        # Source: `BaseOptimizer.add_variable_from_reference`.
        slot = variable.path.replace("/", "_")
        slots.setdefault(slot, labels.get(id(variable), str(index)))
    named = numbered([f"{kind}/{_slot_name(v.name, slots)}" for v in own], own)
    return named | {f"{kind}/{name}": v for name, v in of_inner.items()}


def _counted_names(instances: list[Any]) -> list[str]:
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


def numbered(names: list[str], values: list[Any]) -> dict[str, Any]:
    """The values by name; `#2`, `#3`, ... tell those of one name apart."""
    counts: collections.Counter[str] = collections.Counter()
    named: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        counts[name] += 1
        unique = name if counts[name] == 1 else f"{name}#{counts[name]}"
        while unique in named:  # The name that another one was given.
            unique += "#"
        named[unique] = value
    return named

"""Containers that JAX takes for leaves: looked into, and made again of their own class.

JAX looks into dicts, lists, tuples, named tuples, and what was registered with it. To
it are leaves: a dict, list or tuple of a class of one's own, any other `Mapping`, a
proxy of one of these (`wrapt`), and objects of dataclasses and of `attrs`. Where these
hold arrays, they are structures here. Knows no distributed values.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from keras_distribute._compat import variables as compat
from keras_distribute.errors import StructureTypeError, ValueStructureError

IsLeaf = Callable[[Any], bool]
_SIMPLE = bool, int, float, complex, str, bytes, type(None)
_COLLECTIONS = set, frozenset, collections.deque, type({}.values()), type({}.items())


def flatten(structure: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, which also looks into the containers that JAX takes for
    leaves.

    What `jax.tree.unflatten` makes of the second result has their classes again.
    """
    return jax.tree.flatten(_opened(structure, is_leaf, ()), is_leaf=is_leaf)


def mapped(
    function: Callable[[Any], Any], structure: Any, is_leaf: IsLeaf | None = None
) -> Any:
    """`jax.tree.map` over one structure, likewise."""
    leaves, form = flatten(structure, is_leaf)
    # Not by `map`, which takes an `OutOfRangeError` for the end of the leaves.
    return jax.tree.unflatten(form, [function(leaf) for leaf in leaves])


def contents(value: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The keys and items of a container, in its own order; `None` for others."""
    if isinstance(value, Mapping):
        return tuple(value), list(value.values())
    if isinstance(value, list | tuple):
        return tuple(range(len(value))), list(value)
    names = _fields(value.__class__)
    if names is None or isinstance(value, type):
        return None
    present = [name for name in names if hasattr(value, name)]
    return tuple(present), [getattr(value, name) for name in present]


def is_structure(value: Any) -> bool:
    """Whether a value is a container: of a dataclass, only one that holds arrays."""
    if not _is_container(type(value)):
        return False
    if isinstance(value, Mapping | list | tuple):
        return True
    return isinstance(_opened_one(value, None, ()), _Opened)


def filled(value: Any, items: Sequence[Any]) -> Any:
    """A container like `value`, of its class, with other items."""
    if _is_proxy(type(value)):
        return type(value)(filled(value.__wrapped__, items))
    if isinstance(value, Mapping):
        return _filled_mapping(value, dict(zip(value, items, strict=True)))
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    new = copy.copy(value)
    if isinstance(value, list):
        new[:] = items
        return new
    found = contents(value)
    for name, item in zip(found[0] if found else (), items, strict=True):
        object.__setattr__(new, name, item)  # Also where the class is frozen.
    return new


def tracers_in(value: Any) -> list[Any]:
    """The values of a trace that an object has in it, which is no structure."""
    if isinstance(value, _COLLECTIONS):
        parts = list(value)
    elif isinstance(value, type | compat.Variable | jax.Array):
        return []
    else:
        slots = [vars(each).get("__slots__", ()) for each in type(value).__mro__]
        names = [n for own in slots for n in ([own] if isinstance(own, str) else own)]
        parts = [getattr(value, name, None) for name in names]
        parts += getattr(value, "__dict__", {}).values()
        parts += _beside_attributes(value)
    return [
        leaf for leaf in jax.tree.leaves(parts) if isinstance(leaf, jax.core.Tracer)
    ]


def _beside_attributes(value: Any) -> list[Any]:
    """What Python's own objects have in them that is no attribute of theirs."""
    if isinstance(value, types.FunctionType):
        return [*map(_in_cell, value.__closure__ or ()), value.__defaults__]
    if isinstance(value, functools.partial):
        return [value.args, value.keywords]
    if inspect.isgenerator(value):
        return list(inspect.getgeneratorlocals(value).values())
    return list(value.args) if isinstance(value, BaseException) else []


def _in_cell(cell: types.CellType) -> Any:
    """What a function has from around it; `None` before that is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class _Opened:
    """A container on its way through JAX, which knows this class."""

    def __init__(self, shell: _Shell, items: Sequence[Any]) -> None:
        self.shell, self.items = shell, tuple(items)


@dataclasses.dataclass(frozen=True)
class _Shell:
    """A container without its items.

    Args:
        keys: Those of its items.
        names: Those of the attributes with arrays that it has besides, which follow the
            items.
        others: What tells its other attributes from those of another container.
        empty: A container like it, which holds nothing of a trace.
    """

    kind: type
    keys: tuple[Any, ...]
    names: tuple[str, ...]
    others: tuple[Any, ...]
    empty: Any = dataclasses.field(compare=False)

    def of(self, items: Sequence[Any]) -> Any:
        """The container with these items and attributes."""
        new = filled(self.empty, items[: len(self.keys)])
        for name, item in zip(self.names, items[len(self.keys) :], strict=True):
            object.__setattr__(new, name, item)
        return new


jax.tree_util.register_pytree_node(
    _Opened,
    lambda opened: (opened.items, opened.shell),
    lambda shell, items: shell.of(list(items)),
)


def _opened(structure: Any, is_leaf: IsLeaf | None, around: tuple[int, ...]) -> Any:
    leaves, form = jax.tree.flatten(structure, is_leaf=is_leaf)
    if not any(_is_container(type(leaf)) for leaf in leaves):
        return structure
    return jax.tree.unflatten(
        form, [_opened_one(leaf, is_leaf, around) for leaf in leaves]
    )


def _opened_one(value: Any, is_leaf: IsLeaf | None, around: tuple[int, ...]) -> Any:
    if not _is_container(type(value)) or id(value) in around:
        return value
    found = contents(value)
    if found is None:
        return value
    keys, items = found
    # Its items are in its attributes.
    own = isinstance(value, Mapping) and not isinstance(value, dict)
    attributes = (
        {} if own or _is_proxy(type(value)) else dict(getattr(value, "__dict__", {}))
    )
    around = (*around, id(value))
    opened = _opened(items, is_leaf, around)
    besides = {
        name: _opened(attributes[name], is_leaf, around)
        for name in attributes
        if name not in keys
    }
    names = tuple(name for name, item in besides.items() if _has_arrays(item, is_leaf))
    if not names and not _has_arrays(opened, is_leaf):
        return value
    others = tuple(
        (name, _identity(attributes[name])) for name in besides if name not in names
    )
    items = [*opened, *(besides[name] for name in names)]
    shell = _Shell(type(value), keys, names, others, value)
    empty = shell.of([None] * len(items))
    return _Opened(dataclasses.replace(shell, empty=empty), items)


def _has_arrays(structure: Any, is_leaf: IsLeaf | None) -> bool:
    return any(map(_is_array, jax.tree.leaves(structure, is_leaf=is_leaf)))


def _identity(value: Any) -> Any:
    return (type(value), repr(value)) if isinstance(value, _SIMPLE) else id(value)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, compat.Variable):
        return False
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or hasattr(
        type(leaf), "__jax_array__"
    )


@functools.lru_cache(maxsize=512)
def _is_container(kind: type) -> bool:
    """Whether objects of a class may have items; quick for most leaves."""
    return (
        issubclass(kind, Mapping | list | tuple)
        or _fields(kind) is not None
        or _is_proxy(kind)
    )


@functools.lru_cache(maxsize=512)
def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass, or of a class of `attrs`."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    attributes = getattr(kind, "__attrs_attrs__", None)
    if attributes is None:
        return None
    return tuple(attribute.name for attribute in attributes)


def _is_proxy(kind: type) -> bool:
    return hasattr(kind, "__wrapped__")


def _filled_mapping(value: Any, items: dict[Any, Any]) -> Any:
    if isinstance(value, dict):
        try:
            new = copy.copy(value)  # Has what else it has: a `defaultdict` its factory.
            for key, item in items.items():
                new[key] = item
            return new
        except TypeError:  # A frozen one.
            pass
    try:
        return type(value)(items)
    except TypeError as error:
        raise StructureTypeError(
            "A mapping can hold arrays across replicas if its class makes one from a "
            "dict.",
            received=f"a {type(value).__name__}: {error}",
            fix="return a dict, or let the class take one.",
        ) from error


def regroup(per_replica: Sequence[Any], group: Callable[[Sequence[Any]], Any]) -> Any:
    """One structure of values from one structure per replica.

    Containers keep their kind; the leaves of all replicas go to `group` together.

    Raises:
        ValueStructureError: Where the replicas disagree in structure.
    """
    first = per_replica[0]
    kinds = list(map(is_structure, per_replica))
    found = [
        contents(value) if kind else None
        for value, kind in zip(per_replica, kinds, strict=True)
    ]
    if found[0] is None and not any(kinds):
        return group(per_replica)
    items: list[list[Any]] = []
    for i, (value, own) in enumerate(zip(per_replica, found, strict=True)):
        keys = [None if each is None else each[0] for each in (own, found[0])]
        if type(value) is not type(first) or keys[0] != keys[1]:
            raise ValueStructureError(
                "The replicas returned different structures.",
                received=f"{_form(first)} from replica 0, {_form(value)} from replica "
                f"{i}.",
                fix="return the same structure from every replica.",
            )
        if own is not None:  # Otherwise a replica further on has a structure.
            items.append(own[1])
    return filled(
        first, [regroup(column, group) for column in zip(*items, strict=True)]
    )


def in_own_order(structure: Any, of_leaves: Sequence[Any]) -> list[Any]:
    """What there is for each leaf that JAX has, which sorts keys and leaves out `None`,
    in the order in which `regroup` comes to them.
    """
    # One array may be several leaves.
    marked = regroup([structure], lambda o: None if o[0] is None else np.empty(0))
    marks = map(id, jax.tree.leaves(marked))
    known = dict(zip(marks, of_leaves, strict=True))
    ordered: list[Any] = []
    regroup([marked], lambda one: ordered.append(known.get(id(one[0]))))
    return ordered


def _form(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"

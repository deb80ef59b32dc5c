"""The optimizers' part on the servers: an update of the weights that each has, as a
program.
"""

from __future__ import annotations

import collections
import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_distribute import context
from keras_distribute._compat import optimizer as compat
from keras_distribute._compat.variables import takes_gradient_as_value
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.remote.frames import Header
from keras_distribute.scheduling.served import Part, Served, is_constrained_whole
from keras_distribute.scheduling.servers import Server
from keras_distribute.servers.programs import exported

# A part of a table has a part of the rows that a step looks up: a program for all of
# them would compute what nobody has asked for.
_FRACTIONS = 0.25, 0.375, 0.5, 0.625, 0.75, 1.0


class Updates:
    """The update programs of all optimizers.

    Args:
        servers: All of them.
        served: The variables that they have.
        lazy_rows: Whether rows that no lookup has read stay as they are under any
            optimizer.
        communication_dtype: In which gradients travel; `None`: in that of the weight.

    Attributes:
        sent: What was sent to which server by which number.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        served: Served,
        lazy_rows: bool,
        communication_dtype: str | None,
    ) -> None:
        self._servers, self._served, self._lazy_rows = servers, served, lazy_rows
        self._communication_dtype = communication_dtype
        # Of each optimizer, as long as it is there, with the state that it takes.
        self._numbers = weakref.WeakKeyDictionary[
            Any, dict[Any, tuple[int, list[Any]]]
        ]()
        self._next = itertools.count(1)
        self._lock = threading.Lock()
        self.sent: dict[tuple[int, int], tuple[Header, list[Any]]] = {}

    def forget(self) -> None:
        """Notes that the servers have no programs any more."""
        self._numbers.clear()
        self.sent.clear()

    def take_gone(self) -> dict[int, list[int]]:
        """The programs of optimizers that nobody has any more, of each server, once."""
        gone: dict[int, list[int]] = {}
        with self._lock:
            known = {n for own in self._numbers.values() for n, _ in own.values()}
            for server, number in [each for each in self.sent if each[1] not in known]:
                gone.setdefault(server, []).append(number)
                del self.sent[server, number]
        return gone

    def refuses_rows(self, optimizer: Any, weight: Any) -> str | None:
        """Why an optimizer has to be given the gradient of a whole table; `None` where
        it can do with some rows, and leaves all others as they are.
        """
        if weight.constraint is not None:
            return "it has a constraint, which looks at all of it"
        if not compat.is_by_element(optimizer):
            return f"{type(optimizer).__name__} looks at a weight as a whole"
        if compat.accumulates(optimizer):
            return "its gradients are accumulated"
        with context.entered(context.default_strategy().top_frame):
            if self._lazy_rows or compat.leaves_zero_gradients(optimizer, weight):
                return None
        return (
            f"{type(optimizer).__name__} changes rows whose gradient is zero, too; "
            "lazy_rows=True leaves them alone"
        )

    def gradient_dtype(self, weight: Any) -> str:
        """In which dtype the gradient of a weight travels."""
        own, narrow = str(weight._dtype), self._communication_dtype
        if takes_gradient_as_value(weight):
            return own
        is_wider = narrow and jnp.dtype(own).itemsize > jnp.dtype(narrow).itemsize
        return narrow if narrow and is_wider else own

    def place(self, optimizer: Any, weights: Sequence[Any]) -> None:
        """Places weights, and the optimizer's variables beside them.

        Raises:
            StructureTypeError: For an optimizer that no server can have a copy of.
            ValueStructureError: For what no server alone can do.
        """
        _check_methods(optimizer)
        own = compat.slot_weights(optimizer)
        variables = list(zip(optimizer.variables, own, strict=True))
        together = compat.shares_state(optimizer)
        all_weights = compat.built_variables(optimizer)
        self._served.add(all_weights if together else weights, whole=together)
        self._check_parts(optimizer, weights)
        if together:
            self._check_together(optimizer, all_weights)
        servers = sorted(
            {part.server for w in weights for part in self._served.where(w).parts}
        )
        clips_all = optimizer.global_clipnorm is not None
        if clips_all and compat.accumulates(optimizer) and len(servers) > 1:
            raise ValueStructureError(
                "global_clipnorm of accumulated gradients needs all of them on one "
                "server.",
                received=f"{optimizer!r}, whose weights are on {len(servers)} servers.",
                fix="clipnorm, or no gradient_accumulation_steps, or one parameter "
                "server.",
            )
        used = {id(weight) for weight in weights}
        for variable, weight in variables:
            if weight is None:
                self._served.add_copies(variable, servers)
            elif id(all_weights[weight]) in used:
                self._served.add_slot(variable, all_weights[weight])

    def _check_parts(self, optimizer: Any, weights: Sequence[Any]) -> None:
        """Raises `ValueStructureError` where more is looked at than a server has."""
        accumulates = compat.accumulates(optimizer)
        for weight in weights:
            parts = len(self._served.where(weight).parts)
            if parts == 1:
                continue
            who, fix = "", ""
            if not compat.is_by_element(optimizer):
                who = f"The optimizer {type(optimizer).__name__}"
                fix = "an optimizer such as keras.optimizers.Adam"
            elif accumulates and optimizer.clipnorm is not None:
                who = "clipnorm of accumulated gradients"
                fix = "clipvalue, or no gradient_accumulation_steps"
            elif is_constrained_whole(weight):
                who = f"The constraint {type(weight.constraint).__name__}"
                fix = "the constraint when the layer is made"
            if who:
                raise ValueStructureError(
                    f"{who} looks at a weight as a whole, and {weight.path!r} is "
                    "divided.",
                    received=f"{parts} parts.",
                    fix=f"{fix}, or no variable_partitioner.",
                )

    def _check_together(self, optimizer: Any, weights: Sequence[Any]) -> None:
        """Raises `ValueStructureError` for weights that were placed apart before."""
        servers = {part.server for w in weights for part in self._served.where(w).parts}
        if len(servers) > 1:
            raise ValueStructureError(
                f"{type(optimizer).__name__} has state that belongs to all weights "
                "together, which have to be on one server.",
                received=f"weights on {len(servers)} servers, where evaluate, predict, "
                "another optimizer or other functions have used them before.",
                fix="one parameter server; or make the model anew, and train it before "
                "anything else: new.set_weights(model.get_weights()), new.fit(...)",
            )

    def of(
        self, optimizer: Any, weights: Sequence[Any], sizes: Sequence[int | None]
    ) -> list[tuple[int, int, list[tuple[int, Part]]]]:
        """For each server with some of the weights: its index, the number of its update
        program, and which parts of which gradients it takes.

        Args:
            optimizer: The user's.
            weights: Whose gradients it is given.
            sizes: How many rows of each are given at most; `None` for all.
        """
        by_server: dict[int, list[tuple[int, Part]]] = {}
        for i, weight in enumerate(weights):
            for part in self._served.where(weight).parts:
                by_server.setdefault(part.server, []).append((i, part))
        return [
            (server, self._number(optimizer, weights, sizes, server, parts), parts)
            for server, parts in sorted(by_server.items())
        ]

    def _number(
        self,
        optimizer: Any,
        weights: Sequence[Any],
        sizes: Sequence[int | None],
        server: int,
        parts: Sequence[tuple[int, Part]],
    ) -> int:
        own = tuple((part.key, sizes[i]) for i, part in parts)
        with self._lock:  # The threads of several workers ask at once.
            # One that has other settings since gets another program.
            of_server = [weights[i] for i, _ in parts]
            key = server, own, compat.settings(optimizer, of_server)
            numbers = self._numbers.setdefault(optimizer, {})
            if key not in numbers:
                number = next(self._next)
                self._send(optimizer, weights, sizes, server, parts, number)
                numbers[key] = number, optimizer.variables
            return numbers[key][0]

    def _send(
        self,
        optimizer: Any,
        weights: Sequence[Any],
        sizes: Sequence[int | None],
        server: int,
        parts: Sequence[tuple[int, Part]],
        number: int,
    ) -> None:
        """Makes the programs of one server, for fewer and more rows, and sends them."""
        most = [sizes[i] for i, _ in parts]
        several: list[list[int | None]] = []
        for fraction in _FRACTIONS:
            own = [size and math.ceil(size * fraction) for size in most]
            if own not in several:
                several.append(own)
        platforms, blobs, copy = [self._servers[server].platform], list[Any](), None
        for own in several:
            shapes: list[tuple[tuple[int, ...], Any]] = []
            for (i, part), size in zip(parts, own, strict=True):
                shape = part.shape_in(weights[i].shape)
                shape = shape if size is None else (size, *shape[1:])
                shapes.append((shape, weights[i]))
            with context.entered(context.default_strategy().top_frame):
                copy = compat.copy_for(optimizer, shapes)
                dtypes = [self.gradient_dtype(weight) for _, weight in shapes]
                state, values, function = _update(copy, shapes)
                gradients = [
                    jax.ShapeDtypeStruct(value.shape, dtype)
                    for value, dtype in zip(values, dtypes, strict=True)
                ]
                taken = [*state, *values, *gradients]
                blob, _ = exported(function, taken, platforms)
            blobs.append(blob)
        of_gradient = [*compat.slot_weights(copy), *range(len(most))]
        keys = self._state_keys(optimizer, copy, weights, parts)
        told = {
            "op": "program",
            "id": number,
            "keys": [*keys, *(part.key for _, part in parts)],
            "rows": [i if i is not None and most[i] else None for i in of_gradient],
            "sizes": several,
        }
        self._servers[server].call(told, blobs)
        self.sent[server, number] = told, blobs

    def _state_keys(
        self,
        optimizer: Any,
        copy: Any,
        weights: Sequence[Any],
        parts: Sequence[tuple[int, Part]],
    ) -> list[int]:
        """Where the state of the optimizer is that each variable of its copy stands
        for.

        Raises:
            ValueStructureError: Where there is no such state.
        """
        targets = {id(w): i for i, w in enumerate(compat.built_variables(optimizer))}
        own, copied = compat.slot_weights(optimizer), compat.slot_weights(copy)
        if own.count(None) != copied.count(None):
            raise _state_error(optimizer, "what belongs to no weight")
        # With other settings an optimizer may need some of its slots only.
        kept: dict[Any, list[Any]] = {}
        for variable, weight in zip(optimizer.variables, own, strict=True):
            kept.setdefault(_slot(variable, weight), []).append(variable)
        taken = collections.Counter[Any]()
        keys: list[int] = []
        for variable, weight in zip(copy.variables, copied, strict=True):
            index = part = None
            if weight is not None:
                index, part = targets[id(weights[parts[weight][0]])], parts[weight][1]
            found = kept.get(_slot(variable, index), [])
            turn = taken[_slot(variable, weight)]
            taken[_slot(variable, weight)] += 1
            if turn >= len(found):
                raise _state_error(optimizer, variable.name)
            place = self._served.where(found[turn])
            server = parts[0][1].server
            keys += [
                each.key
                for each in place.parts
                if each.server == server and (part is None or each.start == part.start)
            ][:1]
        return keys


def _slot(variable: Any, weight: int | None) -> Any:
    """Which of a weight's slots; what belongs to none may have any name."""
    return weight, None if weight is None else variable.name


def _state_error(optimizer: Any, what: str) -> ValueStructureError:
    return ValueStructureError(
        f"An update by {type(optimizer).__name__} needs other state than the optimizer "
        f"was built with: {what}.",
        received=f"{optimizer!r}, whose settings have changed since, or gradients of "
        "some of its weights.",
        fix="a new optimizer: model.compile(optimizer, ...); or gradients of all "
        "weights that it was built with.",
    )


def _check_methods(optimizer: Any) -> None:
    methods = compat.own_methods(optimizer)
    if methods:
        kind = type(optimizer).__name__
        raise StructureTypeError(
            "Parameter servers have a copy of an optimizer, which has the methods of "
            f"its class: {', '.join(methods)} of this one is its own.",
            received=f"{optimizer!r}, with {methods[0]} set on the object.",
            fix=f"class My{kind}({kind}): def {methods[0]}(self, ...): ...",
        )


def _update(copy: Any, shapes: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """The shapes of state and weights, and the function of them and gradients."""
    state = [jax.ShapeDtypeStruct(v.shape, v._dtype) for v in copy.variables]
    values = [jax.ShapeDtypeStruct(shape, weight._dtype) for shape, weight in shapes]
    first, second = len(state), len(state) + len(values)

    def update(*arrays: Any) -> list[Any]:
        weights = list(arrays[first:second])
        gradients = [
            gradient.astype(weight.dtype)
            for gradient, weight in zip(arrays[second:], weights, strict=True)
        ]
        new, new_state = copy.stateless_apply(list(arrays[:first]), gradients, weights)
        return [*new_state, *new]

    return state, values, update

"""From a program over all rows of a batch to one of each replica's rows.

XLA can divide such a program, too, and does where this cannot; but it sums each
gradient over the replicas where it is computed, one after the other. Here what is
summed stays a replica's own for as long as the operations on it are linear; what
follows from the sums alone needs no replica's program any more (`sums.py`).

Each operation has a rule that says what the program of one replica does in its place,
from what that replica has of the operands: all of a value, its rows, or a part of a
sum (`values.py`). This is a proof, too: an operation without a rule for what it is
given mixes rows, and the whole program stays as it is. Random numbers are those that
the program over all rows draws, each replica those of its own rows (`draws.py`).

The three kinds of value are known from GSPMD (Xu et al., 2021,
https://arxiv.org/abs/2105.04663) and PyTorch's DTensor ("replicate", "shard",
"partial").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from keras_distribute._compat.jax_internals import stays_a_call
from keras_distribute.devices import jaxprs
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.by_rows import (
    contractions,
    draws,
    elementwise,
    indexing,
    shapes,
)
from keras_distribute.devices.by_rows.control import Control
from keras_distribute.devices.by_rows.values import (
    MixedRows,
    Replica,
    RowsMixError,
    Rule,
    Scatter,
    Slicer,
    Value,
    is_zero,
    literal,
)
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.replication_proof import differs

_EXTREMES = {
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(elementwise.NAMES, elementwise.rule),
    **{name: contractions.extremes(kind) for name, kind in _EXTREMES.items()},
    **dict.fromkeys(
        ("argmax", "argmin", "reduce_prod", "reduce_xor", "reduce"),
        contractions.over_other_dimensions,
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        shapes.along_one_dimension("axis"),
    ),
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window_sum",
            "select_and_gather_add",
            "select_and_scatter_add",
        ),
        shapes.window,
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"),
        indexing.scatter,
    ),
    **dict.fromkeys(
        ("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"), shapes.leading(2)
    ),
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "concatenate": shapes.concatenate,
    "conv_general_dilated": contractions.convolution,
    "dot_general": contractions.dot_general,
    "dynamic_slice": shapes.dynamic_slice,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "fft": shapes.fft,
    "gather": indexing.gather,
    "pad": shapes.pad,
    "reduce_sum": contractions.reduce_sum,
    "reshape": shapes.reshape,
    "rev": shapes.reverse,
    "slice": shapes.slice_,
    "sort": shapes.along_one_dimension("dimension"),
    "split": shapes.split,
    "squeeze": shapes.squeeze,
    "stack": shapes.stack,
    "tile": shapes.tile,
    "top_k": shapes.along_one_dimension("axis"),
    "transpose": shapes.transpose,
    "unstack": shapes.unstack,
}
_SLICERS: dict[str, Slicer] = {
    **dict.fromkeys(elementwise.NAMES, elementwise.slicer),
    "broadcast_in_dim": shapes.part_of_broadcast,
    "iota": shapes.part_of_iota,
    "random_bits": draws.part_of_draw,
}


class Watch(Protocol):
    """Who sees what a replica gives to sums that have a name."""

    def passed(self, name: str, own: Any) -> Any:
        """What is summed in the place of `own`."""
        ...

    def results(self) -> Sequence[Any]:
        """What the program is to return of it, each replica its own."""
        ...


ADDEND = "keras_distribute_addend"
"""The name of what is added to a sum that is kept in parts: it becomes a part, too."""


class Kept(NamedTuple):
    """Sums over the replicas that a program takes and returns in parts, each replica
    its own along axis 0.

    Args:
        inputs: Their places among the inputs.
        outputs: Their places among the outputs.
    """

    inputs: Collection[int] = ()
    outputs: Collection[int] = ()


class InParts(NamedTuple):
    """State that a program takes and returns in parts, of any size, each replica its
    own. By constraints on their shardings the program says where it is whole, and where
    a value is such a part.

    Args:
        inputs: Their places among the inputs.
        outputs: The dimension that is divided, by the place among the outputs.
        scatter: From what a replica gives to a sum, and a dimension, to its part of
            the sum along it.
    """

    inputs: Collection[int] = ()
    outputs: Mapping[int, int] = {}
    scatter: Scatter | None = None


Total = Callable[[Any, Callable[[], Any] | None], Any]
"""The sum over the replicas of what each gives; or of the rows that it was made of,
where what makes that is given, since these are less to move.
"""


@dataclasses.dataclass(frozen=True)
class OneReplica:
    """The program of one replica.

    Args:
        program: Takes and returns what a replica has.
        rows: Of each result the dimension of which it has its own part, or `None`.
        sizes: What all replicas together have along that dimension.
    """

    program: core.ClosedJaxpr
    rows: Sequence[int | None]
    sizes: Sequence[int | None]


def of_one_replica(
    program: core.ClosedJaxpr,
    rows: Sequence[int | None],
    replicas: int,
    sums: dict[str, Total] | None = None,
    watch: Watch | None = None,
    kept: Kept | None = None,
    in_parts: InParts | None = None,
    dtype: Any = None,
) -> OneReplica:
    """The program of each replica's rows.

    Args:
        rows: Of each of its inputs the dimension that is divided over the replicas, or
            `None`.
        sums: How to sum over the replicas what `jax.ad_checkpoint.checkpoint_name`
            gave a name, by that name, up to a colon in it.
        watch: Sees what is summed so; its results follow the program's own.
        kept: What is a sum over the replicas of which each keeps its part.
        in_parts: State of which each keeps a part.
        dtype: In which gradients and their rows travel; `None` for their own.

    Raises:
        MixedRows: Where a rule is missing.
    """
    kept, state = kept or Kept(), in_parts or InParts()
    found: list[int | None] = []
    sizes: list[int | None] = []
    count = next(
        aval.shape[dim]
        for i, (aval, dim) in enumerate(zip(program.in_avals, rows, strict=True))
        if dim is not None and i not in state.inputs
    )
    evaluation = _Evaluation(sums or {}, watch)

    def one_replica(*arrays: Any) -> list[Any]:
        replica = Replica(replicas, count, _SLICERS, state.scatter, dtype)
        values = list(map(Value, arrays, rows))
        for i in state.inputs:
            values[i].of_state = True
        for i in kept.inputs:
            values[i] = Value(arrays[i][0], partial=True)
        results = evaluation.run(program, values, replica)
        arrays_out = []
        for i, value in enumerate(results):
            if i in kept.outputs:
                value = Value(replica.summand(value)[None], 0)
            elif i in state.outputs:
                value = replica.part_of_state(value, state.outputs[i])
            elif value.partial:
                value = Value(replica.whole(value))
            found.append(value.rows)
            is_of_rows = value.rows is not None and i not in kept.outputs
            shape = program.out_avals[i].shape
            sizes.append(shape[value.rows] if is_of_rows else replicas)
            arrays_out.append(value.array)
        for array in () if watch is None else watch.results():
            found.append(0)
            sizes.append(replicas)
            arrays_out.append(array[None])
        return arrays_out

    shapes = Replica(replicas, count, _SLICERS)
    given: list[jax.ShapeDtypeStruct] = []
    for i, (aval, dim) in enumerate(zip(program.in_avals, rows, strict=True)):
        shape = aval.shape if dim is None else shapes.divided_at(aval.shape, dim)
        shape = (1, *shape) if i in kept.inputs else shape
        given.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    own = jax.make_jaxpr(one_replica, axis_env=[(REPLICA_AXIS, replicas)])(*given)
    return OneReplica(own, found, sizes)


class _Evaluation:
    """Evaluates programs, each operation by its rule."""

    def __init__(self, sums: dict[str, Total], watch: Watch | None) -> None:
        self._sums, self._watch = sums, watch
        control = Control(self.run)
        self._rules: dict[str, Rule] = {
            **_RULES,
            "name": self._named,
            "cond": control.cond,
            "optimization_barrier": _unchanged,
            "reshard": lambda replica, eqn, values: values,
            "sharding_constraint": _constrained,
            "scan": control.scan,
            "shard_map": control.mapped,
            "while": control.while_,
            **dict.fromkeys(jaxprs.RECOMPUTED, control.recomputed),
        }

    def run(
        self, program: core.ClosedJaxpr, values: Sequence[Value], replica: Replica
    ) -> list[Value]:
        """What a replica has of the results."""
        consts = [c if isinstance(c, Value) else Value(c) for c in program.consts]
        closed = core.ClosedJaxpr(program.jaxpr, consts)

        def rule(eqn: Any, given: list[Any]) -> list[Value]:
            operands = [value.settled for value in given]
            inner = jaxprs.called(eqn)
            if inner is None or eqn.primitive.name in jaxprs.RECOMPUTED:
                return self._results(eqn, operands, replica)
            if all(v.is_whole for v in operands) and stays_a_call(eqn):
                return replica.same(eqn, operands)
            try:
                return self.run(inner, operands, replica)
            except MixedRows as mixed:
                raise mixed.inside(str(eqn.source_info.name_stack)) from None

        return jaxprs.evaluated(closed, values, rule, literal)

    def _results(
        self, eqn: Any, operands: list[Value], replica: Replica
    ) -> list[Value]:
        name = eqn.primitive.name
        try:
            if name in self._rules:
                results = self._rules[name](replica, eqn, operands)
            else:
                results = _by_default(replica, eqn, operands)
        except RowsMixError:
            if any(value.is_part_of_state for value in operands):
                whole = list(map(replica.state_whole, operands))
                return self._results(eqn, whole, replica)
            results = _gathered(replica, eqn, operands)
        parts = [value for value in operands if value.rows is not None]
        of_state = bool(parts) and all(value.of_state for value in parts)
        for result, var in zip(results, eqn.outvars, strict=True):
            shape = var.aval.shape
            if result.rows is not None:
                shape = replica.divided_at(shape, result.rows)
            if jnp.shape(result.array) != shape:
                raise AssertionError(f"{eqn} made {jnp.shape(result.array)}.")
            result.zero = is_zero(eqn, operands)
            result.of_state |= of_state and result.rows is not None
        return results

    def _named(self, replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        """A value that the caller has a way to sum."""
        kind, _, name = eqn.params["name"].partition(":")
        if kind == ADDEND:
            return [Value(replica.addend(values[0]), partial=True)]
        total = self._sums.get(kind)
        (value,) = values
        if total is not None and value.partial:
            own, of_rows = value.array, replica.sum_of_rows(value, None)
            if self._watch is not None and not replica.in_loop:
                own = self._watch.passed(name, own)
            if own is not value.array:  # The watch has changed it.
                of_rows = None
            value.total = Value(total(own, of_rows))
            value = value.total
        return replica.apply(eqn, [value.array], value.rows, value.partial)


def _by_default(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """An operation without a rule, on whole values."""
    if differs(eqn) or any(v.rows is not None for v in values):
        raise RowsMixError
    return replica.same(eqn, values)


def _gathered(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """The results of an operation that mixes the rows of small values: each replica
    computes all of them, and goes on with its part.
    """
    try:
        if differs(eqn):
            raise RowsMixError
        results = replica.same(eqn, values)
    except RowsMixError:
        scope = str(eqn.source_info.name_stack)
        raise MixedRows(eqn.primitive.name, scope) from None
    return [_own_rows(replica, result) for result in results]


def _own_rows(replica: Replica, value: Value) -> Value:
    shape = jnp.shape(value.array)
    if replica.rows in shape:
        dim = shape.index(replica.rows)
        return Value(replica.part(value, dim), dim)
    return value


def _unchanged(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Values as they are."""
    found = replica.apply(eqn, [value.array for value in values])
    return [
        Value(new.array, value.rows, value.partial)
        for new, value in zip(found, values, strict=True)
    ]


def _constrained(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """A value divided over the logical devices of each replica, and state in parts that
    is gathered or scattered.
    """
    value, sharding = values[0], eqn.params["sharding"]
    if replica.has_state_in_parts:
        value = _resharded(replica, value, sharding.spec)
    if not ReplicaMesh(sharding.mesh).logical_axes:
        return [value]
    mesh = sharding.mesh.abstract_mesh.update_axis_types(
        {REPLICA_AXIS: AxisType.Manual}
    )
    spec = PartitionSpec(*map(_without_replicas, sharding.spec))
    own = lax.with_sharding_constraint(value.array, NamedSharding(mesh, spec))
    return [Value(own, value.rows, value.partial, value.of_state)]


def _resharded(replica: Replica, value: Value, spec: PartitionSpec) -> Value:
    """What a replica has of a value that is to be divided over the replicas so."""
    dim = next((i for i, axes in enumerate(spec) if axes == REPLICA_AXIS), None)
    if dim is None:
        return replica.state_whole(value)
    return replica.part_of_state(value, dim)


def _without_replicas(entry: Any) -> Any:
    """The axes along which a dimension is divided, but for the replicas'."""
    if isinstance(entry, tuple):
        return tuple(axis for axis in entry if axis != REPLICA_AXIS) or None
    return None if entry == REPLICA_AXIS else entry

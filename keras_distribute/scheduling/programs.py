"""From a function that is scheduled to the program that a worker runs.

The function is traced once for each form of its arguments. What it reads of variables
becomes inputs; what an optimizer is given becomes pushes of gradients, and the
optimizer does nothing; assignments become what is added, or set. The program travels
as bytes; the worker needs no Python of the user's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_distribute import checks
from keras_distribute.devices import on_cpus
from keras_distribute.devices.jaxprs import part_of
from keras_distribute.devices.rewriting import all_rewritten
from keras_distribute.errors import VariableScopeError
from keras_distribute.remote.frames import Header
from keras_distribute.run.arguments import Call
from keras_distribute.scheduling import lookups
from keras_distribute.scheduling.additions import Change, added_constant, changes_of
from keras_distribute.scheduling.traces import Form, Trace
from keras_distribute.scheduling.updates import Updates
from keras_distribute.servers.programs import exported
from keras_distribute.values.arrays import is_x64
from keras_distribute.variables import DistributedVariable


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A table of which a function takes rows.

    Attributes:
        variable: The table.
        size: How many rows at most.
        read: Its index in `Traced.reads`; `None` where only its gradient is made.
    """

    variable: Any
    size: int
    read: int | None


@dataclasses.dataclass
class Traced:
    """A function of which is known what it reads and makes.

    Attributes:
        number: Of the program, in all tasks.
        blobs: The program as bytes; where it looks up rows, also the program from its
            arguments to the ids.
        lookups: The tables of which it takes rows.
        whole: Tables of which it takes more, and why.
        reads: The variables on servers whose values it takes, in order.
        kept: Those of the coordinator whose values it takes, after them.
        advanced: Those to which each step adds the same, such as seeds: their values
            come after them, with the arguments of each step.
        axes: For each array of arguments, and then of `elements`, along which axis it
            has the rows of a batch, which the devices of a worker divide; or `None`.
        elements: The iterators that it takes a batch of, each with the forms of arrays.
        structure: Of the results.
        forms: Of the results that are arrays.
        leaves: Their leaves: `None` for an array, and other objects as they are.
        partial: Whether each result that is an array depends on what functions add to
            variables of the coordinator: it lacks what those under way add.
        gradients: The optimizers with the variables whose gradients come first among
            what is pushed.
        pushed: The variables on servers that are added to or set, in order.
        changes: The variables of the coordinator that are, last among the outputs.
        constants: Variables of the coordinator, but for metrics', to which always the
            same is added.
        ordered: Variables that a worker cannot change without knowing all that others
            did before.
        x64: Whether its numbers may have 64 bits. The threads of workers ask, for what
            they make for it; whoever scheduled it may have said so for its thread.
        precision: Of its matrix products and convolutions, likewise.
        layouts: What workers are told of it, by the name of the coordinator, which is
            another one for servers that are taken anew, and by how many copies there
            are of what it sets.
    """

    number: int
    blobs: list[np.ndarray[Any, Any]]
    lookups: list[Lookup]
    whole: list[tuple[Any, str]]
    reads: list[Any]
    kept: list[Any]
    advanced: list[Any]
    axes: list[int | None]
    elements: list[tuple[Any, list[Form]]]
    structure: Any
    forms: list[Any]
    leaves: list[Any]
    partial: list[bool]
    gradients: list[tuple[Any, list[Any]]]
    pushed: list[tuple[Change, Any]]
    changes: list[tuple[Change, Any]]
    constants: list[tuple[Any, np.ndarray[Any, Any]]]
    ordered: list[Any]
    x64: bool
    precision: str | None
    layouts: dict[Any, Header] = dataclasses.field(default_factory=dict[Any, Header])

    @property
    def num_args(self) -> int:
        """How many arrays of arguments it takes."""
        return len(self.axes) - sum(len(forms) for _, forms in self.elements)

    @property
    def num_results(self) -> int:
        """How many results are arrays."""
        return sum(leaf is None for leaf in self.leaves)

    def of_servers(self) -> list[Any]:
        """The variables of servers that it takes or changes."""
        found = [*self.reads, *(lookup.variable for lookup in self.lookups)]
        found += [variable for _, variable in self.pushed]
        for optimizer, weights in self.gradients:
            found += [*weights, *optimizer.variables]
        return found

    def size_of(self, weight: Any) -> int | None:
        """How many rows the gradient of a weight has; `None` for all."""
        sizes = {id(lookup.variable): lookup.size for lookup in self.lookups}
        return sizes.get(id(weight))

    def results(self, arrays: Sequence[Any]) -> Callable[[], Any]:
        """What the function returns, from the arrays of a worker, when it is called.
        Results may be kept for long, and keep neither a model nor an optimizer.
        """
        return functools.partial(
            _rebuilt, self.structure, self.leaves, arrays[: self.num_results]
        )


def _rebuilt(structure: Any, leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
    left = iter(arrays)
    found = [jnp.asarray(next(left)) if leaf is None else leaf.value for leaf in leaves]
    return jax.tree.unflatten(structure, found)


def traced(
    strategy: Any,
    function: Callable[..., Any],
    call: Call,
    on_servers: Callable[[Any], bool],
    platforms: Sequence[str],
    updates: Updates,
    number: int,
    elements: Sequence[tuple[Any, list[Form]]] = (),
    axes: Sequence[int | None] | None = None,
) -> Traced:
    """The program of a call.

    Args:
        strategy: Whose variables it uses.
        function: Called, while traced, with the arguments.
        call: The arguments.
        on_servers: Whether a variable is one of those that servers keep.
        platforms: Of the workers.
        updates: What the servers do with the gradients that are pushed.
        number: Of the program, in all tasks.
        elements: The forms of batches that differ from the first ones.
        axes: Along which axis each array of the arguments has the rows of a batch; by
            default the first, of those that have as many rows as a batch.

    Raises:
        ContextError: For weights that are read after their gradients were applied.
        VariableScopeError: For variables that it may not use, or creates in each call.
    """
    known: list[Any] = []
    batches: list[tuple[Any, list[Form]]] = list(elements)
    created = False
    while True:
        trace = Trace(strategy, function, call, known, batches)
        program = trace.run()
        new = trace.new_variables()
        foreign = [v for v in new if not isinstance(v, DistributedVariable)]
        if foreign:
            raise _foreign_error(strategy, foreign)
        if trace.scope.created and created:
            raise _creating_error(list(trace.scope.created.values()))
        created = created or bool(trace.scope.created)
        if not new and len(trace.elements) == len(batches):
            made = _Made(trace, program, on_servers, updates)
            return made.traced(platforms, axes, number)
        known, batches = [*known, *new], trace.elements


class _Made:
    """From a trace to what travels."""

    def __init__(
        self,
        trace: Trace,
        program: Any,
        on_servers: Callable[[Any], bool],
        updates: Updates,
    ) -> None:
        self._trace, self._on_servers = trace, on_servers
        self._updates = updates
        self._looked = _looked_up(trace, program, on_servers, updates.refuses_rows)
        self._program = self._looked.program
        self._first = len(program.jaxpr.outvars) - len(trace.written)
        self._index = {id(variable): i for i, variable in enumerate(trace.known)}

    def traced(
        self, platforms: Sequence[str], axes: Sequence[int | None] | None, number: int
    ) -> Traced:
        """The program, exported."""
        trace, written = self._trace, self._trace.written
        pushed, changed, constants, ordered = self._sorted_changes()
        always = {id(variable) for variable, _ in constants}
        of_servers = [v for v in trace.known if self._on_servers(v)]
        kept = [
            v for v in trace.known if not self._on_servers(v) and id(v) not in always
        ]
        variables = [*of_servers, *kept, *(variable for variable, _ in constants)]
        order = [self._index[id(v)] for v in variables]
        place = {i: k for k, i in enumerate(order)}
        program = self._program
        if set(platforms) == {"cpu"}:
            program = all_rewritten(program, on_cpus.OF_EACH_ROW)
        run = core.jaxpr_as_fun(program)
        function = functools.partial(self._outputs, run, [*pushed, *changed])
        avals = self._program.in_avals
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        needed = {place[i] for i in self._looked.needed if i in place}
        blob, used = exported(
            lambda *given: function(
                [given[place[i]] for i in range(len(order))], list(given[len(order) :])
            ),
            [*(shapes[i] for i in order), *shapes[len(order) :]],
            platforms,
            droppable=len(order),
            needed=needed,
        )
        taken = {id(variables[i]) for i in used}
        reads = [v for v in of_servers if id(v) in taken]
        of_worker = [i for i in used if i >= len(of_servers)]
        ids = self._ids([order[i] for i in of_worker], platforms)
        return Traced(
            number=number,
            blobs=[blob, *ids],
            lookups=self._lookups(reads),
            whole=[(trace.known[i], why) for i, why in self._looked.whole.items()],
            reads=reads,
            kept=[v for v in kept if id(v) in taken],
            advanced=[v for v, _ in constants if id(v) in taken],
            axes=trace.axes(axes),
            elements=trace.elements,
            structure=trace.structure,
            forms=self._program.out_avals[: trace.num_results],
            leaves=trace.leaves,
            partial=self._depending([i for _, i in changed]),
            gradients=trace.gradients,
            pushed=[(kind, written[i]) for kind, i in pushed],
            changes=[(kind, written[i]) for kind, i in changed],
            constants=constants,
            ordered=ordered,
            x64=is_x64(),
            precision=jax.config.values["jax_default_matmul_precision"],
        )

    def _depending(self, changes: Sequence[int]) -> list[bool]:
        """Whether each result depends on the old value of a variable that is changed.

        Args:
            changes: The variables, among those that are written.
        """
        written = self._trace.written
        old = {self._index[id(written[i])] for i in changes}
        results = self._program.jaxpr.outvars[: self._trace.num_results]
        if not old:
            return [False] * len(results)
        needed = [part_of(self._program, [result])[1] for result in results]
        return [not old.isdisjoint(each) for each in needed]

    def _lookups(self, reads: Sequence[Any]) -> list[Lookup]:
        place = {id(variable): i for i, variable in enumerate(reads)}
        return [
            Lookup(variable, table.size, place.get(id(variable)))
            for table in self._looked.tables
            for variable in [self._trace.known[table.index]]
        ]

    def _ids(self, used: list[int], platforms: Sequence[str]) -> list[Any]:
        """The program from what a worker is given to the ids, if it looks up any.

        Args:
            used: The variables that it is given, among all inputs.
            platforms: Of the workers.
        """
        if not self._looked.tables:
            return []
        shapes, ids = self._trace.shapes, self._looked.ids
        num_known = len(self._trace.known)
        taken = [*used, *range(num_known, len(shapes))]

        def function(*given: Any) -> list[Any]:
            of = dict(zip(taken, given, strict=True))
            return ids(*(of.get(i) for i in range(len(shapes))))

        return [exported(function, [shapes[i] for i in taken], platforms)[0]]

    def _sorted_changes(
        self,
    ) -> tuple[
        list[tuple[Change, int]],
        list[tuple[Change, int]],
        list[tuple[Any, Any]],
        list[Any],
    ]:
        """What is pushed, what the coordinator is told, what is always added to its
        variables, and which of those need to know all that was done before.
        """
        written = self._trace.written
        places = [self._index[id(variable)] for variable in written]
        outputs = range(self._first, self._first + len(written))
        pushed: list[tuple[Change, int]] = []
        changed: list[tuple[Change, int]] = []
        constants: list[tuple[Any, Any]] = []
        ordered: list[Any] = []
        for i, kind in enumerate(changes_of(self._program, places, outputs)):
            variable, constant = written[i], None
            if kind is Change.SAME:
                continue
            if self._on_servers(variable):
                # The last one counts, of those that several workers make at once.
                pushed.append((Change.SET if kind is Change.OTHER else kind, i))
                continue
            is_metric = is_sum_of_replicas(variable)
            is_latest = kind is Change.SET and is_metric
            if is_latest or kind in (Change.MOVED, Change.OTHER):
                ordered.append(variable)
                kind = Change.SET
            # What is always added to a seed is added when a step is scheduled; to a
            # metric's count with its total, when the step is done.
            if kind is Change.ADDED and not is_metric:
                constant = added_constant(self._program, places[i], outputs[i])
            if constant is None:
                changed.append((kind, i))
            else:
                constants.append((variable, constant))
        return pushed, changed, constants, ordered

    def _outputs(
        self,
        run: Callable[..., list[Any]],
        changes: list[tuple[Change, int]],
        values: list[Any],
        rest: list[Any],
    ) -> list[Any]:
        """What a worker computes: results, gradients, and what is added or set.

        Args:
            run: The program.
        """
        trace = self._trace
        # Of a sum of the old value and something, that is the sum with zero: XLA
        # computes what both runs share once, but for loops.
        empty = list(values)
        sums: list[int] = []
        for kind, i in changes:
            if kind is Change.ADDED:
                place = self._index[id(trace.written[i])]
                empty[place] = jnp.zeros_like(values[place])
                sums.append(place)
        from_zero = outputs = run(*empty, *rest)
        if self._others_need(sums, changes):
            outputs = run(*values, *rest)
        new: list[Any] = []
        for kind, i in changes:
            if kind is Change.ADDED:
                new.append(from_zero[self._first + i])
            elif kind is Change.MOVED:
                old = values[self._index[id(trace.written[i])]]
                new.append(outputs[self._first + i] - old)
            else:
                new.append(outputs[self._first + i])
        weights = [weight for _, each in trace.gradients for weight in each]
        start = self._first - len(weights)
        gradients = [
            gradient.astype(self._updates.gradient_dtype(weight))
            for gradient, weight in zip(outputs[start:], weights, strict=False)
        ]
        return [*outputs[:start], *gradients, *new]

    def _others_need(self, sums: list[int], changes: list[tuple[Change, int]]) -> bool:
        """Whether what is no sum depends on the old values of those that are."""
        made = self._program.jaxpr.outvars
        others = [made[self._first + i] for kind, i in changes if kind != Change.ADDED]
        _, needed = part_of(self._program, [*made[: self._first], *others])
        return not set(sums).isdisjoint(needed)


def is_sum_of_replicas(variable: Any) -> bool:
    """Whether a variable is one of those to which each replica adds, as a metric's."""
    return (variable.synchronization, variable.aggregation) == ("on_read", "sum")


def _looked_up(
    trace: Trace,
    program: core.ClosedJaxpr,
    on_servers: Callable[[Any], bool],
    refuses_rows: Callable[[Any, Any], str | None],
) -> lookups.Looked:
    """The program of the rows that it looks up."""
    output = trace.num_results
    gradients: dict[int, tuple[Any, int]] = {}
    for optimizer, weights in trace.gradients:
        for i, weight in enumerate(weights):
            gradients[id(weight)] = optimizer, output + i
        output += len(weights)
    written = set(map(id, trace.written))
    tables: dict[int, int | None] = {}
    known = set(range(len(trace.shapes)))
    for i, variable in enumerate(trace.known):
        if on_servers(variable):
            known.discard(i)
            if variable.shape and id(variable) not in written:
                tables[i] = gradients.get(id(variable), (None, None))[1]

    def refused(table: int) -> str | None:
        weight = trace.known[table]
        found = gradients.get(id(weight))
        return None if found is None else refuses_rows(found[0], weight)

    return lookups.by_rows(program, tables, known, refused)


def _foreign_error(strategy: Any, variables: list[Any]) -> VariableScopeError:
    names = checks.listed([variable.path for variable in variables], most=10)
    return VariableScopeError(
        "The function that was scheduled uses variables that were created outside of "
        f"the strategy's scope: {names}.",
        received=f"{len(variables)} variable(s) that {strategy!r} does not know.",
        fix="create the model, the optimizer and the metrics inside `with "
        "strategy.scope():`.",
    )


def _creating_error(variables: list[Any]) -> VariableScopeError:
    names = checks.listed([variable.path for variable in variables], most=10)
    return VariableScopeError(
        f"The function that was scheduled creates variables in each call: {names}.",
        received=f"{len(variables)} new variable(s) while traced again.",
        fix="create models, metrics and variables once, outside of the function.",
    )

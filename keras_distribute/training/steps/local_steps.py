"""The program of many steps by one worker, without the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from keras_distribute._compat.trainer import TrainState
from keras_distribute.devices.jaxprs import between, inlined, part_of
from keras_distribute.scheduling.additions import Change, added_constant, changes_of


class LocalSteps:
    """Steps after each other, being traced.

    Args:
        step: Keras's, from the state and a batch to logs and the new state.
        state: Before the first step.
        runs: Batches of one form each, stacked.
        on_servers: Whether servers keep each variable of layers and metrics.

    Attributes:
        names_of_logs: What a step returns.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        state: TrainState,
        runs: Sequence[Any],
        on_servers: Sequence[bool],
    ) -> None:
        self._step, self._state, self._runs = step, state, runs
        self._on_servers = on_servers
        self._old = [*state.others, *state.metrics]
        self.names_of_logs: set[str] = set()
        self._looked: tuple[core.ClosedJaxpr, range, Any] | None = None
        self._kinds: list[Change] = []
        self._total_constants: list[Any] = []
        self._look_at_all()

    def _look(self, run: Any) -> tuple[list[Change], list[Any]]:
        """What a step on a batch of this form does to the variables of layers and
        metrics, and what it adds to them where that is always the same.
        """
        first = jax.tree.map(lambda array: array[0], run)
        leaves, form = jax.tree.flatten((self._state, first))
        structure: Any = None

        def function(*arrays: Any) -> list[Any]:
            nonlocal structure
            logs, new = self._one(*jax.tree.unflatten(form, arrays))
            self.names_of_logs = set(logs)
            made, structure = jax.tree.flatten(logs)
            return [*jax.tree.leaves(new), *made]

        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in leaves]
        program = jax.make_jaxpr(function)(*shapes)
        sizes = list(map(len, self._state))
        others, metrics = sizes[0], sum(sizes[:3])
        own = [*range(others, others + sizes[1]), *range(metrics, metrics + sizes[3])]
        self._looked = program, range(metrics, sum(sizes)), structure
        kinds = changes_of(program, own, own)
        constants = [
            added_constant(program, i, i) if kind is Change.ADDED else None
            for i, kind in zip(own, kinds, strict=True)
        ]
        return kinds, constants

    def _look_at_all(self) -> None:
        found = list(map(self._look, self._runs))
        lengths = [jax.tree.leaves(run)[0].shape[0] for run in self._runs]
        for i in range(len(self._old)):
            kinds = {kinds[i] for kinds, _ in found}
            self._kinds.append(kinds.pop() if len(kinds) == 1 else Change.OTHER)
            constants = [constants[i] for _, constants in found]
            total = None
            # A metric gets all that is added to it at once, when its round ends.
            is_metric = i >= len(self._state.others)
            if not is_metric and all(each is not None for each in constants):
                total = sum(map(_times, constants, lengths))
            self._total_constants.append(total)

    def logs_of_metrics(self) -> dict[str, Callable[[Sequence[Any]], Any] | None]:
        """What a step returns that depends on variables of metrics: each with the
        function of what these are after the step; `None` where it needs more.
        """
        assert self._looked is not None
        program, metrics, structure = self._looked
        program = inlined(program)
        made = program.jaxpr.outvars
        found: dict[str, Callable[[Sequence[Any]], Any] | None] = {}
        logs = jax.tree.unflatten(structure, made[metrics.stop :])
        for name, log in logs.items():
            outputs, form = jax.tree.flatten(log)
            if not set(metrics).isdisjoint(part_of(program, outputs)[1]):
                alone = between(program, [made[i] for i in metrics], outputs)
                found[name] = None if alone is None else _returning(alone, form)
        return found

    def _one(self, state: TrainState, data: Any) -> tuple[Any, TrainState]:
        """One step; what it makes has the old types."""
        logs, new = self._step(state, data)
        new = TrainState(*map(list, new))
        return logs, jax.tree.map(
            lambda old, value: jnp.asarray(value, old.dtype), state, new
        )

    def made(self, with_logs: bool) -> tuple[TrainState, Any]:
        """The state after all steps, with the sums of those variables to which steps
        add; and the last step's logs.
        """
        state, logs = self._start(), None

        def step(state: TrainState, data: Any) -> tuple[TrainState, Any]:
            found, state = self._one(state, data)
            return state, jax.tree.map(jnp.asarray, found) if with_logs else None

        for run in self._runs:
            if jax.tree.leaves(run)[0].shape[0] == 1:
                state, logs = step(state, jax.tree.map(lambda array: array[0], run))
            else:
                state, found = lax.scan(step, state, run)
                logs = jax.tree.map(lambda array: array[-1], found)
        return state, logs

    def _start(self) -> TrainState:
        """The state, with zeros in the place of what steps add to."""
        values = [
            jnp.zeros_like(old) if self._is_from_zero(i) else old
            for i, old in enumerate(self._old)
        ]
        others = len(self._state.others)
        return self._state._replace(others=values[:others], metrics=values[others:])

    def _is_from_zero(self, i: int) -> bool:
        added = self._kinds[i] is Change.ADDED and self._total_constants[i] is None
        return not self._on_servers[i] and (added or self._kinds[i] is Change.SET)

    def own_changes(self, new: TrainState) -> Iterator[tuple[int, Any]]:
        """The new values of the coordinator's variables, by their places; without those
        of `own_sums`.
        """
        for i, value in enumerate([*new.others, *new.metrics]):
            kind, constant = self._kinds[i], self._total_constants[i]
            if self._on_servers[i] or kind is Change.SAME:
                continue
            if constant is not None:
                yield i, self._old[i] + constant
            elif kind is not Change.ADDED:
                yield i, value

    def own_sums(self, new: TrainState) -> dict[int, Any]:
        """What the steps add to variables of the coordinator, by their places, where
        that depends on their batches.
        """
        values = [*new.others, *new.metrics]
        return {
            i: value
            for i, value in enumerate(values)
            if self._kinds[i] is Change.ADDED and self._is_from_zero(i)
        }

    def of_servers(self, new: TrainState) -> tuple[dict[int, Any], dict[int, Any]]:
        """What has become of the servers' variables: the new values of those that
        groups agree on by their mean, such as moving statistics, and what was added to
        those to which each step adds.
        """
        means: dict[int, Any] = {}
        sums: dict[int, Any] = {}
        for i, value in enumerate([*new.others, *new.metrics]):
            if not self._on_servers[i] or self._kinds[i] is Change.SAME:
                continue
            if self._kinds[i] is Change.ADDED:
                sums[i] = value - self._old[i]
            else:
                means[i] = value
        return means, sums


def _returning(program: core.ClosedJaxpr, form: Any) -> Callable[[Sequence[Any]], Any]:
    """A program, as a function that returns a structure."""
    run = core.jaxpr_as_fun(program)
    return lambda given: jax.tree.unflatten(form, run(*given))


def _times(constant: Any, steps: int) -> Any:
    return (constant * steps).astype(constant.dtype)

"""Training in rounds (`local_steps=`): each group takes many steps by itself, and an
outer optimizer on the servers is given the mean of what has become of the weights, as a
gradient. So trains DiLoCo (https://arxiv.org/abs/2311.08105).

There are as many groups as workers, but no worker is bound to one: all that a group
knows travels with its function, and comes back. So a function of a worker that has died
is run by another, to the same result. With `local_slots` the optimizer's slots of a
group stay on the worker that ran it last, until somebody looks at them.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute import context
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.trainer import TrainState
from keras_distribute._compat.variables import takes_gradient_as_value
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import StructureTypeError
from keras_distribute.run.arguments import Call
from keras_distribute.scheduling import rounds, traces
from keras_distribute.scheduling.rounds import Held, HeldGroup
from keras_distribute.scheduling.values import (
    IteratorArgument,
    PerWorkerIterator,
    RemoteValue,
)
from keras_distribute.strategies.parameter_server import ParameterServerStrategy
from keras_distribute.training.steps.local_steps import LocalSteps
from keras_distribute.training.steps.scheduled import Logs, ScheduledStep


def step_on_workers(strategy: Any, trainer: Any, kind: str) -> ScheduledStep:
    """A step that workers make, or a round of steps.

    Args:
        strategy: A `ParameterServerStrategy`.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if kind == "train" and strategy.local_steps > 1:
        return LocalRounds(strategy, trainer)
    return ScheduledStep(strategy, trainer, kind)


class _Round(NamedTuple):
    """A round that is under way.

    Attributes:
        steps: Of each group how many.
        rest: What all began with of the optimizer's variables that are the model's.
        held: The slots, if they stay on workers.
        results: Of each group.
    """

    steps: list[int]
    rest: list[Any]
    held: Held | None
    results: list[RemoteValue]


class LocalRounds(ScheduledStep):
    """Training steps of a model that are made in rounds."""

    def __init__(self, strategy: ParameterServerStrategy, trainer: Any) -> None:
        super().__init__(strategy, trainer, "train")
        _check_optimizer(trainer.optimizer)
        self._waiting: list[Any] = []
        self._round: _Round | None = None
        self._outer: Any = None
        self._own_logs: dict[str, Any] = {}
        self._names_of_results: list[str] | None = None
        self._has_ended = False
        self._lock = threading.RLock()  # Another thread may save a checkpoint.

    def __call__(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Takes a batch; a round begins when each group has all of its own."""
        self._note(state)
        is_of_worker = isinstance(data, PerWorkerIterator)
        batch = data if is_of_worker else jax.tree.map(np.asarray, data)
        groups = len(self._strategy.cluster.workers)
        with self._lock:
            self._strategy.unfinished[id(self)] = self
            self._waiting.append(batch)
            if len(self._waiting) == groups * self._strategy.local_steps:
                self._begin()
        return self._logs(), state

    def several(self, state: Any, data: Sequence[Any], size: int) -> tuple[Any, Any]:
        """Takes batches."""
        del size
        for batch in data:
            self(state, batch)
        return self._logs(), state

    def _logs(self) -> Logs:
        """The metrics of the rounds that have ended, and what a step of the user's own
        has returned last.
        """
        return Logs(
            self._results,
            lambda: self._has_ended,
            lambda: self._own_logs,
            self._names_of_results,
        )

    def _begin_metrics(self) -> None:
        self._has_ended = False

    def are_of(self, trainer: Any) -> bool:
        """Whether they are those of a model."""
        return trainer is self._trainer

    def finish(self) -> None:
        """Trains on the batches that are left, and waits for the end of that round."""
        with self._lock:
            self._strategy.unfinished.pop(id(self), None)
            if self._waiting:
                self._begin()
            self._end()

    def drop(self) -> None:
        """Forgets the batches that are left, and the round that is under way."""
        self._strategy.unfinished.pop(id(self), None)
        self._waiting, self._round = [], None

    def _begin(self) -> None:
        """Schedules a function for each group that has batches."""
        batches, self._waiting = self._waiting, []
        self._end()
        cluster, strategy = self._strategy.cluster, self._strategy
        cluster.queue.check()
        own = rounds.blocks(batches, strategy.local_steps)
        results: list[RemoteValue] = []
        held = self._held()
        number = 0 if held is None else held.begin()
        rest = [np.asarray(variable.value) for variable in self._variables(False)]
        for group, block in enumerate(own):
            slots = self._slots_of(group)
            iterators: list[PerWorkerIterator] = []
            if isinstance(block[0], PerWorkerIterator):
                iterators = block[:1]
                runs = [iterator.dataset.argument(0) for iterator in block]
            else:
                runs = _stacked(block, np.stack)
            call = Call((slots, rest, runs), {}, strategy.replica_mesh)
            # Of the stacked batches the second axis is that of rows.
            count = len(slots) + len(rest)
            stacked = [1 if np.ndim(array) > 1 else None for array in call.arrays]
            axes = [*[None] * count, *stacked[count:]]
            program = cluster.program(self._steps, call, axes)
            if program.ordered:
                self._check_order(program.ordered)
            stay = None
            if held is not None:
                stay = HeldGroup(held, group, number, len(slots))
            results.append(
                cluster.schedule(
                    program,
                    self._steps,
                    [call],
                    iterators,
                    counted=len(block),
                    slots=stay,
                )
            )
        self._round = _Round(list(map(len, own)), rest, held, results)

    def _end(self) -> None:
        """Waits for the round that is under way, and lets the servers make its
        update.
        """
        if self._round is None:
            return
        (steps, rest, held, results), self._round = self._round, None
        cluster, strategy = self._strategy.cluster, self._strategy
        cluster.join()
        self._has_ended = True
        # Not by `fetch`, which would copy the weights of each.
        fetched = [jax.tree.map(_as_numpy, result.get()) for result in results]
        found = [of_group for _, of_group in fetched]
        if held is not None:
            held.end()
        elif not strategy.local_slots:
            self._keep_slots([slots for slots, _ in fetched])
        # The first group has made the most steps. What they leave as it was, such as
        # the learning rate, a callback may have assigned meanwhile.
        for variable, before, value in zip(
            self._variables(False), rest, found[0]["rest"], strict=True
        ):
            if not np.array_equal(before, value):
                variable.assign(value)
        # Not as each group ends: the order would depend on chance.
        variables = _layers_and_metrics(self._trainer)
        with cluster.kept.lock:
            for each in found:
                for i, change in each["own_sums"].items():
                    cluster.kept.add(variables[i], change)
        self._own_logs.update(found[-1]["logs"] or {})

        def mean(name: str, key: Any) -> Any:
            return rounds.mean([each[name][key] for each in found], steps)

        first = found[0]
        pushed = {
            "weights": [mean("weights", i) for i in range(len(first["weights"]))],
            "means": {i: mean("means", i) for i in first["means"]},
            "sums": {
                i: rounds.sum_of([each["sums"][i] for each in found])
                for i in first["sums"]
            },
        }
        if not jax.tree.leaves(pushed):
            return
        self._outer = strategy._optimizers_of(self._trainer)["outer_optimizer"]
        call = Call((pushed,), {}, strategy.replica_mesh)
        program = cluster.program(self._outer_step, call)
        cluster.schedule(program, self._outer_step, [call], counted=0)
        cluster.join()

    def _held(self) -> Held | None:
        """The slots, if there are any, and they stay on the workers."""
        slots = self._variables(True)
        if not slots or not self._strategy.local_slots:
            return None
        return self._strategy.cluster.slots_of(slots)

    def _slots_of(self, group: int) -> list[Any]:
        """The optimizer's variables that are a group's own; all else (the count of
        steps, the learning rate) is the model's.
        """
        slots = self._strategy.cluster.slots
        return [slots.value_of(variable, group) for variable in self._variables(True)]

    def _keep_slots(self, found: Sequence[Sequence[Any]]) -> None:
        """Takes those of each group."""
        slots = self._strategy.cluster.slots
        for group, arrays in enumerate(found):
            for variable, array in zip(self._variables(True), arrays, strict=True):
                slots.set(variable, group, array)

    def _variables(self, own: bool) -> list[Any]:
        """Those of the optimizer of which groups have their own, or the others."""
        pairs = zip(self._trainer.optimizer.variables, self._are_own(), strict=True)
        return [variable for variable, is_own in pairs if is_own is own]

    def _are_own(self) -> list[bool]:
        """Of which of the optimizer's variables groups have their own."""
        optimizer = self._trainer.optimizer
        weights = compat_optimizer.slot_weights(optimizer)
        return [
            weight is not None or bool(len(variable.shape))
            for variable, weight in zip(optimizer.variables, weights, strict=True)
        ]

    def _outer_step(self, pushed: Any) -> None:
        """Gives the outer optimizer the mean of the differences, as a gradient."""
        scope = traces.current_scope()
        variables = _layers_and_metrics(self._trainer)
        for i, value in pushed["means"].items():
            scope.add_update((variables[i], value))
        for i, change in pushed["sums"].items():
            old = scope.get_current_value(variables[i])
            scope.add_update((variables[i], old + change))
        if pushed["weights"]:
            self._outer.apply(pushed["weights"], self._trainer.trainable_variables)

    def _steps(self, slots: Any, rest: Any, runs: Sequence[Any]) -> Any:
        """The steps of a group in a round: from its slots, the optimizer's other
        variables, and its batches, those of one form stacked, or where the worker
        reads them, to the new slots; and to those others, the differences of weights,
        and statistics.
        """
        if isinstance(runs[0], IteratorArgument):
            runs = _stacked([next(iterator) for iterator in runs], jnp.stack)
        scope = traces.current_scope()
        groups = compat.state_variables(self._trainer, "train")
        assert isinstance(groups, TrainState)
        state = groups._make([scope.get_current_value(v) for v in g] for g in groups)
        are_own = self._are_own()
        given = {True: iter(slots), False: iter(rest)}
        state = state._replace(slots=[next(given[is_own]) for is_own in are_own])
        on_servers = [
            self._strategy.cluster.is_on_servers(variable)
            for variable in (*groups.others, *groups.metrics)
        ]
        with context.entered(Frame(self._strategy, Mode.CROSS, updates=True)):
            steps = LocalSteps(self._run, state, runs, on_servers)
            metrics = set(self._trainer.get_metrics_result())
            new, logs = steps.made(with_logs=metrics != steps.names_of_logs)
        # Of the sums of all groups, which the coordinator has, one knows a part.
        if logs is not None:
            of_metrics = steps.logs_of_metrics()
            logs = {name: log for name, log in logs.items() if name not in of_metrics}
            self._names_of_results = list(of_metrics)
            self._results.others = _results_of(of_metrics, metrics)
        for i, value in steps.own_changes(new):
            scope.add_update(([*groups.others, *groups.metrics][i], value))
        means, sums = steps.of_servers(new)
        weights = [
            after if takes_gradient_as_value(v) else before - after
            for v, before, after in zip(
                groups.weights, state.weights, new.weights, strict=True
            )
        ]
        return list(itertools.compress(new.slots, are_own)), {
            "rest": list(itertools.compress(new.slots, map(operator.not_, are_own))),
            "weights": weights,
            "means": means,
            "sums": sums,
            "own_sums": steps.own_sums(new),
            "logs": logs,
        }


def _results_of(
    logs: Mapping[str, Callable[[Sequence[Any]], Any] | None], metrics: Collection[str]
) -> dict[str, Callable[[Sequence[Any]], Any]]:
    """Those logs that are computed from metrics, and are none of their results, each
    as a function of the values of metrics.

    Raises:
        StructureTypeError: For one that needs something else of the last step.
    """
    found: dict[str, Callable[[Sequence[Any]], Any]] = {}
    for name in logs.keys() - metrics:
        function = logs[name]
        if function is None:
            raise StructureTypeError(
                "Groups of local steps know a part of each metric, so what a step "
                "returns is computed from metrics alone, or from none.",
                received=f"the log {name!r} of train_step.",
                fix="a log for metric.result(), and another one for the rest; or a "
                "metric of its own, keras.metrics.Mean, for both.",
            )
        found[name] = function
    return found


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _layers_and_metrics(trainer: Any) -> list[Any]:
    groups = compat.state_variables(trainer, "train")
    assert isinstance(groups, TrainState)
    return [*groups.others, *groups.metrics]


def _stacked(batches: Sequence[Any], stack: Callable[..., Any]) -> list[Any]:
    """Batches in their order, those of one form that follow each other as one."""
    runs: list[list[Any]] = []
    last: Any = None
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        form = structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
        if form != last:
            runs.append([])
        runs[-1].append(batch)
        last = form
    return [jax.tree.map(lambda *each: stack(each), *run) for run in runs]


def _check_optimizer(optimizer: Any) -> None:
    if compat_optimizer.accumulates(optimizer):
        raise StructureTypeError(
            "Gradients are not accumulated over local steps: a round may end between "
            "two updates.",
            received=f"{optimizer!r} with gradient_accumulation_steps.",
            fix="an optimizer without it, and larger batches.",
        )

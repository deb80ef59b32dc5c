"""Steps of `fit`, `evaluate` and `predict` as functions that are scheduled on workers.

Each batch travels with its step, and counts once; of a `DatasetCreator` each step takes
the next one of its worker. A worker has two steps at most, so
that the logs, `stop_training` and the learning rate mean something; nobody waits for
logs that no callback looks at. Who does waits for the first step of an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_distribute import checks
from keras_distribute._compat import trainer as compat
from keras_distribute.errors import StructureTypeError
from keras_distribute.run.arguments import Call
from keras_distribute.scheduling import traces
from keras_distribute.scheduling.programs import Traced
from keras_distribute.scheduling.values import (
    IteratorArgument,
    PerWorkerIterator,
    RemoteValue,
)
from keras_distribute.strategies.parameter_server import ParameterServerStrategy
from keras_distribute.training.steps.compiled_step import refuse_changed

_AHEAD = 2  # Steps of each worker.


class ScheduledStep:
    """A step of a model, made on a worker."""

    def __init__(
        self, strategy: ParameterServerStrategy, trainer: Any, kind: str
    ) -> None:
        if kind == "train":
            traces.refuse_loss_scaling(trainer.optimizer)
        self._strategy, self._trainer, self._kind = strategy, trainer, kind
        self._step = getattr(trainer, f"{kind}_step")
        self._results = MetricResults(strategy, trainer)
        self._first: RemoteValue | None = None
        self._kinds_of_logs: dict[int, tuple[list[str], list[str]]] = {}
        self._state: Any = None
        self._groups: Sequence[list[Any]] | None = None
        self._metrics: list[Any] = []

    def __call__(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Schedules one step.

        Args:
            state: What Keras hands to steps; the variables have their values.
            data: A batch on the host, or an iterator of the workers.

        Returns:
            What callbacks and `predict` see, which waits when it is looked at, and
            `state`.
        """
        return self.several(state, [data], 1)

    def several(self, state: Any, data: Sequence[Any], size: int) -> tuple[Any, Any]:
        """Schedules a step for each batch, those of one form together."""
        logs: Any = None
        self._note(state)
        # Of one pass, so it is always the same.
        iterators = [each for each in data[:1] if isinstance(each, PerWorkerIterator)]
        left = list(map(self._call, data))
        while left:
            group = [left.pop(0)]
            while left and left[0].signature == group[0].signature:
                if len(group) == size:
                    break
                group.append(left.pop(0))
            logs = self._scheduled(group, iterators)
        return logs, state

    def _note(self, state: Any) -> None:
        """Looks at what Keras hands over: where an epoch begins, or a callback has read
        the model, it is not what the last step has returned.
        """
        if state is not self._state:
            if self._kind == "train":  # Others do not ask what is trained.
                self._check_weights()
            self._state, self._metrics = state, self._trainer.metrics_variables
        if self._strategy.cluster.kept.are_assigned(self._metrics):
            self._begin_metrics()

    def _check_weights(self) -> None:
        groups = compat.state_variables(self._trainer, self._kind)
        if self._groups is None:
            self._groups = groups
        elif list(map(id, groups.weights)) != list(map(id, self._groups[0])):
            refuse_changed(groups, self._groups)

    def _begin_metrics(self) -> None:
        """No step has added anything to the metrics yet."""
        self._first = None

    def _call(self, data: Any) -> Call:
        if isinstance(data, PerWorkerIterator):
            data = data.dataset.argument(0)
        else:
            data = jax.tree.map(np.asarray, data)
        return Call((data,), {}, self._strategy.replica_mesh)

    def _scheduled(
        self, calls: Sequence[Call], iterators: Sequence[PerWorkerIterator]
    ) -> Any:
        cluster = self._strategy.cluster
        cluster.queue.check()
        program = cluster.program(self._traced, calls[0])
        most = _AHEAD * len(cluster.workers)
        if program.number not in self._kinds_of_logs:
            self._kinds_of_logs[program.number] = self._kinds_of(program)
        of_metrics, others = self._kinds_of_logs[program.number]
        if program.ordered:
            self._check_order(program.ordered)
        alone = bool(program.ordered or others)  # They need all that was added before.
        cluster.queue.wait(lambda: cluster.queue.num_pending < most, look=cluster.look)
        result = cluster.schedule(program, self._traced, calls, iterators, alone=alone)
        if self._kind == "predict":
            return _late(program, result)
        self._first = self._first or result
        wait = functools.partial(self._waited_for, self._first)
        if not program.num_results:
            return Logs(self._results, wait)
        return Logs(self._results, wait, result.get, of_metrics)

    def _waited_for(self, first: RemoteValue) -> bool:
        """Waits for the first step, before which metrics are of none."""
        cluster = self._strategy.cluster
        return cluster.queue.wait(lambda: first.is_set, look=cluster.look)

    def _kinds_of(self, program: Traced) -> tuple[list[str], list[str]]:
        """The logs that a worker computes from sums of which it knows a part: those
        that are metrics' results, which the coordinator knows better, and others.
        """
        if self._kind == "predict" or not any(program.partial):
            return [], []
        left = iter(program.partial)
        partial = [leaf is None and next(left) for leaf in program.leaves]
        logs = jax.tree.unflatten(program.structure, partial)
        names = [name for name, log in logs.items() if any(jax.tree.leaves(log))]
        metrics = self._names_of_metrics()
        others = [name for name in names if name not in metrics]
        return [name for name in names if name in metrics], others

    def _names_of_metrics(self) -> set[str]:
        return set(self._trainer.get_metrics_result())

    def _check_order(self, variables: Sequence[Any]) -> None:
        """Raises for what workers cannot change each by itself."""
        if self._kind != "train" or len(self._strategy.cluster.workers) == 1:
            return
        names = checks.listed([variable.path for variable in variables], most=10)
        raise StructureTypeError(
            "What a metric or a layer keeps that is no sum over batches needs to see "
            f"them in order, which several workers cannot: {names}.",
            received=f"fit on {len(self._strategy.cluster.workers)} workers.",
            fix="compile without such a metric, and take it in model.evaluate, where "
            'each batch waits for the one before. A layer\'s dtype="float32" will do: '
            "the last worker's value counts.",
        )

    def _traced(self, data: Any) -> Any:
        """Keras's step, with assignments in the place of the state that it returns."""
        if isinstance(data, IteratorArgument):
            data = next(data)
        scope = traces.current_scope()
        groups = compat.state_variables(self._trainer, self._kind)
        state = groups._make([scope.get_current_value(v) for v in g] for g in groups)
        result, new = self._run(state, data)
        for variables, old, values in zip(groups, state, new, strict=True):
            for variable, before, value in zip(variables, old, values, strict=True):
                if value is not before and not isinstance(value, traces.Updated):
                    scope.add_update((variable, value))
        if self._kind == "predict":
            return result
        # Of metrics the coordinator has the sums of all workers.
        are_metrics = self._names_of_metrics() == set(result)
        return None if are_metrics else result

    def _run(self, state: Any, data: Any) -> tuple[Any, Any]:
        if self._kind == "predict":
            outputs, others = self._step(state, data)
            return outputs, (state[0], others)
        return self._step(state, data)


class MetricResults:
    """Computes the results of a model's metrics, in one program: operation by operation
    they would take as long as a step.

    Attributes:
        others: What else is computed from the values of metrics, by its name.
    """

    def __init__(self, strategy: ParameterServerStrategy, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self.others: dict[str, Callable[[Sequence[Any]], Any]] = {}
        self._program = jax.jit(self._computed)

    def __call__(self) -> dict[str, Any]:
        variables = self._trainer.metrics_variables
        return self._program(self._strategy.cluster.kept.values_of(variables))

    def _computed(self, values: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(self._trainer.metrics_variables, values, strict=True)
        with keras.StatelessScope(list(pairs)):
            found = self._trainer.get_metrics_result()
        return {**found, **{name: each(values) for name, each in self.others.items()}}


class Logs(dict[str, Any]):
    """What the metrics are when somebody looks, and what the step has returned.

    Args:
        results: Computes those of metrics.
        has_results: Whether a step has ended since the metrics began; it may wait.
        own: Waits for what the step has returned, of a step of the user's own.
        names: Those that are taken of metrics; `None`: all that `own` lacks.
    """

    def __init__(
        self,
        results: Callable[[], dict[str, Any]],
        has_results: Callable[[], bool],
        own: Callable[[], dict[str, Any]] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._results, self._has_results = results, has_results
        self._own, self._names = own, names

    def _now(self) -> Logs:
        """These logs, up to date."""
        own = {} if self._own is None else self._own()
        if self._names != [] and self._has_results():
            found = self._results()
            names = found.keys() - own if self._names is None else self._names
            own = {**own, **{name: found[name] for name in names}}
        self.update(own)
        return self

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self._now(), key)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self._now(), key)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._now())

    def __len__(self) -> int:
        return dict.__len__(self._now())

    def __bool__(self) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return dict.get(self._now(), key, default)

    def keys(self) -> Any:
        return dict.keys(self._now())

    def values(self) -> Any:
        return dict.values(self._now())

    def items(self) -> Any:
        return dict.items(self._now())

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


class _Late:
    """An array of a prediction that is on its way."""

    def __init__(self, value: Callable[[], Any], form: Any) -> None:
        self._value = value
        self.shape, self.dtype = form.shape, form.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self._value()
        return np.array(value, dtype) if copy else np.asarray(value, dtype)

    def __jax_array__(self) -> Any:
        return self._value()

    def __len__(self) -> int:
        return self.shape[0]


def _late(program: Traced, result: RemoteValue) -> Any:
    """The results, each of which waits for the worker when it is read."""
    left = iter(range(program.num_results))

    def leaf_of(index: int) -> Any:
        def value() -> Any:
            return jax.tree.leaves(result.get())[index]

        return _Late(value, program.forms[index])

    leaves = [
        leaf_of(next(left)) if leaf is None else leaf.value for leaf in program.leaves
    ]
    return jax.tree.unflatten(program.structure, leaves)

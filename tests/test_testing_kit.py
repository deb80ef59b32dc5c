"""`kd.testing`: strategies by name, tests over their combinations, faults at a moment,
functions by value.
"""

import pickle
import sys
import time

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.launch.modules import module_of
from keras_distribute.testing import combinations

pytestmark = pytest.mark.timeout(200)


REPLICAS = {
    "default_strategy": (1, 1),
    "one_device_strategy": (1, 1),
    "mirrored_strategy_with_one_cpu": (1, 1),
    "mirrored_strategy_with_two_cpus": (2, 1),
    "mirrored_strategy_with_cpu_1_and_2": (2, 1),
    "multi_worker_mirrored_2x1_cpu": (2, 2),
    "multi_worker_mirrored_2x2_cpu": (4, 2),
}
"""How many there are under each strategy, and in how many processes."""


@combinations.combine(strategy=combinations.all_strategies, scale=[2.0])
def test_a_test_runs_under_each_strategy(strategy, scale, tmp_path, request_name):
    replicas, processes = REPLICAS[request_name]
    assert (strategy.num_replicas_in_sync, kd.process_count()) == (replicas, processes)
    total = strategy.reduce("SUM", strategy.run(lambda: np.float32(scale)), axis=None)
    assert total == scale * replicas
    assert tmp_path.exists()


@pytest.fixture
def request_name(request):
    """The name of the strategy of a case."""
    return request.node.callspec.params["strategy"].name


@combinations.combine(strategy=[combinations.multi_worker_mirrored_2x1_cpu])
def raises_in_one_process(strategy):
    kd.barrier("both are here")
    assert kd.process_index() != 1, "wrong in process 1"


def test_what_one_process_raises_fails_the_test():
    with pytest.raises(kd.errors.ClusterError, match="wrong in process 1"):
        raises_in_one_process(combinations.multi_worker_mirrored_2x1_cpu)


def test_the_names_and_the_marks():
    assert REPLICAS.keys() == {each.name for each in combinations.all_strategies}
    mark = next(
        m
        for m in test_a_test_runs_under_each_strategy.pytestmark
        if m.name == "parametrize"
    )
    assert (
        mark.kwargs["ids"][0] == "default_strategy-2.0"
        and mark.args[0] == "strategy,scale"
    )
    assert str(combinations.all_strategies[-1]) == "multi_worker_mirrored_2x2_cpu"
    assert combinations.mirrored_strategy_with_cpu_1_and_2.num_devices == 3
    with pytest.raises(TypeError, match="has no argument 'scales'"):
        combinations.combine(scales=[1])(lambda strategy, scale: None)


def test_an_environment_of_other_things_than_texts_is_refused_in_a_sentence():
    what = r"^environment is a dict by name, of texts\.\n"
    with pytest.raises(kd.errors.StructureTypeError, match=what):
        kd.testing.MultiProcessRunner(pickle.dumps, environment={"A": 1})
    with pytest.raises(kd.errors.StructureTypeError, match="kwargs is a dict by name"):
        kd.testing.MultiProcessRunner(pickle.dumps, kwargs=[1])


def test_devices_that_are_missing_are_named():
    assert kd.testing.cpu_devices(3) == ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(kd.errors.DeviceError, match="The test needs 99 CPU devices"):
        kd.testing.cpu_devices(99)


def fit(*callbacks):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((20, 3)), np.ones((20, 1))
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.parametrize(
    ("moment", "step", "at"),
    [("train_batch_end", 7, 7), ("epoch_end", 1, 5), ("train_begin", 0, 0)],
)
def test_a_fault_comes_at_its_moment(moment, step, at):
    fault = kd.testing.Fault("raise", moment=moment, step=step, error=KeyError("here"))
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    with pytest.raises(KeyError, match="here"):
        fit(note, fault)
    assert len(seen) == at and fault.came


def test_a_fault_of_another_process_or_start_does_not_come(monkeypatch):
    fit(other := kd.testing.Fault("kill", 1))
    monkeypatch.setenv("KERAS_DISTRIBUTE_RESTARTS", "1")
    fit(later := kd.testing.Fault("kill"))
    assert not other.came and not later.came


def test_a_delay_comes_once(monkeypatch):
    begin = time.monotonic()
    fit(fault := kd.testing.Fault("delay", seconds=0.3))
    assert fault.came and time.monotonic() - begin >= 0.3
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a second delay"))
    fault.now(99)


@pytest.mark.parametrize(
    ("named", "text"),
    [({"action": "explode"}, "no action 'explode'"), ({"moment": "x"}, "no moment")],
)
def test_faults_that_there_are_not(named, text):
    with pytest.raises(ValueError, match=text):
        kd.testing.Fault(**{"action": "raise"} | named)


def test_the_module_of_a_program_may_define_dataclasses(tmp_path, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\n\n\n"
        "@dataclasses.dataclass\nclass Told:\n    step: dataclasses.InitVar[int]\n"
    )
    monkeypatch.delitem(sys.modules, "keras_distribute_main", raising=False)
    told = module_of("__main__", str(path)).Told
    assert pickle.loads(pickle.dumps(told)) is told
    monkeypatch.delitem(sys.modules, "keras_distribute_main")

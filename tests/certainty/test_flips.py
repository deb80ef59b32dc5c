"""A bit that flips anywhere in a training is found by the next check, with the right
variable, replica, device, element, bit and step.
"""

import functools
import random

import numpy as np
import pytest

import keras_distribute as kd
from tests.support import mirrored, pack_from

from . import training

pytestmark = pytest.mark.timeout(240)


def drawn(seed):
    """How many replicas, whether the state is packed, and where and when to flip."""
    choice = random.Random(seed)
    replicas, is_packed = choice.choice([2, 4, 8]), choice.random() < 0.5
    kind = choice.choice(["weights", "slots", "statistics", "metrics"])
    numbers = [choice.random() for _ in range(3)]
    return replicas, is_packed, kind, choice.randrange(replicas), numbers, choice


@functools.cache
def trained(replicas, is_packed):
    """A model after an epoch, and its bits then."""
    with pytest.MonkeyPatch.context() as patch:
        pack_from(patch, 4 if is_packed else None)
        model = training.built(mirrored(replicas))
        training.fitted(model)
    every = [v for group in training.variables_of(model).values() for v in group]
    return model, [(variable, np.array(variable.value)) for variable in every]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("seed", range(300))
def test_a_flipped_bit(seed):
    replicas, is_packed, kind, replica, (which, where, how), choice = drawn(seed)
    model, values = trained(replicas, is_packed)
    for variable, value in values:
        variable.assign(value)
    variables = training.variables_of(model)[kind]
    variable = variables[int(which * len(variables))]
    size = int(np.prod(variable.shape))
    element, bit = int(where * size), int(how * 32)
    step = int(model.optimizer.iterations) + choice.randint(1, 6)
    place = {"replica": replica, "element": element, "bit": bit}
    fault = kd.testing.Fault("flip", step=step, variable=variable.path, **place)
    check = kd.callbacks.ReplicaConsistency(every=1)
    report = training.differences(lambda: training.fitted(model, fault, check))
    (found,) = report.differences
    assert (report.step, found.path) == (step, variable.path)
    assert found.is_wrong == (replicas > 2)
    if replicas > 2:
        assert found.replica == replica
        assert found.beside.startswith(f"replica {0 if replica else 1} ")
    else:
        assert (found.replica, found.beside[:10]) == (1, "replica 0 ")
    assert (found.device, found.process) == (f"cpu:{found.replica}", 0)
    assert (found.num_elements, found.size) == (1, size)
    index = tuple(map(int, np.unravel_index(element, variable.shape)))
    assert [(e.index, e.bits) for e in found.elements] == [(index, (bit,))]
    apart = abs(np.float64(found.elements[0].value) - found.elements[0].other)
    if np.isfinite(apart):
        assert found.largest == pytest.approx(apart, rel=1e-6)
    else:
        assert found.largest == np.inf


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_error(is_packed):
    model, values = trained(4, is_packed)
    for variable, value in values:
        variable.assign(value)
    model.layers[0].kernel.assign(np.ones((6, 8)))
    for element in (1, 9, 10, 11, 12):
        kernel = model.layers[0].kernel
        kd.testing.Fault(
            "flip", variable=kernel, replica=3, element=element, bit=30
        ).now(0)
    fault = kd.testing.Fault("flip", variable=model.layers[0].bias, replica=1)
    fault.now(0)
    strategy = kernel.distribute_strategy
    with pytest.raises(RuntimeError) as caught:
        strategy.check_consistency(model, step=7)
    first, second, third, fix = str(caught.value).splitlines()
    assert first == (
        "2 variables are not the same on all 4 replicas at step 7, of "
        f"{caught.value.report.num_variables}."
    )
    assert second == (
        f"  Received: {kernel.path} on replica 3 (cpu:3, process 0) differs from most "
        "others, as replica 0 (cpu:0, process 0), in 5 of 48 element(s) by up to inf: "
        "[0, 1] inf here, 1.0 there (bit 30); [1, 1] inf here, 1.0 there (bit 30); "
        "[1, 2] inf here, 1.0 there (bit 30); [1, 3] inf here, 1.0 there (bit 30); ...."
    )
    assert third.startswith(f"    {model.layers[0].bias.path} on replica 1 (cpu:1,")
    assert fix.startswith('  Fix: action="repair" takes') and "cpu:3, cpu:1" in fix


def test_a_flip_that_stays_is_found_later():
    """Between two checks, too, and where it has spread to others."""
    model, values = trained(4, False)
    for variable, value in values:
        variable.assign(value)
    step = int(model.optimizer.iterations)
    path = model.trainable_variables[0].path
    fault = kd.testing.Fault("flip", step=step + 1, variable=path, replica=2, bit=20)
    check = kd.callbacks.ReplicaConsistency(every=4)
    report = training.differences(lambda: training.fitted(model, fault, check))
    assert report.step == step + 4 and path in report.paths
    assert {each.replica for each in report.differences} == {2}


def test_many_variables_that_differ_are_counted():
    """The closest look is at the first; the text stays short."""
    strategy = mirrored(3)
    model = training.built(strategy, compiled={"optimizer": "sgd"})
    training.fitted(model)
    every = [v for group in training.variables_of(model).values() for v in group]
    for variable in every:
        for replica in (1, 2):
            kd.testing.Fault(
                "flip", variable=variable, replica=replica, bit=replica
            ).now(0)
    report = strategy.check_consistency(model, action="report")
    assert len(report.differences) == 2 * len(every) == 2 * report.num_variables
    assert not any(each.is_wrong for each in report.differences)
    assert len(str(report).splitlines()) == 1 + 12 + 1
    with pytest.raises(kd.errors.ReplicaConsistencyError, match="Nobody knows"):
        strategy.check_consistency(model, action="repair")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"variable": "dense/kernel", "bit": 99}, "There|A bit flips in a variable of"),
        ({"bit": 32}, "bit is below 32 here"),
        ({"element": 48}, "element is below 48"),
        ({"replica": 2}, "replica is below 2"),
    ],
)
def test_flips_that_there_cannot_be(given, text):
    model = training.built(mirrored(2))
    wanted = {"variable": model.layers[0].kernel} | given
    with pytest.raises(kd.errors.ValueStructureError, match=text):
        kd.testing.Fault("flip", **wanted).now(0)

"""The names of the coordinator, and which worker runs a dataset function."""

import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import context

index = kd.coordinator.experimental_get_current_worker_index


def test_names_of_one_object():
    assert kd.coordinator.PerWorkerValue is kd.coordinator.PerWorkerValues
    assert kd.experimental.ParameterServerStrategy is kd.ParameterServerStrategy
    for name in kd.experimental.coordinator.__all__:
        first = getattr(kd.coordinator, name)
        assert getattr(kd.experimental.coordinator, name) is first
    assert kd.coordinator.PerWorkerValue.__module__ == "keras_distribute.coordinator"
    assert kd.ParameterServerStrategy.__module__ == "keras_distribute"


def test_no_worker_has_no_index():
    with pytest.raises(kd.errors.ContextError) as raised:
        index()
    assert str(raised.value) == (
        "Cannot retrieve the worker index: this code runs on no worker.\n"
        "  Received: experimental_get_current_worker_index() outside of a dataset "
        "function.\n"
        "  Fix: call it in the function given to "
        "ClusterCoordinator.create_per_worker_dataset."
    )
    assert isinstance(raised.value, RuntimeError)  # As TensorFlow's.
    with context.running_as(3):
        assert index() == 3
    assert context.current_worker() is None


def test_a_dataset_function_knows_its_worker():
    strategy = kd.ParameterServerStrategy()
    try:
        coordinator = kd.experimental.coordinator.ClusterCoordinator(strategy)

        def dataset_fn():
            own = kd.coordinator.experimental_get_current_worker_index()

            def batches():
                yield np.full(2, own), np.full(2, index())

            return batches()

        dataset = coordinator.create_per_worker_dataset(dataset_fn)
        numbers = kd.coordinator.PerWorkerValue([0, 1])

        def step(iterator, number):
            here, later = next(iterator)
            return here, later, number

        found = {}
        for _ in range(60):
            # An iterator for each, so that none of them comes to its end.
            iterator = iter(dataset)
            here, later, number = coordinator.schedule(
                step, args=(iterator, numbers)
            ).fetch()
            assert here.tolist() == later.tolist() == [number] * 2
            found[int(number)] = True
            if len(found) == 2:
                break

        def asking():
            index()

        with pytest.raises(kd.errors.StructureTypeError) as raised:
            coordinator.schedule(asking)
        assert str(raised.value) == (
            "Cannot retrieve the worker index: a scheduled function is one program for "
            "all workers, and does not know on which it runs.\n"
            "  Received: experimental_get_current_worker_index() in a scheduled "
            "function.\n"
            "  Fix: PerWorkerValue(list(range(num_workers))) as an argument: each "
            "worker gets its own number."
        )
    finally:
        strategy.close()

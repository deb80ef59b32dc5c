"""Two processes compare and repair each other's copies, and all raise the same error."""

import pytest

import keras_distribute as kd

from . import training

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=[1, 2], ids=["2x1", "2x2"])
def results(request):
    found = kd.testing.run_in_processes(
        training.on_processes, 2, cpu_devices=request.param, timeout=220
    )
    assert [each["processes"] for each in found] == [2, 2]
    return found


def test_all_processes_find_the_same(results):
    assert results[0] == results[1]


def test_the_copy_is_named(results):
    last = results[0]["last"]
    (found,) = results[0]["found"]
    assert found[:2] == (True, last) and found[3:] == (1, last > 1)
    assert results[0]["reported"] == [1]


def test_the_error_of_a_fit(results):
    first, second, _ = results[0]["error"].splitlines()
    last = results[0]["last"]
    replicas = last + 1
    assert first.startswith(
        f"1 variable is not the same on all {replicas} replicas at step 3, of "
    )
    assert f"kernel on replica {last} (cpu:" in second
    assert "process 1) differs from" in second
    assert "replica 0 (cpu:0, process 0), in 1 of 48 element(s)" in second
    (element,) = results[0]["shown"]
    assert (element.index, element.bits) == ((1, 5), (27,))


def test_what_most_have_is_taken_from_the_other_process(results):
    if results[0]["last"] == 1:
        assert "Nobody knows which copies are right" in results[0]["refused"]
        return
    assert results[0]["repaired"] and results[0]["same bits"]
    assert results[0]["repairs"] == [1, 1]

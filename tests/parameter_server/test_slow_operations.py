"""What XLA makes slowly on CPUs is written otherwise in the programs of workers, too."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import keras_distribute as kd
from keras_distribute.devices import depthwise, jaxprs, on_cpus
from keras_distribute.devices.convolutions import is_convolution
from keras_distribute.scheduling import programs
from tests.support import assert_close, numbers_of
from tests.test_cpu_operations import X, Y, model_of


@pytest.mark.parametrize("fused", [1, 2])
def test_convolutions_and_pooling(
    fused: int, one_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depthwise, "_LEAST_ROW", 1)
    made: list[Any] = []
    export = programs.exported

    def noting(function: Any, shapes: Any, *args: Any, **options: Any) -> Any:
        made.append(jax.make_jaxpr(function)(*shapes))
        return export(function, shapes, *args, **options)

    monkeypatch.setattr(programs, "exported", noting)
    expected = numbers_of(model_of(kd.get_strategy(), fused), X, Y)
    assert_close(numbers_of(model_of(one_worker, fused), X, Y), expected)
    steps = [each for each in made if jaxprs.has(each, is_convolution)]
    assert steps
    for rewriting in on_cpus.OF_EACH_ROW:
        assert not any(jaxprs.has(each, rewriting.is_one) for each in steps)

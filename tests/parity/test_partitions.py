"""Partitioners, and the parts of variables on parameter servers, against the record of
TensorFlow's.
"""

import json
import types
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.scheduling.served import Served

from .partitions import BAD, DIVIDED, PARTITIONERS, cases, counts

RECORD = json.loads(Path(__file__).with_name("tensorflow_partitions.json").read_text())
OURS = kd.experimental.partitioners


def made(name, arguments):
    return counts(lambda: getattr(OURS, name)(**arguments), tuple)


@pytest.mark.parametrize("number", range(len(PARTITIONERS)))
def test_the_numbers_are_tensorflows(number):
    name, arguments = PARTITIONERS[number]
    ours, theirs = made(name, arguments), RECORD["counts"][number]
    assert len(ours) == len(theirs) == len(cases()) > 200
    for case, own, other in zip(cases(), ours, theirs, strict=True):
        if other == "ZeroDivisionError":
            assert set(own) == {1}, case
        elif isinstance(other, str):  # Where TensorFlow has an error, so have we.
            assert own == "ValueStructureError", (case, other)
        else:
            assert own == other, case
    assert sum(isinstance(other, list) for other in theirs) > 100


def test_arguments_that_tensorflow_refuses_are_refused():
    for (name, arguments), theirs in zip(BAD, RECORD["refused"], strict=True):
        assert theirs == ["ValueError"]
        assert made(name, arguments) == ["ValueStructureError"], arguments


def test_a_variable_has_the_parts_of_a_sharded_variable():
    assert len(DIVIDED) == len(RECORD["parts"])
    for (rows, columns, number), theirs in zip(DIVIDED, RECORD["parts"], strict=True):
        served = Served([], lambda shape, dtype, number=number: [number, 1])
        variable = keras.Variable(np.zeros((rows, columns), "float32"))
        ours = served._sizes(variable) or [rows]
        assert ours == theirs, (rows, number)


@pytest.mark.parametrize("wanted", [[0, 1], [-2, 1], [2, 2], [2], []])
def test_parts_of_another_axis_are_refused(wanted):
    served = Served([], lambda shape, dtype: wanted)
    variable = types.SimpleNamespace(shape=(4, 3), _dtype="float32", path="table")
    with pytest.raises(kd.errors.VariableScopeError) as raised:
        served._sizes(variable)
    assert str(raised.value).startswith(
        "A variable is divided along its first axis: 'table' has the shape (4, 3).\n"
        f"  Received: {wanted} from <function "
    )
    assert str(raised.value).endswith(
        "  Fix: kd.experimental.partitioners.FixedShardsPartitioner(n)."
    )


@pytest.mark.parametrize(
    "dtype",
    ["float32", np.float32, np.dtype("float32"), jnp.float32, jnp.zeros(1).dtype],
)
def test_a_dtype_comes_in_any_form(dtype):
    assert OURS.MaxSizePartitioner(8)((6, 1), dtype) == [3, 1]


def test_bad_arguments_say_what_works():
    with pytest.raises(kd.errors.ValueStructureError) as raised:
        OURS.FixedShardsPartitioner(0)
    assert str(raised.value) == (
        "num_shards is an integer of at least 1.\n"
        "  Received: num_shards=0.\n"
        "  Fix: num_shards=1"
    )
    with pytest.raises(kd.errors.ValueStructureError) as raised:
        OURS.MaxSizePartitioner(0.5)
    assert str(raised.value) == (
        "max_shard_bytes is a number of bytes, 1 or more.\n"
        "  Received: max_shard_bytes=0.5.\n"
        "  Fix: max_shard_bytes=1024"
    )
    with pytest.raises(kd.errors.StructureTypeError) as raised:
        OURS.MinSizePartitioner(4, max_shards=2)((6, 1), "flot32")
    assert str(raised.value) == (
        "A partitioner is given the dtype of a variable.\n"
        "  Received: dtype='flot32'.\n"
        '  Fix: "float32"'
    )
    with pytest.raises(kd.errors.StructureTypeError) as raised:
        OURS.MinSizePartitioner(4)(6, "float32")
    assert str(raised.value) == (
        "A partitioner is given the shape of a variable.\n"
        "  Received: shape=6.\n"
        "  Fix: (1000, 64)"
    )
    with pytest.raises(kd.errors.ValueStructureError) as raised:
        OURS.FixedShardsPartitioner(2)((), "float32")
    assert str(raised.value) == (
        "A scalar has no axis to be divided.\n"
        "  Received: shape=().\n"
        "  Fix: leave scalars whole: a ParameterServerStrategy asks for none."
    )
    for wrong in ("4", None, True):
        with pytest.raises(kd.errors.StructureTypeError):
            OURS.MinSizePartitioner(wrong)
    with pytest.raises(NotImplementedError):
        OURS.Partitioner()((1,), "float32")

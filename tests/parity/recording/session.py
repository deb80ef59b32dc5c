"""TensorFlow with four logical CPUs as the side that scenarios run on: strategies on
some of them, and results written in the record's encoding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

# the only place that names the classes of values
from tensorflow.python.distribute import values as tf_values

from ..encoding import JSON, encode, encode_error
from ..scenarios.side import Calls

REPLICAS = (1, 2, 4)

Entry = dict[str, JSON]

distribute = tf.distribute
keras = tf.keras
function = tf.function
tensor = tf.constant
size = tf.size


def start_devices(count: int = max(REPLICAS)) -> None:
    """Splits the CPU into `count` devices, before anything uses TensorFlow."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )


@cache
def mirrored(replicas: int) -> tf.distribute.MirroredStrategy:
    """The strategy on the first `replicas` CPUs."""
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def replica_id() -> int:
    """Which replica runs this line."""
    return int(
        tf.get_static_value(
            tf.distribute.get_replica_context().replica_id_in_sync_group
        )
    )


def per_replica(strategy: tf.distribute.Strategy, components: Sequence[Any]) -> Any:
    """A PerReplica of tensors, the first components of `components`."""

    def component(context: tf.distribute.experimental.ValueContext) -> Any:
        return tf.nest.map_structure(
            tf.constant, components[context.replica_id_in_sync_group]
        )

    return strategy.experimental_distribute_values_from_function(component)


def stored(components: Sequence[Any], replicas: int) -> JSON:
    """The components that so many replicas use, encoded."""
    return {"PerReplica": [encode(component) for component in components[:replicas]]}


def variable(initial: Any, **options: Any) -> tf.Variable:
    """A variable, with TensorFlow's names of enumerations for those of strings."""
    for name, names in (
        ("synchronization", tf.VariableSynchronization),
        ("aggregation", tf.VariableAggregation),
    ):
        if name in options:
            options[name] = getattr(names, options[name].upper(), options[name])
    return tf.Variable(initial, **options)


def read(variable: tf.Variable) -> tf.Tensor:
    """The value of a variable."""
    return variable.read_value()


def gradient(loss: Callable[[Any], Any], x: tf.Tensor) -> tf.Tensor:
    """The gradient of the sum of what `loss` makes of `x`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(loss(x))
    return tape.gradient(total, x)


def cardinality(dataset: tf.distribute.DistributedDataset) -> int:
    """The number of elements that the dataset says it has."""
    return int(dataset.cardinality)


def results(calls: Calls) -> Iterator[Entry]:
    """An entry for each call."""
    for name, call in calls.items():
        yield {"name": name, "result": result_of(call)}


def result_of(fn: Callable[[], Any]) -> JSON:
    """What `fn` returned, or what it raised, encoded."""
    try:
        return encoded(fn())
    except Exception as error:  # every error is a result here
        return encode_error(error)


def encoded(value: Any, strategy: tf.distribute.Strategy | None = None) -> JSON:
    """`value` in the record's encoding, which is the same for every strategy."""
    return encode(value, _split)


def _split(value: Any) -> tuple[str, Sequence[Any]] | None:
    if isinstance(value, tf_values.DistributedVariable):
        return "Variable", [component.read_value() for component in value.values]
    if isinstance(value, tf_values.DistributedValues):
        return type(value).__name__, value.values
    if isinstance(value, tf.RaggedTensor):
        return "RaggedTensor", [value.values, value.row_splits]
    if isinstance(value, tf.SparseTensor):
        return "SparseTensor", [value.indices, value.values, value.dense_shape]
    return None

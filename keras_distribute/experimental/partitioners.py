"""What TensorFlow has in `tf.distribute.experimental.partitioners`: how a
`kd.ParameterServerStrategy` divides large variables over its servers.
"""

from keras_distribute.scheduling.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from keras_distribute.types import publish

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]

publish(__name__, *(globals()[name] for name in __all__))

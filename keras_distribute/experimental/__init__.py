"""The names that TensorFlow keeps under `tf.distribute.experimental`, and
`tf.keras.utils.experimental.DatasetCreator`.
"""

from keras_distribute.checkpoint.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from keras_distribute.checkpoint.preemption import (
    TerminationConfig as TerminationConfig,
)
from keras_distribute.experimental import coordinator as coordinator
from keras_distribute.experimental import partitioners as partitioners
from keras_distribute.experimental.deprecated import (
    CollectiveCommunication as CollectiveCommunication,
)
from keras_distribute.experimental.deprecated import CollectiveHints as CollectiveHints
from keras_distribute.experimental.deprecated import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_distribute.experimental.deprecated import TPUStrategy as TPUStrategy
from keras_distribute.input.creator import DatasetCreator as DatasetCreator
from keras_distribute.input.datasets import Optional as Optional
from keras_distribute.strategies.central_storage import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from keras_distribute.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from keras_distribute.types import (
    CommunicationImplementation as CommunicationImplementation,
)
from keras_distribute.types import CommunicationOptions as CommunicationOptions
from keras_distribute.types import ValueContext as ValueContext
from keras_distribute.types import publish

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DatasetCreator",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]

# Of the package itself first.
_OWN = [name for name in __all__ if name != "ParameterServerStrategy"]
publish(__name__, *(globals()[name] for name in _OWN))

"""For tests of distributed programs: several processes on this host, and faults."""

from keras_distribute.launch.functions import (
    MultiProcessRunner,
    ProcessResult,
    run_in_processes,
)
from keras_distribute.scheduling.replay import RecordedUpdates
from keras_distribute.servers.local import ParameterServerCluster
from keras_distribute.testing import combinations
from keras_distribute.testing.combinations import NamedStrategy, combine, cpu_devices
from keras_distribute.testing.faults import Fault
from keras_distribute.types import publish

__all__ = [
    "Fault",
    "MultiProcessRunner",
    "NamedStrategy",
    "ParameterServerCluster",
    "ProcessResult",
    "RecordedUpdates",
    "combinations",
    "combine",
    "cpu_devices",
    "run_in_processes",
]

publish(__name__, *(globals()[name] for name in __all__))

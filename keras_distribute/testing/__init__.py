"""What tests of distributed programs need: several processes on this host, with their
logs, time limits and faults.
"""

from keras_distribute.testing import combinations as combinations
from keras_distribute.testing.combinations import NamedStrategy as NamedStrategy
from keras_distribute.testing.combinations import combine as combine
from keras_distribute.testing.combinations import cpu_devices as cpu_devices
from keras_distribute.testing.faults import Fault as Fault
from keras_distribute.testing.processes import MultiProcessRunner as MultiProcessRunner
from keras_distribute.testing.processes import ProcessResult as ProcessResult
from keras_distribute.testing.processes import run_in_processes as run_in_processes

__all__ = [
    "Fault",
    "MultiProcessRunner",
    "NamedStrategy",
    "ProcessResult",
    "combinations",
    "combine",
    "cpu_devices",
    "run_in_processes",
]

"""What tests of distributed programs need: several processes on this host, with their logs, time limits and faults."""

from keras_distribute.testing.processes import MultiProcessRunner as MultiProcessRunner
from keras_distribute.testing.processes import ProcessResult as ProcessResult
from keras_distribute.testing.processes import run_in_processes as run_in_processes

__all__ = ["MultiProcessRunner", "ProcessResult", "run_in_processes"]

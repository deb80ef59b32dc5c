"""Whether all replicas have the same of what has to be the same on them."""

from keras_distribute.consistency.check import ACTIONS as ACTIONS
from keras_distribute.consistency.check import check as check
from keras_distribute.consistency.report import ConsistencyReport as ConsistencyReport

__all__ = ["ACTIONS", "ConsistencyReport", "check"]

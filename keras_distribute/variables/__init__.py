"""The two kinds of distributed variable, and which one a creation under a scope yields.

|                          | `MirroredVariable`        | `SyncOnReadVariable`      |
| ------------------------ | ------------------------- | ------------------------- |
| stored as                | one replicated array      | `(num_replicas, *shape)`, |
|                          |                           | split over the replicas   |
| read in a replica        | the value                 | the replica's component   |
| read across replicas     | the value                 | components, aggregated    |
| assigned in a replica    | aggregated first          | the replica's component   |
| assigned across replicas | every copy                | so that it reads back     |

A `RestingVariable` is a mirrored one that is on the replicas inside of programs alone,
a `DrawnVariable` one that may have no array before somebody reads it.
All are `keras.Variable`s: layers, optimizers, saving and summaries never notice.
Inside a program a stateless scope carries their values, as Keras does it; this room
says what a read or an assignment means there.
"""

from keras_distribute.variables.base import DistributedVariable
from keras_distribute.variables.blocks import Blocks
from keras_distribute.variables.choice import choose_class
from keras_distribute.variables.drawing import DrawnVariable
from keras_distribute.variables.holding import Holder, first_deleted, lost_error
from keras_distribute.variables.mirrored import MirroredVariable
from keras_distribute.variables.on_devices import Part, Standing, standing
from keras_distribute.variables.reading import read_before
from keras_distribute.variables.resting import RestingVariable
from keras_distribute.variables.same_values import (
    check_assigned,
    check_same_values,
    is_due,
)
from keras_distribute.variables.sync_on_read import SyncOnReadVariable
from keras_distribute.variables.thread import accumulators_created, given_away

__all__ = [
    "Blocks",
    "DistributedVariable",
    "DrawnVariable",
    "Holder",
    "MirroredVariable",
    "Part",
    "RestingVariable",
    "Standing",
    "SyncOnReadVariable",
    "accumulators_created",
    "check_assigned",
    "check_same_values",
    "choose_class",
    "first_deleted",
    "given_away",
    "is_due",
    "lost_error",
    "read_before",
    "standing",
]

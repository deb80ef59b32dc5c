"""The methods of strategies whose replicas may be several logical devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_distribute import context
from keras_distribute.strategies import logical_devices
from keras_distribute.strategies.base import Strategy


class LogicalDevicesStrategy(Strategy):
    """A strategy that divides values over the logical devices of a replica, in a
    program.
    """

    @property
    def num_logical_devices(self) -> int:
        """How many logical devices each replica has: the product of
        `partition_dimensions`. Not in TensorFlow.
        """
        return self.replica_mesh.num_logical

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """`tensor`, divided over the logical devices of its replica: each works on one
        part.

        In `run` the tensor is one replica's. In a step of `fit` it is the global batch,
        whose rows stay divided over the replicas: `[1, 2, 1, 1]` divides the height of
        images in both. Outside of programs the array is put on the devices like this,
        the same on each replica. Source:
        `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.

        Args:
            tensor: An array, of any shape.
            partition_dimensions: Into how many parts each dimension is divided; the
                product is the number of logical devices of a replica.

        Returns:
            The same numbers.

        Raises:
            ValueStructureError: For another number of dimensions, another product, or a
                dimension that does not divide.
            StructureTypeError: For a symbolic tensor of Keras, and for a `PerReplica`.
        """
        context.require_own("experimental_split_to_logical_devices", self)
        return logical_devices.split(self.replica_mesh, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """`tensor`, whole on every logical device of its replica: each works on all of
        it.

        Source: `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.

        Args:
            tensor: An array, of any shape.

        Returns:
            The same numbers.

        Raises:
            StructureTypeError: For a symbolic tensor of Keras, and for a `PerReplica`.
        """
        context.require_own("experimental_replicate_to_logical_devices", self)
        return logical_devices.replicate(self.replica_mesh, tensor)

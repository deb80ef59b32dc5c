"""In which order a device has the axes of an array in its memory.

A TPU has them by its own rule, so that the tiles of its memory are full: of a table of
100,000 x 64, the long axis is innermost. Inside a program, XLA (JAX 0.10) gives a
gradient the order that the operation before it likes, here the other one. It then
copies the weight and its slots to that order for the optimizer's step, and back, in
tiles that are half empty. A gradient that comes in the order of the weight is all that
is copied.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint

from keras_distribute._compat.jax_internals import axes_in_memory
from keras_distribute.devices.mesh import ReplicaMesh

# Elements. Copies of smaller ones, such as kernels of convolutions, cost little, and
# XLA finds the order with which all of the step takes the least time.
_SMALLEST = 2**20


def as_weights(value: Any, mesh: ReplicaMesh) -> Any:
    """A gradient in a program of a replica, in the order that its device has its weight
    in.
    """
    if mesh.platform != "tpu" or mesh.logical_axes or value.size < _SMALLEST:
        return value
    order = axes_in_memory(mesh.devices[0], value.shape, value.dtype)
    if order == tuple(range(value.ndim)):
        return value
    return with_layout_constraint(value, Layout(order))

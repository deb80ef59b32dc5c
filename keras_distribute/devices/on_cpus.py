"""What is written otherwise on CPUs, where XLA makes it slowly."""

from __future__ import annotations

from keras_distribute.devices import (
    depthwise,
    dilated_inputs,
    grouped,
    pool_gradients,
    row_products,
)
from keras_distribute.devices.rewriting import Rewriting

OF_EACH_ROW: tuple[Rewriting, ...] = (
    grouped.APART,  # Which makes depthwise convolutions, and such with strides.
    depthwise.IN_ONE_LOOP,
    dilated_inputs.IN_PARTS,
    pool_gradients.BY_INDEX,
)
"""Also where XLA divides the rows over the devices."""

OF_ONE_DEVICE: tuple[Rewriting, ...] = (
    *OF_EACH_ROW,
    depthwise.KERNELS_BY_ROWS,
    row_products.IN_ONE_DIMENSION,
)
"""In the program of each device alone."""

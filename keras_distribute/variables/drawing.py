"""Variables that are too large to be drawn where they are created: their values are
drawn in blocks of rows, where and when they are needed.

XLA draws an array as a whole, even where a part of it is wanted. A block is drawn by a
key of its own, which its number gives, so the values do not depend on who draws which
blocks; they are others than those of one device, which draws with one key.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_distribute._compat import jax_internals
from keras_distribute.devices.placement import num_bytes
from keras_distribute.variables.blocks import Blocks
from keras_distribute.variables.holding import Holder
from keras_distribute.variables.mirrored import MirroredVariable

LARGE = 2**27  # Bytes.
_ELEMENTS = 2**20  # Of a block.
_BY_ELEMENT = (  # Whose values do not depend on the shape.
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """The values of a variable, by blocks of its rows.

    Attributes:
        initializer: Of `_BY_ELEMENT`, or one that fills all with `fill`.
        shape: Of all.
        dtype: Its name.
        key: Of the random numbers, `(2,)` of dtype `uint32`; `None` without.
        fill: What every element is; `None` for random numbers.
    """

    initializer: Any
    shape: tuple[int, ...]
    dtype: str
    key: Any
    fill: Any

    @property
    def rows(self) -> int:
        """Of a block."""
        return max(1, _ELEMENTS // math.prod(self.shape[1:]))

    def block(self, key: Any, number: Any) -> jax.Array:
        """The rows of a block, of which the last one has fewer; may be traced.

        Args:
            key: `self.key`.
        """
        own = copy.copy(self.initializer)
        own.seed = _Key(jax.random.fold_in(key, number))
        return own((self.rows, *self.shape[1:]), dtype=self.dtype)

    def blocks(self) -> Blocks:
        """All values, some rows at a time."""
        drawn = jax.jit(self.block)

        def read(start: int, stop: int) -> np.ndarray[Any, Any]:
            if self.fill is not None:
                return np.full((stop - start, *self.shape[1:]), self.fill, self.dtype)
            first = start // self.rows
            numbers = np.arange(first, -(-stop // self.rows), dtype="uint32")
            rows = np.concatenate([drawn(self.key, number) for number in numbers])
            return rows[start - first * self.rows : stop - first * self.rows]

        return Blocks(self.shape, self.dtype, read, multiple_of=self.rows)

    def whole(self) -> jax.Array:
        """All values."""
        if self.fill is not None:
            return jnp.full(self.shape, self.fill, self.dtype)
        numbers = jnp.arange(-(-self.shape[0] // self.rows), dtype="uint32")
        drawn = jax.lax.map(lambda number: self.block(self.key, number), numbers)
        return drawn.reshape(-1, *self.shape[1:])[: self.shape[0]]


class _Key(keras.random.SeedGenerator):
    """A key that is known, in the place of the next one of a generator."""

    def __init__(self, key: Any) -> None:
        self.key = key  # Without the state of a generator.

    def next(self, ordered: bool = True) -> Any:
        return self.key


class Undrawn(Holder):
    """Holds variables that nobody has read yet; their places are their drawings."""

    def stored(self, place: Any, variable: Any) -> Any:
        value = place.whole()
        # Keras traces layers to learn shapes: nothing is drawn for that.
        return value if jax_internals.is_tracing() else variable._as_stored(value)


class DrawnVariable(MirroredVariable):
    """A mirrored variable that is not drawn before it is needed, if it is large."""

    def _initialize_with_initializer(self, initializer: Any) -> None:
        drawing = _drawing(initializer, self._shape, self._dtype)
        if drawing is None:
            super()._initialize_with_initializer(initializer)
        else:
            self._shape = self._validate_shape(self._shape)
            self._link_to(Undrawn(()), drawing)

    @property
    def drawing(self) -> Drawing | None:
        """How its values are drawn, if they have not been."""
        link = self._link
        if link is None or not isinstance(link[0], Undrawn):
            return None
        return link[1]


def _drawing(initializer: Any, shape: Any, dtype: str) -> Drawing | None:
    """How to draw a large variable in blocks; `None` where it is drawn as a whole."""
    shape = tuple(shape)
    if not shape or None in shape:
        return None
    if num_bytes(shape, dtype) < LARGE:
        return None
    fill = _fill(initializer)
    if fill is not None:
        return Drawing(initializer, shape, dtype, None, fill)
    if type(initializer) not in _BY_ELEMENT:
        return None
    seed = initializer.seed
    if isinstance(seed, keras.random.SeedGenerator):
        key = np.asarray(seed.next(), np.uint32)
    else:
        key = np.array([seed % 2**32, 0], np.uint32)
    return Drawing(initializer, shape, dtype, key, None)


def _fill(initializer: Any) -> float | None:
    if type(initializer) is keras.initializers.Zeros:
        return 0.0
    if type(initializer) is keras.initializers.Ones:
        return 1.0
    is_constant = type(initializer) is keras.initializers.Constant
    value = initializer.value if is_constant else None
    return float(value) if isinstance(value, int | float) else None

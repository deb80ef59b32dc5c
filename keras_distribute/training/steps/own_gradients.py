"""What each replica gives to the sum of each gradient: seen, or with a bit flipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from keras_distribute.consistency import hashing
from keras_distribute.devices import bit_flips
from keras_distribute.devices.bit_flips import BitFlip
from keras_distribute.training.steps.long_weight import FlatStep


class OwnGradients:
    """Sees the gradients in the program of a step.

    Args:
        flips: Bits of gradients that flip.
        is_noted: Whether the program returns a hash of each.

    Attributes:
        flat: The step, if to it many weights are one.
        names: Of the gradients in the program that was traced last; none of a step over
            the global batch.
    """

    def __init__(self, flips: Sequence[BitFlip] = (), is_noted: bool = False) -> None:
        self._flips, self._is_noted = flips, is_noted
        self.flat: FlatStep | None = None
        self.names: list[str] = []
        self._seen: list[str] = []
        self._hashes: list[Any] = []
        self._done: set[BitFlip] = set()

    def passed(self, name: str, own: Any) -> Any:
        """What is summed in the place of what a replica has of a gradient."""
        number = len(self._seen)
        self._seen.append(name)
        for flip in self._flips:
            start = self._start_in(number, name, flip)
            if start is not None:
                self._done.add(flip)
                element = start + flip.element
                own = bit_flips.in_replica(own, flip.replica, element, flip.bit)
        if self._is_noted:
            self._hashes.append(hashing.of_value(own))
        return own

    def results(self) -> list[Any]:
        """The hashes of the gradients, of shape `(gradients, 2)`.

        Raises:
            ValueStructureError: Where a bit was to flip in a gradient that there
                is not.
        """
        self.names = [self._shown(i, name) for i, name in enumerate(self._seen)]
        hashes, done = self._hashes, self._done
        self._seen, self._hashes, self._done = [], [], set()
        for flip in self._flips:
            if flip not in done:
                known = ", ".join(self.names) or "none"
                raise bit_flips.refused(
                    "A bit flips in what a replica gives to a gradient.",
                    f"variable={flip.path!r}, where the gradients are {known}.",
                )
        return [jnp.stack(hashes)] if hashes else []

    def _start_in(self, number: int, name: str, flip: BitFlip) -> int | None:
        """Where the variable of a flip begins in a gradient; `None` if it does not."""
        if self.flat is None or flip.path is None:
            return 0 if name == flip.path else None
        place = self.flat.place_of(flip.path)
        return place[1] if place is not None and place[0] == number else None

    def _shown(self, number: int, name: str) -> str:
        return name if self.flat is None else self.flat.name_of(number)

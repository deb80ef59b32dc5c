"""What Keras's `adapt` has found out for a layer, where that is no variable: the
boundaries of a `Discretization`, and the vocabulary of a lookup.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_distribute.checkpoint.names import layers_in
from keras_distribute.errors import CheckpointError

_FUNCTIONS = ("train_function", "test_function", "predict_function")


def adapted_in(name: str, model: Any) -> dict[str, Adapted]:
    """Those layers of a model or a layer, by what they are called in a checkpoint."""
    return {
        f"{name}/adapted/{prefix}".rstrip("/"): Adapted(layer, model)
        for prefix, layer in layers_in(model)
        if _is_adapted(layer)
    }


def _is_adapted(layer: Any) -> bool:
    """Whether a layer has such a state; what its constructor was given is none."""
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is not None
    lookups = (keras.layers.StringLookup, keras.layers.IntegerLookup)
    return isinstance(layer, lookups) and layer.input_vocabulary is None


class Adapted:
    """The state of such a layer, as a checkpoint keeps it.

    Args:
        layer: The layer.
        model: The model or layer that has it.
    """

    def __init__(self, layer: Any, model: Any) -> None:
        self._layer, self._model = layer, model

    def get_state(self) -> dict[str, Any] | None:
        """`None` before `adapt`."""
        layer = self._layer
        if isinstance(layer, keras.layers.Discretization):
            boundaries = layer.bin_boundaries
            if boundaries is None:
                return None
            return {"bin_boundaries": np.asarray(boundaries).tolist()}
        if not layer.get_vocabulary(include_special_tokens=False):
            return None
        vocabulary = np.asarray(layer.get_vocabulary()).tolist()
        weights = None
        if layer.output_mode == "tf_idf":  # Those behind are of nothing.
            weights = np.asarray(layer.idf_weights).tolist()[: len(vocabulary)]
        return {"vocabulary": vocabulary, "idf_weights": weights}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Makes the layer what it was.

        Raises:
            CheckpointError: If it was another, and the model has steps that may have
                been compiled with what it is now.
        """
        if state is None or state == self.get_state():
            return
        if any(getattr(self._model, name, None) is not None for name in _FUNCTIONS):
            raise CheckpointError(
                f"The layer {self._layer.name!r} was adapted to other data when the "
                "checkpoint was saved.",
                received="a model with steps that are compiled for what the layer is "
                "now.",
                fix="adapt it to the same data; or restore before the first fit, "
                "evaluate or predict, or after another compile.",
            )
        if isinstance(self._layer, keras.layers.Discretization):
            self._layer.bin_boundaries = state["bin_boundaries"]
        else:
            self._layer.set_vocabulary(state["vocabulary"], state["idf_weights"])

"""What Keras's `adapt` has found out for a layer, where that is no variable: the
boundaries of a `Discretization`, and the vocabulary of a lookup; and what a
`Normalization` derives from its variables.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_distribute._compat import epochs
from keras_distribute.checkpoint.names import layers_in


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
        """Makes the layer what it was."""
        if state is None or state == self.get_state():
            return
        if isinstance(self._layer, keras.layers.Discretization):
            self._layer.bin_boundaries = state["bin_boundaries"]
        else:
            self._layer.set_vocabulary(state["vocabulary"], state["idf_weights"])
        _make_steps_anew(self._model)


def refresh(model: Any) -> None:
    """Lets the layers of a model compute again what they derive from their variables,
    as loading a weights file does.
    """
    others = [layer for _, layer in layers_in(model) if _has_other_statistics(layer)]
    if others:
        _make_steps_anew(model)


def _has_other_statistics(layer: Any) -> bool:
    """Whether a layer normalizes by other numbers than before, now that it was asked to
    compute them again.
    """
    if not isinstance(layer, keras.layers.Normalization):
        return False
    before = layer.mean, layer.variance
    layer.finalize_state()
    pairs = zip(before, (layer.mean, layer.variance), strict=True)
    return any(
        old is not new and not np.array_equal(np.asarray(old), np.asarray(new))
        for old, new in pairs
    )


def _make_steps_anew(model: Any) -> None:
    """Steps that were compiled before have as constants what layers were then."""
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is None:
            continue
        getattr(model, f"make_{kind}_function")(force=True)
        follower = epochs.follower_of(model) if kind == "train" else None
        if follower is not None:
            epochs.follow(model, follower)

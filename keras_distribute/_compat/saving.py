"""Where Keras writes a model's files: `saving_lib.save_model`, `save_weights_only`, and
the old HDF5 format's writer.

All ways to save lead to one of them. A function that is handed in decides which process
writes. Goes when Keras asks.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from keras_distribute._compat.seams import Replacements

_WRITERS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)


def install(
    replaced: Replacements, write: Callable[[Any, Callable[[], Any]], Any]
) -> None:
    """Hands each writing over.

    Args:
        write: Called with the model and a function that writes its files.
    """

    def handed_over(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(model: Any, *args: Any, **kwargs: Any) -> Any:
            return write(model, lambda: original(model, *args, **kwargs))

        return save

    for module, name in _WRITERS:
        replaced.replace(module, name, handed_over(getattr(module, name)))

"""The batch that a dry run is for, as shapes: from a number of rows, or from a
structure of arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from keras_distribute import checks
from keras_distribute.errors import InputError

_FIX = (
    "pass the structure that a step takes: batch=(x, y), of arrays or "
    "jax.ShapeDtypeStruct((rows, ...), dtype)."
)


def batch_of(model: Any, batch: Any) -> Any:
    """The global batch as `jax.ShapeDtypeStruct`s, from a number of rows, or from
    `(x, y)`, `(x, y, sample_weight)` or `x` of anything with shapes and dtypes. As in
    `fit`, arrays of floats become `keras.config.floatx()`.

    Raises:
        InputError: For a model that does not know its inputs or labels, and for arrays
            of different lengths.
    """
    if checks.is_integer(batch):
        what, fix, most = "A batch has at least one row.", "batch=256", 2**31 - 1
        checks.count("batch", batch, 1, most=most, what=what, fix=fix, error=InputError)
        return _from_model(model, int(batch))
    forms = jax.tree.map(_form, batch if isinstance(batch, tuple) else (batch,))
    shapes = [form.shape for form in jax.tree.leaves(forms)]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(
            "The arrays of a batch have the same number of rows, at least one.",
            received=f"shapes {shapes}.",
            fix=_FIX,
        )
    return forms


def rows_of(batch: Any) -> int:
    """The number of rows of a batch."""
    return next(form.shape[0] for form in jax.tree.leaves(batch) if form.shape)


def with_rows(batch: Any, rows: int) -> Any:
    """The batch, of anything with shapes and dtypes, with another number of rows."""

    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (rows, *leaf.shape[1:]) if leaf.shape else ()
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(resized, batch)


def _form(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if getattr(leaf.dtype, "kind", "f") in "OSUM":
        raise InputError(
            "A batch is made of arrays of numbers.",
            received=f"{checks.shown(leaf)}, of the dtype {leaf.dtype}.",
            fix=_FIX,
        )
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    if "float" in dtype:
        dtype = keras.config.floatx()
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _from_model(model: Any, rows: int) -> Any:
    """The batch of a model that knows its inputs, with labels by its loss."""
    if not getattr(model, "inputs", None) or not model.outputs:
        raise InputError(
            "A model that is no Functional or Sequential one with an Input does not "
            "say what its batches are.",
            received=f"batch={rows} for {model!r}.",
            fix=_FIX,
        )
    # A Sequential model has the lists alone; of others, the structure counts.
    is_list = isinstance(model, keras.Sequential)
    inputs = model.inputs[0] if is_list else model.input
    outputs = model.outputs[0] if is_list else model.output

    def form(tensor: Any, shape: Any, dtype: str) -> jax.ShapeDtypeStruct:
        if None in shape[1:]:
            raise InputError(
                "An input or output of the model has a dimension that differs from "
                "batch to batch.",
                received=f"batch={rows} for {tensor.name!r} of shape "
                f"{tuple(tensor.shape)}.",
                fix=_FIX,
            )
        return jax.ShapeDtypeStruct((rows, *shape[1:]), dtype)

    x = jax.tree.map(lambda tensor: form(tensor, tensor.shape, tensor.dtype), inputs)
    if model.loss is None:
        return (x,)
    leaves, structure = jax.tree.flatten(outputs)
    losses = model.loss
    if isinstance(losses, dict):
        losses = [losses.get(name) for name in model.output_names]
    elif not isinstance(losses, list | tuple):
        losses = [losses] * len(leaves)
    y = [
        form(tensor, tensor.shape[:-1], "int32")
        if _has_class_numbers(loss)
        else form(tensor, tensor.shape, "float32")
        for tensor, loss in zip(leaves, losses, strict=True)
    ]
    return x, jax.tree.unflatten(structure, y)


def _has_class_numbers(loss: Any) -> bool:
    """Whether the labels of a loss are class numbers."""
    if not isinstance(loss, str):
        loss = getattr(loss, "__name__", type(loss).__name__)
    return "sparsecategorical" in loss.replace("_", "").lower()

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

_FIX = "pass the structure that a step takes: batch=(x, y), of arrays or jax.ShapeDtypeStruct((rows, ...), dtype)."


def batch_of(model: Any, batch: Any) -> Any:
    """The global batch as `jax.ShapeDtypeStruct`s.

    Args:
        model: The model, for a number of rows.
        batch: How many rows, or `(x, y)`, `(x, y, sample_weight)` or `x`: arrays, or
            anything with shapes and dtypes. As in `fit`, arrays of floats become
            `keras.config.floatx()`.

    Raises:
        InputError: For a model whose inputs or labels are not known from itself, and
            for arrays of different lengths.
    """
    if checks.is_integer(batch):
        what, fix, error = "A batch has at least one row.", "batch=256", InputError
        rows = checks.count(
            "batch", batch, 1, most=2**31 - 1, what=what, fix=fix, error=error
        )
        return _from_model(model, rows)
    given = batch if isinstance(batch, tuple) else (batch,)
    forms = jax.tree.map(_form, given)
    sizes = {form.shape[0] for form in jax.tree.leaves(forms) if form.shape}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(
            "The arrays of a batch have the same number of rows, at least one.",
            received=f"shapes {[form.shape for form in jax.tree.leaves(forms)]}.",
            fix=_FIX,
        )
    return forms


def rows_of(batch: Any) -> int:
    """The number of rows of a batch."""
    return next(form.shape[0] for form in jax.tree.leaves(batch) if form.shape)


def with_rows(batch: Any, rows: int) -> Any:
    """The same batch with another number of rows."""
    return jax.tree.map(
        lambda form: (
            jax.ShapeDtypeStruct((rows, *form.shape[1:]), form.dtype)
            if form.shape
            else form
        ),
        batch,
    )


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
    return jax.ShapeDtypeStruct(
        tuple(leaf.shape), keras.config.floatx() if "float" in dtype else dtype
    )


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
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output

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
    losses = _losses(model, len(leaves))
    y = [
        form(tensor, tensor.shape[:-1], "int32")
        if _is_sparse(loss)
        else form(tensor, tensor.shape, "float32")
        for tensor, loss in zip(leaves, losses, strict=True)
    ]
    return x, jax.tree.unflatten(structure, y)


def _losses(model: Any, count: int) -> list[Any]:
    """The loss of each output."""
    loss = model.loss
    if isinstance(loss, dict):
        return [loss.get(name) for name in model.output_names]
    return list(loss) if isinstance(loss, list | tuple) else [loss] * count


def _is_sparse(loss: Any) -> bool:
    """Whether its labels are class numbers."""
    name = (
        loss
        if isinstance(loss, str)
        else getattr(loss, "__name__", type(loss).__name__)
    )
    return "sparsecategorical" in name.replace("_", "").lower()

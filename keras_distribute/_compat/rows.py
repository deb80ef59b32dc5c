"""Which of Keras's models treat each row of a batch by itself, but for batch
normalization.

Keras says this of no layer, so the packages of its built-in layers are listed; any
other layer counts as one that may mix rows. `_operations` and `_flatten_layers` are the
only complete lists of what a model calls.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
from keras import Layer, Sequential, StatelessScope
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.models.functional import Functional
from keras.utils import is_keras_tensor, unpack_x_y_sample_weight

from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute._compat.names import BaseTrainer, JAXTrainer
from keras_distribute._compat.seams import check
from keras_distribute._compat.variables import takes_gradient_as_value

__all__ = ["get_keras_mask", "set_keras_mask", "unpack_x_y_sample_weight"]

_ROW_WISE = tuple(
    f"keras.src.layers.{name}."
    for name in (
        "activations",
        "attention",
        "convolutional",
        "core.dense",
        "core.einsum_dense",
        "core.embedding",
        "core.identity",
        "core.input_layer",
        "core.masking",
        "merging",
        "normalization",
        "pooling",
        "regularization",
        "reshaping",
        "rnn",
    )
)
_OVER_LAST_AXIS = (
    "keras.src.layers.activations.",
    "keras.src.layers.normalization.",
)
_ELEMENTWISE = {
    "Absolute",
    "Add",
    "Divide",
    "Exp",
    "Log",
    "Maximum",
    "Minimum",
    "Multiply",
    "Negative",
    "Power",
    "Sqrt",
    "Square",
    "Subtract",
    "Tanh",
    "TrueDivide",
}
check(Functional, "_operations")
check(keras.Operation, "_inbound_nodes")
check(JAXTrainer, "_losses_override", "_update_metrics_variables")
check(Layer, "_call_has_training_arg", "_flatten_layers", "_seed_generators")

_STEP_METHODS = {
    BaseTrainer: ("compute_loss", "_compute_loss", "stateless_compute_loss"),
    JAXTrainer: ("train_step", "compute_loss_and_updates", "_update_metrics_variables"),
    Layer: ("stateless_call", "losses"),
}
_PREDICT_METHODS = {JAXTrainer: ("predict_step",), Layer: ("stateless_call",)}


def what_may_mix_rows(trainer: Any) -> Any | None:
    """The first model or layer of which it is not known that it treats each row of a
    batch by itself; `None` where all do, being built-in layers that never mix rows.
    """
    for operation in [trainer, *_called(trainer)]:
        if isinstance(operation, keras.Model):
            built_in = type(operation).call in (Functional.call, Sequential.call)
            mixes = not built_in or "call" in vars(operation)
        else:
            built_in = f"{type(operation).__module__}.".startswith(_ROW_WISE)
            mixes = not built_in or _may_mix(operation)
            mixes = mixes and not _is_elementwise(operation)
        if mixes:
            return operation
    return None


def _is_elementwise(operation: Any) -> bool:
    """Whether it is what Keras makes of `x + y`, of tensors of one rank, and of arrays
    that are the same for all rows.
    """
    kind = type(operation)
    if kind.__module__ != "keras.src.ops.numpy" or kind.__name__ not in _ELEMENTWISE:
        return False
    return all(
        len({tensor.ndim for tensor in [*node.input_tensors, *node.outputs]}) == 1
        and all(
            array.ndim < node.outputs[0].ndim or array.shape[0] == 1
            for array in _arrays_given(node)
        )
        for node in operation._inbound_nodes
    )


def _arrays_given(node: Any) -> list[Any]:
    """The arrays among the arguments of a call in a functional model: what is there
    from the beginning, for a batch of that size.
    """
    given = [node.arguments.args, node.arguments.kwargs]
    leaves = jax.tree.leaves(given, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return [
        leaf
        for leaf in leaves
        if hasattr(leaf, "shape") and len(leaf.shape) and not is_keras_tensor(leaf)
    ]


def _is_of_rows(layer: Any) -> bool:
    """Whether a layer is called with an array that may have the batch's rows, or with
    one number for each row, whose last axis is that of the rows.
    """
    acts = type(layer).__module__.startswith(_OVER_LAST_AXIS)
    return any(
        any(array.shape[0] != 1 for array in _arrays_given(node))
        or (acts and any(tensor.ndim < 2 for tensor in node.input_tensors))
        for node in layer._inbound_nodes
    )


def _permutes_rows(layer: Any) -> bool:
    """Whether an `EinsumDense` does anything with the axis of rows but to keep it."""
    equation = getattr(layer, "equation", None)
    if not isinstance(equation, str):
        return False
    given, out = equation.replace(" ", "").split("->")
    x, kernel = given.split(",")
    if x.startswith("..."):
        return not out.startswith("...")
    return x[:1] != out[:1] or x[0] in kernel


def _may_mix(layer: Any) -> bool:
    """Whether an option of a built-in layer makes it mix rows, or may: state, functions
    and axes of the user's own.
    """
    functions = (
        getattr(layer, name, None) for name in ("activation", "recurrent_activation")
    )
    own = any(
        f is not None and not f.__module__.startswith("keras.src.activations")
        for f in functions
    )
    axes = [
        axis
        for name in ("axis", "axes", "_attention_axes")
        for axis in _numbers(getattr(layer, name, None))
    ]
    noise = getattr(layer, "noise_shape", None)
    fixed = noise is not None and noise[0] is not None
    replaced = "call" in vars(layer)
    # Scales of float8: their "gradient" is the largest value of all rows, no sum.
    scales = map(takes_gradient_as_value, layer.trainable_variables)
    return (
        getattr(layer, "stateful", False)
        or own
        or any(scales)
        or any(axis == 0 or axis < -1 for axis in axes)
        or fixed
        or replaced
        or _is_of_rows(layer)
        or _permutes_rows(layer)
    )


def _numbers(value: Any) -> list[int]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int) else []


def own_step_method(trainer: Any, kind: str = "train") -> str | None:
    """The method, of those that Keras's step consists of, that the user has replaced.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
    """
    predicts = kind == "predict"
    for owner, names in (_PREDICT_METHODS if predicts else _STEP_METHODS).items():
        for name in names:
            name = f"{kind}_step" if name == "train_step" else name
            inherited = getattr(type(trainer), name) is getattr(owner, name)
            if not inherited or name in vars(trainer):
                return name
    return None


def forward(
    trainer: Any, trained: list[Any], others: list[Any], x: Any, *, training: bool
) -> Any:
    """The forward pass of Keras's own steps: predictions, the new values of `others`,
    losses.
    """
    kwargs = {"training": training} if trainer._call_has_training_arg else {}
    return trainer.stateless_call(trained, others, x, return_losses=True, **kwargs)


def stateless_loss(
    trainer: Any, losses: list[Any], variables: tuple[Any, ...], **batch: Any
) -> Any:
    """`stateless_compute_loss` with the losses that the forward pass collected, as
    Keras's own step calls it.
    """
    if losses:
        trainer._losses_override.clear()
        trainer._losses_override = losses
    try:
        return trainer.stateless_compute_loss(*variables, **batch)
    finally:
        if losses:
            trainer._losses_override.clear()


def scaled_loss(trainer: Any, loss: Any, slots: list[Any]) -> Any:
    """The loss as the optimizer scales it, whose variables have the values `slots`."""
    optimizer = trainer.optimizer
    if not compat_optimizer.is_loss_scaling(optimizer):
        return optimizer.scale_loss(loss)
    with StatelessScope(list(zip(optimizer.variables, slots, strict=True))):
        return optimizer.scale_loss(loss)


def normalizes_batches(trainer: Any) -> bool:
    """Whether a layer of the model normalizes by statistics of the batch's rows."""
    return any(
        isinstance(operation, keras.layers.BatchNormalization)
        for operation in _called(trainer)
    )


def update_metrics(
    trainer: Any,
    metrics_variables: Any,
    loss: Any,
    x: Any,
    y: Any,
    y_pred: Any,
    weight: Any,
) -> Any:
    """The logs and the new values of the metrics' variables."""
    return trainer._update_metrics_variables(
        metrics_variables, loss, x, y, y_pred, weight
    )


def _called(trainer: Any) -> list[Any]:
    """All layers and operations that the model may call, nested ones included."""
    found: dict[int, Any] = {}
    todo = list(getattr(trainer, "_operations", [])) + list(
        trainer._flatten_layers(include_self=False)
    )
    while todo:
        operation = todo.pop()
        if id(operation) in found:
            continue
        found[id(operation)] = operation
        todo += list(getattr(operation, "_operations", []))
        if isinstance(operation, Layer):
            todo += list(operation._flatten_layers(include_self=False))
    return list(found.values())

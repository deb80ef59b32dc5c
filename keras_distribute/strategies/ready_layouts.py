"""Ready layouts for transformers: which dimension of each weight is divided over the
logical devices of a replica, from the layers of a model and their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import layers

from keras_distribute import checks, context
from keras_distribute._compat import shapes_alone
from keras_distribute.devices.mesh import LOGICAL_AXIS
from keras_distribute.devices.placement import num_bytes
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.strategies.layout_plans import Axes, LayoutPlan, Weight

_NUMBERS = re.compile(r"(_\d+)+$")
_ANY_NUMBERS = r"(_\d+)*"

# Names of layers, and of weights that belong to none of Keras's: KerasHub's, and those
# that other libraries have made common. What takes activations apart (heads, hidden
# units) is divided by its outputs, what puts them together again by its inputs.
_ATTENTION = re.compile(
    r"(^|_)(query|key|value|qkv|[qkv]_proj)(_|$)|attention_output$|"
    r"(^|_)o(ut)?_proj(ection)?$"
)
_INPUTS = re.compile(
    r"attention_output$|(^|_)output_(dense|proj\w*)$|(^|_)(o|out|down)_proj\w*$|"
    r"(^|_)down(_dense)?$|ffw_linear$|4h_to_h$|(^|_)fc2$"
)
_OUTPUTS = re.compile(
    r"(^|_)(query|key|value|qkv|[qkv]_proj)(_|$)|(^|_)gat(e|ing)(_|$)|intermediate|"
    r"(^|_)up(_|$)|h_to_4h$|(^|_)fc1$|(^|_)input_proj\w*$"
)
_WHOLE = re.compile(r"position|segment|token_type|relative|router|sparse_\w*gate")


def layout_plan(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    num_logical_devices: int = 2,
) -> LayoutPlan:
    """Makes layouts for a transformer, to be printed, changed, and given to a strategy
    as its `layout_map`.

    It knows Keras's own layers (`MultiHeadAttention`, `GroupQueryAttention`, `Dense`,
    `EinsumDense`, `Embedding`) and the names of KerasHub's backbones, among them GPT-2,
    Gemma, Llama, Mistral, Qwen and BERT. What makes queries, keys and values is divided
    by heads, the first half of an MLP by its outputs, the second half and what puts the
    heads together by their inputs: of each such pair the activations are summed once.
    Tables are divided by their rows, the vocabulary. Biases follow their kernels;
    normalization and positions stay whole. So does what does not divide: three heads,
    for example, on two devices; of a table, the other dimension is divided then.

    A `Dense` layer by no known name is divided by the larger of its two dimensions.
    Each layout gives the same numbers; they differ in what is communicated.

    A pattern stands for all numbers in a path where they mean the same, so that a plan
    of a small model may serve for one with more layers of as many heads. It does not
    for layers without a name, whose numbers say what they are.

    Args:
        model_or_builder: A model whose layers are built, or a function without
            arguments that makes one. What the function makes has no values, so it may
            be larger than the memory, and names are counted as if it had not been
            called: the model that it makes next, under the strategy, has the same ones.
        num_logical_devices: As of the strategy.

    Returns:
        A `kd.LayoutPlan`.

    Raises:
        StructureTypeError: For what is no model, and makes none.
        ValueStructureError: For a model without weights, and one of which nothing
            divides.
        ContextError: For a function in the scope of a strategy.

    Example:
        >>> import keras, keras_distribute as kd
        >>> def build():
        ...     x = keras.Input((8, 32))
        ...     y = keras.layers.MultiHeadAttention(4, 8, name="attention")(x, x)
        ...     y = keras.layers.Dense(64, "gelu", name="up")(y)
        ...     y = keras.layers.Dense(32, name="down")(y)
        ...     return keras.Model(x, y)
        >>> plan = kd.layout_plan(build, num_logical_devices=2)
        >>> plan["attention/query/kernel"], plan["down/kernel"]
        ((None, 'logical', None), ('logical', None))
        >>> strategy = kd.MirroredStrategy(
        ...     ["cpu:0", "cpu:1"], num_logical_devices=2, layout_map=plan)
        >>> with strategy.scope():
        ...     model = build()
    """
    number = checks.count("num_logical_devices", num_logical_devices, 1)
    model = _made(model_or_builder)
    wishes = {id(variable): wish for variable, wish in _wishes(model)}
    variables = model.weights
    paths = [variable.path for variable in variables]
    shapes = [tuple(variable.shape) for variable in variables]
    chosen = [
        _layout(wishes.get(id(variable), ()), shape, number)
        for variable, shape in zip(variables, shapes, strict=True)
    ]
    keys = _keys(paths, [layout for layout, _ in chosen])
    found = {
        key: layout
        for key, (layout, _) in zip(keys, chosen, strict=True)
        if layout is not None and key
    }
    weights = [
        Weight(path, key or path, shape, num_bytes(shape, variable.dtype), why)
        for path, key, shape, variable, (_, why) in zip(
            paths, keys, shapes, variables, chosen, strict=True
        )
    ]
    if not found:
        raise ValueStructureError(
            f"Nothing in the model divides over {number} logical devices."
            if weights
            else "The model has no weights yet.",
            received=f"{model.name!r} with {', '.join(paths[:6]) or 'no weights'}.",
            fix="a model of layers that the plan knows, with dimensions that are "
            'multiples of it; or a layout_map by hand: {".*kernel": (None, "logical")}'
            if weights
            else "keras.Input(...) as its first layer, or model.build(...).",
        )
    return LayoutPlan(weights, found, number)


def _made(model_or_builder: Any) -> Any:
    if isinstance(model_or_builder, keras.Model):
        return model_or_builder
    fix = "kd.layout_plan(build_model), where build_model() returns a Keras model."
    what = "A plan is for a Keras model, or a function that makes one."
    checks.function("model_or_builder", model_or_builder, what, fix)
    if context.has_strategy():
        raise ContextError(
            "layout_plan was called with a function in the scope of a strategy.",
            received=f"kd.layout_plan({checks.shown(model_or_builder)}).",
            fix="make the plan first, then the strategy with layout_map=plan.",
        )
    with shapes_alone.shapes_alone():
        model = model_or_builder()
    if not isinstance(model, keras.Model):
        raise StructureTypeError(
            "The function of a plan returns a Keras model.",
            received=f"{checks.shown(model)}.",
            fix="return the model at its end.",
        )
    return model


def _wishes(model: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """For known layers' weights: the dimensions that may be divided, the best first."""
    for layer in shapes_alone.layers_of(model):
        own = {v.name: v for v in layer.weights}
        if isinstance(layer, layers.Embedding):
            if not _WHOLE.search(layer.name):
                yield from _given(own, {"embeddings": (0, 1)})
                yield from _given(own, {"reverse_embeddings": (1, 0)})
        elif isinstance(layer, layers.Dense | layers.EinsumDense):
            yield from _given(own, _of_dense(layer, own))
        else:
            for variable in layer.weights:
                # A weight of the layer itself, such as those of all experts.
                if variable.path.rsplit("/", 2)[-2:-1] != [layer.name]:
                    continue
                rank, name = len(variable.shape), variable.name
                if rank > 1 and _INPUTS.search(name):
                    yield variable, (rank - 2,)
                elif rank > 1 and _OUTPUTS.search(name):
                    yield variable, (rank - 1,)


def _given(
    own: dict[str, Any], wishes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[Any, tuple[int, ...]]]:
    for name, dimensions in wishes.items():
        if name in own:
            yield own[name], dimensions


def _of_dense(layer: Any, own: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The dimensions of kernel and bias of a `Dense` or an `EinsumDense`."""
    kernel = own.get("kernel")
    if kernel is None or _WHOLE.search(layer.name):
        return {}
    equation = getattr(layer, "equation", "ab,bc->ac").replace("...", "")
    inputs, letters, outputs = re.split(",|->", equation.replace(" ", ""))
    if len(letters) != len(kernel.shape):  # Quantized, and stored in another form.
        return {}
    size = dict(zip(letters, kernel.shape, strict=True))
    produced = [c for c in outputs if c in size and c not in inputs]
    contracted = [c for c in inputs if c in size and c not in outputs]
    sizes = [math.prod(size[c] for c in each) for each in (produced, contracted)]
    by_inputs = sizes[0] < sizes[1]
    if _INPUTS.search(layer.name) or _OUTPUTS.search(layer.name):
        by_inputs = bool(_INPUTS.search(layer.name))
    order = (
        [contracted[:1], produced[:1]] if by_inputs else [produced[:1], contracted[:1]]
    )
    if _ATTENTION.search(layer.name):
        order = order[:1]  # A part of a head would be of no use.
    letter_order = [c for each in order for c in each]
    wishes = {"kernel": tuple(letters.index(c) for c in letter_order)}
    bias = own.get("bias")
    if bias is not None and not by_inputs and produced:
        axes = getattr(layer, "bias_axes", produced[0]) or ""
        if produced[0] in axes:
            wishes["bias"] = (
                len(bias.shape) - len(outputs) + outputs.index(produced[0]),
            )
    return wishes


def _layout(
    wishes: Sequence[int], shape: tuple[int, ...], number: int
) -> tuple[Axes | None, str]:
    """The layout that divides the first dimension that can be; if there is none, why
    not, where one was wanted.
    """
    for i in wishes:
        if shape[i] and shape[i] % number == 0:
            return tuple(
                LOGICAL_AXIS if j == i else None for j in range(len(shape))
            ), ""
    if not wishes:
        return None, ""
    sizes = " and ".join(str(shape[i]) for i in wishes)
    return None, f": {sizes} cannot be divided by {number}"


def _keys(paths: Sequence[str], layouts: Sequence[Axes | None]) -> list[str]:
    """For each path the pattern that stands for the most numbers, if all that it
    matches has the same layout; nothing where two of one path have different ones.
    """
    numbered = _numbered(paths)
    found: dict[str, str] = {}
    todo = list(zip(paths, layouts, strict=True))
    # Any numbers; those of the layer that has the weight as they are; all as they are.
    for fixed in (0, 2, None):
        groups: dict[str, set[Axes | None]] = {}
        for path, layout in todo:
            groups.setdefault(_pattern(path, numbered, fixed), set()).add(layout)
        for path, _ in todo:
            pattern = _pattern(path, numbered, fixed)
            if len(groups[pattern]) == 1:
                found[path] = pattern
        todo = [each for each in todo if each[0] not in found]
    return [found.get(path, "") for path in paths]


def _numbered(paths: Sequence[str]) -> dict[tuple[str, ...], set[int]]:
    """Which parts of a path have a number in one of the paths; by the path without."""
    found: dict[tuple[str, ...], set[int]] = {}
    for path in paths:
        parts = path.split("/")
        names = tuple(_NUMBERS.sub("", part) for part in parts)
        pairs = enumerate(zip(names, parts, strict=True))
        places = {i for i, (name, part) in pairs if name != part}
        found[names] = found.get(names, set()) | places
    return found


def _pattern(
    path: str, numbered: dict[tuple[str, ...], set[int]], fixed: int | None
) -> str:
    """A pattern for a path.

    Args:
        numbered: What `_numbered` found.
        fixed: Of how many parts at its end the numbers are as they are; `None`: of all.
    """
    parts = path.split("/")
    names = tuple(_NUMBERS.sub("", part) for part in parts)
    free = 0 if fixed is None else len(parts) - fixed
    return "/".join(
        _escaped(names[i]) + _ANY_NUMBERS
        if i < free and i in numbered[names]
        else _escaped(part)
        for i, part in enumerate(parts)
    )


def _escaped(path: str) -> str:
    """A pattern for a path alone."""
    return re.escape(path).replace(r"\-", "-")

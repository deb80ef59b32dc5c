"""Where an optimizer gets its gradients: `apply`, and the finiteness check of loss scaling.

Keras's JAX optimizers have no hook for aggregation. `apply` is the one place before clipping, weight decay and
loss-scale checks.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.backend.common.name_scope import name_scope
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

Undo = Callable[[], None]
Apply = Callable[[Any, list[Any], "list[Any] | None"], None]
AroundApply = Callable[[Any, list[Any], "list[Any] | None", Apply], None]


def install(around_apply: AroundApply, all_of: Callable[[Any], Any]) -> Undo:
    """Puts `around_apply(optimizer, grads, variables, original)` around `apply`, and `all_of` around `check_finite`."""
    originals = [(cls, cls.apply) for cls in (BaseOptimizer, LossScaleOptimizer)]
    check_finite = LossScaleOptimizer.check_finite

    def wrap(original: Apply) -> Apply:
        def apply(self: Any, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
            around_apply(self, grads, trainable_variables, original)

        return apply

    for cls, original in originals:
        cls.apply = wrap(original)
    LossScaleOptimizer.check_finite = lambda self, grads: all_of(check_finite(self, grads))

    def undo() -> None:
        for cls, original in originals:
            cls.apply = original
        LossScaleOptimizer.check_finite = check_finite

    return undo


def build(optimizer: Any, variables: list[Any] | None) -> None:
    """Creates the optimizer's variables, as its own first `apply` would."""
    if not optimizer.built and variables is not None:
        with name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
        optimizer.built = True


def is_loss_scaling(optimizer: Any) -> bool:
    """Whether it wraps another optimizer and checks for overflows."""
    return isinstance(optimizer, LossScaleOptimizer)


def built_variables(optimizer: Any) -> list[Any]:
    """The model variables that the optimizer was built with, in order."""
    return list(optimizer._trainable_variables)


def accumulation(optimizer: Any) -> tuple[int, Any, list[Any]] | None:
    """The number of micro-steps, their counter and the accumulators; `None` without accumulation."""
    if not optimizer.gradient_accumulation_steps:
        return None
    return optimizer.gradient_accumulation_steps, optimizer._iterations, optimizer._accumulated_gradients


def inner_accumulates(optimizer: Any) -> bool:
    """Whether the optimizer inside a loss-scaling one accumulates gradients."""
    return bool(optimizer.inner_optimizer.gradient_accumulation_steps)


def index_of(optimizer: Any, variable: Any) -> int:
    """The position of a model variable among those that the optimizer was built with."""
    return optimizer._get_variable_index(variable)

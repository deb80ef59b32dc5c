"""Puts the package's seams into Keras, once, on import; `uninstall` takes them out
again.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_distribute import context
from keras_distribute._compat import (
    adapters,
    added_losses,
    callbacks,
    layers,
    losses,
    optimizer,
    saving,
    tensorflow,
    variables,
)
from keras_distribute.strategies.default import default_strategy
from keras_distribute.training import (
    adoption,
    batch_normalization,
    callback_list,
    replica_rules,
    trainer,
)
from keras_distribute.training.saving import written_once
from keras_distribute.training.steps import state_shardings
from keras_distribute.variables import accumulators_created, choose_class

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Hooks variable creation, the trainer and its input, optimizers, losses, batch
    normalization and seeds.
    """
    if _undo:
        return
    context.register_default(default_strategy)
    _undo.extend(
        [
            variables.install(choose_class, accumulators_created),
            tensorflow.keep_off_accelerators(),
            trainer.install(),
            adapters.install(adoption.choose_adapter),
            callbacks.install(callback_list.StrategyCallbackList),
            saving.install(written_once),
            optimizer.install(
                replica_rules.apply_gradients,
                replica_rules.all_replicas_agree,
                state_shardings.slot_created,
            ),
            losses.install(
                replica_rules.global_sum,
                replica_rules.in_replica,
                replica_rules.shapes_differ,
            ),
            added_losses.install(),
            layers.install(
                batch_normalization.call,
                batch_normalization.synchronized_moments,
                replica_rules.global_sum,
                replica_rules.replica_seed,
            ),
        ]
    )


def uninstall() -> None:
    """Leaves Keras as it was."""
    while _undo:
        _undo.pop()()

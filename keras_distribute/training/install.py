"""Puts the package's seams into Keras, once, on import; `uninstall` takes them out
again.
"""

from __future__ import annotations

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
from keras_distribute._compat.seams import Replacements
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

_replaced = Replacements()


def install() -> None:
    """Hooks variable creation, the trainer and its input, optimizers, losses, batch
    normalization and seeds.
    """
    if _replaced:
        return
    context.register_default(default_strategy)
    variables.install(_replaced, choose_class, accumulators_created)
    tensorflow.keep_off_accelerators(_replaced)
    trainer.install(_replaced)
    adapters.install(_replaced, adoption.choose_adapter)
    callbacks.install(_replaced, callback_list.StrategyCallbackList)
    saving.install(_replaced, written_once)
    optimizer.install(
        _replaced,
        replica_rules.apply_gradients,
        replica_rules.all_replicas_agree,
        state_shardings.slot_created,
    )
    losses.install(
        _replaced,
        replica_rules.global_sum,
        replica_rules.in_replica,
        replica_rules.shapes_differ,
    )
    added_losses.install(_replaced)
    layers.install(
        _replaced,
        batch_normalization.call,
        batch_normalization.synchronized_moments,
        replica_rules.global_sum,
        replica_rules.replica_seed,
    )


def uninstall() -> None:
    """Leaves Keras as it was."""
    _replaced.undo()

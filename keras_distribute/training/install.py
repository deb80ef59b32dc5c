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
from keras_distribute._compat import attention as attention_compat
from keras_distribute._compat import recurrent as recurrent_compat
from keras_distribute._compat.seams import changes
from keras_distribute.strategies.default import default_strategy
from keras_distribute.training import (
    attention,
    batch_normalization,
    callback_list,
    feeds,
    recurrent,
    replica_rules,
    trainer,
)
from keras_distribute.training.saving import written_once
from keras_distribute.training.steps import state_shardings
from keras_distribute.variables import accumulators_created, choose_class


def install() -> None:
    """Puts the seams into Keras, unless they are there."""
    replaced = changes.replaced
    if replaced:
        return
    context.register_default(default_strategy)
    variables.install(replaced, choose_class, accumulators_created)
    tensorflow.keep_off_accelerators(replaced)
    trainer.install(replaced)
    adapters.install(replaced, feeds.choose_adapter)
    callbacks.install(replaced, callback_list.StrategyCallbackList)
    saving.install(replaced, written_once)
    optimizer.install(
        replaced,
        replica_rules.apply_gradients,
        replica_rules.all_replicas_agree,
        state_shardings.check_slot_of,
        state_shardings.slot_created,
    )
    losses.install(
        replaced,
        replica_rules.global_sum,
        replica_rules.in_replica,
        replica_rules.shapes_differ,
    )
    added_losses.install(replaced)
    attention_compat.install(replaced, attention.dot_product_attention)
    recurrent_compat.install(replaced, recurrent.lstm)
    layers.install(
        replaced,
        batch_normalization.call,
        batch_normalization.synchronized_moments,
        replica_rules.global_sum,
        replica_rules.replica_seed,
    )


def uninstall() -> None:
    """Leaves Keras as it was."""
    changes.replaced.undo()

"""Losses that layers add while a program is traced: noted as long as their scope lasts,
and no longer.

In a stateless scope each layer notes its own losses by their `id()` (`Layer._loss_ids`)
and drops the notes when it is called again. The losses are gone long before: a new loss
of another layer may get the `id` of an old one, and when the layer with the old note is
called, it removes the new loss from the scope as its own, or counts it twice. What a
model with two such layers computes from its second trace on (the evaluation after the
training, another batch size) is then a matter of where Python finds memory, on one
device as on many. Here the notes end with their scope, in `StatelessScope.__exit__`.
Goes when Keras does not know losses by `id()`.
"""

from __future__ import annotations

from typing import Any

from keras import Layer, StatelessScope
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_distribute._compat.seams import Replacements, check

check(Layer, "_loss_ids")

_LAYERS = "_keras_distribute_layers_with_losses"


def install(replaced: Replacements) -> None:
    """Has scopes forget, at their end, the losses that were added in them."""
    add_loss, leave = Layer.add_loss, StatelessScope.__exit__

    def add_noted(self: Any, loss: Any) -> None:
        add_loss(self, loss)
        scope: Any = get_stateless_scope()
        if scope is not None:
            vars(scope).setdefault(_LAYERS, []).append(self)

    def leave_clean(self: Any, *args: Any, **kwargs: Any) -> None:
        of_scope = {id(loss) for loss in self.losses}
        for layer in vars(self).pop(_LAYERS, ()):
            layer._loss_ids -= of_scope
        leave(self, *args, **kwargs)

    replaced.replace(Layer, "add_loss", add_noted)
    replaced.replace(StatelessScope, "__exit__", leave_clean)

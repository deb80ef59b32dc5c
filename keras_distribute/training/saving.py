"""Model files of several processes: all read the variables, one writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_distribute.cluster import agreement
from keras_distribute.variables import DistributedVariable, read_before

_SAVING = "the saving of a model"
_FIX = "save in every process, not under `if kd.is_chief():`; the chief alone writes."


def written_once(model: Any, write: Callable[[], Any]) -> Any:
    """Calls `write` in one of the processes that share the model, once all have read
    its variables.

    Args:
        write: Writes its files. What it returns or raises, every process returns or
            raises.
    """
    variables = [
        *getattr(model, "variables", ()),
        *getattr(getattr(model, "optimizer", None), "variables", ()),
    ]
    distributed = [
        variable for variable in variables if isinstance(variable, DistributedVariable)
    ]
    count = max(
        (variable.replica_mesh.num_processes for variable in distributed), default=1
    )
    if count == 1:
        return write()
    with read_before(distributed):
        # Not by its name, which says how many models the process has made.
        return agreement.from_chief(_SAVING, write, count, _FIX)

"""The check that all processes gave the same values to the variables which are the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras_distribute.cluster import agreement
from keras_distribute.errors import VariableScopeError
from keras_distribute.variables.base import DistributedVariable
from keras_distribute.variables.mirrored import MirroredVariable

_CALLS = 256  # After which what was assigned in a loop is compared again.


def check_same_values(variables: Sequence[DistributedVariable]) -> None:
    """Raises where the processes have given mirrored variables different values; across
    replicas, before a program.
    """
    mirrored, count = _over_processes(variables)
    if count == 1:
        return
    own = [(tuple(v.shape), v.take_checksum()) for v in mirrored]
    said = agreement.exchange("the values of variables", own, count)
    if any(len(other) != len(own) for other in said):
        raise VariableScopeError(
            "The processes run programs over different variables.",
            received=f"{', '.join(str(len(other)) for other in said)} variables.",
            fix="build the same model in every process.",
        )
    _refuse_differing(mirrored, said)


def check_assigned(variables: Iterable[Any]) -> None:
    """`check_same_values` of what any process has assigned since it was last checked:
    a learning rate, or weights that the chief alone has loaded.

    Args:
        variables: Of a model that is built, the same in every process.
    """
    mirrored, count = _over_processes(variables)
    if count == 1:
        return
    assigned = [i for i, v in enumerate(mirrored) if v.is_assigned]
    of_all = agreement.exchange("what was assigned", assigned, count)
    together = sorted(set[int]().union(*of_all))
    if not together:
        return
    chosen = [mirrored[i] for i in together]
    own = [v.take_checksum() for v in chosen]
    _refuse_differing(chosen, agreement.exchange("the values of variables", own, count))


def is_due(calls: int) -> bool:
    """Whether what was assigned is compared before the next call in a loop of the
    user's own: soon after the first one, then less and less often, since the processes
    wait for each other there.

    Args:
        calls: How many there were.
    """
    return calls > 0 and (calls % _CALLS == 0 or calls & (calls - 1) == 0)


def _over_processes(variables: Iterable[Any]) -> tuple[list[MirroredVariable], int]:
    """Those that have a value, and how many processes have them."""
    mirrored = [v for v in variables if isinstance(v, MirroredVariable)]
    count = max((v.replica_mesh.num_processes for v in mirrored), default=1)
    return [v for v in mirrored if count > 1 and v.is_initialized], count


def _refuse_differing(
    variables: Sequence[MirroredVariable], said: Sequence[Sequence[Any]]
) -> None:
    count = len(said)
    wrong = [v for i, v in enumerate(variables) if len({own[i] for own in said}) > 1]
    for variable in wrong:
        variable.is_assigned = True  # Until it is assigned again, and checked.
    if wrong:
        paths = [variable.path for variable in wrong[:20]]
        raise VariableScopeError(
            f"The processes have given different values to {len(wrong)} mirrored "
            f"variable(s): {', '.join(paths)}.",
            received=f"{count} processes.",
            fix="assign the same values in every process: kd.run_on_chief(make_values) "
            "gives all of them the chief's.",
        )

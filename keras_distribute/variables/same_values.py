"""The check that all processes gave the same values to the variables which are the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_distribute.cluster import agreement
from keras_distribute.errors import VariableScopeError
from keras_distribute.variables.base import DistributedVariable
from keras_distribute.variables.mirrored import MirroredVariable


def check_same_values(variables: Sequence[DistributedVariable]) -> None:
    """Raises where the processes have given mirrored variables different values; across
    replicas, before a program.

    Raises:
        VariableScopeError: Names the variables.
    """
    mirrored = [v for v in variables if isinstance(v, MirroredVariable)]
    count = max((v.replica_mesh.num_processes for v in mirrored), default=1)
    if count == 1:
        return
    mirrored = [v for v in mirrored if v.is_initialized]
    own = [(tuple(v.shape), v.take_checksum()) for v in mirrored]
    said = agreement.exchange("the values of variables", own, count)
    if any(len(other) != len(own) for other in said):
        raise VariableScopeError(
            "The processes run programs over different variables.",
            received=f"{', '.join(str(len(other)) for other in said)} variables.",
            fix="build the same model in every process.",
        )
    differing = [
        v.path for i, v in enumerate(mirrored) if len({other[i] for other in said}) > 1
    ]
    if differing:
        raise VariableScopeError(
            f"The processes have given different values to {len(differing)} mirrored "
            f"variable(s): {', '.join(differing[:20])}.",
            received=f"{count} processes.",
            fix="assign the same values in every process: kd.run_on_chief(make_values) "
            "gives all of them the chief's.",
        )

"""The names of the axes of a mesh."""

from __future__ import annotations

REPLICA_AXIS = "replica"
LOGICAL_AXIS = "logical"

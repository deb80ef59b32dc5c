"""A step that is run again, each replica's part on another device: what differs by a
bit is the hardware's.

The program, its inputs and a hash of each of its results on each device are kept. The
program runs again on the same mesh with its devices moved on by one, so that each
replica's rows are computed by another device. Where a hash differs, it runs a third
time, moved on by two, and of three results of the same two are right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_distribute.cluster import liveness
from keras_distribute.consistency import hashing
from keras_distribute.consistency.telling import told_by_all
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import name_of

_MOST_NAMES = 8
Hashes = np.ndarray[Any, Any]
"""Of shape `(devices, results)`: of each result on each device of a mesh, in order."""
Keep = Callable[[Hashes], str | None]
"""Keeps a step, if it is wanted, with the hashes of its results; returns where."""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What the replay of a step found: print it.

    Attributes:
        step: How many steps the optimizer had taken before it.
        num_results: How many results were compared: logs, gradients and state.
        differing: Those that were not the same the second time, in words.
        devices: Those that computed what no other device did, such as `"cpu:2"`.
        is_certain: Whether these and no others erred. With two devices, nobody knows
            which of them is right.
        folder: Where the step is kept, if it is.
    """

    step: int
    num_results: int
    differing: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    is_certain: bool = False
    folder: str | None = None

    @property
    def heading(self) -> str:
        """One sentence."""
        if not self.differing:
            return (
                f"Step {self.step}, run again, gave the same bits in all of "
                f"{self.num_results} results."
            )
        count = f"{len(self.differing)} of {self.num_results} results"
        begin = f"Step {self.step}, run again, gave other bits in "
        if not self.devices:
            return f"{begin}{count}, on no device in particular."
        names = " and ".join(self.devices)
        if not self.is_certain:
            names = f"one of {names}, of which nobody knows"
        return f"{begin}{count}: computed wrongly by {names}."

    @property
    def lines(self) -> tuple[str, ...]:
        """What differs; not too much."""
        shown = self.differing[:_MOST_NAMES]
        left = len(self.differing) - len(shown)
        more = [f"... and {left} more"] if left else []
        kept = [f"kept in {self.folder}"] if self.folder else []
        return (*shown, *more, *kept)

    def __str__(self) -> str:
        return "\n  ".join([self.heading, *self.lines])


class StepProgram:
    """The program of a step, for any devices.

    Args:
        exported: As `jax.export` has it.
        mesh: On which it was compiled first.
        names: Of its results.
        own: Which result has a row for each replica, with the replica's hashes of
            `own_names`; `None` if none does.
        own_names: What each of those is.
        compiler_options: As of `jax.jit`.
    """

    def __init__(
        self,
        exported: jax.export.Exported,
        mesh: ReplicaMesh,
        names: Sequence[str],
        own: int | None,
        own_names: Sequence[str],
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self.exported, self.mesh, self.own = exported, mesh, own
        self.names, self.own_names = list(names), list(own_names)
        self.compiler_options = compiler_options
        self._compiled: dict[int, Any] = {}

    @property
    def result_names(self) -> list[str]:
        """What each column of `hashes` is: each replica's own results come first."""
        rest = [n for i, n in enumerate(self.names) if i != self.own]
        return [f"gradient of {name}" for name in self.own_names] + rest

    @property
    def num_own(self) -> int:
        """How many of these are a replica's own."""
        return len(self.own_names)

    def run(
        self, inputs: Sequence[jax.Array], outputs: Sequence[jax.Array], by: int
    ) -> list[jax.Array]:
        """The results, on the mesh with its devices moved on.

        Args:
            outputs: The results of the first time.
            by: By how many replicas.
        """
        mesh = self.moved(by)
        given = [jax.device_put(a, _on(a, mesh)) for a in inputs]
        return self._run(given, [_on(a, mesh) for a in outputs], by)

    def run_on_mesh(
        self, inputs: Sequence[jax.Array], specs: Sequence[PartitionSpec]
    ) -> list[jax.Array]:
        """The results, on the mesh.

        Args:
            specs: How the results are divided.
        """
        mesh = self.mesh.mesh
        return self._run(inputs, [NamedSharding(mesh, spec) for spec in specs], 0)

    def _run(
        self, given: Sequence[jax.Array], shardings: list[NamedSharding], by: int
    ) -> list[jax.Array]:
        if by not in self._compiled:
            self._compiled[by] = jax.jit(
                self._called,
                out_shardings=shardings,
                compiler_options=self.compiler_options,
            )
        liveness.current.begin_program(self.mesh.num_processes)
        return list(self._compiled[by](*given))

    def _rows(self) -> np.ndarray[Any, Any]:
        """The devices, along axis 0 those that stand for each other."""
        grid = self.mesh.mesh.devices
        if len(grid) > 1:
            return grid
        own = list(grid.flat)
        alike = [d for d in jax.local_devices() if d.device_kind == own[0].device_kind]
        every = np.asarray([*own, *(d for d in alike if d not in own)], dtype=object)
        moved = [np.roll(every, -by)[: grid.size] for by in range(len(every))]
        return np.stack(moved).reshape(-1, *grid.shape[1:])

    def _called(self, *leaves: jax.Array) -> list[jax.Array]:
        arguments, _ = jax.tree.unflatten(self.exported.in_tree, leaves)
        return jax.tree.leaves(self.exported.call(*arguments))

    @property
    def num_places(self) -> int:
        """How many devices, or groups of logical ones, may compute a replica's part."""
        return len(self._rows())

    def moved(self, by: int) -> Mesh:
        """The mesh, each of whose places has the device of a later one; of one replica,
        the next of its logical devices, or another device of this process.
        """
        mesh = self.mesh.mesh
        devices = np.roll(self._rows(), -by, axis=0)[: len(mesh.devices)]
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)

    def hashes(self, results: Sequence[jax.Array]) -> Hashes:
        """Of each result, on each device of their mesh."""
        num_processes = self.mesh.num_processes
        rest = [a for i, a in enumerate(results) if i != self.own]
        layout = tuple((i,) for i in range(len(rest)))
        liveness.current.begin_program(num_processes)
        found = [hashing.of_arrays(rest, layout)]
        if self.own is not None:
            found.append(results[self.own])
        told = told_by_all("the hashes of a step", found, num_processes)
        every = [each.reshape(each.shape[0], -1, 2) for each in told[::-1]]
        logical = len(every[-1]) // len(every[0])
        every[0] = np.repeat(every[0], logical, axis=0)
        return hashing.as_numbers(np.concatenate(every, axis=1))


def replayed(
    program: StepProgram,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.Array],
    step: int,
    keep: Keep,
) -> StepReport:
    """Runs a step again, and compares.

    Args:
        inputs: Of the step; they must still be there.
        outputs: Its results.
        keep: Keeps the step, where something differs.
    """
    outputs = [_on_mesh(array, program.mesh) for array in outputs]
    others = program.num_places - 1
    with launches.lock:
        tables = [program.hashes(outputs)]
        moves = [0, min(1, others)]
        tables.append(program.hashes(program.run(inputs, outputs, moves[1])))
        columns = np.flatnonzero((tables[0] != tables[1]).any(axis=0))
        names = program.result_names
        report = StepReport(step, len(names), tuple(names[i] for i in columns))
        if not columns.size:
            return report
        report = dataclasses.replace(report, folder=keep(tables[0]))
        moves.append(2 if others > 1 else 0)
        tables.append(program.hashes(program.run(inputs, outputs, moves[2])))
    meshes = [program.moved(by).devices.reshape(-1) for by in moves]
    own = columns[columns < program.num_own]
    wrong, is_certain = erring(tables, meshes, own if own.size else columns)
    if not own.size and len(wrong) == len(meshes[0]) > 1:
        # What has been summed is wrong everywhere if one replica's part was.
        wrong, is_certain = [], False
    devices = tuple(map(name_of, wrong))
    return dataclasses.replace(report, devices=devices, is_certain=is_certain)


def erring(
    tables: Sequence[Hashes], devices: Sequence[Any], columns: Any
) -> tuple[list[jax.Device], bool]:
    """The devices that computed what two others did not, and whether it is certain.

    Args:
        tables: The hashes of three runs.
        devices: Of each run, which device was in each place, in order.
        columns: Which results to look at.
    """
    wrong: dict[jax.Device, None] = {}
    is_certain = True
    for place in range(len(tables[0])):
        who = [each[place] for each in devices]
        for column in columns:
            cells = [int(table[place, column]) for table in tables]
            odd = [i for i in range(3) if cells.count(cells[i]) == 1]
            if len(odd) == 3 or (odd == [1] and who[0] is who[2] is not who[1]):
                # All differ; or one device says twice what another one does not.
                is_certain = is_certain and len(set(who)) == 1
                wrong.update(dict.fromkeys(who))
            elif odd:
                wrong[who[odd[0]]] = None
    return sorted(wrong, key=lambda each: each.id), is_certain


def _on_mesh(array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """The array; where XLA chose where it is, on all devices."""
    if isinstance(array.sharding, NamedSharding):
        return array
    return jax.device_put(array, mesh.replicated)


def _on(array: jax.Array, mesh: Mesh) -> NamedSharding:
    sharding: Any = array.sharding
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)

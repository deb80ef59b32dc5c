"""`StrategySummary`: what `Strategy.summary` returns. How it is drawn is in the files
beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_distribute import checks
from keras_distribute.context import AnyStrategy
from keras_distribute.errors import ValueStructureError
from keras_distribute.input.splitting import piece_sizes
from keras_distribute.summary import facts, formats, picture, tables
from keras_distribute.summary.facts import FOREIGN, DeviceFacts, VariableFacts
from keras_distribute.summary.tables import Table


class StrategySummary:
    """The devices of a strategy, and what stands on each: text when printed, tables and
    a picture in a notebook.

    Made by `Strategy.summary`. It holds the numbers of the moment it was made.

    Attributes:
        strategy: The strategy in words, such as `"MirroredStrategy"`.
        num_replicas: The number of replicas.
        devices: An entry for each device, in replica order, with its `name`, `model`,
            `replica`, `process`, and `bytes_in_use` and `bytes_limit` of its memory
            where JAX knows them, else `None`.
        batch_size: The rows of the global batch, or `None`.
        rows: The rows of that batch on each replica; empty without a batch size.
        variables: An entry for each variable, with its `path`, `group`, `kind`,
            `shape`, `dtype`, the `num_bytes` of its value, and `bytes_on`, the bytes on
            each device.
        training_steps: For each compiled model, how a step of its `fit` is made, and
            what would make it faster.

    Example:
        >>> import keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> summary = strategy.summary(model, batch_size=5)
        >>> summary.rows, summary.bytes_on_each
        ((3, 2), (32, 32))
    """

    def __init__(
        self, strategy: AnyStrategy, objects: Sequence[Any], batch_size: int | None
    ) -> None:
        if batch_size is not None:
            what = "The global batch has at least one row."
            fix = "strategy.summary(model, batch_size=128), or leave it out."
            checks.count("batch_size", batch_size, 1, what=what, fix=fix)
        mesh = strategy.replica_mesh
        sizes = piece_sizes(batch_size, mesh.num_replicas) if batch_size else ()
        self.strategy = type(strategy).__name__
        self.num_replicas = mesh.num_replicas
        self.devices: tuple[DeviceFacts, ...] = facts.of_devices(mesh)
        self.batch_size = batch_size
        self.rows = tuple(sizes)
        self.variables: tuple[VariableFacts, ...] = facts.of_variables(
            strategy, objects
        )
        self._unbuilt = facts.unbuilt(objects)
        self.training_steps: tuple[str, ...] = facts.training_steps(objects)

    @property
    def bytes_on_each(self) -> tuple[int, ...]:
        """The bytes of all variables on each device, in the order of `devices`."""
        return tables.totals(self.variables) or (0,) * len(self.devices)

    @property
    def heading(self) -> str:
        """The strategy in one line."""
        models = ", ".join(sorted({device.model for device in self.devices}))
        replicas = checks.counted(self.num_replicas, "replica")
        devices = checks.counted(len(self.devices), "device")
        line = f"{self.strategy}: {replicas} on {devices} ({models})"
        processes = len({device.process for device in self.devices})
        return line if processes == 1 else f"{line} of {processes} processes"

    @property
    def notes(self) -> list[str]:
        """What a reader should know besides the tables, in sentences."""
        lines: list[str] = []
        if self.batch_size is not None:
            rows = tables.rows_in_words(self.rows)
            lines.append(f"A global batch of {self.batch_size} rows: {rows}.")
        lines += self.training_steps
        lines += [
            f"{name} is not built yet: it makes variables when it is used first."
            for name in self._unbuilt
        ]
        whole = [each for each in self.variables if each.is_indivisible]
        if whole:
            paths = checks.listed([f"{each.path} {each.shape}" for each in whole])
            size = tables.bytes_in_words(sum(each.num_bytes for each in whole))
            variables = checks.counted(len(whole), "large variable")
            lines.append(
                f"{variables} whole on each device, {size}, since {self.num_replicas} "
                f"replicas divide none of their dimensions: {paths}."
            )
        foreign = [each.path for each in self.variables if each.kind == FOREIGN]
        if foreign:
            lines.append(
                f"{checks.counted(len(foreign), 'variable')} not of this strategy: "
                f"{checks.listed(foreign)}. "
                "Create what a step uses inside `with strategy.scope():`."
            )
        return lines

    def tables(self, max_variables: int | None = 30) -> list[Table]:
        """What it says, as tables of words."""
        if max_variables is not None:
            checks.count("max_variables", max_variables)
        found = [tables.of_devices(self.devices, self.rows)]
        if self.variables:
            found.append(tables.of_groups(self.variables))
            found.append(tables.of_each(self.variables, max_variables))
        return found

    def text(self, max_variables: int | None = 30) -> str:
        """The whole as plain text.

        Args:
            max_variables: How many variables to list at most; the largest ones then.
                `None` for all.
        """
        return formats.as_text(self.heading, self.notes, self.tables(max_variables))

    def svg(self) -> str:
        """The picture, as the text of an SVG file: a column for each replica, a line
        for each group of variables.

        Words are drawn in the colour of the text around it.
        """
        return picture.draw(self.strategy, self.devices, self.rows, self.variables)

    def plot(self, path: str | Path) -> None:
        """Writes the picture to an SVG file.

        Args:
            path: Of the file, ending in `.svg`.

        Raises:
            ValueStructureError: For another ending.
        """
        checks.path("path", path, 'summary.plot("summary.svg")')
        if Path(path).suffix != ".svg":
            raise ValueStructureError(
                "The picture of a summary is an SVG file.",
                received=f"plot({str(path)!r}).",
                fix='summary.plot("summary.svg")',
            )
        Path(path).write_text(picture.on_paper(self.svg()), "utf-8")

    def __repr__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        return formats.as_rich(self.heading, self.notes, self.tables())

    def _repr_html_(self) -> str:
        return formats.as_html(self.heading, self.notes, self.tables(None), self.svg())

"""`Checkpoint`: the state of a set of objects in one folder, and back."""

from __future__ import annotations

import functools
import os
import warnings
from importlib import metadata
from types import ModuleType
from typing import Any

import keras
from packaging.version import Version

from keras_distribute import checks, context
from keras_distribute.checkpoint import matching, tracking, under_way, values
from keras_distribute.checkpoint.manifest import Manifest
from keras_distribute.checkpoint.matching import RestoreStatus
from keras_distribute.checkpoint.reading import EACH_PROCESS, Reading
from keras_distribute.checkpoint.tracking import Tracked
from keras_distribute.cluster import agreement, encoding, messages
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.errors import BackendError, CheckpointError, StructureTypeError
from keras_distribute.variables import DistributedVariable

_ORBAX = "0.12"  # The oldest that works.

Path = str | os.PathLike[str]


class Checkpoint:
    """Saves the state of objects, and restores it in place: on any number of replicas,
    and in plain Keras.

    Source: `tf.train.Checkpoint`. A model brings its weights, seeds, metrics and
    optimizer along. Restored on as many replicas as it was saved on, all is as it was,
    bit for bit: sync-on-read variables, such as the statistics of batch normalization,
    gradient accumulators and metrics, get each replica's own component again. Anywhere
    else they get the value that the components add up to.

    Variables are found by names that do not depend on what else a process has built:
    layers that were given no name are counted within their model.

    Differs from TF: what is restored must fit entirely, and is checked before any
    variable changes, unless `partial=True`; nothing waits for variables that are
    created later, so build models first; plain values are kept in dictionaries; every
    array has a checksum. Needs `pip install orbax-checkpoint`.

    Args:
        root: One object, if it needs no name: `Checkpoint(model)`.
        **objects: By name: models and layers that are built, optimizers, metrics,
            `keras.random.SeedGenerator`s, `keras.Variable`s, dictionaries, and any
            object with `get_state()` and `set_state(state)`. Dictionaries are restored
            in place; they and such states may hold `None`, booleans, numbers, strings,
            bytes, arrays, and lists, tuples and dictionaries of them.

    Raises:
        StructureTypeError: For an object of another kind, and for two that are `root`.

    Example:
        >>> import tempfile, keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        ...     model.compile("adam", "mse")
        >>> progress = {"epoch": 3}
        >>> checkpoint = kd.Checkpoint(model=model, progress=progress)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
        >>> path[-6:]
        'ckpt-1'
        >>> progress["epoch"] = 4
        >>> status = checkpoint.restore(path)
        >>> progress
        {'epoch': 3}
        >>> status.restored[0]
        'model/variables/dense/kernel'
    """

    def __init__(self, root: Any = None, /, **objects: Any) -> None:
        if root is not None:
            if "root" in objects:
                raise StructureTypeError(
                    "Two objects have the name 'root'.",
                    received=f"{checks.shown(root)} without a name, which is called "
                    f"so, and root={checks.shown(objects['root'])}.",
                    fix="Checkpoint(model=model, other=other), which names both.",
                )
            objects = {"root": root, **objects}
        for name, value in objects.items():
            tracking.check_trackable(name, value)
        self._objects = objects
        self._counter = 0

    @property
    def objects(self) -> dict[str, Any]:
        """The objects, by name."""
        return dict(self._objects)

    @property
    def num_processes(self) -> int:
        """How many processes share the variables: all of them save and restore
        together, and the first one writes.
        """
        counts = [
            variable.replica_mesh.num_processes
            for variable in tracking.track(self._objects).variables.values()
            if isinstance(variable, DistributedVariable)
        ]
        return max(counts, default=1)

    @property
    def save_counter(self) -> int:
        """How many times `save` was called; restored along with the rest."""
        return self._counter

    def save(self, file_prefix: Path) -> str:
        """Saves to a folder of a new name, `file_prefix-1`, `file_prefix-2` and so on.
        Source: TF's `save`.

        Call it across replicas, outside of `Strategy.run`; inside or outside a scope.
        Ctrl-C does not break off the writing, and its number is not used again.

        Args:
            file_prefix: The beginning of the folder's path, `/somewhere/ckpt`.

        Returns:
            The folder's path.

        Raises:
            CheckpointError: If the folder exists or cannot be written; nothing is left
                of it then.
        """
        checks.path("file_prefix", file_prefix, error=CheckpointError)
        self._counter += 1
        try:
            return self.write(f"{os.fspath(file_prefix)}-{self._counter}")
        except Exception:  # Not Ctrl-C: the folder may be there, or will be.
            self._counter -= 1
            raise

    def write(self, file_prefix: Path) -> str:
        """Saves to the folder `file_prefix` itself, which must not exist; otherwise as
        `save`.
        """
        checks.path("file_prefix", file_prefix, error=CheckpointError)
        storage = load_storage()
        path = storage.absolute(file_prefix)
        snapshot = self._snapshot()
        agreement.from_chief(
            f"writing {path}",
            lambda: storage.write(path, *snapshot),
            self.num_processes,
        )
        return path

    def restore(
        self, save_path: Path | None, *, partial: bool = False
    ) -> RestoreStatus:
        """Gives the objects the state that they had when the checkpoint was saved.

        The checkpoint is read and verified as a whole first: if anything is wrong,
        nothing changes. Call it across replicas, inside or outside the scope of the
        variables' strategy.

        Args:
            save_path: The folder that `save` returned; one that is still being written
                is waited for. `None` restores nothing, as in TF, so that
                `restore(manager.latest_checkpoint)` also starts a new run; it warns
                once.
            partial: Restore what has the same name in both, and leave the rest. Shapes
                and types must fit.

        Returns:
            What was restored, and with `partial` what was not.

        Raises:
            CheckpointError: If there is no checkpoint, it could not be written, or it
                is of something else; names every variable.
            DamagedCheckpointError: If files are missing, cut off, or not what was
                saved; for the checkpoint of a `CheckpointManager` in a folder with the
                number of another step.
        """
        reading = self._restore(save_path, partial)
        if reading is None:
            return RestoreStatus()
        self._counter = reading.manifest.counter
        return reading.status

    def read(self, save_path: Path | None, *, partial: bool = False) -> RestoreStatus:
        """As `restore`, but the numbering of `save` goes on as if nothing had been
        restored. Source: TF's `read`.
        """
        reading = self._restore(save_path, partial)
        return RestoreStatus() if reading is None else reading.status

    def _restore(self, save_path: Path | None, partial: bool) -> Reading | None:
        """Reads and assigns a checkpoint; `None` for no path."""
        checks.flag("partial", partial)
        if save_path is None:
            _warn_of_nothing()
            return None
        checks.path("save_path", save_path, error=CheckpointError)
        path = load_storage().absolute(save_path)
        reading = self._read(path, partial=partial)
        reading.assign()
        return reading

    def _snapshot(
        self,
        *,
        step: int | None = None,
        metrics: dict[str, float] | None = None,
        in_between: bool = False,
    ) -> tuple[Manifest, Arrays]:
        """Copies of the state in host memory, which training on does not change."""
        context.require_cross_replica(
            "Saving a checkpoint", "save after strategy.run has returned."
        )
        tracking.synchronize(self._objects)
        for value in self._objects.values():
            optimizer = getattr(value, "optimizer", None)
            if isinstance(value, keras.Model) and isinstance(
                optimizer, keras.optimizers.Optimizer
            ):
                # As `fit` would: its state belongs to the model's.
                tracking.build_optimizer(optimizer, value)
        tracked = tracking.track(self._objects)
        arrays, records = values.fetch(tracked.variables)
        objects = {
            name: encoding.encode(self._state_of(name, value), name, arrays)
            for name, value in tracked.stateful.items()
        }
        optimizers = {
            name: type(optimizer).__name__
            for name, optimizer in tracked.optimizers.items()
        }
        manifest = Manifest(
            records,
            objects,
            optimizers,
            tracked.unbuilt,
            self._counter,
            step,
            metrics,
            in_between,
        )
        return manifest, arrays

    def _state_of(self, name: str, value: Any) -> Any:
        """The state of an object, or of all processes where theirs differ."""
        state = dict(value) if isinstance(value, dict) else value.get_state()
        if self.num_processes == 1:
            return state
        states = agreement.exchange(f"the state of {name}", state, self.num_processes)
        alike = len({messages.to_bytes(other, signed=True) for other in states}) == 1
        return state if alike else {EACH_PROCESS: states}

    def _read(self, path: str, *, partial: bool) -> Reading:
        """Reads and verifies the checkpoint at `path`; nothing changes yet."""
        context.require_cross_replica(
            "Restoring a checkpoint", "restore before strategy.run is called."
        )
        storage = load_storage()
        under_way.before_reading(path, self.num_processes)
        manifest, records = storage.read_manifest(path)
        tracking.synchronize(self._objects)
        tracked = self._track_for(manifest)
        values.settle(tracked.variables)
        match = matching.match(path, manifest, records, tracked, partial=partial)
        chosen = {name: tracked.variables[name] for name in match.variables}
        values.check_assignable(chosen, manifest.variables)
        arrays = storage.read_arrays(path, records)
        status = RestoreStatus(
            path=path,
            step=manifest.step,
            metrics=manifest.metrics,
            restored=(*match.variables, *match.objects),
            missing=tuple(match.missing),
            unexpected=tuple(match.unexpected),
            unbuilt=tuple(match.unbuilt),
        )
        return Reading(self._objects, tracked, match, manifest, arrays, status)

    def _track_for(self, manifest: Manifest) -> Tracked:
        """What the objects hold, once optimizers have the checkpoint's variables."""
        tracked = tracking.track(self._objects)
        built = False
        for prefix, optimizer in tracked.optimizers.items():
            own = tracked.models.get(prefix.removesuffix("/optimizer"))
            models = list(tracked.models.values()) if own is None else [own]
            missing = manifest.variables.keys() - tracked.variables.keys()
            saved = any(name.startswith(f"{prefix}/") for name in missing)
            if saved and len(models) == 1 and not optimizer.built:
                tracking.build_optimizer(optimizer, models[0])
                built = True
        return tracking.track(self._objects) if built else tracked


@functools.cache
def _warn_of_nothing() -> None:
    """Says, once in a process, that `None` restores nothing."""
    warnings.warn(
        "Nothing was restored, since the path was None: everything keeps the "
        "values that it has. At the first start of a run that is right: "
        "manager.latest_checkpoint is None until something was saved. "
        "manager.restore_or_initialize() does the same without this warning; "
        "manager.restore() raises an error where there is no checkpoint.",
        stacklevel=4,
    )


def load_storage() -> ModuleType:
    """The module that reads and writes files, which needs Orbax.

    Raises:
        BackendError: If Orbax is not installed, or too old.
    """
    fix = f"pip install 'orbax-checkpoint>={_ORBAX}'"
    name = "keras_distribute.checkpoint.storage"
    storage = checks.imported(name, "Checkpoints need Orbax.", fix)
    version = metadata.version("orbax-checkpoint")
    if Version(version) < Version(_ORBAX):
        raise BackendError(
            f"Checkpoints need Orbax {_ORBAX} or newer.",
            received=f"orbax-checkpoint {version}.",
            fix=fix,
        )
    return storage

"""A step on disk: its program, its inputs, and the hashes of its results.

    FOLDER/
      step.json               shapes, names, hashes, and where it ran
      program.bin             as `jax.export` writes it
      arrays-PROCESS.npz      what each process has of the inputs, as bytes

`step.json` is written last.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from keras_distribute.consistency.replays import Hashes, StepProgram
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import name_of
from keras_distribute.errors import CheckpointError, DeviceError, DistributeError

_ABOUT, _PROGRAM = "step.json", "program.bin"


@dataclasses.dataclass(frozen=True)
class KeptStep:
    """A step that was read.

    Args:
        specs: How its results are divided.
        hashes: Of its results, on the devices where it ran.
        about: What `step.json` says.
    """

    program: StepProgram
    inputs: Sequence[jax.Array]
    specs: Sequence[PartitionSpec]
    hashes: Hashes
    about: dict[str, Any]


def write(
    folder: pathlib.Path,
    program: StepProgram,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.Array],
    hashes: Hashes,
    step: int,
) -> None:
    """Keeps a step; every process writes what it has.

    Args:
        step: How many steps were taken before it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    for i, array in enumerate(inputs):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                begin = [part.start or 0 for part in shard.index]
                where = ",".join(map(str, begin))
                data = np.ascontiguousarray(np.asarray(shard.data))
                parts[f"{i}@{where}"] = data.reshape(-1).view(np.uint8)
    np.savez(folder / f"arrays-{jax.process_index()}.npz", **parts)
    if jax.process_index():
        return
    mesh = program.mesh.mesh
    (folder / _PROGRAM).write_bytes(bytes(program.exported.serialize()))
    about = {
        "step": step,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": program.mesh.platform,
        "device_kind": program.mesh.devices[0].device_kind,
        "devices": list(map(name_of, program.mesh.devices)),
        "mesh": {"shape": list(mesh.devices.shape), "axes": list(mesh.axis_names)},
        "inputs": [_described(array) for array in inputs],
        "outputs": [_spec_of(array) for array in outputs],
        "names": program.names,
        "own": program.own,
        "own_names": program.own_names,
        "compiler_options": program.compiler_options,
        "hashes": [[str(value) for value in row] for row in hashes],
    }
    (folder / _ABOUT).write_text(json.dumps(about, indent=1), "utf-8")


def about(folder: pathlib.Path) -> dict[str, Any]:
    """What a folder has."""
    path = folder / _ABOUT
    if not path.is_file():
        raise CheckpointError(
            "A step that was kept has a folder of its own.",
            received=f"{str(folder)!r}, where there is no {_ABOUT}.",
            fix='kd.callbacks.StepReplay(folder="steps") writes steps/step-0000042.',
        )
    return json.loads(path.read_text("utf-8"))


def read(folder: pathlib.Path) -> KeptStep:
    """The step, on the first devices of this machine.

    Raises:
        CheckpointError: Where it is no kept step, or one of which a part is missing or
            damaged.
        DeviceError: Where there are too few devices, or of another platform.
    """
    try:
        return _read(folder)
    except DistributeError:
        raise
    except Exception as error:  # Of JAX, NumPy or JSON, whatever has changed.
        raise CheckpointError(
            "A step that was kept cannot be read: a part of it is missing or damaged.",
            received=f"{str(folder)!r}, {type(error).__name__}: {error}",
            fix="bring all files that kd.callbacks.StepReplay has written, once more.",
        ) from error


def _read(folder: pathlib.Path) -> KeptStep:
    said = about(folder)
    shape, names = said["mesh"]["shape"], said["mesh"]["axes"]
    count, platform = int(np.prod(shape)), said["platform"]
    devices = [device for device in jax.devices() if device.platform == platform]
    if len(devices) < count:
        raise DeviceError(
            f"The step ran on {count} devices of the platform {platform!r}.",
            received=f"{len(devices)} of these.",
            fix=f"a machine that has them; of CPUs --cpu-devices {count}.",
        )
    grid = np.asarray(devices[:count], dtype=object).reshape(shape)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    exported = jax.export.deserialize(bytearray((folder / _PROGRAM).read_bytes()))
    program = StepProgram(
        exported,
        ReplicaMesh(mesh),
        said["names"],
        said["own"],
        said["own_names"],
        said["compiler_options"],
    )
    return KeptStep(
        program,
        _arrays(folder, said["inputs"], mesh),
        [_spec(entries) for entries in said["outputs"]],
        np.array([[int(v) for v in row] for row in said["hashes"]], np.uint64),
        said,
    )


def _arrays(
    folder: pathlib.Path, forms: Sequence[dict[str, Any]], mesh: Mesh
) -> list[jax.Array]:
    whole = [np.zeros(form["shape"], jnp.dtype(form["dtype"])) for form in forms]
    missing = [array.size for array in whole]
    for path in sorted(folder.glob("arrays-*.npz")):
        with np.load(path) as parts:
            for name in parts.files:
                number, _, where = name.partition("@")
                array, form = whole[int(number)], forms[int(number)]
                begin = [int(each) for each in where.split(",") if each]
                data = parts[name].view(array.dtype).reshape(form["part"])
                place = tuple(
                    slice(b, b + size)
                    for b, size in zip(begin, data.shape, strict=True)
                )
                array[place] = data
                missing[int(number)] -= data.size
    if any(missing):
        raise CheckpointError(
            "The inputs of a step are kept by each of its processes.",
            received=f"{str(folder)!r}, where {sum(missing)} elements are missing.",
            fix="bring the files arrays-*.npz of all processes into one folder.",
        )
    return [
        jax.device_put(array, NamedSharding(mesh, _spec(form["spec"])))
        for array, form in zip(whole, forms, strict=True)
    ]


def _described(array: jax.Array) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "part": list(array.sharding.shard_shape(array.shape)),
        "dtype": array.dtype.name,
        "spec": _spec_of(array),
    }


def _spec_of(array: jax.Array) -> list[Any]:
    sharding: Any = array.sharding
    return [list(e) if isinstance(e, tuple) else e for e in sharding.spec]


def _spec(entries: Sequence[Any]) -> PartitionSpec:
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))

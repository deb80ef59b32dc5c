"""What a machine has that decides how a program of this package runs on it.

Nothing here starts `jax.distributed`, and whatever may not answer is waited for a while
only. Values of variables that may be secrets are never read further than to see that
they are there.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import keras

from keras_distribute import config
from keras_distribute._compat import versions
from keras_distribute.cluster.resolvers.automatic import automatic_resolver
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.commands.waiting import ask
from keras_distribute.devices.names import name_of

REQUIRED = ("keras-distribute", "jaxlib", "numpy")
OPTIONAL = (
    "orbax-checkpoint",
    "pyzmq",
    "msgpack",
    "cloudpickle",
    "flatbuffers",
    "ray",
    "kubernetes",
    "google-api-python-client",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
    "grain",
    "matplotlib",
    "rich",
)
_RELEVANT = re.compile(
    r"(?:JAX|XLA|KERAS|TPU|LIBTPU|CUDA|NCCL|NVIDIA|SLURM|OMPI_COMM_WORLD|PMI|MPI|SM|RAY"
    r"|MEGASCALE|ROCR|HIP|GLOO|TF_CPP|TF_GPU|TF_FORCE)_.*"
    r"|TF_CONFIG|NPROC|OMP_NUM_THREADS|LD_PRELOAD"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|JWT|KEY|CERT", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"://[^/@\s]+@")
HIDDEN = "(set, not shown)"


def gather(seconds: float) -> dict[str, Any]:
    """All of it, as JSON can hold it; with `"hangs"`, whether a thread still waits.

    Args:
        seconds: How long to wait for devices, and for what says who else takes part.
    """
    variables = environment(os.environ)
    # JAX would take three quarters of a GPU's memory, which others may be using.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cluster = _cluster(seconds)
    devices = _devices(seconds)
    hang = [each.pop("hangs") for each in (devices, cluster)]
    return {
        "versions": _versions(),
        "devices": devices,
        "host": _host(),
        "thread_pool": _thread_pool(),
        "cluster": cluster,
        "strategy": _strategy(devices, cluster),
        "environment": variables,
        "hangs": any(hang),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter here; of what may be a secret, only that it is set."""
    found: dict[str, str] = {}
    for name in sorted(filter(_RELEVANT.fullmatch, variables)):
        value = _IN_ADDRESS.sub("://...@", variables[name])
        # JSON has names of its own: hyperparameters, the environment of a job.
        inside = value if value.lstrip().startswith(("{", "[")) else ""
        found[name] = HIDDEN if _SECRET.search(name + inside) else value
    return found


def _versions() -> dict[str, Any]:
    # Of Keras and JAX as the modules say it: a nightly is another package.
    found = {
        "python": platform.python_version(),
        "os": platform.platform(),
        "keras": keras.__version__,
        "jax": jax.__version__,
    }
    missing: list[str] = []
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in REQUIRED:
                found[name] = "not installed as a package"
            else:
                missing.append(name)
    return {
        "installed": found,
        "not_installed": missing,
        "newest_tested": versions.newest_tested(),
        "executable": sys.executable,
    }


def _devices(seconds: float) -> dict[str, Any]:
    answer = ask(lambda: [_device(each) for each in jax.local_devices()], seconds)
    return {
        "backend": jax.default_backend() if answer.value else None,
        "local": answer.value or [],
        "problem": answer.problem,
        "hangs": answer.hangs,
    }


def _device(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    return {
        "name": name_of(device),
        "kind": device.device_kind,
        "bytes_limit": stats.get("bytes_limit"),
        "bytes_in_use": stats.get("bytes_in_use"),
    }


def _host() -> dict[str, Any]:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Not on every system.
        memory = None
    return {"cpus": os.cpu_count(), "memory_bytes": memory}


def _thread_pool() -> dict[str, Any]:
    size, reason = config.pool()
    return {"threads": size, "set_by": reason}


def _cluster(seconds: float) -> dict[str, Any]:
    def found() -> dict[str, Any]:
        resolver = automatic_resolver()
        spec = resolver.cluster_spec()
        kind, number = resolver.task_type, resolver.task_id
        # Parameter servers train alone, whichever task this is.
        topology = Topology() if "ps" in spec.jobs else resolver.topology()
        return {
            "resolver": type(resolver).__name__,
            "task": f"{kind}:{number}" if kind else None,
            "tasks": {job: spec.num_tasks(job) for job in spec.jobs},
            "process_id": topology.process_id,
            "num_processes": topology.num_processes,
            "coordinator": topology.coordinator,
        }

    answer = ask(found, seconds)
    return {**(answer.value or {}), "problem": answer.problem, "hangs": answer.hangs}


def _strategy(devices: dict[str, Any], cluster: dict[str, Any]) -> str:
    """The strategy to begin with here, as code."""
    if cluster["problem"] or devices["problem"]:
        return "not known before the problem is solved"
    if "ps" in cluster["tasks"]:
        return (
            "kd.ParameterServerStrategy(resolver) in the chief, "
            "python -m keras_distribute.servers elsewhere"
        )
    if cluster["num_processes"] > 1:
        return "kd.MultiWorkerMirroredStrategy()"
    if devices["backend"] == "tpu":
        return "kd.TPUStrategy()"
    if len(devices["local"]) > 1:
        return "kd.MirroredStrategy()"
    return "none: one device is plain Keras, or kd.OneDeviceStrategy()"

"""Installs what a tutorial needs: on Colab, on Kaggle, or on a machine of your own.

    %run install.py plots,quickstart

The images of Colab and Kaggle come with their own Keras and JAX, which may be too old,
and with JAX's plug-in for the accelerator, which has to be as new as JAX itself. So
this looks at which accelerator the machine has, installs the package with JAX for it,
tries it in a new process, and says what came of it. Nothing here imports JAX or Keras:
a version that a notebook has imported stays until its session is started again.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import re
import shutil
import subprocess
import sys

REPOSITORY = "https://github.com/keras-distribute/keras-distribute"
NEEDED = {"keras": "3.15", "jax": "0.10"}  # As in pyproject.toml.
PCI = pathlib.Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
# By the numbers that JAX itself goes by: how a chip is called, and its devices in JAX.
TPU_CHIPS = {
    "0x0027": ("v2 or v3", 2),
    "0x005e": ("v4", 1),
    "0x0062": ("v5p", 1),
    "0x0063": ("v5e", 1),
    "0x006f": ("v6e", 1),
    "0x0076": ("7x", 2),
}
PROBE = """
import keras_distribute
import jax, keras
devices = jax.devices()
print(keras.__version__, jax.__version__, len(devices), devices[0].platform,
      devices[0].device_kind, sep="|")
"""
RESTART = (
    "Start the session again (Colab: Runtime, Restart session; Kaggle: Run, Restart "
    "session), and go on with the next cell."
)


def version_of(package: str) -> str | None:
    """Which version is installed, whatever has been imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tpu() -> str | None:
    """The TPU of this machine, as `v5e-1`: its kind, and how many devices it has."""
    found: list[tuple[str, int]] = []
    for vendor in PCI.glob("*/vendor"):
        device = vendor.with_name("device").read_text().strip()
        if vendor.read_text().strip() == GOOGLE and device in TPU_CHIPS:
            found.append(TPU_CHIPS[device])
    if not found:
        return None
    return f"{found[0][0]}-{sum(devices for _, devices in found)}"


def gpus() -> list[str]:
    """The names of NVIDIA's GPUs, as `Tesla T4`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.split("\n")[:-1] if result.returncode == 0 else []


def jax_extras() -> list[str]:
    """JAX's extras for the accelerators of this machine, and for plug-ins that the
    image has: one that is older than JAX is an error at its import.
    """
    extras = ["tpu"] if tpu() or version_of("libtpu") else []
    plugins = [n for n in ("12", "13") if version_of(f"jax-cuda{n}-plugin")]
    if gpus() and not plugins:
        plugins = ["12"]
    return extras + [f"cuda{n}" for n in plugins]


def older(version: str | None, than: str) -> bool:
    """Whether a version is missing, or comes before another one."""
    if version is None:
        return True
    major, minor = re.findall(r"\d+", version)[:2]
    return [int(major), int(minor)] < [int(n) for n in than.split(".")]


def requirements(extras: str) -> list[str]:
    """What pip is to install."""
    packages = [f"keras-distribute[{extras}] @ git+{REPOSITORY}"]
    chosen = jax_extras()
    if chosen:
        packages.append(f"jax[{','.join(chosen)}]>={NEEDED['jax']}")
    return packages


def kept() -> list[str]:
    """What is to go on working beside it: Numba, which much of an image imports, wants
    a NumPy that is not too new, and pip upgrades to the newest when it has to upgrade.
    """
    numba = version_of("numba")
    return [f"numba=={numba}"] if numba else []


def pip(*wanted: str) -> int:
    """Installs, quietly; returns 0 where that was possible."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *wanted]
    ).returncode


def outdated_modules() -> list[str]:
    """What this session has imported in another version than is installed now."""
    return [
        name
        for name in ("jax", "jaxlib", "keras", "numpy", "ml_dtypes")
        if name in sys.modules
        and getattr(sys.modules[name], "__version__", None) != version_of(name)
    ]


def install(extras: str) -> None:
    """Installs, tries it in a new process, and says what there is.

    Raises:
        SystemExit: When it cannot be installed, or does not run: with what to do.
    """
    machine = " and ".join([f"TPU {tpu()}"] * bool(tpu()) + gpus()) or "no accelerator"
    print(f"Python {platform.python_version()}, {machine}")
    for name, needed in NEEDED.items():
        had = version_of(name)
        if had is not None and older(had, needed):
            print(f"{name} {had}, which is here, is too old: {needed} is the oldest.")
    wanted, beside = requirements(extras), kept()
    failed = pip(*wanted, *beside)
    if failed and beside:
        print(f"Once more without {beside[0]}, which may need an upgrade afterwards.")
        failed = pip(*wanted)
    if failed:
        raise SystemExit(
            "pip could not install keras_distribute; the reason is above. On Kaggle, "
            "switch on the internet in the notebook's settings. Python 3.11 is the "
            "oldest that works: choose a newer runtime or image."
        )
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True
    )
    if probe.returncode:
        raise SystemExit(
            f"It is installed, but does not run:\n{probe.stderr[-2000:]}\nA fresh "
            "runtime helps if packages were installed before: in Colab, Runtime, "
            "Disconnect and delete runtime."
        )
    keras, jax, count, kind, name = probe.stdout.strip().split("\n")[-1].split("|")
    print(f"keras {keras}, jax {jax}, {count} device(s): {name}")
    if kind == "cpu" and machine != "no accelerator":
        print(f"JAX does not use the {machine}. Its own words:\n{probe.stderr[-1000:]}")
    if outdated_modules():
        print(f"{', '.join(outdated_modules())}: imported before. {RESTART}")


if __name__ == "__main__":
    install(*sys.argv[1:2] or ["quickstart"])

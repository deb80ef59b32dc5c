"""`tutorials/install.py`, the first cell of the tutorials: which accelerator it finds,
what it asks pip for, and what it says when an image is too old.

The machines are made up of what the script looks at: files of the PCI bus, a program
`nvidia-smi`, and the metadata of installed packages. `pip` is a module that writes down
what it is asked for, and installs the metadata of newer versions.
"""

import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "tutorials/install.py"
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
# Of Colab's images of 19 August 2026, from its list of what they have:
# github.com/googlecolab/backend-info, commit a724079.
COLAB = {"keras": "3.13.2", "jax": "0.7.2", "jaxlib": "0.7.2"}
COLAB_TPU = COLAB | {"libtpu": "0.0.21.1"}
COLAB_GPU = COLAB | {"jax-cuda12-plugin": "0.7.2", "jax-cuda12-pjrt": "0.7.2"}
V2, V5E, V6E = "0x0027", "0x0063", "0x006f"
NETWORK = "0x0042"  # Google's network cards are of the same vendor.

PIP = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parents[1]
asked = here / "asked.json"
before = json.loads(asked.read_text()) if asked.exists() else []
asked.write_text(json.dumps([*before, sys.argv[1:]]))
if "NO_INTERNET" in os.environ:
    sys.exit("no internet")
if os.environ.get("IMPOSSIBLE") in sys.argv:
    sys.exit("these conflict")
for name, version in {"keras": "3.15.1", "jax": "0.10.2"}.items():
    for old in here.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    folder = here / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")
"""
# What the new process imports.
FAKES = {
    "keras_distribute": "",
    "keras": "__version__ = '3.15.1'",
    "jax": """
import os, types
__version__ = '0.10.2'
platform, kind, count = os.environ['DEVICES'].split(',')
def devices():
    each = types.SimpleNamespace(platform=platform, device_kind=kind)
    return [each] * int(count)
""",
}


def machine(folder, chips=(), gpus=(), packages=()):
    """Makes the files of a machine."""
    for i, device in enumerate((NETWORK, *chips)):
        place = folder / f"pci/0000:00:{i:02d}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text("0x1ae0\n")
        (place / "device").write_text(f"{device}\n")
    programs = folder / "bin"
    programs.mkdir()
    if gpus:
        smi = programs / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus))
        smi.chmod(0o755)
    site = folder / "site"
    (site / "pip").mkdir(parents=True)
    (site / "pip/__init__.py").touch()
    (site / "pip/__main__.py").write_text(PIP)
    for name, version in dict(packages).items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    for name, text in FAKES.items():
        (site / f"{name}.py").write_text(text)
    return site


def run(folder, site, devices="cpu,cpu,1", before="", **environment):
    """Runs the script as a notebook does, in a Python that has nothing else."""
    program = (
        f"import pathlib, runpy, sys\n{before}\n"
        f"sys.argv = ['install.py', 'plots,quickstart']\n"
        f"source = pathlib.Path({str(SCRIPT)!r}).read_text()\n"
        f"source = source.replace('/sys/bus/pci/devices', {str(folder / 'pci')!r})\n"
        f"exec(compile(source, 'install.py', 'exec'), {{'__name__': '__main__'}})\n"
    )
    return subprocess.run(
        # -S: without the packages of this environment.
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,  # Not the repository: that has the package itself.
        env={
            "PATH": f"{folder / 'bin'}",
            "PYTHONPATH": str(site),
            "PYTHONNOUSERSITE": "1",
            "DEVICES": devices,
            "HOME": os.environ.get("HOME", "/"),
            **environment,
        },
    )


def asked(site, call=-1):
    """What one of pip's calls was to install, by default the last one."""
    command, quiet, *wanted = json.loads((site / "asked.json").read_text())[call]
    assert (command, quiet) == ("install", "-q")
    return wanted


PACKAGE = (
    "keras-distribute[plots,quickstart] @ "
    "git+https://github.com/keras-distribute/keras-distribute"
)


@pytest.mark.parametrize(
    ("chips", "gpus", "packages", "devices", "said", "jax"),
    [
        ((V2,) * 4, (), COLAB_TPU, "tpu,TPU v2,8", "TPU v2 or v3-8", "tpu"),
        ((V5E,), (), COLAB_TPU, "tpu,TPU v5 lite,1", "TPU v5e-1", "tpu"),
        ((V6E,), (), COLAB_TPU, "tpu,TPU v6 lite,1", "TPU v6e-1", "tpu"),
        ((V5E,) * 8, (), COLAB_TPU, "tpu,TPU v5 lite,8", "TPU v5e-8", "tpu"),
        ((), ("Tesla T4",), COLAB_GPU, "gpu,Tesla T4,1", "Tesla T4", "cuda12"),
        ((), ("Tesla T4",) * 2, COLAB_GPU, "gpu,Tesla T4,2", "T4 and Tesla", "cuda12"),
        ((), ("NVIDIA L4",), {}, "gpu,NVIDIA L4,1", "NVIDIA L4", "cuda12"),
        # An image for TPUs whose machine cannot be looked at.
        ((), (), COLAB_TPU, "tpu,TPU v5 lite,1", "no accelerator", "tpu"),
        ((), (), COLAB, "cpu,cpu,1", "no accelerator", None),
        ((), (), {}, "cpu,cpu,1", "no accelerator", None),
    ],
    ids=["v2-8", "v5e-1", "v6e-1", "v5e-8", "t4", "t4x2", "l4", "tpu", "cpu", "bare"],
)
def test_it_installs_jax_for_the_accelerator(
    tmp_path, chips, gpus, packages, devices, said, jax
):
    site = machine(tmp_path, chips, gpus, packages)
    result = run(tmp_path, site, devices)
    assert result.returncode == 0, result.stderr
    assert asked(site) == [PACKAGE] + ([f"jax[{jax}]>=0.10"] if jax else [])
    assert said in result.stdout.splitlines()[0]
    kind, count = devices.split(",")[1:]
    assert f"keras 3.15.1, jax 0.10.2, {count} device(s): {kind}" in result.stdout
    assert ("keras 3.13.2, which is here, is too old" in result.stdout) == bool(
        packages
    )
    assert ("jax 0.7.2, which is here, is too old" in result.stdout) == bool(packages)
    assert "session" not in result.stdout


def test_the_cuda_of_the_image_is_kept(tmp_path):
    packages = {"jax-cuda13-plugin": "0.9.0"}
    site = machine(tmp_path, gpus=["NVIDIA H100"], packages=packages)
    assert run(tmp_path, site, "gpu,NVIDIA H100,1").returncode == 0
    assert asked(site)[1] == "jax[cuda13]>=0.10"


def test_numba_of_the_image_goes_on_working_where_it_can(tmp_path):
    site = machine(tmp_path, packages=COLAB | {"numba": "0.61.2"})
    assert run(tmp_path, site).returncode == 0
    assert asked(site) == asked(site, 0) == [PACKAGE, "numba==0.61.2"]
    result = run(tmp_path, site, IMPOSSIBLE="numba==0.61.2")
    assert result.returncode == 0
    assert asked(site, -2) == [PACKAGE, "numba==0.61.2"]
    assert asked(site) == [PACKAGE]
    assert "Once more without numba==0.61.2" in result.stdout
    assert "keras 3.15.1" in result.stdout


def test_what_was_imported_before_needs_a_new_session(tmp_path):
    site = machine(tmp_path, packages=COLAB)
    old = (
        "sys.modules['jax'] = type(sys)('jax'); sys.modules['jax'].__version__='0.7.2'"
    )
    result = run(tmp_path, site, before=old)
    assert "jax: imported before. Start the session again" in result.stdout


def test_without_internet_it_says_what_to_do(tmp_path):
    site = machine(tmp_path, packages=COLAB)
    result = run(tmp_path, site, NO_INTERNET="1")
    assert result.returncode == 1
    assert "switch on the internet" in result.stderr


def test_what_does_not_run_is_shown(tmp_path):
    site = machine(tmp_path, packages=COLAB)
    (site / "keras_distribute.py").write_text("raise ImportError('of another time')")
    result = run(tmp_path, site)
    assert result.returncode == 1
    assert "of another time" in result.stderr
    assert "Disconnect and delete runtime" in result.stderr


def test_an_accelerator_that_jax_does_not_use_is_named(tmp_path):
    site = machine(tmp_path, [V5E], packages=COLAB_TPU)
    result = run(tmp_path, site, "cpu,cpu,1")
    assert "JAX does not use the TPU v5e-1" in result.stdout


def test_it_asks_for_the_versions_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = SCRIPT.read_text()
    for name in ("keras", "jax"):
        needed = next(d for d in project["dependencies"] if d.startswith(name))
        assert f'"{name}": "{needed.split(">=")[1]}"' in text
    assert f'REPOSITORY = "{project["urls"]["Repository"]}"' in text


def test_the_first_cell_is_the_same_in_all_notebooks():
    cells = {first_cell(path).rsplit(" ", 1)[0] for path in NOTEBOOKS}
    assert len(cells) == 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in NOTEBOOKS:
        extras = first_cell(path).rsplit(" ", 1)[1].split(",")
        assert set(extras) <= project["optional-dependencies"].keys()
    place = project["urls"]["Repository"].removeprefix("https://github.com/")
    cell = cells.pop()
    assert f'url = "https://raw.githubusercontent.com/{place}/main"' in cell
    assert f"$url/{SCRIPT.relative_to(ROOT)}\n%run {SCRIPT.name}" in cell


def first_cell(path):
    cells = json.loads(path.read_text())["cells"]
    return "".join(next(c for c in cells if c["cell_type"] == "code")["source"])

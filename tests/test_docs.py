"""The documentation: its code runs, every public name is in the reference, and links lead somewhere."""

import pathlib
import re
import runpy
import subprocess
import sys

import pytest

import keras_distribute as kd

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
RUN = runpy.run_path(str(ROOT / "scripts" / "run_docs.py"), run_name="run_docs")


@pytest.mark.parametrize("page", RUN["pages"](), ids=lambda page: str(pathlib.Path(page).name))
def test_code_blocks_run(page):
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "run_docs.py"), str(page)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_the_reference_has_every_public_name():
    found = re.findall(
        r"^::: keras_distribute\.(\S+)$", "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")), re.M
    )
    modules = {"callbacks", "cluster_resolver", "config", "errors", "experimental", "nn", "testing"}
    expected = {name for name in kd.__all__ if name not in modules}
    expected |= {"config.set_cpu_devices", "config.set_prefetch_steps"}
    expected |= {f"nn.{name}" for name in kd.nn.__all__} | {f"experimental.{name}" for name in kd.experimental.__all__}
    expected |= {f"{m}.{name}" for m in ("callbacks", "cluster_resolver", "testing") for name in getattr(kd, m).__all__}
    expected |= {"launch.launch", "launch.LaunchOptions"}
    expected |= {f"errors.{name}" for name in vars(kd.errors) if name.endswith("Error")}
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        # Pages of the site that are made of notebooks.
        made_of = re.sub(r"^.*tutorials/(\w+)\.md$", rf"{ROOT}/tutorials/\1.ipynb", target)
        assert (page.parent / made_of).exists(), f"{page.name} links to {target}"

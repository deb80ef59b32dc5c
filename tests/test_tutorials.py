"""The notebooks in tutorials/: they run, their outputs are stored, and they open in
Colab.
"""

import json
import os
import pathlib
import runpy

import pytest

from tests.support import without_what_is_not_named

ROOT = pathlib.Path(__file__).parent.parent
RUN = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"), run_name="notebooks")
REPOSITORY = runpy.run_path(
    str(ROOT / "scripts" / "site_notebooks.py"), run_name="site_notebooks"
)["REPOSITORY"]


@pytest.fixture(params=RUN["NOTEBOOKS"], ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_notebooks():
    assert len(RUN["NOTEBOOKS"]) == 8


@pytest.mark.sampled(4)
def test_every_cell_runs(path, monkeypatch):
    # As a person would run it; the numbers are those of this machine, so only what the
    # cells assert is compared.
    environment = RUN["ENVIRONMENT"]  # That of the kernel.
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setitem(environment, "PYTHONPATH", python_path)
    for name, value in without_what_is_not_named(path.read_text()).items():
        monkeypatch.setitem(environment, name, value)
    ran = RUN["run"](path)
    code = [
        cell
        for cell in ran.cells
        if cell.cell_type == "code"
        and "skip-execution" not in cell.metadata.get("tags", [])
    ]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_outputs_are_stored_and_are_those_of_one_run(path):
    cells = [
        cell
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    ran = [
        cell
        for cell in cells
        if "skip-execution" not in cell["metadata"].get("tags", [])
    ]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    kinds = {output["output_type"] for cell in ran for output in cell["outputs"]}
    assert kinds and "error" not in kinds
    assert len(ran) == len(cells) - 1


def test_it_opens_in_colab_and_installs_from_the_repository(path):
    cells = json.loads(path.read_text())["cells"]
    place = REPOSITORY.removeprefix("https://github.com/")
    badge = f"(https://colab.research.google.com/github/{place}/blob/main/tutorials/{path.name})"
    assert badge in "".join(cells[0]["source"])
    install = next(cell for cell in cells if cell["cell_type"] == "code")
    assert install["metadata"]["tags"] == ["skip-execution"]
    assert f"raw.githubusercontent.com/{place}/main" in "".join(install["source"])

"""Runs the notebooks in tutorials/, and stores their outputs.

    python scripts/notebooks.py                         # all of them
    python scripts/notebooks.py tutorials/keras.ipynb   # one

Needs the `test` extra. Cells with the tag `skip-execution` install packages, and are
not run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
# What the machine says of itself is no part of a tutorial.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


def run(path: Path, seconds_each: int = 120) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in an empty folder.

    Args:
        path: Of the notebook.
        seconds_each: How long a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: When a cell fails.
        nbclient.exceptions.CellTimeoutError: When one takes too long; the kernel is
            ended.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=seconds_each,
        record_timing=False,
        coalesce_streams=True,
        skip_cells_with_tag="skip-execution",
    )
    with tempfile.TemporaryDirectory() as folder:
        client.resources = {"metadata": {"path": folder}}
        client.execute(env=os.environ | ENVIRONMENT)
    return notebook


def store(path: Path) -> None:
    """Runs a notebook and writes its outputs into it."""
    begun = time.perf_counter()
    notebook = run(path)
    # Not the version that happened to run it.
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.get("name") != "stderr"
            ]
    path.write_text(nbformat.writes(notebook) + "\n", "utf-8")
    print(f"{path.relative_to(ROOT)}: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    for argument in sys.argv[1:] or NOTEBOOKS:
        store(Path(argument).resolve())

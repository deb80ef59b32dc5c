"""The programs of docs/guide/ray.md run, and print what the page says."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip(
    "ray.train",
    reason="needs Ray Train: pip install 'keras-distribute[ray]'",
    exc_type=ImportError,
)
ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = re.findall(
    r'^```py title="(\w+\.py)"\n(.*?)^```\n+```text\n(.*?)^```',
    (ROOT / "docs/guide/ray.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def test_the_page_has_both_programs():
    assert [name for name, *_ in PROGRAMS] == ["on_servers.py", "on_ray_train.py"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "program", "output"), PROGRAMS, ids=lambda v: v[:15])
def test_programs_run(name, program, output, tmp_path):
    file = tmp_path / name
    file.write_text(program)
    inherited = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    environment = inherited | {
        "RAY_ADDRESS": "local",
        "TESTS_WITHOUT": "sklearn matplotlib tensorflow",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert output in result.stdout

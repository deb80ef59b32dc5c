"""What a release is made of: one version everywhere, and files that say what the
package needs.
"""

import pathlib
import re
import subprocess
import tomllib

import keras_distribute as kd

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    versions = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert {PROJECT["version"], kd.__version__, versions[0], citation[1]} == {
        kd.__version__
    }


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.M)
    assert sections[0] == "[Unreleased]"
    for section in sections[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", section), section
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds


def test_the_package_is_typed():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "keras_distribute/py.typed").exists()


def test_a_bug_report_asks_for_the_environment():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert PROJECT["urls"]["Repository"] in path.read_text() or path.name in (
            "bug_report.yml",
            "feature_request.yml",
        )
    report = (ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text()
    assert "python -m keras_distribute env" in report


def test_the_lowest_versions_are_pins_that_scripts_can_make():
    for each in PROJECT["dependencies"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", each), each


def test_ci_tries_the_engines_where_a_change_touches_them(tmp_path, monkeypatch):
    monkeypatch.delenv("BASE", raising=False)
    text = (ROOT / ".ci/run").read_text()
    parts = [
        re.search(r"^engine_folders=.*?\n", text, re.M),
        re.search(r"^touches_engines\(\).*?^}\n", text, re.M | re.S),
    ]
    script = f'project="{tmp_path}"\n{"".join(part[0] for part in parts)}'

    def run(*command):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    def touched():
        command = ["bash", "-euo", "pipefail", "-c", f"{script}touches_engines"]
        return subprocess.run(command).returncode == 0

    def change(name, commit=True):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name}\n")
        if commit:
            run("git", "add", name)
            run("git", "-c", "user.name=a", "-c", "user.email=b", "commit", "-m", name)

    run("git", "init", "-q", "-b", "main")
    change("README.md")
    change("keras_distribute/launch/job.py")
    assert touched()  # By the last commit of main.
    change("keras_distribute/errors.py")
    assert not touched()
    run("git", "checkout", "-q", "-b", "other")
    assert not touched()
    change("keras_distribute/cluster/agreement.py")
    change("docs/index.md")
    assert touched()  # By a commit since main.
    run("git", "checkout", "-q", "main")
    assert not touched()
    change("tests/engines/test_new.py", commit=False)
    assert touched()

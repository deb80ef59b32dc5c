"""The documentation: its code runs, every public name is in the reference, and links
lead somewhere.
"""

import inspect
import json
import operator
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

import keras_distribute as kd
from tests.support import without_what_is_not_named

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
SITE = runpy.run_path(
    str(ROOT / "scripts" / "site_notebooks.py"), run_name="site_notebooks"
)
RUN = runpy.run_path(str(ROOT / "scripts" / "run_docs.py"), run_name="run_docs")


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "page", RUN["pages"](), ids=lambda page: str(pathlib.Path(page).name)
)
def test_code_blocks_run(page):
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "run_docs.py"), str(page)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env=os.environ | without_what_is_not_named(page.read_text()),
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def programs(page):
    """What a page has as a program: its `python` blocks together, and each of `py`."""
    text = page.read_text()
    yield "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    yield from re.findall(r"^```py(?: title=.*)?\n(.*?)^```", text, re.M | re.S)


def test_programs_import_the_package_before_keras():
    """Which chooses Keras's backend; `KERAS_BACKEND` hides it where these tests run."""
    wrong = []
    for page in PAGES:
        for program in programs(page):
            imports = re.findall(r"^ *(?:import|from) (keras\w*)", program, re.M)
            late = "keras_distribute" in imports and imports[0] != "keras_distribute"
            if late and "KERAS_BACKEND" not in program:
                wrong.append((page.name, program))
    assert wrong == []


MODULES = [
    "",
    "callbacks",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental.coordinator",
    "experimental.partitioners",
    "compat.v1.distribute",
    "compat.v1.distribute.experimental",
    "nn",
    "testing",
    "tpu.experimental",
]
# A module of named strategies, which the page has in a table.
SHOWN_ELSEWHERE = ["testing.combinations"]


def public_names():
    """The dotted names of what is public; of an object with several the first."""
    known = []
    for module in MODULES:
        owner = operator.attrgetter(module)(kd) if module else kd
        for name in owner.__all__:
            full = f"{module}.{name}".strip(".")
            thing = getattr(owner, name, full)
            is_module = inspect.ismodule(thing) and full not in SHOWN_ELSEWHERE
            is_other = getattr(thing, "__name__", name) != name
            if is_module or is_other or any(thing is other for other in known):
                continue  # Under its own name, or in the table of other names.
            known.append(thing)
            yield full


def other_names():
    """The dotted names of objects that have another one before."""
    first = set(public_names())
    for module in MODULES:
        if module.startswith("compat"):  # All of it: the page says so.
            continue
        owner = operator.attrgetter(module)(kd) if module else kd
        for name in owner.__all__:
            full = f"{module}.{name}".strip(".")
            if full not in first and not inspect.ismodule(getattr(owner, name)):
                yield full


def test_the_reference_has_every_public_name():
    found = re.findall(
        r"^::: keras_distribute\.(\S+)$",
        "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")),
        re.M,
    )
    expected = {name for name in public_names() if name not in SHOWN_ELSEWHERE}
    expected |= {"config.set_cpu_devices", "config.set_prefetch_steps"}
    expected |= {"launch.launch", "launch.LaunchOptions"}
    expected |= {f"errors.{name}" for name in vars(kd.errors) if name.endswith("Error")}
    assert sorted(expected - set(found)) == []
    assert sorted(found) == sorted(expected)


def test_the_reference_has_the_other_names_of_an_object():
    page = (ROOT / "docs/reference/strategies.md").read_text().split("## Other names")
    missing = [name for name in other_names() if f"`kd.{name}`" not in page[1]]
    assert missing == []


def anchors(page):
    """Where links into a page can lead: its headings as GitHub and MkDocs name them,
    and names given in HTML.
    """
    text = re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    headings = [
        re.sub(r"[^\w\s-]", "", heading).strip().lower()
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    ]
    return {re.sub(r"\s", "-", heading) for heading in headings} | set(
        re.findall(r'id="([^"]+)"', text)
    )


def markdown_of(page):
    """A page's text; of a notebook, that of its words, whose links into the repository
    are made relative.
    """
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    words = "\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )
    return words.replace(f"]({SITE['FILE_URL']}", "](../")


@pytest.mark.parametrize(
    "page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(
        r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", markdown_of(page)
    ):
        # Pages of the site that are made of notebooks.
        made_of = re.sub(
            r"^.*tutorials/(\w+)\.md$", rf"{ROOT}/tutorials/\1.ipynb", target
        )
        path = page.parent / made_of if target else page
        assert path.exists(), f"{page.name} links to {target}"
        # Those of the reference pages are made of docstrings; MkDocs checks them.
        if anchor and "reference/" not in target:
            assert anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def commands(page):
    """The lines of a page's shell blocks, and commands that are indented."""
    blocks = re.findall(
        r"^```(?:shell|bash)[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S
    )
    indented = re.findall(
        r"(?m)^    (?:pip|scripts/|python|EVERY_CASE).*", page.read_text()
    )
    return "\n".join([*blocks, *indented])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_files_and_extras_that_are_there(page):
    text = commands(page)
    named = re.findall(r"(?<![\w./-])(?:scripts|tests|benchmarks)/[\w./-]+", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(re.findall(r"(?:keras-distribute|\.)\[([\w,-]+)\]", text))
    known = {"", *project["optional-dependencies"]}
    assert set(extras.split(",")) - known == set()


def test_links_to_the_repository_have_one_address():
    for page in [*PAGES, *NOTEBOOKS]:
        text = page.read_text()
        for address in re.findall(
            r"https://(?:colab\.research\.google\.com/github|github\.com)/([\w-]+/[\w-]+)",
            # Threads of other projects, and files of theirs at a commit, are sources.
            re.sub(
                r"https://github\.com/\S+/(issues/\d+|blob/[0-9a-f]{40}/)", "", text
            ),
        ):
            assert SITE["REPOSITORY"].endswith(f"/{address}"), (
                f"{page.name} links to {address}"
            )


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_table_has_the_measured_numbers(page):
    text = (ROOT / page).read_text()
    table = text[text.index("| last batch that") : text.index("Numbers are the")]
    measured = (ROOT / "benchmarks/results/why.md").read_text()
    numbers = re.findall(r"\d\.\de-\d\d|\d+ steps for \d+|after \d+ steps", table)
    numbers += re.findall(r"(\d\.\d\d) ×", table)
    assert len(numbers) == 16
    assert [number for number in numbers if number not in measured] == []
    versions = re.search(r"Keras (\S+), JAX (\S+) and TensorFlow (\S+) on", text)
    assert versions is not None
    for name, version in zip(
        ("keras", "jax", "tensorflow_cpu"), versions.groups(), strict=True
    ):
        assert f"{name} {version}" in measured


@pytest.mark.parametrize(
    "module",
    [
        kd,
        kd.nn,
        kd.coordinator,
        kd.experimental,
        kd.callbacks,
        kd.cluster_resolver,
        kd.testing,
    ],
)
def test_a_public_name_without_a_place_in_the_reference_is_noticed(module, monkeypatch):
    monkeypatch.setattr(module, "__all__", [*module.__all__, "forgotten"])
    with pytest.raises(AssertionError, match="forgotten"):
        test_the_reference_has_every_public_name()

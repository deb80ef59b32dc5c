"""For the site: makes a page of each notebook in tutorials/, with its stored outputs
and pictures.

The pages are Markdown, so that code, tables, links and search are those of every other
page, and links are checked. Links in notebooks are absolute, for Colab; those into the
repository become links within the site.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]["urls"]["Repository"]
FILE_URL = f"{REPOSITORY}/blob/main/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each notebook, and its pictures. Called by mkdocs."""
    # The tests, which read the rest of this file, run without mkdocs.
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        pictures: dict[str, bytes] = {}
        text = page(json.loads(path.read_text("utf-8")), path.stem, pictures)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=data))
    return files


def page(notebook: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> str:
    """A notebook as Markdown.

    Args:
        notebook: As it is stored.
        stem: The name of its file, for those of its pictures.
        pictures: Gets what the page shows, by file name.
    """
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(within_site(source))
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_shown(output, stem, pictures) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def within_site(text: str) -> str:
    """Links into the repository as links from a page in `tutorials/`."""
    text = re.sub(rf"\]\({re.escape(FILE_URL)}docs/", "](../", text)
    return re.sub(rf"\]\({re.escape(FILE_URL)}tutorials/(\w+)\.ipynb", r"](\1.md", text)


def _shown(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> str:
    data: dict[str, Any] = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        name = f"{stem}_{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode("".join(data["image/png"]))
        return f"![What the code draws]({name})"
    if "text/html" in data:
        return f'<div class="notebook-html">{"".join(data["text/html"])}</div>'
    return (
        '```text title="Output"\n' + "".join(data["text/plain"]).rstrip("\n") + "\n```"
    )

"""Runs the code of the documentation, and compares what it prints with what the page
says.

    # Every page that has code, each in a process of its own:
    python scripts/run_docs.py
    # One page, in this process:
    python scripts/run_docs.py docs/index.md

Every fenced block marked `python` is run, from top to bottom, as one program. A block
marked `text title="Output"` must be what the block before it printed. Blocks marked
`py` are shown, but not run: TensorFlow's side of a comparison.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r'^(?P<indent> *)```(?P<kind>python|text title="Output")\n'
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


def pages() -> list[Path]:
    """The pages that have code to run."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page
        for page in candidates
        if any(m["kind"] == "python" for m in BLOCK.finditer(page.read_text("utf-8")))
    ]


def run(page: Path) -> None:
    """Runs one page in this process.

    Raises:
        AssertionError: When a block prints something else than the page says.
    """
    text = page.read_text("utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in BLOCK.finditer(text):
        code = textwrap.dedent(block["code"])
        line = text.count("\n", 0, block.start("code"))
        if block["kind"] == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                # Blank lines in front keep the line numbers of the page in tracebacks.
                exec(compile("\n" * line + code, str(page), "exec"), names)
            printed = out.getvalue()
        elif printed.split() != code.split():
            raise AssertionError(
                f"{page}:{line}: the page says\n{code}\nbut the code before it "
                f"prints\n{printed}"
            )


def main() -> int:
    chosen = [Path(argument).resolve() for argument in sys.argv[1:]] or pages()
    if len(chosen) == 1:
        run(chosen[0])
        return 0
    failed = [
        page
        for page in chosen
        if subprocess.run([sys.executable, __file__, str(page)]).returncode
    ]
    for page in chosen:
        print("failed" if page in failed else "ok    ", page.relative_to(ROOT))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

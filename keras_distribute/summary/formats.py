"""Tables of words as plain text, for rich terminals, and as HTML. Knows nothing of what
they say.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

from keras_distribute.summary.tables import Table

# Of the characters that `rich.box.Box` asks for, the rules below the header and above
# the total.
_RULES = "    \n    \n ── \n    \n ── \n ── \n    \n    \n"
# Plain text is not folded.
_WIDEST = 10_000


def as_text(heading: str, notes: Sequence[str], tables: Sequence[Table]) -> str:
    """Plain text of aligned columns."""
    from rich.console import Console

    file = io.StringIO()
    # In a notebook rich would show it there, and leave the file empty.
    Console(file=file, width=_WIDEST, color_system=None, force_jupyter=False).print(
        as_rich(heading, notes, tables)
    )
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_rich(heading: str, notes: Sequence[str], tables: Sequence[Table]) -> Any:
    """For `rich.print`."""
    from rich.box import Box
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Any] = [Text(heading, style="bold"), *map(Text, notes)]
    for table in tables:
        drawn = RichTable(
            box=Box(_RULES), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for name, side in zip(table.header, table.sides, strict=True):
            drawn.add_column(name, justify=side, overflow="fold")  # type: ignore
        for number, row in enumerate(table.rows, 1):
            is_total = table.total and number == len(table.rows)
            if is_total:
                drawn.add_section()
            drawn.add_row(*map(Text, row), style="bold" if is_total else None)
        title = Text(f"\n{table.title}", style="bold")
        parts += [title, Padding(drawn, (0, 0, 0, 2))]
    return Group(*parts)


def as_html(
    heading: str, notes: Sequence[str], tables: Sequence[Table], svg: str
) -> str:
    """For notebooks: the picture and the tables; only that with a total is unfolded."""
    words = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    title = f"<p><strong>{html.escape(heading)}</strong></p>"
    folded = "".join(map(_html_table, tables))
    return f'<div class="kd-summary">{title}{words}{svg}{folded}</div>'


def _html_table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        parts = (
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, table.sides, strict=True)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in table.rows)
    is_open = ' open="open"' if table.total else ""
    return (
        f"<details{is_open}><summary>{html.escape(table.title)}</summary>"
        f"<table><thead>{line(table.header, 'th')}</thead>"
        f"<tbody>{body}</tbody></table></details>"
    )

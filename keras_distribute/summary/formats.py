"""Tables of words as plain text, for rich terminals, and as HTML. Knows nothing of what
they say.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from keras_distribute.summary.tables import Table

_RULE = "─"
_OPEN = ' open="open"'


def as_text(heading: str, notes: Sequence[str], tables: Sequence[Table]) -> str:
    """Plain text of aligned columns."""
    return "\n\n".join(["\n".join([heading, *notes]), *map(_text_table, tables)])


def _text_table(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [
        max(len(line[column]) for line in lines) for column in range(len(table.header))
    ]
    rule = "  " + _RULE * (sum(widths) + 2 * (len(widths) - 1))

    def aligned(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in table.right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return ("  " + "  ".join(cells)).rstrip()

    body = [aligned(line) for line in table.rows]
    if table.total:
        body.insert(-1, rule)
    return "\n".join([table.title, aligned(table.header), rule, *body])


def as_rich(heading: str, notes: Sequence[str], tables: Sequence[Table]) -> Any:
    """For `rich.print`."""
    from rich import box, console, text
    from rich import table as rich_table

    parts: list[Any] = [
        text.Text(heading, style="bold"),
        *(text.Text(note) for note in notes),
    ]
    for table in tables:
        drawn = rich_table.Table(
            title=table.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
        )
        for column, name in enumerate(table.header):
            drawn.add_column(
                name,
                justify="right" if column in table.right else "left",
                overflow="fold",
            )
        for number, row in enumerate(table.rows):
            last = table.total and number == len(table.rows) - 1
            drawn.add_row(*map(text.Text, row), style="bold" if last else None)
        parts.append(drawn)
    return console.Group(*parts)


def as_html(
    heading: str, notes: Sequence[str], tables: Sequence[Table], svg: str
) -> str:
    """For notebooks: the picture, and the tables, of which all but the second are
    folded up.
    """
    words = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    folded = "".join(
        f"<details{_OPEN if table.total else ''}><summary>{html.escape(table.title)}</summary>"
        f"{_html_table(table)}</details>"
        for table in tables
    )
    return f'<div class="kd-summary"><p><strong>{html.escape(heading)}</strong></p>{words}{svg}{folded}</div>'


def _html_table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(
                f'<{tag} style="text-align:{"right" if column in table.right else "left"}">{html.escape(cell)}</{tag}>'
                for column, cell in enumerate(cells)
            )
            + "</tr>"
        )

    body = "".join(line(row, "td") for row in table.rows)
    return (
        f"<table><thead>{line(table.header, 'th')}</thead><tbody>{body}</tbody></table>"
    )

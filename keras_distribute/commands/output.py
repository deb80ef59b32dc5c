"""Tables on the terminal: in colours where it is one, else as plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from keras_distribute.summary import formats
from keras_distribute.summary.tables import Table


def show(heading: str, notes: Sequence[str], tables: Sequence[Table]) -> None:
    """Prints them."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(formats.as_rich(heading, notes, tables))
    else:
        sys.stdout.write(f"{formats.as_text(heading, notes, tables)}\n")
    sys.stdout.flush()

"""Options of XLA's compiler from several sources, as those of one program."""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]

DISABLED_PASSES = "xla_disable_hlo_passes"
"""The option that names passes of XLA which a program goes without."""


def joined(*sources: Options | None) -> Options | None:
    """The options of all sources, of which the last one decides, but that a pass which
    one of them disables stays disabled; `None` where there are none.
    """
    given = [options for options in sources if options]
    if not given:
        return None
    found = {name: value for options in given for name, value in options.items()}
    passes = [o[DISABLED_PASSES] for o in given if o.get(DISABLED_PASSES)]
    return {**found, DISABLED_PASSES: ",".join(passes)} if passes else found

"""Numbers and JSON in environment variables."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from keras_distribute import checks
from keras_distribute.errors import ClusterError

_NUMBER = re.compile(r"[0-9]{1,10}")  # A step of Slurm may be 4294967290.


def number(name: str, given: str | None = None) -> int:
    """The number in an environment variable, or in `given`: digits alone."""
    text = (os.environ[name] if given is None else given).strip()
    if not _NUMBER.fullmatch(text):
        raise ClusterError(
            f"{name} is a number.", received=f"{checks.shown(text)}.", fix=f"{name}=0"
        )
    return int(text)


def json_value(name: str, kind: type = dict) -> Any:
    """The JSON in an environment variable; an empty `kind` where it is not set."""
    text = os.environ.get(name, "")
    received, fix = f"{checks.shown(text)}.", f"check {name}."
    try:
        value = json.loads(text) if text.strip() else kind()
    except (ValueError, RecursionError) as error:
        what = f"{name} is not JSON: {error}."
        raise ClusterError(what, received=received, fix=fix) from error
    if not isinstance(value, kind):
        what = f"{name} is a JSON {kind.__name__}."
        raise ClusterError(what, received=received, fix=fix)
    return value

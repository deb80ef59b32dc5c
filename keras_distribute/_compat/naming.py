"""The numbers that Keras appends to the names of what has none: `dense`, `dense_1`.

Keras counts them for the whole process in the attribute `object_name_uids` of its
global state, and can only begin anew (`keras.backend.clear_session`), which forgets
more. A model that is made to be looked at takes its numbers and gives them back.

Goes when Keras has a public way to name layers apart from the process's count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from keras.src.backend.common import global_state
from keras.src.utils import naming

from keras_distribute._compat.seams import check

check(naming, "auto_name")
check(global_state, "get_global_attribute", "set_global_attribute")
_COUNTS = "object_name_uids"


@contextlib.contextmanager
def given_back() -> Generator[None]:
    """Names that are given inside are given again after it."""
    counts = global_state.get_global_attribute(_COUNTS)
    before = None if counts is None else counts.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTS, before)

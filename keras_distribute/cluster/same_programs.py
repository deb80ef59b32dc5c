"""The check that all processes run the same program: a loss, a rate of dropout or a
Python `if` that is another one in one process would make all train something that is
nobody's model, without a word.
"""

from __future__ import annotations

import itertools
import zlib

from jax.extend import core

from keras_distribute.cluster import agreement
from keras_distribute.devices.listed import Line, listed
from keras_distribute.errors import ClusterError

_MOST = 300  # Characters of an operation in an error.


def check_same_program(
    what: str, program: core.ClosedJaxpr, num_processes: int, fix: str
) -> None:
    """Raises where the processes have traced different programs; every process calls
    it, before it runs what it has traced.

    Args:
        what: What the program is, in words.
        fix: What the user writes instead.

    Raises:
        ClusterError: With the first operation that differs, in every process.
    """
    if num_processes == 1:
        return
    lines = listed(program)
    sums = [zlib.crc32(line.text.encode()) for line in lines]
    channel = agreement.Channel(f"its program {what}", num_processes)
    whole = zlib.crc32(repr(sums).encode())
    if len(set(channel.exchange(whole))) == 1:
        return
    of_all = itertools.zip_longest(*channel.exchange(sums))
    first = next(i for i, each in enumerate(of_all) if len(set(each)) > 1)
    said = channel.exchange(_in_words(lines[first]) if lines[first:] else "no more")
    raise ClusterError(
        f"The processes run different programs {what}.",
        received="; ".join(f"process {i}: {line}" for i, line in enumerate(said)) + ".",
        fix=fix,
    )


def _in_words(line: Line) -> str:
    layer = str(line.layer)
    return line.text[:_MOST] + (f", in {layer}" if layer else "")

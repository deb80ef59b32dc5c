"""Folders in which processes leave pickles for each other: of the user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keras_distribute.errors import ClusterError


def check_private(folder: Path) -> None:
    """Raises where others than the user may write in a folder, or read what is there.

    A folder of `tempfile.mkdtemp` is private. Somebody may have deleted it since, such
    as a service that cleans up, and somebody else made one of its name; and some file
    systems know no modes.

    Raises:
        ClusterError: For a folder of another user, or of another mode than 700.
    """
    status = os.lstat(folder)
    mode = stat.S_IMODE(status.st_mode)
    if (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not mode & (stat.S_IRWXG | stat.S_IRWXO)
    ):
        return
    raise ClusterError(
        "Processes leave what they say to each other in a folder of the user alone.",
        received=f"{folder}, of user {status.st_uid} and mode {mode:o}.",
        fix="set TMPDIR to a folder on a file system with modes, such as "
        "TMPDIR=/tmp: a folder in it of mode 700, of your own, is made there.",
    )

"""Private folders, in which processes leave pickles for each other."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keras_distribute.errors import ClusterError


def check_private(folder: Path) -> None:
    """Raises `ClusterError` for a folder of another user, or of another mode than 700.

    A folder of `tempfile.mkdtemp` is private. But a service that cleans up may have
    deleted it, and another user made one of its name; and some file systems have no
    modes.
    """
    status = os.lstat(folder)
    mode = stat.S_IMODE(status.st_mode)
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if own and not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    raise ClusterError(
        "Processes leave what they say to each other in a folder of the user alone.",
        received=f"{folder}, of user {status.st_uid} and mode {mode:o}.",
        fix="set TMPDIR to a folder on a file system with modes, such as TMPDIR=/tmp.",
    )

"""The token of a job, which only its processes know, and signatures with it.

The launcher of one host makes a token for each start of a job and passes it in the
environment. For several hosts the user gives one to all of them. It is never an
argument of a command, nor part of a text that is written.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from keras_distribute.errors import ClusterError

TOKEN = "KERAS_DISTRIBUTE_JOB_TOKEN"
TOKEN_FILE = "KERAS_DISTRIBUTE_JOB_TOKEN_FILE"
HOW_TO_MAKE = (
    '(umask 077 && python -c "import secrets; print(secrets.token_hex(32))" '
    "> job.token)"
)
HOW_TO_GIVE = f"export {TOKEN}=$(cat job.token)"
_LEAST, _MOST = 32, 4096
_DIGITS = 2 * hashlib.sha256().digest_size


class Seal:
    """Signs messages, and refuses those that are not of this job.

    Args:
        key: The token; with `None` nothing is signed, and every message is accepted.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"Seal({'with' if self.signs else 'without'} a token)"

    @property
    def signs(self) -> bool:
        """Whether there is a token."""
        return self._key is not None

    def sealed(self, purpose: str, message: bytes) -> bytes:
        """The message with its signature in front, valid for this purpose alone."""
        if self._key is None:
            return message
        return self.signature(purpose, message) + b" " + message

    def opened(self, purpose: str, sealed: bytes) -> bytes | None:
        """The message; `None` for one of another job or purpose."""
        if self._key is None:
            return sealed
        signature, message = sealed[:_DIGITS], sealed[_DIGITS + 1 :]
        if not hmac.compare_digest(signature, self.signature(purpose, message)):
            return None
        return message

    def of(self, nonces: Sequence[str]) -> Seal:
        """A seal for one conversation: it refuses the messages of any other."""
        if self._key is None:
            return self
        return Seal(self.signature("nonces", "|".join(nonces).encode()))

    def signature(self, purpose: str, message: bytes) -> bytes:
        """What only who has the token can say of a message; there is a token."""
        assert self._key is not None
        named = purpose.encode()
        text = b"%d:%b%b" % (len(named), named, message)
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()


def new_token() -> str:
    """A random token."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A number for one use."""
    return secrets.token_hex(16)


def why_refused(sealed: bytes) -> str:
    """What is wrong with a message that a seal with a token does not open."""
    own = " with the token of this job" if is_signed(sealed) else ""
    return f"it is not signed{own}"


def is_signed(message: bytes) -> bool:
    """Whether there is a signature in front, with any token."""
    return re.match(b"[0-9a-f]{%d} " % _DIGITS, message) is not None


def token_of_job(file: str | os.PathLike[str] | None = None) -> str | None:
    """The token in `file`, in the environment, or in the file that this names.

    Raises:
        ClusterError: For a file that cannot be read, or that all users can read; for a
            token that is too short.
    """
    if file is None:
        if token := os.environ.get(TOKEN):
            return _checked(token, TOKEN)
        file = os.environ.get(TOKEN_FILE) or None
    return None if file is None else _checked(_read(Path(file)), f"The file {file}")


def seal_of_job(file: str | os.PathLike[str] | None = None) -> Seal:
    """The seal with the token of the job, which `token_of_job` finds."""
    token = token_of_job(file)
    return Seal(None if token is None else token.encode())


def _read(path: Path) -> str:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{path} is no file")
            content = file.read(_MOST + 1)
    except OSError as error:
        raise ClusterError(
            "The file with the token of the job cannot be read.",
            received=f"{error}.",
            fix=HOW_TO_MAKE,
        ) from error
    if status.st_mode & stat.S_IRWXO:
        raise ClusterError(
            "Everybody on this host may read the token of the job, or change it.",
            received=f"the file {path}, of mode {stat.S_IMODE(status.st_mode):o}.",
            fix=f"chmod 600 {path}",
        )
    return content.decode(errors="replace")


def _checked(token: str, where: str) -> str:
    token = token.strip()
    if not _LEAST <= len(token) <= _MOST or not token.isprintable():
        raise ClusterError(
            f"A token of a job has {_LEAST} to {_MOST} characters, on one line.",
            received=f"{where}, with {len(token)} characters.",
            fix=HOW_TO_MAKE,
        )
    return token

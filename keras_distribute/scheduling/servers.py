"""The parameter servers as the coordinator sees them: what to ask them, and when one is
lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_distribute.errors import UnavailableError
from keras_distribute.remote.channel import Channel
from keras_distribute.remote.credentials import Credentials
from keras_distribute.remote.frames import Array, Header

_SECONDS_TO_COME_BACK = 2.0
Told = tuple[int, list[int], list[Array]]
"""How often a server had been told values by then, their keys, and the values."""


class Server:
    """One parameter server, asked by any thread, one question at a time.

    Args:
        index: Of the server.
        address: Of the server.
        credentials: Of the job.
        lost: Called once when the server is gone, with the error.

    Attributes:
        address: Where it is.
        writes: How often it was told values.
        platform: Of its devices.
        told: Those, with their number and keys, while updates are recorded.
        version: How many pushes it had applied, as far as is known.
    """

    def __init__(
        self,
        index: int,
        address: str,
        credentials: Credentials,
        lost: Callable[[UnavailableError], None],
    ) -> None:
        self.index, self.writes, self.version = index, 0, 0
        self.platform = ""
        self.told: list[Told] | None = None
        self.address, self._credentials = address, credentials
        self._channel: Channel | None = None
        self._coordinator = ""
        self._lock, self._lost = threading.Lock(), lost
        self._gone: UnavailableError | None = None

    def begin(self, coordinator: str, timeout: float) -> None:
        """Takes the server, which has no values from now on.

        Args:
            coordinator: Who asks from now on.
            timeout: Seconds to wait for it, which may start later.

        Raises:
            UnavailableError: Where it does not come.
        """
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            name = f"ps:{self.index}"
            try:
                self._channel = Channel(self.address, name, self._credentials, timeout)
            except UnavailableError as error:
                self._gone = error
                raise
            self._coordinator, self._gone = coordinator, None
            self.writes = self.version = 0
        self.platform = str(self.call({"op": "begin"})[0]["platform"])

    @property
    def name(self) -> str:
        """As in errors."""
        return f"ps:{self.index} ({self.address})"

    def call(
        self, header: Header, arrays: Sequence[Any] = ()
    ) -> tuple[Header, list[Array]]:
        """Asks, and waits for the answer.

        Raises:
            UnavailableError: When the server is gone, now and at any time after.
            ClusterError: When another coordinator has taken it.
        """
        with self._lock:
            if self._gone is not None:
                raise UnavailableError(*self._gone.args)
            try:
                told = {**header, "coordinator": self._coordinator}
                answer, found = self._asked(told, arrays)
            except UnavailableError as error:
                self._gone = UnavailableError(
                    f"The parameter server {self.name} has ended or is cut off, and "
                    "the values that it had are lost.",
                    received=f"{error}",
                    fix="start it again, then call strategy.reconnect() or start this "
                    "program again, and restore the last checkpoint: "
                    "kd.CheckpointManager, or BackupAndRestore in fit.",
                )
                self._lost(self._gone)
                raise self._gone from error
            self.writes = answer.get("writes", self.writes)
            self.version = max(self.version, answer.get("version", 0))
            if self.told is not None and header["op"] == "set":
                values = [np.array(each) for each in arrays]
                self.told.append((self.writes, header["keys"], values))
        return answer, found

    def _asked(
        self, header: Header, arrays: Sequence[Any]
    ) -> tuple[Header, list[Array]]:
        """Asks; again where it or this process was frozen or cut off for a while. What
        is asked twice does the same as once.
        """
        assert self._channel is not None
        try:
            if not self._channel.is_over:  # As after Ctrl-C.
                return self._channel.call(header, arrays)
        except UnavailableError:
            if not self._channel.is_over:
                raise
        self._channel = self._channel.again(_SECONDS_TO_COME_BACK)
        return self._channel.call(header, arrays)

    def close(self) -> None:
        """Says no more."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._gone = self._gone or UnavailableError(
                f"The strategy of the parameter server {self.name} was closed.",
                received="a read or an assignment after that.",
                fix="read and save before strategy.close().",
            )

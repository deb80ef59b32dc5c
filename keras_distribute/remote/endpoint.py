"""A task that answers: one socket for all who ask, read by one thread."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from keras_distribute.errors import ClusterError
from keras_distribute.remote import frames, sockets
from keras_distribute.remote.credentials import Credentials, Gate
from keras_distribute.remote.engine import zmq
from keras_distribute.remote.frames import Array, Header

Answer = tuple[Header, Sequence[Any]] | None
Handle = Callable[[Header, list[Array]], Answer]
_HALF_OF_A_TEXT = 50_000  # Characters of an error.


class Endpoint:
    """Listens at the address of a task, to tasks of the same job alone.

    Args:
        address: Of this task, `host:port`.

    Raises:
        ClusterError: Where somebody else has the address, or it is not this host's.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address, self._credentials = address, credentials
        self._context = zmq.Context()
        self._gate = Gate(self._context, credentials, address)
        self._socket = self._context.socket(zmq.ROUTER)
        sockets.prepare(self._socket)
        credentials.of_server(self._socket)
        try:
            self._socket.bind(sockets.endpoint_of(address))
        except zmq.ZMQError as error:
            self.close()
            raise ClusterError(
                f"The task cannot listen at {address}.",
                received=f"{error}.",
                fix="a free port of this host, or end the task that has it.",
            ) from error
        self._upcoming: tuple[memoryview, Header, list[Array]] | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def serve(self, handle: Handle, until: Callable[[], bool]) -> None:
        """Answers until `until()`.

        Args:
            handle: From a header and arrays to the header and arrays of the answer;
                `None` where there is none. What it raises is told to who asks.
            until: Asked between messages.
        """
        while not until():
            if self.upcoming(200) is not None:
                self._serve_one(handle)

    def upcoming(self, ms: int = 0) -> tuple[Header, list[Array]] | None:
        """The message that is answered next, if it comes within some milliseconds."""
        if self._upcoming is None and self._poller.poll(ms):
            peer, *message = sockets.receive(self._socket)
            try:
                decoded = frames.decode(message)
            except ClusterError as error:  # From a task of another version.
                self._send(peer, frames.encode({"error": describe(error)}))
                return None
            self._upcoming = (peer, *decoded)
        return self._upcoming and self._upcoming[1:]

    def _serve_one(self, handle: Handle) -> None:
        assert self._upcoming is not None
        (peer, header, arrays), self._upcoming = self._upcoming, None
        number = header.get("number")
        try:
            if header.get("op") == "hello":
                nonce = str(header.get("nonce"))
                proof = self._credentials.proof(f"serve {self.address}", nonce)
                answer: Answer = ({"proof": proof}, [])
            else:
                answer = handle(header, arrays)
            if answer is None:
                return
            message = frames.encode({**answer[0], "number": number}, answer[1])
        except Exception as error:
            message = frames.encode({"error": describe(error), "number": number})
        self._send(peer, message)

    def _send(self, peer: memoryview, message: list[Any]) -> None:
        sockets.send(self._socket, [peer, *message])

    def close(self) -> None:
        """Ends the conversations; answers that are on their way still go out."""
        self._socket.close()
        self._context.term()


def describe(error: BaseException) -> dict[str, str]:
    """An error as data: exceptions of others cannot be taken apart and put together."""
    try:
        text = str(error)
    except Exception as of_text:
        text = f"its text cannot be had: {type(of_text).__name__}"
    return {
        "type": type(error).__name__,
        "text": _sendable(text),
        "traceback": _sendable("".join(traceback.format_exception(error))),
        "time": time.strftime("%H:%M:%S"),
    }


def _sendable(text: str) -> str:
    """A text for a header, without halves of characters, as names of files may have."""
    if len(text) > 2 * _HALF_OF_A_TEXT:
        text = f"{text[:_HALF_OF_A_TEXT]} [...] {text[-_HALF_OF_A_TEXT:]}"
    return text.encode(errors="backslashreplace").decode()

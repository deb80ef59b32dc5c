"""A conversation with a task that answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from keras_distribute import errors
from keras_distribute.cluster import addresses, signing
from keras_distribute.errors import DistributeError, RemoteError, UnavailableError
from keras_distribute.remote import frames, sockets
from keras_distribute.remote.credentials import Credentials
from keras_distribute.remote.engine import monitor, zmq
from keras_distribute.remote.frames import Array, Header

_SECONDS_TO_CONNECT = 10.0
Reply = tuple[int, Header, list[Array]]


class Channel:
    """Asks one task, in order; several questions may be under way. Of one thread at a
    time.

    ZeroMQ connects again by itself when a task comes back, and forgets what was under
    way: so a channel whose task was gone once is over. So is one whose `call` Ctrl-C
    has interrupted, maybe in the middle of a message.

    Args:
        name: What it is called in errors.
        timeout: Seconds to wait for the task, which may start later.
        is_there: Whether it has started, and may be busy: then it is given up in
            seconds if it does not shake hands, for which it needs not be idle.

    Attributes:
        is_over: Whether the task was gone once, or a call was interrupted.

    Raises:
        UnavailableError: If it does not answer, or cannot prove that it has the token.
    """

    def __init__(
        self,
        address: str,
        name: str,
        credentials: Credentials,
        timeout: float,
        is_there: bool = False,
    ) -> None:
        if is_there:
            _check_listener(address, name, _SECONDS_TO_CONNECT)
        self.address, self.name, self.is_over = address, name, False
        self._credentials = credentials
        self._numbers = 0
        self._early: dict[int, tuple[Header, list[Array]]] = {}
        self._context = zmq.Context.instance()
        self._socket = self._context.socket(zmq.DEALER)
        sockets.prepare(self._socket)
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 500
        credentials.of_client(self._socket, address)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connected = False
        self._socket.connect(f"tcp://{address}")
        nonce = signing.new_nonce()
        try:
            self._wait_for_handshake(_SECONDS_TO_CONNECT if is_there else timeout)
            header, _ = self.call({"op": "hello", "nonce": nonce}, timeout=timeout)
            if not credentials.accepts(f"serve {address}", nonce, header.get("proof")):
                raise self._error("it does not have the token of the job")
        except BaseException:
            self.close()
            raise

    def send(self, header: Header, arrays: Sequence[Any] = ()) -> int:
        """Asks; the answer will have the number that is returned."""
        self._numbers += 1
        parts = frames.encode({**header, "number": self._numbers}, arrays)
        try:
            # Where there is no connection any more, it would wait for ever.
            sockets.send(self._socket, parts, wait=False)
        except zmq.Again:
            raise self._error("its connection has ended") from None
        return self._numbers

    def _wait_for_handshake(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self._connected:
            left = end - time.monotonic()
            if left <= 0:
                raise self._error(f"it has not answered for {timeout:.3g} s")
            if self._monitor.poll(int(left * 1000)):
                self._note(monitor.recv_monitor_message(self._monitor)["event"])

    def receive(self, timeout: float | None = None, wake: Any = None) -> Reply | None:
        """The next answer, to whichever question; `None` after `timeout` seconds, or
        when the file `wake` can be read.

        Raises:
            UnavailableError: When the task is gone, frozen or cut off.
            RemoteError: What the task raised, with its traceback.
        """
        if self._early:
            number = next(iter(self._early))
            return (number, *self._early.pop(number))
        end = None if timeout is None else time.monotonic() + timeout
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)
        try:
            while True:
                left = None if end is None else max(0.0, end - time.monotonic())
                ms = None if left is None else int(left * 1000)
                found = dict(self._poller.poll(ms))
                if self._socket in found:
                    return self._read()
                if self._monitor in found:
                    self._note(monitor.recv_monitor_message(self._monitor)["event"])
                elif (wake is not None and found) or (left is not None and not found):
                    return None
        finally:
            if wake is not None:
                self._poller.unregister(wake)

    def call(
        self, header: Header, arrays: Sequence[Any] = (), timeout: float | None = None
    ) -> tuple[Header, list[Array]]:
        """Asks, and waits for the answer.

        Raises:
            UnavailableError: When there is none within `timeout` seconds; otherwise as
                `receive`.
        """
        try:
            return self.answer(self.send(header, arrays), timeout)
        except DistributeError:
            raise
        except BaseException:
            self.is_over = True
            raise

    def answer(
        self, number: int, timeout: float | None = None
    ) -> tuple[Header, list[Array]]:
        """Waits for the answer to one question."""
        others: dict[int, tuple[Header, list[Array]]] = {}
        while number not in self._early:
            reply = self.receive(timeout)
            if reply is None:
                raise self._error(f"it has not answered for {timeout:.3g} s")
            if reply[0] in (number, 0):  # 0: of a message that the task could not read.
                self._early = others
                return self._checked(reply[1], reply[2])
            others[reply[0]] = reply[1:]
        return self._checked(*self._early.pop(number))

    def _read(self) -> Reply:
        header, arrays = frames.decode(sockets.receive(self._socket))
        return int(header.get("number") or 0), header, arrays

    def _checked(
        self, header: Header, arrays: list[Array]
    ) -> tuple[Header, list[Array]]:
        raise_remote(header, self.name)
        return header, arrays

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise self._error("it refuses the token of this job")
        elif self._connected:
            raise self._error("its connection has ended")

    def again(self, timeout: float) -> Channel:
        """A new conversation with the same task, in the place of one that is over.

        Raises:
            UnavailableError: If nobody listens there, or as for a new channel.
        """
        self.close()
        _check_listener(self.address, self.name, timeout)
        return Channel(self.address, self.name, self._credentials, timeout)

    def _error(self, why: str) -> UnavailableError:
        self.is_over = True
        return _error(self.address, self.name, why)

    def close(self) -> None:
        """Ends the conversation."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


def _check_listener(address: str, name: str, timeout: float) -> None:
    """Raises `UnavailableError` if nobody listens, which ZeroMQ would not say."""
    try:
        socket.create_connection(addresses.parts(address), timeout).close()
    except OSError:
        raise _error(address, name, "nobody listens there any more") from None


def _error(address: str, name: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"The task {name} cannot be had.",
        received=f"{address}: {why}.",
        fix="start it again with the same address and token.",
    )


def raise_remote(header: Header, name: str) -> None:
    """Raises the error of an answer: one of ours by its class, else `RemoteError`."""
    told = header.get("error")
    if told is None:
        return
    text, shown = told["text"], told["traceback"]
    known = getattr(errors, told["type"], None)
    if known is not None and issubclass(known, errors.DistributeError):
        raise known(f"{text}\n\nIn the task {name}, at {told['time']}.")
    raise RemoteError(
        f"{told['type']} in the task {name}: {text}",
        received=f"this traceback of {told['time']}:\n\n{shown}",
        fix="mend the function that was scheduled, or its data.",
    )

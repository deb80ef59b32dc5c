"""Who may talk to a task: proofs with the token of the job, which never travels.

ZeroMQ asks about each connection before it takes a message from it
(https://rfc.zeromq.org/spec/27/). Without encryption a client names itself by a random
number, and its password is that number, signed for this address; a server proves in its
first answer that it has the token, too. With encryption both have keys (CURVE,
https://rfc.zeromq.org/spec/26/) that are made from the token.

Without encryption, one who can change what travels on the network can take over a
connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from typing import Any

from keras_distribute.cluster import signing
from keras_distribute.errors import ClusterError
from keras_distribute.remote.engine import check_installed, z85, zmq

ENCRYPT = "KERAS_DISTRIBUTE_ENCRYPT"
_ADDRESS = "inproc://zeromq.zap.01"  # By which libzmq finds the one to ask.


class Credentials:
    """What a task proves itself with, and others to it."""

    def __init__(self, token: str, encrypted: bool = False) -> None:
        check_installed()
        self._token, self.encrypted = token.encode(), encrypted
        self._seal = signing.Seal(self._token)

    def proof(self, purpose: str, text: str) -> str:
        """What only a task with the token can say of `text`."""
        return self._seal.signature(purpose, text.encode()).decode()

    def accepts(self, purpose: str, text: str, proof: object) -> bool:
        """Whether it is the proof."""
        right = self.proof(purpose, text)
        return isinstance(proof, str) and hmac.compare_digest(right, proof)

    def of_server(self, socket: Any) -> None:
        """Makes a socket ask for proofs, before it is bound."""
        if self.encrypted:
            socket.curve_server = True
            socket.curve_secretkey = self._keys("server")[1]
        else:
            socket.plain_server = True

    def of_client(self, socket: Any, address: str) -> None:
        """Makes a socket prove itself to the server at `address`."""
        if self.encrypted:
            socket.curve_serverkey = self._keys("server")[0]
            socket.curve_publickey, socket.curve_secretkey = self._keys("client")
        else:
            name = signing.new_nonce()
            socket.plain_username = name.encode()
            socket.plain_password = self.proof(f"connect {address}", name).encode()

    def _keys(self, role: str) -> tuple[bytes, bytes]:
        """The public and the secret key of a role, as text in Z85."""
        raw = hmac.new(self._token, f"curve {role}".encode(), hashlib.sha256).digest()
        secret = z85.encode(raw)
        return zmq.curve_public(secret), secret

    def judge(self, mechanism: bytes, proofs: list[bytes], address: str) -> bool:
        """Whether a connection to the server at `address` comes with a proof."""
        if self.encrypted:
            known = z85.decode(self._keys("client")[0])
            return mechanism == b"CURVE" and hmac.compare_digest(proofs[0], known)
        if mechanism != b"PLAIN" or len(proofs) != 2:
            return False
        name, password = (each.decode(errors="replace") for each in proofs)
        return self.accepts(f"connect {address}", name, password)


class Gate:
    """Answers libzmq's questions about connections, in a thread."""

    def __init__(self, context: Any, credentials: Credentials, address: str) -> None:
        self._credentials, self._address = credentials, address
        self._used: set[bytes] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                version, number, _, _, _, mechanism, *proofs = (
                    self._socket.recv_multipart()
                )
                right = self._judge(mechanism, proofs)
                code, text = (b"200", b"OK") if right else (b"400", b"No proof")
                self._socket.send_multipart([version, number, code, text, b"", b""])
            except (zmq.ContextTerminated, zmq.ZMQError):
                self._socket.close()
                return

    def _judge(self, mechanism: bytes, proofs: list[bytes]) -> bool:
        if not self._credentials.judge(mechanism, proofs, self._address):
            return False
        if self._credentials.encrypted:
            return True  # Each handshake has keys of its own: none can be repeated.
        if proofs[0] in self._used:
            return False  # Overheard, and said again.
        self._used.add(proofs[0])
        return True


def of_job() -> Credentials:
    """The credentials of this job, by the environment."""
    token = signing.token_of_job()
    if token is None:
        raise ClusterError(
            "The tasks of a cluster with parameter servers have a token, which keeps "
            "strangers out.",
            received=f"neither {signing.TOKEN} nor {signing.TOKEN_FILE}.",
            fix=f"in all tasks: {signing.HOW_TO_MAKE}; {signing.HOW_TO_GIVE}",
        )
    return Credentials(token, os.environ.get(ENCRYPT) == "1")

"""Messages between tasks: what arrives is what was sent, and strangers are kept out."""

import contextlib
import os
import signal
import socket
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.cluster.ports import free_port
from keras_distribute.remote import credentials, frames
from keras_distribute.remote.channel import Channel
from keras_distribute.remote.credentials import Credentials
from keras_distribute.remote.endpoint import Endpoint
from keras_distribute.remote.engine import msgpack, zmq
from keras_distribute.scheduling.servers import Server
from tests.interruptions import Interrupter


class _NoTextError(Exception):
    def __str__(self):
        raise KeyError("no text")


_ERRORS = {
    "fail": KeyError("of the task"),
    "half": FileNotFoundError("\udc80.csv"),
    "no text": _NoTextError(),
    "long": ValueError("A" * 10**8 + "Z"),
}
TOKEN = "the token of a job, which is long"


class Task:
    """A task that returns what it is sent, in a thread."""

    def __init__(self, credentials):
        self.address = f"127.0.0.1:{free_port()}"
        self.credentials, self.seen = credentials, []
        self._stop = threading.Event()
        self._endpoint = Endpoint(self.address, credentials)
        self.upcoming = self._endpoint.upcoming
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        self._endpoint.serve(lambda *message: self._handle(*message), self._stop.is_set)
        self._endpoint.close()

    def _handle(self, header, arrays):
        self.seen.append(header["op"])
        if header["op"] in _ERRORS:
            raise _ERRORS[header["op"]]
        if header["op"] == "object":
            return {"answer": object()}, []
        return header, [np.array(array) for array in arrays]

    def stop(self):
        self._stop.set()
        self._thread.join()

    def channel(self, credentials=None, timeout=10.0):
        return Channel(self.address, "ps:0", credentials or self.credentials, timeout)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def task(request):
    task = Task(Credentials(TOKEN, request.param))
    yield task
    task.stop()


ARRAYS = [
    np.float32(3.0),
    np.zeros((0, 4)),
    np.arange(12, dtype="int8").reshape(3, 4).T,
    np.ones((2, 3), ml_dtypes.bfloat16),
    np.array([True, False]),
    np.array([1 + 2j]),
]


def test_messages_are_what_was_sent():
    header, arrays = frames.decode(frames.encode({"a": [1, "b"]}, ARRAYS))
    assert header == {"a": [1, "b"]}
    for ours, theirs in zip(arrays, ARRAYS, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("size", [frames.LARGEST_FRAME, frames.LARGEST_FRAME + 1])
def test_large_arrays_travel_in_parts(size):
    array = np.arange(size, dtype="uint8")
    parts = frames.encode({}, [array, np.ones(2)])
    assert max(map(len, parts)) <= frames.LARGEST_FRAME
    np.testing.assert_array_equal(frames.decode(parts)[1][0], array)


@pytest.mark.parametrize("count", [1024, 1025, 2049])
def test_many_small_arrays_travel_in_parts(count):
    """A frame that is too large would never arrive, and be sent again for ever."""
    arrays = [np.full(2**13, i, "float32") for i in range(count)]
    large = np.arange(2**14, dtype="float32")
    parts = frames.encode({}, [*arrays, large])
    assert [len(part) for part in parts[1:]] == [
        *[frames.LARGEST_FRAME] * (count // 1024),
        *[2**15] * (count % 1024),
        2**16,
    ]
    *small, last = frames.decode(parts)[1]
    assert [array[-1] for array in small] == list(range(count))
    np.testing.assert_array_equal(last, large)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1"],
        [msgpack.packb(3)],
        [msgpack.packb([{}, []])],
        [msgpack.packb([{}, [["float32", [3]]]]), b""],
        [msgpack.packb([{}, [["float32", [3]]]]), b"12"],
        [msgpack.packb([{}, [["float32", [100_000]]]]), b""],
        [msgpack.packb([{}, [["float32", [100_000]]]]), b"", b"12"],
        [msgpack.packb([{}, [["object", [1]]]]), b"12345678"],
        [msgpack.packb([{}, [["float32", [2**40, 2**40]]]]), b""],
        [msgpack.packb([{}, [["float32", [-1]]]]), b""],
        [msgpack.packb([{}, []]), b"more"],
        [msgpack.packb([{}, []]), b"", b"more"],
        [msgpack.packb([[], []]), b""],
    ],
)
def test_what_is_no_message(parts):
    with pytest.raises(kd.errors.ClusterError, match="that is none"):
        frames.decode(parts)


def test_objects_are_not_sent():
    with pytest.raises(TypeError):
        frames.encode({}, [np.array([object()])])


def test_questions_and_answers(task):
    channel = task.channel()
    first = channel.send({"op": "one"}, ARRAYS)
    second = channel.send({"op": "two"})
    assert channel.answer(second)[0]["op"] == "two"
    header, arrays = channel.answer(first)
    assert header["op"] == "one"
    assert [a.shape for a in arrays] == [np.shape(a) for a in ARRAYS]
    assert channel.receive(timeout=0.05) is None
    with pytest.raises(kd.errors.RemoteError, match=r"KeyError in the task ps:0"):
        channel.call({"op": "fail"})
    channel.close()


def test_the_message_that_comes_next_can_be_looked_at(task):
    """Before it is answered, in its turn."""
    found = []

    def handle(header, arrays):
        if header["op"] == "first":
            upcoming = task.upcoming(5000)
            assert task.upcoming() == upcoming
            found.append(upcoming)
        found.append((header, arrays))
        return header, arrays

    task._handle = handle
    channel = task.channel()
    numbers = [channel.send({"op": "first"}), channel.send({"op": "second"}, [3.0])]
    answers = [channel.answer(number)[0]["op"] for number in numbers]
    assert answers == ["first", "second"]
    ahead, first, second = found
    assert first[0]["op"] == "first"
    assert ahead[0] is second[0]
    assert ahead[1] is second[1]
    channel.close()


@pytest.mark.parametrize(
    "inside",
    ["zmq/sugar", "keras_distribute/remote/sockets", "keras_distribute/remote/channel"],
)
def test_ctrl_c_leaves_no_half_of_a_message(task, inside):
    """At any place of a question or its answer: the next one has its own answer."""
    lost = []
    task._handle = lambda header, arrays: ({**header, "platform": "cpu"}, arrays)
    server = Server(0, task.address, task.credentials, lost.append)
    server.begin("me", 10.0)
    large = np.ones(frames.LARGEST_FRAME // 512)

    def call(number):
        header, arrays = server.call({"op": "x", "n": number}, [large, large + number])
        assert header["n"] == number
        np.testing.assert_array_equal(arrays, [large, large + number])

    places = Interrupter(None, inside=inside)
    assert not places(lambda: call(-1))
    assert places.count >= 4  # Calls and returns.
    for place in range(places.count):
        interrupter = Interrupter(place, inside=inside)
        assert interrupter(lambda: call(-1))
        call(place)
        assert not server._channel._early, interrupter.where
    assert not lost
    server.close()


def test_a_message_that_cannot_be_read_is_an_error(task):
    """As of a task of another version, whose `encode` is another."""
    channel = task.channel()
    first = channel.send({"op": "first"})
    channel._socket.send_multipart([b"of another version"])
    assert channel.answer(first)[0]["op"] == "first"
    with pytest.raises(kd.errors.ClusterError, match="that is none(.|\n)*same version"):
        channel.answer(first + 1, timeout=5.0)
    assert channel.call({"op": "next"})[0]["op"] == "next"
    channel.close()


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("half", r"FileNotFoundError in the task ps:0: \\udc80\.csv\n"),
        ("no text", "_NoTextError in the task ps:0: its text cannot be had: KeyError"),
        ("long", r"AAA \[\.\.\.\] AAA"),
        ("object", "TypeError in the task ps:0: can not serialize 'object' object"),
    ],
)
def test_what_cannot_be_sent_as_it_is_ends_no_task(task, op, told):
    channel = task.channel()
    with pytest.raises(kd.errors.RemoteError, match=told) as info:
        channel.call({"op": op}, timeout=10.0)
    assert len(str(info.value)) < 10**6
    assert channel.call({"op": "again"}, timeout=10.0)[0]["op"] == "again"
    channel.close()


def test_a_task_with_another_token_is_refused(task):
    start = time.monotonic()
    other = Credentials("x" * 40, task.credentials.encrypted)
    with pytest.raises(kd.errors.UnavailableError, match=r"ps:0 cannot be had"):
        task.channel(other, timeout=1.5)
    assert time.monotonic() - start < 6
    assert task.seen == []


def test_a_task_that_does_not_have_the_token_is_not_believed():
    """Somebody who took the address, and lets everybody in."""
    address = f"127.0.0.1:{free_port()}"
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.linger = 0
    impostor.bind(f"tcp://{address}")
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            if impostor.poll(50):
                peer, *parts = impostor.recv_multipart()
                header, _ = frames.decode(parts)
                answer = {"number": header["number"], "proof": "0" * 64}
                impostor.send_multipart([peer, *frames.encode(answer)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(kd.errors.UnavailableError):
            Channel(address, "ps:0", Credentials(TOKEN), 1.0)
    finally:
        stop.set()
        thread.join()
        impostor.close()
        context.term()


def test_a_password_that_was_overheard_is_good_for_nothing():
    task = Task(Credentials(TOKEN))
    try:
        name = "a name that somebody used"
        password = task.credentials.proof(f"connect {task.address}", name)
        assert _answers(task.address, name, password)
        assert not _answers(task.address, name, password)
        other = task.credentials.proof("connect 127.0.0.1:1", "elsewhere")
        assert not _answers(task.address, "elsewhere", other)
    finally:
        task.stop()


def _answers(address, name, password):
    one = zmq.Context.instance().socket(zmq.DEALER)
    one.linger = 0
    one.plain_username, one.plain_password = name.encode(), password.encode()
    one.sndtimeo = 1000  # Refused at once, it has nobody to send to.
    one.connect(f"tcp://{address}")
    try:
        one.send_multipart(frames.encode({"op": "x", "number": 1}))
        return bool(one.poll(1000))
    except zmq.Again:
        return False
    finally:
        one.close()


def attack(kind, address):
    """What a stranger can do to a port."""
    host, port = address.split(":")
    rng = np.random.default_rng(0)
    if kind == "silent":
        return [socket.create_connection((host, int(port))) for _ in range(50)]
    if kind == "no mechanism":
        one = zmq.Context.instance().socket(zmq.DEALER)
        one.linger = 0
        one.connect(f"tcp://{address}")
        with contextlib.suppress(zmq.Again):
            for _ in range(100):
                message = frames.encode({"op": "end", "number": 1})
                one.send_multipart(message, flags=zmq.NOBLOCK)
        return [one]
    connection = socket.create_connection((host, int(port)))
    try:
        if kind == "garbage":
            connection.sendall(rng.bytes(100_000))
        elif kind == "greeting, then a frame of many bytes":
            connection.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\x00PLAIN" + b"\0" * 48)
            connection.sendall(b"\x06" + (2**40).to_bytes(8, "big") + b"x" * 1000)
        elif kind == "slow":
            connection.sendall(b"\xff")
    except OSError:
        pass
    return [connection]


KINDS = [
    "silent",
    "no mechanism",
    "garbage",
    "greeting, then a frame of many bytes",
    "slow",
]


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_disturb_nobody(task, kind):
    channel = task.channel()
    held = []
    for _ in range(5):
        held += attack(kind, task.address)
        assert channel.call({"op": "x"}, [np.ones(3)], timeout=5.0)[0]["op"] == "x"
    other = task.channel()
    assert other.call({"op": "y"}, timeout=5.0)[0]["op"] == "y"
    assert set(task.seen) == {"x", "y"}
    for one in (*held, channel, other):
        one.close()


def test_a_cluster_of_which_strangers_want_something(strategy, cluster):
    """A job goes on while each of its ports is attacked, and counts each step once."""
    import keras

    jobs = cluster.cluster_resolver.cluster_spec().as_dict()
    stop, held = threading.Event(), []

    def strangers():
        while not stop.is_set():
            for address in (*jobs["worker"], *jobs["ps"]):
                for kind in KINDS:
                    held.extend(attack(kind, address))
            stop.wait(0.2)

    thread = threading.Thread(target=strangers)
    thread.start()
    try:
        with strategy.scope():
            v = keras.Variable(0.0)
        coordinator = kd.coordinator.ClusterCoordinator(strategy)
        for _ in range(300):
            coordinator.schedule(lambda: v.assign_add(1.0))
        coordinator.join()
        assert v.numpy() == 300.0
    finally:
        stop.set()
        thread.join()
        for one in held:
            one.close()


def test_two_tasks_at_one_address():
    first = Task(Credentials(TOKEN))
    try:
        with pytest.raises(
            kd.errors.ClusterError, match=r"cannot listen at(.|\n)*free"
        ):
            Endpoint(first.address, Credentials(TOKEN))
    finally:
        first.stop()


def test_an_address_of_another_host():
    with pytest.raises(kd.errors.ClusterError, match="cannot listen at"):
        Endpoint("192.0.2.1:4444", Credentials(TOKEN))
    with pytest.raises(kd.errors.ClusterError, match="is not known here"):
        Endpoint("no-such-host.invalid:4444", Credentials(TOKEN))


def test_a_task_that_ends_is_noticed(task):
    channel = task.channel()
    task.stop()
    start = time.monotonic()
    with pytest.raises(kd.errors.UnavailableError, match="connection has ended"):
        channel.call({"op": "x"})
    assert time.monotonic() - start < 2
    channel.close()


def test_a_job_without_a_token(monkeypatch):
    monkeypatch.delenv("KERAS_DISTRIBUTE_JOB_TOKEN", raising=False)
    monkeypatch.delenv("KERAS_DISTRIBUTE_JOB_TOKEN_FILE", raising=False)
    with pytest.raises(kd.errors.ClusterError, match=r"have a token(.|\n)*secrets"):
        kd.Server({"ps": ["127.0.0.1:0"]}, "ps", 0)


def test_a_server_of_this_process(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTE_JOB_TOKEN", "t" * 40)
    server = kd.Server.create_local_server()
    assert server.target.startswith("grpc://127.0.0.1:")
    assert server.server_def["job_name"] == "worker"
    address = server.target.removeprefix("grpc://")
    for _ in range(2):
        server.start()
        Channel(address, "worker:0", Credentials("t" * 40), 5.0).close()
        server.stop()
        server.join()
    with pytest.raises(kd.errors.ClusterError, match="was not started"):
        kd.Server(server.server_def["cluster"], "worker", 0, start=False).join()
    with pytest.raises(kd.errors.ClusterError, match="a worker or a parameter server"):
        kd.Server({"chief": ["a:1"]}, "chief", 0)


def test_a_server_whose_join_was_interrupted_is_waited_for(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTE_JOB_TOKEN", "t" * 40)
    server = kd.Server.create_local_server()
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            server.join()
    finally:
        signal.signal(signal.SIGINT, before)
    server.start()  # It listens already.
    joined = threading.Thread(target=server.join)
    joined.start()
    joined.join(0.3)
    assert joined.is_alive()
    server.stop()
    joined.join(10)
    assert not joined.is_alive()


@pytest.mark.parametrize("error", [OverflowError("too large"), SystemExit(0)])
def test_a_server_that_ends_by_an_error(monkeypatch, error):
    """Not as after a goodbye: whoever has started it starts it again."""
    monkeypatch.setenv("KERAS_DISTRIBUTE_JOB_TOKEN", "t" * 40)

    def serve(*args):
        raise error

    monkeypatch.setattr(Endpoint, "serve", serve)
    server = kd.Server.create_local_server()
    with pytest.raises(kd.errors.ClusterError, match=r"worker:0 has ended") as raised:
        server.join()
    assert raised.value.__cause__ is error
    server.stop()


def test_the_token_is_nowhere_to_be_seen(cluster):
    """Not in the arguments of processes, which all users can read."""
    token = cluster._token
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                assert token.encode() not in file.read()
        except OSError:
            continue
    assert token not in repr(Credentials(token))
    assert credentials.ENCRYPT

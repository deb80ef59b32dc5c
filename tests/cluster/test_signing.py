"""The token of a job: where it is from, what is none, and what is signed with it."""

import os
import pathlib
import stat

import pytest

from keras_distribute.cluster import signing
from keras_distribute.cluster.signing import Seal, seal_of_job, token_of_job
from keras_distribute.errors import ClusterError
from keras_distribute.launch.job import Job

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def without_a_token(monkeypatch):
    monkeypatch.delenv(signing.TOKEN, raising=False)
    monkeypatch.delenv(signing.TOKEN_FILE, raising=False)


def written(tmp_path, text, mode=0o600):
    path = tmp_path / "job.token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_where_the_token_is_from(tmp_path, monkeypatch):
    assert token_of_job() is None and not seal_of_job().signs
    path = written(tmp_path, f"{TOKEN}\n")
    assert token_of_job(path) == TOKEN
    monkeypatch.setenv(signing.TOKEN_FILE, str(path))
    assert token_of_job() == TOKEN and seal_of_job().signs
    monkeypatch.setenv(signing.TOKEN, "x" * 32)
    assert token_of_job() == "x" * 32 and token_of_job(path) == TOKEN


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666])
def test_a_file_of_everybody_is_refused(tmp_path, mode):
    path = written(tmp_path, TOKEN, mode)
    with pytest.raises(
        ClusterError,
        match=f"(?s)Everybody on this host.*mode {mode:o}.*chmod 600 {path}",
    ):
        token_of_job(path)


@pytest.mark.parametrize(
    "text",
    ["", "too little", "x" * 31, "x" * 5000, "x" * 32 + "\n" + "y" * 32, "\x00" * 40],
)
def test_what_is_no_token(tmp_path, text):
    with pytest.raises(
        ClusterError, match="(?s)32 to 4096 characters, on one line.*token_hex"
    ) as error:
        token_of_job(written(tmp_path, text))
    assert not text or text not in str(error.value)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)  # Which nobody writes to.
    for path in (
        tmp_path / "pipe",
        tmp_path,
        tmp_path / "missing",
        pathlib.Path("/dev/zero"),
    ):
        with pytest.raises(ClusterError, match="token of the job cannot be read"):
            token_of_job(path)


def test_only_the_message_itself_is_opened():
    seal = Seal(TOKEN.encode())
    sealed = seal.sealed("a purpose", b"a message")
    assert seal.opened("a purpose", sealed) == b"a message"
    others = [
        ("another purpose", sealed),
        ("a purpose", sealed[1:]),
        ("a purpose", sealed + b"!"),
    ]
    others += [
        ("a purpose", part)
        for part in (b"", b"a message", sealed[:64], b"\xff" * 70, b" " * 70)
    ]
    assert all(seal.opened(*other) is None for other in others)
    assert Seal(b"another").opened("a purpose", sealed) is None
    assert Seal(None).opened("a purpose", b"anything") == b"anything"
    # What belongs to the purpose, and what to the message, cannot be shifted.
    assert seal.sealed("ab", b"c")[:64] != seal.sealed("a", b"bc")[:64]


def test_each_start_of_a_job_has_a_seal_of_its_own():
    seal = Seal(TOKEN.encode())
    first, second = seal.of(["1", "2"]), seal.of(["1", "3"])
    sealed = first.sealed("a purpose", b"a message")
    assert first.opened("a purpose", sealed) == b"a message"
    assert (
        second.opened("a purpose", sealed) is None
        and seal.opened("a purpose", sealed) is None
    )


def test_why_a_message_is_refused():
    assert signing.why_refused(b'{"host": 1}') == "it is not signed"
    signed = Seal(b"another").sealed("a purpose", b"a message")
    assert signing.why_refused(signed) == "it is not signed with the token of this job"


def test_no_text_shows_the_token():
    assert TOKEN not in repr(seal := Seal(TOKEN.encode())) and "with a token" in repr(
        seal
    )


def test_each_job_of_one_host_has_a_token_of_its_own(monkeypatch):
    monkeypatch.setenv(signing.TOKEN, TOKEN)
    found = [
        Job(["x"], 2, num_processes=count, token="of all hosts")._environment_of(0)
        for count in (2, 2, 4)
    ]
    tokens = [environment[signing.TOKEN] for environment in found]
    assert (
        len(set(tokens)) == 3
        and tokens[2] == "of all hosts"
        and all(len(token) == 64 for token in tokens[:2])
    )


def test_runners_and_their_processes_want_a_folder_of_the_user_alone(
    tmp_path, monkeypatch
):
    import math

    import keras_distribute as kd
    from keras_distribute.launch import folders

    runner = kd.testing.MultiProcessRunner(math.factorial, 1, args=[3])
    folder = pathlib.Path(runner._folder)
    assert (
        stat.S_IMODE(folder.stat().st_mode) == 0o700
        and folder.stat().st_uid == os.geteuid()
    )
    folder.chmod(0o770)
    with runner:
        result = runner._job.wait(60) and runner._job.first_failure()
        assert "in a folder of the user alone" in "".join(result.lines)
        (folder / "result-0").write_bytes(b"a pickle of somebody else")
        with pytest.raises(
            kd.errors.ClusterError,
            match="(?s)folder of the user alone.*mode 770.*TMPDIR",
        ):
            runner.join()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(kd.errors.ClusterError, match="folder of the user alone"):
        folders.check_private(link)

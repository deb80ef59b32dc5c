"""What processes say as bytes: comes back as it was, and runs nobody's code."""

import base64
import collections
import dataclasses
import enum
import json
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_distribute.cluster.messages import from_bytes, to_bytes
from keras_distribute.errors import ClusterError, InputError, StructureTypeError
from tests.attacks import Harm


class Named(collections.namedtuple("Named", "a b")):
    pass


class Kind(enum.Enum):
    FIRST = 1


class Own(Exception):
    def __init__(self, text, *, more):
        super().__init__(text)
        self.more = more


@dataclasses.dataclass
class Thing:
    number: int


VALUES = {
    "numbers": [None, True, 3, -2.5, float("inf"), 1j, 2**200],
    "texts": ["ü", "", "a\nb", b"", b"\x00\xff", pathlib.Path("/a/b")],
    "structures": (
        {"a": [1, (2,)], 3: {"x"}, (1, 2): frozenset([3])},
        collections.OrderedDict(b=1, a=2),
    ),
    "named": Named(1, [Kind.FIRST, np.float32(2)]),
}
ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.zeros((0, 3), "float16"),
    np.array("text"),
    np.array(["2020-01-01"], "M8[s]"),
    np.ones(3, jnp.bfloat16),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.random.RandomState(3).get_state()[1],
]
ERRORS = [
    KeyError("x"),
    FileNotFoundError(2, "No such file", "/nope"),
    InputError("what", fix="this"),
    StopIteration(3),
]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_what_is_said_is_heard(name, signed):
    heard = from_bytes(to_bytes(VALUES[name], signed=signed), signed=signed)
    assert (
        heard == VALUES[name]
        and repr(heard) == repr(VALUES[name])
        and type(heard) is type(VALUES[name])
    )


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays(array):
    heard = from_bytes(to_bytes({"a": array}, signed=False), signed=False)["a"]
    assert (
        type(heard) is np.ndarray
        and heard.dtype == array.dtype
        and heard.shape == array.shape
    )
    np.testing.assert_array_equal(heard, array)
    assert heard.flags.writeable


def test_arrays_of_jax_stay_so():
    heard = from_bytes(to_bytes(jnp.ones(3, "bfloat16"), signed=False), signed=False)
    assert (
        isinstance(heard, jax.Array)
        and heard.dtype == "bfloat16"
        and heard.tolist() == [1, 1, 1]
    )


@pytest.mark.parametrize(
    "error", [*ERRORS, Own("text", more=[1])], ids=lambda error: type(error).__name__
)
def test_exceptions(error):
    heard = from_bytes(to_bytes(error, signed=False), signed=False)
    assert (
        type(heard) is type(error)
        and str(heard) == str(error)
        and heard.args == error.args
    )
    assert vars(heard) == vars(error) and getattr(heard, "filename", None) == getattr(
        error, "filename", None
    )


def test_an_exception_that_only_one_process_knows_is_told():
    class Local(Exception):
        pass

    for error in (Local("text"), KeyError(Thing(3))):
        heard = from_bytes(to_bytes(error, signed=False), signed=False)
        assert type(heard) is ClusterError
        assert f"{type(error).__qualname__} in another process: {error}" in str(heard)


def test_other_objects_are_signed_or_refused():
    assert from_bytes(to_bytes([Thing(3)], signed=True), signed=True) == [Thing(3)]
    for value in (
        Thing(3),
        [object()],
        np.array([Thing(3)]),
        collections.defaultdict(list),
    ):
        with pytest.raises(
            StructureTypeError,
            match="(?s)is plain data, where the job has no token.*JOB_TOKEN=",
        ):
            to_bytes(value, signed=False)


def test_a_structure_without_end_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(
        StructureTypeError,
        match="(?s)is plain data, which neither contains itself.*Fix",
    ):
        to_bytes(endless, signed=False)


def strange(harm):
    """Messages that nobody of ours has written."""
    pickled = base64.b64encode(harm).decode()
    forms = [
        {"object": pickled},
        {"array": "missing"},
        {"named": ["os", "system", {"tuple": ["true"]}]},
        {"named": ["builtins", "int", [3]]},
        {"named": [__name__, "Thing", [3]]},
        {"member": [__name__, "Kind", "SECOND"]},
        {"member": ["os", "system", "x"]},
        {"path": ["/"]},
        {"a": 1, "b": 2},
        {},
        {"set": [[1]]},
        {"error": 3},
    ]
    parts = [
        ["O", [1], "AAAAAAAAAAA="],
        ["f4", [10**12], "AAAA"],
        ["f4", [-1], "AAAA"],
        ["f4", 3, ""],
        ["no", [], ""],
    ]
    texts = [json.dumps([form, {}]) for form in forms]
    texts += [json.dumps([{"array": "a"}, {"a": part}]) for part in parts]
    texts += [
        "[" * 10**5,
        "9" * 10**5,
        "",
        "3",
        "[]",
        "[1, 2]",
        "nonsense",
        '[{"array": "a"}, []]',
    ]
    return [harm, b"\xff\xfe", *(text.encode() for text in texts)]


def test_what_strangers_have_written_runs_no_code_and_is_one_error(tmp_path):
    harm = pickle.dumps(Harm(str(tmp_path / "harm")))
    for message in strange(harm):
        with pytest.raises(
            ClusterError, match="A message between processes cannot be read"
        ):
            from_bytes(message, signed=False)
    for module, name in (
        ("os", "_exit"),
        ("builtins", "SystemExit.x"),
        ("this", "Zen"),
        ("subprocess", "Popen"),
    ):
        heard = from_bytes(
            json.dumps(
                [{"error": [module, name, "text", [1], {"dict": []}]}, {}]
            ).encode(),
            signed=False,
        )
        assert type(heard) is ClusterError
    assert not (tmp_path / "harm").exists()

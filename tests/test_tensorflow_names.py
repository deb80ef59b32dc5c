"""The page of TensorFlow's names: it has every one, and what it says of each is true."""

import dataclasses
import enum
import inspect
import pathlib
import re
import types

import keras
import pytest

import keras_distribute as kd
from keras_distribute import errors

tf = pytest.importorskip("tensorflow")

PAGE = (
    pathlib.Path(__file__).parent.parent / "docs/moving/tf-distribute-names.md"
).read_text()
TABLES, BESIDE = PAGE.split("## Beside tf.distribute")
ROW = re.compile(
    r"^\| (`[^|]*) \| (same|different|absent) \| ?([^|]*) ?\|$", re.MULTILINE
)
BASES = (
    tf.distribute.Strategy,
    tf.distribute.CrossDeviceOps,
    tf.distribute.cluster_resolver.ClusterResolver,
)


def rows():
    """Each name of the page, without `tf.distribute.`, with status and remark."""
    found = {}
    for section in re.split(r"^## ", TABLES, flags=re.MULTILINE)[1:]:
        module, body = section.split("\n", 1)
        prefix = module.removeprefix("tf.distribute").lstrip(".")
        for names, status, remark in ROW.findall(body):
            owner, colon, members = names.partition(":")
            for name in re.findall(r"`(\w+)`", members if colon else names):
                parts = [prefix, owner.strip("`"), name] if colon else [prefix, name]
                full = ".".join(part for part in parts if part)
                assert full not in found, f"{full} is on the page twice"
                found[full] = (status, remark.strip())
    return found


ROWS = rows()


def is_public(name):
    return not name.startswith("_")


def members_of(cls):
    """The public members of a class of TensorFlow, but for those of the base that has a
    section of its own.
    """
    inherited = {
        name
        for base in BASES
        if issubclass(cls, base) and cls is not base
        for name in dir(base)
    }
    common = (
        set(dir(tuple))
        | set(dir(enum.Enum))
        | {"name", "value"}
        | (inherited - set(vars(cls)))
    )
    return [
        name
        for name in dir(cls)
        if is_public(name)
        and (name not in common or name in getattr(cls, "__members__", ()))
    ]


def tensorflow_names():
    """Everything public under `tf.distribute`."""
    modules = [("", tf.distribute)]
    for prefix, module in modules:
        for name in filter(is_public, dir(module)):
            thing = getattr(module, name)
            if isinstance(thing, types.ModuleType):
                modules.append((f"{prefix}{name}.", thing))
                continue
            yield f"{prefix}{name}"
            if (
                inspect.isclass(thing)
                and ROWS.get(f"{prefix}{name}", ("absent",))[0] != "absent"
            ):
                yield from (f"{prefix}{name}.{member}" for member in members_of(thing))


def exists(name, root=kd):
    """Whether the package has a dotted name, an instance's attributes included."""
    for part in name.split("."):
        fields = (
            {field.name for field in dataclasses.fields(root)}
            if dataclasses.is_dataclass(root)
            else set()
        )
        if part in fields:
            return True
        try:
            if inspect.ismodule(root):  # Some names are imported when they are used.
                getattr(root, part)
            root = inspect.getattr_static(root, part)
        except AttributeError:
            return False
    return True


def test_the_page_has_every_name_of_tensorflow():
    missing = sorted(set(tensorflow_names()) - set(ROWS))
    assert missing == []


def test_the_page_has_no_name_that_tensorflow_has_not():
    known = set(tensorflow_names())
    assert (
        sorted(
            name
            for name in ROWS
            if name not in known and not exists(name, tf.distribute)
        )
        == []
    )


@pytest.mark.parametrize("name", ROWS)
def test_what_the_page_says_is_true(name):
    status, remark = ROWS[name]
    assert exists(name) == (status != "absent")
    assert status == "same" or remark, (
        "a difference is named, and an absence has a reason"
    )
    for other in re.findall(r"`(kd\.[\w.]+)", remark):
        assert exists(other.removeprefix("kd.")), other


def test_names_beside_exist():
    named = re.findall(r"`(kd|keras)\.([\w.]+)`", BESIDE)
    assert len(named) > 15
    assert [
        name
        for module, name in named
        if not exists(name, kd if module == "kd" else keras)
    ] == []


def test_a_reduction_of_tensorflow_is_shown_as_such():
    with pytest.raises(errors.StructureTypeError, match="SUM.* of tensorflow"):
        kd.ReduceOp.parse(tf.distribute.ReduceOp.SUM)

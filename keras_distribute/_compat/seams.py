"""Where a private name of Keras or JAX has moved: an error at the import, which names
it.

Everything private is looked up when the package is imported: what modules of `_compat`
import, what they replace (`Replacements`), what has one of several names (`find`), and
what is used of an object only later (`check`). So a version that has moved a seam is
refused before anything is computed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pathlib
import pkgutil
import traceback
from collections.abc import Callable, Generator
from typing import Any

from keras_distribute._compat import versions
from keras_distribute.errors import BackendError

_HERE = pathlib.Path(__file__).parent


def moved(what: str) -> BackendError:
    """The error for a private name that is not where it was."""
    return BackendError(
        f"keras_distribute builds on parts of Keras and JAX that have moved: {what}.",
        received=f"{versions.installed()}; the newest that were tested are "
        f"{versions.newest_tested()}.",
        fix=f"pip install {versions.requirements()}, or a newer keras-distribute.",
    )


@contextlib.contextmanager
def loaded() -> Generator[None]:
    """Around the import of `_compat` and all that it does to Keras: what is missing
    there has moved.

    Raises:
        BackendError: For an `ImportError`, or an `AttributeError`, that comes from a
            module of `_compat`.
    """
    try:
        yield
    except BackendError:
        raise
    except (ImportError, AttributeError) as error:
        ours = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith("<frozen importlib")
        ]
        if not ours or pathlib.Path(ours[-1].filename).parent != _HERE:
            raise
        module = pathlib.Path(ours[-1].filename).stem
        raise moved(f"{error} (_compat.{module})") from error


def import_all() -> None:
    """Imports all of `_compat`, also what is used only later."""
    for module in pkgutil.iter_modules([str(_HERE)]):
        importlib.import_module(f"keras_distribute._compat.{module.name}")


def find(*places: str) -> Any:
    """The module, or the name in a module, that is at the first of some places; newer
    versions' come first.

    Args:
        places: As in `"keras.src.trainers.trainer:BaseTrainer"`.
    """
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            found = importlib.import_module(module)
            return getattr(found, name) if name else found
    raise moved(f"there is no {' and no '.join(places)}")


def check(owner: Any, *names: str) -> None:
    """Makes sure that objects of a class, or a module, have some private names.

    Raises:
        BackendError: For the first that no class attribute is called, and that no
            method ever mentions.
    """
    for name in names:
        if not hasattr(owner, name) and not _mentions(owner, name):
            raise moved(f"{_name_of(owner)} has no {name}")


def _name_of(owner: Any) -> str:
    """Of a class or a module."""
    is_class = isinstance(owner, type)
    return f"{owner.__module__}.{owner.__name__}" if is_class else owner.__name__


def _mentions(owner: Any, name: str) -> bool:
    """Whether a method of a class sets or reads such an attribute, as `__init__`."""
    methods = [
        value.fget if isinstance(value, property) else value
        for each in getattr(owner, "__mro__", ())
        for value in vars(each).values()
    ]
    functions = [inspect.unwrap(each) for each in methods if callable(each)]
    codes = [getattr(function, "__code__", None) for function in functions]
    return any(code is not None and name in code.co_names for code in codes)


class Replacements:
    """Functions and methods of Keras that are replaced, and what they were."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def then(self, undo: Callable[[], None]) -> None:
        """Has `undo` called when all is put back."""
        self._undo.append(undo)

    def replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Puts `new` in the place of `owner.name`.

        Raises:
            BackendError: Where the original is gone, or takes parameters that its
                replacement does not know.
        """
        original = getattr(owner, name, None)
        if original is None:
            raise moved(f"{_name_of(owner)} has no {name}")
        unknown = _parameters(original) - _parameters(new)
        if unknown and not _takes_anything(new):
            what = ", ".join(sorted(unknown))
            raise moved(f"{_name_of(owner)}.{name} takes {what}")
        replacement: Any = functools.wraps(original)(new)
        # Keras reads it to serialize layers, in a way that ignores `__wrapped__`.
        replacement.__signature__ = inspect.signature(original)
        self.assign(owner, name, replacement)

    def assign(self, owner: Any, name: str, new: Any) -> None:
        """Puts anything in the place of `owner.name`."""
        if not hasattr(owner, name):
            raise moved(f"{_name_of(owner)} has no {name}")
        own = vars(owner)
        if name in own or name == "__bases__":
            before = own[name] if name in own else getattr(owner, name)
            self.then(functools.partial(setattr, owner, name, before))
        else:
            self.then(functools.partial(delattr, owner, name))
        setattr(owner, name, new)

    def undo(self) -> None:
        """Leaves Keras as it was."""
        while self._undo:
            self._undo.pop()()


class _Changes:
    """What the package has changed outside of itself, in this process.

    Attributes:
        replaced: In Keras.
        loaded_libtpu: Whether it has loaded libtpu, without its profiler.
    """

    def __init__(self) -> None:
        self.replaced = Replacements()
        self.loaded_libtpu = False


changes = _Changes()


def _parameters(function: Any) -> set[str]:
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _takes_anything(function: Any) -> bool:
    return any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()
    )

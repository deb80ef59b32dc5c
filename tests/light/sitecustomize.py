"""What Python runs first in the processes that tests start: the libraries that
`TESTS_WITHOUT` names seem not to be installed, `requests` is read when it is used, of
modules that Keras and JAX read and nobody here uses only the names are there, garbage
is looked for less often, and XLA gets the flags of `TESTS_XLA_FLAGS`
(`light_processes` in `conftest.py`).
"""

import gc
import os
import sys
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

KERNEL = "ipykernel_launcher" in sys.orig_argv

for name in os.environ.get("TESTS_WITHOUT", "").split():
    if not (KERNEL and name == "IPython"):
        sys.modules[name] = None  # type: ignore[assignment]

# Modules that stay empty but for these names: JAX's attention on TPUs; its solvers of
# sparse systems, for which it reads much of SciPy; NumPy's compiler of Fortran, which
# SciPy reads with all that NumPy has. Together a fifth of a start.
EMPTY: dict[str, list[str]] = {
    "jax.experimental.pallas.ops.tpu.splash_attention": [
        "splash_attention_kernel",
        "splash_attention_mask",
    ],
    "jax.experimental.sparse.linalg": [],
    "numpy.f2py": [],
}


class Empty:
    """Finds and loads the modules of `EMPTY`."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls) if name in EMPTY else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        vars(module).update(dict.fromkeys(EMPTY[module.__name__]))


sys.meta_path.insert(0, Empty)  # type: ignore[arg-type]


def read_when_used(name: str) -> None:
    """Puts a module in the place of this one that reads it for its first attribute:
    `LazyLoader` has an `import` read it already.
    """
    stand_in = types.ModuleType(name)
    stand_in.__spec__ = find_spec(name)

    def attribute_of_the_real_one(attribute):
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(import_module(name), attribute)

    stand_in.__getattr__ = attribute_of_the_real_one  # type: ignore[method-assign]
    if stand_in.__spec__:
        sys.modules[name] = stand_in


read_when_used("requests")

gc.set_threshold(100_000, 20, 20)  # A sixth of a start went into it.

if flags := os.environ.get("TESTS_XLA_FLAGS"):
    own = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = own if flags in own else f"{own} {flags}".strip()

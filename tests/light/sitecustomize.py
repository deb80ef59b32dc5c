"""What Python runs first in the processes that tests start: the libraries that
`TESTS_WITHOUT` names seem not to be installed, `requests` is read when it is used, of
JAX's attention on TPUs only the names are there, garbage is looked for less often, and
XLA gets the flags of `TESTS_XLA_FLAGS` (`light_processes` in `conftest.py`).
"""

import gc
import os
import sys
import types
from importlib.util import LazyLoader, find_spec, module_from_spec

for name in os.environ.get("TESTS_WITHOUT", "").split():
    sys.modules[name] = None  # type: ignore[assignment]

if (spec := find_spec("requests")) and spec.loader:
    spec.loader = LazyLoader(spec.loader)
    sys.modules["requests"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["requests"])

ATTENTION = types.ModuleType("jax.experimental.pallas.ops.tpu.splash_attention")
vars(ATTENTION).update(splash_attention_kernel=None, splash_attention_mask=None)
sys.modules[ATTENTION.__name__] = ATTENTION

gc.set_threshold(100_000, 20, 20)  # A sixth of a start went into it.

if flags := os.environ.get("TESTS_XLA_FLAGS"):
    own = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = own if flags in own else f"{own} {flags}".strip()

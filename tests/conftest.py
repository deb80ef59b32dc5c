"""Eight virtual CPU devices for every test, set up before JAX starts; what makes
compiling cheap; and which tests run, in which order (`selection`).
"""

import functools
import gc
import os
import pathlib
import sys
import zlib
from importlib import metadata

from packaging.version import Version

XLA_FLAGS = ""
if not os.environ.get("EVERY_CASE"):
    # Compiling is two thirds of the time of these tests, and XLA's optimizations are
    # four fifths of compiling: 0.2 s instead of 1 s for the step of a small model. The
    # programs are the same, before XLA. With EVERY_CASE it compiles as for users.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if Version(metadata.version("jaxlib")) < Version("0.11"):  # Later ones lack it.
        # Nor are programs divided to be compiled by several threads: a tenth more.
        XLA_FLAGS = (
            "--xla_cpu_use_fusion_emitters=false"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
        own = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{own} {XLA_FLAGS}".strip()
    # Programs do not say which lines of Python made them: a twentieth less to lower.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import keras_distribute as kd

kd.config.set_cpu_devices(8)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from keras_distribute.training.steps import packed_state
from tests import selection

try:
    from jax._src.interpreters import mlir
except ImportError:
    mlir = None  # JAX calls it otherwise now: tests take longer.

LIGHT = str(pathlib.Path(__file__).with_name("light"))


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=int,
        choices=range(selection.PARTS + 1),
        help="of the tests that take long, the part to run; 0 for all. Another each"
        " day if all tests are asked for, and all of them if not.",
    )


def pytest_configure(config):
    """Files run in the order of `pytest_collection_modifyitems`; pytest-xdist would
    begin with those of the most tests. Its workers are given the part of the long tests
    that was chosen here.
    """
    if config.option.part is None:
        config.option.part = selection.part_of_today(config)
    os.environ["TESTS_PROCESS"] = str(os.getpid())
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_report_header(config):
    part = config.option.part
    return f"of the long tests: part {part} of {selection.PARTS}" if part else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    items[:] = selection.in_order(items)
    left_out = selection.left_out(items, config.option.part)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """What has been imported stays: whoever looks for garbage need not look there; and
    it is looked for less often, which is a twelfth of the time of training.
    """
    gc.collect()
    gc.freeze()
    if not os.environ.get("EVERY_CASE"):
        gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def compiled_programs_are_kept(tmp_path_factory):
    """Programs are compiled once for all tests and the processes that they start: JAX's
    cache on disk, shared by the workers of pytest-xdist. One that the environment names
    stays, for the next run.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    settings = {
        "jax_compilation_cache_dir": str(base / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        before = {name: getattr(jax.config, name) for name in settings}
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
        for name, value in before.items():
            jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def light_processes():
    """The processes that tests start do without libraries that Keras imports wherever
    they are installed, which is a third of the time of a start; what else `light` has
    is another; they keep what Python has compiled, a fifth; and XLA optimizes little in
    them too, whatever becomes of `XLA_FLAGS` on the way.
    """
    if os.environ.get("EVERY_CASE"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_WITHOUT", "sklearn matplotlib IPython")
        patch.setenv("TESTS_XLA_FLAGS", XLA_FLAGS)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPATH", LIGHT, prepend=os.pathsep)
        patch.setattr(sys, "path", [*sys.path, LIGHT])  # What a runner hands on.
        yield


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back():
    """Programs and models end with the file that made them: a process would hold some 5
    GB of them in the end.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def programs_share_a_context():
    """JAX lowers each program in a context of MLIR of its own, which takes a fifth of
    the time of a small one: here those of a file have one. Of the programs it holds
    what they are made of, not themselves.
    """
    if os.environ.get("EVERY_CASE") or not hasattr(mlir, "make_ir_context"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))
        yield


@pytest.fixture(autouse=True)
def half_of_the_tests_carry_weights_as_on_accelerators(request, monkeypatch):
    """On CPUs a few small weights are one long weight to the optimizer, elsewhere it
    takes many: chosen by the name of a test, so that each is tested all over.
    """
    if zlib.crc32(request.node.name.encode()) % 2:
        for what in ("WEIGHTS", "METRICS"):
            name = f"MANY_{what}_ON_CPUS"
            monkeypatch.setattr(packed_state, name, packed_state.MANY)


@pytest.fixture
def compilations():
    """A list that grows by one for each XLA compilation."""
    seen = []

    def listen(name, *args, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)

"""Eight virtual CPU devices for every test, set up before JAX starts; what makes
compiling cheap; which cases of long tests run; and which files begin.
"""

import functools
import gc
import math
import os
import pathlib
import sys
import zlib
from collections import defaultdict
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

try:
    from jax._src.interpreters import mlir
except ImportError:
    mlir = None  # JAX calls it otherwise now: tests take longer.

LIGHT = str(pathlib.Path(__file__).with_name("light"))

# Files of few tests that take long: begun last, they would be the tail of a run.
LONGEST = [
    "programs/test_programs.py",
    "engines/test_ray_train.py",
    "engines/test_ray_servers.py",
    "engines/test_slurm.py",
    "engines/test_mpi.py",
    "parameter_server/test_kill_matrix.py",
    "checkpoint/test_killed.py",
    "checkpoint/test_preemption.py",
    "processes/test_launch.py",
    "processes/test_liveness.py",
    "compat/test_keras_suites.py",
    "exactness/test_peers.py",
    "exactness/test_property.py",
    "exactness/test_saving.py",
    "exactness/test_edges.py",
    "dry_run/test_dry_run.py",
    "batch_size/test_find_batch_size.py",
    "checkpoint/test_backup.py",
    "test_ragged_run.py",
    "test_interruptions.py",
    "test_tutorials.py",
    "test_docs.py",
]


def pytest_configure(config):
    """Files run in the order of `pytest_collection_modifyitems`; pytest-xdist would
    begin with those of the most tests.
    """
    os.environ["TESTS_PROCESS"] = str(os.getpid())
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Of the cases of each test that is marked `sampled(n)` one in `n` runs, always the
    same (`sample`); with `EVERY_CASE` all. The longest files come first.
    """
    here = pathlib.Path(__file__).parent
    order = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if os.environ.get("EVERY_CASE"):
        return
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left_out = set()
    for (_, n), of_one_test in cases.items():
        chosen = sample(of_one_test, math.ceil(len(of_one_test) / n))
        left_out.update(set(of_one_test).difference(chosen))
    if left_out:
        config.hook.pytest_deselected(
            items=[item for item in items if item in left_out]
        )
        items[:] = [item for item in items if item not in left_out]


def sample(cases, number):
    """So many of the cases, chosen so that as many as possible of the values of each
    parameter occur: one after the other, that which adds the most values to those that
    have been chosen.
    """
    values = {case: values_of(case) for case in cases}
    left = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    seen, chosen = set(), []
    for _ in range(number):
        best = max(left, key=lambda case: len(values[case] - seen))
        left.remove(best)
        chosen.append(best)
        seen |= values[best]
    return chosen


def values_of(case):
    """Each parameter of a case, with its value, or with what tells it from others."""
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    return {(name, told_apart(value)) for name, value in parameters.items()}


def told_apart(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


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

"""Pytest plugin that runs Keras's own tests under a strategy scope and reports what
they did.

It owns what happens inside the child process: the scope around every test, the watch on
the steps, and the report, one JSON object a line. `suites` starts the child and reads
the report. Without a strategy the package is not even imported.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import sys
import time
import types
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.sparse import JAXSparse

NUM_REPLICAS = 2
KINDS = ("train", "test", "predict")
SCOPES = ("none", "imported", "mirrored")
"""Keras alone; Keras with the package imported but no strategy; every test in the scope
of `NUM_REPLICAS` replicas.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keras_distribute compatibility")
    group.addoption(
        "--scope", choices=SCOPES, default="none", help="what surrounds every test"
    )
    group.addoption(
        "--report", required=True, help="the file that gets a JSON object for each test"
    )
    group.addoption(
        "--one-in",
        type=int,
        default=1,
        help="of so many tests one runs, always the same",
    )


def pytest_configure(config: pytest.Config) -> None:
    sys.modules["conftest"] = keras_conftest()
    config.addinivalue_line("markers", "requires_trainable_backend: Keras's own mark")
    watch = Watch()
    scope = config.getoption("--scope")
    if scope == "none":
        os.environ["NPROC"] = (
            "32"  # Else XLA has fewer threads than Keras's own data parallelism blocks.
        )
        jax.config.update("jax_num_cpu_devices", NUM_REPLICAS)
    else:
        import keras_distribute as kd

        kd.config.set_cpu_devices(NUM_REPLICAS)
        watch.install()
        if scope == "mirrored":
            enter_after_setup(watch)
    config.pluginmanager.register(
        Report(Path(str(config.getoption("--report"))), watch)
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    one_in = int(config.getoption("--one-in"))
    items[:] = [item for item in items if in_sample(identify(item), one_in)]


def in_sample(test: str, one_in: int) -> bool:
    """Whether this test is one that runs, or opens a distribution of Keras's own."""
    return "_distributed" in test or zlib.crc32(test.encode()) % one_in == 0


def keras_conftest() -> types.ModuleType:
    """Stands in for the `conftest` of Keras's repository: a test imports from it, and
    the wheel leaves it out.
    """
    module = types.ModuleType("conftest")
    vars(module)["skip_if_backend"] = lambda name, reason: pytest.mark.skipif(
        name == "jax", reason=reason
    )
    return module


def enter_after_setup(watch: Watch) -> None:
    """Has every test of Keras's run in a scope: entered when `setUp` has cleared
    Keras's session, left at the end.
    """
    from keras.src.testing import TestCase

    import keras_distribute as kd

    original = TestCase.setUp

    @functools.wraps(original)
    def set_up(self: Any) -> None:
        original(self)
        if kd.has_strategy():  # A test of Keras's that calls it once more.
            return
        strategy = kd.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)])
        self.enterContext(strategy.scope())
        self.addCleanup(lambda: watch.count("in scope", kd.get_strategy() is strategy))

    TestCase.setUp = set_up


class Watch:
    """Counts, for the test under way, what its variables, batches and steps really
    lived on.

    - `in scope`: 1 if the test ended in the scope that it was put in.
    - `variable`: variables created on all replicas.
    - `train compiled`, `test eager`, ...: executions of a step function whose whole
      state, before and after, is on all replicas; with `elsewhere` appended, those
      where some of it is not. Models without state are not counted.
    - `batch split`: arrays of a batch whose rows divide over the replicas, and of which
      each replica holds its share and no more; `batch not split`: those that divide and
      are not. `batch uneven`: rows that do not divide.
    - `output split`: likewise, arrays that a compiled step of `predict` returned: the
      replicas computed their shares.
    """

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def count(self, name: str, happened: bool = True) -> None:
        """Adds one to a count, if `happened`."""
        if happened:
            self._counts[name] += 1

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        counts, self._counts = dict(self._counts), collections.Counter()
        return counts

    def install(self) -> None:
        """Wraps what makes a trainer's step functions, what puts a batch on devices,
        and what makes variables.
        """
        from keras import Variable
        from keras.src.backend.jax import trainer

        from keras_distribute.training import batches

        # Keras 3.16 calls it `Trainer`.
        JAXTrainer = getattr(trainer, "JAXTrainer", None) or trainer.Trainer
        for kind in KINDS:
            name = f"make_{kind}_function"
            setattr(
                JAXTrainer, name, self._watched_maker(kind, getattr(JAXTrainer, name))
            )
        batches.place = self._watched_place(batches.place)
        Variable.__init__ = self._watched_init(Variable.__init__)

    def _watched_maker(self, kind: str, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def watched(trainer: Any, force: bool = False) -> Any:
            result = make(trainer, force)
            function = getattr(trainer, f"{kind}_function")
            if not hasattr(function, "unwatched"):
                setattr(
                    trainer,
                    f"{kind}_function",
                    self._watched_step(kind, trainer, function),
                )
            return result

        return watched

    def _watched_step(
        self, kind: str, trainer: Any, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        mode = (
            "compiled" if trainer.jit_compile and not trainer.run_eagerly else "eager"
        )

        def step(state: Any, iterator: Any) -> Any:
            has_state = bool(jax.tree.leaves(state))
            before = on_all_replicas(state)
            outputs, state = function(state, iterator)
            if has_state:
                everywhere = before and on_all_replicas(state)
                self.count(f"{kind} {mode}" + ("" if everywhere else " elsewhere"))
            if (
                f"{kind} {mode}" == "predict compiled"
                and trainer.steps_per_execution == 1
            ):
                for output in leaves_of(outputs):
                    self.count(f"output {split_of(output.shape, output)}")
            return outputs, state

        step.unwatched = function  # type: ignore[attr-defined]
        return step

    def _watched_place(self, place: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(place)
        def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = place(batch, *args, **kwargs)
            if result is batch:  # Placed ahead of its step.
                return result
            for given, placed in zip(
                leaves_of(batch), leaves_of(result[0]), strict=True
            ):
                self.count(f"batch {split_of(given.shape, placed)}")
            return result

        return watched

    def _watched_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def watched(variable: Any, *args: Any, **kwargs: Any) -> None:
            init(variable, *args, **kwargs)
            self.count(
                "variable",
                variable._value is not None and on_all_replicas(variable._value),
            )

        return watched


def on_all_replicas(state: Any) -> bool:
    """Whether all arrays of `state`, of Keras's groups or as the package carries it,
    are on all replicas.
    """
    leaves = jax.tree.leaves(state)
    return all(
        isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == NUM_REPLICAS
        for leaf in leaves
    )


def leaves_of(structure: Any) -> list[Any]:
    """The arrays of a structure, sparse ones whole."""
    return jax.tree.leaves(structure, is_leaf=lambda leaf: isinstance(leaf, JAXSparse))


def split_of(shape: tuple[int, ...], array: Any) -> str:
    """How an array of this shape is spread over the replicas, by its shards."""
    if isinstance(array, JAXSparse):
        return "sparse"
    if not shape or shape[0] % NUM_REPLICAS:
        return "uneven"
    share = (shape[0] // NUM_REPLICAS, *shape[1:])
    held = {
        (shard.device, shard.index[0].start or 0)
        for shard in array.addressable_shards
        if shard.data.shape == share
    }
    return (
        "split"
        if len(held) == len({start for _, start in held}) == NUM_REPLICAS
        else "not split"
    )


class Report:
    """Writes a line when a test starts and one when it has ended, so that a killed
    child still tells where it was.
    """

    def __init__(self, path: Path, watch: Watch) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._watch = watch
        self._phases: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        test, started = identify(item), time.perf_counter()
        self._phases.clear()
        self._watch.take()
        self._write(test=test)
        result = yield
        outcome, error = summarize(self._phases)
        seconds = round(time.perf_counter() - started, 3)
        self._write(
            test=test,
            outcome=outcome,
            error=error,
            seconds=seconds,
            counts=self._watch.take(),
        )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(
                test=f"{report.nodeid} (collection)",
                outcome="failed",
                error=report.longreprtext,
            )

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")


def identify(item: pytest.Item) -> str:
    """`module::Class::test`: the same wherever Keras is installed."""
    assert isinstance(item, pytest.Function) and item.module is not None
    names = [
        node.name
        for node in item.listchain()
        if isinstance(node, pytest.Class | pytest.Function)
    ]
    return "::".join([item.module.__name__, *names])


def summarize(phases: list[pytest.TestReport]) -> tuple[str, str]:
    """The outcome of a test from its set-up, call and tear-down, and the text of its
    error or the reason to skip.
    """
    for outcome in ("failed", "skipped"):
        for report in phases:
            if report.outcome == outcome:
                reason = (
                    report.longrepr[2]
                    if isinstance(report.longrepr, tuple)
                    else report.longreprtext
                )
                return outcome, reason
    return "passed", ""

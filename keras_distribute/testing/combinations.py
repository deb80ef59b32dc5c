"""Tests that run under many strategies: named strategies, and a pytest decorator.

Source: the names of TensorFlow's `tf.__internal__.distribute.combinations` and
`strategy_combinations`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute.errors import DeviceError, StructureTypeError
from keras_distribute.launch.functions import run_in_processes
from keras_distribute.launch.modules import module_of
from keras_distribute.strategies import default
from keras_distribute.strategies.base import Strategy
from keras_distribute.strategies.mirrored import MirroredStrategy
from keras_distribute.strategies.multi_worker import MultiWorkerMirroredStrategy
from keras_distribute.strategies.one_device import OneDeviceStrategy

_TEST_SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class NamedStrategy:
    """A strategy that a test may run under, created when the test begins.

    Args:
        name: The name that pytest shows.
        create: Makes the strategy; picklable, for several processes.
        num_devices: The CPU devices that it needs, in each process.
        num_processes: How many processes the test runs in.
    """

    name: str
    create: Callable[[], Strategy] = dataclasses.field(repr=False)
    num_devices: int = 1
    num_processes: int = 1

    def __post_init__(self) -> None:
        checks.text("name", self.name)
        what, fix = "A strategy is made by a function.", "kd.MirroredStrategy"
        checks.function("create", self.create, what, fix)
        checks.count("num_devices", self.num_devices, 1)
        checks.count("num_processes", self.num_processes, 1)

    def __str__(self) -> str:
        return self.name


def _cpus(*numbers: int) -> list[str]:
    return [f"cpu:{number}" for number in numbers]


def _named(name: str, *devices: int) -> NamedStrategy:
    create = functools.partial(MirroredStrategy, _cpus(*devices))
    return NamedStrategy(name, create, max(devices) + 1)


def _over_processes(num_processes: int, num_devices: int) -> NamedStrategy:
    name = f"multi_worker_mirrored_{num_processes}x{num_devices}_cpu"
    return NamedStrategy(name, MultiWorkerMirroredStrategy, num_devices, num_processes)


default_strategy = NamedStrategy("default_strategy", default.default_strategy)
one_device_strategy = NamedStrategy(
    "one_device_strategy", lambda: OneDeviceStrategy("cpu:0")
)
mirrored_strategy_with_one_cpu = _named("mirrored_strategy_with_one_cpu", 0)
mirrored_strategy_with_two_cpus = _named("mirrored_strategy_with_two_cpus", 0, 1)
mirrored_strategy_with_cpu_1_and_2 = _named("mirrored_strategy_with_cpu_1_and_2", 1, 2)
mirrored_strategy_with_eight_cpus = _named(
    "mirrored_strategy_with_eight_cpus", *range(8)
)
multi_worker_mirrored_2x1_cpu = _over_processes(2, 1)
multi_worker_mirrored_2x2_cpu = _over_processes(2, 2)
multi_worker_mirrored_4x1_cpu = _over_processes(4, 1)

strategies_minus_multi_worker = (
    default_strategy,
    one_device_strategy,
    mirrored_strategy_with_one_cpu,
    mirrored_strategy_with_two_cpus,
    mirrored_strategy_with_cpu_1_and_2,
)
multi_worker_strategies = (multi_worker_mirrored_2x1_cpu, multi_worker_mirrored_2x2_cpu)
all_strategies = strategies_minus_multi_worker + multi_worker_strategies


def cpu_devices(num_devices: int) -> list[str]:
    """The names of virtual CPU devices, for a test that needs them.

    Args:
        num_devices: The number of devices.

    Raises:
        DeviceError: Where JAX has started with fewer. Call `kd.config.set_cpu_devices`
            in `conftest.py`.

    Example:
        >>> import keras_distribute as kd
        >>> kd.testing.cpu_devices(2)
        ['cpu:0', 'cpu:1']
    """
    checks.count("num_devices", num_devices, 1)
    available = jax.local_device_count("cpu")
    if available < num_devices:
        raise DeviceError(
            f"The test needs {num_devices} CPU devices.",
            received=f"{available}.",
            fix=f"kd.config.set_cpu_devices({num_devices}) in conftest.py, before JAX "
            "is used.",
        )
    return _cpus(*range(num_devices))


def combine(
    **choices: Sequence[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: pytest runs the test with each combination of these arguments.

    A `NamedStrategy` is created, and given to the test as a strategy. Under one of
    several processes the test function runs in each of them, without pytest, and fails
    where one of them raises an error. Fixtures then have to be picklable values, such
    as `tmp_path`. Needs `pip install pytest`.

    Args:
        **choices: For each argument, its values.

    Returns:
        The decorator, for a function at the top of a module.

    Raises:
        StructureTypeError: For the name of no argument of the function.

    Example:
        >>> import keras_distribute as kd
        >>> from keras_distribute.testing import combinations
        >>> strategies = combinations.strategies_minus_multi_worker
        >>> @combinations.combine(strategy=strategies, value=[1.0, 2.0])
        ... def test_sum(strategy, value):
        ...     values = strategy.run(lambda: np.float32(value))
        ...     total = strategy.reduce("SUM", values, axis=None)
        ...     assert total == value * strategy.num_replicas_in_sync
        >>> test_sum(combinations.mirrored_strategy_with_two_cpus, 1.0)
    """
    import pytest

    for name, values in choices.items():
        what = "An argument of a test is one of several values."
        fix = "combine(strategy=combinations.all_strategies, value=[1.0, 2.0])"
        checks.instance(name, values, list | tuple | range, what, fix)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(test).parameters)
        unknown = [name for name in choices if name not in names]
        if unknown:
            raise StructureTypeError(
                f"{test.__qualname__} has no argument {unknown[0]!r}.",
                received=f"combine({', '.join(choices)}).",
                fix=f"its arguments are {', '.join(names) or 'none'}.",
            )

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            _run_test(test, dict(zip(names, args, strict=False)) | kwargs)

        values = list(itertools.product(*choices.values()))
        ids = ["-".join(str(value) for value in each) for each in values]
        cases = [each[0] if len(choices) == 1 else each for each in values]
        return pytest.mark.parametrize(",".join(choices), cases, ids=ids)(run)

    return decorate


def _run_test(test: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Calls a test, in as many processes as its strategies need."""
    items = arguments.items()
    named = {k: value for k, value in items if isinstance(value, NamedStrategy)}
    rest = {k: value for k, value in items if k not in named}
    create = {k: value.create for k, value in named.items()}
    num_processes = max((v.num_processes for v in named.values()), default=1)
    if num_processes == 1:
        test(**{k: make() for k, make in create.items()}, **rest)
        return
    run_in_processes(
        run_in_this_process,
        num_processes,
        (test.__module__, inspect.getsourcefile(test), test.__qualname__),
        create,
        rest,
        cpu_devices=max(value.num_devices for value in named.values()),
        timeout=_TEST_SECONDS,
    )


def run_in_this_process(
    location: tuple[str, str, str],
    create: dict[str, Callable[[], Strategy]],
    rest: dict[str, Any],
) -> None:
    """Calls the test of this module, file and name, with new strategies."""
    module, file, name = location
    test: Any = operator.attrgetter(name)(module_of(module, file))
    test.__wrapped__(**{k: make() for k, make in create.items()}, **rest)

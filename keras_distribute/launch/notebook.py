"""`notebook_launcher`: a function of a notebook, in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_distribute._compat import jax_internals
from keras_distribute.errors import ClusterError
from keras_distribute.launch.functions import MultiProcessRunner, values_of

_FOREVER = 1e9


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    *,
    cpu_devices: int | None = None,
    timeout: float | None = None,
) -> Any:
    """Runs a function of a notebook in several processes of this host.

    In each, `kd.MultiWorkerMirroredStrategy()` spans all of them. Their output is shown
    with the number of the process in front. When one fails, all end. What the function
    uses of the notebook is sent along: create models and strategies in it, and load
    large data there. Needs `pip install cloudpickle`. Source: the name
    and the order of the arguments are those of Hugging Face's `accelerate`.

    Args:
        function: What each process runs.
        args: For the function; they can be pickled, as its result can.
        num_processes: How many.
        cpu_devices: The virtual CPU devices of each; `None` for the accelerators of
            this host, shared evenly.
        timeout: Seconds until all are killed; `None` for ever.

    Returns:
        What the function returned in process 0.

    Raises:
        BackendError: Without `cloudpickle`.
        ClusterError: Where a process failed, or the time was up; where the notebook
            itself uses the accelerators.

    Example:
        >>> import keras_distribute as kd
        >>> factor = 3
        >>> kd.notebook_launcher(lambda x: x * factor, (7,), cpu_devices=1)
        21
    """
    started = cpu_devices is None and jax_internals.backends_are_initialized()
    if started and jax.default_backend() != "cpu":
        raise ClusterError(
            "The notebook itself uses the accelerators, so its processes could not "
            "have them.",
            received=f"JAX has started with {jax.default_backend()} devices.",
            fix="restart the kernel, and use arrays, models and strategies only in the "
            "function.",
        )
    runner = MultiProcessRunner(
        function,
        num_processes,
        args=args,
        cpu_devices=cpu_devices,
        timeout=_FOREVER if timeout is None else timeout,
        echo=True,
        by_value=True,
    )
    with runner:
        return values_of(runner.join(until_failure=True))[0]

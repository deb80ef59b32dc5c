"""How programs reach the devices: one after the other, and none of their results lost.

A program that takes donated arrays leaves nothing behind but its results. Python may
raise a `KeyboardInterrupt` (or whatever a signal handler raises) between any two
bytecodes, so also between the return of the program and the assignment of what it
returned: the model would be gone. Here the results land in a list without a bytecode in
between. `list.extend(map(program, ...))` calls the program and appends its result in C,
where no exception can arrive from outside.

JAX calls a program from C++ only from its second call on, and only if it has no host
callbacks. Every other call goes through Python, so a thread of its own makes it, which
no signal reaches; `settle` waits for it.

Programs of several devices that are launched by several threads at once may reach the
devices in different orders, and wait for each other for ever (XLA on a CPU crashes). So
whoever launches one holds `launches.lock`.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute._compat import jax_internals
from keras_distribute.errors import ContextError, NonFiniteError
from keras_distribute.threads.uninterrupted import Calls

Landing = list[tuple[Any, Any]]
"""Where results land: pairs of outputs and state, the newest one last."""

_EXIT_SECONDS = 5.0


class Times:
    """The seconds spent in each part of a step, and when each ended last."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.ended: dict[str, float] = {}


class Launches:
    """The programs of this process on their way to the devices.

    Attributes:
        lock: Held by the thread that launches a program, or reads what one has left
            behind.
        tracing: Held by the thread that traces a step: Keras's models note on
            themselves what they do.
        times: What `timing` measures; `None` where it does not.
    """

    def __init__(self) -> None:
        self.lock, self.tracing = threading.RLock(), threading.RLock()
        self.times: Times | None = None

    def run_in_thread(
        self, program: Any, arguments: Sequence[Any], landing: Landing
    ) -> None:
        """Calls a program where no signal reaches it. The caller holds `lock`."""

        def call() -> None:
            with jax.debug_nans(False), jax.debug_infs(False):  # See `_unwanted`.
                landing.append(program(*arguments))
            # What a program calls back on the host is awaited by its thread alone.
            jax.effects_barrier()

        self._calls.run(call)

    def settle(self) -> None:
        """Waits for a program whose caller was interrupted. The caller holds `lock`."""
        self._calls.settle()

    def ordered(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """`program`, jitted and without donations, launched under `lock`."""

        @functools.wraps(program)
        def launched(*arguments: Any) -> Any:
            with self.lock:
                self.settle()
                return program(*arguments)

        return launched

    @functools.cached_property
    def _calls(self) -> Calls:
        atexit.register(self._finish)
        return Calls("keras_distribute first calls")

    def _finish(self) -> None:
        """XLA cannot be torn down under a program; one that hangs is left alone."""
        self._calls.settle(_EXIT_SECONDS)


launches = Launches()


class Executable:
    """A program, compiled for one form of its arguments.

    Args:
        program: A function made by `jax.jit`, which returns a pair of outputs and
            state, both lists of arrays: JAX unpacks other structures in Python.
        arguments: What to compile it for: arrays, or `jax.ShapeDtypeStruct`s.

    Attributes:
        traced: The program before XLA; `None` once it is compiled, as is `lowered`.
    """

    def __init__(self, program: Any, *arguments: Any) -> None:
        _require_jit()
        with launches.tracing:
            traced = program.trace(*arguments)
            self.lowered: Any = traced.lower()
        self.traced: Any = traced.jaxpr
        self.logs: Any = None
        self._compiles = threading.Lock()
        self._compiled: Any = None
        self._direct: Callable[..., Any] | None = None

    def compile(self) -> jax.stages.Compiled:
        """The compiled program; compiled once."""
        with self._compiles:
            if self._compiled is None:
                self._compiled = self.lowered.compile()
            # They are as large as the program.
            self.lowered = self.traced = None
            return self._compiled

    def launch(self, landing: Landing, *arguments: Any) -> None:
        """Runs the program; its result lands whatever is raised. The caller holds
        `launches.lock`.
        """
        _require_jit()
        launches.settle()
        unwanted = _unwanted()
        before = landing[:] if unwanted else []
        if self._direct is None or unwanted:
            launches.run_in_thread(self.compile(), arguments, landing)
            self._direct = jax_internals.call_without_python(self.compile())
        else:
            # No bytecode between the program's return and the append.
            each = [(argument,) for argument in arguments]
            landing.extend(map(self._direct, *each))
        if unwanted and (kind := _found_in(landing[-1], unwanted)):
            if not any(a.is_deleted() for a in jax.tree.leaves(before)):
                landing[:] = before  # Without donation, as JAX compiles with the flag.
            raise _non_finite_error(kind)


def _require_jit() -> None:
    """Raises `ContextError` where JAX compiles nothing."""
    if getattr(jax.config, "jax_disable_jit"):  # noqa: B009
        raise ContextError(
            "The steps of fit, and what run is given, are compiled for all replicas.",
            received="jax.disable_jit(), or jax_disable_jit=True.",
            fix="leave it off; to look at values, model.compile(..., "
            "run_eagerly=True), or jax.debug.print in the function.",
        )


def _unwanted() -> list[str]:
    """Which numbers no program may return. JAX itself looks before anything has
    landed, or not at all.
    """
    config: Any = jax.config
    wanted = {"nan": config.jax_debug_nans, "inf": config.jax_debug_infs}
    return [kind for kind, is_unwanted in wanted.items() if is_unwanted]


def _found_in(results: Any, kinds: Sequence[str]) -> str | None:
    """Which of these numbers is on a device of this process."""
    for array in jax.tree.leaves(results):
        if jnp.issubdtype(array.dtype, jnp.inexact):
            for shard in array.addressable_shards:
                values = np.asarray(shard.data)
                for kind in kinds:
                    if getattr(np, f"is{kind}")(values).any():
                        return kind
    return None


def _non_finite_error(kind: str) -> NonFiniteError:
    return NonFiniteError(
        f"A step, or a function given to run, returned a value that jax_debug_{kind}s "
        "does not allow.",
        received=f"{kind}.",
        fix="kd.callbacks.RaiseOnNaN() in fit names the array of the batch; "
        "model.compile(..., run_eagerly=True), or the function without run, the "
        "operation.",
    )

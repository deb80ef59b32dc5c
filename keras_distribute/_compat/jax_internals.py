"""The private names of JAX that we use, each with the reason.

- `xla_bridge.backends_are_initialized`: the number of CPU devices and the size of XLA's
  thread pool can only be chosen before JAX creates its client, and JAX has no public
  question for that. Goes when it has one.
- `parallel._psum`: where `lax.psum` of what is no tracer is multiplied by the number of
  replicas at once. Replicas with different shapes may hold different numbers there,
  which nothing in the traced program tells. Goes when JAX traces it.
- `distributed.global_state`: `client`, the key-value service of JAX's runtime, by which
  processes tell each other host values, and `coordinator_address`, which the user may
  have given. JAX's public functions for host values run programs on the devices, which
  a thread that reads ahead must not: another process may launch its programs in another
  order. Goes when JAX has a public client.
- `pxla.batched_device_put`: an array from the pieces of its devices in one call, as
  `make_array_from_callback` makes it. `jax.device_put` with a sharding takes 100 µs
  longer for each array on 4 devices, which a step of 2 ms feels. Goes when that is as
  fast.
- `Compiled._call`, which a compiled program calls from its first call on: a function
  written in C++, unless the program has host callbacks. `Compiled.__call__` itself is
  Python, where an exception from outside could come between the program's return and
  its own. Goes when a `Compiled` can be called without Python.
- `core.trace_ctx`: what JAX traces at the moment. Its context managers are Python: an
  exception from outside that comes while one of them is being left would have all that
  follows traced, for ever. And what a branch or the body of a loop assigns to a
  variable is lost, or is assigned in any case: that is refused.
- `Tracer._trace`: what a traced array belongs to. A weight that is divided over the
  replicas is gathered there, not in a loop that a layer runs. Goes when JAX has it.
- `parent_trace`, of a trace: the one around it; and `DynamicJaxprTrace`, which is that
  of a function that becomes a program of its own: a branch, a loop's body.
- `core.trace_state_clean`: whether anything is being traced, in less time than a read
  of a variable takes. Goes when `jax.core` has it.
- `config.trace_context`: the settings of JAX that a traced program depends on, such as
  the precision of products. `jax.jit` traces anew where one has changed; who keeps what
  it has compiled has to ask. Goes when JAX says it.
- `JaxprEqnContext`: what JAX notes of the place where an operation is traced. A program
  of one replica is made from operations of another one, whose mesh they noted, and
  calls that XLA is told not to inline. Goes when operations can be bound elsewhere by
  public means.
- `partial_eval.dce_jaxpr`: a traced program without what nothing needs, as JAX leaves
  it out of a program before XLA. Goes when `jax.extend` has it.
- `Client.get_default_layout`, `Layout.from_pjrt_layout`: in which order a device has
  the axes of an array in its memory, before there is one. Go when JAX says it.
- `newly_manual_axes`, `jaxpr`, `in_specs`, `out_specs`, parameters of `shard_map` in a
  traced program: over how many devices it runs what it contains, and of what. Go when
  JAX says what they are.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.dtypes
import jax.numpy as jnp
import numpy as np
from jax._src import config, core, distributed, xla_bridge
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax import parallel
from jax.experimental.layout import Layout

from keras_distribute._compat.seams import check


def is_key(value: Any) -> bool:
    """Whether it is an array of JAX's random keys, which NumPy does not know."""
    return isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )


def backends_are_initialized() -> bool:
    """Whether JAX has created a client: devices and thread pools are fixed then."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any:
    """The client of the processes' key-value service; `None` in a single process."""
    return distributed.global_state.client


def coordinator_address() -> str | None:
    """Where all processes have found each other; `None` in a single process."""
    return distributed.global_state.coordinator_address


def started_as() -> tuple[int, int]:
    """The number of this process, and of all, that JAX's runtime was started with. On a
    TPU slice `jax.process_index()` is another one: it goes by the places of the hosts.
    """
    state = distributed.global_state
    return state.process_id, state.num_processes or 1


def array_of_pieces(
    shape: Sequence[int],
    sharding: jax.sharding.Sharding,
    pieces: Sequence[np.ndarray[Any, Any]],
    devices: Any,
) -> jax.Array:
    """The array of `shape` whose parts on `devices`, all of this process, are `pieces`,
    of a dtype that JAX has.
    """
    return pxla.batched_device_put(
        _form(tuple(shape), pieces[0].dtype), sharding, pieces, devices
    )


check(jax.stages.Compiled, "_call")
check(core.Tracer, "_trace")


def axes_in_memory(
    device: jax.Device, shape: tuple[int, ...], dtype: Any
) -> tuple[int, ...]:
    """The axes of an array of such a shape on a device, the innermost last."""
    layout: Any = Layout
    try:
        found = device.client.get_default_layout(np.dtype(dtype), shape, device)
    except jax.errors.JaxRuntimeError:  # A client that does not know.
        return tuple(range(len(shape)))
    return tuple(layout.from_pjrt_layout(found).major_to_minor)


def without_unused(program: Any) -> Any:
    """The same program, a `ClosedJaxpr`, without operations whose results nothing
    needs; also inside of loops and conditions.
    """
    needed = [True] * len(program.jaxpr.outvars)
    used, _ = partial_eval.dce_jaxpr(program.jaxpr, needed, instantiate=True)
    return program.replace(jaxpr=used)


def call_without_python(compiled: jax.stages.Compiled) -> Callable[..., Any] | None:
    """What calls a compiled program from C++, after its first call, if anything."""
    call = getattr(compiled, "_call", None)
    return call if type(call) is type(jax.jit(_nothing)) else None


def _nothing() -> None:
    """Has a jitted function of the kind that is written in C++."""


def current_trace() -> Any:
    """What JAX traces in this thread, to give to `go_back_to`."""
    return core.trace_ctx.trace, core.trace_ctx.axis_env


def is_tracing() -> bool:
    """Whether operations of this thread are traced, not run."""
    return not core.trace_state_clean()


def settings() -> Hashable:
    """What of JAX's settings, in this thread, a program that is traced depends on."""
    return config.trace_context()


def go_back_to(trace: Any) -> None:
    """Traces again what `current_trace` said."""
    before, axes = trace
    if core.trace_ctx.trace is not before:
        core.trace_ctx.set_trace(before)
    if core.trace_ctx.axis_env is not axes:
        core.trace_ctx.set_axis_env(axes)


def is_of_inner_function(value: Any, trace: Any) -> bool:
    """Whether `value` is computed, or handed on, in a function that JAX traces apart,
    inside of a trace: it ends with that function, or is there without its being called.

    Args:
        trace: What `current_trace` said where the value is to be kept.
    """
    inner: list[Any] = []
    current: Any = core.trace_ctx.trace
    while current is not trace[0]:
        if isinstance(current, core.EvalTrace):  # Computed while tracing.
            return False
        if current is None or isinstance(current, partial_eval.DynamicJaxprTrace):
            return True
        inner.append(current)
        current = getattr(current, "parent_trace", None)
    return isinstance(value, core.Tracer) and any(value._trace is t for t in inner)


@contextlib.contextmanager
def traced_where(array: Any) -> Generator[None]:
    """What is computed inside belongs to the trace that `array` is of: a function that
    is traced inside of that one (a scan's body) finds it made.
    """
    if not isinstance(array, core.Tracer):
        yield
        return
    before = current_trace()
    core.trace_ctx.set_trace(array._trace)
    try:
        yield
    finally:
        go_back_to(before)


@functools.lru_cache(maxsize=256)
def _form(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.core.ShapedArray(shape, dtype)


def mapped_times(params: dict[str, Any]) -> int:
    """How often a traced `shard_map` runs what it contains, over all devices."""
    sizes = dict(params["mesh"].shape)
    return math.prod(sizes[axis] for axis in params["newly_manual_axes"])


def mapped_program(
    params: dict[str, Any], axis: str
) -> tuple[Any, list[int | None], list[int | None]] | None:
    """What a `shard_map` over `axis` alone runs on each device, and of its operands and
    results the dimensions that are divided; `None` for one over other axes, too.
    """
    if tuple(params["mesh"].axis_names) != (axis,):
        return None

    def divided(spec: Any) -> int | None:
        names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        return next((d for d, name in enumerate(names) if axis in name), None)

    taken, made = (list(map(divided, params[n])) for n in ("in_specs", "out_specs"))
    return params["jaxpr"], taken, made


_PSUM = "_psum"
_psum: Any = getattr(parallel, _PSUM)


@contextlib.contextmanager
def noting_folded_sums(axis: str) -> Generator[list[Any]]:
    """Collects, in order, what `lax.psum` over `axis` computes while tracing; in this
    thread, for a `with` block. The caller holds `launches.tracing`.
    """
    thread, before = threading.get_ident(), getattr(parallel, _PSUM)
    folded: list[Any] = []

    def noting_psum(x: Any, axis_name: Any, **options: Any) -> Any:
        axes = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
        if threading.get_ident() == thread and axis in axes:
            leaves = jax.tree.leaves(x)
            folded.extend(v for v in leaves if not isinstance(v, jax.core.Tracer))
        return _psum(x, axis_name, **options)

    setattr(parallel, _PSUM, noting_psum)
    try:
        yield folded
    finally:
        setattr(parallel, _PSUM, before)


check(core.JaxprEqnContext, "manager", "xla_metadata")


def traced_here(context: Any) -> Any:
    """The context of an operation traced elsewhere, on the mesh of this place."""
    mesh = jax.sharding.get_abstract_mesh()
    with context.manager, jax.sharding.use_abstract_mesh(mesh):
        return core.JaxprEqnContext()


def stays_a_call(eqn: Any) -> bool:
    """Whether XLA is told to leave a call one."""
    return (eqn.ctx.xla_metadata or {}).get("inlineable") == "false"

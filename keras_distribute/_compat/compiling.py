"""A lowered program, given to the compiler in another process.

JAX has no public way to take what it gives to a compiler, nor to give that to one:

- `compiler.compile_or_get_cached` gets the program and its options; it is replaced for
  the moment of a `Lowered.compile`, in this thread;
- `compiler.backend_compile_and_load` compiles for devices that are not there as
  `Lowered.compile` does, and its result says the same of the program;
- `mlir.make_ir_context`, `ir` and `xla_client` read both from bytes.

Goes when a `jax.stages.Lowered` can be sent to another process.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.errors import JaxRuntimeError

from keras_distribute._compat.seams import check

check(compiler, "compile_or_get_cached", "backend_compile_and_load")
check(mlir, "make_ir_context")
check(xla_client, "CompileOptions", "DeviceList")
_SIZES = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
    "peak_memory_in_bytes",
)


class Program(NamedTuple):
    """What a compiler is given, as bytes."""

    module: bytes
    options: bytes


class Compiled(NamedTuple):
    """What a compiler says of a program, with the methods of `jax.stages.Compiled`."""

    text: str
    sizes: Mapping[str, int]
    cost: Mapping[str, float] | None

    def as_text(self) -> str:
        """The compiled program."""
        return self.text

    def memory_analysis(self) -> Any:
        """The bytes that it takes."""
        return SimpleNamespace(**self.sizes)

    def cost_analysis(self) -> Mapping[str, float] | None:
        """The compiler's own estimates."""
        return self.cost


def said_of(compiled: Any) -> Compiled:
    """What a `jax.stages.Compiled` says of its program, without the program."""
    stats = compiled.memory_analysis()
    return Compiled(
        compiled.as_text(),
        {name: getattr(stats, name) for name in _SIZES},
        compiled.cost_analysis(),
    )


class _StopBeforeCompiling(Exception):
    """Carries the program out of JAX."""


def program_of(lowered: Any, options: Mapping[str, Any] | None = None) -> Program | Any:
    """What JAX would give to the compiler of a `jax.stages.Lowered`; the
    `jax.stages.Compiled` where JAX has compiled the same before. The caller holds
    `launches.tracing`.
    """
    thread, compile_it = threading.get_ident(), compiler.compile_or_get_cached

    def take(backend: Any, module: Any, devices: Any, options: Any, *more: Any) -> Any:
        if threading.get_ident() != thread:
            return compile_it(backend, module, devices, options, *more)
        file = io.BytesIO()
        module.operation.write_bytecode(file)
        program = Program(file.getvalue(), options.SerializeAsString())
        raise _StopBeforeCompiling(program)

    compiler.compile_or_get_cached = take
    try:
        return lowered.compile(dict(options) if options else None)
    except _StopBeforeCompiling as stop:
        return stop.args[0]
    finally:
        compiler.compile_or_get_cached = compile_it


def compiled_for(devices: Sequence[Any], program: Program) -> Compiled:
    """Compiles for devices of a topology, in this process."""
    options = xla_client.CompileOptions.ParseFromString(program.options)
    client, device_list = devices[0].client, xla_client.DeviceList(tuple(devices))
    with mlir.make_ir_context():
        module = ir.Module.parse(program.module)
        made: Any = compiler.backend_compile_and_load(
            client, module, device_list, options, []
        )
    cost = None
    try:
        cost = dict(made.cost_analysis())
    except JaxRuntimeError as error:
        # GPUs that are not there have no estimates.
        if not str(error).startswith("UNIMPLEMENTED"):
            raise
    stats = made.get_compiled_memory_stats()
    return Compiled(
        "\n\n".join(each.to_string() for each in made.hlo_modules()),
        {name: getattr(stats, name) for name in _SIZES},
        cost,
    )

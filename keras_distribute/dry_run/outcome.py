"""What the compiler makes of a step: the program, or its refusal; from an earlier
compilation where there was one, and a second time with another option where the first
fails by a fault of the compiler's own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from keras_distribute._compat.compiling import Compiled, said_of
from keras_distribute.dry_run import answers, compiling, memory
from keras_distribute.dry_run.progress import Progress
from keras_distribute.dry_run.targets import Target
from keras_distribute.errors import BackendError

# XLA for GPUs finds no tiles for some matrix products: "INTERNAL: Couldn't find output
# tile sizes that satisfy ...". Other kernels compute them without. Goes when no step
# fails by it: https://github.com/openxla/xla/issues.
_NO_TILES = "Couldn't find output tile sizes"
_WITHOUT_TILES = {"xla_gpu_enable_triton_gemm": False}
# A newer libtpu writes what this JAX's reader does not know: "RET_CHECK failure
# (external/xla/xla/hlo/ir/hlo_instruction.cc:390) proto.operand_ids_size() == ...".
_UNREADABLE = "xla/hlo/ir/hlo_instruction.cc"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one program.

    Args:
        compiled: What the compiler says of it; `None` where it refused it.
        refused: The bytes that it would need, and those there are, in a refusal.
        options: Of the compiler, that it was compiled with beyond the usual ones.
        is_kept: Whether the answer is one of an earlier compilation.
    """

    compiled: Compiled | None
    refused: tuple[int, int] | None
    options: Mapping[str, bool]
    seconds: float
    is_kept: bool


class StepCompiler:
    """Compiles the steps of one dry run. An option that the first of them needs is
    there for the next, so that none of these fails once before it.
    """

    def __init__(self, target: Target, *, is_shown: bool) -> None:
        self._target, self._is_shown = target, is_shown
        self._options: Mapping[str, bool] = {}

    def __call__(self, lowered: Any, what: str) -> Outcome:
        """Compiles a `jax.stages.Lowered`.

        Args:
            what: It, in the words of the line that shows how long it takes.

        Raises:
            BackendError: Where the compiler ends its process, or its assembler is
                missing.
            JaxRuntimeError: For a program that it refuses for other reasons than its
                size.
        """
        begun = time.perf_counter()
        with Progress(f"Compiling {what} for {self._target.name}", self._is_shown):
            answer, is_kept = self._answer(lowered)
            if _has_no_tiles(answer) and not self._options:
                self._options = _WITHOUT_TILES
                answer, is_kept = self._answer(lowered)
        seconds = time.perf_counter() - begun
        if isinstance(answer, str):
            refused = memory.refusal(answer)
            if refused is None:
                raise JaxRuntimeError(answer)
            return Outcome(None, refused, self._options, seconds, is_kept)
        return Outcome(answer, None, self._options, seconds, is_kept)

    def _answer(self, lowered: Any) -> tuple[Compiled | str, bool]:
        """What the compiler says, now or earlier; and whether it was earlier."""
        key = answers.key_of(self._target, lowered, self._options)
        answer = answers.kept(self._target, key)
        if answer is not None:
            return answer, True
        answer = _compiled_or_refused(self._target, lowered, self._options)
        answers.keep(self._target, key, answer)
        return answer, False


def _has_no_tiles(answer: Compiled | str) -> bool:
    return isinstance(answer, str) and _NO_TILES in answer


def _compiled_or_refused(
    target: Target, lowered: Any, options: Mapping[str, bool]
) -> Compiled | str:
    """What the compiler says of the program, or its refusal of one that is too large,
    or that it finds no tiles for.
    """
    try:
        made = compiling.compiled(target, lowered, options)
    except JaxRuntimeError as error:
        if "ptxas" in str(error):
            raise BackendError(
                "XLA assembles programs for GPUs by ptxas, which is missing or does "
                "not fit.",
                received=str(error).splitlines()[0],
                fix="pip install 'keras-distribute[dry-run-cuda]', which has one.",
            ) from error
        text = str(error)
        if _UNREADABLE in text:
            raise BackendError(
                "JAX cannot read the program that the compiler made: their versions do "
                "not belong together.",
                received=text.splitlines()[0],
                fix=f"pip install 'jax[tpu]=={jax.__version__}', which brings the "
                "compiler of this JAX.",
            ) from error
        if memory.refusal(text) is None and not _has_no_tiles(text):
            raise
        return text
    return made if isinstance(made, Compiled) else said_of(made)

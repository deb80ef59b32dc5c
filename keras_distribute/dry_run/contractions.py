"""The operations of the matrix products and convolutions of one instruction of a
compiled program: two for each multiplication and addition.

`flops.py` counts them in the traced program, where no compiler has changed them; here
it is about which instruction they are in. A GPU's are calls of cuBLAS and cuDNN, a
TPU's are in fusions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from keras_distribute.dry_run.hlo import Array, Instruction, Module

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)')
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_DILATED = re.compile(r"lhs_dilate=([\dx]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_DIGITS = re.compile(r"\d+")
# The dtypes that matrix units take as halves of a float.
_HALF = {"bf16": "bfloat16", "f16": "float16"}


def of_instruction(
    module: Module, instruction: Instruction, named: Mapping[str, Instruction]
) -> dict[str, float]:
    """The operations of an instruction, with those inside of a fusion, by the dtype of
    their operands.

    Args:
        named: The instructions of this computation, by their names.
    """
    if instruction.opcode == "fusion":
        total: dict[str, float] = {}
        for name in instruction.called.get("calls", ()):
            inside = module.computations[name]
            inner = {each.name: each for each in inside}
            for each in inside:
                for dtype, count in of_instruction(module, each, inner).items():
                    total[dtype] = total.get(dtype, 0) + count
        return total
    sources = [named[name] for name in instruction.operands if name in named]
    arrays = [each.arrays[0] for each in sources if each.arrays]
    count = _count(instruction, arrays) if len(arrays) > 1 else 0
    if not count:
        return {}
    return {_HALF.get(arrays[0].dtype, "float32"): count}


def _count(instruction: Instruction, operands: list[Array]) -> float:
    """The operations of a product or a convolution of operands."""
    text, opcode = instruction.text, instruction.opcode
    target = found.group(1) if (found := _TARGET.search(text)) else ""
    if opcode == "dot" or target.startswith("__cublas$"):
        return _product(text, operands[0], instruction.arrays[0])
    if opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution(text, operands, instruction.arrays[0], target)
    return 0


def _product(text: str, left: Array, result: Array) -> float:
    found = _CONTRACTED.search(text)
    if found is None:
        return 0
    axes = map(int, _DIGITS.findall(found.group(1)))
    return 2.0 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in axes)


def _convolution(text: str, operands: list[Array], result: Array, target: str) -> float:
    """Those of cuDNN's gradients, whose labels are the forward pass's, are as many as
    there: each element of the forward result with each of its kernel's.
    """
    found = _LABELS.search(text)
    if found is None:
        return 0
    output, kernel = result, operands[1]
    if "BackwardInput" in target:
        output = operands[0]
    elif "BackwardFilter" in target:
        output, kernel = operands[1], result
    features = kernel.shape[found.group(2).index("o")]
    filled = _DILATED.search(text)
    empty = math.prod(map(int, filled.group(1).split("x"))) if filled else 1
    return 2.0 * math.prod(output.shape) * math.prod(kernel.shape) / features / empty

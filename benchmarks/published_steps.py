"""Published times of training steps, and what a dry run predicts for them. Nothing is
run here; the measurements are others'.

    # All of it, about an hour on two idle cores; compiled programs are kept in the
    # folder that JAX_COMPILATION_CACHE_DIR names.
    python benchmarks/published_steps.py
    # One case; the other results stay:
    python benchmarks/published_steps.py resnet50@v3:2x2
    # The factors of keras_distribute/dry_run/calibration.py from the results:
    python benchmarks/published_steps.py --fit

Writes results/published_steps.md and .json. Needs `pip install
'keras-distribute[dry-run-tpu,dry-run-cuda]'`.

Which cases the factors are fitted to was fixed before any was compiled: sorted by
platform, hardware and name, every second one of a platform, from the first on. The
others are held out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report

LONGEST = 1500  # Seconds that one case may take.
_FLAX = "https://github.com/google/flax/blob/main/examples/imagenet/README.md"
_NVIDIA = (
    "https://github.com/NVIDIA/DeepLearningExamples/blob/master/TensorFlow/"
    "Classification/ConvNets/resnet50v1.5/README.md"
)
_VIT = (
    "https://github.com/NVIDIA/JAX-Toolbox/blob/main/rosetta/rosetta/projects/vit/"
    "README.md"
)
_MAXTEXT = "https://github.com/google/maxtext/blob/main/README.md"
# The steps of 100 epochs of ImageNet's 1,281,167 images, 1,024 at a time.
_FLAX_STEPS = 125_100


@dataclasses.dataclass(frozen=True)
class Case:
    """A published measurement of a training step.

    Args:
        title: What was trained.
        model: The function of `published_models.py` that makes it, and its arguments.
        topology: The hardware.
        rows: Of the global batch.
        seconds: What a step took.
        said: What the source says, in its own words and numbers.
        source: Its address.
        options: Of `kd.dry_run`.
    """

    title: str
    model: tuple[Any, ...]
    topology: str
    rows: int
    seconds: float
    said: str
    source: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The hardware, in the words of topologies."""
        return self.topology.partition(":")[0]


def _decoder_seconds(
    width: int, heads: int, wide: int, blocks: int, rows: int, teraflops: float
) -> float:
    """The seconds of `rows` sequences on a chip at a published rate, which counts the
    model's operations alone, none of them computed again: six for each weight of a
    matrix product and token, and those of attention, not halved for its mask.
    """
    tokens, inner = 2048, 128 * heads
    weights = blocks * (4 * width * inner + 3 * width * wide) + 32_000 * width
    attention = 12 * blocks * tokens * inner
    return rows * tokens * (6 * weights + attention) / (teraflops * 1e12)


CASES = {
    "resnet50@v2:4x4": Case(
        "ResNet-50, bfloat16, Flax",
        ("resnet50", "mixed_bfloat16"),
        "v2:4x4",
        1024,
        2.5 * 3600 / _FLAX_STEPS,
        "TPU v2-32, 125100 steps, walltime 2.5h",
        _FLAX,
    ),
    "resnet50@v3:2x2": Case(
        "ResNet-50, bfloat16, Flax",
        ("resnet50", "mixed_bfloat16"),
        "v3:2x2",
        1024,
        4.4 * 3600 / _FLAX_STEPS,
        "TPU v3-8, 125100 steps, walltime 4.4h",
        _FLAX,
    ),
    "resnet-rs50@v3:2x2": Case(
        "ResNet-RS-50 at 160 pixels, bfloat16",
        ("resnet50", "mixed_bfloat16", 160, True),
        "v3:2x2",
        1024,
        0.070,
        "ResNet-RS-50, 160x160, TPU Lat (ms) 70; TPUv3, bfloat16, an initial training "
        "batch size of 128 images (taken as those of a core)",
        "https://github.com/tensorflow/tpu/blob/master/models/official/resnet/"
        "resnet_rs/README.md",
    ),
    "vit-s16@v3:2x2": Case(
        "ViT-S/16, float32 with bfloat16 products, big_vision",
        ("vit", "float32", 384, 6),
        "v3:2x2",
        1024,
        # 90 epochs of 99 % of ImageNet's training images.
        6.5 * 3600 / (90 * 0.99 * 1_281_167 / 1024),
        "6-7h to finish 90ep on a TPU-v3-8 (batch_size 1024, train[:99%]); 6.5 h here",
        "https://github.com/google-research/big_vision/blob/main/big_vision/configs/"
        "vit_s16_i1k.py",
    ),
    "decoder-16b@v5e:16x16": Case(
        "2 of 32 blocks of a decoder of 16B, bfloat16, MaxText",
        ("decoder", 4096, 64, 28_672, 2, True),
        "v5e:16x16",
        6 * 256,
        _decoder_seconds(4096, 64, 28_672, 2, 6, 120),
        "1x v5e-256, 16B: 120 TFLOP/sec/chip (16b.sh: per_device_batch_size=6, "
        "remat_policy=full, max_target_length=2048); the time of 2 blocks at this rate",
        _MAXTEXT,
        {"shard_variables": True},
    ),
    "decoder-32b@v5p:4x4x4": Case(
        "2 of 32 blocks of a decoder of 32B, bfloat16, MaxText",
        ("decoder", 8192, 64, 28_672, 2, False),
        "v5p:4x4x4",
        7 * 64,
        _decoder_seconds(8192, 64, 28_672, 2, 7, 328),
        "v5p-128, 32B: 3.28e+02 TFLOP/chip/sec (32b.sh: per_device_batch_size=7, "
        "remat_policy=minimal, ici_tensor_parallelism=4, here without it); the time of "
        "2 blocks at this rate",
        _MAXTEXT,
        {"shard_variables": True},
    ),
    "bert-base@a100:1": Case(
        "BERT base, float32, `fit` of Keras 3 on JAX",
        ("bert_base",),
        "a100:1",
        32,
        0.22237,
        "BERT (fit), batch size 32, Keras 3 (JAX): 222.37 ms/step; A100 40 GB",
        "https://keras.io/getting_started/benchmarks/",
    ),
    "resnet50-half@a100:1": Case(
        "ResNet-50 v1.5, mixed precision, TensorFlow with XLA",
        ("resnet50", "mixed_float16"),
        "a100:1",
        256,
        256 / 2375,
        "DGX A100 40GB, 1 GPU, batch 256, mixed precision + XLA: 2375 img/s",
        _NVIDIA,
    ),
    "resnet50-tf32@a100:1": Case(
        "ResNet-50 v1.5, TF32, TensorFlow with XLA",
        ("resnet50", "float32"),
        "a100:1",
        256,
        256 / 909,
        "DGX A100 40GB, 1 GPU, batch 256, TF32 + XLA: 909 img/s",
        _NVIDIA,
    ),
    "vit-b16@a100-80gb:8": Case(
        "ViT-B/16, bfloat16, T5X on JAX",
        ("vit", "mixed_bfloat16", 768, 12),
        "a100-80gb:8",
        4096,
        4096 / 7200.38,
        "B/16, 8 GPUs, BS / GPU 512, Samples/Sec (A100): 7200.38",
        _VIT,
    ),
    "vit-b16@h100:8": Case(
        "ViT-B/16, bfloat16, T5X on JAX",
        ("vit", "mixed_bfloat16", 768, 12),
        "h100:8",
        4096,
        4096 / 11669.52,
        "B/16, 8 GPUs, BS / GPU 512, Samples/Sec (H100): 11669.52",
        _VIT,
    ),
    "resnet50-half@v100:1": Case(
        "ResNet-50 v1.5, mixed precision, TensorFlow with XLA",
        ("resnet50", "mixed_float16"),
        "v100:1",
        256,
        256 / 1270,
        "DGX-1 V100 16G, 1 GPU, batch 256, mixed precision + XLA: 1270 img/s",
        _NVIDIA,
    ),
    "resnet50-single@v100:1": Case(
        "ResNet-50 v1.5, float32, TensorFlow with XLA",
        ("resnet50", "float32"),
        "v100:1",
        128,
        128 / 412,
        "DGX-1 V100 16G, 1 GPU, batch 128, FP32 + XLA: 412 img/s",
        _NVIDIA,
    ),
}


def one(name: str, path: str) -> None:
    """Compiles one case, and writes what was found."""
    import keras_distribute as kd  # first: it chooses Keras's backend
    import published_models

    case = CASES[name]
    function, *arguments = case.model
    build: Callable[[], Any] = partial(getattr(published_models, function), *arguments)
    found = kd.dry_run(build, case.rows, case.topology, **case.options)
    print(found, flush=True)
    found.save(path)


if __name__ == "__main__":
    one(*sys.argv[1:])

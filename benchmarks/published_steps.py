"""Published times of training steps, and what a dry run predicts for them. Nothing is
run here; the measurements are others', but for two of `benchmarks/gpu.py`.

    # All of it, about an hour on two idle cores; compiled programs are kept in the
    # folder that JAX_COMPILATION_CACHE_DIR names.
    python benchmarks/published_steps.py
    # One case; the other results stay:
    python benchmarks/published_steps.py resnet50@v3:2x2
    # The shares of keras_distribute/dry_run/calibration.py, from the results:
    python benchmarks/published_steps.py --fit

Writes results/published_steps.md and .json. Needs `pip install
'keras-distribute[dry-run-tpu,dry-run-cuda]'`.

Which cases the shares are fitted to was fixed before any was compiled: sorted by
hardware and name, every second one of a platform, from the first on. The others are
held out; so are the two of Flax on GPUs, which were added later, when the results of
the others were known, and the two of `benchmarks/gpu.py`, whose programs are the very
ones that are compiled here: measured and predicted without a look at the other, after
all else was settled. One more was chosen and has no result: a decoder of 32B on
v5p:4x4x4, whose program libtpu 0.0.52 writes in a form that jaxlib 0.10.2 cannot read
("async-update instruction should have 1 operands").

That a platform has one share, not one for operations and one for bytes, follows from
leaving out each of the fitted cases on GPUs in turn: with two shares, the one left out
is off by factors of 1.50, 1.19, 1.39 and 1.16; with one, by 1.15, 1.11, 1.45 and 1.16.
This, and that float32 without matrix units is taken at its peak, was settled when the
predictions of the held out cases had been seen, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import report
from contenders import Measured
from workloads import WORKLOADS

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
        source: Its address; none of what `benchmarks/gpu.py` measured.
        options: Of `kd.dry_run`.
        is_late: Whether it was added after the shares had been fitted.
        peak_mib: The most memory that was in use, where that is known.
    """

    title: str
    model: tuple[Any, ...]
    topology: str
    rows: int
    seconds: float
    said: str
    source: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_late: bool = False
    peak_mib: float = 0.0

    @property
    def kind(self) -> str:
        """The hardware, in the words of topologies."""
        return self.topology.partition(":")[0]

    @property
    def platform(self) -> str:
        """Of this hardware."""
        return "tpu" if "x" in self.topology.partition(":")[2] else "cuda"


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


def _measured_here(workload: str, title: str, model: tuple[Any, ...]) -> Case:
    """One of the results of `gpu.py`."""
    facts = json.loads((report.RESULTS / "gpu.json").read_text(encoding="utf-8"))
    assert facts["gpus"] == ["NVIDIA H200"]
    found = Measured(**facts["cases"][workload]["ours"])
    return Case(
        f"{title}, `fit` of keras_distribute",
        model,
        "h200:1",
        WORKLOADS[workload].batch,
        found.median / 1e3,
        f"benchmarks/gpu.py on an H200: {found.median:.2f} ms a step",
        source="",
        is_late=True,
        peak_mib=found.peak_mib,
    )


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
    "bert-base@a100:1": Case(
        "BERT base, float32, `fit` of Keras 3 on JAX",
        ("bert_base",),
        "a100:1",
        32,
        0.22237,
        "BERT (fit), batch size 32, Keras 3 (JAX): 222.37 ms/step; A100 with 40GB, "
        "default settings (taken as float32, 512 tokens)",
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
    "resnet50-half-flax@v100:8": Case(
        "ResNet-50, float16, Flax",
        ("resnet50", "mixed_float16"),
        "v100:8",
        2048,
        4.3 * 3600 / 62_500,
        "v100_x8_mixed_precision, 62500 steps, walltime 4.3h (batch_size = 2048)",
        _FLAX,
        is_late=True,
    ),
    "resnet50-single-flax@v100:8": Case(
        "ResNet-50, float32, Flax",
        ("resnet50", "float32"),
        "v100:8",
        512,
        13.2 * 3600 / 250_200,
        "v100_x8, 250200 steps, walltime 13.2h (100 epochs: batch 512)",
        _FLAX,
        is_late=True,
    ),
    "resnet50@h200:1": _measured_here(
        "resnet50", "ResNet-50, bfloat16", ("resnet50", "mixed_bfloat16")
    ),
    "bert-base@h200:1": _measured_here("bert", "BERT base, float32", ("bert_base",)),
}
SHARES = [round(0.3 + 0.02 * i, 2) for i in range(90)]


def fitted(platform: str) -> list[str]:
    """The cases that the share of a platform is fitted to."""
    of_platform = [
        name
        for name, case in CASES.items()
        if case.platform == platform and not case.is_late
    ]
    return sorted(of_platform, key=lambda name: (CASES[name].kind, name))[::2]


def one(name: str, path: str) -> None:
    """Compiles one case, and writes what was found; and what would be predicted at
    each of the shares that a fit chooses from.
    """
    import keras_distribute as kd  # before the models: it chooses Keras's backend
    from keras_distribute.dry_run import prediction

    published_models = importlib.import_module("published_models")
    case, predict = CASES[name], prediction.of_step
    at_shares: list[float] = []

    def predict_at_shares(*given: Any) -> Any:
        for share in SHARES:
            known = prediction.Calibration(share, 1, num_fitted=0, num_held_out=0)
            predicted = predict(*given, known)
            assert predicted is not None
            at_shares.append(predicted.seconds)
        return predict(*given)

    prediction.of_step = predict_at_shares
    function, *arguments = case.model
    build: Callable[[], Any] = partial(getattr(published_models, function), *arguments)
    found = kd.dry_run(build, case.rows, case.topology, **case.options)
    print(found, flush=True)
    said = found.to_json()
    kept = ("topology", "batch", "flops", "bytes_moved", "estimate", "compiler_options")
    facts = {key: said[key] for key in (*kept, "versions")}
    facts["peak_mib"] = found.needed_bytes / 2**20
    assert len(at_shares) == len(SHARES)
    text = json.dumps({**facts, "measured": case.seconds, "at_shares": at_shares})
    Path(path).write_text(text, encoding="utf-8")


def ratio(facts: dict[str, Any], share: float) -> float:
    """Predicted / measured time at a share, between two that were computed."""
    position = min(max((share - SHARES[0]) / 0.02, 0), len(SHARES) - 1.001)
    index, part = int(position), position % 1
    low, high = facts["at_shares"][index : index + 2]
    return (low + (high - low) * part) / facts["measured"]


def fit(platform: str, cases: dict[str, dict[str, Any]]) -> float:
    """The share whose predictions are off the fitted cases by the least sum of absolute
    logarithms.
    """
    known = [cases[name] for name in fitted(platform)]
    off = {
        share: sum(abs(math.log(ratio(facts, share))) for facts in known)
        for share in SHARES
    }
    return min(off, key=lambda share: off[share])


def largest_error(names: Iterable[str], cases: dict[str, Any], share: float) -> float:
    """The most that a prediction of these cases is off, as a factor."""
    ratios = [ratio(cases[name], share) for name in names]
    return max(max(each, 1 / each) for each in ratios)


def markdown(cases: dict[str, dict[str, Any]]) -> str:
    """The table of all cases, and what it says."""
    from keras_distribute.dry_run.calibration import CALIBRATIONS

    rows: list[list[str]] = []
    summary: list[str] = []
    for platform, title in (("tpu", "TPUs"), ("cuda", "GPUs")):
        share, to_fit = CALIBRATIONS[platform].share, fitted(platform)
        here = [name for name in CASES if CASES[name].platform == platform]
        held_out = [name for name in here if name not in to_fit]
        rows += [
            _row(name, cases[name], share, name in to_fit)
            for name in sorted(here, key=lambda each: (each not in to_fit, each))
        ]
        errors = (largest_error(each, cases, share) for each in (to_fit, held_out))
        within = sum(abs(ratio(cases[name], share) - 1) <= 0.25 for name in held_out)
        summary.append(
            "{}: share {:.2f}; off by a factor of at most {:.2f} for the fitted and "
            "{:.2f} for the held out, {} of {} of which are within 25 %.".format(
                title, share, *errors, within, len(held_out)
            )
        )
    summary += [
        f"{CASES[name].title}, {CASES[name].topology}: {facts['peak_mib']:,.0f} MiB of "
        f"memory at the peak, by the dry run; {measured:,.0f} measured, "
        f"{facts['peak_mib'] / measured:.2f} ×."
        for name, facts in cases.items()
        if (measured := CASES[name].peak_mib)
    ]
    header = ["step", "on", "", "measured, ms", "PREDICTED here, ms"]
    header += ["predicted / measured", "at least, ms", "source"]
    text = report.table(header, rows, "lllrrrrl")
    return text + "\n\n" + "\n".join(f"- {each}" for each in summary)


def _row(name: str, facts: dict[str, Any], share: float, is_fitted: bool) -> list[str]:
    case, found = CASES[name], ratio(facts, share)
    return [
        case.title,
        f"{case.topology}, {case.rows:,} rows",
        "fitted" if is_fitted else "held out",
        f"{case.seconds * 1e3:.1f}",
        f"{found * case.seconds * 1e3:.1f}",
        f"{found:.2f}",
        f"{facts['estimate']['at_least'] * 1e3:.1f}",
        f"[{case.said}]({case.source})" if case.source else case.said,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", help="cases; all by default")
    parser.add_argument("--fit", action="store_true", help="fit shares to the results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        one(*given.child)
        return
    file = report.RESULTS / "published_steps.json"
    known = report.known_cases("published_steps")
    if given.fit:
        for platform in ("tpu", "cuda"):
            share = fit(platform, known)
            here = [name for name in known if CASES[name].platform == platform]
            error = largest_error(here, known, share)
            print(f"{platform}: share {share}, error {error:.3f}")
        return
    for name in given.which or CASES:
        known[name] = report.from_child(__file__, name, seconds=LONGEST)
        write(known, file)


def write(cases: dict[str, dict[str, Any]], file: Path) -> None:
    """Writes what is known; the table as soon as all of it is."""
    if all(name in cases for name in CASES):
        facts = {"cases": {name: cases[name] for name in CASES}}
        report.write("published_steps", facts, markdown(cases), how="Compiled")
    else:
        about = {"machine": report.machine(), "cases": cases}
        file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

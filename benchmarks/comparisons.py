"""Which contenders do the same work in the same run, and what ours must reach there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import report
from contenders import TITLES, Measured
from workloads import VARIANTS


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Contenders that do the same work in the same run.

    Args:
        workload: Which.
        devices: How many; those that use one device are named so.
        kind: What is measured.
        contenders: Their names.
        limits: What ours must reach: our contender, the other one, and the ratio.
        scaling: Ours must also lose no more to plain Keras on one device than
            `tf.distribute` does to its own.
    """

    workload: str
    devices: int
    kind: str
    contenders: tuple[str, ...]
    limits: tuple[tuple[str, str, float], ...] = ()
    scaling: bool = False


ALL = (
    "plain",
    "data_parallel",
    "tf_mirrored",
    "by_hand",
    "by_hand_again",
    "by_hand_scan",
    "model_parallel",
    "nnx",
    "torch_ddp",
    "ours",
    "ours_fused",
)
COMPARISONS = {
    "mlp_fit": Comparison(
        "mlp",
        4,
        "fit",
        ALL,
        (
            ("ours", "by_hand", 0.97),
            ("ours", "data_parallel", 0.75),
            ("ours_fused", "by_hand_scan", 1.00),
            ("ours", "tf_mirrored", 0.20),
        ),
    ),
    "cnn_fit": Comparison(
        "cnn",
        4,
        "fit",
        (
            "plain",
            "data_parallel",
            "tf_one",
            "tf_mirrored",
            "by_hand",
            "by_hand_again",
            "ours",
            "ours_fused",
        ),
        (
            ("ours", "by_hand", 0.97),
            ("ours", "data_parallel", 0.92),
            ("ours", "tf_mirrored", 0.60),
            ("ours_fused", "ours", 1.02),
        ),
        scaling=True,
    ),
    "deep_fit": Comparison(
        "deep",
        8,
        "fit",
        ("plain", "data_parallel", "by_hand", "by_hand_flat", "ours", "ours_fused"),
        (("ours", "data_parallel", 0.16), ("ours", "by_hand_flat", 0.90)),
    ),
    "transformer_fit": Comparison(
        "transformer",
        4,
        "fit",
        (
            "plain",
            "data_parallel",
            "model_parallel",
            "by_hand",
            "by_hand_again",
            "ours",
            "ours_fused",
        ),
        (("ours", "by_hand", 0.97),),
    ),
    "lstm_fit": Comparison(
        "lstm",
        4,
        "fit",
        ("plain", "data_parallel", "by_hand", "by_hand_again", "ours", "ours_fused"),
        (("ours", "by_hand", 0.97),),
    ),
    **{
        f"{name}_{variant}_fit": Comparison(
            f"{name}_{variant}",
            4,
            "fit",
            ("plain", "data_parallel", "by_hand", "ours"),
            (("ours", "by_hand", 1.03),),
        )
        for name in ("mlp", "cnn", "transformer")
        for variant in VARIANTS
    },
    **{
        f"{name}_one_device": Comparison(
            name, 1, "fit", ("plain", "ours"), (("ours", "plain", 0.98),)
        )
        for name in ("mlp", "cnn", "deep", "transformer")
    },
    **{
        f"mlp_{kind}": Comparison(
            "mlp",
            4,
            kind,
            ("plain", "data_parallel", "by_hand", "ours"),
            (("ours", "by_hand", 1.00),),
        )
        for kind in ("evaluate", "predict")
    },
    "mlp_call": Comparison(
        "mlp",
        4,
        "call",
        ("plain", "data_parallel", "tf_mirrored", "ours"),
        (("ours", "tf_mirrored", 0.03), ("ours", "plain", 1.30)),
    ),
    "mlp_run": Comparison(
        "mlp", 4, "run", ("by_hand", "ours"), (("ours", "by_hand", 1.00),)
    ),
    "cnn_run": Comparison(
        "cnn", 4, "run", ("by_hand", "ours"), (("ours", "by_hand", 1.00),)
    ),
    **{
        f"mlp_{devices}_devices": Comparison(
            "mlp",
            devices,
            "fit",
            ("plain", "data_parallel", "by_hand", "ours"),
            (("ours", "by_hand", 1.05),),
        )
        for devices in (2, 8)
    },
}


PEAK_LIMIT = 1.05  # Of the memory of a `fit`, beside the loop by hand.


def targets(
    comparison: Comparison, found: dict[str, Measured]
) -> Iterator[report.Target]:
    """What was to be reached, of the contenders that were measured."""
    for ours, other, limit in comparison.limits:
        if {ours, other} <= found.keys():
            ratio = found[ours].over(found[other])
            yield report.Target(f"{TITLES[ours]} / {TITLES[other]}", ratio, limit)
    if comparison.scaling and {"tf_mirrored", "tf_one", "plain"} <= found.keys():
        theirs = found["tf_mirrored"].over(found["tf_one"])
        ratio = found["ours"].over(found["plain"])
        title = f"{TITLES['ours']} / {TITLES['plain']}, beside TensorFlow's ratio"
        yield report.Target(title, ratio, theirs)
    if comparison.kind == "fit" and {"ours", "by_hand"} <= found.keys():
        ratio = found["ours"].peak_mib / found["by_hand"].peak_mib
        title = f"peak memory, {TITLES['ours']} / {TITLES['by_hand']}"
        yield report.Target(title, ratio, PEAK_LIMIT)


def judged_alone(comparison: Comparison) -> Comparison:
    """The comparison with the contenders alone that its targets need."""
    names = {each for limit in comparison.limits for each in limit[:2]}
    if comparison.scaling:
        names |= {"plain", "tf_one", "tf_mirrored"}
    kept = tuple(each for each in comparison.contenders if each in names)
    return dataclasses.replace(comparison, contenders=kept)

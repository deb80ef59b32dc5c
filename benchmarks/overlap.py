"""How much of what a training step exchanges is exchanged while the devices compute, as
the compilers of TPUs write it, by themselves and with flags that users set. Nothing is
run.

    # All of it, about a quarter of an hour on two idle cores:
    python benchmarks/overlap.py
    # One topology; the other results stay:
    python benchmarks/overlap.py v6e:4x4

Writes results/overlap.md and .json. Needs `pip install
'keras-distribute[dry-run-tpu]'`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import report
from workloads import decoder

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_distribute as kd

LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY, ROWS = 512, 1024, 16, 8, 16_384, 8
TOPOLOGIES = ("v5e:4x4", "v6e:4x4")
LARGE = 2**16  # Bytes of all devices: counts and losses are exchanged, too.
FUSED = "--xla_tpu_enable_async_collective_fusion=true"
# Of the flags that MaxText groups as continuation fusion, those that matter here:
# https://github.com/AI-Hypercomputer/maxtext/blob/main/benchmarks/xla_flags_library.py
GATHERS = (
    FUSED,
    f"{FUSED.removesuffix('=true')}_fuse_all_gather=true",
    "--xla_enable_async_all_gather=true",
)
# XLA joins sums to one of 120 MiB, which nothing is left to compute beside.
SUMS = (
    FUSED,
    f"{FUSED.removesuffix('=true')}_fuse_all_reduce=true",
    "--xla_enable_async_all_reduce=true",
    "--xla_jf_crs_combiner_threshold_in_bytes=8000000",
)
STRATEGIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "whole weights": ({}, SUMS),
    "`shard_variables=True`": ({"shard_variables": True}, GATHERS),
}


def facts_of(topology: str, options: dict[str, Any], flags: tuple[str, ...]) -> Any:
    """What one program exchanges, in MiB that a device sends by kind: all, and beside
    computation.
    """
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)
    strategy = kd.MirroredStrategy(["cpu:0"], communication_dtype="bfloat16", **options)
    with strategy.scope():
        model = decoder(LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    chips = 16
    found = kd.dry_run(model, ROWS * chips, topology=topology, verbose=0)
    sent: dict[str, list[float]] = {}
    for each in found.collectives:
        if each.num_bytes * each.group_size >= LARGE:
            mib = each.bytes_sent * each.times / 2**20
            all_of_it, beside = sent.setdefault(each.kind, [0.0, 0.0])
            sent[each.kind] = [all_of_it + mib, beside + mib * each.overlaps]
    return {"sent": sent, "peak": found.memory.peak}


def markdown(known: dict[str, Any]) -> str:
    """The table of all programs."""
    header = [
        "",
        "weights",
        "flags",
        "exchanged",
        "sent by a device, MiB",
        "of it beside computation",
        "peak memory, MiB",
    ]
    rows = [
        [
            topology,
            name,
            "with" if is_set == "with" else "the compiler's own",
            kind,
            f"{all_of_it:,.0f}",
            f"{100 * beside / all_of_it:.0f} %",
            f"{facts['peak'] / 2**20:,.0f}",
        ]
        for topology in TOPOLOGIES
        for name, settings in known.get(topology, {}).items()
        for is_set, facts in settings.items()
        for kind, (all_of_it, beside) in sorted(facts["sent"].items())
        if all_of_it >= 1
    ]
    told = "\n".join(
        f"- {name}: `{' '.join(flags)}`" for name, (_, flags) in STRATEGIES.items()
    )
    notes = (
        f"A decoder of {LAYERS} blocks of {WIDTH:,}, {ROWS} sequences of {LENGTH} "
        "tokens on each of 16 chips, mixed_bfloat16, Adam, "
        '`communication_dtype="bfloat16"`; compiled by libtpu, nothing was run. Sent: '
        "by the algorithms of a ring. A `collective-permute` is a part of a sum or "
        "gather that the compiler took apart, to exchange some while it multiplies "
        "others.\n\nThe flags, in `LIBTPU_INIT_ARGS`:"
    )
    return f"{report.table(header, rows, 'lllrrrr')}\n\n{notes}\n\n{told}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=[[], *TOPOLOGIES])
    given = parser.parse_args()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    known = report.known_cases("overlap")
    for topology in given.which or TOPOLOGIES:
        known[topology] = {
            name: {
                "without": facts_of(topology, options, ()),
                "with": facts_of(topology, options, flags),
            }
            for name, (options, flags) in STRATEGIES.items()
        }
    report.write("overlap", {"cases": known}, markdown(known), how="Compiled")


if __name__ == "__main__":
    main()

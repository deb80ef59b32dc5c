"""Training steps compiled for TPUs that are not there: memory, collectives, FLOPs, and estimated times. Nothing is run.

    python benchmarks/dry_run.py                      # all of it, one after the other: about half an hour on two cores
    python benchmarks/dry_run.py resnet50 lstm@v6e:2x2  # one model, one case; the other results stay

Writes results/dry_run.md, .json and .svg. Needs `pip install 'keras-distribute[dry-run-tpu,plots]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import workloads

TOPOLOGIES = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v6e:2x2")
LARGEST = 300  # Seconds that one case may take.


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Args:
        title: Of its row.
        build: Makes and compiles it.
        rows: On each device.
        others: Topologies beside `TOPOLOGIES`.
    """

    title: str
    build: Callable[[], Any]
    rows: int
    others: tuple[str, ...] = ()


def classifier(build: Callable[[], Any]) -> Callable[[], Any]:
    """A model of `workloads.py`, compiled."""

    def made() -> Any:
        import keras

        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
        return model

    return made


def lstm() -> Any:
    """An LSTM of 128 units over 100 steps."""
    import keras
    from keras import layers

    return keras.Sequential([keras.Input((100, 64)), layers.LSTM(128), layers.Dense(10)])


def resnet50() -> Any:
    """Keras's ResNet-50 in mixed precision, with momentum."""
    import keras

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = keras.applications.ResNet50(weights=None)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def bert() -> Any:
    """A transformer encoder of BERT base's size: 12 blocks of 768, 12 heads, 512 tokens, in mixed precision."""
    import keras
    from keras import layers

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    tokens = keras.Input((512,), dtype="int32")
    x = layers.Embedding(30522, 768)(tokens)
    for _ in range(12):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(12, 64)(x, x)]))
        y = layers.Dense(768)(layers.Dense(3072, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    model = keras.Model(tokens, layers.Dense(2, dtype="float32")(x[:, 0]))
    model.compile(keras.optimizers.AdamW(5e-5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


CASES = {
    "mlp": Case("MLP 784-128-10", classifier(workloads.mlp), 256),
    "cnn": Case("CNN, 3 × (conv, BatchNorm)", classifier(workloads.cnn), 128),
    "transformer": Case("transformer, 2 blocks", classifier(workloads.transformer), 64),
    "lstm": Case("LSTM, 100 steps", classifier(lstm), 256),
    "resnet50": Case("ResNet-50, bfloat16", resnet50, 128, ("v2:2x2",)),
    "bert": Case("transformer of BERT base's size, bfloat16", bert, 32),
}


def one(name: str, topology: str, path: str) -> None:
    """Compiles one case, and writes what was found."""
    import keras_distribute as kd
    from keras_distribute.dry_run.targets import parse

    case = CASES[name]
    found = kd.dry_run(case.build, case.rows * parse(topology).num_devices, topology)
    print(found, flush=True)
    found.save(path)


def row(name: str, facts: dict[str, Any]) -> list[str]:
    """The line of one case in the table."""
    memory, estimate = facts["memory"], facts["estimate"]
    if memory is None:
        needed, limit = facts["needed_bytes"] / 2**30, facts["limit_bytes"] / 2**30
        return [
            CASES[name].title,
            facts["topology"],
            f"{facts['batch']:,}",
            f"{needed:.2f} of {limit:.2f}: too large",
        ] + ["–"] * 6
    kinds = [each["kind"] for each in facts["collectives"]]
    others = len(kinds) - kinds.count("all-reduce")
    flops = sum(facts["flops"].values())
    return [
        CASES[name].title,
        facts["topology"],
        f"{facts['batch']:,}",
        f"{facts['needed_bytes'] / 2**20:,.1f} of {facts['limit_bytes'] / 2**20:,.0f}",
        f"{facts['num_gradients']}",
        f"{kinds.count('all-reduce')}" + (f" + {others} other" if others else ""),
        f"{flops:.3g}",
        f"{facts['bytes_moved'] / 2**20:,.1f}",
        f"{estimate['at_least'] * 1e3:.3g}–{estimate['in_turn'] * 1e3:.3g} ({estimate['bound_by']})",
        f"{facts['compile_seconds']:.0f}",
    ]


def markdown(cases: dict[str, dict[str, Any]]) -> str:
    """The table of all cases."""
    header = [
        "model",
        "topology",
        "batch",
        "peak memory of a device, MiB",
        "gradients",
        "all-reduces",
        "FLOPs of a device",
        "bytes moved, MiB",
        "ESTIMATED ms a step",
        "compiled in, s",
    ]
    rows = [row(key.partition("@")[0], facts) for key, facts in cases.items()]
    notes = (
        "Compiled ahead of time by libtpu on a machine without a TPU; no step was run. Memory and collectives are the "
        "compiler's. The times are ESTIMATES from published peak rates, from everything overlapping to collectives that "
        "overlap with nothing; real steps take longer."
    )
    return f"{report.table(header, rows, 'lrrrrrrrrr')}\n\n{notes}\n\n{check(cases)}"


# Cloud TPU v2-8 (8 cores), bfloat16, batch 1,024, real ImageNet data: 3,186 images a second.
PUBLISHED_V2 = 3186.0
PUBLISHED_V2_SOURCE = "https://web.archive.org/web/2018/https://blog.riseml.com/comparing-google-tpuv2-against-nvidia-v100-on-resnet-50-c2bbb6a51e5e"


def check(cases: dict[str, dict[str, Any]]) -> str:
    """The estimate beside a published measurement."""
    facts = cases.get("resnet50@v2:2x2")
    if facts is None or facts["estimate"] is None:
        return ""
    measured = facts["batch"] / PUBLISHED_V2
    low, high = facts["estimate"]["at_least"], facts["estimate"]["in_turn"]
    return (
        f"Published measurement: ResNet-50 on a Cloud TPU v2-8, batch 1,024, {PUBLISHED_V2:,.0f} images a second, "
        f"{measured * 1e3:.0f} ms a step ([RiseML, 2018]({PUBLISHED_V2_SOURCE})). Estimated here for v2:2x2: "
        f"{low * 1e3:.0f} to {high * 1e3:.0f} ms, {low / measured:.2f} to {high / measured:.2f} of it."
    )


def draw(cases: dict[str, dict[str, Any]]) -> None:
    """Memory and estimated time of each case."""
    from matplotlib.figure import Figure

    shown = {key: facts for key, facts in cases.items() if facts["memory"] is not None}
    figure = Figure(figsize=(11, 0.8 + 0.28 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [key.replace("@", " on ") for key in shown]
    left.barh(names, [f["needed_bytes"] / f["limit_bytes"] * 100 for f in shown.values()], color="#4c72b0")
    left.set_xlabel("peak memory, % of what a program may take")
    left.invert_yaxis()
    for part, color in (("compute", "#4c72b0"), ("memory", "#55a868"), ("communication", "#c44e52")):
        values = [f["estimate"][part] * 1e3 for f in shown.values()]
        right.plot(values, names, "o", color=color, label=part)
    right.set_xscale("log")
    right.set_xlabel("ms a step, ESTIMATED from peak rates")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(report.RESULTS / "dry_run.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="models, or model@topology; all by default")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return one(*given.child)
    keys = [f"{name}@{topology}" for name, case in CASES.items() for topology in (*TOPOLOGIES, *case.others)]
    chosen = [key for key in keys if not given.which or key in given.which or key.partition("@")[0] in given.which]
    file = report.RESULTS / "dry_run.json"
    known = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() and given.which else {}
    for key in chosen:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "found.json")
            subprocess.run([sys.executable, __file__, "--child", *key.split("@"), path], check=True, timeout=LARGEST)
            known[key] = json.loads(Path(path).read_text(encoding="utf-8"))
        cases = {key: known[key] for key in keys if key in known}
        report.write("dry_run", {"cases": cases}, markdown(cases), quiet=True)
    draw(cases)


if __name__ == "__main__":
    main()

"""Training steps compiled for TPUs that are not there: memory, collectives, FLOPs, and
estimated times. Nothing is run.

    # All of it, about half an hour on two idle cores:
    python benchmarks/dry_run.py
    # One model, one case; the other results stay:
    python benchmarks/dry_run.py resnet50 lstm@v6e:2x2

Writes results/dry_run.md, .json and .svg. Needs `pip install
'keras-distribute[dry-run-tpu,dry-run-cuda,plots]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import report
import workloads

TOPOLOGIES = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v6e:2x2")
LARGEST = 460  # Seconds that one case may take.


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Args:
        title: Of its row.
        build: Makes and compiles it.
        rows: On each device.
        topologies: To compile for.
    """

    title: str
    build: Callable[[], Any]
    rows: int
    topologies: tuple[str, ...] = TOPOLOGIES


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

    return keras.Sequential(
        [keras.Input((100, 64)), layers.LSTM(128), layers.Dense(10)]
    )


def resnet50() -> Any:
    """Keras's ResNet-50 in mixed precision, with momentum."""
    import keras

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = keras.applications.ResNet50(weights=None)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy"
    )
    return model


def bert() -> Any:
    """A classifier of BERT base's size: 12 blocks of 768, 12 heads, 512 tokens, dropout
    of 0.1; in float32.
    """
    import keras
    from keras import layers

    tokens = keras.Input((512,), dtype="int32")
    x = layers.Dropout(0.1)(
        layers.LayerNormalization()(layers.Embedding(30522, 768)(tokens))
    )
    for _ in range(12):
        y = layers.Dropout(0.1)(layers.MultiHeadAttention(12, 64, dropout=0.1)(x, x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
        y = layers.Dropout(0.1)(
            layers.Dense(768)(layers.Dense(3072, activation="gelu")(x))
        )
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    pooled = layers.Dense(768, activation="tanh")(x[:, 0])
    model = keras.Model(tokens, layers.Dense(2)(layers.Dropout(0.1)(pooled)))
    model.compile(
        keras.optimizers.AdamW(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


CASES = {
    "mlp": Case("MLP 784-128-10", classifier(workloads.mlp), 256),
    "cnn": Case("CNN, 3 × (conv, BatchNorm)", classifier(workloads.cnn), 128),
    "transformer": Case("transformer, 2 blocks", classifier(workloads.transformer), 64),
    "lstm": Case("LSTM, 100 steps", classifier(lstm), 256),
    "resnet50": Case("ResNet-50, bfloat16", resnet50, 128, (*TOPOLOGIES, "v2:2x2")),
    "bert": Case("BERT base, 512 tokens", bert, 32, ("a100:1",)),
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
        f"{between(estimate['at_least'], estimate['in_turn'], '.3g')} "
        f"({estimate['bound_by']})",
        f"{facts['compile_seconds']:.0f}",
    ]


def between(low: float, high: float, form: str) -> str:
    """Seconds as milliseconds, from and to."""
    numbers = dict.fromkeys(f"{seconds * 1e3:{form}}" for seconds in (low, high))
    return "–".join(numbers)


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
        "Compiled ahead of time, by libtpu and JAX's CUDA plugin, on a machine without "
        "TPU and GPU; no step was run. "
        "Memory and collectives are the compiler's. The times are ESTIMATES from "
        "published peak rates, from everything "
        "overlapping to collectives that overlap with nothing; real steps take longer, "
        "those of the small models far "
        "longer, since starting a program is not counted. The seconds of compiling are "
        "of a machine that did other "
        "work, too."
    )
    return f"{report.table(header, rows, 'lrrrrrrrrr')}\n\n{notes}\n\n{check(cases)}"


# What others have measured: the case, milliseconds of a step, and what and where.
PUBLISHED = {
    "resnet50@v2:2x2": (
        1024 / 3186 * 1e3,
        "ResNet-50 on a Cloud TPU v2-8, 3,186 images a second, here for 1,024 of them "
        "(quoted in a discussion of a "
        "comparison by RiseML, 2018, which does not say whose measurement it was: "
        "https://news.ycombinator.com/item?id=16931394)",
    ),
    "bert@a100:1": (
        222.37,
        "BERT base, `fit` of Keras 3 on JAX on an A100 40 GB in float32, batch 32, 512 "
        "tokens "
        "(https://keras.io/getting_started/benchmarks/)",
    ),
}


def check(cases: dict[str, dict[str, Any]]) -> str:
    """Estimates beside published measurements."""
    lines: list[list[str]] = []
    for key, (measured, what) in PUBLISHED.items():
        estimate = cases[key]["estimate"] if key in cases else None
        if estimate is not None:
            low, high = estimate["at_least"], estimate["in_turn"]
            estimated = f"{between(low, high, '.0f')} ({estimate['bound_by']})"
            lines.append(
                [
                    what,
                    f"{measured:.0f}",
                    estimated,
                    between(low / measured, high / measured, ".2f"),
                ]
            )
    header = [
        "published measurement",
        "measured, ms",
        "ESTIMATED here, ms",
        "estimate / measurement",
    ]
    return report.table(header, lines, "lrrr") if lines else ""


def draw(cases: dict[str, dict[str, Any]]) -> None:
    """Memory and estimated time of each case."""
    from matplotlib.figure import Figure

    shown = {key: facts for key, facts in cases.items() if facts["memory"] is not None}
    figure = Figure(figsize=(11, 0.8 + 0.28 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [key.replace("@", " on ") for key in shown]
    left.barh(
        names,
        [f["needed_bytes"] / f["limit_bytes"] * 100 for f in shown.values()],
        color="#4c72b0",
    )
    left.set_xlabel("peak memory, % of what a program may take")
    left.invert_yaxis()
    for part, color in (
        ("compute", "#4c72b0"),
        ("memory", "#55a868"),
        ("communication", "#c44e52"),
    ):
        values = [f["estimate"][part] * 1e3 for f in shown.values()]
        right.plot(values, names, "o", color=color, label=part)
    right.set_xscale("log")
    right.set_xlabel("ms a step, ESTIMATED from peak rates")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(report.RESULTS / "dry_run.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "which", nargs="*", help="models, or model@topology; all by default"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        one(*given.child)
        return
    keys = [
        f"{name}@{topology}"
        for name, case in CASES.items()
        for topology in case.topologies
    ]
    chosen = [
        key
        for key in keys
        if not given.which or key in given.which or key.partition("@")[0] in given.which
    ]
    known = report.known_cases("dry_run") if given.which else {}
    for key in chosen:
        known[key] = report.from_child(__file__, *key.split("@"), seconds=LARGEST)
        cases = {key: known[key] for key in keys if key in known}
        report.write(
            "dry_run", {"cases": cases}, markdown(cases), quiet=True, how="Compiled"
        )
    draw(cases)


if __name__ == "__main__":
    main()

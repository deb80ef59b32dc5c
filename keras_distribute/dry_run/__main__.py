"""A dry run from the command line: `python -m keras_distribute.dry_run --model
module:function --batch 256`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from keras_distribute.dry_run import dry_run
from keras_distribute.errors import DistributeError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 where the step fits, or nobody knows;
    1 where it does not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_distribute.dry_run",
        description="Compiles the training step of a Keras model for hardware that "
        "need not be there, and says what it "
        "would take. The exit code is 1 where it does not fit.",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="module:function, which makes and compiles the model",
    )
    parser.add_argument(
        "--batch",
        required=True,
        help="rows of the global batch, or module:function, which makes one",
    )
    parser.add_argument(
        "--topology", default="v5e:4x4", help='such as "v5e:4x4", "h100:8" or "cpu:8"'
    )
    parser.add_argument(
        "--largest-batch",
        action="store_true",
        help="search the largest batch that fits",
    )
    parser.add_argument(
        "--memory-limit",
        type=int,
        help="bytes of each device, in place of what is known of it",
    )
    parser.add_argument(
        "--shard-optimizer-state",
        action="store_true",
        help="divide the optimizer's slots",
    )
    parser.add_argument("--json", help="write everything to this file")
    parser.add_argument("--plot", help="draw it to this file")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        report = dry_run(
            _load(parser, given.model),
            int(given.batch) if given.batch.isdigit() else _load(parser, given.batch)(),
            given.topology,
            largest_batch=given.largest_batch,
            memory_limit=given.memory_limit,
            shard_optimizer_state=given.shard_optimizer_state,
        )
    except DistributeError as error:
        parser.error(str(error))
    if given.json:
        report.save(given.json)
    if given.plot:
        report.plot(given.plot)
    sys.stdout.write(f"{report}\n")
    return 1 if report.fits is False else 0


def _load(parser: argparse.ArgumentParser, name: str) -> Any:
    """The function that `module:function` names; the folder of the call is searched,
    too.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        parser.error(f"{name!r} is not of the form module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        parser.error(f"{name!r} cannot be had: {error}")


if __name__ == "__main__":
    sys.exit(main())

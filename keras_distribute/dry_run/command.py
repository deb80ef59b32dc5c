"""A dry run from the command line: `keras-distribute dry-run --model module:function
--batch 256`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from keras_distribute.dry_run.api import dry_run
from keras_distribute.errors import DistributeError


def main(
    arguments: Sequence[str] | None = None,
    prog: str = "python -m keras_distribute.dry_run",
) -> int:
    """The command line; returns the exit code: 1 where the step does not fit, 0 where
    it fits or the size of the memory is not known, 2 where that was not found out.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compiles the training step of a Keras model for hardware that "
        "need not be there, and says what it would take. The exit code is 1 where it "
        "does not fit.",
    )
    add = parser.add_argument
    add("--model", required=True, help="module:function that makes a compiled model")
    batch_help = "rows of the global batch, or module:function that makes one"
    add("--batch", required=True, help=batch_help)
    add("--topology", default="v5e:4x4", help='"v5e:4x4", "h100:8", "cpu:8", ...')
    largest_help = "search the largest batch that fits"
    add("--largest-batch", action="store_true", help=largest_help)
    limit_help = "bytes of each device, in place of what is known of it"
    add("--memory-limit", type=int, help=limit_help)
    shard_help = "shard the optimizer state over the replicas"
    add("--shard-optimizer-state", action="store_true", help=shard_help)
    shard_help = "shard weights, gradients and optimizer state over the replicas"
    add("--shard-variables", action="store_true", help=shard_help)
    quiet_help = "do not say how long the compiler has taken"
    add("--quiet", action="store_true", help=quiet_help)
    add("--json", help="write everything to this file")
    add("--plot", help="draw it to this file")
    options = parser.parse_args(arguments)
    batch = options.batch
    try:
        report = dry_run(
            _load(parser, options.model),
            int(batch) if batch.isdigit() else _load(parser, batch)(),
            options.topology,
            largest_batch=options.largest_batch,
            memory_limit=options.memory_limit,
            shard_optimizer_state=options.shard_optimizer_state,
            shard_variables=options.shard_variables,
            verbose=not options.quiet,
        )
        if options.json:
            report.save(options.json)
        if options.plot:
            report.plot(options.plot)
    except DistributeError as error:
        parser.error(str(error))
    except Exception:  # Python would end with 1, as where the step does not fit.
        traceback.print_exc()
        return 2
    sys.stdout.write(f"{report}\n")
    return 1 if report.fits is False else 0


def _load(parser: argparse.ArgumentParser, name: str) -> Any:
    """The function that `module:function` names, also of the current folder."""
    module, _, function = name.partition(":")
    if not module or not function:
        parser.error(f"{name!r} is not of the form module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        parser.error(f"{name!r} cannot be imported: {error}")

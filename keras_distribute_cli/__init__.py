"""The command `keras-distribute`: its help, and which module has which subcommand.

It stands beside the package `keras_distribute`, not in it: importing anything of that
imports Keras and JAX, which takes seconds, and help needs neither.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand.

    Args:
        module: What has its `main(arguments, prog)`, which returns the exit code.
        help: One line.
    """

    module: str
    help: str


COMMANDS = {
    "env": Command(
        "keras_distribute.commands.env",
        "Show versions, devices and cluster of this machine, for a bug report",
    ),
    "test": Command(
        "keras_distribute.commands.check",
        "Train with every strategy that can run here, beside one device of Keras",
    ),
    "launch": Command(
        "keras_distribute.launch.command",
        "Start a script in several processes of this host",
    ),
    "dry-run": Command(
        "keras_distribute.dry_run.command",
        "Compile a training step for TPUs and GPUs that are not there",
    ),
    "replay": Command(
        "keras_distribute.commands.replay",
        "Run a training step that was kept again, and compare the bits",
    ),
}


def main(arguments: Sequence[str] | None = None, prog: str = "keras-distribute") -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = given[0] if given else "--help"
    if first in ("-h", "--help", "help"):
        _show(usage(prog))
        return 0 if given else 2
    if first in ("-V", "--version"):
        version = importlib.metadata.version("keras-distribute")
        _show(f"keras-distribute {version}")
        return 0
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, 1)
        hint = f"  Did you mean {near[0]!r}?\n" if near else ""
        names = ", ".join(COMMANDS)
        sys.stderr.write(
            f"error: there is no command {first!r}.\n{hint}  Commands: {names}. "
            f"For help: {prog} --help\n"
        )
        return 2
    try:
        module = importlib.import_module(COMMANDS[first].module)
    except ImportError as error:  # A Keras or JAX that cannot work, or none.
        sys.stderr.write(f"error: {error}\n")
        return 1
    return module.main(given[1:], f"{prog} {first}")


def usage(prog: str) -> str:
    """The help, in the markup of `rich`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "tf.distribute.Strategy for Keras 3 on JAX",
        "",
        f"[bold green]Usage:[/] [bold cyan]{prog}[/] [cyan]<command> \\[options][/]",
        "",
        "[bold green]Commands:[/]",
        *(
            f"  [bold cyan]{name:<{width}}[/]{command.help}"
            for name, command in COMMANDS.items()
        ),
        "",
        "[bold green]Options:[/]",
        f"  [bold cyan]{'--version':<{width + 2}}[/]Show the version",
        f"  [bold cyan]{'--help':<{width + 2}}[/]Show this help",
        "",
        f"Help for one of them: [bold cyan]{prog} <command> --help[/]",
    ]
    return "\n".join(lines)


def _show(text: str) -> None:
    """Prints text with markup: in colours on a terminal, where `rich` is installed."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(highlight=False, soft_wrap=True).print(text)
            return
    sys.stdout.write(f"{_plain(text)}\n")


def _plain(text: str) -> str:
    for style in ("bold green", "bold cyan", "cyan", "/"):
        text = text.replace(f"[{style}]", "")
    return text.replace("\\[", "[")

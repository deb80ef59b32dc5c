"""Subcommands of `keras-distribute` that look at this machine."""

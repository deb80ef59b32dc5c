"""The private names of JAX that we use, each with the reason.

- `xla_bridge.backends_are_initialized`: the number of CPU devices and the size of XLA's thread pool can only be chosen
  before JAX creates its client, and JAX has no public question for that. Goes when it has one.
"""

from __future__ import annotations

from jax._src import xla_bridge


def backends_are_initialized() -> bool:
    """Whether JAX has already created a client, after which devices and thread pools are fixed."""
    return xla_bridge.backends_are_initialized()

"""Eight virtual CPU devices for every test, set up before JAX starts."""

import keras_distribute as kd

kd.config.set_cpu_devices(8)

import jax
import pytest


@pytest.fixture
def compilations():
    """A list that grows by one for each XLA compilation."""
    seen = []

    def listen(name, *args, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)

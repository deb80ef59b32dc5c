"""Eight virtual CPU devices for every test, set up before JAX starts."""

import keras_distribute as kd

kd.config.set_cpu_devices(8)

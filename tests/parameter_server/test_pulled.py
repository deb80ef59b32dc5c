"""What a worker knows of a parameter server."""

import time

import numpy as np

from keras_distribute.servers.pulled import Pulled, Wanted


def test_many_variables_of_one_server_are_looked_for_once():
    pulled, zero = Pulled(channel=None), np.zeros(())
    wanted = Wanted(list(range(4000)), [(4000, np.arange(3))])
    pulled.note({"version": 2, "writes": 1}, wanted, [zero] * 4001)
    begun = time.process_time()
    assert pulled.has(wanted, [2, 1])
    assert time.process_time() - begun < 0.2
    pulled.time = time.monotonic()
    assert not pulled.has(Wanted([*wanted.keys, 4000], wanted.rows), [2, 1])
    assert not pulled.has(Wanted([1], [(4000, np.arange(3))]), [2, 1])

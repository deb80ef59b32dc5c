"""Variables in parts on several servers."""

import keras
import numpy as np

import keras_distribute as kd


def test_a_divided_variable_trains_as_a_whole_one():
    cluster = kd.testing.ParameterServerCluster(num_workers=1, num_ps=2)
    x = np.random.RandomState(0).randn(32, 13).astype("float32")
    y = x.sum(1, keepdims=True)

    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((13,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    with cluster:
        strategy = kd.ParameterServerStrategy(
            cluster.cluster_resolver,
            variable_partitioner=kd.experimental.partitioners.FixedShardsPartitioner(5),
        )
        with strategy.scope():
            model = make()
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        place = strategy.cluster.served.place_of(model.layers[0].kernel)
        rows = [part.stop - part.start for part in place.parts]
        assert rows == [3, 3, 3, 2, 2]
        assert {part.server for part in place.parts} == {0, 1}
        ours = model.layers[0].kernel.numpy()
        strategy.close()
    plain = make()
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(ours, plain.layers[0].kernel.numpy(), rtol=1e-5)

"""What TensorFlow has deprecated is there as what has replaced it, and says so once; all
of `tf.compat.v1.distribute` is there.
"""

import json
import warnings

import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.strategies import deprecated
from tests.support import mirrored

V1 = kd.compat.v1.distribute


@pytest.fixture(autouse=True)
def anew():
    """Each test is warned as the first one is."""
    deprecated.warn_once.cache_clear()


def warned(name, advice):
    return pytest.warns(
        DeprecationWarning,
        match=f"^{name} is deprecated and will be removed in a future version.\n"
        f"Instructions for updating:\n{advice}$",
    )


def test_methods_of_a_strategy():
    strategy = mirrored(2)
    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    with warned("unwrap", "use `experimental_local_results` instead."):
        assert [float(part) for part in strategy.unwrap(x)] == [0, 1]
    with warned("experimental_run_v2", "renamed to `run`"):
        twice = strategy.experimental_run_v2(lambda x: 2 * x, args=(x,))
    assert [float(part) for part in twice.values] == [0, 2]

    def dataset_fn(context):
        return kd.ArrayDataset(np.arange(4.0), batch_size=1)

    name = "experimental_distribute_datasets_from_function"
    with warned(name, "rename to distribute_datasets_from_function"):
        dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    with warned("experimental_run", r"use run\(\) instead"):
        found = strategy.experimental_run(lambda x: x + 1, iter(dataset))
    assert [part.tolist() for part in found.values] == [[1.0], [2.0]]
    assert len(strategy.experimental_run(lambda: np.ones(1)).values) == 2
    with pytest.raises(kd.errors.StructureTypeError) as raised:
        strategy.experimental_run(lambda x: x, dataset)
    assert str(raised.value).startswith(
        "experimental_run takes the iterator of a distributed dataset.\n  Received: "
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Once is enough.
        strategy.unwrap(x)


def test_names_that_are_absent_say_what_to_write():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(kd.ArrayDataset(np.ones(4), 2))
    with pytest.raises(AttributeError, match=r"(?s)no attribute.*Fix: iter\(strategy"):
        strategy.make_dataset_iterator(dataset)
    with pytest.raises(
        AttributeError, match=r"(?s)StrategyExtended.*Fix: strategy.run"
    ):
        strategy.extended.call_for_each_replica(lambda: 1)
    assert not hasattr(strategy, "configure")
    for other in (strategy, strategy.extended):
        with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
            other.nothing  # noqa: B018


def test_options_of_communication():
    experimental = kd.experimental
    known = experimental.CommunicationImplementation
    assert experimental.CollectiveCommunication is known
    advice = "use distribute.experimental.CommunicationOptions instead"
    with warned("CollectiveHints", advice):
        hints = experimental.CollectiveHints(bytes_per_pack=7, timeout_seconds=3.0)
    assert hints == experimental.CommunicationOptions(
        bytes_per_pack=7, timeout_seconds=3.0
    )


def test_strategies(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    experimental = kd.experimental
    with warned(
        "experimental.MultiWorkerMirroredStrategy",
        "use distribute.MultiWorkerMirroredStrategy instead",
    ):
        strategy = experimental.MultiWorkerMirroredStrategy(
            experimental.CollectiveCommunication.RING
        )
    assert isinstance(strategy, kd.MultiWorkerMirroredStrategy)
    newer = kd.MultiWorkerMirroredStrategy()
    assert isinstance(newer, experimental.MultiWorkerMirroredStrategy)
    assert not isinstance(mirrored(1), experimental.MultiWorkerMirroredStrategy)
    advice = (
        "please use the non-experimental symbol `tf.distribute.TPUStrategy` instead."
    )
    resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
    with warned("experimental.TPUStrategy", advice):
        strategy = experimental.TPUStrategy(resolver)
    assert isinstance(strategy, kd.TPUStrategy)
    assert isinstance(kd.TPUStrategy(resolver), experimental.TPUStrategy)


def test_names_of_version_1_are_the_same_objects():
    for name in V1.__all__:
        assert name == "experimental" or getattr(V1, name) is getattr(kd, name)
    for name in V1.experimental.__all__:
        if name != "ParameterServerStrategy":
            assert getattr(V1.experimental, name) is getattr(kd.experimental, name)
    assert issubclass(
        V1.experimental.ParameterServerStrategy, kd.ParameterServerStrategy
    )


def test_version_1_has_all_of_tensorflows_names():
    tf = pytest.importorskip("tensorflow")
    theirs = tf.compat.v1.distribute
    for module, ours in [
        (theirs, V1),
        (theirs.experimental, V1.experimental),
        (theirs.cluster_resolver, V1.cluster_resolver),
    ]:
        names = {name for name in dir(module) if not name.startswith("_")}
        assert names - set(ours.__all__) == set()


def test_parameter_servers_of_version_1_read_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(kd.errors.ClusterError):
        V1.experimental.ParameterServerStrategy()
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(kd.errors.ClusterError) as raised:
        V1.experimental.ParameterServerStrategy(None)
    assert str(raised.value).startswith("The cluster has no ps task.\n  Received: ")

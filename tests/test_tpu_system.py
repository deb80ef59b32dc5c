"""TPUs as they are found, named and laid out; here by what stands in for them."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.cluster import processes
from keras_distribute.cluster.resolvers import google_cloud
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.strategies import tpu
from keras_distribute.tpu import system
from tests.cluster.test_services import serving
from tests.logical import tpu_strategy

TPU = kd.tpu.experimental
CR = kd.cluster_resolver


def chip(
    number: int,
    process: int,
    *coords: int,
    core: int = 0,
    slice_index: int | None = None,
) -> Any:
    return types.SimpleNamespace(
        id=number,
        process_index=process,
        coords=coords,
        core_on_chip=core,
        slice_index=slice_index,
        platform="tpu",
    )


@pytest.fixture
def no_tpu_named(monkeypatch: Any) -> None:
    for name in (
        "TPU_NAME",
        "TPU_CONFIG",
        "TPU_WORKER_HOSTNAMES",
        "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: kd.TPUStrategy(),
        lambda: kd.TPUStrategy(tpu=""),
        lambda: kd.TPUStrategy(tpu="local"),
        lambda: kd.TPUStrategy(CR.TPUClusterResolver("")),
        TPU.initialize_tpu_system,
        TPU.shutdown_tpu_system,
    ],
)
def test_without_a_tpu_the_error_says_how_to_use_cpu_devices(
    ask: Any, no_tpu_named: None
) -> None:
    with pytest.raises(kd.errors.DeviceError) as raised:
        ask()
    text = str(raised.value)
    assert (
        text.startswith("This machine has no TPU that JAX can use.")
        and "8 cpu device(s)" in text
    )
    assert (
        'kd.config.set_cpu_devices(8) first thing in it, and kd.TPUStrategy(tpu="cpu")'
        in text
    )


def test_the_code_of_the_error_works_in_a_new_program() -> None:
    code = "import keras_distribute as kd; kd.config.set_cpu_devices(8); print(kd.TPUStrategy())"
    environment = {
        "TPU_NAME": "cpu",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "HOME": "/tmp",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == "TPUStrategy(8 replica(s) x 1 logical device(s), cpu)"


def test_arguments_are_checked() -> None:
    with pytest.raises(kd.errors.ValueStructureError, match="A TPU is named once"):
        kd.TPUStrategy(CR.TPUClusterResolver("cpu"), tpu="cpu")
    with pytest.raises(
        kd.errors.StructureTypeError, match="named by a ClusterResolver"
    ):
        kd.TPUStrategy("cpu")  # type: ignore[arg-type]
    with pytest.raises(
        kd.errors.StructureTypeError, match="(?s)named by a string.*tpu=3"
    ):
        kd.TPUStrategy(tpu=3)  # type: ignore[arg-type]
    with pytest.raises(
        kd.errors.StructureTypeError, match="given as a DeviceAssignment"
    ):
        kd.TPUStrategy(CR.TPUClusterResolver("cpu"), [0, 1])  # type: ignore[arg-type]
    other = TPU.Topology(
        mesh_shape=[1, 2, 1, 1], device_coordinates=[[[0, 0, 0, 0], [0, 1, 0, 0]]]
    )
    with pytest.raises(kd.errors.DeviceError, match="for another TPU than this one"):
        kd.TPUStrategy(CR.TPUClusterResolver("cpu"), TPU.DeviceAssignment.build(other))
    here = TPU.initialize_tpu_system(CR.TPUClusterResolver("cpu"))
    with pytest.raises(kd.errors.DeviceError, match=r"of shape \(2, 0, 4\)"):
        TPU.DeviceAssignment(here, np.zeros((2, 0, 4), int))
    with pytest.raises(kd.errors.DeviceError, match="A device belongs to one replica"):
        kd.TPUStrategy(
            CR.TPUClusterResolver("cpu"),
            TPU.DeviceAssignment(here, [[[0, 0, 0, 0]], [[0, 0, 0, 0]]]),
        )


def test_a_strategy_on_some_of_the_devices() -> None:
    resolver = CR.TPUClusterResolver("cpu")
    topology = TPU.initialize_tpu_system(resolver)
    assignment = TPU.DeviceAssignment.build(
        topology, computation_shape=[2, 1, 1, 1], num_replicas=3
    )
    strategy = kd.TPUStrategy(resolver, assignment)
    assert strategy.replica_mesh.devices == tuple(
        jax.devices()[i] for i in (0, 1, 2, 3, 4, 5)
    )
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:2", "cpu:4")
    assert strategy.cluster_resolver is resolver
    with strategy.scope():
        variable: Any = keras.Variable(np.ones(2))
    assert len(variable.values) == 3


def test_values_have_one_component_for_each_replica() -> None:
    strategy = tpu_strategy(4)
    values = strategy.experimental_distribute_values_from_function(
        lambda c: np.ones(c.replica_id_in_sync_group + 1)
    )
    assert [v.shape for v in values.values] == [(1,), (2,)]
    np.testing.assert_array_equal(strategy.gather(values, axis=0), np.ones(3))
    mixed = strategy.experimental_distribute_values_from_function(
        lambda c: np.ones((1,) * c.replica_id_in_sync_group)
    )
    assert [v.ndim for v in mixed.values] == [0, 1]
    summed = strategy.extended.reduce_to(
        "SUM", strategy.run(lambda x: x, args=(np.ones(2),)), None
    )
    np.testing.assert_array_equal(summed, [2.0, 2.0])
    assert strategy.experimental_local_results({"a": values, "b": 1})[1]["b"] == 1
    assert len(strategy.experimental_local_results([values, 1])) == 2


def test_options_of_run() -> None:
    strategy = tpu_strategy(2)

    def step(x: Any) -> Any:
        return 2 * x

    for flag in (False, True):
        options = kd.RunOptions(
            experimental_enable_dynamic_batch_size=flag,
            experimental_xla_options={"xla_embed_ir_in_executable": False},
        )
        for rows in (2, 3):
            result = strategy.run(step, args=(np.ones(rows),), options=options)
            assert float(strategy.reduce("SUM", result, axis=0)) == 2.0 * rows * 4
    unknown = kd.RunOptions(experimental_xla_options={"xla_no_such_option": 1})
    # The compiler is really told.
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        strategy.run(step, args=(np.ones(2),), options=unknown)


@pytest.mark.parametrize(
    ("devices", "shape", "places"),
    [
        (
            [[chip(0, 0, 0, 0, 0), chip(1, 0, 0, 0, 0, core=1)]],
            [1, 1, 1, 2],
            [[[0, 0, 0, 0], [0, 0, 0, 1]]],
        ),
        (
            [[chip(4, 0, 2, 1, 0)], [chip(5, 1, 2, 2, 0)]],
            [1, 2, 1, 1],
            [[[0, 0, 0, 0]], [[0, 1, 0, 0]]],
        ),
        (
            [
                [chip(0, 0, 0, 0, 0, slice_index=0)],
                [chip(1, 1, 0, 0, 0, slice_index=1)],
            ],
            [1, 1, 2, 1],
            [[[0, 0, 0, 0]], [[0, 0, 1, 0]]],
        ),
    ],
    ids=["cores", "part of a slice", "two slices"],
)
def test_topologies_of_chips(devices: Any, shape: list[int], places: Any) -> None:
    topology = system.topology_of(devices)
    assert topology.mesh_shape.tolist() == shape
    assert topology.device_coordinates.tolist() == places


def test_unequal_hosts_and_replicas_over_hosts_are_refused() -> None:
    with pytest.raises(kd.errors.DeviceError, match="different numbers of devices"):
        system.topology_of([[chip(0, 0, 0, 0, 0)], []])
    hosts = [chip(0, 0, 0, 0, 0), chip(1, 1, 0, 1, 0)]
    with pytest.raises(kd.errors.DeviceError, match="belong to one process"):
        ReplicaMesh.of_groups([hosts])
    with pytest.raises(kd.errors.DeviceError, match="come in a row"):
        ReplicaMesh.of_groups([[hosts[0]], [hosts[1]], [chip(2, 0, 1, 0, 0)]])


def test_logical_devices_have_an_axis_for_each_prime_factor() -> None:
    devices = jax.devices()
    meshes = {n: ReplicaMesh.of_groups([devices[:n]]) for n in (1, 2, 3, 4, 6, 8)}
    assert meshes[1].logical_axes == () and meshes[3].logical_axes == ("logical",)
    assert {n: tuple(mesh.mesh.shape.values())[1:] for n, mesh in meshes.items()} == {
        1: (),
        2: (2,),
        3: (3,),
        4: (2, 2),
        6: (2, 3),
        8: (2, 2, 2),
    }


def test_resolvers_for_this_machine(no_tpu_named: None, monkeypatch: Any) -> None:
    assert CR.TPUClusterResolver("cpu").on_cpu and not CR.TPUClusterResolver("").on_cpu
    for name in ("cpu", "", "local"):
        resolver = CR.TPUClusterResolver(name)
        assert (resolver.master(), resolver.cluster_spec(), resolver.topology()) == (
            "",
            CR.ClusterSpec({}),
            CR.Topology(),
        )
    with pytest.raises(kd.errors.ClusterError, match='TPUClusterResolver\\("local"\\)'):
        CR.TPUClusterResolver()
    monkeypatch.setenv(
        "TPU_WORKER_HOSTNAMES",
        "WARNING: could not determine TPU worker hostnames, please set it",
    )
    assert CR.TPUClusterResolver("").topology() == CR.Topology()
    assert CR.automatic_resolver().topology() == CR.Topology()
    monkeypatch.setenv("TPU_NAME", "cpu")
    assert CR.TPUClusterResolver("").on_cpu and CR.TPUClusterResolver().on_cpu


# What notebooks and TPU virtual machines of one host have in their environment.
NOTEBOOKS = {
    "Colab": {
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5e-1",
        "TPU_SKIP_MDS_QUERY": "1",
    },
    "Kaggle": {
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_PROCESS_ADDRESSES": "local",
        "TPU_ACCELERATOR_TYPE": "v5e-8",
        "TPU_SKIP_MDS_QUERY": "1",
    },
    "Cloud TPU VM": {"TPU_NAME": "local"},
}


@pytest.mark.parametrize("where", NOTEBOOKS)
@pytest.mark.parametrize("tpu", ["", "local"])
def test_a_notebook_with_a_tpu_is_one_process(
    where: str, tpu: str, no_tpu_named: None, monkeypatch: Any
) -> None:
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    for name, value in NOTEBOOKS[where].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(google_cloud, "_CHIPS", ("/",))
    assert CR.TPUClusterResolver(tpu).topology() == CR.Topology()


@pytest.mark.parametrize("entries", ["a,b,c", "unknown:1:a,unknown:2:b,unknown:3:c"])
def test_a_tpu_machine_knows_the_hosts_of_its_slice(
    entries: str, no_tpu_named: None, monkeypatch: Any
) -> None:
    known = {
        "instance/attributes/worker-network-endpoints": entries,
        "instance/attributes/agent-worker-number": "2",
    }
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(google_cloud, "_CHIPS", ("/",))
    with serving(
        lambda method, path, query, body: known.get(
            path.removeprefix("/computeMetadata/v1/")
        )
    ) as address:
        monkeypatch.setenv("GCE_METADATA_IP", address)
        assert CR.TPUClusterResolver("").topology() == CR.Topology(2, 3, "a:8476")
        assert CR.TPUClusterResolver("local").topology() == CR.Topology()
        known["instance/attributes/tpu-env"] = (
            "ZONE: 'somewhere'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
            "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9:8080'\n"
        )
        several = CR.Topology(5, 6, "10.0.0.9:8476")
        assert CR.TPUClusterResolver("").topology() == several
        known.clear()
        assert CR.TPUClusterResolver("").topology() == CR.Topology()
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        assert CR.TPUClusterResolver("").topology() == CR.Topology()


def test_hosts_come_before_the_name_of_a_tpu(
    no_tpu_named: None, monkeypatch: Any
) -> None:
    """Pods of Ray on Kubernetes have both; their name is of no TPU of Google's cloud."""
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_NAME", "slice-A")
    assert CR.TPUClusterResolver("").topology() == CR.Topology(1, 2, "a:8476")
    monkeypatch.setenv("TPU_NAME", "local")
    assert CR.TPUClusterResolver("").topology() == CR.Topology()
    monkeypatch.setenv("TPU_NAME", "grpc://c,d")
    assert CR.TPUClusterResolver("").topology() == CR.Topology(1, 2, "c:8476")


def test_several_slices(monkeypatch: Any) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "first:8080")
    assert CR.TPUClusterResolver("grpc://a,b").topology() == CR.Topology(
        3, 4, "first:8476"
    )


def test_device_order_modes_and_bytes_are_checked() -> None:
    topology = TPU.initialize_tpu_system(CR.TPUClusterResolver("cpu"))
    assert (
        TPU.DeviceAssignment.build(topology.serialized(), num_replicas=8).num_replicas
        == 8
    )
    with pytest.raises(kd.errors.DeviceError, match="no serialized topology"):
        TPU.Topology(b"\x0a\xff")
    with pytest.raises(kd.errors.DeviceError, match="for a Topology"):
        TPU.DeviceAssignment.build(None)  # type: ignore[arg-type]
    with pytest.raises(kd.errors.DeviceError, match="Only 4 replica"):
        TPU.DeviceAssignment.build(
            topology, computation_shape=[1, 2, 1, 1], num_replicas=5
        )


def test_each_host_has_as_many_replicas_as_the_others() -> None:
    topology = TPU.Topology(
        mesh_shape=[4, 2, 1, 1],
        device_coordinates=[
            [[x + 2 * task, y, 0, 0] for y in (0, 1) for x in (0, 1)] for task in (0, 1)
        ],
    )
    devices = [[chip(4 * task + i, task, i) for i in range(4)] for task in (0, 1)]
    for count in (2, 3, 6):
        # Row by row of all chips: the first two are those of task 0.
        assignment = TPU.DeviceAssignment.build(topology, num_replicas=count)
        with pytest.raises(
            kd.errors.DeviceError, match=r"(?s)as many replicas as the others.*, \d rep"
        ):
            tpu._assigned(assignment, devices)
    everything = TPU.DeviceAssignment.build(topology, num_replicas=8)
    assert len(tpu._assigned(everything, devices)) == 8


def test_devices_of_processes_that_nothing_has_connected() -> None:
    chips = [chip(i, i // 4, i) for i in range(8)]
    with pytest.raises(kd.errors.ClusterError, match=r'of 2 processes.*\n.*\n.*tpu=""'):
        processes.check_connected(chips)
    processes.check_connected(chips[:4])

"""Resolvers that TensorFlow has not, what the environment chooses, and the errors."""

import pytest

import keras_distribute as kd
from keras_distribute.cluster.resolvers.slurm import (
    expand_hostlist,
    expand_tasks_per_node,
)

CR = kd.cluster_resolver
LAUNCHERS = (
    "KERAS_DISTRIBUTION_",
    "OMPI_",
    "SLURM_",
    "SM_",
    "TPU_",
    "TF_CONFIG",
    "PMIX_",
    "CUDA_VISIBLE",
)
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}
TF_CONFIG = {
    "TF_CONFIG": '{"cluster": {"worker": ["c:1", "d:1"]}, "task": {"type": "worker", "index": 0}}'
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)

    def put(*parts):
        for part in parts:
            for name, value in part.items():
                monkeypatch.setenv(name, value)

    return put


def test_the_environment_chooses_and_the_innermost_launcher_wins(environment):
    assert CR.automatic_resolver().topology() == CR.Topology(0, 1, None)
    chosen = [
        (TPU, CR.TPUClusterResolver, CR.Topology(1, 2, "t0:8476")),
        (SAGEMAKER, CR.SageMakerClusterResolver, CR.Topology(0, 2, "algo-1:2223")),
        (SLURM, CR.SlurmClusterResolver, CR.Topology(1, 2, "n1:8888")),
        (MPI, CR.OpenMPIClusterResolver, CR.Topology(2, 3, "10.96.0.1:62624")),
        (TF_CONFIG, CR.TFConfigClusterResolver, CR.Topology(0, 2, "c:1")),
        (KERAS, CR.KerasClusterResolver, CR.Topology(1, 2, "a:1")),
    ]
    for variables, resolver, topology in chosen:
        environment(variables)
        assert type(CR.automatic_resolver()) is resolver
        assert CR.automatic_resolver().topology() == topology


@pytest.mark.parametrize(
    "variables",
    [
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "8",
            "SLURM_JOB_NODELIST": "n[1-8]",
        },  # An allocation, without srun.
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # A shell on a node.
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1",
            "KERAS_DISTRIBUTION_PROCESS_ID": "0",
        },
    ],
)
def test_environments_of_one_process(variables, environment):
    environment(variables)
    assert CR.automatic_resolver().topology() == CR.Topology(0, 1, None)


def test_open_mpi_names_its_host_or_is_told(environment):
    environment(
        MPI, {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d]:43370"}
    )
    assert CR.OpenMPIClusterResolver().topology().coordinator == "[fe80::b9b]:62880"
    assert CR.OpenMPIClusterResolver().master() == "[fe80::b9b]:62880"
    environment(
        {
            "OMPI_MCA_orte_hnp_uri": "",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
            "PMIX_NAMESPACE": "prterun-1@1",
        }
    )
    local = CR.OpenMPIClusterResolver().topology().coordinator
    assert local.startswith("localhost:") and 61440 <= int(local.split(":")[1]) < 65536
    environment({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    with pytest.raises(
        kd.errors.ClusterError,
        match=r'(?s)which host process 0.*OpenMPIClusterResolver\("host0:1234"\)',
    ):
        CR.OpenMPIClusterResolver()
    assert CR.OpenMPIClusterResolver("h:5").topology() == CR.Topology(2, 3, "h:5")


def test_the_keras_variables_must_agree(environment):
    with pytest.raises(
        kd.errors.ClusterError, match="JOB_ADDRESSES is not in the environment"
    ):
        CR.KerasClusterResolver()
    environment(KERAS, {"KERAS_DISTRIBUTION_NUM_PROCESSES": "3"})
    with pytest.raises(
        kd.errors.ClusterError, match="2 addresses do not fit 3 processes"
    ):
        CR.KerasClusterResolver()
    environment(
        {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1",
            "KERAS_DISTRIBUTION_PROCESS_ID": "x",
        }
    )
    with pytest.raises(kd.errors.ClusterError, match="PROCESS_ID is a number"):
        CR.KerasClusterResolver()
    environment({"KERAS_DISTRIBUTION_PROCESS_ID": "7"})
    with pytest.raises(
        kd.errors.ClusterError, match="number of a process is from 0 to 2"
    ):
        CR.KerasClusterResolver().topology()


def test_slurm_lists():
    assert expand_hostlist("n[1-2],m5,o[3-4,6,7-9]") == [
        "n1",
        "n2",
        "m5",
        "o3",
        "o4",
        "o6",
        "o7",
        "o8",
        "o9",
    ]
    assert expand_hostlist("n[008-010],x") == ["n008", "n009", "n010", "x"]
    assert expand_tasks_per_node("3(x2),2,11(x4)") == [3, 3, 2, 11, 11, 11, 11]
    for wrong in ("a,,b", "a[1", "a]1", "a[1-2-3]", "a[x]", ",a"):
        with pytest.raises(kd.errors.ClusterError, match="no node list of Slurm"):
            expand_hostlist(wrong)
    with pytest.raises(kd.errors.ClusterError, match="no list of tasks per node"):
        expand_tasks_per_node("3(x")


def test_slurm_counts_the_gpus_of_the_node(environment, monkeypatch):
    import subprocess

    environment(SLURM, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    resolver = CR.SlurmClusterResolver(tasks_per_node={"n1": 1, "n2": 1})
    assert resolver.num_accelerators() == {"GPU": 4}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError())
    )
    assert CR.SlurmClusterResolver().num_accelerators() == {"GPU": 0}

    def fails(*_, **__):
        raise subprocess.CalledProcessError(1, "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(
        kd.errors.ClusterError, match="GPUs could not be read from nvidia-smi"
    ):
        CR.SlurmClusterResolver()


@pytest.mark.parametrize(("place", "own"), [("0", "4,6"), ("1", "5,7")])
@pytest.mark.parametrize("gpus_per_node", [None, 4])
def test_slurm_divides_the_gpus_that_are_visible(
    environment, gpus_per_node, place, own
):
    import os

    step = {
        "STEP_NUM_TASKS": "2",
        "STEP_NODELIST": "n1",
        "STEP_TASKS_PER_NODE": "2",
        "PROCID": place,
    }
    environment(
        {f"SLURM_{name}": value for name, value in step.items()},
        {"CUDA_VISIBLE_DEVICES": "4,6,5,7"},
    )
    resolver = CR.SlurmClusterResolver(gpus_per_node=gpus_per_node)
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        ({"boss": ["a:1"]}, (None, None), "no task type 'boss'"),
        ({"worker": ["a:1", "b:1"]}, ("boss", 0), "no task type 'boss'"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one chief"),
        ({"worker": ["a:1", "b:1"]}, ("worker", 2), "worker:2 is not in the cluster"),
        ({"worker": ["a:1", "b:1"]}, ("worker", -1), "worker:-1 is not in the cluster"),
        (
            {"worker": ["a:1", "b:1"]},
            (None, None),
            "has 2 processes, and nothing says which",
        ),
        (
            {"worker": {1: "b:1"}},
            ("worker", 0),
            "addresses of all workers must be known",
        ),
        (
            {"worker": {1: "b:1", 2: "c:1"}},
            ("worker", 2),
            "addresses of all workers must be known",
        ),
        (
            {"worker": ["a:1"], "ps": ["b:1"]},
            ("ps", 0),
            "Parameter servers take no part",
        ),
        ({"ps": ["b:1"]}, (None, None), "Parameter servers take no part"),
    ],
)
def test_clusters_without_a_place_for_this_process(cluster, task, text):
    resolver = CR.SimpleClusterResolver(
        CR.ClusterSpec(cluster), task_type=task[0], task_id=task[1]
    )
    with pytest.raises(kd.errors.ClusterError, match=text):
        resolver.topology()


def test_the_chief_is_first_and_an_evaluator_is_alone():
    cluster = CR.ClusterSpec(
        {"worker": ["w:1", "w:2"], "chief": ["c:1"], "ps": ["p:1"]}
    )
    place = {
        task: CR.SimpleClusterResolver(
            cluster, task_type=task[0], task_id=task[1]
        ).topology()
        for task in [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    }
    assert [t.process_id for t in place.values()] == [0, 1, 2, 0]
    assert [t.num_processes for t in place.values()] == [3, 3, 3, 1]
    assert {t.coordinator for t in place.values()} == {"c:1", None}


def test_several_processes_need_an_address():
    with pytest.raises(
        kd.errors.ClusterError, match="need the address of the first one"
    ):
        CR.Topology(0, 2)


def test_a_union_says_which_task_comes_twice():
    one = CR.SimpleClusterResolver(CR.ClusterSpec({"worker": {1: "a:1"}}))
    with pytest.raises(KeyError) as caught:
        CR.UnionResolver(one, one).cluster_spec()
    assert str(caught.value).startswith(
        "Two resolvers name the same tasks of the job 'worker': [1].\n  Received:"
    )


def test_tensorflow_s_own_specs_are_taken():
    import tensorflow as tf

    theirs = tf.train.ClusterSpec({"worker": {1: "b:1"}})
    assert (
        CR.ClusterSpec(theirs)
        == CR.ClusterSpec(theirs.as_cluster_def())
        == CR.ClusterSpec({"worker": {1: "b:1"}})
    )
    assert CR.SimpleClusterResolver(theirs).cluster_spec() == {"worker": {1: "b:1"}}
    with pytest.raises(TypeError, match="The cluster is a ClusterSpec"):
        CR.SimpleClusterResolver({"worker": ["a:1"]})


def test_accelerators_are_counted_where_the_process_is():
    resolver = CR.SimpleClusterResolver(CR.ClusterSpec({}))
    assert resolver.num_accelerators() == {}
    environment_of_cpus = CR.TFConfigClusterResolver(task_type="worker", task_id=0)
    assert environment_of_cpus.num_accelerators() == {}

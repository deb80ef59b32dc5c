"""Resolvers that TensorFlow has not, what the environment chooses, and the errors."""

import os
import socket
import subprocess

import pytest

import keras_distribute as kd
from keras_distribute.cluster.resolvers import mpi, slurm
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
    "MEGASCALE_",
    "TF_CONFIG",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
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
MPICH = {
    "PMI_SIZE": "3",
    "PMI_RANK": "1",
    "MPI_LOCALNRANKS": "3",
    "MPI_LOCALRANKID": "1",
}
PARENT = 2**16 - 4096 + os.getppid() % 4096
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [host])
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
        (MPICH, CR.MPICHClusterResolver, CR.Topology(1, 3, f"127.0.0.1:{PARENT}")),
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
        # An allocation, without srun.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-8]"},
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
    assert local.startswith("127.0.0.1:") and 61440 <= int(local.split(":")[1]) < 65536
    environment({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    with pytest.raises(
        kd.errors.ClusterError,
        match=r'(?s)which host process 0.*OpenMPIClusterResolver\("host0:1234"\)',
    ):
        CR.OpenMPIClusterResolver()
    assert CR.OpenMPIClusterResolver("h:5").topology() == CR.Topology(2, 3, "h:5")


def test_jobs_of_open_mpi_on_one_host_have_ports_of_their_own(environment):
    """Their names differ in a few digits."""
    environment(MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"})
    found = set()
    for process in range(10000, 10100):
        environment({"PMIX_NAMESPACE": f"prterun-host-{process}@1"})
        found.add(CR.OpenMPIClusterResolver().topology().coordinator)
    assert len(found) > 90


def test_mpich_finds_the_host_that_mpirun_was_started_on(
    environment, monkeypatch, tmp_path
):
    environment(MPICH, {"MPI_LOCALNRANKS": "2"})
    with pytest.raises(
        kd.errors.ClusterError,
        match=r'(?s)which host process 0.*MPICHClusterResolver\("host0:1234"\)',
    ):
        CR.MPICHClusterResolver()
    monkeypatch.setattr(mpi, "_PROCESSES", tmp_path)
    for process, words, parent in (
        (os.getpid(), "python", 7),
        (7, "sh -c", 8),
        (8, "hydra_pmi_proxy --control-port n1:33000 --proxy-id 0", 1),
    ):
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "cmdline").write_text(words.replace(" ", "\0"))
        (folder / "stat").write_text(f"{process} (a) b) S {parent} 1 1")
    port = 2**16 - 4096 + 33000 % 4096
    assert CR.MPICHClusterResolver().topology() == CR.Topology(1, 3, f"n1:{port}")
    environment({"MPI_LOCALNRANKS": "3"})
    local = CR.Topology(1, 3, f"127.0.0.1:{port}")
    assert CR.MPICHClusterResolver().topology() == local
    assert CR.MPICHClusterResolver("h:5").topology() == CR.Topology(1, 3, "h:5")
    monkeypatch.delenv("PMI_RANK")
    with pytest.raises(kd.errors.ClusterError, match="(?s)PMI_RANK is not in.*mpirun"):
        CR.MPICHClusterResolver()


def test_a_first_process_elsewhere_than_mpirun_is_an_error_at_once(
    environment, monkeypatch
):
    monkeypatch.undo()
    environment(MPI, {"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(
        kd.errors.ClusterError,
        match=r"(?s)Process 0 does not run on.*10\.96\.0\.1 as the address of mpirun"
        r'.*OpenMPIClusterResolver\("host0:1234"\)',
    ):
        CR.OpenMPIClusterResolver().topology()
    for known in ("127.0.0.1", "localhost"):
        uri = f"1531576320.0;tcp://{known}:34911"
        environment({"OMPI_MCA_orte_hnp_uri": uri})
        CR.OpenMPIClusterResolver().topology()


@pytest.mark.parametrize("resolver", ["OpenMPI", "MPICH"])
def test_the_processes_of_mpirun_share_the_gpus_of_their_host(environment, resolver):
    environment(
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_SIZE": "4", "PMI_RANK": "3"},
        {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
        {"CUDA_VISIBLE_DEVICES": "4,6,5,7"},
    )
    make = getattr(CR, f"{resolver}ClusterResolver")
    make("h:5", auto_set_gpu=False).topology()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6,5,7"
    shared = make("h:5")
    for _ in range(2):
        shared.topology()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
    environment({"CUDA_VISIBLE_DEVICES": "3"})
    make("h:5").topology()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


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


def a_step(rank, tasks_per_node, **more):
    """The variables of a task on the nodes n1, n2 and so on."""
    counts = expand_tasks_per_node(tasks_per_node)
    step = {
        "PROCID": str(rank),
        "STEP_NUM_TASKS": str(sum(counts)),
        "STEP_NODELIST": f"n[1-{len(counts)}]",
        "STEP_TASKS_PER_NODE": tasks_per_node,
    }
    return {f"SLURM_{name}": value for name, value in (step | more).items()}


@pytest.mark.parametrize(
    ("distribution", "places"),
    [
        ({}, "11 12 13 14 21 22"),
        ({"DISTRIBUTION": "block:cyclic"}, "11 12 13 14 21 22"),
        ({"DISTRIBUTION": "cyclic"}, "11 21 12 22 13 14"),
        ({"DISTRIBUTION": "plane", "DIST_PLANESIZE": "2"}, "11 12 21 22 13 14"),
    ],
)
def test_slurm_tasks_are_where_the_distribution_puts_them(
    environment, distribution, places
):
    environment(a_step(3, "4,2", **distribution))
    spec = CR.SlurmClusterResolver(gpus_per_node=0).cluster_spec()
    expected = [f"n{node}:{8887 + int(task)}" for node, task in places.split()]
    assert spec.job_tasks("worker") == expected


def test_slurm_jobs_and_steps_have_ports_of_their_own(environment):
    ports = []
    for job, step in (("41", "0"), ("41", "1"), ("42", "0")):
        environment(a_step(1, "1,1", JOB_ID=job, STEP_ID=step))
        found = CR.SlurmClusterResolver(gpus_per_node=0).topology().coordinator
        ports.append(int(found.removeprefix("n1:")))
    assert ports == [64064, 64065, 64128]
    given = CR.SlurmClusterResolver(gpus_per_node=0, port_base=8888)
    assert given.topology().coordinator == "n1:8888"


@pytest.mark.parametrize(
    ("job", "step"),
    [("41", "4294967290"), ("2147483650", "0")],  # A shell; a job of a federation.
)
def test_slurm_s_numbers_may_be_those_of_32_bits(environment, job, step):
    environment(a_step(1, "1,1", JOB_ID=job, STEP_ID=step))
    found = CR.SlurmClusterResolver(gpus_per_node=0).topology()
    assert found.num_processes == 2 and found.coordinator.startswith("n1:6")


def test_a_host_of_sagemaker_that_is_not_listed_does_not_train_alone(environment):
    environment(SAGEMAKER, {"SM_CURRENT_HOST": "algo-3"})
    assert CR.SageMakerClusterResolver().cluster_spec() == {}  # As in TensorFlow.
    with pytest.raises(
        kd.errors.ClusterError,
        match=r"(?s)host is none of those.*SM_CURRENT_HOST='algo-3', SM_HOSTS=\['algo-1",
    ):
        CR.automatic_resolver().topology()


def test_hosts_of_a_tpu_may_be_named_by_ipv6(environment):
    environment({"TPU_WORKER_ID": "1"})
    for given in ("[fd00::1]:8471,grpc://[fd00::2]", "[fd00::1]:8471,fd00::2"):
        found = CR.TPUClusterResolver(f"grpc://{given}")
        hosts = found.cluster_spec().job_tasks("worker")
        assert hosts == ["[fd00::1]:8471", "[fd00::2]:8470"]
        assert found.topology() == CR.Topology(1, 2, "[fd00::1]:8476")
    environment(TPU, {"MEGASCALE_NUM_SLICES": ""})
    assert CR.automatic_resolver().topology() == CR.Topology(1, 2, "t0:8476")
    environment(
        {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"},
        {"MEGASCALE_COORDINATOR_ADDRESS": "[fd00::1]:8080"},
    )
    assert CR.automatic_resolver().topology() == CR.Topology(3, 4, "[fd00::1]:8476")


def test_slurm_gpus_that_are_those_of_one_task_stay(environment):
    environment(a_step(1, "2", GPUS_ON_NODE="4"), {"CUDA_VISIBLE_DEVICES": "2,3"})
    resolver = CR.SlurmClusterResolver()
    resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3"})  # Those of both tasks.
    resolver = CR.SlurmClusterResolver()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_slurm_gpus_of_the_only_task_of_a_node_stay(environment):
    """Another node has two tasks, with as many GPUs each."""
    environment(
        a_step(2, "2,1", GPUS_ON_NODE="4", GPUS_PER_TASK="4"),
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    )
    resolver = CR.SlurmClusterResolver()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert resolver.num_accelerators() == {"GPU": 4}


def test_one_host_of_each_of_several_slices_is_a_cluster(environment):
    environment({"TPU_WORKER_HOSTNAMES": "job-1.svc"})
    assert type(CR.automatic_resolver()) is CR.SimpleClusterResolver
    environment(
        {"TPU_WORKER_HOSTNAMES": "job-1.svc"},
        {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"},
        {"MEGASCALE_COORDINATOR_ADDRESS": "job-0.svc:8080"},
    )
    found = CR.automatic_resolver()
    assert type(found) is CR.TPUClusterResolver
    assert found.topology() == CR.Topology(1, 2, "job-0.svc:8476")


def test_slurm_knows_the_addresses_of_nodes_whose_names_have_none(
    environment, monkeypatch
):
    known, said = {"10.0.0.7", "fd00::7"}, {"n1": "10.0.0.7"}

    def resolve(host, *_, **__):
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "not known")

    def ask(command, **_):
        assert command[1:4] == ["--oneliner", "show", "node"]
        text = f"NodeName={command[4]} NodeAddr={said[command[4]]} NodeHostName=x"
        return subprocess.CompletedProcess(command, 0, text)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", ask)
    environment(SLURM)

    def topology():
        return CR.SlurmClusterResolver(gpus_per_node=0).topology()

    assert topology() == CR.Topology(1, 2, "10.0.0.7:8888")
    said["n1"] = "fd00::7"
    assert topology() == CR.Topology(1, 2, "[fd00::7]:8888")
    said["n1"] = "n1"
    with pytest.raises(
        kd.errors.ClusterError,
        match=r"(?s)on the node 'n1', and this name has no address here.*scontrol.*"
        "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    ):
        topology()
    known.add("n1")
    assert topology() == CR.Topology(1, 2, "n1:8888")


def test_slurm_counts_the_gpus_of_the_node(environment, monkeypatch):
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


@pytest.mark.parametrize(
    ("visible", "count"), [("-1", 0), ("NoDevFiles", 0), ("2, 3,-1,4", 2), ("", 0)]
)
def test_gpus_that_cuda_does_not_show_do_not_count(environment, visible, count):
    environment(SLURM, {"CUDA_VISIBLE_DEVICES": visible})
    assert CR.SlurmClusterResolver().num_accelerators() == {"GPU": count}
    assert len(slurm.gpus()) == count


@pytest.mark.parametrize(("place", "own"), [("0", "4,6"), ("1", "5,7")])
@pytest.mark.parametrize("gpus_per_node", [None, 4])
def test_slurm_divides_the_gpus_that_are_visible(
    environment, gpus_per_node, place, own
):
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
    with pytest.raises(kd.errors.ClusterError, match="is that of a host and a port"):
        CR.Topology(0, 2, "a:0")


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

"""Clusters as data, asked of TensorFlow's resolvers and of ours by the same function."""

import json
import os
from typing import Any
from unittest import mock

WORKERS = {
    "cluster": {"worker": ["a:1", "b:2"]},
    "task": {"type": "worker", "index": 1},
}
ALL = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"], "evaluator": ["e:1"]}
STEP = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def tf_config(config: Any, **arguments: Any) -> dict[str, Any]:
    text = config if isinstance(config, str) else json.dumps(config)
    return {
        "resolver": "TFConfigClusterResolver",
        "arguments": arguments,
        "environment": {"TF_CONFIG": text},
    }


def slurm(environment: dict[str, str], **arguments: Any) -> dict[str, Any]:
    arguments = {"gpus_per_node": 8, **arguments}
    return {
        "resolver": "SlurmClusterResolver",
        "arguments": arguments,
        "environment": environment,
    }


def step(
    rank: int, nodes: str, tasks: str, total: int, **arguments: Any
) -> dict[str, Any]:
    names = (
        "SLURM_PROCID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NUM_TASKS",
    )
    return slurm(
        dict(zip(names, (str(rank), nodes, tasks, str(total)), strict=True)),
        **arguments,
    )


def sagemaker(hosts: str, current: str, **arguments: Any) -> dict[str, Any]:
    environment = {"SM_HOSTS": hosts, "SM_CURRENT_HOST": current}
    return {
        "resolver": "SageMakerClusterResolver",
        "arguments": arguments,
        "environment": environment,
    }


def tasks_of(job: str, **task: Any) -> dict[str, Any]:
    return tf_config({"cluster": ALL, "task": {"type": job, **task}})


RESOLVERS = [
    tf_config(WORKERS),
    tf_config({**WORKERS, "task": {"type": "worker", "index": "1"}}),
    tf_config({**WORKERS, "task": {"type": "worker", "index": "0"}}),
    tf_config({**WORKERS, "task": {"type": "worker"}}),
    tf_config({**WORKERS, "task": {}}),
    tf_config({"cluster": WORKERS["cluster"]}),
    tf_config({**WORKERS, "rpc_layer": "grpc"}),
    tf_config({**WORKERS, "rpc_layer": "grpc"}, rpc_layer="http"),
    tf_config({**WORKERS, "session_master": "sm:9"}),
    tf_config(WORKERS, task_type="worker", task_id=0),
    tf_config(WORKERS, task_id=0, environment="google"),
    tf_config({}),
    tf_config("{}"),
    tf_config({"cluster": {}}),
    tf_config({"task": {"type": "worker", "index": 0}}),
    tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}),
    tf_config({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}),
    tf_config(
        {
            "cluster": {"worker": {"0": "a:1", "1": "b:1"}},
            "task": {"type": "worker", "index": 1},
        }
    ),
    tf_config(
        {
            "cluster": {"worker": {"1": "b:1", "3": "d:1"}},
            "task": {"type": "worker", "index": 3},
        }
    ),
    tf_config({"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}),
    tf_config({"cluster": {"worker": [1, 2]}, "task": {"type": "worker", "index": 0}}),
    tf_config(
        {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}
    ),
    tf_config(
        {
            "cluster": {"master": ["a:1"], "worker": ["b:1"]},
            "task": {"type": "master", "index": 0},
        }
    ),
    tf_config({**WORKERS, "task": {"type": "worker", "index": 2}}),
    tf_config({**WORKERS, "task": {"type": "boss", "index": 0}}),
    tf_config({**WORKERS, "task": {"type": "chief", "index": 0}}),
    tf_config({**WORKERS, "task": {"type": "evaluator", "index": 0}}),
    tf_config("not JSON"),
    tasks_of("chief", index=0),
    tasks_of("worker", index=0),
    tasks_of("worker", index="1"),
    tasks_of("ps", index=0),
    tasks_of("evaluator", index=0),
    *[step(rank, "t02n13,t02n41,t02n43,t02n44", "1(x4)", 4) for rank in (0, 3)],
    *[step(rank, "n[1-2]", "3,1", 4) for rank in range(4)],
    step(6, "n[1-2],o[3-4,6]", "3(x2),2,11(x2)", 30, gpus_per_node=11),
    step(29, "n[1-2],o[3-4,6]", "3(x2),2,11(x2)", 30, gpus_per_node=11),
    step(1, "n[08-11]", "1(x4)", 4),
    step(1, "n[1-2],m5,o[3-4,6,7-9]", "1(x9)", 9),
    step(1, "n[9-10]", "1(x2)", 2),
    step(5, "a,b", "3(x2)", 6, jobs={"ps": 1, "worker": 5}),
    step(0, "a,b", "3(x2)", 6, jobs={"worker": 5, "ps": 1}),
    step(2, "a,b", "2(x2)", 4, gpus_per_node=4),
    step(2, "a,b", "2(x2)", 4, gpus_per_node=4, gpus_per_task=1),
    step(
        2,
        "a,b",
        "2(x2)",
        4,
        gpus_per_node=4,
        auto_set_gpu=False,
        port_base=1000,
        rpc_layer="rpc",
    ),
    step(2, "a,b", "2(x2)", 4, gpus_per_node=2, gpus_per_task=2),
    step(2, "a,b", "2(x2)", 4, jobs={"worker": 3}),
    step(2, "a,b", "2(x2)", 4, gpus_per_node=0),
    step(0, "a,b", "2(x2)", 4, tasks_per_node=2),
    step(0, "a,b", "2(x2)", 4, tasks_per_node={"a": 1, "b": 3}),
    step(0, "a,b[", "2(x2)", 4),
    step(0, "a,b[1-2-3]", "2(x2)", 4),
    step(0, "a,b", "2(x", 4),
    slurm({"SLURM_PROCID": "0"}),
    slurm({}),
    slurm(STEP),
    sagemaker('["algo-2", "algo-1"]', "algo-2"),
    sagemaker('["algo-2", "algo-1"]', "algo-1", port=4000, rpc_layer="grpc"),
    sagemaker('["algo-1"]', "algo-1"),
    sagemaker('["algo-1"]', "algo-9"),
    sagemaker("", "algo-9"),
    sagemaker('["algo-2", "algo-1"]', "algo-1", task_type="worker", task_id=1),
    {"resolver": "SageMakerClusterResolver", "arguments": {}, "environment": {}},
    *[
        {
            "resolver": "TPUClusterResolver",
            "arguments": {"tpu": tpu, **more},
            "environment": environment,
        }
        for tpu, more, environment in [
            ("grpc://10.0.0.1:8470", {}, {}),
            ("grpc://10.0.0.1", {}, {}),
            ("grpc://10.0.0.1:1,grpc://10.0.0.2:2,10.0.0.3", {}, {}),
            ("grpc://a:1", {"job_name": "tpu_worker"}, {}),
            (
                "grpc://a:1",
                {"coordinator_name": "coordinator", "coordinator_address": "c:5"},
                {},
            ),
            (["grpc://a:1"], {}, {}),
            (["grpc://a:1", "grpc://b:1"], {}, {}),
            ("local", {}, {}),
            (None, {}, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://a:1,grpc://b:1"}),
            (None, {}, {"TPU_NAME": "grpc://a:1"}),
            ("", {}, {"TPU_NAME": "grpc://a:1"}),
            (None, {}, {"TPU_CONFIG": '{"tpu_node_name": "grpc://a:1"}'}),
            (None, {}, {}),
        ]
    ],
]

SPECS = [
    {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
    {"worker": {"1": "b:1"}, "ps": ["c:1"]},
    {"worker": {"0": "a:1", "1": "b:1"}},
    {"worker": []},
    {},
    {"worker": "a:1"},
    {"worker": 3},
    {"worker": [["a:1"]]},
    ["a:1"],
    "a:1",
    None,
]

UNIONS = [
    [[{"worker": ["a:1"]}, "worker", 0], [{"worker": ["b:1"]}, "worker", 1]],
    [[{"worker": ["a:1"]}, "worker", 0], [{"ps": ["b:1"]}, "ps", 1]],
    [[{"worker": ["a:1"]}, None, None], [{"worker": {"3": "b:1"}}, "worker", 3]],
    [[{"worker": {"3": "b:1"}}, "worker", 3], [{"worker": ["a:1", "c:1"]}, None, None]],
    [[{"worker": ["a:1"]}, "worker", 0], [{"worker": {"0": "b:1"}}, "worker", 0]],
    [[{}, None, None], [{"worker": ["a:1"]}, "worker", 0]],
    [],
]

JSON = Any


def answers(make: Any, environment: dict[str, str], rules: Any) -> JSON:
    """What a resolver says in an environment, each by itself; errors as types."""
    with mock.patch.dict(os.environ, environment):
        try:
            resolver = make()
        except Exception as error:
            return {"error": kinds(error)}
        said = {}
        for name, question in QUESTIONS.items():
            said[name] = ask(lambda question=question: question(resolver))
        said["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        spec = ask(resolver.cluster_spec)
        for name, rule in rules.items():
            if "error" not in said["cluster_spec"]:
                said[name] = ask(
                    lambda rule=rule: rule(spec, resolver.task_type, resolver.task_id)
                )
        return said


QUESTIONS = {
    "cluster_spec": lambda r: r.cluster_spec().as_dict(),
    "repr": lambda r: repr(r.cluster_spec()),
    "task_type": lambda r: r.task_type,
    "task_id": lambda r: r.task_id,
    "rpc_layer": lambda r: r.rpc_layer,
    "environment": lambda r: r.environment,
    "master": lambda r: r.master(),
    "master of worker 1": lambda r: r.master("worker", 1, "http"),
    "task info": lambda r: (
        list(r.get_task_info()) if hasattr(r, "get_task_info") else None
    ),
    "leader": lambda r: getattr(r, "get_coordination_service_leader", lambda: None)(),
}


def spec_answers(make: Any) -> JSON:
    """What a `ClusterSpec` says of itself."""
    spec = ask(make)
    if isinstance(spec, dict):
        return spec
    jobs = [*spec.jobs, "other"]
    return {
        "bool": bool(spec),
        "repr": repr(spec),
        "as_dict": ask(spec.as_dict),
        "jobs": spec.jobs,
        "num_tasks": [ask(lambda job=job: spec.num_tasks(job)) for job in jobs],
        "task_indices": [ask(lambda job=job: spec.task_indices(job)) for job in jobs],
        "job_tasks": [ask(lambda job=job: spec.job_tasks(job)) for job in jobs],
        "task_address": [
            ask(lambda job=job, i=i: spec.task_address(job, i))
            for job in jobs
            for i in (0, 1)
        ],
        "equal": [spec == make(), spec != make(), ask(lambda: spec == spec.as_dict())],
    }


def ask(question: Any) -> JSON:
    try:
        return question()
    except Exception as error:
        return {"error": kinds(error)}


def kinds(error: Exception) -> list[str]:
    """The builtin types of an error, by which it can be caught."""
    own = ("Exception", "BaseException", "object", "JSONDecodeError")
    return [
        t.__name__
        for t in type(error).__mro__
        if t.__module__ == "builtins" and t.__name__ not in own
    ]

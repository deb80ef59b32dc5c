"""What our cluster resolvers say, against the record of TensorFlow's."""

import json
from pathlib import Path

import pytest

import keras_distribute as kd
from keras_distribute.cluster.resolvers.topology import topology_of

from .clusters import answers, spec_answers
from .differences import because

CR = kd.cluster_resolver
RECORD = json.loads(Path(__file__).with_name("tensorflow_cluster.json").read_text())
RULES = {
    "is_chief": lambda spec, task_type, task_id: (
        topology_of(spec, task_type, task_id).process_id == 0
    ),
    "id_in_cluster": lambda spec, task_type, task_id: (
        topology_of(spec, task_type, task_id).process_id
    ),
    "worker_count": lambda spec, task_type, task_id: (
        topology_of(spec, task_type, task_id).num_processes
    ),
}
ALONE = {"is_chief": True, "id_in_cluster": 0, "worker_count": 1}


def make_union(parts):
    simple = [
        CR.SimpleClusterResolver(CR.ClusterSpec(c), task_type=t, task_id=i)
        for c, t, i in parts
    ]
    return CR.UnionResolver(*simple)


def as_json(value):
    return json.loads(json.dumps(value))


def agrees(theirs, ours):
    """The same, or an error that whoever catches TensorFlow's catches, too."""
    if isinstance(theirs, dict) and "error" in theirs:
        return isinstance(ours, dict) and set(theirs["error"]) <= set(
            ours.get("error", ["none"])
        )
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(map(agrees, theirs, ours))
    return theirs == ours


def places_of(jobs):
    """The tasks that train together, in order; none where not all are known."""
    lists = {job: jobs.get(job, []) for job in ("chief", "worker")}
    if not all(isinstance(tasks, list) for tasks in lists.values()):
        return []
    return [(job, i) for job, tasks in lists.items() for i in range(len(tasks))]


def why(case, question, theirs, ours, answers):
    """The difference that explains that we do not agree; each says what we do instead."""
    failed = isinstance(ours, dict) and "error" in ours
    slurm = case.get("resolver") == "SlurmClusterResolver"
    if question in RULES:
        places, kind = places_of(answers["cluster_spec"]), answers["task_type"]
        if failed and (kind, answers["task_id"]) not in places:
            return because("a place for every process")
        if ours == ALONE[question] and (len(places) < 2 or kind == "evaluator"):
            return because("a cluster of one")
        return None
    if (
        case.get("resolver") == "TPUClusterResolver"
        and question == "rpc_layer"
        and ours == "grpc"
    ):
        return because("tpu protocol")
    if failed and theirs["error"][0] in ("AssertionError", "NotImplementedError"):
        return because("op errors")
    if slurm and case["arguments"]["gpus_per_node"] == 0 and not failed:
        return because("slurm without gpus")
    if (
        slurm
        and not failed
        and case["environment"]["SLURM_STEP_NODELIST"]
        in ("n[9-10]", "n[1-2],m5,o[3-4,6,7-9]")
    ):
        return because("slurm's order")
    if question == "job_tasks" and ours[0] == []:
        return because("a job without tasks")
    return None


def check(case, theirs, ours):
    ours = as_json(ours)
    if "error" in theirs or "error" in ours:
        reason = agrees(theirs, ours) or why(case, "making", theirs, ours, ours)
        assert reason, (case, theirs, ours)
        return
    for question, said in theirs.items():
        own = ours[question]
        reason = agrees(said, own) or why(case, question, said, own, ours)
        assert reason, (question, said, ours)


@pytest.mark.parametrize(
    "case", RECORD["specs"], ids=lambda case: json.dumps(case["cluster"])
)
def test_cluster_specs(case):
    check(case, case["said"], spec_answers(lambda: CR.ClusterSpec(case["cluster"])))


@pytest.mark.parametrize("case", RECORD["resolvers"], ids=lambda case: case["resolver"])
def test_resolvers(case):
    ours = answers(
        lambda: getattr(CR, case["resolver"])(**case["arguments"]),
        case["environment"],
        RULES,
    )
    check(case, case["said"], ours)


@pytest.mark.parametrize(
    "case", RECORD["unions"], ids=lambda case: f"{len(case['parts'])} parts"
)
def test_unions(case):
    check(case, case["said"], answers(lambda: make_union(case["parts"]), {}, RULES))


def test_the_record_is_large_enough_to_mean_something():
    assert len(RECORD["resolvers"]) > 60 and RECORD["header"]["tensorflow"]

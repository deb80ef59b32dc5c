"""The manifests of docs/guide/kubernetes.md have the fields that Kubernetes and JobSet
know, and what they set makes of each pod the process that it is to be.
"""

import importlib
import pathlib
import re

import pytest

import keras_distribute as kd

yaml = pytest.importorskip("yaml")
models = pytest.importorskip("kubernetes.client.models")
CR = kd.cluster_resolver
PAGE = (pathlib.Path(__file__).parents[2] / "docs/guide/kubernetes.md").read_text()
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifests(title):
    found = re.search(rf'^```yaml title="{title}"\n(.*?)^```', PAGE, re.M | re.S)
    assert found is not None, title
    return list(yaml.safe_load_all(found[1]))


def check(value, kind, place):
    """Raises unless a value has only fields that a type of the client has; the client
    itself checks which are required.
    """
    if match := re.fullmatch(r"[lL]ist\[(.*)\]", kind):
        assert isinstance(value, list), place
        for index, item in enumerate(value):
            check(item, match[1], f"{place}[{index}]")
    elif match := re.fullmatch(r"[dD]ict[(\[]str, (.*)[)\]]", kind):
        for key, item in value.items():
            check(item, match[1], f"{place}.{key}")
    elif hasattr(models, kind):
        model = getattr(models, kind)
        names = {theirs: ours for ours, theirs in model.attribute_map.items()}
        assert value.keys() <= names.keys(), (place, value.keys() - names.keys())
        for key, item in value.items():
            check(item, model.openapi_types[names[key]], f"{place}.{key}")
        model(**{names[key]: item for key, item in value.items()})
    else:
        expected = {"str": str, "int": int, "bool": bool, "object": object}[kind]
        assert isinstance(value, expected), (place, value, kind)


def test_the_job_has_the_fields_of_kubernetes():
    service, job = manifests("job.yaml")
    check(service, "V1Service", "service")
    check(job, "V1Job", "job")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    job["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(AssertionError, match="container"):
        check(job, "V1Job", "job")


def test_each_pod_is_the_process_of_its_index(monkeypatch):
    service, job = manifests("job.yaml")
    name, count = job["metadata"]["name"], job["spec"]["completions"]
    assert job["spec"]["parallelism"] == count
    first = f"{name}-0.{service['metadata']['name']}:1234"
    for index in range(count):
        for variable in job["spec"]["template"]["spec"]["containers"][0]["env"]:
            if "valueFrom" in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            monkeypatch.setenv(variable["name"], variable.get("value", str(index)))
        found = CR.automatic_resolver()
        assert type(found) is CR.KerasClusterResolver
        assert found.topology() == CR.Topology(index, count, first)


def test_the_exit_codes_of_the_job_are_ours():
    from keras_distribute.checkpoint import preemption
    from keras_distribute.cluster import liveness

    rules = manifests("job.yaml")[1]["spec"]["podFailurePolicy"]["rules"]
    codes = [preemption.EXIT_CODE, liveness.FOLLOWING_CODE]
    assert rules[0]["onExitCodes"]["values"] == codes


def test_the_jobset_has_the_fields_of_its_types():
    (jobset,) = manifests("jobset.yaml")
    for job in jobset["spec"]["replicatedJobs"]:
        check(job["template"]["spec"], "V1JobSpec", job["name"])
        spec = job["template"]["spec"]
        assert spec["completions"] == spec["parallelism"]
    types = pytest.importorskip(
        "kubeflow_trainer_api.models",
        reason="JobSet's types: pip install kubeflow-trainer-api",
    )
    spec = jobset["spec"]
    for name, part in (
        ("JobsetV1alpha2JobSetSpec", spec),
        ("JobsetV1alpha2FailurePolicy", spec["failurePolicy"]),
        ("JobsetV1alpha2ReplicatedJob", spec["replicatedJobs"][0]),
    ):
        fields = getattr(types, name).model_fields
        known = {field.alias or own for own, field in fields.items()}
        assert part.keys() <= known, (name, part.keys() - known)
        getattr(importlib.import_module(types.__name__), name).from_dict(part)

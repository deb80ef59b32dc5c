"""The cluster of the pods of a Kubernetes job. Kubernetes' own client asks for them."""

from __future__ import annotations

import enum
import re
from typing import Any

from keras_distribute import checks
from keras_distribute.cluster import addresses
from keras_distribute.cluster.resolvers.base import ClusterResolver, check_port
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.errors import ClusterError


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which decides how it logs in to Kubernetes."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


_Location = KubernetesExecutableLocation


class KubernetesClusterResolver(ClusterResolver):
    """Asks Kubernetes for the addresses of pods by their labels, in order of names, in
    which numbers count as numbers: pods of an indexed job are in order of their index.

    It cannot say which of them this process is: set `task_type` and `task_id`, or take
    them from the index of an indexed job, `int(os.environ["JOB_COMPLETION_INDEX"])`.
    Needs `pip install kubernetes`. Source:
    `tf.distribute.cluster_resolver.KubernetesClusterResolver`. Differs from TF: the
    addresses are those of the pods, not of their hosts, which are the same only for
    pods on the host's network; and inside a cluster each call logs in as the first one
    did.

    Args:
        job_to_label_mapping: By job the label selectors of its pods; `{"worker":
            ["job-name=tensorflow"]}` at first.
        tf_server_port: The port of each process.
        rpc_layer: The protocol that `master` puts in front.
        override_client: A `kubernetes.client.CoreV1Api` that is logged in already.
        executable_location: Where this process runs.

    Raises:
        BackendError: Without the client.
        StructureTypeError: For another location.
    """

    def __init__(
        self,
        job_to_label_mapping: dict[str, list[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = _Location.WITHIN_CLUSTER,
    ) -> None:
        what, fix = "A job has a list of selectors.", '{"worker": ["job-name=keras"]}'
        given, name = job_to_label_mapping, "job_to_label_mapping"
        checks.instance(name, given, dict | None, what, fix)
        for job, selectors in (given or {}).items():
            checks.instance(name, job, str, what, fix)
            checks.instance(name, selectors, list | tuple, what, fix)
            for selector in selectors:
                checks.instance(name, selector, str, what, fix)
        check_port("tf_server_port", tf_server_port)
        self._set_task(None, None, rpc_layer)
        what = "The location is one of KubernetesExecutableLocation."
        fix = "KubernetesExecutableLocation.WITHIN_CLUSTER"
        location = "executable_location"
        checks.instance(location, executable_location, _Location, what, fix)
        self._labels = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = tf_server_port
        client = override_client
        self._client = _logged_in(executable_location) if client is None else client

    def cluster_spec(self) -> ClusterSpec:
        """The pods that Kubernetes names now.

        Raises:
            ClusterError: Where one of them is not running.
        """
        return ClusterSpec(
            {job: self._addresses(selectors) for job, selectors in self._labels.items()}
        )

    def _addresses(self, selectors: list[str]) -> list[str]:
        found: list[str] = []
        for selector in selectors:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector)
            for pod in sorted(pods.items, key=_numbered):
                if pod.status.phase != "Running":
                    raise ClusterError(
                        f"The pod {pod.metadata.name!r} is not running; its phase is "
                        f"{pod.status.phase!r}.",
                        received=f"the pods with {selector!r}.",
                        fix="wait until all pods of the job run.",
                    )
                found.append(addresses.joined(pod.status.pod_ip, self._port))
        return found


def _numbered(pod: Any) -> list[Any]:
    """The name of a pod with its numbers as such: `train-10-x` follows `train-9-x`."""
    texts = re.split(r"(\d+)", pod.metadata.name)
    return [int(text) if i % 2 else text for i, text in enumerate(texts)]


def _logged_in(location: KubernetesExecutableLocation) -> Any:
    what = "The pods are asked for by Kubernetes' own client."
    config = checks.imported("kubernetes.config", what, "pip install kubernetes")
    client = checks.imported("kubernetes.client", what, "pip install kubernetes")
    try:
        if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
            config.load_incluster_config()
        else:
            config.load_kube_config()
    except config.ConfigException as error:
        raise ClusterError(
            "Kubernetes could not be logged in to.",
            received=f"{location}: {error}.",
            fix="the location where this process runs, or override_client.",
        ) from error
    return client.CoreV1Api()

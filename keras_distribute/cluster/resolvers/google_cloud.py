"""Clusters in Google's cloud: instance groups of virtual machines, and TPU slices."""

from __future__ import annotations

import glob
import http.client
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute.cluster.resolvers.base import (
    ClusterResolver,
    check_port,
    check_task,
    master_url,
)
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.environment import json_value, number
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError

_LOCAL, _CPU = "local", "cpu"
_CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")  # The chips of a TPU virtual machine.
_TPU_PORT = "8470"
_COORDINATOR_PORT = "8476"  # JAX's own choice on TPUs.
_METADATA_SECONDS = 10.0


class GCEClusterResolver(ClusterResolver):
    """Asks Google Compute Engine for the sorted addresses of an instance group.

    It cannot say which of them this process is: pass `task_id`. Needs `pip install
    google-api-python-client`. Source:
    `tf.distribute.cluster_resolver.GCEClusterResolver`. Differs from TF: the group is
    named to the API as the API documents it, so that the official client takes the
    request.

    Args:
        project: The name of the project.
        zone: The zone of the group.
        instance_group: The name of the group.
        port: The port of each process.
        task_type: The job that the instances belong to.
        task_id: The number of this process, in the order of the addresses.
        rpc_layer: The protocol that `master` puts in front.
        credentials: Of `google.auth`; by default those of the environment.
        service: A `googleapiclient` service that is built already:
            `discovery.build("compute", "v1")`.

    Raises:
        BackendError: Without the client.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        names = {"project": project, "zone": zone, "instance_group": instance_group}
        for name, value in names.items():
            checks.text(name, value)
        check_port("port", port)
        checks.text("task_type", task_type)
        self._set_task(task_type, task_id, rpc_layer)
        self._zone = {"project": project, "zone": zone}
        self._group, self._port = instance_group, port
        self._service = _service("compute", credentials) if service is None else service

    @property
    def task_type(self) -> str | None:
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ClusterError(
            "The instances of the group belong to the job that was named first.",
            received=f"task_type={task_type!r}.",
            fix=f"GCEClusterResolver(..., task_type={task_type!r})",
        )

    def cluster_spec(self) -> ClusterSpec:
        """The running instances, asked for now."""
        groups, instances = self._service.instanceGroups(), self._service.instances()
        request = groups.listInstances(
            **self._zone,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        addresses: list[str] = []
        while request is not None:
            response = request.execute()
            for item in response.get("items", []):
                name = item["instance"].split("/")[-1]
                details = instances.get(**self._zone, instance=name).execute()
                host = details["networkInterfaces"][0]["networkIP"]
                addresses.append(f"{host}:{self._port}")
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        return ClusterSpec({self._task_type: sorted(addresses)})


class TPUClusterResolver(ClusterResolver):
    """The hosts of a TPU slice.

    JAX runs one process on each host of a slice, with the same program; nothing
    connects to a TPU from outside. So this resolver only says which hosts there are,
    and which one this is. Source: `tf.distribute.cluster_resolver.TPUClusterResolver`.
    Differs from TF: nothing is started or initialized; there is no `set_tpu_topology`
    and no `tpu_hardware_feature`; without a name, the hosts are those that the
    environment of the TPU virtual machine names; `"cpu"` means CPU devices.

    Args:
        tpu: `"local"`, the chips of this machine; `""`, what the environment names,
            else the slice of this machine; addresses,
            `grpc://10.0.0.1:8470,grpc://10.0.0.2:8470`; the name of a TPU, for the
            Cloud TPU API (`pip install google-api-python-client`); or `"cpu"`, to run a
            program for TPUs on CPU devices. By default what
            `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`, `TPU_NAME`, `TPU_CONFIG` or
            `TPU_WORKER_HOSTNAMES` names; these hosts, where the others have but a name.
        zone: The zone of the TPU; by default that of this machine.
        project: The project of the TPU; by default that of this machine.
        job_name: The job of the hosts.
        coordinator_name: A further job.
        coordinator_address: The address of its only task.
        credentials: Of `google.auth`; by default those of the environment.
        service: A `googleapiclient` service that is built already:
            `discovery.build("tpu", "v1")`.
        discovery_url: Of the API; by default Google's, or `TPU_API_DISCOVERY_URL`.

    Raises:
        ClusterError: Where nothing names a TPU.
        BackendError: Without the client, for a TPU that is named.

    Example:
        >>> import keras_distribute as kd
        >>> hosts = "grpc://10.0.0.1:8470,10.0.0.2"
        >>> resolver = kd.cluster_resolver.TPUClusterResolver(hosts)
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['10.0.0.1:8470', '10.0.0.2:8470']})
        >>> resolver.master()
        'grpc://10.0.0.1:8470'
    """

    def __init__(
        self,
        tpu: str | list[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        names = {
            "zone": zone,
            "project": project,
            "coordinator_name": coordinator_name,
            "coordinator_address": coordinator_address,
            "discovery_url": discovery_url,
        }
        fix = 'TPUClusterResolver("local")'
        for name, value in names.items():
            checks.instance(name, value, str | None, f"{name} is a string.", fix)
        checks.text("job_name", job_name)
        if isinstance(tpu, list):
            if len(tpu) != 1:
                raise ClusterError(
                    "A slice is one TPU.", received=f"tpu={tpu}.", fix="name one TPU."
                )
            tpu = tpu[0]
        checks.instance("tpu", tpu, str | None, "A TPU is named by a string.", fix)
        config = _tpu_config()
        self._tpu = tpu or _tpu_of_environment(config)
        self._asks_machine = not self._tpu and tpu == ""
        if self._asks_machine:
            self._tpu = _LOCAL
        if not self._tpu:
            raise ClusterError(
                "Nothing names a TPU.",
                received="no tpu, and no TPU_NAME or TPU_WORKER_HOSTNAMES in the "
                "environment.",
                fix='TPUClusterResolver("local") for the chips of this machine, or '
                'TPUClusterResolver("cpu") for CPU devices in their place.',
            )
        self._set_task(job_name, 0, "grpc")
        self._coordinator = (coordinator_name, coordinator_address)
        self._node, self._service = "", service
        if self._has_hosts and not self._tpu.startswith("grpc://"):
            project = project or config["project"] or _metadata("project/project-id")
            zone = zone or config["zone"] or _metadata("instance/zone").split("/")[-1]
            self._node = f"projects/{project}/locations/{zone}/nodes/{self._tpu}"
            if service is None:
                url = os.environ.get("TPU_API_DISCOVERY_URL") or discovery_url
                self._service = _service("tpu", credentials, url)

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """The resolver itself: there is nothing to connect to."""
        return TPUClusterResolver(tpu, zone, project)

    @property
    def on_cpu(self) -> bool:
        """Whether CPU devices stand in for TPUs."""
        return self._tpu == _CPU

    @property
    def _has_hosts(self) -> bool:
        return self._tpu not in (_LOCAL, _CPU)

    def __enter__(self) -> TPUClusterResolver:
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing: the resolver has no connection to close."""

    def cluster_spec(self) -> ClusterSpec:
        """The hosts; none for `"local"` and `"cpu"`.

        Raises:
            ClusterError: For a TPU that is not ready.
        """
        if not self._has_hosts:
            return ClusterSpec({})
        cluster: dict[str, list[str]] = {self.get_job_name(): self._endpoints()}
        name, address = self._coordinator
        if name and address:
            cluster[name] = [address]
        return ClusterSpec(cluster)

    def _endpoints(self) -> list[str]:
        if not self._node:
            endpoints = self._tpu.split(",")
            parts = (_host_and_port(each.removeprefix("grpc://")) for each in endpoints)
            return [f"{host}:{port or _TPU_PORT}" for host, port in parts]
        nodes = self._service.projects().locations().nodes()
        node = nodes.get(name=self._node).execute()
        if node.get("state") != "READY":
            raise ClusterError(
                f"The TPU {self._tpu!r} is not ready; its state is "
                f"{node.get('state')!r}.",
                received=f"{self._node}.",
                fix="wait; after PREEMPTED or TERMINATED create the TPU again.",
            )
        endpoints = node.get("networkEndpoints") or [node]
        return [f"{endpoint['ipAddress']}:{endpoint['port']}" for endpoint in endpoints]

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        check_task(task_type, task_id, rpc_layer)
        if not self._has_hosts:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self.get_job_name(), self._task_id or 0
        return master_url(self.cluster_spec().task_address(task_type, task_id), "grpc")

    def topology(self) -> Topology:
        """The place of this host, by `TPU_WORKER_ID` or the metadata server."""
        hosts = self._endpoints() if self._has_hosts else []
        known: Mapping[str, str] = os.environ
        if self._asks_machine and any(glob.glob(pattern) for pattern in _CHIPS):
            hosts = _hosts_of_slice()
            known = {**_settings_of_machine(), **os.environ} if hosts else os.environ
        told = known.get("MEGASCALE_NUM_SLICES") if hosts else None
        slices = number("MEGASCALE_NUM_SLICES", told or "1")
        if len(hosts) * slices < 2:
            return Topology()
        own = os.environ.get("TPU_WORKER_ID", "0" if len(hosts) == 1 else None)
        if own is None:
            own = _metadata("instance/attributes/agent-worker-number")
        first, before = hosts[0].rsplit(":", 1)[0], 0
        if slices > 1:
            # Google's runtime numbers the slices, and names the first one to each.
            needed = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_SLICE_ID")
            missing = [name for name in needed if name not in known]
            if missing:
                raise ClusterError(
                    f"{missing[0]} is not in the environment.",
                    received=f"MEGASCALE_NUM_SLICES={slices}.",
                    fix="set it on every host; Google's runtime does.",
                )
            first = _host_and_port(known[needed[0]])[0]
            before = number(needed[1], known[needed[1]]) * len(hosts)
        index = before + number("TPU_WORKER_ID", own)
        return Topology(index, len(hosts) * slices, f"{first}:{_COORDINATOR_PORT}")

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """The TPU cores of this host."""
        check_task(task_type, task_id)
        return {"TPU": sum(each.platform == "tpu" for each in jax.local_devices())}

    def get_master(self) -> str:
        """As `master()`."""
        return self.master()

    def get_job_name(self) -> str:
        """The job of the hosts."""
        return self._task_type or "worker"

    def get_coordination_service_leader(self) -> str:
        """The first host, as TensorFlow names it."""
        return f"/job:{self.get_job_name()}/task:0"


def _service(api: str, credentials: Any, url: str | None = None) -> Any:
    discovery = checks.imported(
        "googleapiclient.discovery",
        "Google's cloud is asked through Google's own client.",
        "pip install google-api-python-client",
    )
    options = {"discoveryServiceUrl": url} if url else {}
    if credentials != "default":  # Without any, the client takes the environment's.
        options["credentials"] = credentials
    return discovery.build(api, "v1", cache_discovery=False, **options)


def _tpu_config() -> dict[str, str | None]:
    """The names in `TPU_CONFIG`; `None` for each that is not there."""
    config = json_value("TPU_CONFIG")
    names = {name: config.get(name) for name in ("tpu_node_name", "project", "zone")}
    for name, value in names.items():
        what, fix = f"{name!r} in TPU_CONFIG is a string.", "check TPU_CONFIG."
        checks.instance(name, value, str | None, what, fix, ClusterError)
    return names


def _tpu_of_environment(config: dict[str, str | None]) -> str:
    """What the environment names: endpoints, a TPU, or hosts; `""` for nothing."""
    hosts, name = hosts_of_environment(), os.environ.get("TPU_NAME", "")
    if hosts and name not in (_LOCAL, _CPU) and "://" not in name:
        name = ""  # A pod of Ray has a name, too, which Google's cloud does not know.
    return (
        os.environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
        or name
        or config["tpu_node_name"]
        or (f"grpc://{hosts}" if hosts else "")
    )


def hosts_of_environment() -> str:
    """The hosts in `TPU_WORKER_HOSTNAMES`, separated by commas; `""` for none."""
    # Without a TPU libtpu puts a warning there, which child processes inherit.
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return "" if " " in hosts else hosts


def _host_and_port(address: str) -> tuple[str, str]:
    """The two, `""` for a port that is not there; IPv6 in brackets."""
    if address.count(":") > 1 and not address.startswith("["):
        return f"[{address}]", ""
    host, bracket, rest = address.rpartition("]")
    before, _, port = rest.partition(":")
    return f"{host}{bracket}{before}", port


def _hosts_of_slice() -> list[str]:
    """The hosts of the slice that this machine belongs to, by the metadata server; none
    where that knows none. Its list has `address` or `name:id:address` for each.
    """
    # Set where there is no metadata server, as in some notebooks.
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        return []
    try:
        entries = _metadata("instance/attributes/worker-network-endpoints").split(",")
    except ClusterError:
        return []
    return [f"{entry.rsplit(':', 1)[-1]}:{_TPU_PORT}" for entry in entries]


def _settings_of_machine() -> dict[str, str]:
    """The variables of Google's runtime for this machine, by the metadata server: lines
    such as `MEGASCALE_NUM_SLICES: '2'`.
    """
    try:
        lines = _metadata("instance/attributes/tpu-env").splitlines()
    except ClusterError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip().strip("'") for name, _, value in pairs}


def _metadata(path: str) -> str:
    """What the metadata server of a virtual machine in Google's cloud says about it."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    server = os.environ.get("GCE_METADATA_IP") or host
    url = f"http://{server}/computeMetadata/v1/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as response:
            return response.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ClusterError(
            f"The metadata server did not say {path!r}: {error}.",
            received=f"a request to {server}.",
            fix="pass project and zone, and set TPU_WORKER_ID, outside of Google's "
            "cloud.",
        ) from error

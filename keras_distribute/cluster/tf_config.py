"""Clusters that an environment variable holds as JSON: TensorFlow's `TF_CONFIG`, and SageMaker's."""

from __future__ import annotations

import json
import os
from typing import Any

from keras_distribute.cluster.resolver import ClusterResolver, master_url
from keras_distribute.cluster.spec import ClusterSpec
from keras_distribute.errors import ClusterError


class _ConfigResolver(ClusterResolver):
    """A resolver of a dict with `cluster`, `task`, `rpc_layer` and `session_master`, read anew at each call."""

    def __init__(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None, environment: str | None
    ) -> None:
        self._task_type, self._task_id, self._rpc_layer, self._environment = task_type, task_id, rpc_layer, environment

    def _config(self) -> dict[str, Any]:
        raise NotImplementedError

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._config().get("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; `""` in a cluster of one, and `session_master` where the configuration has one."""
        session_master = self._config().get("session_master")
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if not cluster or (len(cluster.jobs) == 1 and len(cluster.job_tasks(cluster.jobs[0])) == 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        address = cluster.task_address(task_type, task_id)  # type: ignore[arg-type]
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    def task_type(self) -> str | None:
        value = self._config().get("task", {}).get("type") if self._task_type is None else self._task_type
        return None if value is None else str(value)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        value = self._config().get("task", {}).get("index") if self._task_id is None else self._task_id
        return None if value is None else int(value)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        return self._config().get("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> Any:
        """What the caller said, or `None`."""
        return self._environment


class TFConfigClusterResolver(_ConfigResolver):
    """Reads the cluster from the environment variable `TF_CONFIG`.

    Source: `tf.distribute.cluster_resolver.TFConfigClusterResolver`.

    Args:
        task_type: Overrides the one in `TF_CONFIG`.
        task_id: Likewise.
        rpc_layer: Likewise.
        environment: Accepted for compatibility.

    Example:
        >>> import json, os, keras_distribute as kd
        >>> os.environ["TF_CONFIG"] = json.dumps(
        ...     {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "1"}})
        >>> kd.cluster_resolver.TFConfigClusterResolver().topology()
        Topology(process_id=1, num_processes=2, coordinator='a:1')
        >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)

    def _config(self) -> dict[str, Any]:
        return json_variable("TF_CONFIG")


class SageMakerClusterResolver(_ConfigResolver):
    """Reads the cluster from the environment variables of Amazon SageMaker, `SM_HOSTS` and `SM_CURRENT_HOST`.

    Every host is a worker, in the order of their names.
    Source: TensorFlow's `SageMakerClusterResolver`.

    Args:
        port: Of each worker.
        task_type: Overrides `"worker"`.
        task_id: Overrides the place of the host among all.
        rpc_layer: The protocol that `master` puts in front.
        environment: Accepted for compatibility.

    Raises:
        ClusterError: On use, where the variables are not set.

    Example:
        >>> import os, keras_distribute as kd
        >>> os.environ |= {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
        >>> kd.cluster_resolver.SageMakerClusterResolver().topology()
        Topology(process_id=1, num_processes=2, coordinator='algo-1:2223')
        >>> del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port

    def _config(self) -> dict[str, Any]:
        missing = [name for name in ("SM_HOSTS", "SM_CURRENT_HOST") if name not in os.environ]
        if missing:
            raise ClusterError(
                "This is no SageMaker environment.",
                received=f"no {' and no '.join(missing)} in the environment.",
                fix="run in a SageMaker training job, or pass another resolver.",
            )
        hosts = sorted(json_variable("SM_HOSTS", list))
        current = os.environ["SM_CURRENT_HOST"]
        if current not in hosts:
            return {}
        workers = [f"{host}:{self._port}" for host in hosts]
        return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": hosts.index(current)}}


def json_variable(name: str, kind: type = dict) -> Any:
    """The JSON in an environment variable; nothing where it is not set or empty.

    Raises:
        ClusterError: For what is no JSON, or JSON of another kind.
    """
    text = os.environ.get(name, "")
    try:
        value = json.loads(text) if text.strip() else kind()
    except json.JSONDecodeError as error:
        raise ClusterError(f"{name} is not JSON: {error}.", received=f"{text!r}.", fix=f"check {name}.") from error
    if not isinstance(value, kind):
        raise ClusterError(f"{name} is a JSON {kind.__name__}.", received=f"{text!r}.", fix=f"check {name}.")
    return value

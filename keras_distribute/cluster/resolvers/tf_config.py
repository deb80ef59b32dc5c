"""Clusters that an environment variable holds as JSON: TensorFlow's `TF_CONFIG`, and
SageMaker's.
"""

from __future__ import annotations

import os
from typing import Any

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


class _ConfigResolver(ClusterResolver):
    """A resolver of a dict with `cluster`, `task`, `rpc_layer` and `session_master`,
    read anew at each call.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        what = "environment is a string."
        checks.instance("environment", environment, str | None, what, "None")
        self._set_task(task_type, task_id, rpc_layer)
        self._environment = environment

    def _config(self) -> dict[str, Any]:
        raise NotImplementedError

    def _default(self, name: str) -> Any:
        if name == "rpc_layer":
            return self._part("rpc_layer", str, None)
        task = self._part("task", dict, {})
        if name == "task_id":
            return self._checked_id(task.get("index"))
        check_task(task.get("type"), error=ClusterError)
        return task.get("type")

    def _checked_id(self, task_id: Any) -> int | None:
        """A number, which `TF_CONFIG` may have as text."""
        if isinstance(task_id, str):
            return number("the index of a task", task_id)
        known = task_id is not None
        return checks.count("task_id", task_id, error=ClusterError) if known else None

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._part("cluster", dict, {}))

    def _part(self, name: str, kind: Any, default: Any) -> Any:
        value = self._config().get(name)
        value, fix = default if value is None else value, "check its JSON."
        what = f"{name!r} in the configuration is a {kind.__name__}."
        checks.instance(name, value, kind | None, what, fix, ClusterError)
        return value

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task; `""` in a cluster of one, and `session_master` where
        the configuration has one.
        """
        check_task(task_type, task_id, rpc_layer)
        session_master = self._part("session_master", str, None)
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        jobs = cluster.jobs
        if not jobs or (len(jobs) == 1 and len(cluster.job_tasks(jobs[0])) == 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        address = cluster.task_address(task_type, task_id)  # type: ignore[arg-type]
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    def environment(self) -> Any:
        """What the constructor was given, or `None`."""
        return self._environment


class TFConfigClusterResolver(_ConfigResolver):
    """Reads the cluster from the environment variable `TF_CONFIG`.

    Source: `tf.distribute.cluster_resolver.TFConfigClusterResolver`.

    Args:
        task_type: Overrides the one in `TF_CONFIG`.
        task_id: Overrides the one in `TF_CONFIG`.
        rpc_layer: Overrides the one in `TF_CONFIG`.
        environment: Accepted for compatibility.

    Example:
        >>> import json, os, keras_distribute as kd
        >>> task = {"type": "worker", "index": "1"}
        >>> os.environ["TF_CONFIG"] = json.dumps(
        ...     {"cluster": {"worker": ["a:1", "b:1"]}, "task": task})
        >>> kd.cluster_resolver.TFConfigClusterResolver().topology()
        Topology(process_id=1, num_processes=2, coordinator='a:1')
        >>> del os.environ["TF_CONFIG"]
    """

    def _config(self) -> dict[str, Any]:
        return json_value("TF_CONFIG")


class SageMakerClusterResolver(_ConfigResolver):
    """Reads the cluster from the environment variables of Amazon SageMaker, `SM_HOSTS`
    and `SM_CURRENT_HOST`.

    Every host is a worker, in the order of their names.
    Source: TensorFlow's `SageMakerClusterResolver`.

    Args:
        port: Of each worker.
        task_type: Overrides `"worker"`.
        task_id: Overrides the index of the host among all.
        rpc_layer: The protocol that `master` puts in front.
        environment: Accepted for compatibility.

    Raises:
        ClusterError: On use, where the variables are not set.

    Example:
        >>> import os, keras_distribute as kd
        >>> os.environ["SM_HOSTS"] = '["algo-2", "algo-1"]'
        >>> os.environ["SM_CURRENT_HOST"] = "algo-2"
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
        check_port("port", port)
        self._port = port

    def _config(self) -> dict[str, Any]:
        needed = ("SM_HOSTS", "SM_CURRENT_HOST")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise ClusterError(
                "This is no SageMaker environment.",
                received=f"no {' and no '.join(missing)} in the environment.",
                fix="run in a SageMaker training job, or pass another resolver.",
            )
        hosts = json_value("SM_HOSTS", list)
        what, fix = "SM_HOSTS is a JSON list of names.", "check SM_HOSTS."
        for host in hosts:
            checks.instance("SM_HOSTS", host, str, what, fix, ClusterError)
        hosts = sorted(hosts)
        current = os.environ["SM_CURRENT_HOST"]
        if current not in hosts:  # As in TensorFlow; `topology` refuses it.
            return {}
        workers = [f"{host}:{self._port}" for host in hosts]
        return {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": hosts.index(current)},
        }

    def topology(self) -> Topology:
        """The place of this process among those that train together.

        Raises:
            ClusterError: Where `SM_CURRENT_HOST` is none of `SM_HOSTS`: this host would
                train alone.
        """
        found = super().topology()
        hosts, current = json_value("SM_HOSTS", list), os.environ["SM_CURRENT_HOST"]
        if hosts and current not in hosts:
            raise ClusterError(
                "This host is none of those that train together.",
                received=f"SM_CURRENT_HOST={current!r}, SM_HOSTS={hosts}.",
                fix="SM_CURRENT_HOST is one of the names in SM_HOSTS.",
            )
        return found

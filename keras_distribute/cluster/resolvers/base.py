"""`ClusterResolver`, and the two that read no environment: simple, and union."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import Topology, topology_of
from keras_distribute.errors import (
    ClusterError,
    DistributeError,
    DuplicateTaskError,
    StructureTypeError,
)


def master_url(address: str, rpc_layer: str | None) -> str:
    """`grpc://host:port`, or `host:port` without a protocol."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def check_task(
    task_type: Any = None,
    task_id: Any = None,
    rpc_layer: Any = None,
    error: type[DistributeError] = StructureTypeError,
) -> None:
    """Raises an error unless these are strings and an integer, or `None`."""
    fix = 'task_type="worker", task_id=0, rpc_layer="grpc"'
    for name, value in (("task_type", task_type), ("rpc_layer", rpc_layer)):
        checks.instance(name, value, str | None, f"{name} is a string.", fix, error)
    if task_id is not None and not checks.is_integer(task_id):
        checks.instance("task_id", task_id, (), "task_id is an integer.", fix, error)


def check_port(name: str, port: Any) -> None:
    """Raises an error unless it is the number of a port."""
    checks.count(name, port, 1, most=2**16 - 1, fix=f"{name}=8470")


class ClusterResolver:
    """Which processes train together, and which one this is: the base of all resolvers.

    A subclass implements `cluster_spec` and `master`, and sets `task_type`, `task_id`
    and `rpc_layer`; one whose environment gives numbers rather than addresses overrides
    `topology`. Source: `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    def _set_task(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> None:
        check_task(task_type, rpc_layer=rpc_layer)
        self._task_type, self._rpc_layer = task_type, rpc_layer
        self._task_id = self._checked_id(task_id)

    def _default(self, name: str) -> Any:
        """The `task_type`, `task_id` or `rpc_layer` where none was set."""

    def _checked_id(self, task_id: int | None) -> int | None:
        check_task(task_id=task_id)
        return task_id

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster, asked for anew at each call."""
        raise NotImplementedError

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, by default this one, with the protocol in front.

        For code written for TensorFlow: nothing here connects to it.

        Args:
            task_type: The type of another task.
            task_id: The number of another task.
            rpc_layer: The protocol; by default the resolver's.
        """
        check_task(task_type, task_id, rpc_layer)
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """How many accelerators a process has, by kind: `{"GPU": 8}`.

        Args:
            task_type: The type of another task, of a cluster that has started.
            task_id: The number of another task.
            config_proto: Accepted for compatibility.
        """
        check_task(task_type, task_id)
        process = jax.process_index()
        task, own = (task_type, task_id), (self.task_type, self.task_id)
        if None not in task and task != own:
            process = topology_of(self.cluster_spec(), *task).process_id
        devices = (d for d in jax.devices() if d.process_index == process)
        platforms = (d.platform.upper() for d in devices if d.platform != "cpu")
        return dict(Counter(platforms))

    def topology(self) -> Topology:
        """The place of this process among those that train together.

        Raises:
            ClusterError: Where the cluster makes no sense, or this process has no place
                in it.
        """
        return topology_of(self.cluster_spec(), self.task_type, self.task_id)

    @property
    def environment(self) -> str:
        """Accepted for compatibility: what the constructor was given, or `""`."""
        return ""

    @property
    def task_type(self) -> str | None:
        """`"chief"`, `"worker"`, `"evaluator"` or `"ps"`; `None` where unknown."""
        own = self._task_type
        return self._default("task_type") if own is None else own

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        check_task(task_type)
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process among those of its type; `None` where unknown."""
        own = self._task_id
        return self._default("task_id") if own is None else own

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = self._checked_id(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` puts in front of addresses."""
        return self._rpc_layer or self._default("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        check_task(rpc_layer=rpc_layer)
        self._rpc_layer = rpc_layer


class SimpleClusterResolver(ClusterResolver):
    """A resolver that is told everything.

    Source: `tf.distribute.cluster_resolver.SimpleClusterResolver`.

    Args:
        cluster_spec: The tasks.
        master: What `master` returns where no task is named.
        task_type: The type of this task.
        task_id: The number of this task.
        environment: Accepted for compatibility.
        num_accelerators: By kind, `{"GPU": 8}`.
        rpc_layer: The protocol that `master` puts in front.

    Raises:
        StructureTypeError: For a cluster other than a `ClusterSpec`, and a master other
            than a string.

    Example:
        >>> import keras_distribute as kd
        >>> cr = kd.cluster_resolver
        >>> cluster = cr.ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})
        >>> cr.SimpleClusterResolver(cluster, task_type="worker", task_id=1).topology()
        Topology(process_id=1, num_processes=2, coordinator='10.0.0.1:2222')
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if type(cluster_spec).__name__ != "ClusterSpec":  # TensorFlow's own is taken.
            what = "The cluster is a ClusterSpec."
            fix = 'ClusterSpec({"worker": ["a:1"]})'
            checks.instance("cluster_spec", cluster_spec, ClusterSpec, what, fix)
        what, fix = "The master is an address.", 'master=""'
        checks.instance("master", master, str, what, fix)
        self._set_task(task_type, task_id, rpc_layer)
        what = "environment is a string."
        checks.instance("environment", environment, str | None, what, '""')
        what, fix = "Accelerators are numbers by kind.", 'num_accelerators={"GPU": 8}'
        checks.instance("num_accelerators", num_accelerators, dict | None, what, fix)
        for kind, number in (num_accelerators or {}).items():
            checks.instance("num_accelerators", kind, str, what, fix)
            checks.count("num_accelerators", number, what=what, fix=fix)
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master, self._environment = master, environment
        self._num_accelerators = num_accelerators

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        check_task(task_type, task_id, rpc_layer)
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        check_task(task_type, task_id)
        return self._num_accelerators or {}

    @property
    def environment(self) -> str:
        return self._environment


class UnionResolver(ClusterResolver):
    """Several resolvers as one: their tasks together, all else from the first.

    Lists of the same job are joined in order; where one names its tasks by number, all
    do, and no number may come twice. Source:
    `tf.distribute.cluster_resolver.UnionResolver`. Differs from TF: a `task_id` of 0
    overrides, too.

    Args:
        *args: The resolvers.
        rpc_layer: Overrides that of the first resolver.
        task_type: Overrides that of the first resolver.
        task_id: Overrides that of the first resolver.

    Raises:
        StructureTypeError: For anything but a resolver.
        ClusterError: Without any.

    Example:
        >>> import keras_distribute as kd
        >>> cr = kd.cluster_resolver
        >>> parts = {"worker": ["a:1"]}, {"worker": ["b:1"], "ps": ["c:1"]}
        >>> specs = map(cr.ClusterSpec, parts)
        >>> one, two = map(cr.SimpleClusterResolver, specs)
        >>> cr.UnionResolver(one, two).cluster_spec()
        ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})
    """

    def __init__(
        self,
        *args: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        what, fix = "A union is one of resolvers.", "UnionResolver(a, b)"
        if not args:
            raise ClusterError(what, received="UnionResolver().", fix=fix)
        for resolver in args:
            checks.instance("args", resolver, ClusterResolver, what, fix)
        self._resolvers = args
        self._set_task(task_type, task_id, rpc_layer)

    def _default(self, name: str) -> Any:
        return getattr(self._resolvers[0], name)

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of all.

        Raises:
            DuplicateTaskError: Where two resolvers name the same task by its number.
        """
        specs = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, Any] = {}
        for job in dict.fromkeys(job for spec in specs for job in spec):
            parts = [spec[job] for spec in specs if job in spec]
            if all(isinstance(part, list) for part in parts):
                merged[job] = [address for part in parts for address in part]
                continue
            merged[job] = {}
            for part in parts:
                numbered = dict(enumerate(part)) if isinstance(part, list) else part
                twice = sorted(merged[job].keys() & numbered.keys())
                if twice:
                    raise DuplicateTaskError(
                        f"Two resolvers name the same tasks of the job {job!r}: "
                        f"{twice}.",
                        received=f"{specs}.",
                        fix="give each task one number, or pass lists, which are "
                        "joined.",
                    )
                merged[job].update(numbered)
        return ClusterSpec(merged)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        check_task(task_type, task_id, rpc_layer)
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return master_url(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        return self._resolvers[0].environment

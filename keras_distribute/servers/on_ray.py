"""Workers and parameter servers as actors of Ray, which says where each runs, and
starts one again that has ended.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from keras_distribute import checks
from keras_distribute.cluster import addresses, signing
from keras_distribute.cluster.ports import free_port
from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError
from keras_distribute.remote import credentials
from keras_distribute.remote.credentials import Credentials
from keras_distribute.servers.server import Server

Resources = Mapping[str, float]
_Task = tuple[str, int]
_SECONDS_TO_ASK = 2.0  # Later: a task that was there may be starting again.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_ACCELERATORS = ("GPU", "TPU")


class Task:
    """What runs in an actor: a `Server`, at an address of the actor's host.

    Ray calls the constructor anew where it starts the actor again, in another process
    and maybe on another host: so each life has an address of its own.

    Args:
        job: `"worker"` or `"ps"`.
        index: Its number.
        token: Of the job.
        encrypted: Whether all that the tasks say is encrypted.
    """

    def __init__(self, job: str, index: int, token: str, encrypted: bool) -> None:
        ray = found()
        os.environ[signing.TOKEN] = token
        os.environ[credentials.ENCRYPT] = str(int(encrypted))
        self._address = addresses.joined(ray.util.get_node_ip_address(), free_port())
        self._server = Server({job: {index: self._address}}, job, index)
        own = ray.get_runtime_context().current_actor

        def end() -> None:
            try:
                self._server.join()
            except ClusterError:
                traceback.print_exc()
                os._exit(1)  # Ray starts it again.
            ray.kill(own)  # On purpose, so that Ray does not start it again.

        threading.Thread(target=end, name="keras_distribute end", daemon=True).start()

    def address(self) -> str:
        """Where it listens, `host:port`."""
        return self._address


class RayClusterResolver(ClusterResolver):
    """Workers and parameter servers as actors of Ray, for `kd.ParameterServerStrategy`.

    The program of the driver is the coordinator. The actors start when the cluster is
    first asked for, one process each, where Ray finds their resources; Ray starts one
    again that ends, anywhere, and the coordinator asks for its new address. What a
    parameter server had is lost with it: `kd.errors.UnavailableError` names it, and
    after `strategy.reconnect()` a checkpoint is restored. The actors end with `close`,
    with the driver, and with `strategy.close(end_tasks=True)`. Also a context manager.

    Connects to Ray as `ray.init()` does, where the program has not. The token of the
    job is that of the driver's environment, or a new one; with
    `KERAS_DISTRIBUTE_ENCRYPT=1` in it all that the tasks say is encrypted. Each node
    needs `pip install 'keras-distribute[ray]'`. TensorFlow has no such resolver.

    For `kd.MultiWorkerMirroredStrategy` see
    `kd.cluster_resolver.RayTrainClusterResolver`.

    Args:
        num_workers: How many workers.
        num_ps: How many parameter servers.
        resources_per_worker: What Ray reserves for each worker, by the name of the
            resource: `"CPU"`, `"GPU"`, `"memory"` in bytes, or the cluster's own.
            `None`: `{"CPU": 1}`. A worker without `"GPU"` and `"TPU"` computes on the
            CPU.
        resources_per_ps: As much for each parameter server, which needs no accelerator.
        max_restarts: How often Ray starts each task again; -1 for any number.
        timeout_seconds: How long all tasks may take to start.

    Raises:
        StructureTypeError: For other numbers than integers, and resources that are no
            dict from names to numbers.
        ValueStructureError: For no worker, no parameter server, or a negative amount of
            a resource.
        BackendError: On use, without Ray.
        ClusterError: On use, where a task does not start in time.

    Example:
        >>> import keras_distribute as kd
        >>> resolver = kd.cluster_resolver.RayClusterResolver(
        ...     num_workers=4, num_ps=2, resources_per_ps={"CPU": 1, "big_memory": 1})
        >>> strategy = kd.ParameterServerStrategy(resolver)  # doctest: +SKIP
        >>> resolver.close()
    """

    def __init__(
        self,
        num_workers: int = 2,
        num_ps: int = 1,
        *,
        resources_per_worker: Resources | None = None,
        resources_per_ps: Resources | None = None,
        max_restarts: int = -1,
        timeout_seconds: float = 120.0,
    ) -> None:
        self._numbers = {
            "worker": checks.count("num_workers", num_workers, 1),
            "ps": checks.count("num_ps", num_ps, 1),
        }
        self._resources = {
            "worker": _checked("resources_per_worker", resources_per_worker),
            "ps": _checked("resources_per_ps", resources_per_ps),
        }
        self._max_restarts = checks.count("max_restarts", max_restarts, -1)
        checks.number("timeout_seconds", timeout_seconds)
        self._timeout = float(timeout_seconds)
        self._set_task(None, None, "grpc")
        self._token: str | None = None
        self._lock = threading.Lock()
        self._actors: dict[_Task, Any] = {}
        self._addresses: dict[_Task, str] = {}
        self._is_closed = False

    @property
    def credentials(self) -> Credentials:
        """What the tasks prove themselves with."""
        if self._token is None:
            self._token = signing.token_of_job() or signing.new_token()
            self._encrypted = os.environ.get(credentials.ENCRYPT) == "1"
        return Credentials(self._token, self._encrypted)

    def cluster_spec(self) -> ClusterSpec:
        """Where the tasks are now; where one does not answer, where it was last.

        The first call starts them, and waits until all answer.

        Raises:
            BackendError: Without Ray.
            ClusterError: Where one does not start within `timeout_seconds`, where a
                parameter server has ended, and after `close`.
        """
        ray = found()
        with self._lock:
            if self._is_closed:
                raise ClusterError(
                    "The tasks have ended.",
                    received="a RayClusterResolver that was closed.",
                    fix="another RayClusterResolver.",
                )
            if not self._actors:
                self._start(ray)
        complete = len(self._addresses) == sum(self._numbers.values())
        errors = self._ask(ray, _SECONDS_TO_ASK if complete else self._timeout)
        missing = [task for task in self._actors if task not in self._addresses]
        if missing:
            self.close()
            raise self._did_not_start(ray, missing, errors)
        died = ray.exceptions.ActorDiedError  # And will not be started again.
        if ended := {
            index: error
            for (job, index), error in errors.items()
            if job == "ps" and isinstance(error, died)
        }:
            names = ", ".join(f"ps:{index}" for index in ended)
            raise ClusterError(
                f"The parameter server(s) {names} have ended; what they had is lost.",
                received=f"{next(iter(ended.values()))}.",
                fix="another RayClusterResolver, and a checkpoint.",
            )
        known, numbers = self._addresses, self._numbers.items()
        jobs = {job: [known[job, i] for i in range(n)] for job, n in numbers}
        return ClusterSpec(jobs)

    def topology(self) -> Topology:
        """Raises `ClusterError`: these tasks are for parameter servers."""
        raise ClusterError(
            "The tasks of a RayClusterResolver are workers and parameter servers, and "
            "take no part in synchronous training.",
            received=f"{self!r}.",
            fix="kd.ParameterServerStrategy(resolver); or "
            "kd.MultiWorkerMirroredStrategy(), without a resolver, in the train_func "
            "of ray.train.v2.jax.JaxTrainer.",
        )

    def close(self) -> None:
        """Ends the actors."""
        with self._lock:
            actors, self._actors = self._actors, {}
            self._is_closed = True
        if actors and (ray := found()).is_initialized():
            for actor in actors.values():
                ray.kill(actor)

    def __enter__(self) -> RayClusterResolver:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        workers, servers = self._numbers["worker"], self._numbers["ps"]
        return f"RayClusterResolver({workers} worker(s), {servers} server(s))"

    def _start(self, ray: Any) -> None:
        encrypted = self.credentials.encrypted
        for job, number in self._numbers.items():
            resources = self._resources[job]
            variables = {"KERAS_BACKEND": "jax"}
            if job == "ps" or not any(map(resources.get, _ACCELERATORS)):
                variables["JAX_PLATFORMS"] = "cpu"
            options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
            for name, amount in resources.items():
                if name in _OPTIONS:
                    options[_OPTIONS[name]] = amount
                else:
                    options["resources"][name] = amount
            actor = ray.remote(Task).options(
                max_restarts=self._max_restarts,
                runtime_env={"env_vars": variables},
                **options,
            )
            for index in range(number):
                self._actors[job, index] = actor.remote(
                    job, index, self._token, encrypted
                )

    def _ask(self, ray: Any, seconds: float) -> dict[_Task, Exception]:
        """Notes where the tasks are that answer; returns the errors of others."""
        errors: dict[_Task, Exception] = {}
        # Ray would start anew for whoever asks it after its end.
        if not ray.is_initialized():
            return errors
        asked = {actor.address.remote(): task for task, actor in self._actors.items()}
        answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        for answer in answers:
            try:
                self._addresses[asked[answer]] = ray.get(answer)
            except ray.exceptions.RayError as error:
                errors[asked[answer]] = error
        return errors

    def _did_not_start(
        self, ray: Any, missing: list[_Task], errors: Mapping[_Task, Exception]
    ) -> ClusterError:
        names = ", ".join(f"{job}:{index}" for job, index in missing)
        if errors:
            task, error = next(iter(errors.items()))
            return ClusterError(
                f"The task(s) {names} did not start on Ray.",
                received=f"{error} from {task[0]}:{task[1]}.",
                fix="pip install 'keras-distribute[ray]' on each node.",
            )
        wanted = {job: self._resources[job] for job, _ in missing}
        left = ray.available_resources() if ray.is_initialized() else {}
        free = {name: n for name, n in left.items() if not name.startswith("node:")}
        return ClusterError(
            f"The task(s) {names} did not start on Ray within {self._timeout:g} s.",
            received=f"{wanted} for each task, while {free} is free.",
            fix="resources_per_worker and resources_per_ps that the nodes have, or a "
            "longer timeout_seconds where nodes are still to come.",
        )


def found() -> Any:
    """The package `ray`.

    Raises:
        BackendError: Where it is not installed.
    """
    fix = "pip install 'keras-distribute[ray]', on each node."
    return checks.imported("ray", "RayClusterResolver needs Ray.", fix)


def _checked(name: str, resources: Any) -> dict[str, float]:
    if resources is None:
        return {"CPU": 1}
    what = f"{name} has an amount for the name of each resource."
    fix = f'{name}={{"CPU": 1}}'
    checks.instance(name, resources, Mapping, what, fix)
    for key, amount in resources.items():
        checks.instance(name, key, str, what, fix)
        checks.number(name, amount, zero=True, what=what, fix=fix)
    return dict(resources)

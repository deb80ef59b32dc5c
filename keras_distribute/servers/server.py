"""`kd.Server`: a worker or a parameter server, until its coordinator says goodbye."""

from __future__ import annotations

import threading
from typing import Any

from keras_distribute import checks
from keras_distribute.cluster.ports import free_port
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import check_cluster
from keras_distribute.errors import ClusterError
from keras_distribute.remote import credentials
from keras_distribute.remote.endpoint import Endpoint
from keras_distribute.servers.runner import Runner
from keras_distribute.servers.store import Store

_KINDS = {"worker": Runner, "ps": lambda *_: Store()}


class Server:
    """A task of a cluster with parameter servers: a worker, or a parameter server.

    It runs none of the user's code but dataset functions: programs come from the
    coordinator. It listens at its task's address alone, and talks to nobody who does
    not have the token of the job (`KERAS_DISTRIBUTE_JOB_TOKEN`).

    Source: `tf.distribute.Server`. Differs from TF: `join` returns when the coordinator
    has said goodbye; the chief has none.

    Args:
        server_or_cluster_def: The `kd.cluster_resolver.ClusterSpec` of the cluster, or
            a dict.
        job_name: `"worker"` or `"ps"`.
        task_index: Its number.
        protocol: Accepted for compatibility.
        config: Accepted for compatibility.
        start: Whether to listen at once.

    Raises:
        ClusterError: For a task that is not in the cluster, an address that is taken or
            not this host's, and without a token.

    Example:
        >>> resolver = kd.cluster_resolver.TFConfigClusterResolver()  # doctest: +SKIP
        >>> if resolver.task_type in ("worker", "ps"):  # doctest: +SKIP
        ...     kd.Server(resolver.cluster_spec(), resolver.task_type,
        ...               resolver.task_id).join()
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        self._cluster = ClusterSpec(server_or_cluster_def)
        checks.flag("start", start)
        known = isinstance(job_name, str) and job_name in _KINDS
        if not known or not checks.is_integer(task_index):
            raise ClusterError(
                "A server is a worker or a parameter server.",
                received=f"the task {job_name}:{task_index} of {self._cluster!r}.",
                fix='kd.Server(cluster, job_name="worker", task_index=0); the chief '
                "runs the program, with kd.ParameterServerStrategy.",
            )
        check_cluster(self._cluster, job_name, task_index)
        self._job, self._index = str(job_name), int(task_index or 0)
        self._credentials = credentials.of_job()
        self._stop = threading.Event()
        # Set once it has served. (Interrupted, `Thread.join` takes a thread that runs
        # for one that has ended.)
        self._served: threading.Event | None = None
        self._error: BaseException | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Its address, with TensorFlow's protocol in front."""
        address = self._cluster.task_address(self._job, self._index)
        return f"grpc://{address}"

    @property
    def server_def(self) -> dict[str, Any]:
        """What it was made with."""
        return {
            "cluster": self._cluster.as_dict(),
            "job_name": self._job,
            "task_index": self._index,
        }

    def start(self) -> None:
        """Listens, unless it does already."""
        if self._served is not None and not self._served.is_set():
            return
        self._stop.clear()
        self._error = None
        address = self._cluster.task_address(self._job, self._index)
        endpoint = Endpoint(address, self._credentials)
        task: Any = _KINDS[self._job](self._credentials, endpoint.upcoming)

        served = threading.Event()

        def serve() -> None:
            try:
                endpoint.serve(
                    task.handle, lambda: task.has_ended or self._stop.is_set()
                )
            except BaseException as error:  # Of `sys.exit` in a dataset function, too.
                self._error = error
            finally:
                endpoint.close()
                served.set()

        name = f"{self._job}:{self._index}"
        threading.Thread(target=serve, name=name, daemon=True).start()
        self._served = served

    def join(self) -> None:
        """Waits until the coordinator has said goodbye.

        Raises:
            ClusterError: If it was not started, or has ended by an error.
        """
        if self._served is None:
            raise ClusterError(
                "The server was not started.",
                received="start=False, and then join.",
                fix="server.start() before.",
            )
        self._served.wait()  # Ctrl-C ends it.
        if self._error is not None:
            raise ClusterError(
                f"The task {self._job}:{self._index} has ended by an error.",
                received=f"{self._error!r}.",
                fix="start it again; the error above says what is to be mended.",
            ) from self._error

    def stop(self) -> None:
        """Ends it from within its process."""
        self._stop.set()
        if self._served is not None:
            self._served.wait()

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """A worker on a free port of this host.

        Source: `tf.distribute.Server.create_local_server`.
        """
        spec = {"worker": [f"127.0.0.1:{free_port()}"]}
        return Server(spec, "worker", 0, config=config, start=start)

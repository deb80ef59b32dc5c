"""The tasks of a cluster, as what has to be let go of, or ended."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence

from keras_distribute.errors import DistributeError
from keras_distribute.scheduling.queue import Queue
from keras_distribute.scheduling.servers import Server
from keras_distribute.scheduling.workers import Worker


class Tasks:
    """What talks to the tasks of a cluster, and has to end. A program that ends lets
    them end, too.

    Args:
        queue: Of the functions.
        workers: Their threads; a list that may change.
        servers: All of them.
    """

    def __init__(
        self, queue: Queue, workers: Sequence[Worker], servers: Sequence[Server]
    ) -> None:
        self._queue, self._workers, self._servers = queue, workers, servers
        self._is_closed = False
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        self.close(end_tasks=True)

    def close(self, end_tasks: bool = False) -> None:
        """Lets go of them, or lets them end; once."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._queue.close()
        for worker in self._workers:
            worker.close(end_tasks)
        for worker in self._workers:
            worker.join(5.0)
        for server in self._servers:
            if end_tasks:
                with contextlib.suppress(DistributeError):
                    server.call({"op": "end"})
            server.close()

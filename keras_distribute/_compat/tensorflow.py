"""TensorFlow, where it is installed: kept off the accelerators, asked how it shards a
pipeline, and what it does while a function is traced.

`_AutoShardDataset` is what `tf.distribute` itself uses; there is no public name.
`_as_serialized_graph` shows the seeds of a pipeline, which TensorFlow tells nobody.
`op_callbacks` and `op_def_registry`, its debugger's, say which operations run.
Nothing here imports TensorFlow unless the caller has.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from keras_distribute._compat.seams import Replacements

_OPT_OUT = "KERAS_DISTRIBUTE_TF_DEVICES"
_NAME = "tensorflow"
# Which inputs are the two seeds.
_FIRST_SEED = {"ShuffleDataset": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}


def keep_off_accelerators(replaced: Replacements) -> None:
    """TensorFlow sees no GPU and no TPU in this process, now or when it is imported;
    JAX needs their memory.

    The environment variable `KERAS_DISTRIBUTE_TF_DEVICES=1` leaves TensorFlow alone.
    """
    finder = _AfterImport()
    if os.environ.get(_OPT_OUT, "0") in ("", "0"):
        module = sys.modules.get(_NAME)
        if _has_devices(module):
            _hide_devices(module)
        else:
            sys.meta_path.insert(0, finder)

    def stop_waiting() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    replaced.then(stop_waiting)


def _has_devices(module: Any) -> bool:
    """Whether it is TensorFlow, and no stand-in or what is left of one."""
    return hasattr(module, "config")


def _hide_devices(tensorflow: Any) -> None:
    for kind in ("GPU", "TPU"):
        try:
            tensorflow.config.set_visible_devices([], kind)
        # Already started: nothing to hide if it has none.
        except (RuntimeError, ValueError):
            if tensorflow.config.list_logical_devices(kind):
                warnings.warn(
                    f"TensorFlow has taken the {kind}s that JAX needs, since it was "
                    "used before keras_distribute was "
                    "imported. Import keras_distribute first.",
                    stacklevel=2,
                )


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as everyone else does, and hides devices once it is loaded."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                if self in sys.meta_path and _has_devices(module):
                    sys.meta_path.remove(self)
                    _hide_devices(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def is_tracing() -> bool:
    """Whether a `tf.function`, or a function of a pipeline, is being traced here."""
    tensorflow = sys.modules.get(_NAME)
    return _has_devices(tensorflow) and cast(Any, tensorflow).inside_function()


def is_function(function: Any) -> bool:
    """Whether it is a `tf.function`."""
    tensorflow: Any = sys.modules.get(_NAME)
    return _has_devices(tensorflow) and isinstance(
        function, tensorflow.types.experimental.PolymorphicFunction
    )


def has_raised(error: BaseException) -> bool:
    """Whether an error comes from a call of TensorFlow."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = (frame.f_globals.get("__name__") or "" for frame, _ in frames)
    return any(module.split(".")[0] == _NAME for module in modules)


@contextmanager
def observed(stateful: Callable[[str], None]) -> Generator[None]:
    """Calls `stateful` with the name of each operation that this thread runs in it and
    that does not give the same each time: draws, variables, output, a `tf.function`.
    """
    if not _has_devices(sys.modules.get(_NAME)):
        yield
        return
    from tensorflow.python.framework import op_callbacks, op_def_registry

    def ran(op_type: Any, *args: Any, graph: Any = None, **kwargs: Any) -> None:
        name = op_type.decode() if isinstance(op_type, bytes) else op_type
        known = op_def_registry.get(name)  # A `tf.function` is not.
        if graph is None and (known is None or known.is_stateful):
            stateful(name)

    op_callbacks.add_op_callback(ran)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(ran)


def is_pipeline(dataset: Any) -> bool:
    """Whether it is a `tf.data.Dataset`, and not one that `tf.distribute` has
    distributed, which Keras takes for one.
    """
    import tensorflow as tf

    return isinstance(dataset, tf.data.Dataset)


def policy_of(dataset: Any) -> int:
    """The value of the `AutoShardPolicy` in the options of a dataset."""
    return int(dataset.options().experimental_distribute.auto_shard_policy.value)


def static_batch_size(dataset: Any) -> int | None:
    """The size of a full batch, as `tf.distribute` finds it; `None` where unknown."""
    from tensorflow.python.data.experimental.ops import distribute

    try:
        size = int(cast(Any, distribute.compute_batch_size(dataset)))
    except IndexError:  # An element of scalars has no batch.
        return None
    return size if size > 0 else None


def auto_sharded(
    dataset: Any, policy: int, num_workers: int, worker: int, num_replicas: int
) -> Any:
    """The part of `dataset` that a worker reads under FILE or HINT.

    Raises:
        LookupError: Where the pipeline reads no files, too few, or has no hint.
    """
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import distribute

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy(policy)
    )
    try:
        dataset = dataset.with_options(options)
        if policy == tf.data.experimental.AutoShardPolicy.FILE.value:
            # Too few files are an error of the first worker's first read; the others
            # would find nothing to read.
            first = distribute._AutoShardDataset(dataset, num_workers, 0, num_replicas)
            next(iter(first), None)
        return distribute._AutoShardDataset(dataset, num_workers, worker, num_replicas)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        raise LookupError(_reason(error)) from error


def _reason(error: Any) -> str:
    """The first sentence of TensorFlow's message, without the names of its nodes."""
    text = str(error.message).split("\n", 1)[0]
    return text.rsplit("}}", 1)[-1].split("goo.gle", 1)[0].strip(" :.")


def unseeded(dataset: Any) -> list[str]:
    """A pipeline's operations that no seed fixes: each process draws its own."""
    import tensorflow as tf
    from tensorflow.core.framework.graph_pb2 import GraphDef

    ignored = tf.data.experimental.ExternalStatePolicy.IGNORE
    graph = GraphDef.FromString(
        dataset._as_serialized_graph(external_state_policy=ignored).numpy()
    )
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    return [
        node.op
        for nodes in bodies
        for node in nodes
        if _is_unseeded(node, {each.name: each for each in nodes})
    ]


def _is_unseeded(node: Any, nodes: dict[str, Any]) -> bool:
    """Whether both seeds are 0, which tells TensorFlow to draw them."""
    import tensorflow as tf

    first = next(
        (at for name, at in _FIRST_SEED.items() if node.op.startswith(name)), None
    )
    if first is None:
        return False
    seeds = [nodes.get(name.split(":")[0]) for name in node.input[first : first + 2]]
    return all(
        seed is not None
        and seed.op == "Const"
        and int(tf.make_ndarray(seed.attr["value"].tensor)) == 0
        for seed in seeds
    )


def save_iterator(iterator: Any, prefix: str) -> None:
    """Writes a `tf.data` iterator's position into files that start with `prefix`."""
    import tensorflow as tf

    tf.train.Checkpoint(iterator=iterator).write(prefix)


def restore_iterator(iterator: Any, prefix: str) -> None:
    """Puts a `tf.data` iterator where `save_iterator` found one."""
    import tensorflow as tf

    tf.train.Checkpoint(iterator=iterator).read(prefix).assert_consumed()

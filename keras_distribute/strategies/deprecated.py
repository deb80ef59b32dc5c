"""Names that TensorFlow has deprecated, as what has replaced them, with TensorFlow's
advice as a `DeprecationWarning`; and what to write for those that are absent. Knows no
strategy.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_distribute import checks

_ITERATOR = "iter(strategy.experimental_distribute_dataset(dataset))"
_SESSION = "leave it out: there is no tf.Session to configure."
_ONE_ARRAY = "leave it out: a variable is one array over all devices."
_ABSENT = {
    "make_dataset_iterator": _ITERATOR,
    "make_input_fn_iterator": "iter(strategy.distribute_datasets_from_function(fn))",
    "experimental_make_numpy_dataset": "kd.ArrayDataset(arrays, batch_size=32)",
    "configure": _SESSION,
    "update_config_proto": _SESSION,
    "colocate_vars_with": _ONE_ARRAY,
    "call_for_each_replica": "strategy.run(fn, args=(x,))",
    "broadcast_to": "leave it out: an array is the same for all replicas in run.",
}


class AbsentNames:
    """Says what to write for a name of TensorFlow that is not there."""

    if not TYPE_CHECKING:  # Checkers are to know of names that nothing has.

        def __getattr__(self, name: str) -> Any:
            if name not in _ABSENT:
                return object.__getattribute__(self, name)  # Python's own error.
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.\n"
                f"  Fix: {_ABSENT[name]}",
                name=name,
                obj=self,
            )


@functools.cache
def warn_once(name: str, advice: str) -> None:
    """Warns of a name where it is first used in a process, in TensorFlow's words."""
    warnings.warn(
        f"{name} is deprecated and will be removed in a future version.\n"
        f"Instructions for updating:\n{advice}",
        DeprecationWarning,
        stacklevel=3,
    )


class DeprecatedMethods(AbsentNames):
    """The methods of `tf.distribute.Strategy` under their older names."""

    run: Any
    experimental_local_results: Any
    distribute_datasets_from_function: Any

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: Any = None
    ) -> Any:
        """Deprecated: `distribute_datasets_from_function`."""
        warn_once(
            "experimental_distribute_datasets_from_function",
            "rename to distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Deprecated: `experimental_local_results`."""
        warn_once("unwrap", "use `experimental_local_results` instead.")
        return self.experimental_local_results(value)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Any = None
    ) -> Any:
        """Deprecated: `run`, with what `input_iterator.get_next()` returns."""
        warn_once("experimental_run", "use run() instead")
        if input_iterator is None:
            return self.run(fn)
        checks.function(
            "input_iterator",
            getattr(input_iterator, "get_next", None),
            "experimental_run takes the iterator of a distributed dataset.",
            "strategy.run(fn, args=(next(iter(dataset)),))",
        )
        return self.run(fn, args=(input_iterator.get_next(),))

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """Deprecated: `run`. TensorFlow has removed the name."""
        warn_once("experimental_run_v2", "renamed to `run`")
        return self.run(fn, args, kwargs, options)

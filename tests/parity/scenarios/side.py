"""What a scenario needs of the side that it runs on.

The sides are modules: `recording/session.py` is TensorFlow's, `ours.py` is this
package's.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..encoding import JSON

Calls = dict[str, Callable[[], Any]]
"""What the record's entries of a topic do, by their names."""


class Side(Protocol):
    """The names that scenarios use."""

    distribute: Any
    """`tf.distribute`, or this package."""
    keras: Any
    """The Keras of that side."""

    def replica_id(self) -> Any:
        """Which replica runs this line."""

    def tensor(self, value: Any) -> Any:
        """An array of the side's own."""

    def size(self, tensor: Any) -> Any:
        """The number of elements of a tensor, as a tensor."""

    def variable(self, initial: Any, **options: Any) -> Any:
        """A variable; synchronization and aggregation by their names, in any case."""

    def read(self, variable: Any) -> Any:
        """The value of a variable."""

    def per_replica(self, strategy: Any, components: Sequence[Any]) -> Any:
        """A PerReplica of tensors, the first components of `components`."""

    def encoded(self, value: Any, strategy: Any) -> JSON:
        """`value` in the record's encoding."""

    def gradient(self, loss: Callable[[Any], Any], x: Any) -> Any:
        """The gradient of the sum of what `loss` makes of `x`, with respect to `x`."""

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a program of its own, where the side has such."""

    def cardinality(self, dataset: Any) -> int:
        """The number of elements that a distributed dataset says it has."""


def scoped(strategy: Any, call: Callable[[], Any]) -> Any:
    """What `call` returns under the strategy's scope."""
    with strategy.scope():
        return call()

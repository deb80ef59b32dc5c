"""Records which context each place is in, and the errors of calls in the wrong one."""

from collections.abc import Iterator

from ..scenarios import contexts
from . import session
from .session import Entry, mirrored, results


def places(replicas: int) -> Iterator[Entry]:
    """What the context functions say at each place."""
    for place, said in contexts.places(session, mirrored(replicas)).items():
        yield {"place": place, **said}


def misuse(replicas: int) -> Iterator[Entry]:
    """Calls in the wrong context: the error, or what came back where there is none."""
    return results(contexts.misuse(session, mirrored(replicas)))

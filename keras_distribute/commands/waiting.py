"""Asks what may not answer: a driver, a metadata service, another host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Answer(NamedTuple, Generic[_T]):
    """What came of a question.

    Args:
        value: The answer; `None` where there is none.
        problem: Why there is none, as text.
        hangs: Whether the question still waits, in a thread of its own.
    """

    value: _T | None
    problem: str | None = None
    hangs: bool = False


def ask(question: Callable[[], _T], seconds: float) -> Answer[_T]:
    """Calls a function in a thread, and waits so long for it."""
    answers: list[Answer[_T]] = []

    def call() -> None:
        try:
            answers.append(Answer(question()))
        except BaseException as error:
            answers.append(Answer(None, f"{type(error).__name__}: {error}"))

    name = "keras_distribute question"
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    return Answer(None, f"no answer within {seconds:g} seconds", hangs=True)

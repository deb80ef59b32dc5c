"""What each process last said of itself, and who has been silent since."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

_LONGEST = 500  # Characters of a place.
_FORM = re.compile(rf"(\d{{1,15}})\|(\d{{1,15}})\|(\d{{1,15}})\|(.{{0,{_LONGEST}}})")

ENDED = "ended"  # The place of a process whose program is over.
Verdict = tuple[int, str]  # The process that is the reason, and what to say of it.


class Heartbeat(NamedTuple):
    """What a process says about once a second.

    Attributes:
        turn: How many heartbeats it has sent.
        steps: How many steps it has begun.
        programs: How many programs of all processes it has begun.
        place: Where it is, in words.
    """

    turn: int = 0
    steps: int = 0
    programs: int = 0
    place: str = "at the start"

    @classmethod
    def parse(cls, text: str) -> Heartbeat | None:
        """The heartbeat in a text; `None` for text of another form."""
        match = _FORM.fullmatch(text)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4])

    def to_text(self) -> str:
        return "|".join(map(str, self._replace(place=self.place[:_LONGEST])))

    @property
    def has_ended(self) -> bool:
        return self.place == ENDED

    @property
    def where(self) -> str:
        steps = f" (step {self.steps} of its program)" if self.steps else ""
        return self.place + steps


class Heartbeats:
    """The last heartbeat of each process, and when it came."""

    def __init__(self, process: int, num_processes: int) -> None:
        self._process = process
        self._answered = now = time.monotonic()
        self.last = {other: (Heartbeat(), now) for other in range(num_processes)}

    def hear(self, heartbeats: dict[int, Heartbeat]) -> None:
        """Notes an answer of process 0, by which all processes hear each other."""
        self._answered = now = time.monotonic()
        for process, heartbeat in heartbeats.items():
            if self.last[process][0] != heartbeat:
                self.last[process] = (heartbeat, now)

    def discount(self, seconds: float) -> None:
        """Leaves out time in which this process itself was stopped, and heard none."""
        if seconds > 0:
            self._answered += seconds
            self.last = {
                process: (heartbeat, when + seconds)
                for process, (heartbeat, when) in self.last.items()
            }

    def silent(self, seconds: float) -> Verdict | None:
        """The process that has been silent for longer than this, the longest of all."""
        now = time.monotonic()
        unanswered = now - self._answered
        if unanswered > seconds:
            text = "process 0, by which all find each other, has not answered for"
            return 0, f"{text} {unanswered:.0f} seconds"
        # Silence counts up to the last answer: since then nobody could be heard.
        others = [
            (when, process)
            for process, (heartbeat, when) in self.last.items()
            if process != self._process
            and self._answered - when > seconds
            and not heartbeat.has_ended
        ]
        if not others:
            return None
        when, process = min(others)
        text = f"process {process} gave its last sign of life {now - when:.0f} seconds"
        return process, f"{text} ago, {self.last[process][0].where}"

    def has_ended(self, process: int) -> bool:
        """Whether the program of a process is over."""
        return self.last[process][0].has_ended

    def left_by(self, process: int) -> Verdict:
        """The verdict on a process that has ended while others wait for it."""
        steps = self.last[process][0].steps
        text = f"process {process} has ended after step {steps} of its program"
        return process, f"{text}, others have not"

    def left_behind(self, programs: int) -> Verdict | None:
        """The verdict on one that has ended and has begun fewer programs than this one,
        which would wait for it for ever.
        """
        for process, (heartbeat, _) in self.last.items():
            own = process == self._process
            if not own and heartbeat.has_ended and heartbeat.programs < programs:
                return self.left_by(process)
        return None

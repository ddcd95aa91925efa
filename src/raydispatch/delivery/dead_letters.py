"""Dead letters: messages that a dispatcher could not handle, with the reason."""

import threading
from collections import deque
from datetime import datetime
from typing import Any, NamedTuple

from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.messages.envelope import Envelope

FINAL_FAILURES = frozenset((DispatchStatus.DISPATCHER_ERROR, DispatchStatus.TIMEOUT, DispatchStatus.INVALID_MESSAGE))
"""The outcomes at a dispatcher that make a dead letter; a refusal by a breaker does not, since nothing was tried."""


class DeadLetter(NamedTuple):
    """One message that one dispatcher could not handle."""

    topic: str
    envelope: Envelope[Any]
    outcome: Outcome
    first_at: datetime
    last_at: datetime
    table_version: str


class DeadLetters:
    """The last so many, in memory; safe in threads.

    Example: `engine.dead_letters.list(dispatcher_id="billing")`.
    """

    def __init__(self, capacity: int) -> None:
        self._letters: deque[DeadLetter] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self.forgotten = 0
        """How many had to go to make room."""

    def add(self, letter: DeadLetter) -> None:
        """Keep one more; the oldest goes if there is no room."""
        with self._lock:
            self.forgotten += len(self._letters) == self._letters.maxlen
            self._letters.append(letter)

    def list(self, *, dispatcher_id: str | None = None, error_type: str | None = None) -> list[DeadLetter]:
        """Those of a dispatcher, or with this class of error; the oldest first."""
        with self._lock:
            letters = list(self._letters)
        return [
            letter
            for letter in letters
            if dispatcher_id in (None, letter.outcome.dispatcher_id) and error_type in (None, letter.outcome.error_type)
        ]

    def purge(self) -> int:
        """Let all go; how many they were."""
        with self._lock:
            count = len(self._letters)
            self._letters.clear()
        return count

    def __len__(self) -> int:
        return len(self._letters)

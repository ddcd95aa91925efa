"""A consumer, as a subscription sees it: it takes messages, and tells what became of each."""

from enum import Enum
from typing import NamedTuple, Protocol

from raydispatch.delivery.sharing import Entry
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode


class Item(NamedTuple):
    """One message, on its way to a consumer."""

    entry: Entry
    topic: str
    message_type: str
    route_id: str
    blob: bytes
    """The message as data; nobody has unpacked it yet."""
    deliveries: int
    """How often it was delivered before."""


class Ending(Enum):
    """What can become of a message at a consumer."""

    ACKED = "acked"
    FAILED = "failed"
    """It was tried; that counts."""
    REFUSED = "refused"
    """It was not tried: no room, or an open circuit. It comes again, and that does not count."""
    LOST = "lost"
    """The consumer is gone; whether it ran, nobody knows."""


class Verdict(NamedTuple):
    """What became of one message."""

    ending: Ending
    outcome: Outcome | None = None
    delay_seconds: float | None = None
    """Until the next try; the subscription's own rule says, if nothing is given."""
    is_final: bool = False
    """Whether another try can change nothing."""


ACKED = Verdict(Ending.ACKED)
REFUSED = Verdict(Ending.REFUSED)
LOST = Verdict(Ending.LOST)


_FINE = frozenset((DispatchStatus.SUCCESS, DispatchStatus.SKIPPED))
_UNTRIED = frozenset((DispatchStatus.CIRCUIT_OPEN, DispatchStatus.REJECTED))
_FINAL = frozenset((ErrorCode.HANDLER_RESULT, ErrorCode.HOP_LIMIT))
"""The handler has done its work, and would do it again; or the chain would be as long the next time."""


def verdict_of(outcome: Outcome) -> Verdict:
    """What an outcome at a dispatcher means for the message."""
    if outcome.status in _FINE:
        return ACKED
    if outcome.status in _UNTRIED:
        return REFUSED
    is_final = outcome.status is DispatchStatus.INVALID_MESSAGE or outcome.error_code in _FINAL
    return Verdict(Ending.FAILED, outcome, is_final=is_final)


class Tell(Protocol):
    """Hands a verdict to the subscription."""

    def __call__(self, seat_id: str, items: list[Item], verdicts: list[Verdict]) -> None:
        """The verdict of each."""


class Consumer(Protocol):
    """Where messages go: a dispatcher's replica, or a reader in some process."""

    consumer_id: str

    def is_well(self) -> bool:
        """Whether it can take messages now."""

    def take(self, items: list[Item], tell: Tell) -> None:
        """Begin with these, and return at once; tell of each when it has ended."""

    def give_back(self) -> list[Item]:
        """What it has not begun with, and will not begin with any more."""

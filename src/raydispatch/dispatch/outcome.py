"""What became of a message: a status, an outcome for each dispatcher, one result for the whole.

Outcomes and results are named tuples: immutable like every value here, and six times faster to make than a frozen
dataclass, of which every message would need two.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from raydispatch.errors import ErrorCode
from raydispatch.messages.topic import MessageCategory


class DispatchStatus(StrEnum):
    """How a message ended. The four questions are advice for callers.

    Example: `DispatchStatus("no_handler") is DispatchStatus.NO_DISPATCHER`.
    """

    SUCCESS = "success"
    ROUTED = "routed"
    """On its way; the only status that is not the last."""
    NO_DISPATCHER = "no_dispatcher"
    DISPATCHER_ERROR = "dispatcher_error"
    TIMEOUT = "timeout"
    INVALID_MESSAGE = "invalid_message"
    PUBLISH_FAILED = "publish_failed"
    SKIPPED = "skipped"
    """Left out on purpose, by a filter or as a duplicate."""
    CIRCUIT_OPEN = "circuit_open"
    """The breaker refused: nothing ran."""
    REJECTED = "rejected"
    """Backpressure refused."""

    @classmethod
    def _missing_(cls, value: object) -> "DispatchStatus | None":
        return {"no_handler": cls.NO_DISPATCHER, "handler_error": cls.DISPATCHER_ERROR}.get(str(value))

    def is_terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self is not DispatchStatus.ROUTED

    def is_successful(self) -> bool:
        """Whether every dispatcher succeeded."""
        return self is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Whether something is wrong."""
        return self not in _FINE

    def requires_retry(self) -> bool:
        """Whether sending the message again may well succeed."""
        return self in _TRANSIENT


_FINE = frozenset((DispatchStatus.SUCCESS, DispatchStatus.ROUTED, DispatchStatus.SKIPPED))
_TRANSIENT = frozenset(
    (DispatchStatus.TIMEOUT, DispatchStatus.PUBLISH_FAILED, DispatchStatus.CIRCUIT_OPEN, DispatchStatus.REJECTED)
)

WORST_FIRST = (
    DispatchStatus.DISPATCHER_ERROR,
    DispatchStatus.TIMEOUT,
    DispatchStatus.PUBLISH_FAILED,
    DispatchStatus.INVALID_MESSAGE,
    DispatchStatus.CIRCUIT_OPEN,
    DispatchStatus.REJECTED,
    DispatchStatus.NO_DISPATCHER,
    DispatchStatus.SKIPPED,
    DispatchStatus.SUCCESS,
    DispatchStatus.ROUTED,
)
BADNESS = {status: position for position, status in enumerate(WORST_FIRST)}
"""How bad each status is: of several, the one with the lowest number stands for all."""


class Reply(NamedTuple):
    """What a handler returns to answer: `request` and `execute` hand it back.

    Example: `return Reply({"balance": 12})`.
    """

    payload: Any


class Outcome(NamedTuple):
    """What became of a message at one dispatcher."""

    dispatcher_id: str
    status: DispatchStatus
    route_id: str | None = None
    outputs: tuple[str, ...] = ()
    attempts: int = 0
    """How many times the handler ran."""
    duration_ms: float = 0.0
    error_code: ErrorCode | None = None
    error_type: str | None = None
    """The class name of the exception."""
    error_message: str | None = None
    """Sanitized."""
    reply: Reply | None = None
    repeated: bool = False
    """Whether this is the stored outcome of the same message, sent again."""


def worst_status(outcomes: Sequence[Outcome]) -> DispatchStatus:
    """The one status that stands for all."""
    return min((outcome.status for outcome in outcomes), key=BADNESS.__getitem__)


class DispatchResult(NamedTuple):
    """What became of a message as a whole. `outcomes` has each dispatcher's part, in the order of selection.

    Example: `if result.is_error(): print(result.error_message)`.
    """

    dispatch_id: UUID
    status: DispatchStatus
    topic: str
    message_category: MessageCategory | None = None
    message_type: str | None = None
    route_id: str | None = None
    """The route of the first dispatcher selected."""
    dispatcher_id: str | None = None
    """The first dispatcher selected."""
    duration_ms: float = 0.0
    started_at: datetime | None = None
    completed_at: datetime | None = None
    outputs: Sequence[str] = ()
    """The topics that dispatchers returned, in order of selection; those of the successful ones."""
    error_message: str | None = None
    error_code: ErrorCode | None = None
    correlation_id: UUID | None = None
    trace_id: str | None = None
    span_id: str | None = None
    outcomes: tuple[Outcome, ...] = ()
    table_version: str | None = None

    @property
    def reply(self) -> Reply | None:
        """The answer of the first dispatcher that gave one."""
        return next((outcome.reply for outcome in self.outcomes if outcome.reply is not None), None)

    @property
    def output_count(self) -> int:
        """How many topics were returned."""
        return len(self.outputs)

    def is_terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self.status.is_terminal()

    def is_successful(self) -> bool:
        """Whether every dispatcher succeeded."""
        return self.status.is_successful()

    def is_error(self) -> bool:
        """Whether something is wrong."""
        return self.status.is_error()

    def requires_retry(self) -> bool:
        """Whether sending the message again may well succeed."""
        return self.status.requires_retry()


class Receipt(NamedTuple):
    """What `publish` hands back at once: ROUTED if the message was accepted, else why not."""

    status: DispatchStatus
    topic: str
    message_id: UUID
    correlation_id: UUID
    subscribers: int = 0
    """How many subscribers' queues took it."""
    error_code: ErrorCode | None = None
    error_message: str | None = None


def combined_error(outcomes: Sequence[Outcome], status: DispatchStatus) -> tuple[ErrorCode | None, str | None]:
    """The code of the first of the worst, and every dispatcher's error, each behind its id."""
    failed = [outcome for outcome in outcomes if outcome.error_message is not None]
    if not failed:
        return None, None
    code = next((outcome.error_code for outcome in failed if outcome.status is status), failed[0].error_code)
    return code, "; ".join(f"{outcome.dispatcher_id}: {outcome.error_message}" for outcome in failed)

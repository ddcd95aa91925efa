"""Every error that raydispatch raises, one sentence each.

Raising is for mistakes in the program. What a *message* can cause (no match, a payload that does not fit, a
failing handler) is never raised: it is an outcome, with one of the same codes.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from raydispatch.dispatch.outcome import DispatchResult


class ErrorCode(StrEnum):
    """What went wrong, for programs to compare with; people read the message beside it."""

    # Mistakes of the caller: these are raised.
    INVALID_STATE = "invalid_state"
    INVALID_PARAMETER = "invalid_parameter"
    DUPLICATE_REGISTRATION = "duplicate_registration"
    ITEM_NOT_REGISTERED = "item_not_registered"

    # What a message met on its way: these stand in results.
    INVALID_TOPIC = "invalid_topic"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    PAYLOAD_INVALID = "payload_invalid"
    NO_DISPATCHER = "no_dispatcher"
    START_FAILED = "start_failed"
    HANDLER_EXCEPTION = "handler_exception"
    HANDLER_RESULT = "handler_result"
    TIME_LIMIT = "time_limit"
    CIRCUIT_OPEN = "circuit_open"
    NOT_A_COMMAND = "not_a_command"
    MIDDLEWARE_EXCEPTION = "middleware_exception"
    DUPLICATE_MESSAGE = "duplicate_message"
    FILTERED = "filtered"
    NO_HEALTHY_ENDPOINT = "no_healthy_endpoint"
    REPLICA_LOST = "replica_lost"
    OUTBOX_FULL = "outbox_full"
    HOP_LIMIT = "hop_limit"
    QUEUE_FULL = "queue_full"
    DROPPED = "dropped"
    RATE_LIMITED = "rate_limited"
    SHUT_DOWN = "shut_down"
    JOURNAL_UNAVAILABLE = "journal_unavailable"
    JOURNAL_CORRUPT = "journal_corrupt"

    # What a request or a reply met.
    NO_REPLY = "no_reply"
    LATE_REPLY = "late_reply"
    UNKNOWN_REPLY = "unknown_reply"
    DUPLICATE_REPLY = "duplicate_reply"
    CHANNEL_CLOSED = "channel_closed"

    @property
    def error_class(self) -> "ErrorClass":
        """Which part of the way it belongs to."""
        return _CLASSES.get(self, ErrorClass.DELIVERY)


class ErrorClass(StrEnum):
    """The four kinds of trouble, for those who alert or route by kind."""

    ROUTING = "routing"
    CORRELATION = "correlation"
    DELIVERY = "delivery"
    SYSTEM = "system"


_CLASSES = {
    **dict.fromkeys((ErrorCode.INVALID_TOPIC, ErrorCode.NO_DISPATCHER, ErrorCode.NOT_A_COMMAND), ErrorClass.ROUTING),
    **dict.fromkeys(
        (
            ErrorCode.NO_REPLY,
            ErrorCode.LATE_REPLY,
            ErrorCode.UNKNOWN_REPLY,
            ErrorCode.DUPLICATE_REPLY,
            ErrorCode.CHANNEL_CLOSED,
        ),
        ErrorClass.CORRELATION,
    ),
    **dict.fromkeys(
        (
            ErrorCode.INVALID_STATE,
            ErrorCode.INVALID_PARAMETER,
            ErrorCode.DUPLICATE_REGISTRATION,
            ErrorCode.ITEM_NOT_REGISTERED,
            ErrorCode.SHUT_DOWN,
            ErrorCode.JOURNAL_UNAVAILABLE,
            ErrorCode.JOURNAL_CORRUPT,
        ),
        ErrorClass.SYSTEM,
    ),
}


class DispatchError(Exception):
    """The base of all errors raised by raydispatch."""

    error_code: ErrorCode = ErrorCode.INVALID_PARAMETER


class InvalidParameter(DispatchError):
    """An argument cannot be used; the sentence says which and why."""


class InvalidState(DispatchError):
    """The call is right, but not in this phase (register, then freeze, then dispatch)."""

    error_code = ErrorCode.INVALID_STATE


class DuplicateRegistration(DispatchError):
    """An id is registered twice."""

    error_code = ErrorCode.DUPLICATE_REGISTRATION

    def __init__(self, kind: str, item_id: str) -> None:
        super().__init__(kind, item_id)
        self.kind = kind
        self.item_id = item_id

    def __str__(self) -> str:
        return f"There is already a {self.kind} '{self.item_id}': each {self.kind} needs an id of its own."


class NotRegistered(DispatchError):
    """Something is asked for by an id that nobody registered."""

    error_code = ErrorCode.ITEM_NOT_REGISTERED

    def __init__(self, kind: str, item_id: str) -> None:
        super().__init__(kind, item_id)
        self.kind = kind
        self.item_id = item_id

    def __str__(self) -> str:
        return f"There is no {self.kind} '{self.item_id}'."


class InvalidPattern(DispatchError):
    """A topic pattern cannot be read; the text points at the fault."""

    def __init__(self, pattern: str, position: int, reason: str) -> None:
        super().__init__(pattern, position, reason)
        self.pattern = pattern
        self.position = position
        self.reason = reason

    def __str__(self) -> str:
        # A window, so that the caret still stands under its character when the pattern is very long.
        start = max(0, self.position - 60)
        shown = self.pattern[start : self.position + 60]
        # One column a character, so that the caret stays under its own.
        line = "".join(character if character.isprintable() else "�" for character in shown)
        return f"Invalid topic pattern: {self.reason}.\n  {line}\n  {' ' * (self.position - start)}^"


class InvalidTable(DispatchError):
    """`freeze()` found faults; all of them are named."""

    def __init__(self, faults: Sequence[str], error_code: ErrorCode) -> None:
        super().__init__(faults, error_code)
        self.faults = tuple(faults)
        self.error_code = error_code

    def __str__(self) -> str:
        lines = "\n".join(f"  - {fault}" for fault in self.faults)
        count = f"{len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}"
        return f"The engine cannot be frozen, {count}:\n{lines}"


class CircuitOpen(DispatchError):
    """A guarded block was not entered because its circuit breaker is open."""

    error_code = ErrorCode.CIRCUIT_OPEN


class CorrelationError(DispatchError):
    """A request and its reply did not come together."""

    def __init__(self, correlation_id: UUID) -> None:
        super().__init__(correlation_id)
        self.correlation_id = correlation_id

    def __str__(self) -> str:
        return (self.__doc__ or "").format(self.correlation_id)


class RequestTimeout(CorrelationError):
    """No reply to the request {} came in time."""

    error_code = ErrorCode.NO_REPLY


class RequestFailed(CorrelationError):
    """The request ended without a reply; `result` tells how."""

    def __init__(self, correlation_id: UUID, result: "DispatchResult") -> None:
        super().__init__(correlation_id)
        self.args = (correlation_id, result)
        self.result = result
        self.error_code = result.error_code or ErrorCode.NO_REPLY

    def __str__(self) -> str:
        return f"The request {self.correlation_id} ended as {self.result.status}: {self.result.error_message}"


class EndpointLost(DispatchError):
    """Raised by a handler to say that this instance of it is broken: another one takes the message."""

    error_code = ErrorCode.REPLICA_LOST


class StartFailed(DispatchError):
    """A dispatcher could not be started on the cluster."""

    error_code = ErrorCode.START_FAILED

    def __init__(self, dispatcher_id: str, reason: str) -> None:
        super().__init__(dispatcher_id, reason)
        self.dispatcher_id = dispatcher_id
        self.reason = reason

    def __str__(self) -> str:
        return f"The dispatcher '{self.dispatcher_id}' could not be started: {self.reason}."


class PartFailed(StartFailed):
    """A part of a system that is no dispatcher could not be started: its journal, or its routers."""

    def __str__(self) -> str:
        return f"The {self.dispatcher_id} could not be started: {self.reason.rstrip('.')}."


class SystemUnavailable(DispatchError):
    """There is no such system on the cluster, or it was stopped."""

    error_code = ErrorCode.SHUT_DOWN


class JournalUnavailable(DispatchError):
    """The journal cannot be reached, or has no room; what it has accepted is safe, and a later try may succeed."""

    error_code = ErrorCode.JOURNAL_UNAVAILABLE


class JournalCorrupt(DispatchError):
    """The journal holds something that it never wrote: its file was damaged, or is none of ours."""

    error_code = ErrorCode.JOURNAL_CORRUPT


class LedgerUnbalanced(DispatchError):
    """The ledger of a job does not account for every row that was submitted."""

    error_code = ErrorCode.INVALID_STATE

    def __init__(self, path: str, faults: tuple[str, ...]) -> None:
        super().__init__(path, faults)
        self.path = path
        self.faults = faults

    def __str__(self) -> str:
        return f"The ledger in {self.path} does not balance: {'; '.join(self.faults)}."


class LateReply(CorrelationError):
    """The request {} has timed out or was given up: its reply came too late."""

    error_code = ErrorCode.LATE_REPLY


class UnknownReply(CorrelationError):
    """Nobody has asked anything with the correlation id {}."""

    error_code = ErrorCode.UNKNOWN_REPLY


class DuplicateReply(CorrelationError):
    """The request {} has had its reply already."""

    error_code = ErrorCode.DUPLICATE_REPLY


class ChannelClosed(CorrelationError):
    """The engine was stopped: there will be no reply to the request {}."""

    error_code = ErrorCode.CHANNEL_CLOSED


class MissingExtra(DispatchError):
    """An optional library is not installed."""

    error_code = ErrorCode.INVALID_STATE

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(library, extra)
        self.library = library
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.library} is not installed: pip install 'raydispatch[{self.extra}]'."

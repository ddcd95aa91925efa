"""Events that the engine itself publishes: commands begun and ended, sessions begun and ended."""

from dataclasses import dataclass
from uuid import UUID

from raydispatch.dispatch.outcome import DispatchStatus

COMMAND_STARTED = "raydispatch.command.events.started"
COMMAND_RESULT = "raydispatch.command.events.result"
SESSION_STARTED = "raydispatch.session.events.started"
SESSION_ENDED = "raydispatch.session.events.ended"


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """`execute` has begun."""

    command_id: UUID
    """The command's message id."""
    topic: str
    message_type: str


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`execute` has ended."""

    command_id: UUID
    topic: str
    message_type: str
    status: DispatchStatus
    duration_ms: float
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """A session has begun."""

    session_id: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session has ended; `error` is the class of the exception that ended it, if one did."""

    session_id: str
    error: str | None = None

"""The envelope: one message, its payload and what is known about it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar
from uuid import UUID

from raydispatch.errors import InvalidParameter
from raydispatch.messages.ids import new_id

MAX_ID_LENGTH = 200

PayloadT = TypeVar("PayloadT")
OtherT = TypeVar("OtherT")

# W3C Trace Context, version 00: version, trace id, parent span id, flags.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Envelope(Generic[PayloadT]):
    """One message. The payload is yours; the rest has defaults and never changes after birth.

    Example: `Envelope({"order": 7}, message_type="OrderPlaced")`.
    """

    payload: PayloadT
    message_type: str = ""
    """The type that routes and dispatchers filter by; the payload's class name if not given."""
    topic: str = ""
    """Where the message was sent to; the engine fills it in."""
    key: str | None = None
    """Messages of one key stay in order, where a dispatcher asks for it."""
    message_id: UUID = field(default_factory=new_id)
    correlation_id: UUID = field(default_factory=new_id)
    causation_id: UUID | None = None
    """The message id of the message that caused this one."""
    traceparent: str | None = None
    """W3C trace context, as OpenTelemetry writes it."""
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)
    attempt: int = 1
    hops: int = 0

    def __post_init__(self) -> None:
        if not self.message_type:
            object.__setattr__(self, "message_type", type(self.payload).__name__)
        elif type(self.message_type) is not str or len(self.message_type) > MAX_ID_LENGTH:
            raise InvalidParameter(f"message_type must be a string of at most {MAX_ID_LENGTH} characters.")
        if (
            type(self.message_id) is not UUID
            or type(self.correlation_id) is not UUID
            or (self.causation_id is not None and type(self.causation_id) is not UUID)
        ):
            raise InvalidParameter(
                "message_id, correlation_id and causation_id must be UUIDs: uuid.UUID(text) makes one from text."
            )
        if self.key is not None and (type(self.key) is not str or len(self.key) > MAX_ID_LENGTH):
            raise InvalidParameter(f"key must be a string of at most {MAX_ID_LENGTH} characters, or None.")
        if self.headers is not _NO_HEADERS:
            object.__setattr__(self, "headers", _checked_headers(self.headers))
        if self.traceparent is not None and not (
            isinstance(self.traceparent, str) and _TRACEPARENT.fullmatch(self.traceparent)
        ):
            raise InvalidParameter(
                f"traceparent must read 00-<32 hex>-<16 hex>-<2 hex> (W3C), not {str(self.traceparent)[:80]!r}."
            )

    @property
    def trace_id(self) -> str | None:
        """The trace that this message belongs to: 32 hex characters."""
        return self.traceparent[3:35] if self.traceparent else None

    @property
    def span_id(self) -> str | None:
        """The span that sent this message: 16 hex characters."""
        return self.traceparent[36:52] if self.traceparent else None

    def with_payload(self, payload: OtherT) -> "Envelope[OtherT]":
        """The same message with another payload, as after validation; its type name stays."""
        return self._copy(payload, self.topic, self.attempt)

    def with_topic(self, topic: str) -> "Envelope[PayloadT]":
        """The same message, sent to this topic."""
        return self._copy(self.payload, topic, self.attempt)

    def with_attempt(self, attempt: int) -> "Envelope[PayloadT]":
        """The same message, tried once more."""
        return self._copy(self.payload, self.topic, attempt)

    def _copy(self, payload: OtherT, topic: str, attempt: int) -> "Envelope[OtherT]":
        # What was checked at birth is not checked again: three of these are made for a message on its way.
        copy: Envelope[OtherT] = object.__new__(Envelope)
        put = object.__setattr__
        put(copy, "payload", payload)
        put(copy, "message_type", self.message_type)
        put(copy, "topic", topic)
        put(copy, "key", self.key)
        put(copy, "message_id", self.message_id)
        put(copy, "correlation_id", self.correlation_id)
        put(copy, "causation_id", self.causation_id)
        put(copy, "traceparent", self.traceparent)
        put(copy, "headers", self.headers)
        put(copy, "attempt", attempt)
        put(copy, "hops", self.hops)
        return copy

    def __reduce__(self) -> tuple[object, ...]:
        # Positional and without the read-only view of the headers, which does not pickle.
        return Envelope, (
            self.payload, self.message_type, self.topic, self.key, self.message_id, self.correlation_id,
            self.causation_id, self.traceparent, dict(self.headers), self.attempt, self.hops,
        )  # fmt: skip


def _checked_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(headers, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str) for name, value in headers.items()
    ):
        raise InvalidParameter("headers must map strings to strings.")
    return MappingProxyType(dict(headers)) if headers else _NO_HEADERS

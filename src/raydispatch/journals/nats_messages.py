"""Messages as others on NATS see them: topics are subjects, payloads are JSON, and the rest is in headers."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid5

from pydantic_core import PydanticSerializationError, to_json

from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import MAX_ID_LENGTH, Envelope
from raydispatch.messages.ids import new_id

MESSAGE_ID = "Nats-Msg-Id"
"""By this, streams of JetStream know repeats."""
TYPE, KEY = "Raydispatch-Type", "Raydispatch-Key"
CORRELATION, CAUSE, HOPS = "Raydispatch-Correlation-Id", "Raydispatch-Causation-Id", "Raydispatch-Hops"
TRACE = "traceparent"
_OURS = frozenset(name.lower() for name in (MESSAGE_ID, TYPE, KEY, CORRELATION, CAUSE, HOPS, TRACE))
_FOREIGN = UUID("6f0c1d5e-2f6b-4c0a-9d5b-8d8a3f1c7e42")
"""Ids of messages that bring none are derived from this."""


def body_of(envelope: Envelope[Any]) -> bytes:
    """The payload: bytes and text as they are, everything else as JSON."""
    payload = envelope.payload
    if isinstance(payload, bytes | bytearray):
        return bytes(payload)
    try:
        return payload.encode() if isinstance(payload, str) else to_json(payload)
    except (PydanticSerializationError, ValueError) as error:
        raise InvalidParameter(
            f"The payload of message {envelope.message_id} ({type(payload).__name__}) cannot be written as JSON: "
            f"{type(error).__name__}."
        ) from None


def headers_of(envelope: Envelope[Any]) -> dict[str, str]:
    """What else is known. Headers of NATS are lines: a line break in one of ours becomes a space."""
    known = {
        **envelope.headers,
        MESSAGE_ID: str(envelope.message_id),
        TYPE: envelope.message_type,
        KEY: envelope.key,
        CORRELATION: str(envelope.correlation_id),
        CAUSE: envelope.causation_id and str(envelope.causation_id),
        HOPS: str(envelope.hops),
        TRACE: envelope.traceparent,
    }
    return {name: " ".join(value.splitlines()) for name, value in known.items() if value}


def envelope_of(data: bytes, headers: Mapping[str, str] | None, origin: str, default_type: str) -> Envelope[Any]:
    """The message again, or one that was never ours. Its id is its own, or derived from where it stands, so that a
    message that is delivered again has the same one."""
    found = {name.lower(): value for name, value in (headers or {}).items()}
    message_id = found.get(MESSAGE_ID.lower())
    hops = found.get(HOPS.lower(), "")
    envelope: Envelope[Any] = Envelope(
        _payload(data),
        (found.get(TYPE.lower()) or default_type)[:MAX_ID_LENGTH],
        key=found.get(KEY.lower(), "")[:MAX_ID_LENGTH] or None,
        message_id=_uuid(message_id) or uuid5(_FOREIGN, message_id or origin),
        correlation_id=_uuid(found.get(CORRELATION.lower())) or new_id(),
        causation_id=_uuid(found.get(CAUSE.lower())),
        headers={name: value for name, value in found.items() if name not in _OURS},
        hops=int(hops) if hops.isdecimal() and len(hops) < 9 else 0,
    )
    with suppress(InvalidParameter):  # It may be somebody else's header of that name.
        return replace(envelope, traceparent=found.get(TRACE))
    return envelope


def _payload(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def _uuid(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        return None

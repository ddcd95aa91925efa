"""A message as data: the bytes that a journal keeps. Never pickled, so that no file can make a program run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgpack
import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import uuid_of

FIRST_BYTE = 0x99
"""A list of nine, which no pickle begins with: this is how readers tell the two apart."""

_ARROW = 1


def stored(envelope: Envelope[Any]) -> bytes:
    """A message as data; topic and type stand beside it. Models and dataclasses become maps, dates become text.

    Raises InvalidParameter for a payload that is no data.
    """
    cause = envelope.causation_id
    values = (
        envelope.payload,
        envelope.key,
        envelope.message_id.bytes,
        envelope.correlation_id.bytes,
        None if cause is None else cause.bytes,
        envelope.traceparent,
        dict(envelope.headers) if envelope.headers else None,
        envelope.attempt,
        envelope.hops,
    )
    try:
        data: bytes = msgpack.packb(values, default=_as_data)
    except Exception as error:  # Properties and serializers of the program's own may raise anything.
        raise InvalidParameter(
            f"Message {envelope.message_id} cannot be stored as data ({type(error).__name__}): look at its payload "
            f"({type(envelope.payload).__name__}), key and headers. A journal takes what JSON takes, bytes, Arrow "
            f"tables, models and dataclasses."
        ) from None
    return data


def restored(data: bytes, topic: str, message_type: str) -> Envelope[Any]:
    """The message again; its payload as data, which handlers that ask for a model get as that model."""
    try:
        values = msgpack.unpackb(data, strict_map_key=False, ext_hook=_of_arrow)
    except TypeError:
        # A map whose keys have parts. It is rare, and this way takes three times as long.
        values = msgpack.unpackb(data, strict_map_key=False, ext_hook=_of_arrow, object_pairs_hook=_map_of)
    payload, key, message_id, correlation_id, cause, traceparent, headers, attempt, hops = values
    number = int.from_bytes
    return Envelope.restored(
        payload, message_type, topic, key, uuid_of(number(message_id)), uuid_of(number(correlation_id)),
        None if cause is None else uuid_of(number(cause)), traceparent, headers, attempt, hops,
    )  # fmt: skip


def _as_data(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", warnings=False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # One level: what is inside comes here again.
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, pa.Table | pa.RecordBatch):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write(value)
        return msgpack.ExtType(_ARROW, sink.getvalue().to_pybytes())
    if isinstance(value, Iterator):
        raise TypeError("it can be read only once")
    return to_jsonable_python(value)


def _map_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {_as_key(key): value for key, value in pairs}


def _as_key(key: Any) -> Any:
    if isinstance(key, list):
        return tuple(map(_as_key, key))
    return tuple((name, _as_key(value)) for name, value in key.items()) if isinstance(key, dict) else key


def _of_arrow(code: int, data: bytes) -> object:
    return pa.ipc.open_stream(data).read_all() if code == _ARROW else msgpack.ExtType(code, data)

"""How messages and outcomes travel between processes: as few and as small Python objects as will do.

A message is one blob of bytes, which a router passes on without looking inside. What a router needs, topic and type,
stands beside it, once for all messages of a batch that share it.
"""

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel
from ray import cloudpickle
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayActorError, RaySystemError

from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import uuid_of
from raydispatch.messages.stored import FIRST_BYTE, restored

_SUCCESS = DispatchStatus.SUCCESS

Key: TypeAlias = tuple[str, str]
"""Topic and message type."""

Item: TypeAlias = float | Outcome
"""An outcome on its way back: mostly a plain success at the first try, of which only the duration is told."""


LOSSES = (RayActorError, RaySystemError, ObjectLostError)
"""What Ray raises when a process is gone, or its answer with its node."""
STORE_FULL = (ObjectStoreFullError, OutOfDiskError)
"""What Ray raises when a call finds no place in memory or on disk."""


class Message(NamedTuple):
    """A message that is ready to go."""

    key: Key
    envelope: Envelope[Any]
    blob: bytes


class Parcel(NamedTuple):
    """Messages on their way to a router."""

    keys: list[Key]
    rows: list[int]
    """For each message, the position of its key."""
    blobs: list[bytes]
    seconds: float
    """Until the sender stops waiting. A time that remains, since clocks of machines differ."""
    resent: bool = False
    """Whether these may have been handled already: an earlier call with them failed."""
    ids: list[int] | None = None
    """Their message ids, given when they are sent again."""

    @property
    def size(self) -> int:
        """How many messages."""
        return len(self.rows)

    def call(self, router: Any) -> Any:
        """Give it to a router."""
        return router.route.remote(self)

    def within(self, seconds: float) -> "Parcel":
        """The same, with so much time left."""
        return self._replace(seconds=seconds)

    def nowhere(
        self, code: ErrorCode, message: str, status: DispatchStatus = DispatchStatus.DISPATCHER_ERROR
    ) -> "Delivery":
        """What becomes of it if no router takes it."""
        selection = Selection((), (status.value, code.value, message))
        return Delivery("", [selection] * len(self.keys), [[]] * len(self.rows))


class Part(NamedTuple):
    """Messages on their way to one replica."""

    keys: list[Key]
    rows: list[int]
    route_ids: list[str]
    """For each key, the route that led here."""
    blobs: list[bytes]
    resent: bool = False
    alone: bool = False
    """Whether nothing else may run beside it: it is suspected to kill its process."""
    journaled: "Journaled | None" = None
    """Of messages from the journal, whose subscription tries again and buries by itself."""


class Journaled(NamedTuple):
    """What is special about messages from a journal."""

    deliveries: list[int]
    """How often each was delivered before."""
    again: bool = False
    """Whether to run them even if they are remembered: somebody asked for a replay."""


class Selection(NamedTuple):
    """Where the messages of one key go: dispatchers with their routes, in order; or what is wrong with them all."""

    targets: tuple[tuple[str, str], ...]
    """Dispatcher id and route id."""
    fault: tuple[str, str, str] | None = None
    """Status, error code, message."""


class Delivery(NamedTuple):
    """What became of a parcel."""

    table_version: str
    selections: list[Any]
    """For each key, a `Selection`."""
    items: list[Any]
    """For each message, a list with an item for each of its dispatchers."""
    lone: str | None = None
    """The dispatcher of every message, if there is one for all. Then each key has only its route's id here, and each
    message an item instead of a list: with a route for every topic, that is half of what is sent."""

    def by_key(self) -> list[Selection]:
        """The selections, in one way."""
        if self.lone is None:
            return self.selections
        return [Selection(((self.lone, route_id),)) for route_id in self.selections]

    def by_message(self) -> list[list[Item]]:
        """The items, in one way."""
        return self.items if self.lone is None else [[item] for item in self.items]


def message_of(topic: str, envelope: Envelope[Any]) -> Message:
    """A message with its bytes; raises InvalidParameter if it has none."""
    # Past the constructor, which would take three times as long.
    return tuple.__new__(Message, ((topic, envelope.message_type), envelope, encode(envelope)))


def parcel_of(messages: Sequence[Message], seconds: float) -> Parcel:
    """Many messages as one parcel."""
    positions: dict[Key, int] = {}
    rows = [positions.setdefault(key, len(positions)) for key, _, _ in messages]
    return Parcel(list(positions), rows, [blob for _, _, blob in messages], seconds)


def encode(envelope: Envelope[Any]) -> bytes:
    """A message as bytes. Topic and type are not in it: they travel as the key."""
    values = (
        envelope.payload, envelope.key, envelope.message_id.int, envelope.correlation_id.int,
        envelope.causation_id and envelope.causation_id.int, envelope.traceparent,
        dict(envelope.headers) if envelope.headers else None, envelope.attempt, envelope.hops,
    )  # fmt: skip
    try:
        blob = pickle.dumps(values, 5)
        # Workers can't import what is defined in the main program. Searching costs a tenth of pickling.
        if b"__main__" in blob:
            blob = cloudpickle.dumps((as_data(envelope.payload), *values[1:]))
    except Exception as error:
        raise InvalidParameter(
            f"The payload of message {envelope.message_id} ({type(envelope.payload).__name__}) cannot be sent to "
            f"another process: {type(error).__name__}: {error}"
        ) from None
    return blob


def decode(blob: bytes, key: Key) -> Envelope[Any]:
    """The message again; from a journal it comes as data."""
    if blob[0] == FIRST_BYTE:
        return restored(blob, *key)
    payload, order, message_id, correlation_id, causation_id, traceparent, headers, attempt, hops = pickle.loads(blob)  # noqa: S301 - from our own gateway
    return Envelope.restored(
        payload, key[1], key[0], order, uuid_of(message_id), uuid_of(correlation_id),
        None if causation_id is None else uuid_of(causation_id), traceparent, headers, attempt, hops,
    )  # fmt: skip


def as_data(payload: object) -> object:
    """Models and dataclasses of the main program travel as plain data; handlers that ask for the type get it again."""
    if isinstance(payload, BaseModel) and type(payload).__module__ == "__main__":
        return payload.model_dump()
    if dataclasses.is_dataclass(payload) and not isinstance(payload, type) and type(payload).__module__ == "__main__":
        return dataclasses.asdict(payload)
    return payload


def pack(outcome: Outcome) -> Item:
    """An outcome as an item."""
    plain = (
        outcome.status is DispatchStatus.SUCCESS
        and outcome.attempts == 1
        and not outcome.outputs
        and outcome.reply is None
        and not outcome.repeated
    )
    # A middleware may have made it, with a whole number.
    return float(outcome.duration_ms) if plain else outcome


def unpack(item: Item, dispatcher_id: str, route_id: str) -> Outcome:
    """An item as an outcome."""
    if type(item) is float:
        # Past the constructor, which would take three times as long.
        values = (dispatcher_id, _SUCCESS, route_id, (), 1, item, None, None, None, None, False)
        return tuple.__new__(Outcome, values)
    return item  # type: ignore[return-value]  # What is no float is an outcome.

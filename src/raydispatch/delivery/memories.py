"""What dispatchers remember of messages they have handled, kept in a journal: it survives their processes."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgpack

from raydispatch.delivery.journal import Change, Journal
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply
from raydispatch.messages.ids import uuid_of

BUCKET = "memory"
PAGE = 100


class Memories:
    """Notes of all dispatchers, in pieces: new ones gather, and are written from time to time; the oldest go."""

    def __init__(self, journal: Journal, capacity: int) -> None:
        self._journal = journal
        self._capacity = capacity
        self._pieces: dict[str, deque[_Piece]] = {}
        self._new: dict[str, list[bytes]] = {}
        self._writing: dict[str, list[bytes]] = {}
        """By the key that they are being written under."""
        self._next = 1

    async def open(self) -> None:
        """Find out what there is."""
        after = ""
        while page := await self._journal.documents(BUCKET, after, PAGE):
            for key, data in page:
                dispatcher_id, _, number = key.rpartition("/")
                self._pieces.setdefault(dispatcher_id, deque()).append(_Piece(key, len(msgpack.unpackb(data))))
                self._next = max(self._next, int(number) + 1)
            after = page[-1][0]

    def note(self, dispatcher_id: str, notes: Sequence[bytes]) -> None:
        """Remember these, each as `packed_note` made it."""
        self._new.setdefault(dispatcher_id, []).extend(notes)

    def changes(self) -> list[Change]:
        """What is to be written now: what is new, and what goes for it."""
        changes = []
        for dispatcher_id, notes in self._new.items():
            # Numbers of one width, so that the order of the keys is the order of time.
            key = f"{dispatcher_id}/{self._next:015d}"
            self._next += 1
            pieces = self._pieces.setdefault(dispatcher_id, deque())
            pieces.append(_Piece(key, len(notes)))
            changes.append(Change(BUCKET, key, msgpack.packb(notes)))
            self._writing[key] = notes
            total = sum(piece.size for piece in pieces)
            while total - pieces[0].size >= self._capacity:
                oldest = pieces.popleft()
                total -= oldest.size
                changes.append(Change(BUCKET, oldest.key, None))
        self._new = {}
        return changes

    def written(self, changes: Sequence[Change]) -> None:
        """These are in the journal now."""
        for change in changes:
            self._writing.pop(change.key, None)

    async def recall(self, dispatcher_id: str) -> list[bytes]:
        """Everything about a dispatcher, the oldest first."""
        notes: list[bytes] = []
        after = f"{dispatcher_id}/"
        pieces = [piece.key for piece in self._pieces.get(dispatcher_id, ())]
        # The newest: what is still being written stands behind everything that is there.
        unwritten = [note for key in pieces for note in self._writing.get(key, ())]
        wanted = set(pieces) - self._writing.keys()
        while wanted and (page := await self._journal.documents(BUCKET, after, PAGE)):
            for key, data in page:
                if key in wanted:
                    notes += msgpack.unpackb(data)
                    wanted.discard(key)
            after = page[-1][0]
        return [*notes, *unwritten, *self._new.get(dispatcher_id, ())]


class _Piece(NamedTuple):
    key: str
    size: int


def packed_note(message_id: UUID, outcome: Outcome) -> bytes:
    """An outcome as data. A reply that is none is left out: what counts is that nothing runs twice."""
    values = [message_id.bytes, outcome.status.value, outcome.outputs, outcome.attempts, outcome.duration_ms]
    reply: Any = None if outcome.reply is None else [outcome.reply.payload]
    try:
        data: bytes = msgpack.packb([*values, reply])
    except (TypeError, ValueError, OverflowError):
        data = msgpack.packb([*values, None], unicode_errors="replace")
    return data


def unpacked_note(data: bytes, dispatcher_id: str) -> tuple[UUID, Outcome]:
    """The message id and the outcome again."""
    number, status, outputs, attempts, duration, reply = msgpack.unpackb(data, strict_map_key=False)
    outcome = Outcome(
        dispatcher_id, DispatchStatus(status), None, tuple(outputs), attempts, duration,
        reply=None if reply is None else Reply(reply[0]),
    )  # fmt: skip
    return uuid_of(int.from_bytes(number)), outcome

"""Dead letters that a journal keeps: listed, redriven to the dispatcher that failed, purged."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

import msgpack

from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.journal import Change
from raydispatch.delivery.log import Log
from raydispatch.delivery.segment import FORMAT, Segment, unpacked
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, JournalCorrupt
from raydispatch.messages.stored import restored, stored

BUCKET = "letters"
PAGE = 1_000


class LetterFilter(NamedTuple):
    """Which dead letters are meant; what is None does not matter.

    Example: `LetterFilter(dispatcher_id="billing", error_type="ConnectionError")`.
    """

    dispatcher_id: str | None = None
    error_type: str | None = None
    """The class name of the exception, or the error code."""
    key: str | None = None
    since: datetime | None = None
    """Failed for the last time at this moment or later."""
    until: datetime | None = None
    message_id: UUID | None = None

    def takes(self, letter: DeadLetter) -> bool:
        """Whether this one is meant."""
        outcome, envelope = letter.outcome, letter.envelope
        return (
            self.dispatcher_id in (None, outcome.dispatcher_id)
            and self.error_type in (None, outcome.error_type, outcome.error_code)
            and self.key in (None, envelope.key)
            and self.message_id in (None, envelope.message_id)
            and (self.since is None or letter.last_at >= _aware(self.since))
            and (self.until is None or letter.last_at < _aware(self.until))
        )


EVERY = LetterFilter()


class Letters:
    """The dead letters of a journal: one for each message and dispatcher."""

    def __init__(self, log: Log, is_known: Callable[[str], bool] = lambda _: True) -> None:
        self._log = log
        self._is_known = is_known
        self._redriving = asyncio.Lock()

    async def bury(self, packed: Sequence[bytes]) -> None:
        """Keep these, as `pack_letter` made them, however long the journal is away."""
        await self._log.write([Change(BUCKET, _key_of(unpack_letter(one)), one) for one in packed])

    async def find(self, wanted: LetterFilter = EVERY) -> AsyncIterator[DeadLetter]:
        """Those that are meant, by dispatcher."""
        after = ""
        # Keys begin with the dispatcher's id: of one dispatcher, only its own pages are read.
        if wanted.dispatcher_id is not None:
            after = f"{wanted.dispatcher_id}/"
        while page := await self._log.journal.documents(BUCKET, after, PAGE):
            for key, data in page:
                letter = unpack_letter(data)
                if wanted.dispatcher_id is not None and letter.outcome.dispatcher_id != wanted.dispatcher_id:
                    if not key.startswith(f"{wanted.dispatcher_id}/"):
                        return
                    continue
                if wanted.takes(letter):
                    yield letter
            after = page[-1][0]

    async def count(self) -> int:
        """How many there are."""
        count, after = 0, ""
        while page := await self._log.journal.documents(BUCKET, after, PAGE):
            count, after = count + len(page), page[-1][0]
        return count

    async def redrive(self, wanted: LetterFilter = EVERY) -> int:
        """Send them again, each to the dispatcher that failed and with the same id; how many.

        A letter goes when its message is back in the log, so that a redrive that was broken off can be repeated; what a
        dispatcher has handled meanwhile, it remembers. Letters of dispatchers that are gone stay where they are.
        """
        count = 0
        batch: list[DeadLetter] = []
        async with self._redriving:  # Two at once would both send what neither has deleted yet.
            async for letter in self.find(wanted):
                if not self._is_known(letter.outcome.dispatcher_id):
                    continue
                batch.append(letter)
                if len(batch) >= PAGE:
                    count += await self._send(batch)
                    batch = []
            return count + (await self._send(batch) if batch else 0)

    async def purge(self, wanted: LetterFilter = EVERY) -> int:
        """Let them go; how many."""
        keys = [_key_of(letter) async for letter in self.find(wanted)]
        for start in range(0, len(keys), PAGE):
            await self._log.write([Change(BUCKET, key, None) for key in keys[start : start + PAGE]])
        return len(keys)

    async def _send(self, letters: Sequence[DeadLetter]) -> int:
        messages = [(letter.topic, letter.envelope.with_attempt(letter.envelope.attempt + 1)) for letter in letters]
        segment = Segment.of(messages, to=[letter.outcome.dispatcher_id for letter in letters])
        await self._log.append(segment, [Change(BUCKET, _key_of(letter), None) for letter in letters])
        return len(letters)


def pack_letter(letter: DeadLetter) -> bytes:
    """A letter as data; raises InvalidParameter if its payload is none."""
    outcome = letter.outcome
    code = outcome.error_code
    data: bytes = msgpack.packb(
        (
            FORMAT, letter.topic, letter.envelope.message_type, stored(letter.envelope), outcome.dispatcher_id,
            outcome.status.value, outcome.route_id, outcome.attempts, outcome.duration_ms,
            code.value if code is not None else None, outcome.error_type, outcome.error_message,
            letter.first_at.timestamp(), letter.last_at.timestamp(), letter.table_version,
        ),
        unicode_errors="replace",  # An error's words may be no text, and must not keep it from being kept.
    )  # fmt: skip
    return data


def unpack_letter(data: bytes) -> DeadLetter:
    """The letter again; its payload as data."""
    fields = unpacked(data, "dead letter", 14)
    topic, message_type, blob, dispatcher_id, status, route_id, attempts, duration, code, kind, message, *rest = fields
    try:
        outcome = Outcome(
            dispatcher_id, DispatchStatus(status), route_id, (), attempts, duration, code and ErrorCode(code), kind,
            message,
        )  # fmt: skip
        first, last = (datetime.fromtimestamp(at, UTC) for at in rest[:2])
        return DeadLetter(topic, restored(blob, topic, message_type), outcome, first, last, rest[2])
    except Exception as error:  # Damaged fields can be anything.
        raise JournalCorrupt(f"A dead letter in the journal cannot be read ({type(error).__name__}).") from None


def _key_of(letter: DeadLetter) -> str:
    return f"{letter.outcome.dispatcher_id}/{letter.envelope.message_id.hex}"


def _aware(at: datetime) -> datetime:
    """A moment without a zone is one of this machine's."""
    return at if at.tzinfo is not None else at.astimezone()

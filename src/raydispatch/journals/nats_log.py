"""The log of a journal as a stream: written by one process at a time, which every message proves."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from time import time
from typing import Any, TypeVar
from uuid import uuid4

from raydispatch.delivery.journal import Batch, Stored
from raydispatch.errors import InvalidParameter, JournalCorrupt, JournalUnavailable
from raydispatch.journals.checking import until_full
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_line import IN_FLIGHT_BYTES, Letter, Line, Refused, accepted
from raydispatch.journals.nats_marks import Mark
from raydispatch.journals.nats_stream import Entry, Missing, Stream, letters_of

_T = TypeVar("_T")

KNOWN_IDS = 10_000
"""Batches accepted last, whose ids are known: one that comes again gets the offset it had."""
TRIES = 3
"""More than there are batches, twice: each other try keeps one of them, or finds out that it had been kept."""

MOST_TOGETHER = 1_000
"""Of what a server takes as one, whatever its size."""

_SETTLE_BYTES = 4_000_000
# The place was taken; a message was refused, or the leader has changed meanwhile.
_LOOK_AGAIN = (10071, 10164, 10054, 10176)
# Switched off; too many; one of them is known already.
_NOT_TOGETHER = (10174, 10199, 10201)


class NatsLog:
    """Appends and reads. What is sent names the place it must get, so that servers refuse what comes late, and what a
    process sends that does not know of another one. Batches that are sent together are kept together, or not at all.

    Whoever begins to write takes the log over; the one that wrote before finds out with its next letter.
    """

    def __init__(self, line: Line, address: NatsAddress) -> None:
        self._line = line
        self._address = address
        self._stream = Stream(line, address)
        self._writer = uuid4().hex
        self._lock = asyncio.Lock()
        self._known: OrderedDict[str, int] = OrderedDict()
        self._first_sequence = 1
        self._tail = Mark(0, 0, 0, -inf)
        self._most_bytes = -1
        self._is_atomic = False
        self._is_owner = False
        self._is_sure = False
        self._was_taken = False

    async def append(self, batches: Sequence[Batch]) -> list[int]:
        """Keep all of them. If the answer is lost, they may have been kept; to ask again is no repetition."""
        if not batches:
            return []
        async with self._lock:
            firsts = await self._accept(batches)
            while len(self._known) > KNOWN_IDS:
                self._known.popitem(last=False)
        return firsts

    async def read(self, offset: int, most_bytes: int) -> list[Stored]:
        """Batches from this offset on, so many bytes at most, or one."""
        return await self._look(lambda: self._read(max(offset, 0), most_bytes))

    async def head(self) -> int:
        """The offset that the next message will get."""
        return await self._look(self._end)

    async def first(self) -> int:
        """The oldest offset kept."""
        return await self._look(self._first)

    async def offset_at(self, at: float) -> int:
        """The first message that was appended at this time or later."""
        return await self._look(lambda: self._offset_at(at))

    async def trim(self, before: int) -> None:
        """Let go of older batches."""
        async with self._lock:
            await self._settle()
            if max(before, 0) < self._tail.end:
                await self._purge(await self._stream.sequence_of(before, self._first_sequence, self._tail.sequence))
                return
            # The last one goes last, in case there is no room before others have gone. A stream without messages would
            # not tell where its head was: an empty message marks it.
            await self._purge(self._tail.sequence)
            if self._tail.first < self._tail.end:
                await self._accept([Batch(b"", 0, uuid4().hex)])
                await self._purge(self._tail.sequence)

    async def open(self, *, is_atomic: bool) -> None:
        """Find where it ends. Servers before 2.12 do not keep several batches as one."""
        self._is_atomic = is_atomic
        async with self._lock:
            await self._settle()

    async def _purge(self, stays: int) -> None:
        if stays > self._first_sequence:
            await self._ask(f"STREAM.PURGE.{self._address.log_stream}", seq=stays)
            self._begin_at(stays)

    async def _accept(self, batches: Sequence[Batch]) -> list[int]:
        for _ in range(2 * len(batches) + TRIES):
            await self._settle()
            missing = [batch for batch in batches if batch.batch_id not in self._known]
            if not missing:
                return [self._known[batch.batch_id] for batch in batches]
            await self._send(self._together(missing))
        raise JournalUnavailable(f"The servers of the journal '{self._address.name}' do not agree on where it ends.")

    def _together(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        # Not one behind the other, either: of two letters that come late, the second might fit where the first did not.
        most = MOST_TOGETHER if self._is_atomic else 1
        return batches[: until_full([len(batch.data) for batch in batches[:most]], IN_FLIGHT_BYTES)]

    async def _send(self, batches: Sequence[Batch]) -> None:
        # A clock may be set back; the times of a log never are, so that one can search by them.
        at = max(time(), self._tail.at)
        mark = self._tail
        marks = [mark := Mark(mark.sequence + 1, mark.end, mark.end + batch.count, at) for batch in batches]
        letters = letters_of(batches, marks, self._writer, self._address.log_subject)
        self._check_sizes(letters)
        # Until the answer is there, it is not known what was kept: an error and a cancellation leave it so.
        self._is_sure = False
        try:
            kept = accepted(await self._line.ask_once(letters))
        except Refused as error:
            if error.code in _LOOK_AGAIN:
                return
            if error.code not in _NOT_TOGETHER or len(batches) == 1:
                raise error.as_unavailable() from None
        else:
            if kept.get("duplicate"):
                self._known[batches[0].batch_id] = (await self._stream.entry(kept["seq"])).mark.first
            else:
                for batch, mark in zip(batches, marks, strict=True):
                    self._adopt(mark, batch.batch_id)
            self._is_sure = True
            return
        await self._send(batches[:1])

    def _check_sizes(self, letters: Sequence[Letter]) -> None:
        size = max(letter.size() for letter in letters)
        if 0 <= self._most_bytes < size:
            raise InvalidParameter(
                f"A batch of {size:,} bytes is larger than the stream {self._address.log_stream} takes: raise its "
                f"max_msg_size, which is {self._most_bytes:,}."
            )

    async def _look(self, look: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        # One that writes knows what it wrote, and need not wait for what it is writing.
        if not self._is_owner or not (self._is_sure or self._lock.locked()):
            async with self._lock:
                await self._settle()
        while True:
            try:
                return await look()
            except Missing as error:
                # It may just have been let go of, by us or by another process.
                async with self._lock:
                    await self._settle()
                if error.sequence >= self._first_sequence:
                    raise

    async def _read(self, offset: int, most_bytes: int) -> list[Stored]:
        end = self._tail.end
        while offset < end:
            sequence = await self._stream.sequence_of(offset, self._first_sequence, self._tail.sequence)
            entries = await self._stream.entries(sequence, most_bytes)
            # Not those that nobody has acknowledged yet, and not the mark of a head.
            kept = [one for one in entries if one.mark.first < one.mark.end <= end]
            if kept:
                return _stored(kept[: until_full([len(one.data) for one in kept], most_bytes)])
            offset = max(offset, entries[-1].mark.end)
        return []

    async def _end(self) -> int:
        return self._tail.end

    async def _first(self) -> int:
        place = self._first_sequence
        if place > self._tail.sequence:
            return self._tail.end
        return (await self._stream.find(lambda mark: mark.sequence >= place, place, place)).first

    async def _offset_at(self, at: float) -> int:
        tail = self._tail
        if at > tail.at:
            return tail.end
        return (await self._stream.find(lambda mark: mark.at >= at, self._first_sequence, tail.sequence)).first

    async def _settle(self) -> None:
        """Find out where the stream ends: what became of letters without an answer, and who else writes."""
        if self._was_taken:
            raise self._taken()
        if self._is_sure and self._is_owner:
            return
        stream = await self._ask(f"STREAM.INFO.{self._address.log_stream}")
        state, last = stream["state"], stream["state"]["last_seq"]
        self._most_bytes = stream["config"].get("max_msg_size", -1)
        self._check_against(last, state["messages"])
        if last > self._tail.sequence:
            newest = await self._stream.entry(last)
            if self._is_owner or newest.writer == self._writer:
                await self._recognize(last)
            else:
                self._tail = newest.mark
        self._begin_at(max(1, state["first_seq"]))
        self._is_sure = True

    def _check_against(self, last: int, messages: int) -> None:
        stream = self._address.log_stream
        if last < self._tail.sequence:
            raise JournalCorrupt(
                f"The NATS server has lost messages of the stream {stream} that it had acknowledged, as it may without "
                "sync_interval: always. Start again to go on with what is left."
            )
        if last and not messages:
            raise JournalCorrupt(
                f"Somebody has purged the stream {stream}: nothing tells where it was. Restore it from a backup, or "
                "delete it and its bucket to begin with an empty journal."
            )

    async def _recognize(self, last: int) -> None:
        while self._tail.sequence < last:
            for entry in await self._stream.entries(self._tail.sequence + 1, _SETTLE_BYTES):
                if entry.writer != self._writer:
                    self._was_taken = True
                    raise self._taken()
                self._adopt(entry.mark, entry.batch_id)

    def _adopt(self, mark: Mark, batch_id: str) -> None:
        self._is_owner = True
        self._tail = mark
        self._stream.remember(mark)
        self._known[batch_id] = mark.first

    def _begin_at(self, sequence: int) -> None:
        self._first_sequence = sequence
        self._stream.forget_before(sequence)

    async def _ask(self, verb: str, **request: int) -> dict[str, dict[str, int]]:
        try:
            return await self._line.api(verb, request)
        except Refused as error:
            raise error.as_unavailable() from None

    def _taken(self) -> JournalUnavailable:
        return JournalUnavailable(
            f"Another process has taken over the journal '{self._address.name}' at {self._address.shown}: this one can "
            "no longer use it. If that was not meant to be, stop the other one, and start this one again."
        )


def _stored(entries: Sequence[Entry]) -> list[Stored]:
    return [Stored(one.mark.first, one.mark.end - one.mark.first, one.mark.at, one.data) for one in entries]

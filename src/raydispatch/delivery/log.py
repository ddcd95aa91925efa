"""The log of a journal, as its one owner uses it: group commit, repeats refused, what is recent kept in memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias
from uuid import uuid4

from raydispatch.delivery.journal import Batch, Change, Journal, Stored
from raydispatch.delivery.segment import ID_BYTES, Segment
from raydispatch.dispatch.clock import Clock
from raydispatch.errors import JournalUnavailable
from raydispatch.settings import JournalSettings

COMMIT_BYTES = 16_000_000
"""Of what is committed at once; one larger segment still goes, alone."""
OBJECT_BYTES = 150
"""What Python needs for a message beside its bytes."""
RETRY_SECONDS = 0.2
"""Between two tries with a journal that is away."""


class Loaded(NamedTuple):
    """A segment, with the offset of its first message."""

    first: int
    segment: Segment


class _Waiting(NamedTuple):
    segment: Segment
    data: bytes | None
    changes: Sequence[Change]
    deadline: float
    done: "asyncio.Future[int]"


class Log:
    """Appends what many callers bring, in one commit after the other, and reads what subscriptions ask for.

    Belongs to one event loop.
    """

    def __init__(self, journal: Journal, settings: JournalSettings, clock: Clock) -> None:
        self.journal = journal
        self.head = 0
        """The offset that the next message will get."""
        self._settings = settings
        self._clock = clock
        self._recent = _RecentIds(settings.recent_ids)
        self._cache = _Cache(settings.cache_bytes)
        self._waiting: list[_Waiting] = []
        self._committing: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Find its end, and the ids of what came last, so that a publisher who asks again stores nothing twice."""
        self.head = await self.journal.head()
        offset = max(await self.journal.first(), self.head - self._settings.recent_ids // 2)
        while offset < self.head and (batches := await self.journal.read(offset)):
            for one in batches:
                self._recent.add_all(self._keep(one).segment.ids)
            offset = batches[-1].first + batches[-1].count

    def on_append(self, listener: Callable[[], None]) -> None:
        """Tell this one of everything new."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Tell it no more."""
        with suppress(ValueError):
            self._listeners.remove(listener)

    async def append(self, segment: Segment, changes: Sequence[Change] = (), data: bytes | None = None) -> int:
        """Keep these for good, documents along with them; how many were new. `data` is the segment packed, if somebody
        has done that. Raises JournalUnavailable when the journal was away for longer than its patience."""
        return await self.begin(segment, changes, data)

    def begin(
        self, segment: Segment, changes: Sequence[Change] = (), data: bytes | None = None
    ) -> "asyncio.Future[int]":
        """As `append`: in line when this returns, before everything that begins later."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        deadline = self._clock.now() + self._settings.patience_seconds
        self._waiting.append(_Waiting(segment, data, changes, deadline, done))
        if self._committing is None or self._committing.done():
            self._committing = asyncio.get_running_loop().create_task(self._commit_all(), name="raydispatch commit")
        return done

    async def write(self, changes: Sequence[Change]) -> None:
        """Write documents, however long the journal is away."""
        while True:
            try:
                return await self.journal.write(changes)
            except JournalUnavailable:
                await self._clock.sleep(RETRY_SECONDS)

    def cached(self, first: int) -> Loaded | None:
        """The segment that begins here, if it is in memory."""
        return self._cache.get(first)

    async def at(self, offset: int) -> Loaded | None:
        """The segment that has this offset, or the first one after it that is kept; None at the head."""
        if (found := self._cache.get(offset)) is not None:
            return found
        batches = await self.journal.read(offset)
        loaded = [self._keep(one) for one in batches]
        return loaded[0] if loaded else None

    async def close(self) -> None:
        """End what is being committed, and let go of the journal."""
        while self._committing is not None and not self._committing.done():
            await asyncio.wait((self._committing,))
        await self.journal.close()

    def _keep(self, one: Stored) -> Loaded:
        loaded = self._cache.get(one.first) or Loaded(one.first, Segment.unpack(one.data))
        self._cache.put(loaded, len(one.data))
        return loaded

    async def _commit_all(self) -> None:
        # One commit at a time: what comes meanwhile goes together in the next, so that a hundred publishers pay for
        # one flush of the disk.
        while self._waiting:
            group = self._next_group()
            try:
                await self._commit(group)
            except BaseException as error:
                for waiting in group:
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _next_group(self) -> list[_Waiting]:
        size, count = 0, 0
        for waiting in self._waiting:
            size += sum(map(len, waiting.segment.blobs))
            if count and size > COMMIT_BYTES:
                break
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    async def _commit(self, group: list[_Waiting]) -> None:
        entries, firsts = await self._appended(self._entries(group))
        for one, segment, batch in entries:
            if batch is not None:
                first = next(firsts)
                self._recent.add_all(segment.ids)
                self._cache.put(Loaded(first, segment), len(batch.data))
                self.head = max(self.head, first + len(segment))
            if not one.done.done():
                one.done.set_result(len(segment))
        for listener in self._listeners:
            listener()

    def _entries(self, group: Sequence[_Waiting], before: "Sequence[_Entry]" = ()) -> "list[_Entry]":
        """What of each is new. Of those that were tried before, the batches stay, if they are the same still: by its
        id, a journal knows a batch again."""
        known = {id(one): (segment, batch) for one, segment, batch in before}
        here: set[bytes] = set()
        entries: list[_Entry] = []
        for one in group:
            # What was sent to one subscription was in the log before, and is meant to be there again.
            segment = one.segment if one.segment.to else self._recent.unseen(one.segment, here)
            earlier, batch = known.get(id(one), (None, None))
            if earlier is None or earlier.ids != segment.ids:
                batch = _batch(segment, one.data if segment is one.segment else None)
            entries.append((one, segment, batch))
        return entries

    async def _appended(self, entries: "list[_Entry]") -> "tuple[list[_Entry], Iterator[int]]":
        """Try until it is done, or until the patience of all is over; those whose patience is over are left out."""
        while True:
            batches = [batch for _, _, batch in entries if batch is not None]
            changes = [change for one, _, _ in entries for change in one.changes]
            if not batches and not changes:
                return entries, iter(())
            try:
                return entries, iter(await self.journal.append(batches, changes))
            except JournalUnavailable as error:
                now = self._clock.now()
                for one, _, _ in entries:
                    if now >= one.deadline and not one.done.done():
                        one.done.set_exception(error)
                left = [entry for entry in entries if now < entry[0].deadline]
                if len(left) < len(entries):
                    # What was a repeat of one that is given up is none any more.
                    left = self._entries([one for one, _, _ in left], left)
                entries = left
                if entries:
                    await self._clock.sleep(RETRY_SECONDS)


_Entry: TypeAlias = tuple[_Waiting, Segment, Batch | None]


def _batch(segment: Segment, data: bytes | None) -> Batch | None:
    if not len(segment):
        return None
    return Batch(segment.pack() if data is None else data, len(segment), uuid4().hex)


class _Cache:
    """The segments used last, within so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[int, tuple[Loaded, int]] = OrderedDict()

    def get(self, first: int) -> Loaded | None:
        found = self._kept.get(first)
        if found is None:
            return None
        self._kept.move_to_end(first)
        return found[0]

    def put(self, loaded: Loaded, size: int) -> None:
        size += OBJECT_BYTES * len(loaded.segment)
        if (before := self._kept.pop(loaded.first, None)) is not None:
            self._bytes -= before[1]
        self._kept[loaded.first] = (loaded, size)
        self._bytes += size
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1]


class _RecentIds:
    """Two generations of sets: the old one goes as a whole."""

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def add_all(self, ids: bytes) -> None:
        self._young.update(_split(ids))
        if len(self._young) >= self._half:
            self._old, self._young = self._young, set()

    def unseen(self, segment: Segment, here: set[bytes]) -> Segment:
        """The segment without what was seen before: in it, in what is committed along with it, or earlier."""
        ids = _split(segment.ids)
        distinct = set(ids)
        if len(distinct) == len(ids) and all(map(distinct.isdisjoint, (self._young, self._old, here))):
            here |= distinct
            return segment
        repeats = []
        for row, one in enumerate(ids):
            if one in here or one in self._young or one in self._old:
                repeats.append(row)
            here.add(one)
        return segment.without(repeats)


def _split(ids: bytes) -> list[bytes]:
    return [ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)]

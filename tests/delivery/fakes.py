"""A journal in memory, and consumers that do what a test says."""

import asyncio
from collections.abc import Callable, Sequence
from time import time

from raydispatch.delivery.consumer import ACKED, Item, Tell, Verdict
from raydispatch.delivery.journal import Batch, Change, Stored
from raydispatch.errors import JournalUnavailable


async def until(condition: Callable[[], object], limit_seconds: float = 5) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(limit_seconds):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


async def turns(number: int = 40) -> None:
    """Let everybody else go as far as they can: for tests that something does *not* happen."""
    for _ in range(number):
        await asyncio.sleep(0)


class MemoryJournal:
    """Keeps everything while the test lasts, `close` or not, so that a second life can be tested."""

    def __init__(self) -> None:
        self.batches: list[Stored] = []
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.away = False
        self.turns = 0
        """For how many turns of the event loop each call keeps its caller waiting, as a disk would."""
        self.lost_answers = 0
        """So many appends from now on are done, and then it seems that they were not."""
        self.appends = self.reads = self.writes = self.closes = 0
        self.calls = 0
        """Of those that are under way now."""
        self.now = time
        self._head = 0
        self._firsts: dict[str, int] = {}

    async def append(self, batches: Sequence[Batch], changes: Sequence[Change] = ()) -> list[int]:
        await self._answer()
        self.appends += 1
        firsts = []
        for batch in batches:
            # One that comes again, since its answer was lost, is there already.
            first = self._firsts.setdefault(batch.batch_id, self._head)
            if first == self._head:
                self.batches.append(Stored(first, batch.count, self.now(), batch.data))
                self._head += batch.count
            firsts.append(first)
        self._change(changes)
        if self.lost_answers:
            self.lost_answers -= 1
            raise JournalUnavailable("the answer was lost, as the test wants it")
        return firsts

    async def read(self, offset: int, most_bytes: int = 1_000_000) -> list[Stored]:
        await self._answer()
        self.reads += 1
        found: list[Stored] = []
        for one in self.batches:
            if one.first + one.count > offset:
                found.append(one)
                if sum(len(each.data) for each in found) >= most_bytes:
                    break
        return found

    async def head(self) -> int:
        await self._answer()
        return self._head

    async def first(self) -> int:
        await self._answer()
        return self.batches[0].first if self.batches else self._head

    async def offset_at(self, at: float) -> int:
        await self._answer()
        return next((one.first for one in self.batches if one.at >= at), self._head)

    async def trim(self, before: int) -> None:
        await self._answer()
        self.batches = [one for one in self.batches if one.first + one.count > before]

    async def write(self, changes: Sequence[Change]) -> None:
        await self._answer()
        self.writes += 1
        self._change(changes)

    async def documents(self, bucket: str, after: str = "", most: int = 1_000) -> list[tuple[str, bytes]]:
        await self._answer()
        kept = self.buckets.get(bucket, {})
        return [(key, kept[key]) for key in sorted(kept) if key > after][:most]

    async def close(self) -> None:
        self.closes += 1

    def _change(self, changes: Sequence[Change]) -> None:
        for bucket, key, value in changes:
            kept = self.buckets.setdefault(bucket, {})
            if value is None:
                kept.pop(key, None)
            else:
                kept[key] = value

    async def _answer(self) -> None:
        self.calls += 1
        try:
            await turns(self.turns)
        finally:
            self.calls -= 1
        if self.away:
            raise JournalUnavailable("away, as the test wants it")


class Hand:
    """A consumer that holds what it gets until the test says what becomes of it."""

    def __init__(self, consumer_id: str = "hand", *, acks: bool = False) -> None:
        self.consumer_id = consumer_id
        self.well = True
        self.acks = acks
        self.seen: list[Item] = []
        self.holds: list[tuple[Item, Tell]] = []

    def is_well(self) -> bool:
        return self.well

    def take(self, items: list[Item], tell: Tell) -> None:
        self.seen += items
        if self.acks:
            tell(self.consumer_id, items, [ACKED] * len(items))
        else:
            self.holds += [(item, tell) for item in items]

    def give_back(self) -> list[Item]:
        return []

    def say(self, verdict: Verdict = ACKED, count: int | None = None) -> list[int]:
        """Tell this of the oldest ones held, one by one; their offsets."""
        told, self.holds = self.holds[:count], self.holds[len(self.holds) if count is None else count :]
        for item, tell in told:
            tell(self.consumer_id, [item], [verdict])
        return [item.entry.offset for item, _ in told]

    def say_at_once(self, *verdicts: Verdict) -> None:
        """Tell of the oldest ones held, in one call."""
        told, self.holds = self.holds[: len(verdicts)], self.holds[len(verdicts) :]
        told[0][1](self.consumer_id, [item for item, _ in told], list(verdicts))

    def say_of(self, offset: int, verdict: Verdict = ACKED) -> None:
        """Tell this of one that it holds."""
        item, tell = next(held for held in self.holds if held[0].entry.offset == offset)
        self.holds.remove((item, tell))
        tell(self.consumer_id, [item], [verdict])

    @property
    def offsets(self) -> list[int]:
        """Of all that it ever got, in order."""
        return [item.entry.offset for item in self.seen]

    @property
    def held(self) -> list[int]:
        """Of what it has now."""
        return [item.entry.offset for item, _ in self.holds]

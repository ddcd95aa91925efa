"""A subscription: brings messages from the log to its consumers, and remembers how far it is.

It takes what it wants from the log (a `Window` numbers it), lets a `Sharing` say who gets what, and hears from the
consumers what became of it: done, to be tried again, or given up. Everything happens in one event loop.
"""

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from time import time
from typing import NamedTuple

from raydispatch.delivery.consumer import Consumer, Ending, Item, Verdict
from raydispatch.delivery.log import Loaded, Log
from raydispatch.delivery.rate import TokenBucket
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.sharing import SHARINGS, Entry, Seat, Share
from raydispatch.delivery.window import Cursor, Window
from raydispatch.dispatch.clock import Clock
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.retry import retry_delay
from raydispatch.errors import ErrorCode, JournalUnavailable
from raydispatch.settings import Delivery, DeliveryMode, JournalSettings, PoisonPolicy, RetrySettings

MOST_AT_ONCE = 1_000
"""Messages of one call to a consumer."""
AHEAD = 10_000
"""Messages that may be delivered before the cursor is kept again."""
REFUSED_SECONDS = 0.05
"""Until a consumer that had no room is asked again."""

Start = int | datetime | str
"""Where to begin: an offset, a time, "first" (the oldest kept) or "head" (what comes from now on)."""
Wants = Callable[[str, str], str | None]
"""Whether a topic and type are for this subscription: the id of the route that leads here, or None."""


class Undelivered(NamedTuple):
    """A message that its consumers could not handle, and why."""

    item: Item
    outcome: Outcome
    tries: int


Bury = Callable[[str, Undelivered], Awaitable[None]]
"""Keeps a dead letter of a subscription; returns when it is safe."""
Keep = Callable[[str, Cursor], Awaitable[None]]
"""Keeps a cursor; returns when it is safe."""


class Rules(NamedTuple):
    """How a subscription deals with what it is sent."""

    delivery: Delivery
    retry: RetrySettings | None = None
    poison: PoisonPolicy = PoisonPolicy.DEAD_LETTER


class SubscriptionStatus(NamedTuple):
    """How a subscription is."""

    name: str
    mode: DeliveryMode
    reliable: bool
    consumers: int
    lag: int
    """Messages in the journal beyond its safe cursor."""
    in_flight: int
    waiting: int
    """Taken from the journal, and not delivered yet: for want of room, until a retry, or until they are due."""
    position: int
    acked: int
    retried: int
    given_up: int


class Subscription:
    """One cursor over the log, and the consumers that share what lies behind it.

    Example: `subscription.join(consumer)`, then `await subscription.run()` until it is cancelled.
    """

    def __init__(
        self,
        name: str,
        rules: Rules,
        log: Log,
        wants: Wants,
        *,
        cursor: Cursor,
        bury: Bury,
        keep: Keep,
        settings: JournalSettings,
        clock: Clock,
        wall: Callable[[], float] = time,
        logger: logging.Logger | None = None,
    ) -> None:
        self.name = name
        self.rules = rules
        self._log = log
        self.wants = wants
        self._bury = bury
        self._keep = keep
        self._settings = settings
        self._clock = clock
        self._wall = wall
        self._logger = logger or logging.getLogger("raydispatch")
        self.window = Window(cursor, log.head)
        self._sharing = SHARINGS[rules.delivery.mode]()
        self._consumers: dict[str, Consumer] = {}
        self._seats: dict[str, Seat] = {}
        self._out: dict[int, tuple[Entry, Seat]] = {}
        """What consumers have now, by offset."""
        self._later: list[tuple[float, Entry, bool]] = []
        """A heap of what waits for its time; whether it has been out before."""
        self._routes: dict[tuple[str, str], str | None] = {}
        per_second = rules.delivery.per_second
        self._bucket = TokenBucket(per_second, max(1, int(per_second / 10)), clock.now) if per_second else None
        self._tokens = 0
        self._to_reopen = deque(self.window.open)
        self._keeping = asyncio.Lock()
        self._kept_mark: tuple[int, ...] = ()
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._burying: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self.acked = self.retried = self.given_up = 0

    # Consumers

    def join(self, consumer: Consumer) -> None:
        """One more consumer; one of the same id that is there goes."""
        self.leave(consumer.consumer_id)
        self._consumers[consumer.consumer_id] = consumer
        self._seats[consumer.consumer_id] = Seat(consumer.consumer_id, self.rules.delivery.window)
        self._wake.set()

    def leave(self, consumer_id: str) -> None:
        """A consumer is gone: what it had goes to the others, before everything else."""
        self._consumers.pop(consumer_id, None)
        seat = self._seats.pop(consumer_id, None)
        if seat is None:
            return
        back = [entry for entry, holder in self._out.values() if holder is seat]
        for entry in back:
            del self._out[entry.offset]
            if self.rules.delivery.reliable:
                self.window.unheard(entry.offset)
            else:
                self._sharing.settled(entry)
        if self.rules.delivery.reliable:
            self.retried += len(back)
            self._sharing.put_back(back)
        self._wake.set()
        self._ended.set()

    @property
    def consumers(self) -> list[Consumer]:
        """Who is there, in the order of joining."""
        return list(self._consumers.values())

    def want(self, wants: Wants) -> None:
        """Go by this from now on; what was taken by the old one stays."""
        self.wants = wants
        self._routes.clear()
        self.poke()

    def poke(self) -> None:
        """Look again: something may have changed."""
        self._wake.set()

    # Running

    async def run(self) -> None:
        """Deliver, until cancelled."""
        self._log.on_append(self.poke)
        try:
            while True:
                self._wake.clear()
                try:
                    if self._to_reopen:
                        await self._reopen()
                    self._admit_due()
                    await self._take()
                    await self._hand_out()
                except JournalUnavailable as error:
                    self._logger.warning("journal away", extra={"subscription": self.name, "error": str(error)})
                await self._pause()
        finally:
            self._log.forget(self.poke)

    async def drain(self, seconds: float) -> bool:
        """Deliver nothing more, and wait until consumers have told of what they have; False if the time was short."""
        self._is_closing = True
        for consumer in self._consumers.values():
            self._returned(consumer.give_back())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._out or self._burying:
                    self._ended.clear()
                    await self._ended.wait()
        return not self._out and not self._burying

    def _returned(self, items: Sequence[Item]) -> None:
        """Nobody has begun with these: they go back as if they had never been out."""
        for item in items:
            out = self._out.pop(item.entry.offset, None)
            if out is None:
                continue
            entry, seat = out
            seat.in_flight -= 1
            seat.has_suspect = seat.has_suspect and not entry.is_suspect
            if self.rules.delivery.reliable:
                self._sharing.put_back((entry,))
            else:
                self._sharing.settled(entry)

    def end(self) -> None:
        """Let go of the consumers; what they still have is open, for the next life."""
        for consumer_id in list(self._consumers):
            self.leave(consumer_id)
        for burying in self._burying:
            burying.cancel()

    def status(self) -> SubscriptionStatus:
        """How it is."""
        delivery = self.rules.delivery
        lag = self._log.head - (self.window.safe if delivery.reliable else self.window.position)
        return SubscriptionStatus(
            self.name, delivery.mode, delivery.reliable, len(self._consumers), max(0, lag), len(self._out),
            len(self._sharing) + len(self._later), self.window.position, self.acked, self.retried, self.given_up,
        )  # fmt: skip

    # From the log

    async def _reopen(self) -> None:
        """What was open when the cursor was kept is delivered again, first."""
        loaded: Loaded | None = None
        while self._to_reopen:
            offset = self._to_reopen[0]
            if loaded is None or not 0 <= offset - loaded.first < len(loaded.segment):
                loaded = await self._log.at(offset)
            self._to_reopen.popleft()
            if loaded is None or offset < loaded.first:
                self.window.settle(offset)  # It is older than what the journal keeps.
            else:
                self._admit(loaded, offset - loaded.first)  # The first of all, and in order.

    async def _take(self) -> None:
        seats = self._well_seats()
        while (
            self.window.position < self._log.head
            and len(self.window) < self._settings.most_open
            and self._sharing.wants_more(seats)
        ):
            position = self.window.position
            loaded = self._log.cached(position) or await self._log.at(position)
            if loaded is None:
                return
            self._take_all(loaded)

    def _take_all(self, loaded: Loaded) -> None:
        first, segment = loaded
        wanted = [self._route(*key) is not None for key in segment.keys]
        start = max(0, self.window.position - first)
        if segment.to is None and not any(wanted):
            self.window.pass_to(first + len(segment))
            return
        take = self.window.take
        for row in range(start, len(segment)):
            only = segment.to[row] if segment.to is not None else None
            if only == self.name if only is not None else wanted[segment.codes[row]]:
                take(first + row)
                self._admit(loaded, row)
        self.window.pass_to(first + len(segment))

    def _admit(self, loaded: Loaded, row: int) -> None:
        first, segment = loaded
        entry = Entry(first + row, first, segment.orders[row] if segment.orders is not None else None)
        due = segment.due[row] if segment.due is not None else None
        if due is not None and (seconds := due - self._wall()) > 0:
            heapq.heappush(self._later, (self._clock.now() + seconds, entry, False))
        else:
            self._sharing.add(entry)

    def _admit_due(self) -> None:
        now = self._clock.now()
        while self._later and self._later[0][0] <= now:
            _, entry, was_out = heapq.heappop(self._later)
            self._sharing.put_back((entry,)) if was_out else self._sharing.add(entry)

    def _route(self, topic: str, message_type: str) -> str | None:
        key = (topic, message_type)
        try:
            return self._routes[key]
        except KeyError:
            if len(self._routes) >= 100_000:
                self._routes.clear()
            found = self._routes[key] = self.wants(topic, message_type)
            return found

    # To the consumers

    async def _hand_out(self) -> None:
        while shares := self._shares():
            newest = max(entry.offset for _, entries in shares for entry in entries)
            try:
                if self.rules.delivery.reliable and not self.window.covers(newest):
                    await self._keep_cursor(AHEAD)
                ready = [(seat, entries, await self._items(entries)) for seat, entries in shares]
            except BaseException:
                for seat, entries in shares:
                    self._give_back(seat, entries)
                raise
            for seat, entries, items in ready:
                if self._seats.get(seat.seat_id) is not seat:  # It has left meanwhile.
                    self._give_back(seat, entries)
                    continue
                self._deliver(seat, entries, items)

    def _shares(self) -> list[Share]:
        if self._is_closing or not len(self._sharing):
            return []
        seats = self._well_seats()
        limit = self._limit(min(len(self._sharing), sum(seat.room for seat in seats)))
        if not limit:
            return []
        window, mode = self.rules.delivery.window, self.rules.delivery.mode
        # In parts, so that one is on its way while another is worked on; where they go one after the other, whole.
        most = min(MOST_AT_ONCE, window if mode is DeliveryMode.EXCLUSIVE else max(1, window // 4))
        shares = self._sharing.share_out(seats, most, limit)
        if self._bucket is not None:
            self._tokens -= sum(len(entries) for _, entries in shares)
        return shares

    def _limit(self, wanted: int) -> int:
        if self._bucket is None:
            return wanted
        while self._tokens < min(wanted, MOST_AT_ONCE) and self._bucket.take():
            self._tokens += 1
        return self._tokens

    def _give_back(self, seat: Seat, entries: list[Entry]) -> None:
        seat.in_flight -= len(entries)
        seat.has_suspect = False
        self._tokens += len(entries) if self._bucket is not None else 0
        self._sharing.put_back(entries)

    async def _items(self, entries: list[Entry]) -> list[Item]:
        items: list[Item] = []
        deliveries = self.window.deliveries
        first = -1
        segment: Segment | None = None
        for entry in entries:
            if entry.first != first:
                loaded = self._log.cached(entry.first) or await self._log.at(entry.first)
                first, segment = (entry.first, None) if loaded is None or loaded.first != entry.first else loaded
            if segment is None:
                continue  # The journal has let go of it meanwhile: it keeps them only so long.
            row = entry.offset - first
            topic, message_type = segment.keys[segment.codes[row]]
            route_id = self._route(topic, message_type) or ""
            values = (entry, topic, message_type, route_id, segment.blobs[row], deliveries(entry.offset))
            # Past the constructor, which would take three times as long.
            items.append(tuple.__new__(Item, values))
        return items

    def _deliver(self, seat: Seat, entries: list[Entry], items: list[Item]) -> None:
        if len(items) < len(entries):
            seat.in_flight -= len(entries) - len(items)
            there = {item.entry.offset for item in items}
            for entry in entries:
                if entry.offset not in there:
                    self._settle(entry)
            entries = [item.entry for item in items]
            if not entries:
                seat.has_suspect = False
                return
        for entry in entries:
            self._out[entry.offset] = (entry, seat)
        if not self.rules.delivery.reliable:
            for entry in entries:
                self.window.settle(entry.offset)
        self._consumers[seat.seat_id].take(items, self._told)

    def _well_seats(self) -> list[Seat]:
        now = self._clock.now()
        for consumer_id, seat in self._seats.items():
            seat.is_well = self._consumers[consumer_id].is_well()
            seat.is_paused = seat.paused_until > now
        return list(self._seats.values())

    # From the consumers

    def _told(self, seat_id: str, items: list[Item], verdicts: list[Verdict]) -> None:
        seat = self._seats.get(seat_id)
        reliable = self.rules.delivery.reliable
        back: list[Entry] = []
        for item, verdict in zip(items, verdicts, strict=True):
            entry = item.entry
            out = self._out.get(entry.offset)
            if out is None or out[0] is not entry or out[1] is not seat or seat is None:
                continue  # It was taken away from that consumer meanwhile, or it says so twice.
            del self._out[entry.offset]
            seat.in_flight -= 1
            if entry.is_suspect:
                seat.has_suspect = False
            if verdict.ending is Ending.ACKED:
                self.acked += 1
                if reliable:
                    self.window.settle(entry.offset)
                self._sharing.settled(entry)
            elif not reliable and verdict.ending is not Ending.REFUSED:
                self._give_up(item, verdict.outcome or _lost(self.name, item), 1)
            elif verdict.ending is Ending.FAILED:
                self._failed(item, verdict, seat_id)
            else:
                if verdict.ending is Ending.REFUSED:
                    seat.paused_until = self._clock.now() + REFUSED_SECONDS
                elif len(items) == 1:
                    self._failed(item, verdict._replace(outcome=verdict.outcome or _lost(self.name, item)), seat_id)
                    continue
                else:
                    entry.is_suspect = True
                    self.window.unheard(entry.offset)
                    self.retried += 1
                back.append(entry)
        self._sharing.put_back(back)
        self._wake.set()
        self._ended.set()

    def _failed(self, item: Item, verdict: Verdict, seat_id: str) -> None:
        entry = item.entry
        retry = self.rules.retry
        tries = self.window.tried(entry.offset)
        poison = self.rules.poison
        is_last = verdict.is_final or tries >= (retry.tries if retry else 1)
        outcome = verdict.outcome or Outcome(self.name, DispatchStatus.DISPATCHER_ERROR)
        self._sharing.held(entry)
        if entry.failed_at is None:
            entry.failed_at = self._wall()
        # Who has handled it and could not publish what came of it has that still.
        is_half_done = outcome.status is DispatchStatus.PUBLISH_FAILED
        entry.prefers = seat_id if is_half_done else None
        if is_last and poison is not PoisonPolicy.BLOCK:
            self._give_up(item, outcome, tries)
            return
        self.retried += 1
        delay = verdict.delay_seconds
        if delay is None:
            delay = retry_delay(retry or RetrySettings(), tries)
        heapq.heappush(self._later, (self._clock.now() + delay, entry, True))

    def _give_up(self, item: Item, outcome: Outcome, tries: int) -> None:
        self.given_up += 1
        extra = {"subscription": self.name, "topic": item.topic, "error": outcome.error_message, "tries": tries}
        self._logger.error("message given up", extra=extra)
        if self.rules.poison is PoisonPolicy.DROP:
            self._settle(item.entry)
            return
        burying = asyncio.get_running_loop().create_task(self._bury_one(item, outcome, tries))
        self._burying.add(burying)
        burying.add_done_callback(self._buried)

    def _buried(self, burying: asyncio.Task[None]) -> None:
        self._burying.discard(burying)
        self._ended.set()
        if not burying.cancelled() and (error := burying.exception()) is not None:
            self._logger.error("dead letter not kept", extra={"subscription": self.name, "error": str(error)})

    async def _bury_one(self, item: Item, outcome: Outcome, tries: int) -> None:
        # Only when the letter is safe may the cursor pass the message.
        await self._bury(self.name, Undelivered(item, outcome, tries))
        self._settle(item.entry)

    def _settle(self, entry: Entry) -> None:
        self.window.settle(entry.offset)
        self._sharing.settled(entry)
        self._wake.set()

    # Time

    @property
    def has_moved(self) -> bool:
        """Whether there is more to keep than was kept last."""
        return self._mark() != self._kept_mark

    async def keep_cursor(self) -> None:
        """Keep how far it is."""
        if self.rules.delivery.reliable:
            await self._keep_cursor(AHEAD if self._consumers else 0)

    async def _keep_cursor(self, ahead: int) -> None:
        # One after the other: while the journal is away an older one may be waiting, and must not come last.
        async with self._keeping:
            mark, cursor = self._mark(), self.window.cursor(ahead)
            self.window.keeping(cursor)
            await self._keep(self.name, cursor)
            self.window.kept(cursor)
            self._kept_mark = mark

    def _mark(self) -> tuple[int, ...]:
        return (self.window.position, len(self.window), self.acked, self.given_up, self.retried)

    async def _pause(self) -> None:
        seconds = self._settings.watchdog_seconds
        now = self._clock.now()
        if self._later:
            seconds = min(seconds, max(0.0, self._later[0][0] - now))
        for seat in self._seats.values():
            if seat.paused_until > now:
                seconds = min(seconds, seat.paused_until - now)
        if self._bucket is not None and not self._tokens and len(self._sharing):
            seconds = min(seconds, 1 / self._bucket.per_second)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()


def _lost(name: str, item: Item) -> Outcome:
    return Outcome(
        name, DispatchStatus.DISPATCHER_ERROR, item.route_id or None, error_code=ErrorCode.REPLICA_LOST,
        error_message="its consumer was lost while it ran",
    )  # fmt: skip

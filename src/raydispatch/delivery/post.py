"""The post: a journal with everything that its one owner does with it. Subscriptions, cursors, dead letters, retention.

In one process the engine has it, on Ray an actor of its own; nothing here knows the difference.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import time
from typing import Self

from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.journal import Change, open_journal
from raydispatch.delivery.letters import Letters, pack_letter
from raydispatch.delivery.log import Log
from raydispatch.delivery.memories import Memories
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.subscription import Rules, Start, Subscription, SubscriptionStatus, Undelivered, Wants
from raydispatch.delivery.window import Cursor, Window
from raydispatch.dispatch.clock import Clock, SystemClock
from raydispatch.errors import InvalidParameter, NotRegistered
from raydispatch.messages.stored import restored
from raydispatch.settings import JournalSettings

CURSORS = "cursors"
TRIM_SECONDS = 60.0
CLOSE_SECONDS = 10.0
"""For the last words to a journal that may be away."""


class Post:
    """Keeps what is published durably, and brings it to its subscriptions.

    Example: `post = await Post.open(settings, "orders")`, then `await post.log.append(segment)`.
    """

    def __init__(
        self,
        log: Log,
        settings: JournalSettings,
        *,
        clock: Clock,
        wall: Callable[[], float],
        logger: logging.Logger,
        table_version: Callable[[], str],
        remembered: int,
    ) -> None:
        self.log = log
        self.letters = Letters(log, self.is_known)
        self.memories = Memories(log.journal, remembered)
        self.subscriptions: dict[str, Subscription] = {}
        self._settings = settings
        self._clock = clock
        self._wall = wall
        self._logger = logger
        self._table_version = table_version
        self._cursors: dict[str, Cursor] = {}
        self._changing = asyncio.Lock()
        """Of subscriptions, one comes or goes at a time."""
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._burying: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        settings: JournalSettings,
        name: str,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time,
        logger: logging.Logger | None = None,
        table_version: Callable[[], str] = str,
        remembered: int = 100_000,
    ) -> Self:
        """Open the journal, and find out how far everybody was."""
        clock = clock or SystemClock()
        log = Log(await open_journal(settings.url, name), settings, clock)
        try:
            await log.open()
            post = cls(
                log, settings, clock=clock, wall=wall, logger=logger or logging.getLogger("raydispatch"),
                table_version=table_version, remembered=remembered,
            )  # fmt: skip
            await post.memories.open()
            after = ""
            while page := await log.journal.documents(CURSORS, after):
                post._cursors.update((name, Cursor.unpack(data)) for name, data in page)
                after = page[-1][0]
        except BaseException:
            await log.close()
            raise
        post._upkeep = asyncio.get_running_loop().create_task(post._keep_up(), name="raydispatch journal")
        return post

    async def append(self, segment: Segment) -> int:
        """Keep these for good; how many were new."""
        return await self.log.append(segment)

    async def subscribe(
        self, name: str, rules: Rules, wants: Wants, start: Start | None = None, again: bool = False
    ) -> Subscription:
        """A subscription that goes on where it was; a new one begins at `start`, or with what comes from now on.

        With `again`, one that exists begins anew.
        """
        async with self._changing:
            return await self._subscribe(name, rules, wants, start, again)

    async def _subscribe(self, name: str, rules: Rules, wants: Wants, start: Start | None, again: bool) -> Subscription:
        if name in self.subscriptions:
            raise InvalidParameter(f"There is a subscription '{name}' already.")
        cursor = None if again or not rules.delivery.reliable else self._cursors.get(name)
        is_new = cursor is None
        if cursor is None:
            cursor = Cursor(await self._offset(start if start is not None else "head"))
        subscription = Subscription(
            name, rules, self.log, wants, cursor=cursor, bury=self._bury_undelivered, keep=self._keep_cursor,
            settings=self._settings, clock=self._clock, wall=self._wall, logger=self._logger,
        )  # fmt: skip
        if is_new and rules.delivery.reliable:
            # From this moment on it exists, whatever happens next.
            await subscription.keep_cursor()
        self.subscriptions[name] = subscription
        self._runs[name] = asyncio.get_running_loop().create_task(subscription.run(), name=f"raydispatch {name}")
        self._runs[name].add_done_callback(self._ended)
        return subscription

    async def unsubscribe(self, name: str, *, seconds: float = 0.0, forget: bool = False) -> bool:
        """Stop one: what its consumers have may end within so long. Its cursor stays, unless it is to be forgotten.
        Whether nothing was left under way."""
        async with self._changing:
            return await self._unsubscribe(name, seconds, forget)

    async def _unsubscribe(self, name: str, seconds: float, forget: bool) -> bool:
        if forget and name not in self.subscriptions and name in self._cursors:
            del self._cursors[name]
            await self.log.write([Change(CURSORS, name, None)])
            return True
        subscription = self._subscription(name)
        drained = await subscription.drain(seconds)
        del self.subscriptions[name]
        run = self._runs.pop(name)
        run.cancel()
        await asyncio.wait((run,))
        subscription.end()
        if forget:
            self._cursors.pop(name, None)
            await self.log.write([Change(CURSORS, name, None)])
        else:
            await subscription.keep_cursor()
        return drained

    async def replay(self, name: str, start: Start) -> int:
        """Let a subscription begin anew, from there; the offset. Its consumers stay."""
        async with self._changing:
            old = self._subscription(name)
            offset = await self._offset(start)
            consumers = old.consumers
            await self._unsubscribe(name, 0.0, forget=False)
            new = await self._subscribe(name, old.rules, old.wants, offset, again=True)
            for consumer in consumers:
                new.join(consumer)
            return offset

    async def bury(self, packed: Sequence[bytes]) -> None:
        """Keep dead letters, as `pack_letter` made them."""
        await self.letters.bury(packed)

    def is_known(self, name: str) -> bool:
        """Whether a message for this subscription would find it: it is there, or has a cursor to come back to."""
        return name in self.subscriptions or name in self._cursors

    def statuses(self) -> list[SubscriptionStatus]:
        """How the subscriptions are."""
        return [subscription.status() for subscription in self.subscriptions.values()]

    async def drain(self, seconds: float) -> bool:
        """Deliver nothing more, and let consumers end what they have; whether they did within so long."""
        drains = [subscription.drain(seconds) for subscription in self.subscriptions.values()]
        return all(await asyncio.gather(*drains))

    async def close(self, seconds: float = 0.0) -> bool:
        """Deliver nothing more, let consumers end what they have within so long, keep all cursors, and let go of the
        journal. Whether all that was under way has ended, and is kept; else it comes again in the next life."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait((self._upkeep,))
        drained = False
        try:
            with suppress(TimeoutError):
                # A journal that is away must not hold up the end for ever.
                async with asyncio.timeout(seconds + CLOSE_SECONDS):
                    ended = await self.drain(seconds)
                    for name in list(self.subscriptions):
                        with suppress(NotRegistered):  # Its last reader has just left.
                            await self.unsubscribe(name)
                    await self._keep_memories()
                    drained = ended
        finally:
            for run in self._runs.values():
                run.cancel()
            await self.log.close()
        return drained

    async def _offset(self, start: Start) -> int:
        if isinstance(start, datetime):
            return await self.log.journal.offset_at(start.timestamp())
        if start == "head":
            return self.log.head
        first = await self.log.journal.first()
        if start == "first":
            return first
        if type(start) is not int or start < 0:
            raise InvalidParameter(f"A start is 'first', 'head', an offset or a datetime; not {start!r}.")
        return min(max(start, first), self.log.head)

    async def _bury_undelivered(self, name: str, lost: Undelivered) -> None:
        item = lost.item
        now = datetime.fromtimestamp(self._wall(), UTC)
        first = now if item.entry.failed_at is None else datetime.fromtimestamp(item.entry.failed_at, UTC)
        try:
            envelope = restored(item.blob, item.topic, item.message_type)
        except Exception as error:
            # Nobody could read the letter, either.
            fields = {"subscription": name, "offset": item.entry.offset, "error": type(error).__name__}
            self._logger.error("message lost: it cannot be read", extra=fields)
            return
        envelope = envelope.with_attempt(envelope.attempt + item.deliveries)
        outcome = lost.outcome._replace(dispatcher_id=name, attempts=max(lost.tries, lost.outcome.attempts))
        letter = DeadLetter(item.topic, envelope, outcome, first, now, self._table_version())
        await self.letters.bury([pack_letter(letter)])

    async def _keep_cursor(self, name: str, cursor: Cursor) -> None:
        await self.log.write([Change(CURSORS, name, cursor.pack())])
        self._cursors[name] = cursor

    async def _keep_up(self) -> None:
        """Keep cursors now and then, and let go of what is too old."""
        trimmed_at = self._clock.now()
        while True:
            await self._clock.sleep(self._settings.cursor_seconds or 0.01)
            try:
                for name in list(self.subscriptions):
                    await self._keep_up_with(name)
                await self._keep_memories()
                if self._clock.now() - trimmed_at >= TRIM_SECONDS:
                    trimmed_at = self._clock.now()
                    await self._trim()
            except Exception as error:
                # Whatever it is, it must not be the last time that cursors are kept.
                self._logger.error("journal upkeep failed", extra={"error": f"{type(error).__name__}: {error}"})

    async def _keep_up_with(self, name: str) -> None:
        subscription = self.subscriptions.get(name)
        if subscription is not None and subscription.has_moved:
            await subscription.keep_cursor()

    async def _keep_memories(self) -> None:
        if changes := self.memories.changes():
            await self.log.write(changes)
            self.memories.written(changes)

    async def _trim(self) -> None:
        before = await self.log.journal.offset_at(self._wall() - self._settings.keep_seconds)
        # Those that are not there now count as well: they come back for what they have not read, or are forgotten.
        away = [cursor for name, cursor in self._cursors.items() if name not in self.subscriptions]
        before = min([before, *(Window(cursor).safe for cursor in away)])
        for subscription in self.subscriptions.values():
            if subscription.rules.delivery.reliable:
                before = min(before, subscription.window.safe)
        await self.log.journal.trim(before)

    def _subscription(self, name: str) -> Subscription:
        if name not in self.subscriptions:
            raise NotRegistered("subscription", name)
        return self.subscriptions[name]

    def _ended(self, run: "asyncio.Task[None]") -> None:
        if not run.cancelled() and (error := run.exception()) is not None:
            self._logger.error("subscription ended", extra={"error": f"{type(error).__name__}: {error}"})

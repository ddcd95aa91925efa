"""Durable messages in one process: kept in a journal first, then brought to dispatchers and readers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from logging import Logger
from typing import Any, Protocol, Self
from uuid import uuid4

from raydispatch.delivery.consumer import Ending, Item, Tell, Verdict, verdict_of
from raydispatch.delivery.dead_letters import DeadLetter, DeadLetters
from raydispatch.delivery.letters import pack_letter
from raydispatch.delivery.post import Post
from raydispatch.delivery.reader import LocalReader, envelope_of, unreadable
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.subscription import Rules, Start, Wants
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.clock import Clock
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.metrics import MetricsRecorder
from raydispatch.dispatch.workers import Workers
from raydispatch.errors import InvalidParameter, InvalidState, JournalUnavailable, NotRegistered
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import category_of
from raydispatch.routing.pattern import parse_pattern
from raydispatch.routing.table import RouteTable
from raydispatch.settings import Delivery, JournalSettings, RetrySettings


class Keeper(Protocol):
    """Who keeps durable messages: the journal of this process, or an actor that has one."""

    async def append(self, messages: Sequence[tuple[str, Envelope[Any]]], due: float | None) -> None:
        """Keep these for good. Raises InvalidParameter for a payload that is no data, JournalUnavailable in time."""

    async def has_reader(self, topic: str, message_type: str) -> bool:
        """Whether a reader wants such messages, though no dispatcher does."""


class DispatcherConsumer:
    """A dispatcher of this process, with all its endpoints, as the one consumer of its subscription."""

    def __init__(self, dispatcher: Dispatcher, metrics: MetricsRecorder, on_reply: Callable[..., None]) -> None:
        self.consumer_id = dispatcher.spec.dispatcher_id
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._on_reply = on_reply
        self._workers: Workers[tuple[Item, Tell]] = Workers(
            dispatcher.spec.concurrency * dispatcher.spec.replicas, self._one, lambda: None
        )

    def is_well(self) -> bool:
        """Whether its circuit lets anything through."""
        breaker = self._dispatcher.breaker
        return breaker is None or breaker.state is not CircuitState.OPEN

    def take(self, items: list[Item], tell: Tell) -> None:
        """Handle these, as many at once as the dispatcher may."""
        self._workers.add((item, tell) for item in items)

    def give_back(self) -> list[Item]:
        """What waits for a worker."""
        waiting = [item for item, _ in self._workers.waiting]
        self._workers.waiting.clear()
        return waiting

    async def stop(self) -> None:
        """Cancel what runs."""
        await self._workers.stop()

    async def _one(self, job: tuple[Item, Tell]) -> None:
        item, tell = job
        try:
            envelope = envelope_of(item)
        except Exception as error:
            tell(self.consumer_id, [item], [unreadable(error)])
            return
        verdict = Verdict(Ending.FAILED)
        try:
            outcome = await self._dispatcher.run_once(envelope, item.route_id or None)
            verdict = verdict_of(outcome)
            self._metrics.record_outcome(outcome)
            if outcome.reply is not None:
                self._on_reply(envelope, outcome.reply)
        finally:
            tell(self.consumer_id, [item], [verdict])


class Durable:
    """What an engine in one process does with its journal. Belongs to the event loop that started the engine."""

    def __init__(self, post: Post, table: RouteTable) -> None:
        self.post = post
        self.loop = asyncio.get_running_loop()
        self._table = table
        self._consumers: list[DispatcherConsumer] = []
        self._readers: dict[str, LocalReader] = {}
        self._patterns: dict[str, tuple[str, Wants]] = {}
        """Of the subscriptions of readers, by name."""
        self._changing = asyncio.Lock()

    @classmethod
    async def open(cls, name: str, settings: JournalSettings, table: RouteTable, clock: Clock, log: Logger) -> Self:
        """Open the journal; nothing is delivered yet."""
        post = await Post.open(settings, name, clock=clock, logger=log, table_version=lambda: table.version)
        return cls(post, table)

    async def begin(
        self, dispatchers: Iterable[Dispatcher], metrics: MetricsRecorder, on_reply: Callable[..., None]
    ) -> None:
        """Let every dispatcher go on where it was."""
        for dispatcher in dispatchers:
            spec = dispatcher.spec
            wants = routed_to(self._table, spec.dispatcher_id)
            subscription = await self.post.subscribe(spec.dispatcher_id, rules_of(spec, spec.replicas), wants)
            consumer = DispatcherConsumer(dispatcher, metrics, on_reply)
            self._consumers.append(consumer)
            subscription.join(consumer)

    async def has_reader(self, topic: str, message_type: str) -> bool:
        """Whether a reader wants such messages."""
        return any(wants(topic, message_type) is not None for _, wants in self._patterns.values())

    async def append(self, messages: Sequence[tuple[str, Envelope[Any]]], due: float | None) -> None:
        """Keep these for good. Raises InvalidParameter for a payload that is no data."""
        if asyncio.get_running_loop() is not self.loop:
            raise InvalidState("Publish durably in the event loop that started the engine.")
        await self.post.append(Segment.of(messages, None if due is None else [due] * len(messages)))

    async def accept_outputs(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """As an outbox: the outputs of a handler go into the journal. Raises InvalidParameter for what is no data."""
        try:
            await self.append([(envelope.topic, envelope) for envelope in outputs], None)
        except JournalUnavailable:
            return False
        return True

    async def consume(self, name: str, topics: str, delivery: Delivery, start: Start | None) -> LocalReader:
        """A reader of a subscription; the first one makes it."""
        async with self._changing:
            subscription = self.post.subscriptions.get(name)
            if subscription is None:
                wants = fitting(topics)
                subscription = await self.post.subscribe(name, Rules(delivery, RetrySettings()), wants, start)
                self._patterns[name] = (topics, wants)
            else:
                check_reader(name, topics, self._patterns)
            consumer_id = f"{name}-{uuid4().hex[:8]}"
            reader = LocalReader(name, consumer_id, partial(self._leave, name, consumer_id))
            self._readers[consumer_id] = reader
            subscription.join(reader)
            return reader

    async def close(self, seconds: float) -> None:
        """Let go of the journal; who reads is told so."""
        try:
            await self.post.close(seconds)
        finally:
            for reader in self._readers.values():
                reader.end()
            for consumer in self._consumers:
                await consumer.stop()

    async def _leave(self, name: str, consumer_id: str) -> None:
        async with self._changing:
            self._readers.pop(consumer_id, None)
            # Looked for now: after a replay it is another one.
            subscription = self.post.subscriptions.get(name)
            if subscription is None:
                return
            subscription.leave(consumer_id)
            if not subscription.consumers:
                with suppress(NotRegistered):  # The engine is being stopped at the same time.
                    await self.post.unsubscribe(name)
                self._patterns.pop(name, None)


class KeptDeadLetters(DeadLetters):
    """Those of messages that somebody waited for: the last ones in memory, as ever, and all of them in the journal."""

    def __init__(self, capacity: int, log: Logger) -> None:
        super().__init__(capacity)
        self.durable: Durable | None = None
        self._log = log
        self._burying: set[Future[None]] = set()

    def add(self, letter: DeadLetter) -> None:
        """Keep one more."""
        super().add(letter)
        durable = self.durable
        if durable is None:
            return
        try:
            packed = pack_letter(letter)
        except InvalidParameter as error:
            # Its payload is an object of this process only; in memory it is kept all the same.
            self._log.warning("dead letter not in the journal", extra={"error": str(error)})
            return
        # In the journal's own event loop: the one that this runs in may end before the letter is safe.
        burying = asyncio.run_coroutine_threadsafe(durable.post.bury([packed]), durable.loop)
        self._burying.add(burying)
        burying.add_done_callback(self._burying.discard)

    async def settled(self, seconds: float) -> None:
        """Wait until all are kept, for so long at most."""
        waiting = [asyncio.wrap_future(burying) for burying in list(self._burying)]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
            for one in waiting:
                one.cancel()


def check_reader(name: str, topics: str, patterns: Mapping[str, tuple[str, Wants]]) -> None:
    """Whether a reader may join the subscription of this name."""
    if name not in patterns:
        raise InvalidParameter(f"'{name}' is a dispatcher's own subscription: choose another name.")
    if patterns[name][0] != topics:
        raise InvalidParameter(
            f"'{name}' reads '{patterns[name][0]}', not '{topics}': choose another name, or these topics."
        )


def rules_of(spec: DispatcherSpec, consumers_in_one: int = 1) -> Rules:
    """How a dispatcher wants its messages. Where one consumer stands for several replicas, it has all their windows."""
    delivery = spec.delivery
    if consumers_in_one > 1 and delivery.mode.value != "exclusive":
        delivery = delivery.model_copy(update={"window": delivery.window * consumers_in_one})
    return Rules(delivery, spec.retry, spec.poison)


def routed_to(table: RouteTable, dispatcher_id: str) -> Wants:
    """Wants what the table leads to a dispatcher."""

    def wants(topic: str, message_type: str) -> str | None:
        category = category_of(topic)
        if category is None:
            return None
        routes: Iterable[Any] = table.select(topic, category, message_type)
        return next((route.route_id for route in routes if route.dispatcher_id == dispatcher_id), None)

    return wants


def fitting(topics: str) -> Wants:
    """Wants what fits a pattern."""
    pattern = parse_pattern(topics)
    return lambda topic, _: "" if pattern.matches(topic) else None

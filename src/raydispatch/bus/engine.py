"""The engine: register, freeze, send. Each concern is a file beside this one; here they are joined."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

from raydispatch.bus.announcements import COMMAND_RESULT, COMMAND_STARTED, CommandResult, CommandStarted
from raydispatch.bus.durable import Durable, Keeper, KeptDeadLetters
from raydispatch.bus.filters import Filter
from raydispatch.bus.freezing import checked_table
from raydispatch.bus.intake import delivering
from raydispatch.bus.publishing import OnPressure, OnResult, Publisher
from raydispatch.bus.pubsub import OnMissed, Subscription, Subscriptions
from raydispatch.bus.registering import Registering
from raydispatch.bus.replicas import EndpointRegistry
from raydispatch.bus.requesting import Requester
from raydispatch.bus.sending import Fault, Sender, SenderParts
from raydispatch.bus.session import Session
from raydispatch.delivery.backpressure import QueueCounts
from raydispatch.delivery.outlet import Outlet, open_outlet
from raydispatch.delivery.post import Post
from raydispatch.delivery.reader import Reader
from raydispatch.delivery.subscription import Start
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.clock import Clock, SystemClock
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec, Publish
from raydispatch.dispatch.metrics import DispatcherMetrics, DispatchMetrics, MetricsRecorder
from raydispatch.dispatch.middleware import Middleware
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Receipt, Reply
from raydispatch.dispatch.registry import DispatcherRegistry, Registry, check_id
from raydispatch.errors import DuplicateRegistration, ErrorCode, InvalidParameter, InvalidState, NotRegistered
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory, category_of
from raydispatch.routing.explain import Explanation, explain
from raydispatch.routing.lint import Finding, lint
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import RouteTable
from raydispatch.settings import Delivery, EngineSettings, JournalSettings

LETTER_SECONDS = 0.1
"""For dead letters that are on their way into the journal when the engine stops without waiting."""
NO_JOURNAL = 'The engine has no journal: give it one, DispatchEngine(…, journal="sqlite:///path/orders.db").'

# Quiet unless the program sets up logging: results carry the same facts.
logging.getLogger("raydispatch").addHandler(logging.NullHandler())


class DispatchEngine(Registering):
    """Routes messages to dispatchers, in this process. Register in one thread; after `freeze()`, send from many.

    `on_result` gets the result of every message that nobody waits for (published ones, and outputs of handlers);
    `on_pressure` is told when the queue of published messages passes its marks.

    Example: see `examples/01_first_dispatch.py`.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        settings: EngineSettings | None = None,
        registry: Registry | None = None,
        logger: logging.Logger | None = None,
        clock: Clock | None = None,
        on_result: OnResult | None = None,
        on_pressure: OnPressure | None = None,
        journal: str | JournalSettings | None = None,
    ) -> None:
        check_id("name", name)
        self.name = name
        self.settings = settings or EngineSettings()
        if journal is not None:
            journal = JournalSettings(url=journal) if isinstance(journal, str) else journal
            self.settings = self.settings.model_copy(update={"journal": journal})
        self.registry = registry if registry is not None else DispatcherRegistry()
        self.logger = logger or logging.getLogger("raydispatch")
        self.dead_letters = KeptDeadLetters(self.settings.dead_letters, self.logger)
        self.clock = clock or SystemClock()
        self.on_result = on_result
        self.on_pressure = on_pressure
        self._lock = threading.Lock()
        self._middleware: list[Middleware] = []
        self._filters: list[Filter] = []
        self._metrics = MetricsRecorder(most_topics=self.settings.metric_topics)
        self._subscriptions = Subscriptions()
        self._requester = Requester(self.settings.request_timeout_seconds, self.logger)
        self._sender: Sender | None = None
        self._publisher: Publisher | None = None
        self._health: asyncio.Task[None] | None = None
        self._durable: Durable | None = None
        self._outlets: dict[str, Outlet] = {}

    # Registering

    def add_middleware(self, middleware: Middleware) -> None:
        """Run this around every dispatcher, for every message; the first added is the outermost."""
        if not callable(middleware):
            raise InvalidParameter(f"A middleware must be callable as (envelope, next); {middleware!r} is not.")
        with self._lock:
            self._check_open()
            self._middleware.append(middleware)

    def add_filter(self, condition: Filter) -> None:
        """Publish only what this lets through; at any time."""
        if not callable(condition):
            raise InvalidParameter(f"A filter must be callable with an envelope; {condition!r} is not.")
        self._filters.append(condition)

    def freeze(self, *, strict: bool = False) -> RouteTable:
        """Check everything and make the table; a second call gives the same one. With `strict`, command routes of
        different dispatchers must not overlap."""
        with self._lock:
            if self._sender is None:
                self._freeze(strict)
        return self.table

    def _freeze(self, strict: bool) -> None:
        specs = self.registry.dispatchers()
        table = self._make_table(self.registry.routes(), specs, strict)
        dispatchers = {spec.dispatcher_id: self._make_dispatcher(spec) for spec in specs}
        sender = Sender(table, dispatchers, self._sender_parts())
        self._publisher = self._make_publisher(sender)
        self._sender = sender

    # Asking

    @property
    def middleware(self) -> Sequence[Middleware]:
        """What runs around every dispatcher, the outermost first."""
        return tuple(self._middleware)

    @property
    def filters(self) -> Sequence[Filter]:
        """What `publish` asks."""
        return tuple(self._filters)

    @property
    def is_frozen(self) -> bool:
        """Whether messages can be sent, and nothing more registered."""
        return self._sender is not None

    @property
    def route_count(self) -> int:
        """Registered routes, disabled ones included."""
        return len(self.registry.routes())

    @property
    def dispatcher_count(self) -> int:
        """Registered dispatchers."""
        return len(self.registry.dispatchers())

    @property
    def table(self) -> RouteTable:
        """The frozen table."""
        return self._frozen().table

    @property
    def endpoints(self) -> EndpointRegistry:
        """The replicas of the dispatchers: join, find, leave."""
        return EndpointRegistry(self._frozen().dispatchers, self.settings.stop_seconds)

    @property
    def journal(self) -> Post:
        """What is durable: subscriptions, dead letters, replay. There while the engine runs, if it has a journal."""
        return self._kept_by().post

    @property
    def queue_counts(self) -> QueueCounts:
        """What became of published messages at the queue."""
        return self._publishing().counts()

    def explain(self, topic: str, message_type: str | None = None) -> Explanation:
        """Who gets such a message, and why."""
        _check_topic(topic)
        return explain(self.table, topic, message_type)

    def lint(self) -> list[Finding]:
        """What in the table is most likely not meant."""
        return lint(self.table)

    def get_structured_metrics(self) -> DispatchMetrics:
        """A consistent picture of all counts."""
        return self._metrics.snapshot()

    def get_dispatcher_metrics(self, dispatcher_id: str) -> DispatcherMetrics | None:
        """One dispatcher's counts, or None if it has had no message."""
        return self._metrics.snapshot().get_dispatcher_metrics(dispatcher_id)

    def circuit_state(self, dispatcher_id: str) -> CircuitState:
        """The state of a dispatcher's breaker; CLOSED if it has none."""
        dispatcher = self._frozen().dispatchers.get(dispatcher_id)
        if dispatcher is None:
            raise NotRegistered("dispatcher", dispatcher_id)
        return dispatcher.breaker.state if dispatcher.breaker else CircuitState.CLOSED

    # Sending

    async def dispatch(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send one message to all dispatchers that its topic and type select, and wait for their outcomes."""
        sender = self._sender
        if sender is None or type(topic) is not str or not topic.strip() or not isinstance(envelope, Envelope):
            sender = self._checked(topic, envelope)
        return await sender.send(topic, envelope)

    async def publish(
        self, topic: str, envelope: Envelope[Any], *, durable: bool = False, deliver_at: datetime | None = None
    ) -> Receipt:
        """Accept a message for dispatchers and subscribers, and return at once; it is delivered in the background.

        With `durable`, it returns when the journal has the message, which then survives this process; each dispatcher
        gets it by its own `delivery`, not before `deliver_at`.
        """
        if durable or deliver_at is not None:
            return (await self.publish_many([(topic, envelope)], durable=durable, deliver_at=deliver_at))[0]
        publisher = self._publisher
        if publisher is None or type(topic) is not str or not topic.strip() or not isinstance(envelope, Envelope):
            self._checked(topic, envelope)
            publisher = self._publishing()
        return await publisher.publish(topic, envelope)

    async def publish_many(
        self,
        messages: Sequence[tuple[str, Envelope[Any]]],
        *,
        durable: bool = False,
        deliver_at: datetime | None = None,
    ) -> list[Receipt]:
        """As `publish`, for many at once: durable ones go into the journal in one write."""
        for topic, envelope in messages:
            if type(topic) is not str or not topic.strip() or not isinstance(envelope, Envelope):
                self._checked(topic, envelope)
        publisher = self._publishing()
        if not durable:
            if deliver_at is not None:
                raise InvalidParameter("deliver_at needs durable=True: only a journal remembers for so long.")
            return [await publisher.publish(topic, envelope) for topic, envelope in messages]
        due = None if deliver_at is None else deliver_at.timestamp()
        return await publisher.publish_durably(messages, due, self._keeper())

    async def consume(
        self,
        name: str,
        topics: str = "**",
        *,
        delivery: Delivery | None = None,
        start: Start | None = None,
    ) -> Reader:
        """Read durable messages, and acknowledge each. Readers of one name share its messages, by its `delivery`.

        A new subscription begins at `start` (an offset, a datetime, "first" or "head"), one that is known where it was.
        """
        check_id("name", name)
        return await self._kept_by().consume(name, topics, delivery or Delivery(), start)

    async def execute(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send a command to its one dispatcher; `result.reply` is what its handler replied."""
        sender, publisher = self._checked(topic, envelope), self._publishing()
        if category_of(topic) not in (MessageCategory.COMMAND, None):
            message = f"'{topic}' is not the topic of a command: use dispatch or publish."
            fault = Fault(DispatchStatus.INVALID_MESSAGE, ErrorCode.NOT_A_COMMAND, message)
            return sender.refuse(topic, envelope, fault)
        facts = (envelope.message_id, topic, envelope.message_type)
        publisher.announce(COMMAND_STARTED, CommandStarted(*facts), envelope)
        started = self.clock.now()
        try:
            result = await sender.send(topic, envelope)
        except BaseException as error:
            ended = CommandResult(
                *facts, DispatchStatus.DISPATCHER_ERROR, (self.clock.now() - started) * 1000.0, type(error).__name__
            )
            publisher.announce(COMMAND_RESULT, ended, envelope)
            raise
        ended = CommandResult(*facts, result.status, result.duration_ms, result.error_message)
        publisher.announce(COMMAND_RESULT, ended, envelope)
        return result

    async def request(self, topic: str, envelope: Envelope[Any], timeout: float | None = None) -> Reply:
        """Send a message and wait for a reply with its correlation id, from its handler or from further down the chain.

        Raises `RequestTimeout`, `RequestFailed` (with the `result`) or `ChannelClosed`.
        """
        return await self._requester.request(self._checked(topic, envelope).deliver, topic, envelope, timeout)

    def reply(self, correlation_id: UUID, payload: object) -> None:
        """Answer a request from outside a handler; raises if nobody waits (late, duplicate, unknown, closed)."""
        self._requester.correlations.resolve(correlation_id, Reply(payload))

    def subscribe(self, pattern: str, capacity: int = 1000, *, on_missed: OnMissed | None = None) -> Subscription:
        """Read what is published on topics that fit: `async with engine.subscribe("**") as messages: async for …`."""
        return self._subscriptions.subscribe(pattern, capacity, on_missed=on_missed)

    def session(self, session_id: str) -> Session:
        """Dispatchers for the messages of one job: `async with engine.session("job-1") as session`."""
        check_id("session_id", session_id)
        return Session(session_id, self, self._frozen(), self._publishing(), self._make_table, self._make_dispatcher)

    # Running

    async def start(self) -> None:
        """Build and start all handlers now, rather than each on its first message, and watch their health."""
        await self._start_dispatchers()
        try:
            await self._open_journal()
        except BaseException:
            await self._stop_dispatchers()
            raise
        self._subscriptions.reopen()
        self._requester.correlations.reopen()
        self._publishing().reopen()
        if self._health is None or self._health.done():
            self._health = asyncio.get_running_loop().create_task(self._watch_health(), name="raydispatch health")

    async def drain(self) -> None:
        """Wait until everything accepted so far in this event loop, and what it causes, is done."""
        if delivering.get():
            raise InvalidState("A handler cannot drain the engine: it would wait for its own end.")
        await self._publishing().drain()

    async def stop(self, seconds: float | None = None) -> None:
        """Accept nothing more, deliver what was accepted until the deadline, end all that waits, stop the handlers.

        What cannot be delivered in time ends as REJECTED with the code `shut_down`: in the metrics, in the log, and
        for `on_result`. What was accepted in other event loops is theirs to drain before.
        """
        publisher, dispatchers = self._publishing(), self._frozen().dispatchers.values()
        now = asyncio.get_running_loop().time
        deadline = now() + (self.settings.stop_seconds if seconds is None else seconds)
        publisher.close()
        seconds_left = 0.0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    if self._durable is not None:
                        await self._durable.post.drain(deadline - now())
                    await asyncio.gather(publisher.drain(), *(dispatcher.idle() for dispatcher in dispatchers))
                    seconds_left = deadline - now()
        finally:
            # In any case: whoever is cancelled while waiting must not leave an engine that is half stopped.
            await self._end(seconds_left)

    async def __aenter__(self) -> "DispatchEngine":
        self.freeze()
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _end(self, seconds: float) -> None:
        try:
            await self._publishing().stop(seconds)
        finally:
            await self._close_journal(seconds)
            self._requester.close()
            self._subscriptions.close()
            if self._health is not None:
                self._health.cancel()
                self._health = None
            await self._stop_dispatchers()

    async def _open_journal(self) -> None:
        settings, sender = self.settings.journal, self._frozen()
        if settings is None or self._durable is not None:
            return
        # The engine's own from the start: what is delivered while it still begins may have outputs for the journal.
        self._durable = await Durable.open(self.name, settings, sender.table, self.clock, self.logger)
        self.dead_letters.durable = self._durable
        try:
            await self._durable.begin(sender.dispatchers.values(), self._metrics, self._requester.replied)
        except BaseException:
            await self._close_journal(0.0)
            raise

    async def _close_journal(self, seconds: float) -> None:
        durable, self._durable = self._durable, None
        if durable is not None:
            await self.dead_letters.settled(seconds + LETTER_SECONDS)
            self.dead_letters.durable = None
            await durable.close(seconds)

    async def _start_dispatchers(self) -> None:
        """All or none."""
        starting = [dispatcher.start() for dispatcher in self._frozen().dispatchers.values()]
        try:
            for ended in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(ended, BaseException):
                    raise ended
        except BaseException:
            await self._stop_dispatchers()
            raise

    async def _stop_dispatchers(self) -> None:
        for outlet in self._outlets.values():
            await outlet.close()
        for dispatcher in self._frozen().dispatchers.values():
            await dispatcher.stop()

    async def _watch_health(self) -> None:
        while True:
            await self.clock.sleep(self.settings.health_interval_seconds)
            await self.endpoints.check_health()

    # Parts

    def _add(self, routes: Sequence[DispatchRoute], spec: DispatcherSpec | None = None) -> None:
        with self._lock:
            self._check_open()
            taken = {route.route_id for route in self.registry.routes()}
            for route in routes:
                if route.route_id in taken:
                    raise DuplicateRegistration("route", route.route_id)
            if spec is not None:
                self.registry.add_dispatcher(spec)
            for route in routes:
                self.registry.add_route(route)

    def _check_open(self) -> None:
        if self._sender is not None:
            raise InvalidState(
                f"The engine '{self.name}' is frozen: register everything before freeze(), or make another engine."
            )

    def _frozen(self) -> Sender:
        if self._sender is None:
            raise InvalidState("The engine is not frozen yet: call engine.freeze() when everything is registered.")
        return self._sender

    def _publishing(self) -> Publisher:
        self._frozen()
        assert self._publisher is not None  # Made together with the sender.
        return self._publisher

    def _kept_by(self) -> Durable:
        if self._durable is None:
            if self.settings.journal is None:
                raise InvalidState(NO_JOURNAL)
            raise InvalidState("The journal is open while the engine runs: use `async with engine`, or engine.start().")
        return self._durable

    def _keeper(self) -> Keeper:
        """Who keeps what is published durably."""
        return self._kept_by()

    def _checked(self, topic: object, envelope: object) -> Sender:
        sender = self._frozen()
        _check_topic(topic)
        if not isinstance(envelope, Envelope):
            raise InvalidParameter(f"A message is an Envelope, not {type(envelope).__name__}: Envelope(payload).")
        return sender

    def _make_table(
        self, routes: Sequence[DispatchRoute], specs: Sequence[DispatcherSpec], strict: bool = False
    ) -> RouteTable:
        return checked_table(
            routes,
            specs,
            cache_entries=self.settings.match_cache_entries,
            strict=strict,
            has_middleware=bool(self._middleware),
            has_journal=self.settings.journal is not None,
            log=self.logger,
        )

    def _sender_parts(self) -> SenderParts:
        return SenderParts(
            self._metrics, self.dead_letters, self.logger, self.settings.max_payload_bytes, self._requester.replied
        )

    def _make_publisher(self, sender: Sender) -> Publisher:
        return Publisher(
            sender,
            self.settings,
            clock=self.clock,
            log=self.logger,
            filters=self._filters,
            subscriptions=self._subscriptions,
            on_result=self.on_result,
            on_pressure=self.on_pressure,
        )

    def _make_dispatcher(self, spec: DispatcherSpec, origin: str | None = None) -> Dispatcher:
        return Dispatcher(
            spec,
            clock=self.clock,
            logger=self.logger,
            slow_sync_handler_seconds=self.settings.slow_sync_handler_seconds,
            middleware=self._middleware,
            publish=self._way_out(spec),
            max_hops=self.settings.max_hops,
            health_seconds=self.settings.health_interval_seconds,
            origin=origin,
        )

    def _way_out(self, spec: DispatcherSpec) -> Publish:
        if spec.outputs == "engine":
            return self._accept_outputs
        if spec.outputs == "journal":
            return self._accept_durably
        outlet = self._outlets.get(spec.outputs)
        if outlet is None:
            outlet = self._outlets[spec.outputs] = open_outlet(spec.outputs, self.name)
        return outlet.accept

    async def _accept_durably(self, outputs: Sequence[Envelope[Any]]) -> bool:
        return self._durable is not None and await self._durable.accept_outputs(outputs)

    async def _accept_outputs(self, outputs: Sequence[Envelope[Any]]) -> bool:
        return await self._publishing().accept_outputs(outputs)

    def __repr__(self) -> str:
        state = f"frozen, table {self.table.version}" if self.is_frozen else "open for registration"
        return (
            f"<DispatchEngine '{self.name}': {self.route_count} routes, {self.dispatcher_count} dispatchers, {state}>"
        )


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str) or not topic.strip():
        raise InvalidParameter(f"A topic is a string that is not blank, such as 'dev.order.events.v1'; not {topic!r}.")

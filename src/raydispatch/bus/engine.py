"""The engine: register, freeze, dispatch."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from itertools import groupby
from time import perf_counter
from typing import Any, TypeVar

from raydispatch.delivery.dead_letters import FINAL_FAILURES, DeadLetter, DeadLetters
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.clock import Clock
from raydispatch.dispatch.dispatcher import Dispatcher
from raydispatch.dispatch.handler import HandlerSource
from raydispatch.dispatch.metrics import DispatcherMetrics, DispatchMetrics, MetricsRecorder
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome, combined_error, worst_status
from raydispatch.dispatch.registry import DispatcherRegistry, Registry, check_id, make_spec
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode, InvalidParameter, InvalidState, InvalidTable, NotRegistered
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import new_id
from raydispatch.messages.topic import MessageCategory, category_of, topic_fault
from raydispatch.routing.explain import Explanation, explain
from raydispatch.routing.lint import Finding, command_overlaps, lint
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable
from raydispatch.settings import BreakerSettings, EngineSettings, RetrySettings

HandlerT = TypeVar("HandlerT", bound=HandlerSource)

# Quiet unless the program sets up logging: results carry the same facts.
logging.getLogger("raydispatch").addHandler(logging.NullHandler())

_DEFAULT_BREAKER = BreakerSettings()
_DEFAULT_RETRY = RetrySettings()


class DispatchEngine:
    """Routes messages to dispatchers, in this process. Register in one thread; after `freeze()`, dispatch from many.

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
    ) -> None:
        check_id("name", name)
        self.name = name
        self.settings = settings or EngineSettings()
        self.dead_letters = DeadLetters(self.settings.dead_letters)
        self._registry = registry if registry is not None else DispatcherRegistry()
        self._log = logger or logging.getLogger("raydispatch")
        self._clock = clock
        self._lock = threading.Lock()
        self._table: RouteTable | None = None
        self._version = ""
        self._dispatchers: dict[str, Dispatcher] = {}
        self._metrics = MetricsRecorder(most_topics=self.settings.metric_topics)

    # Registering

    def register_route(self, route: DispatchRoute) -> None:
        """Add a route; its dispatcher may come later."""
        if not isinstance(route, DispatchRoute):
            raise InvalidParameter(f"register_route takes a DispatchRoute, not {type(route).__name__}.")
        with self._lock:
            self._check_open()
            self._registry.add_route(route)

    def register_dispatcher(
        self,
        dispatcher_id: str,
        dispatcher: HandlerSource,
        category: MessageCategory,
        message_types: Collection[str] | None = None,
        *,
        breaker: BreakerSettings | None = _DEFAULT_BREAKER,
        retry: RetrySettings | None = _DEFAULT_RETRY,
        time_limit_seconds: float | None = None,
        node_kind: str | None = None,
    ) -> None:
        """Add a dispatcher: a function of one envelope (sync or async), or a class or object with `handle`."""
        spec = make_spec(
            dispatcher_id,
            dispatcher,
            category,
            message_types,
            breaker=breaker,
            retry=retry,
            time_limit_seconds=time_limit_seconds,
            node_kind=node_kind,
        )
        with self._lock:
            self._check_open()
            self._registry.add_dispatcher(spec)

    def dispatcher(
        self,
        dispatcher_id: str,
        *,
        topics: str | Sequence[str],
        category: MessageCategory,
        message_types: Collection[str] | None = None,
        priority: int = 0,
        breaker: BreakerSettings | None = _DEFAULT_BREAKER,
        retry: RetrySettings | None = _DEFAULT_RETRY,
        time_limit_seconds: float | None = None,
    ) -> Callable[[HandlerT], HandlerT]:
        """Register the function or class below, with one route for each pattern in `topics`."""
        check_id("dispatcher_id", dispatcher_id)
        patterns = [topics] if isinstance(topics, str) else list(topics)
        routes = [
            DispatchRoute(
                route_id=dispatcher_id if len(patterns) == 1 else f"{dispatcher_id}-{number}",
                topic_pattern=pattern,
                message_category=category,
                dispatcher_id=dispatcher_id,
                priority=priority,
            )
            for number, pattern in enumerate(patterns, start=1)
        ]

        def register(handler: HandlerT) -> HandlerT:
            self.register_dispatcher(
                dispatcher_id,
                handler,
                category,
                message_types,
                breaker=breaker,
                retry=retry,
                time_limit_seconds=time_limit_seconds,
            )
            for route in routes:
                self.register_route(route)
            return handler

        return register

    def freeze(self, *, strict: bool = False) -> RouteTable:
        """Check everything and make the table; a second call gives the same one. With `strict`, command routes of
        different dispatchers must not overlap."""
        with self._lock:
            if self._table is None:
                table = self._checked_table(strict)
                self._dispatchers = {
                    spec.dispatcher_id: Dispatcher(
                        spec,
                        clock=self._clock,
                        logger=self._log,
                        slow_sync_handler_seconds=self.settings.slow_sync_handler_seconds,
                    )
                    for spec in self._registry.dispatchers()
                }
                self._version = table.version
                self._table = table
            return self._table

    # Asking

    @property
    def is_frozen(self) -> bool:
        """Whether messages can be dispatched, and nothing more registered."""
        return self._table is not None

    @property
    def route_count(self) -> int:
        """Registered routes, disabled ones included."""
        return len(self._registry.routes())

    @property
    def dispatcher_count(self) -> int:
        """Registered dispatchers."""
        return len(self._registry.dispatchers())

    @property
    def table(self) -> RouteTable:
        """The frozen table."""
        if self._table is None:
            raise InvalidState("The engine is not frozen yet: call engine.freeze() when everything is registered.")
        return self._table

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
        if self.table.dispatchers.get(dispatcher_id) is None:
            raise NotRegistered("dispatcher", dispatcher_id)
        breaker = self._dispatchers[dispatcher_id].breaker
        return breaker.state if breaker else CircuitState.CLOSED

    # Running

    async def start(self) -> None:
        """Build and start all handlers now, rather than each on its first message."""
        self.table  # noqa: B018 - raises before freeze
        await asyncio.gather(*(dispatcher.handler.start() for dispatcher in self._dispatchers.values()))

    async def stop(self) -> None:
        """Stop all handlers that were started."""
        for dispatcher in self._dispatchers.values():
            try:
                await dispatcher.handler.stop()
            except Exception as error:
                # Without the traceback, whose last line would be the exception's own words.
                fields = {"dispatcher_id": dispatcher.spec.dispatcher_id, "error": describe_exception(error)}
                self._log.error("stop failed", extra=fields)

    async def __aenter__(self) -> "DispatchEngine":
        self.freeze()
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def dispatch(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send one message to all dispatchers that its topic and type select, and wait for their outcomes."""
        table = self._table
        if table is None:
            raise InvalidState("The engine is not frozen yet: call engine.freeze() before the first dispatch.")
        if type(topic) is not str or not topic.strip():
            _check_topic(topic)
        if not isinstance(envelope, Envelope):
            raise InvalidParameter(f"dispatch takes an Envelope, not {type(envelope).__name__}: Envelope(payload).")
        started_at = datetime.now(UTC)
        started = perf_counter()
        category = category_of(topic)
        selected = table.select(topic, category, envelope.message_type) if category is not None else ()
        routed = perf_counter()
        if self._log.isEnabledFor(logging.INFO):
            self._log.info("dispatch started", extra=_fields(topic, category, envelope, dispatcher_count=len(selected)))
        fault = self._fault(topic, category, selected, envelope)
        if fault is not None:
            return self._finish(topic, category, envelope, (), fault, started_at, started, routed)
        if envelope.topic != topic:
            envelope = envelope.with_topic(topic)
        if len(selected) == 1:
            # No task for a lone dispatcher: that would cost more than all the rest.
            route = selected[0]
            outcomes: tuple[Outcome, ...] = (
                await self._dispatchers[route.dispatcher_id].process(envelope, route.route_id),
            )
        else:
            outcomes = await self._fan_out(selected, envelope)
        return self._finish(topic, category, envelope, outcomes, None, started_at, started, routed)

    async def _fan_out(self, selected: tuple[DispatchRoute, ...], envelope: Envelope[Any]) -> tuple[Outcome, ...]:
        """Dispatchers of one priority run at the same time; higher priorities finish before lower ones start."""
        outcomes: list[Outcome] = []
        for _, group in groupby(selected, key=lambda route: route.priority):
            outcomes += await asyncio.gather(
                *(self._dispatchers[route.dispatcher_id].process(envelope, route.route_id) for route in group)
            )
        return tuple(outcomes)

    def _fault(
        self,
        topic: str,
        category: MessageCategory | None,
        selected: tuple[DispatchRoute, ...],
        envelope: Envelope[Any],
    ) -> tuple[DispatchStatus, ErrorCode, str] | None:
        """What keeps a message from every dispatcher."""
        if category is None:
            return DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC, topic_fault(topic) or "invalid topic"
        payload = envelope.payload
        if isinstance(payload, str | bytes | bytearray | memoryview):
            size = _size(payload)
            if size > self.settings.max_payload_bytes:
                message = f"The payload has {size:,} bytes; {self.settings.max_payload_bytes:,} are allowed."
                return DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_TOO_LARGE, message
        if not selected:
            message = f"No dispatcher takes {category} '{topic}' of type {envelope.message_type}."
            return DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER, message
        return None

    def _finish(
        self,
        topic: str,
        category: MessageCategory | None,
        envelope: Envelope[Any],
        outcomes: tuple[Outcome, ...],
        fault: tuple[DispatchStatus, ErrorCode, str] | None,
        started_at: datetime,
        started: float,
        routed: float,
    ) -> DispatchResult:
        """Count, log and keep what has to be kept, and make the result."""
        error_code: ErrorCode | None = None
        error_message: str | None = None
        if fault is not None:
            status, error_code, error_message = fault
        elif len(outcomes) == 1 and outcomes[0].status is DispatchStatus.SUCCESS:
            status = DispatchStatus.SUCCESS
        else:
            status = worst_status(outcomes)
            error_code, error_message = combined_error(outcomes, status)
            self._bury(topic, envelope, outcomes, started_at)
        duration_ms = (perf_counter() - started) * 1000.0
        self._metrics.record(topic, category, status, duration_ms, (routed - started) * 1000.0, outcomes)
        self._log_end(topic, category, envelope, status, duration_ms, error_code, error_message, outcomes)
        first = outcomes[0] if outcomes else None
        return DispatchResult(
            new_id(),
            status,
            topic,
            category,
            envelope.message_type,
            first.route_id if first else None,
            first.dispatcher_id if first else None,
            duration_ms,
            started_at,
            datetime.now(UTC),
            first.outputs if len(outcomes) == 1 and first else tuple(t for o in outcomes for t in o.outputs),
            error_message,
            error_code,
            envelope.correlation_id,
            envelope.trace_id,
            envelope.span_id,
            outcomes,
            self._version,
        )

    def _bury(self, topic: str, envelope: Envelope[Any], outcomes: tuple[Outcome, ...], started_at: datetime) -> None:
        now = datetime.now(UTC)
        for outcome in outcomes:
            if outcome.status in FINAL_FAILURES:
                self.dead_letters.add(DeadLetter(topic, envelope, outcome, started_at, now, self._version))

    def _log_end(
        self,
        topic: str,
        category: MessageCategory | None,
        envelope: Envelope[Any],
        status: DispatchStatus,
        duration_ms: float,
        error_code: ErrorCode | None,
        error_message: str | None,
        outcomes: tuple[Outcome, ...],
    ) -> None:
        # A failing dispatcher has had its own line at ERROR already.
        level, words = logging.INFO, "dispatch completed"
        if status is DispatchStatus.NO_DISPATCHER:
            level, words = logging.WARNING, "no dispatcher"
        elif status is DispatchStatus.INVALID_MESSAGE and not outcomes:
            level, words = logging.ERROR, "invalid message"
        if self._log.isEnabledFor(level):
            fields = _fields(
                topic, category, envelope, dispatcher_count=len(outcomes), status=status.value, duration_ms=duration_ms,
                dispatcher_id=[outcome.dispatcher_id for outcome in outcomes], error=error_message,
                error_code=error_code.value if error_code else None,
            )  # fmt: skip
            self._log.log(level, words, extra=fields)

    # Freezing

    def _check_open(self) -> None:
        if self._table is not None:
            raise InvalidState(
                f"The engine '{self.name}' is frozen: register everything before freeze(), or make another engine."
            )

    def _checked_table(self, strict: bool) -> RouteTable:
        routes = self._registry.routes()
        specs = {spec.dispatcher_id: spec for spec in self._registry.dispatchers()}
        missing = [
            f"route '{route.route_id}' leads to the dispatcher '{route.dispatcher_id}', which is not registered"
            for route in routes
            if route.dispatcher_id not in specs
        ]
        misfits = [
            f"route '{route.route_id}' is for {route.message_category}s, its dispatcher '{route.dispatcher_id}' for "
            f"{specs[route.dispatcher_id].category}s"
            for route in routes
            if route.dispatcher_id in specs and route.message_category is not specs[route.dispatcher_id].category
        ]
        if missing or misfits:
            code = ErrorCode.ITEM_NOT_REGISTERED if missing else ErrorCode.INVALID_PARAMETER
            raise InvalidTable(sorted(missing) + sorted(misfits), code)
        table = RouteTable(
            routes,
            {name: DispatcherTypes(spec.category, spec.message_types) for name, spec in specs.items()},
            cache_entries=self.settings.match_cache_entries,
        )
        overlaps, _ = command_overlaps(table)
        if overlaps and strict:
            raise InvalidTable([str(overlap) for overlap in overlaps], ErrorCode.INVALID_PARAMETER)
        for overlap in overlaps:
            self._log.warning("command routes overlap", extra={"engine": self.name, "overlap": str(overlap)})
        return table

    def __repr__(self) -> str:
        state = f"frozen, table {self._version}" if self.is_frozen else "open for registration"
        return (
            f"<DispatchEngine '{self.name}': {self.route_count} routes, {self.dispatcher_count} dispatchers, {state}>"
        )


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str) or not topic.strip():
        raise InvalidParameter(
            f"topic must be a string that is not blank, such as 'dev.order.events.v1'; not {topic!r}."
        )


def _size(payload: str | bytes | bytearray | memoryview) -> int:
    if isinstance(payload, str):
        return len(payload) if payload.isascii() else len(payload.encode(errors="surrogatepass"))
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)


def _fields(topic: str, category: MessageCategory | None, envelope: Envelope[Any], **more: object) -> dict[str, object]:
    return {
        "topic": topic,
        "category": category.value if category else None,
        "message_type": envelope.message_type,
        "correlation_id": str(envelope.correlation_id),
        "trace_id": envelope.trace_id,
        **more,
    }

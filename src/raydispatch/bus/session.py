"""Sessions: dispatchers of one job, found before those of the engine, and gone when the job ends."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raydispatch.bus.announcements import SESSION_ENDED, SESSION_STARTED, SessionEnded, SessionStarted
from raydispatch.bus.publishing import Publisher
from raydispatch.bus.registering import Registering
from raydispatch.bus.sending import Sender, SessionRoute
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.outcome import DispatchResult, Receipt, Reply
from raydispatch.dispatch.registry import DispatcherRegistry
from raydispatch.errors import DuplicateRegistration, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import RouteTable

if TYPE_CHECKING:
    from raydispatch.bus.engine import DispatchEngine


class Session(Registering):
    """An overlay on the engine's table for the messages sent through it, and for what they cause.

    A command goes to the session's dispatcher if it has one that fits, else to the engine's; an event goes to both.

    Example: `async with engine.session("job-1") as session: session.register_dispatcher(...)`.
    """

    def __init__(
        self,
        session_id: str,
        engine: "DispatchEngine",
        sender: Sender,
        publisher: Publisher,
        make_table: Callable[[Sequence[DispatchRoute], Sequence[DispatcherSpec]], RouteTable],
        make_dispatcher: Callable[[DispatcherSpec, str], Dispatcher],
    ) -> None:
        self.session_id = session_id
        self._engine = engine
        self._sender = sender
        self._publisher = publisher
        self._make_table = make_table
        self._make_dispatcher = make_dispatcher
        self._registry = DispatcherRegistry()
        self._dispatchers: dict[str, Dispatcher] = {}
        self._table = make_table((), ())
        self._is_open = False

    async def dispatch(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """As the engine's, in this session."""
        return await self._engine.dispatch(topic, self._own(envelope))

    async def publish(self, topic: str, envelope: Envelope[Any]) -> Receipt:
        """As the engine's, in this session."""
        return await self._engine.publish(topic, self._own(envelope))

    async def execute(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """As the engine's, in this session."""
        return await self._engine.execute(topic, self._own(envelope))

    async def request(self, topic: str, envelope: Envelope[Any], timeout: float | None = None) -> Reply:
        """As the engine's, in this session."""
        return await self._engine.request(topic, self._own(envelope), timeout)

    def routes(self, topic: str, category: MessageCategory, message_type: str) -> list[SessionRoute]:
        """The routes of this session that fit."""
        return [
            SessionRoute(route.route_id, route.dispatcher_id, route.priority, self._dispatchers[route.dispatcher_id])
            for route in self._table.select(topic, category, message_type)
        ]

    async def __aenter__(self) -> Self:
        if self._is_open or self._sender.overlays.setdefault(self.session_id, self) is not self:
            raise DuplicateRegistration("session", self.session_id)
        self._is_open = True
        self._publisher.announce(SESSION_STARTED, SessionStarted(self.session_id))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        del self._sender.overlays[self.session_id]
        ending, self._dispatchers = self._dispatchers, {}
        self._registry, self._table = DispatcherRegistry(), self._make_table((), ())
        try:
            # What runs in the session's dispatchers may end; nothing new reaches them.
            seconds = self._engine.settings.stop_seconds
            await asyncio.gather(*(dispatcher.stop_when_idle(seconds) for dispatcher in ending.values()))
        finally:
            ended = SessionEnded(self.session_id, kind.__name__ if kind else None)
            self._publisher.announce(SESSION_ENDED, ended)

    def _add(self, routes: Sequence[DispatchRoute], spec: DispatcherSpec | None = None) -> None:
        if not self._is_open:
            raise InvalidState(f"The session '{self.session_id}' is not open: register inside its 'async with' block.")
        registry = self._registry.copy()
        if spec is not None:
            registry.add_dispatcher(spec)
        for route in routes:
            registry.add_route(route)
        known = {each.dispatcher_id for each in registry.dispatchers()}
        # A route may come before its dispatcher, and leads nowhere until then.
        complete = [route for route in registry.routes() if route.dispatcher_id in known]
        table = self._make_table(complete, registry.dispatchers())
        if spec is not None:
            origin = f"session {self.session_id}/{spec.dispatcher_id}"
            self._dispatchers[spec.dispatcher_id] = self._make_dispatcher(spec, origin)
        self._registry, self._table = registry, table

    def _own(self, envelope: Envelope[Any]) -> Envelope[Any]:
        if not self._is_open:
            raise InvalidState(f"The session '{self.session_id}' has ended, or not begun.")
        # What is no envelope is for the engine to refuse.
        return envelope.in_session(self.session_id) if isinstance(envelope, Envelope) else envelope

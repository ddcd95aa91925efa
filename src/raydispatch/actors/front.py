"""The front: an engine whose dispatchers run elsewhere. Filters, subscriptions, sessions and requests live here."""

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, TypeAlias

from raydispatch.actors.gateway import Gateway
from raydispatch.actors.keeping import RemoteKeeper
from raydispatch.actors.lane import Pending
from raydispatch.actors.reading import RemoteReader
from raydispatch.actors.wire import Message, message_of
from raydispatch.bus.durable import Keeper
from raydispatch.bus.engine import NO_JOURNAL, DispatchEngine
from raydispatch.bus.publishing import OnPressure, OnResult
from raydispatch.bus.sending import Fault, Sender, SenderParts
from raydispatch.delivery.reader import Reader
from raydispatch.delivery.subscription import Start
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome, combined_error, worst_status
from raydispatch.dispatch.registry import check_id
from raydispatch.errors import ErrorCode, InvalidParameter, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory, category_of
from raydispatch.routing.table import RouteTable
from raydispatch.settings import Delivery, EngineSettings, JournalSettings

Sending: TypeAlias = Coroutine[Any, Any, DispatchResult]
"""Begun already; to be awaited."""


class RemoteSender(Sender):
    """Sends through the gateway; only a session's own dispatchers run in this process."""

    def __init__(self, table: RouteTable, gateway: Gateway, parts: SenderParts) -> None:
        super().__init__(table, {}, parts)
        self._gateway = gateway

    async def send(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Check the message, send it, and wait for its result."""
        return await self.begin(topic, envelope)

    def begin(self, topic: str, envelope: Envelope[Any]) -> Sending:
        """As `send`, without a coroutine in between: each costs a concurrent message a tenth of its time."""
        category = category_of(topic)
        fault = self.fault(topic, category, envelope)
        if fault is not None:
            return _done(self.refuse(topic, envelope, fault))
        if self.overlays and envelope.session_id in self.overlays:
            return self._send_in_session(topic, category, envelope)
        return self._send_out(topic, envelope)

    async def send_many(self, messages: Sequence[tuple[str, Envelope[Any]]]) -> list[DispatchResult]:
        """Send these in one call; what cannot be sent costs the others nothing."""
        refused: dict[int, DispatchResult] = {}
        own: dict[int, asyncio.Future[DispatchResult]] = {}
        ready: list[Message] = []
        for position, (topic, envelope) in enumerate(messages):
            fault = self.fault(topic, category_of(topic), envelope)
            if fault is None and self.overlays and envelope.session_id in self.overlays:
                own[position] = asyncio.ensure_future(self.begin(topic, envelope))
                continue
            try:
                if fault is None:
                    ready.append(message_of(topic, envelope))
            except InvalidParameter as error:
                fault = _unsendable(error)
            if fault is not None:
                refused[position] = self.refuse(topic, envelope, fault)
        sent = iter(await self._gateway.send_batch(ready)) if ready else iter(())
        for position, result in own.items():
            refused[position] = await result
        if not refused:
            return list(sent)
        return [refused.get(position) or next(sent) for position in range(len(messages))]

    def _send_out(self, topic: str, envelope: Envelope[Any]) -> Sending:
        try:
            message = message_of(topic, envelope)
        except InvalidParameter as error:
            return _done(self.refuse(topic, envelope, _unsendable(error)))
        return self._gateway.send(message)

    async def _send_in_session(
        self, topic: str, category: MessageCategory | None, envelope: Envelope[Any]
    ) -> DispatchResult:
        """The session's dispatchers first; of a command, only they, if one of them takes it."""
        overlay = self.overlays[envelope.session_id or ""]
        own = overlay.routes(topic, category, envelope.message_type) if category is not None else []
        if not own:
            return await self._send_out(topic, envelope)
        started_at, started = datetime.now(UTC), perf_counter()
        outcomes = await self._fan_out(own, envelope.with_topic(topic))
        here = self._finish(topic, category, envelope, outcomes, None, started_at, started, started)
        if category is MessageCategory.COMMAND or not self.table.select(topic, category, envelope.message_type):  # type: ignore[arg-type]  # Routes were found, so that there is a category.
            return here
        there = await self._send_out(topic, envelope)
        outcomes = (*here.outcomes, *there.outcomes)
        judged = outcomes
        if not there.outcomes and there.status is not DispatchStatus.NO_DISPATCHER:
            # It reached nobody there: no outcome tells that, but the status must.
            fault = Outcome("system", there.status, error_code=there.error_code, error_message=there.error_message)
            judged = (*outcomes, fault)
        status = worst_status(judged)
        code, message = combined_error(judged, status)
        return there._replace(
            status=status,
            error_code=code,
            error_message=message,
            outcomes=outcomes,
            outputs=(*here.outputs, *there.outputs),
            route_id=here.route_id,
            dispatcher_id=here.dispatcher_id,
        )


def _done(result: DispatchResult) -> Sending:
    future = Pending()
    future.set_result(result)
    return future


def _unsendable(error: InvalidParameter) -> Fault:
    return Fault(DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID, str(error))


class FrontEngine(DispatchEngine):
    """The same words as the engine in one process, for the dispatchers of a system."""

    def __init__(
        self,
        name: str,
        table: RouteTable,
        gateway: Gateway,
        *,
        settings: EngineSettings,
        on_result: OnResult | None = None,
        on_pressure: OnPressure | None = None,
    ) -> None:
        super().__init__(name, settings=settings, on_result=on_result, on_pressure=on_pressure)
        self._remote_keeper: RemoteKeeper | None = None
        self._sender: RemoteSender = RemoteSender(table, gateway, self._sender_parts())
        self._publisher = self._make_publisher(self._sender)

    def begin(self, topic: str, envelope: Envelope[Any]) -> Sending:
        """As `dispatch`, begun at once."""
        if type(topic) is not str or not topic.strip() or not isinstance(envelope, Envelope):
            self._checked(topic, envelope)
        return self._sender.begin(topic, envelope)

    async def send_many(self, messages: Sequence[tuple[str, Envelope[Any]]]) -> list[DispatchResult]:
        """As `dispatch`, for a batch."""
        for topic, envelope in messages:
            if type(topic) is not str or not topic.strip() or not isinstance(envelope, Envelope):
                self._checked(topic, envelope)
        return await self._sender.send_many(messages)

    async def consume(
        self, name: str, topics: str = "**", *, delivery: Delivery | None = None, start: Start | None = None
    ) -> Reader:
        """Read durable messages in this process."""
        check_id("name", name)
        return await RemoteReader(self.remote_keeper(), name, topics, delivery or Delivery(), start).open()

    def remote_keeper(self) -> RemoteKeeper:
        """The way to the keeper of the journal."""
        journal = self.settings.journal
        if journal is None:
            raise InvalidState(NO_JOURNAL)
        if self._remote_keeper is None:
            self._remote_keeper = RemoteKeeper(self.name, journal.patience_seconds)
        return self._remote_keeper

    def _keeper(self) -> Keeper:
        return self.remote_keeper()

    def use(self, table: RouteTable, journal: JournalSettings | None) -> None:
        """Route by another table from now on, and keep what is durable in this journal."""
        self._sender.table = table
        if journal != self.settings.journal:
            self.settings = self.settings.model_copy(update={"journal": journal})
            self._remote_keeper = None

"""Publishing: accepted at once, delivered later. Filters, subscribers, the queue, and a receipt."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from raydispatch.bus.durable import Keeper
from raydispatch.bus.filters import Filter, passes
from raydispatch.bus.intake import Message, delivering
from raydispatch.bus.lane import Lane
from raydispatch.bus.pubsub import Subscriptions
from raydispatch.bus.sending import Fault, Sender, nobody
from raydispatch.delivery.backpressure import QueueCounts, Verdict
from raydispatch.dispatch.clock import Clock
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Receipt
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode, InvalidParameter, JournalUnavailable
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import category_of
from raydispatch.settings import EngineSettings

OnResult = Callable[[DispatchResult], None]
OnPressure = Callable[[bool], None]

HANDLER_WAIT_SECONDS = 0.3
"""How long a handler that publishes may wait for room, where others wait as long as it takes."""

# In Python 3.11, to read a member from its class takes 0.1 µs.
_ACCEPTED, _ROUTED = Verdict.ACCEPTED, DispatchStatus.ROUTED

_REFUSALS = {
    Verdict.QUEUE_FULL: Fault(DispatchStatus.REJECTED, ErrorCode.QUEUE_FULL, "The queue is full."),
    Verdict.RATE_LIMITED: Fault(
        DispatchStatus.REJECTED, ErrorCode.RATE_LIMITED, "The queue is filling up, and takes fewer messages for now."
    ),
    Verdict.CLOSED: Fault(DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN, "The engine is being stopped."),
}
_NO_ROOM = Fault(DispatchStatus.REJECTED, ErrorCode.OUTBOX_FULL, "The outbox has no room.")
_DROPPED = Fault(DispatchStatus.REJECTED, ErrorCode.DROPPED, "It was dropped from the full queue for a newer message.")
_ABANDONED = Fault(DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN, "The engine was stopped before it could be delivered.")


def _sum(counts: Iterable[QueueCounts]) -> QueueCounts:
    return QueueCounts(*map(sum, zip(*counts, strict=True)))


class Publisher:
    """Takes messages that nobody waits for, in as many event loops as publish; each loop has a lane of its own."""

    def __init__(
        self,
        sender: Sender,
        settings: EngineSettings,
        *,
        clock: Clock,
        log: logging.Logger,
        filters: Sequence[Filter],
        subscriptions: Subscriptions,
        on_result: OnResult | None,
        on_pressure: OnPressure | None,
    ) -> None:
        self._sender = sender
        self._settings = settings
        self._clock = clock
        self._log = log
        self._filters = filters
        self._subscriptions = subscriptions
        self._on_result = on_result
        self._on_pressure = on_pressure
        self._is_closed = False
        # For writing to the two below, and for going through the lanes; a loop looks for its own one without.
        self._lock = threading.Lock()
        self._past = QueueCounts(0, 0, 0, 0, 0)
        self._lanes: dict[asyncio.AbstractEventLoop, Lane] = {}

    async def publish(self, topic: str, envelope: Envelope[Any]) -> Receipt:
        """Apply the filters, put into the queue, hand to the subscribers; the receipt says what was accepted."""
        refused = self._held_back(topic, envelope)
        if refused is not None:
            return refused
        category = category_of(topic)
        if self._sender.routes(topic, category, envelope):
            lane = self._lanes.get(asyncio.get_running_loop()) or self._new_lane()
            message = (topic, envelope)
            verdict = await self._put(lane, message) if lane.waits else lane.queue.offer(message)
            if verdict is not _ACCEPTED:
                return self._refused(topic, envelope, _REFUSALS[verdict])
        elif not self._subscriptions.would_deliver(topic):
            return self._refused(topic, envelope, nobody(topic, category, envelope))
        taken = self._subscriptions.deliver(topic, envelope)
        return Receipt(_ROUTED, topic, envelope.message_id, envelope.correlation_id, taken)

    async def publish_durably(self, messages: Sequence[Message], due: float | None, keeper: Keeper) -> list[Receipt]:
        """Accept these when they are safe in the journal; what cannot be costs the others nothing."""
        faults: dict[int, Fault] = {}
        unwanted: dict[tuple[str, str], Fault | None] = {}
        for position, (topic, envelope) in enumerate(messages):
            key = (topic, envelope.message_type)
            if key not in unwanted:
                unwanted[key] = await self._unwanted(topic, envelope, keeper)
            fault = unwanted[key] or self._own_fault(topic, envelope)
            if fault is not None:
                faults[position] = fault
        if faults:
            ready = [position for position in range(len(messages)) if position not in faults]
            kept = await _kept(keeper, [messages[position] for position in ready], due)
            faults |= {ready[position]: fault for position, fault in kept.items()}
        else:
            faults = await _kept(keeper, messages, due)
        return [
            self._kept_receipt(topic, envelope)
            if position not in faults
            else self._refused(topic, envelope, faults[position])
            for position, (topic, envelope) in enumerate(messages)
        ]

    def _kept_receipt(self, topic: str, envelope: Envelope[Any]) -> Receipt:
        taken = self._subscriptions.deliver(topic, envelope)
        # Past the constructor, which would take three times as long.
        values = (_ROUTED, topic, envelope.message_id, envelope.correlation_id, taken, None, None)
        return tuple.__new__(Receipt, values)

    async def _unwanted(self, topic: str, envelope: Envelope[Any], keeper: Keeper) -> Fault | None:
        """What is wrong with all messages of a topic and type; asked once for many."""
        if self._is_closed:
            return _REFUSALS[Verdict.CLOSED]
        category = category_of(topic)
        if category is None:
            return self._sender.fault(topic, category, envelope)
        if self._sender.table.select(topic, category, envelope.message_type):
            return None
        if self._subscriptions.would_deliver(topic) or await keeper.has_reader(topic, envelope.message_type):
            return None
        return nobody(topic, category, envelope)

    def _own_fault(self, topic: str, envelope: Envelope[Any]) -> Fault | None:
        """What is wrong with one message."""
        if self._filters and (held_back := passes(self._filters, envelope)) is not None:
            return _filtered(held_back)
        return self._sender.size_fault(envelope)

    def announce(self, topic: str, payload: object, cause: Envelope[Any] | None = None) -> None:
        """Publish an event of the engine's own, if anybody wants it.

        It goes by the outbox and waits for nothing: a queue that is full must not hold up commands and sessions, nor
        can one who is cancelled be kept from saying so.
        """
        envelope = cause.follow_up(payload, topic) if cause else Envelope(payload, topic=topic)
        is_routed = bool(self._sender.routes(topic, category_of(topic), envelope))
        if not is_routed and not self._subscriptions.would_deliver(topic):
            return
        if self._filters and (held_back := passes(self._filters, envelope)) is not None:
            self._refused(topic, envelope, _filtered(held_back))
        elif is_routed and self._is_closed and asyncio.get_running_loop() not in self._lanes:
            self._refused(topic, envelope, _REFUSALS[Verdict.CLOSED])
        elif is_routed and not self._lane().outbox.offer((envelope,)):
            self._refused(topic, envelope, _NO_ROOM)
        else:
            self._subscriptions.deliver(topic, envelope)

    async def accept_outputs(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """Take what a handler made, all or none; subscribers get it too."""
        heard, sent = [], []
        for envelope in outputs:
            topic, category = envelope.topic, category_of(envelope.topic)
            is_heard = self._subscriptions.would_deliver(topic) and not self._sender.fault(topic, category, envelope)
            if is_heard:
                heard.append(envelope)
            # What nobody takes is sent as well, and ends with a result that says so; what is only heard needs none.
            if not is_heard or self._sender.routes(topic, category, envelope):
                sent.append(envelope)
        if sent and not await self._lane().outbox.accept(sent):
            return False
        for envelope in heard:
            self._subscriptions.deliver(envelope.topic, envelope)
        return True

    async def drain(self) -> None:
        """Wait until everything accepted in this event loop is done."""
        lane = self._lanes.get(asyncio.get_running_loop())
        if lane is not None:
            await lane.drained()

    def close(self) -> None:
        """Accept nothing more, in no event loop; in this one, not even from those who wait for room."""
        self._is_closed = True
        lane = self._lanes.get(asyncio.get_running_loop())
        if lane is not None:
            lane.queue.close()

    def reopen(self) -> None:
        """Accept messages again."""
        self._is_closed = False

    async def stop(self, seconds: float) -> None:
        """Drain this event loop's lane with a deadline; what is left then ends as REJECTED, each with its result."""
        self.close()
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        try:
            if lane is not None:
                await lane.stop(seconds)
        finally:
            with self._lock:
                # Another one who stops it at the same time may have counted it.
                if lane is not None and self._lanes.pop(loop, None) is lane:
                    self._past = _sum((self._past, lane.queue.counts))
            self._forget_closed_loops()

    def counts(self) -> QueueCounts:
        """Of the queues of all event loops, ended ones included."""
        with self._lock:
            return _sum((self._past, *(lane.queue.counts for lane in self._lanes.values())))

    async def _put(self, lane: Lane, message: Message) -> Verdict:
        """Wait for room. A handler waits for a moment only: if all of them waited, nobody would be left to make any."""
        if not delivering.get():
            return await lane.queue.put(message)
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDLER_WAIT_SECONDS):
                return await lane.queue.put(message)
        return lane.queue.offer(message)

    def _lane(self) -> Lane:
        return self._lanes.get(asyncio.get_running_loop()) or self._new_lane()

    def _new_lane(self) -> Lane:
        self._forget_closed_loops()
        lane = Lane(
            self._settings, self._clock, self._sender.deliver, self._tell, self._drop, self._abandon, self._on_pressure
        )
        with self._lock:
            self._lanes[asyncio.get_running_loop()] = lane
        return lane

    def _forget_closed_loops(self) -> None:
        with self._lock:
            lanes = [self._lanes.pop(loop) for loop in list(self._lanes) if loop.is_closed()]
        for lane in lanes:
            # A loop that ended properly has left nothing there; one that was closed with tasks pending has.
            # (Where publishers stand in line too, their futures may complain of the closed loop.)
            with suppress(RuntimeError):
                lane.abandon_all()
            with self._lock:
                self._past = _sum((self._past, lane.queue.counts))

    def _held_back(self, topic: str, envelope: Envelope[Any]) -> Receipt | None:
        """Why a message cannot be accepted at all, if so."""
        if self._is_closed:
            return self._refused_late(topic, envelope)
        if self._filters and (held_back := passes(self._filters, envelope)) is not None:
            return self._refused(topic, envelope, _filtered(held_back))
        fault = self._sender.fault(topic, category_of(topic), envelope)
        return None if fault is None else self._refused(topic, envelope, fault)

    def _drop(self, topic: str, envelope: Envelope[Any]) -> None:
        self._tell(self._sender.refuse(topic, envelope, _DROPPED))

    def _abandon(self, topic: str, envelope: Envelope[Any]) -> None:
        self._tell(self._sender.refuse(topic, envelope, _ABANDONED))

    def _refused_late(self, topic: str, envelope: Envelope[Any]) -> Receipt:
        with self._lock:
            self._past = self._past._replace(rejected=self._past.rejected + 1)
        return self._refused(topic, envelope, _REFUSALS[Verdict.CLOSED])

    def _refused(self, topic: str, envelope: Envelope[Any], fault: Fault) -> Receipt:
        self._sender.refuse(topic, envelope, fault)
        return Receipt(fault.status, topic, envelope.message_id, envelope.correlation_id, 0, fault.code, fault.message)

    def _tell(self, result: DispatchResult) -> None:
        if self._on_result is not None:
            try:
                self._on_result(result)
            except Exception as error:
                self._log.error("on_result failed", extra={"error": describe_exception(error)})


def _filtered(name: str) -> Fault:
    return Fault(DispatchStatus.SKIPPED, ErrorCode.FILTERED, f"The filter {name} held it back.")


async def _kept(keeper: Keeper, messages: Sequence[Message], due: float | None) -> dict[int, Fault]:
    """Keep messages; what is wrong with those that could not be, by position."""
    if not messages:
        return {}
    try:
        await keeper.append(messages, due)
    except InvalidParameter as error:
        if len(messages) == 1:
            return {0: Fault(DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID, str(error))}
        # One of them is no data. Each by itself, at the same time and in order: the others are kept all the same.
        alone = await asyncio.gather(*(_kept(keeper, [message], due) for message in messages))
        return {position: found[0] for position, found in enumerate(alone) if found}
    except JournalUnavailable as error:
        fault = Fault(DispatchStatus.REJECTED, ErrorCode.JOURNAL_UNAVAILABLE, f"It could not be kept: {error}")
        return dict.fromkeys(range(len(messages)), fault)
    return {}

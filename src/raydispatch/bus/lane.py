"""A lane: what one event loop needs to deliver messages that nobody waits for."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from raydispatch.bus.intake import Abandon, Deliver, Intake, Message, Tell
from raydispatch.delivery.backpressure import BoundedQueue
from raydispatch.delivery.outbox import Outbox
from raydispatch.dispatch.clock import Clock
from raydispatch.settings import BackpressureSettings, BackpressureStrategy, EngineSettings


class Lane:
    """The queue of published messages and the outbox, each with its loop.

    They are apart so that handlers can always send on what they made, however full the queue of new messages is.
    """

    def __init__(
        self,
        settings: EngineSettings,
        clock: Clock,
        deliver: Deliver,
        tell: Tell,
        drop: Abandon,
        abandon: Abandon,
        on_pressure: Callable[[bool], None] | None,
    ) -> None:
        self.waits = settings.backpressure.strategy is BackpressureStrategy.WAIT
        self.queue: BoundedQueue[Message] = BoundedQueue(
            settings.backpressure,
            now=clock.now,
            on_drop=lambda message: drop(*message),
            on_pressure=on_pressure,
        )
        self._events = Intake(
            self.queue,
            deliver,
            abandon,
            batch_size=settings.batch_size,
            wait_seconds=settings.batch_wait_seconds,
            concurrency=settings.max_concurrent_deliveries,
            tell=tell,
        )
        outputs: BoundedQueue[Message] = BoundedQueue(BackpressureSettings(capacity=settings.outbox_capacity))
        self._outputs = Intake(
            outputs,
            deliver,
            abandon,
            batch_size=settings.batch_size,
            wait_seconds=0,
            concurrency=settings.max_concurrent_deliveries,
            tell=tell,
        )
        self.outbox = Outbox(outputs, clock)

    async def drained(self) -> None:
        """Wait until both are empty, and nothing runs; outputs may make further outputs."""
        while not (self._events.is_idle and self._outputs.is_idle):
            await self._events.drained()
            await self._outputs.drained()

    async def stop(self, seconds: float) -> None:
        """Take nothing new, wait for the rest that long, then abandon it."""
        self.queue.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.drained(), seconds)
        finally:
            # Both, before anything is awaited: whoever gives up waiting for this must not leave one of them running.
            self._events.cancel()
            self._outputs.cancel()
            await asyncio.gather(self._events.ended(), self._outputs.ended())

    def abandon_all(self) -> None:
        """For when the event loop was closed under it."""
        self._events.abandon_all()
        self._outputs.abandon_all()

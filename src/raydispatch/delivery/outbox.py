"""The outbox: where handlers leave the messages that they made. It is bounded, and holds up no handler for long."""

from collections.abc import Sequence
from typing import Any

from raydispatch.delivery.backpressure import BoundedQueue
from raydispatch.dispatch.clock import Clock
from raydispatch.messages.envelope import Envelope

RETRY_SECONDS = (0.01, 0.05, 0.25)
"""How long to wait for room, from try to try. Never longer: handlers downstream may be waiting for room as well."""


class Outbox:
    """Accepts all outputs of a message, or none."""

    def __init__(self, queue: BoundedQueue[tuple[str, Envelope[Any]]], clock: Clock) -> None:
        self._queue = queue
        self._clock = clock

    def offer(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """Whether there is room now."""
        return self._queue.offer_all([(envelope.topic, envelope) for envelope in outputs])

    async def accept(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """Whether there was room; asked for a few times."""
        for seconds in RETRY_SECONDS:
            if self.offer(outputs):
                return True
            await self._clock.sleep(seconds)
        return self.offer(outputs)

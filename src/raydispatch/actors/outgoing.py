"""Outgoing: what a handler in a replica made, on its way back to the routers."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from raydispatch.actors.gateway import Gateway
from raydispatch.actors.names import NAMESPACE, controller_name
from raydispatch.actors.wire import message_of
from raydispatch.bus.intake import Intake, Message
from raydispatch.delivery.backpressure import BoundedQueue
from raydispatch.delivery.outbox import Outbox
from raydispatch.dispatch.clock import SystemClock
from raydispatch.dispatch.outcome import DispatchResult
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import InvalidParameter, SystemUnavailable
from raydispatch.messages.envelope import REPLY_TO_HEADER, Envelope
from raydispatch.settings import BackpressureSettings, EngineSettings, SystemSettings

# Its own thread: in those of the handlers, it would wait for the slowest.
_finding = ThreadPoolExecutor(1, "raydispatch find")
_log = logging.getLogger("raydispatch")


class Outgoing:
    """The outbox of a replica: bounded, apart from its handlers, emptied through a gateway of its own."""

    def __init__(self, system: str, engine: EngineSettings, settings: SystemSettings) -> None:
        self._system = system
        queue: BoundedQueue[Message] = BoundedQueue(BackpressureSettings(capacity=engine.outbox_capacity))
        self._outbox = Outbox(queue, SystemClock())
        self._gateway = Gateway(settings, lambda: find_routers(system))
        self._intake = Intake(
            queue,
            self._send,
            self._abandon,
            batch_size=engine.batch_size,
            wait_seconds=0,
            concurrency=engine.max_concurrent_deliveries,
        )

    async def accept(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """Take all of them, or none."""
        return await self._outbox.accept(outputs)

    async def drained(self) -> None:
        """Wait until all has been delivered."""
        await self._intake.drained()

    async def _send(self, topic: str, envelope: Envelope[Any]) -> DispatchResult | None:
        try:
            message = message_of(topic, envelope)
        except InvalidParameter as error:
            self._lost(topic, envelope, str(error))
            return None
        result = await self._gateway.send(message)
        if result.is_error() and not result.outcomes:  # No dispatcher has seen it, to log and bury it.
            self._lost(topic, envelope, result.error_message)
        asker = envelope.headers.get(REPLY_TO_HEADER)
        if asker is not None and result.reply is not None:
            try:
                controller = await _find_controller(self._system)
                await controller.deliver_reply.remote(asker, envelope.correlation_id, result.reply)
            except Exception as error:
                fields = {"topic": topic, "correlation_id": str(envelope.correlation_id)}
                _log.error("reply not delivered", extra={"error": describe_exception(error), **fields})
        return result

    def _abandon(self, topic: str, envelope: Envelope[Any]) -> None:
        self._lost(topic, envelope, "the replica was stopped")

    def _lost(self, topic: str, envelope: Envelope[Any], reason: str | None) -> None:
        fields = {"topic": topic, "correlation_id": str(envelope.correlation_id)}
        _log.error("output not delivered", extra={"error": reason, **fields})


async def find_routers(system: str) -> Sequence[tuple[str, Any]]:
    """Ask the controller of a system, wherever it is now."""
    try:
        controller = await _find_controller(system)
    except ValueError:
        raise SystemUnavailable(f"There is no system '{system}' on this Ray cluster.") from None
    routers: Sequence[tuple[str, Any]] = await controller.routers.remote()
    return routers


async def _find_controller(system: str) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_finding, ray.get_actor, controller_name(system), NAMESPACE)

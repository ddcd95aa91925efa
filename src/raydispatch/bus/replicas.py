"""Endpoints: the replicas of a dispatcher, which can join, be found and leave while messages flow."""

import asyncio
from collections.abc import Mapping

from raydispatch.dispatch.dispatcher import Dispatcher
from raydispatch.dispatch.endpoints import EndpointInfo
from raydispatch.dispatch.handler import Handler, HandlerSource
from raydispatch.dispatch.registry import check_id
from raydispatch.errors import DuplicateRegistration, NotRegistered


class EndpointRegistry:
    """The endpoints of an engine's dispatchers.

    Example: `await engine.endpoints.join("billing", SecondBilling, "billing-eu")`.
    """

    def __init__(self, dispatchers: Mapping[str, Dispatcher], drain_seconds: float) -> None:
        self._dispatchers = dispatchers
        self._drain_seconds = drain_seconds

    async def join(self, dispatcher_id: str, source: HandlerSource, endpoint_id: str) -> None:
        """Start one more handler of a dispatcher; from now on it shares its messages."""
        check_id("endpoint_id", endpoint_id)
        handler = Handler(source)
        endpoints = self._of(dispatcher_id).endpoints
        await handler.start()
        try:
            endpoints.join(endpoint_id, handler)
        except DuplicateRegistration:
            await handler.stop()
            raise

    async def leave(self, dispatcher_id: str, endpoint_id: str) -> None:
        """Give it no more messages, wait for those it has, and stop it."""
        await self._of(dispatcher_id).retire(endpoint_id, self._drain_seconds)

    def find(self, dispatcher_id: str | None = None) -> list[EndpointInfo]:
        """All endpoints, or those of one dispatcher, with their health."""
        found = self._dispatchers.values() if dispatcher_id is None else [self._of(dispatcher_id)]
        return [info for dispatcher in found for info in dispatcher.endpoints.find()]

    async def check_health(self) -> None:
        """Ask every endpoint how it is, now."""
        await asyncio.gather(*(dispatcher.check_health() for dispatcher in self._dispatchers.values()))

    def _of(self, dispatcher_id: str) -> Dispatcher:
        if dispatcher_id not in self._dispatchers:
            raise NotRegistered("dispatcher", dispatcher_id)
        return self._dispatchers[dispatcher_id]

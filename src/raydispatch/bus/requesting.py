"""Requests: send a message, and wait for the reply that somebody gives under its correlation id."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from raydispatch.bus.correlation import Correlations
from raydispatch.dispatch.outcome import DispatchResult, Reply
from raydispatch.errors import CorrelationError, InvalidParameter, RequestFailed
from raydispatch.messages.envelope import Envelope

Send = Callable[[str, Envelope[Any]], Awaitable[DispatchResult]]


class Requester:
    """Joins the sending of requests with the replies that come for them."""

    def __init__(self, default_timeout_seconds: float, log: logging.Logger) -> None:
        self.correlations = Correlations()
        self._default = default_timeout_seconds
        self._log = log
        self._running: set[asyncio.Task[DispatchResult]] = set()

    async def request(self, send: Send, topic: str, envelope: Envelope[Any], timeout: float | None) -> Reply:
        """The reply; or `RequestTimeout`, `RequestFailed` with the result, `ChannelClosed`.

        A message under way when the time is up goes on: its reply is late, and is logged. If the caller is cancelled,
        so is the message.
        """
        seconds = self._default if timeout is None else timeout
        if not seconds > 0:
            raise InvalidParameter(f"timeout must be above 0 seconds, not {timeout!r}.")
        waiting = self.correlations.open(envelope.correlation_id, seconds)
        sending = asyncio.ensure_future(send(topic, envelope))
        self._running.add(sending)
        sending.add_done_callback(self._running.discard)
        sending.add_done_callback(lambda done: _fail_if_hopeless(waiting, done, envelope))
        try:
            return await waiting
        except asyncio.CancelledError:
            sending.cancel()
            raise

    def close(self) -> None:
        """Tell all who wait that there will be no reply, and end what they have sent."""
        self.correlations.close()
        for sending in list(self._running):
            # It may belong to another thread's event loop, which may be closed by now.
            with suppress(RuntimeError):
                sending.get_loop().call_soon_threadsafe(sending.cancel)

    def replied(self, envelope: Envelope[Any], reply: Reply) -> None:
        """A handler has replied. If nobody has asked, then it was `execute` or `dispatch`: the result has the reply."""
        correlation_id = envelope.correlation_id
        if not self.correlations.knows(correlation_id):
            return
        try:
            self.correlations.resolve(correlation_id, reply)
        except CorrelationError as error:
            self._log.warning(
                "reply not delivered",
                extra={"error_code": error.error_code.value, "correlation_id": str(correlation_id)},
            )


def _fail_if_hopeless(
    waiting: "asyncio.Future[Reply]", done: "asyncio.Task[DispatchResult]", envelope: Envelope[Any]
) -> None:
    """A message that failed will have no reply. One that succeeded without may get it from further down the chain."""
    if done.cancelled():
        waiting.cancel()
        return
    error = done.exception()  # Looked at in any case, so that asyncio does not complain of it.
    if waiting.done():
        return
    if error is not None:
        waiting.set_exception(error)
    elif done.result().is_error():
        waiting.set_exception(RequestFailed(envelope.correlation_id, done.result()))

"""Middleware: what runs around everything that a dispatcher does for one message, once per dispatcher and message."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from raydispatch.dispatch.handler import HandlerOutput
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import Envelope

Process: TypeAlias = Callable[[Envelope[Any], str | None], Awaitable[Outcome]]
"""Takes a message and the id of the route that led it here, and says how it ended."""

Read: TypeAlias = Callable[[object, Envelope[Any]], Awaitable[Outcome]]
"""Makes an outcome of what a handler may return."""

_log = logging.getLogger("raydispatch")


class Next:
    """The rest of the way: the middleware further in, and then the dispatcher itself. It does not raise.

    Example: `outcome = await next(envelope)`.
    """

    __slots__ = ("_process", "_route_id", "dispatcher_id", "outcome")

    def __init__(self, dispatcher_id: str, process: Process, route_id: str | None) -> None:
        self.dispatcher_id = dispatcher_id
        self.outcome: Outcome | None = None
        """How the last call ended; None before there is one."""
        self._process = process
        self._route_id = route_id

    async def __call__(self, envelope: Envelope[Any]) -> Outcome:
        """Go on with this envelope, which need not be the one that came."""
        self.outcome = outcome = await self._process(envelope, self._route_id)
        return outcome


class Middleware(Protocol):
    """A function, or an object to call, that sees a message before the payload check, the breaker and all tries.

    It may pass on another envelope, look at the outcome, return another one, or answer in the dispatcher's place: with
    an outcome, or with what a handler might return. A None behind a call of `next` means the outcome of that call, so
    that a forgotten `return` does not make a success of a failure.
    """

    async def __call__(self, envelope: Envelope[Any], next: Next, /) -> Outcome | HandlerOutput:  # noqa: A002
        """See one message through."""


def chain(middleware: Sequence[Middleware], dispatcher_id: str, last: Process, read: Read) -> Process:
    """All of them around `last`, the first one outermost."""
    process = last
    for one in reversed(middleware):
        process = _Link(one, dispatcher_id, process, read).process
    return process


class _Link:
    """One middleware of a chain. Made once; a message only adds a `Next`, which carries its route."""

    __slots__ = ("_dispatcher_id", "_following", "_middleware", "_read")

    def __init__(self, middleware: Middleware, dispatcher_id: str, following: Process, read: Read) -> None:
        self._middleware = middleware
        self._dispatcher_id = dispatcher_id
        self._following = following
        self._read = read

    async def process(self, envelope: Envelope[Any], route_id: str | None) -> Outcome:
        started = perf_counter()
        following = Next(self._dispatcher_id, self._following, route_id)
        try:
            returned = await self._middleware(envelope, following)
            if returned is None and following.outcome is not None:
                returned = following.outcome
            outcome = returned if isinstance(returned, Outcome) else await self._read(returned, envelope)
        except Exception as error:
            return self._failure(error, envelope, route_id, following.outcome, started)
        if outcome.route_id != route_id or outcome.dispatcher_id != self._dispatcher_id:
            # Results, metrics and dead letters go by these two, whatever a middleware has put together or stored.
            return outcome._replace(dispatcher_id=self._dispatcher_id, route_id=route_id)
        return outcome

    def _failure(
        self, error: Exception, envelope: Envelope[Any], route_id: str | None, before: Outcome | None, started: float
    ) -> Outcome:
        message = describe_exception(error)
        _log.error(
            "middleware failed",
            extra={
                "dispatcher_id": self._dispatcher_id,
                "correlation_id": str(envelope.correlation_id),
                "middleware": getattr(self._middleware, "__qualname__", type(self._middleware).__qualname__),
                "error": message,
            },
        )
        return Outcome(
            self._dispatcher_id,
            DispatchStatus.DISPATCHER_ERROR,
            route_id,
            # The handler may well have run before the middleware failed.
            attempts=before.attempts if before is not None else 0,
            duration_ms=(perf_counter() - started) * 1000.0,
            error_code=ErrorCode.MIDDLEWARE_EXCEPTION,
            error_type=type(error).__name__,
            error_message=message,
        )

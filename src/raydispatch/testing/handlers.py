"""Handlers for tests: one that remembers, and one that fails as planned."""

from collections.abc import Awaitable
from typing import Any, TypeAlias

from raydispatch.dispatch.handler import Handle, Handler, HandlerOutput
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.testing.tally import Tally
from raydispatch.testing.wrapping import signature_for

Planned: TypeAlias = BaseException | type[BaseException]
"""What is to be raised."""

PLANNED_FAILURE = RuntimeError("planned failure")


class RecordingHandler:
    """Remembers the envelopes that it gets, one for each try, and returns what it was told to.

    `returns` is an output, or a function of the envelope that makes one.

    Example: `engine.register_dispatcher("billing", recorder, MessageCategory.EVENT)`, then `recorder.payloads`.
    """

    def __init__(self, returns: HandlerOutput | Handle = None) -> None:
        self.returns = returns
        self.envelopes: list[Envelope[Any]] = []
        self._calls = Tally()

    @property
    def payloads(self) -> list[Any]:
        """What was in the envelopes."""
        return [envelope.payload for envelope in self.envelopes]

    async def wait_for(self, count: int, limit_seconds: float = 5) -> None:
        """Wait until it has had at least so many."""
        await self._calls.wait_for(count, limit_seconds, "messages")

    async def __call__(self, envelope: Envelope[Any]) -> HandlerOutput:
        """Remember it."""
        self.envelopes.append(envelope)
        self._calls.add()
        return await _output_of(self.returns, envelope) if callable(self.returns) else self.returns


class FailingHandler:
    """Fails the first `times` calls, or always; afterwards it does what `then` does, a function of the envelope.

    Payloads are checked as the annotation of `then` asks for.

    Example: `FailingHandler(times=2, error=ConnectionError("down"), then=bill)`.
    """

    def __init__(self, times: int | None = None, error: Planned = PLANNED_FAILURE, then: Handle | None = None) -> None:
        self.times = times
        self.error = error
        self.then = then
        self._calls = Tally()
        if then is not None:
            handler = Handler(then)
            if handler.call is None:
                raise InvalidParameter(f"'then' must be a function of one envelope; not {then!r}.")
            self.__signature__ = signature_for(handler.payload_type)

    @property
    def calls(self) -> int:
        """How often it was called."""
        return self._calls.count

    async def wait_for(self, count: int, limit_seconds: float = 5) -> None:
        """Wait until it was called at least so often."""
        await self._calls.wait_for(count, limit_seconds, "calls")

    async def __call__(self, envelope: Envelope[Any]) -> HandlerOutput:
        """Fail, or do what comes then."""
        number = self._calls.add()
        if self.times is None or number <= self.times:
            raise to_raise(self.error)
        return None if self.then is None else await _output_of(self.then, envelope)


def to_raise(error: Planned) -> BaseException:
    """The exception, as if it had never been raised before: tracebacks pile up on one that is raised again."""
    return error() if isinstance(error, type) else error.with_traceback(None)


async def _output_of(function: Handle, envelope: Envelope[Any]) -> HandlerOutput:
    output = function(envelope)
    return await output if isinstance(output, Awaitable) else output

"""A dispatcher: a handler with its own circuit breaker, retries and time limit. One message in, one outcome out."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from raydispatch.dispatch.breaker import CircuitBreaker, CircuitState
from raydispatch.dispatch.clock import Clock, SystemClock
from raydispatch.dispatch.endpoints import Endpoint, Endpoints
from raydispatch.dispatch.handler import Handler, HandlerSource, PayloadMisfit, run_in_thread
from raydispatch.dispatch.middleware import Middleware, chain
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome
from raydispatch.dispatch.outputs import Outputs, read_output
from raydispatch.dispatch.retry import retry_delay
from raydispatch.dispatch.sanitize import describe_exception, sanitize
from raydispatch.dispatch.time_limit import TimeLimit, TimeLimitExpired
from raydispatch.errors import EndpointLost, ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, Delivery, PoisonPolicy, RetrySettings

MOST_UNPUBLISHED = 1_000
"""Messages of a dispatcher whose outputs are kept for another try."""


@dataclass(frozen=True)
class DispatcherSpec:
    """What is registered: a handler, what it takes, and how it is guarded."""

    dispatcher_id: str
    source: HandlerSource
    category: MessageCategory
    message_types: frozenset[str] | None = None
    breaker: BreakerSettings | None = field(default_factory=BreakerSettings)
    retry: RetrySettings | None = field(default_factory=RetrySettings)
    time_limit_seconds: float | None = None
    replicas: int = 1
    batch: bool = False
    """Whether the handler takes an Arrow table of all messages that run at the same time."""
    node_kind: str | None = None
    # Of what comes from the journal, and goes out:
    delivery: Delivery = field(default_factory=Delivery)
    """How durable messages are brought to its replicas."""
    poison: PoisonPolicy = PoisonPolicy.DEAD_LETTER
    """What happens to a durable message that failed on every try."""
    outputs: str = "engine"
    """Where outputs go: back into the "engine", to the "journal", or to NATS subjects at nats://host:4222."""
    # Of each replica on Ray:
    concurrency: int = 100
    """Handlers that run at once."""
    max_in_flight: int = 10_000
    """Messages accepted and not done."""
    reject_when_full: bool = False
    """Whether a message beyond that ends as REJECTED, or its sender waits."""
    at_most_once: bool = False
    """Whether a message that may have run is never sent again."""
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    scheduling_strategy: Any = None


# In Python 3.11, to read a member from its class takes 0.1 µs.
_SUCCESS = DispatchStatus.SUCCESS

Publish: TypeAlias = Callable[[Sequence[Envelope[Any]]], Awaitable[bool]]
"""Hands outputs to the outbox; False if it has no room."""
Call: TypeAlias = Callable[[Handler, Any], Awaitable[object]]
"""Calls a handler with what is to be handled."""
Read: TypeAlias = Callable[[Any, Any], Any]
"""Makes sense of what a handler returned for that; a `Failure`, if it makes none."""


class Dispatcher:
    """Runs the handler of one spec. Every trouble that a message can cause ends in the outcome; nothing is raised."""

    def __init__(
        self,
        spec: DispatcherSpec,
        *,
        clock: Clock | None = None,
        logger: logging.Logger | None = None,
        slow_sync_handler_seconds: float = 0.1,
        middleware: Sequence[Middleware] = (),
        publish: Publish | None = None,
        max_hops: int = 16,
        health_seconds: float = 5.0,
        breaker: CircuitBreaker | None = None,
        origin: str | None = None,
    ) -> None:
        self.spec = spec
        self._id = spec.dispatcher_id
        self._origin = origin or self._id
        """What the ids of its outputs are derived from: of two dispatchers with one id, a session's has another."""
        self._clock = clock or SystemClock()
        self._log = logger or logging.getLogger("raydispatch")
        self._slow_seconds = slow_sync_handler_seconds
        self.tries = spec.retry.tries if spec.retry else 1
        self._limit = TimeLimit(spec.time_limit_seconds) if spec.time_limit_seconds else None
        self._publish = publish
        self._max_hops = max_hops
        self._health_seconds = health_seconds
        self._checked_at = self._clock.now()
        self.endpoints: Endpoints[Handler] = Endpoints(self._id, now=self._clock.now)
        for number in range(1, spec.replicas + 1):
            self.endpoints.join(f"{self._id}-{number}", Handler(spec.source, batch=spec.batch))
        self._payload = Handler(spec.source, batch=spec.batch)
        self.breaker = breaker
        if breaker is None and spec.breaker is not None:
            self.breaker = CircuitBreaker(spec.breaker, now=self._clock.now, on_change=self.log_circuit)
        self.run = chain(middleware, self._id, self.process, self.read)
        """`process`, with the middleware around it."""
        self.run_once = chain(middleware, self._id, partial(self.process, tries=1), self.read)
        """The same without further tries: for those who try again themselves."""
        self._unpublished: dict[UUID, Outputs] = {}
        """What handlers made that found no way out: when their messages come again, only that is tried again."""

    async def process(self, envelope: Envelope[Any], route_id: str | None = None, tries: int | None = None) -> Outcome:
        """Check the payload, run the handler under the breaker, try again where that helps, and say how it ended."""
        started = perf_counter()
        if self._unpublished and (outputs := self._unpublished.pop(envelope.message_id, None)) is not None:
            return await self._succeeded(outputs, envelope, route_id, 0, started)
        try:
            envelope = self._payload.checked(envelope)
        except Exception as error:
            return self._failure(_misfit(error), envelope, route_id, 0, started)
        attempt = 0
        failure: Failure | None = None
        breaker = self.breaker
        while True:
            permit = breaker.admit() if breaker is not None else None
            if permit is None and breaker is not None:
                # Between two tries, the failure that did happen says more than a refusal.
                return self._failure(failure or REFUSED, envelope, route_id, attempt, started)
            attempt += 1
            try:
                ended = await self.attempt(envelope, self._call, self._read)
            except BaseException:
                if breaker is not None and permit is not None:
                    breaker.withdrawn(permit)
                raise
            if not isinstance(ended, Failure):
                if breaker is not None and permit is not None:
                    breaker.succeeded(permit)
                if ended is None:
                    duration = (perf_counter() - started) * 1000.0
                    return Outcome(self._id, _SUCCESS, route_id, (), attempt, duration)
                return await self._succeeded(ended, envelope, route_id, attempt, started)
            failure = ended
            if breaker is not None and permit is not None:
                breaker.failed(permit) if failure.counts else breaker.succeeded(permit)
            if not failure.counts or attempt >= (tries or self.tries):
                return self._failure(failure, envelope, route_id, attempt, started)
            await self._pause(failure, envelope, attempt)
            envelope = envelope.with_attempt(envelope.attempt + 1)

    async def read(self, output: object, envelope: Envelope[Any]) -> Outcome:
        """The outcome of a message that a middleware answered in the handler's place."""
        started = perf_counter()
        ended = self._read(output, envelope)
        if isinstance(ended, Failure):
            return self._failure(ended, envelope, None, 0, started)
        return await self._succeeded(ended or Outputs(), envelope, None, 0, started)

    async def check_health(self) -> None:
        """Ask every endpoint how it is; those that do not answer get no messages until they do."""
        self._checked_at = self._clock.now()
        await self.endpoints.check(Handler.is_healthy, self._health_seconds)

    async def start(self) -> None:
        """Build and start the handler of every endpoint."""
        for endpoint in self.endpoints.all():
            await endpoint.target.start()

    async def stop(self) -> None:
        """Stop the handlers that were started."""
        for endpoint in self.endpoints.all():
            await self._stop(endpoint.target)

    async def idle(self) -> None:
        """Wait until no call is under way."""
        await asyncio.gather(*(self.endpoints.drained(endpoint) for endpoint in self.endpoints.all()))

    async def stop_when_idle(self, seconds: float) -> None:
        """Let its calls end, for so long; then stop the handlers."""
        await asyncio.gather(*(self.retire(endpoint.endpoint_id, seconds) for endpoint in self.endpoints.all()))

    async def retire(self, endpoint_id: str, seconds: float) -> None:
        """Give an endpoint no more messages, let its calls end for so long, and stop its handler."""
        endpoint = self.endpoints.leave(endpoint_id)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.endpoints.drained(endpoint), seconds)
        finally:
            await self._stop(endpoint.target)

    async def _stop(self, handler: Handler) -> None:
        try:
            await handler.stop()
        except Exception as error:
            # Without the traceback, whose last line would be the exception's own words.
            fields = {"dispatcher_id": self._id, "error": describe_exception(error)}
            self._log.error("stop failed", extra=fields)

    async def _succeeded(
        self, outputs: Outputs, envelope: Envelope[Any], route_id: str | None, attempts: int, started: float
    ) -> Outcome:
        """Send the outputs on; only when the outbox has them is the message done."""
        topics = outputs.topics
        if self._publish is not None and outputs.envelopes:
            failure = await self._sent_on(outputs.envelopes, self._publish)
            if failure is not None:
                if failure.code is ErrorCode.OUTBOX_FULL:
                    self._remember(envelope.message_id, outputs)
                outcome = self._failure(failure, envelope, route_id, attempts, started)
                return outcome._replace(outputs=topics, reply=outputs.reply)
        duration = (perf_counter() - started) * 1000.0
        return Outcome(self._id, _SUCCESS, route_id, topics, attempts, duration, reply=outputs.reply)

    def holds(self, message_id: UUID) -> bool:
        """Whether its handler has run, and what it made waits to be published."""
        return message_id in self._unpublished

    def _remember(self, message_id: UUID, outputs: Outputs) -> None:
        while len(self._unpublished) >= MOST_UNPUBLISHED:
            del self._unpublished[next(iter(self._unpublished))]
        self._unpublished[message_id] = outputs

    async def _sent_on(self, outputs: Sequence[Envelope[Any]], publish: Publish) -> "Failure | None":
        if any(envelope.hops > self._max_hops for envelope in outputs):
            return Failure(
                DispatchStatus.PUBLISH_FAILED, ErrorCode.HOP_LIMIT, None,
                f"its output would be hop {self._max_hops + 1} of a chain; {self._max_hops} are allowed",
            )  # fmt: skip
        try:
            is_published = await publish(outputs)
        except InvalidParameter as error:
            # It can go nowhere, now or later.
            return Failure(
                DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_RESULT, None, f"its output: {error}", counts=False
            )
        if not is_published:
            return Failure(
                DispatchStatus.PUBLISH_FAILED, ErrorCode.OUTBOX_FULL, None, "the outbox had no room for its output"
            )
        return None

    async def attempt(self, subject: Any, call: "Call", read: "Read") -> Any:
        """One try: what was read from the handler's output, None if it had none, or a `Failure`.

        An endpoint that is lost uses up no try: the next one takes the subject, which is an envelope or a table.
        """
        endpoint = self.endpoints.pick() or await self._revived()
        while endpoint is not None:
            self.endpoints.begun(endpoint)
            try:
                return await self._attempt_at(endpoint, subject, call, read)
            except EndpointLost:
                self.endpoints.quarantine(endpoint.endpoint_id)
            finally:
                self.endpoints.ended(endpoint)
            endpoint = self.endpoints.pick()
        return Failure(
            DispatchStatus.DISPATCHER_ERROR, ErrorCode.NO_HEALTHY_ENDPOINT, None, "none of its endpoints is healthy"
        )

    async def _revived(self) -> Endpoint[Handler] | None:
        """With no healthy endpoint left, ask them now, if that was not done a moment ago."""
        if self._clock.now() - self._checked_at >= self._health_seconds:
            await self.check_health()
        return self.endpoints.pick()

    async def _attempt_at(self, endpoint: Endpoint[Handler], subject: Any, call: "Call", read: "Read") -> Any:
        handler = endpoint.target
        if handler.call is None:
            try:
                await handler.start()
            except (Exception, asyncio.CancelledError) as error:
                _check_not_cancelled(error)
                if self.endpoints.pick(excluding=(endpoint.endpoint_id,)) is not None:
                    raise EndpointLost from error
                return Failure.of(error, ErrorCode.START_FAILED)
        try:
            if self._limit is None:
                output = await call(handler, subject)
            else:
                with self._limit.call():
                    output = await call(handler, subject)
        except TimeLimitExpired:
            return Failure(
                DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, "TimeoutError",
                f"it ran longer than its limit of {self.spec.time_limit_seconds:g} s",
            )  # fmt: skip
        except EndpointLost:
            raise
        except (Exception, asyncio.CancelledError) as error:
            _check_not_cancelled(error)
            return Failure.of(error, ErrorCode.HANDLER_EXCEPTION)
        return None if output is None else read(output, subject)

    def _read(self, output: object, envelope: Envelope[Any]) -> "Outputs | Failure | None":
        if isinstance(output, DispatchResult):
            if not output.status.is_successful():
                return _of_result(output)
            output = list(output.outputs or ())
        try:
            return read_output(output, envelope, self._origin)
        except InvalidParameter as fault:
            # The handler did its work: running it again would do it twice.
            return Failure(DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_RESULT, None, str(fault), counts=False)

    def _call(self, handler: Handler, envelope: Envelope[Any]) -> Awaitable[object]:
        call: Callable[[Envelope[Any]], Any] | None = handler.call
        if call is None:
            raise RuntimeError("the dispatcher was stopped while a message was on its way to it")
        return call(envelope) if handler.is_async else self._call_in_thread(call, envelope)

    async def _call_in_thread(self, call: Callable[[Envelope[Any]], Any], envelope: Envelope[Any]) -> object:
        started = perf_counter()
        output = await run_in_thread(call, envelope)
        seconds = perf_counter() - started
        if seconds > self._slow_seconds:
            self._log.warning(
                "slow sync handler: write it as async, or give it more threads",
                extra={"duration_ms": seconds * 1000.0, **self._fields(envelope)},
            )
        return await output if inspect.isawaitable(output) else output

    async def _pause(self, failure: "Failure", envelope: Envelope[Any], attempt: int) -> None:
        await self.pause(attempt, {"error": failure.message, **self._fields(envelope)})

    async def pause(self, attempt: int, fields: Mapping[str, object]) -> None:
        """Wait, after a try that failed and before the next one."""
        assert self.spec.retry is not None  # Without it there is one try, and nothing to wait for.
        delay = retry_delay(self.spec.retry, attempt)
        self._log.debug(
            "dispatcher failed, will be tried again", extra={"attempt": attempt, "delay_seconds": delay, **fields}
        )
        await self._clock.sleep(delay)

    def _failure(
        self, failure: "Failure", envelope: Envelope[Any], route_id: str | None, attempts: int, started: float
    ) -> Outcome:
        duration = (perf_counter() - started) * 1000.0
        level = logging.ERROR if failure.status.is_error() and failure is not REFUSED else logging.DEBUG
        if self._log.isEnabledFor(level):
            self._log.log(
                level,
                "dispatcher did not succeed",
                extra={
                    "status": failure.status.value, "error_code": failure.code.value, "error": failure.message,
                    "where": failure.where, "attempts": attempts, "duration_ms": duration, **self._fields(envelope),
                },
            )  # fmt: skip
        return Outcome(
            self._id, failure.status, route_id, (), attempts, duration, failure.code, failure.kind, failure.message
        )

    def _fields(self, envelope: Envelope[Any]) -> dict[str, object]:
        return {
            "dispatcher_id": self._id,
            "topic": envelope.topic,
            "message_type": envelope.message_type,
            "correlation_id": str(envelope.correlation_id),
            "trace_id": envelope.trace_id,
        }

    def log_circuit(self, state: CircuitState) -> None:
        """Tell the log that the circuit has changed."""
        level = logging.WARNING if state is CircuitState.OPEN else logging.INFO
        self._log.log(level, f"circuit {state.replace('_', ' ')}", extra={"dispatcher_id": self._id})


class Failure(NamedTuple):
    """Why an attempt did not succeed."""

    status: DispatchStatus
    code: ErrorCode
    kind: str | None
    message: str
    where: str | None = None
    counts: bool = True
    """Whether it says something about the handler's health, and another try may help."""

    @classmethod
    def of(cls, error: BaseException, code: ErrorCode) -> "Failure":
        """An exception, in words."""
        message = describe_exception(error)
        return cls(DispatchStatus.DISPATCHER_ERROR, code, type(error).__name__, message, _where(error))


REFUSED = Failure(
    DispatchStatus.CIRCUIT_OPEN, ErrorCode.CIRCUIT_OPEN, None, "its circuit breaker is open: the handler was not called"
)


def _misfit(error: Exception) -> Failure:
    """The payload does not fit; or a validator of the program's own broke, whose words may show the payload."""
    kind = "ValidationError" if isinstance(error, PayloadMisfit) else type(error).__name__
    words = str(error) if isinstance(error, PayloadMisfit) else f"its payload could not be checked: {kind}"
    return Failure(DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID, kind, words, _where(error))


def _check_not_cancelled(error: BaseException) -> None:
    """Raise again if somebody has cancelled this task. If not, its handler has waited for something that was, and that
    is a failure like any other."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
        raise error


def _of_result(result: DispatchResult) -> Failure:
    """A dispatcher of the protocol may judge for itself; its word is taken, sanitized."""
    message = sanitize(result.error_message or f"it returned the status {result.status}")
    code = result.error_code or ErrorCode.HANDLER_RESULT
    # A message left out on purpose is no fault, and would be left out again.
    return Failure(result.status, code, None, message, counts=result.status.is_error())


def _where(error: BaseException) -> str | None:
    """File, line and function that raised: what a reader of the log needs, and no value that could be a secret."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"

"""A dispatcher: a handler with its own circuit breaker, retries and time limit. One message in, one outcome out."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from raydispatch.dispatch.breaker import CircuitBreaker, CircuitState
from raydispatch.dispatch.clock import Clock, SystemClock
from raydispatch.dispatch.handler import Handler, HandlerSource, PayloadMisfit, run_in_thread
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome
from raydispatch.dispatch.retry import retry_delay
from raydispatch.dispatch.sanitize import describe_exception, sanitize
from raydispatch.dispatch.time_limit import TimeLimit, TimeLimitExpired
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, RetrySettings


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
    node_kind: str | None = None


class Dispatcher:
    """Runs the handler of one spec. Every trouble that a message can cause ends in the outcome; nothing is raised."""

    def __init__(
        self,
        spec: DispatcherSpec,
        *,
        clock: Clock | None = None,
        logger: logging.Logger | None = None,
        slow_sync_handler_seconds: float = 0.1,
    ) -> None:
        self.spec = spec
        self._id = spec.dispatcher_id
        self._clock = clock or SystemClock()
        self._log = logger or logging.getLogger("raydispatch")
        self._slow_seconds = slow_sync_handler_seconds
        self._tries = spec.retry.tries if spec.retry else 1
        self._limit = TimeLimit(spec.time_limit_seconds) if spec.time_limit_seconds else None
        self.handler = Handler(spec.source)
        self.breaker = (
            CircuitBreaker(spec.breaker, now=self._clock.now, on_change=self._log_circuit) if spec.breaker else None
        )

    async def process(self, envelope: Envelope[Any], route_id: str | None = None) -> Outcome:
        """Check the payload, run the handler under the breaker, try again where that helps, and say how it ended."""
        started = perf_counter()
        try:
            envelope = self.handler.checked(envelope)
        except PayloadMisfit as misfit:
            return self._failure(
                _Failure(DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID, "ValidationError", str(misfit)),
                envelope, route_id, 0, started,
            )  # fmt: skip
        attempt = 0
        failure: _Failure | None = None
        while True:
            permit = self.breaker.admit() if self.breaker is not None else None
            if permit is None and self.breaker is not None:
                # Between two tries, the failure that did happen says more than a refusal.
                return self._failure(failure or _REFUSED, envelope, route_id, attempt, started)
            attempt += 1
            try:
                ended = await self._attempt(envelope)
            except BaseException:
                if self.breaker is not None and permit is not None:
                    self.breaker.withdrawn(permit)
                raise
            if not isinstance(ended, _Failure):
                if self.breaker is not None and permit is not None:
                    self.breaker.succeeded(permit)
                duration = (perf_counter() - started) * 1000.0
                return Outcome(self._id, DispatchStatus.SUCCESS, route_id, ended, attempt, duration)
            failure = ended
            if self.breaker is not None and permit is not None:
                self.breaker.failed(permit) if failure.counts else self.breaker.succeeded(permit)
            if not failure.counts or attempt >= self._tries:
                return self._failure(failure, envelope, route_id, attempt, started)
            await self._pause(failure, envelope, attempt)
            envelope = envelope.with_attempt(envelope.attempt + 1)

    async def _attempt(self, envelope: Envelope[Any]) -> "tuple[str, ...] | _Failure":
        handler = self.handler
        if handler.call is None:
            try:
                await handler.start()
            except Exception as error:
                return _Failure.of(error, ErrorCode.START_FAILED)
        try:
            if self._limit is None:
                output = await self._call(envelope)
            else:
                with self._limit.call():
                    output = await self._call(envelope)
        except TimeLimitExpired:
            return _Failure(
                DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, "TimeoutError",
                f"it ran longer than its limit of {self.spec.time_limit_seconds:g} s",
            )  # fmt: skip
        except Exception as error:
            return _Failure.of(error, ErrorCode.HANDLER_EXCEPTION)
        return () if output is None else _topics(output)

    async def _call(self, envelope: Envelope[Any]) -> object:
        call: Callable[[Envelope[Any]], Any] | None = self.handler.call
        if call is None:
            raise RuntimeError("the dispatcher was stopped while a message was on its way to it")
        if self.handler.is_async:
            return await call(envelope)
        return await self._call_in_thread(call, envelope)

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

    async def _pause(self, failure: "_Failure", envelope: Envelope[Any], attempt: int) -> None:
        assert self.spec.retry is not None  # Without it there is one try, and nothing to wait for.
        delay = retry_delay(self.spec.retry, attempt)
        self._log.debug(
            "dispatcher failed, will be tried again",
            extra={"attempt": attempt, "delay_seconds": delay, "error": failure.message, **self._fields(envelope)},
        )
        await self._clock.sleep(delay)

    def _failure(
        self, failure: "_Failure", envelope: Envelope[Any], route_id: str | None, attempts: int, started: float
    ) -> Outcome:
        duration = (perf_counter() - started) * 1000.0
        level = logging.ERROR if failure.status.is_error() and failure is not _REFUSED else logging.DEBUG
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

    def _log_circuit(self, state: CircuitState) -> None:
        level = logging.WARNING if state is CircuitState.OPEN else logging.INFO
        self._log.log(level, f"circuit {state.replace('_', ' ')}", extra={"dispatcher_id": self._id})


class _Failure(NamedTuple):
    """Why an attempt did not succeed."""

    status: DispatchStatus
    code: ErrorCode
    kind: str | None
    message: str
    where: str | None = None
    counts: bool = True
    """Whether it says something about the handler's health, and another try may help."""

    @classmethod
    def of(cls, error: Exception, code: ErrorCode) -> "_Failure":
        message = describe_exception(error)
        return cls(DispatchStatus.DISPATCHER_ERROR, code, type(error).__name__, message, _where(error))


_REFUSED = _Failure(
    DispatchStatus.CIRCUIT_OPEN, ErrorCode.CIRCUIT_OPEN, None, "its circuit breaker is open: the handler was not called"
)


def _topics(output: object) -> "tuple[str, ...] | _Failure":
    """Read what a handler returned."""
    if isinstance(output, DispatchResult):
        return _of_result(output)
    topics = (output,) if isinstance(output, str) else output
    if isinstance(topics, list | tuple) and all(isinstance(topic, str) and topic.strip() for topic in topics):
        return tuple(topics)
    # The handler did its work: running it again would do it twice.
    message = f"it returned {_shape(output)}; a handler returns None, a topic, or a list of topics"
    return _Failure(DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_RESULT, None, message, counts=False)


def _of_result(result: DispatchResult) -> "tuple[str, ...] | _Failure":
    """A dispatcher of the protocol may judge for itself; its word is taken, sanitized."""
    if result.status.is_successful():
        return tuple(result.outputs or ())
    message = sanitize(result.error_message or f"it returned the status {result.status}")
    code = result.error_code or ErrorCode.HANDLER_RESULT
    # A message left out on purpose is no fault, and would be left out again.
    return _Failure(result.status, code, None, message, counts=result.status.is_error())


def _shape(output: object) -> str:
    if isinstance(output, list | tuple):
        return f"a {type(output).__name__} of {', '.join(sorted({_shape(item) for item in output})) or 'nothing'}"
    return "a blank topic" if isinstance(output, str) else type(output).__name__


def _where(error: BaseException) -> str | None:
    """File, line and function that raised: what a reader of the log needs, and no value that could be a secret."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"

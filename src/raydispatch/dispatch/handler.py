"""Handlers: the ways to write one, seen as a single kind of thing to call."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, get_args, get_origin, runtime_checkable

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from raydispatch.dispatch.batching import Batching
from raydispatch.dispatch.outcome import DispatchResult, Reply
from raydispatch.dispatch.sanitize import describe_validation
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory

OneOutput: TypeAlias = str | Envelope[Any] | Reply
HandlerOutput: TypeAlias = OneOutput | Sequence[str] | Sequence[OneOutput] | DispatchResult | None
"""What a handler may return: nothing, a topic to send the message on to, another envelope, a reply, several of these,
or a result of its own."""

Handle: TypeAlias = Callable[[Envelope[Any]], HandlerOutput | Awaitable[HandlerOutput]]


class HandlerClass(Protocol):
    """Built once, where it runs, so that models and connections load there; `start` and `stop` are optional."""

    def handle(self, envelope: Envelope[Any]) -> HandlerOutput | Awaitable[HandlerOutput]:
        """Act on one message."""


@runtime_checkable
class MessageDispatcher(Protocol):
    """An object that says itself what it takes; `node_kind` is optional and kept."""

    @property
    def dispatcher_id(self) -> str:
        """Unique in its engine."""

    @property
    def category(self) -> MessageCategory:
        """What it is for."""

    @property
    def message_types(self) -> set[str] | None:
        """The types it takes; None means all."""

    def handle(self, envelope: Envelope[Any]) -> HandlerOutput | Awaitable[HandlerOutput]:
        """Act on one message."""


HandlerSource: TypeAlias = Handle | type[HandlerClass] | HandlerClass


class PayloadMisfit(Exception):
    """The payload is not what the handler's annotation asks for."""


class Handler:
    """A handler ready to be called; made from a function, a class, or an object with `handle`."""

    def __init__(self, source: HandlerSource, *, batch: bool = False) -> None:
        self._source = source
        self._batch = batch
        self._instance: object | None = None
        self._started: Future[bool] | None = None
        self._lock = threading.Lock()
        function = _function_of(source)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self.payload_type = payload_type_of(function)
        self._check = payload_check(self.payload_type)
        # A plain function needs no building, and is ready at once.
        self.call: Handle | None = None if _needs_building(source) else self._callable(function)
        self.is_async = self.is_async or batch

    def _callable(self, function: Callable[..., Any]) -> Handle:
        return Batching(function, run_in_thread) if self._batch else function

    def checked(self, envelope: Envelope[Any]) -> Envelope[Any]:
        """The envelope with its payload as the annotation asks for; raises `PayloadMisfit`."""
        return envelope if self._check is None else self._check(envelope)

    async def start(self) -> None:
        """Build and start the handler, once, whoever asks and from whichever thread; a failure can be tried again."""
        while True:
            with self._lock:
                mine = self._started is None
                if self._started is None:
                    self._started = Future()
                    # From now on it cannot be cancelled: one who gives up waiting must not end it for all.
                    self._started.set_running_or_notify_cancel()
                started = self._started
            if mine:
                return await self._start(started)
            if await asyncio.wrap_future(started):
                return None

    async def stop(self) -> None:
        """Stop what was started; a later message starts it anew."""
        with self._lock:
            instance, self._instance, self._started = self._instance, None, None
            if instance is not None:
                self.call = None
        if instance is not None:
            await _run_hook(instance, "stop")

    async def is_healthy(self) -> bool:
        """What the handler's own `health()` says, if it has one and was started."""
        health = getattr(self._instance, "health", None)
        if health is None:
            return True
        return bool(await health() if inspect.iscoroutinefunction(health) else await run_in_thread(health))

    async def _start(self, started: "Future[bool]") -> None:
        try:
            if self.call is None:
                source: Any = self._source
                instance = await run_in_thread(source) if inspect.isclass(source) else source
                await _run_hook(instance, "start")
                self._instance = instance
                self.call = self._callable(instance.handle)
        except BaseException as error:
            with self._lock:
                self._started = None
            if isinstance(error, Exception):
                started.set_exception(error)
            else:
                started.set_result(False)  # Whoever started was cancelled; of those who wait, another one starts.
            raise
        started.set_result(True)


async def run_in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Run a blocking function in the loop's executor, with this task's context variables.

    Exceptions come back as values first: a StopIteration put into a future would never reach the one who waits for it.
    """
    context = contextvars.copy_context()
    value, error = await asyncio.get_running_loop().run_in_executor(
        None, partial(context.run, _call_and_catch, function, arguments)
    )
    if error is not None:
        raise RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
    return value


def payload_type_of(function: Callable[..., Any]) -> Any:
    """T, if the handler's first parameter is annotated `Envelope[T]`, and None if any payload will do."""
    annotation = _first_annotation(function)
    if get_origin(annotation) is not Envelope:
        return None
    (payload_type,) = get_args(annotation)
    return None if payload_type in (object, Any) or isinstance(payload_type, TypeVar) else payload_type


def _needs_building(source: HandlerSource) -> bool:
    return inspect.isclass(source) or (hasattr(source, "handle") and not inspect.isroutine(source))


def _function_of(source: HandlerSource) -> Callable[..., Any]:
    if _needs_building(source):
        handle = getattr(source, "handle", None)
        if callable(handle):
            return partial(handle, None) if inspect.isclass(source) and not _is_static(source) else handle
        raise InvalidParameter(f"The class {getattr(source, '__name__', source)!r} has no method 'handle(envelope)'.")
    if not callable(source):
        raise InvalidParameter(f"A dispatcher must be callable, or have a method 'handle'; {source!r} is neither.")
    return source


def _is_static(source: object) -> bool:
    return isinstance(inspect.getattr_static(source, "handle"), staticmethod | classmethod)


def _first_annotation(function: Callable[..., Any]) -> Any:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # A builtin; it has no annotations either.
    name = getattr(inspect.unwrap(_unpacked(function)), "__qualname__", repr(function))
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise InvalidParameter(f"The handler {name} must take one argument, the envelope.")
    annotation = parameters[0].annotation
    if not isinstance(annotation, str):
        return annotation
    return _evaluated(annotation, _unpacked(function), name)


def _unpacked(function: Any) -> Any:
    """The plain function inside a partial, a method, or an object with `__call__`."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if hasattr(function, "__globals__") else type(function).__call__


def _evaluated(annotation: str, function: Any, name: str) -> Any:
    """Resolve an annotation written as a string (as all are under `from __future__ import annotations`)."""
    names = {**getattr(function, "__globals__", {})}
    code = getattr(function, "__code__", None)
    for variable, cell in zip(
        code.co_freevars if code else (), getattr(function, "__closure__", None) or (), strict=False
    ):
        try:
            names[variable] = cell.cell_contents
        except ValueError:
            continue  # A variable that is not assigned yet.
    try:
        return eval(annotation, names)  # noqa: S307 - the text is the program's own
    except Exception as error:
        if "Envelope" not in annotation:
            return None
        raise InvalidParameter(
            f"The annotation {annotation} of the handler {name} cannot be resolved ({error}), so payloads could not be "
            f"checked: define the type at module level, above the handler."
        ) from None


def payload_check(payload_type: Any) -> Callable[[Envelope[Any]], Envelope[Any]] | None:
    """What makes the payload of an envelope fit a type, or raises `PayloadMisfit`; None if any payload will do."""
    if payload_type is None:
        return None
    adapter = _adapter(payload_type)
    known_names = _declared_names(adapter)
    plain_class = payload_type if inspect.isclass(payload_type) and get_origin(payload_type) is None else ()
    takes_text = isinstance(payload_type, type) and issubclass(payload_type, str | bytes)

    def check(envelope: Envelope[Any]) -> Envelope[Any]:
        payload = envelope.payload
        if isinstance(payload, plain_class):
            return envelope
        try:
            if isinstance(payload, str | bytes | bytearray) and not takes_text:
                return envelope.with_payload(adapter.validate_json(payload))
            if isinstance(payload, BaseModel):
                # By its fields: the sender's class may be another one here, in a process that loaded it again.
                payload = payload.model_dump()
            return envelope.with_payload(adapter.validate_python(payload))
        except ValidationError as error:
            raise PayloadMisfit(describe_validation(error, known_names)) from None

    return check


def _adapter(payload_type: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(payload_type)
    except PydanticUserError:
        # A class that pydantic knows nothing of: being an instance of it is all that can be asked.
        return TypeAdapter(payload_type, config=ConfigDict(arbitrary_types_allowed=True))


def _declared_names(adapter: TypeAdapter[Any]) -> frozenset[str]:
    """The names of all fields, at any depth: they are the program's, so an error may show them."""
    try:
        schema = adapter.json_schema()
    except PydanticUserError:
        return frozenset()
    found: set[str] = set()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            properties = part.get("properties")
            found.update(properties if isinstance(properties, dict) else ())
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return frozenset(found)


def _call_and_catch(function: Callable[..., Any], arguments: tuple[object, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*arguments), None
    except BaseException as error:
        return None, error


async def _run_hook(instance: object, name: str) -> None:
    hook = getattr(instance, name, None)
    if hook is None:
        return
    if inspect.iscoroutinefunction(hook):
        await hook()
    else:
        await run_in_thread(hook)

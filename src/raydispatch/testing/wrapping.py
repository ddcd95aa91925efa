"""Wrapping handlers: something happens before and after each attempt, and the handler stays of the kind that it is."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, cast

from raydispatch.dispatch.handler import Handle, Handler, HandlerClass, HandlerSource
from raydispatch.messages.envelope import Envelope


class Around(Protocol):
    """What happens around every attempt."""

    def before(self, envelope: Envelope[Any]) -> Iterator[float]:
        """Seconds to wait, one by one, before the handler runs; what is raised ends the attempt."""

    def after(self, envelope: Envelope[Any]) -> None:
        """The handler has succeeded; what is raised makes a failure of it."""

    async def sleep(self, seconds: float) -> None:
        """Wait in the event loop."""

    def sleep_in_thread(self, seconds: float) -> None:
        """Wait in the thread of a sync handler."""


def wrapped(source: HandlerSource, around: Around) -> HandlerSource:
    """A function for a function (sync or async), a class for a class, an object for an object; payloads are checked
    as before."""
    handler = Handler(source)
    if inspect.isclass(source):
        return _wrapped_class(source, handler, around)
    if handler.call is None:
        inner = cast(HandlerClass, source)
        return _WrappedObject(inner, _wrapped_call(inner.handle, handler, around))
    return _wrapped_call(cast(Handle, source), handler, around)


def signature_for(payload_type: Any, *leading: str) -> inspect.Signature:
    """That of a handler of such payloads. A wrapper has to say it: it has no names to resolve an annotation with."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    generic: Any = Envelope
    annotation = generic[Any if payload_type is None else payload_type]
    parameters = [inspect.Parameter(name, kind) for name in leading]
    return inspect.Signature([*parameters, inspect.Parameter("envelope", kind, annotation=annotation)])


def _wrapped_class(source: type, handler: Handler, around: Around) -> type[HandlerClass]:
    # A class of its own kind: start, stop, health and whatever else it has work as ever.
    names = {"__module__": source.__module__, "__qualname__": source.__qualname__, "__doc__": source.__doc__}
    subclass: Any = type(source)(source.__name__, (source,), names)

    def handle(self: object, envelope: Envelope[Any]) -> Any:
        return super(subclass, self).handle(envelope)

    subclass.handle = _wrapped_call(handle, handler, around, "self")
    return cast(type[HandlerClass], subclass)


class _WrappedObject:
    """An object with another `handle`; everything else is its own."""

    def __init__(self, inner: HandlerClass, handle: Handle) -> None:
        self._inner = inner
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _wrapped_call(call: Callable[..., Any], handler: Handler, around: Around, *leading: str) -> Handle:
    """The envelope is the last argument; `leading` names those in front."""

    @functools.wraps(call, updated=())
    async def in_loop(*arguments: Any) -> Any:
        for seconds in around.before(arguments[-1]):
            await around.sleep(seconds)
        return await finished(call(*arguments), arguments[-1])

    @functools.wraps(call, updated=())
    def in_thread(*arguments: Any) -> Any:
        for seconds in around.before(arguments[-1]):
            around.sleep_in_thread(seconds)
        output = call(*arguments)
        if inspect.isawaitable(output):
            return finished(output, arguments[-1])
        around.after(arguments[-1])
        return output

    async def finished(work: Awaitable[Any], envelope: Envelope[Any]) -> Any:
        output = await work
        around.after(envelope)
        return output

    chosen: Any = in_loop if handler.is_async else in_thread
    chosen.__signature__ = signature_for(handler.payload_type, *leading)
    return cast(Handle, chosen)

"""Runtimes: an engine in this process, seen through the same plain calls as one on a cluster."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.outcome import DispatchResult, Receipt, Reply
from raydispatch.messages.envelope import Envelope

T = TypeVar("T")


class Runtime(Protocol):
    """What runs an engine; `DispatchSystem` is one."""

    def dispatch(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send one message, and wait for its outcomes."""

    def dispatch_many(self, messages: Iterable[tuple[str, Envelope[Any]]]) -> Iterator[DispatchResult]:
        """Send many; the results in their order."""

    def publish(self, topic: str, envelope: Envelope[Any]) -> Receipt:
        """Accept a message, and return at once."""

    def execute(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send a command."""

    def request(self, topic: str, envelope: Envelope[Any], timeout: float | None = None) -> Reply:
        """Send, and wait for the reply."""

    def drain(self) -> None:
        """Wait until what was published is done."""


Start = Callable[[DispatchEngine], AbstractContextManager[Runtime]]
"""Runs an engine for the time of a `with` block: `in_process`, or `DispatchSystem.start`."""


@contextmanager
def in_process(engine: DispatchEngine) -> Iterator[Runtime]:
    """Run an engine in this process, in an event loop of its own thread.

    Example: `with in_process(engine) as runtime: runtime.dispatch(topic, envelope)`.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="raydispatch in process", daemon=True)
    thread.start()
    runtime = _InProcess(engine, loop)
    try:
        runtime.run(engine.__aenter__())
        try:
            yield runtime
        finally:
            runtime.run(engine.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _InProcess:
    def __init__(self, engine: DispatchEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def dispatch(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        return self.run(self._engine.dispatch(topic, envelope))

    def dispatch_many(self, messages: Iterable[tuple[str, Envelope[Any]]]) -> Iterator[DispatchResult]:
        return iter(self.run(self._all(list(messages))))

    def publish(self, topic: str, envelope: Envelope[Any]) -> Receipt:
        return self.run(self._engine.publish(topic, envelope))

    def execute(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        return self.run(self._engine.execute(topic, envelope))

    def request(self, topic: str, envelope: Envelope[Any], timeout: float | None = None) -> Reply:
        return self.run(self._engine.request(topic, envelope, timeout))

    def drain(self) -> None:
        self.run(self._engine.drain())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _all(self, messages: list[tuple[str, Envelope[Any]]]) -> list[DispatchResult]:
        return await asyncio.gather(*(self._engine.dispatch(topic, envelope) for topic, envelope in messages))

"""What the system on Ray is measured against: the same two hops, written by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, TypeAlias, TypeVar

import ray

MessageT = TypeVar("MessageT")

Plain: TypeAlias = tuple[str, Any]
"""A message without an envelope: topic and payload."""


async def ignore(_: object) -> None:
    pass


class RawDispatcher:
    """Calls a handler that does nothing."""

    async def handle(self, _: str, payload: object) -> None:
        await ignore(payload)

    async def handle_list(self, messages: Sequence[Plain]) -> list[None]:
        return [await ignore(payload) for _, payload in messages]  # type: ignore[func-returns-value]


class RawRouter:
    """Passes everything on, to one dispatcher after the other."""

    def __init__(self, dispatchers: Sequence[Any]) -> None:
        self._dispatchers = cycle(dispatchers)

    async def route(self, topic: str, payload: object) -> None:
        await next(self._dispatchers).handle.remote(topic, payload)

    async def route_list(self, messages: Sequence[Plain]) -> list[None]:
        done: list[None] = await next(self._dispatchers).handle_list.remote(messages)
        return done


class Raw:
    """As many routers and dispatchers as the system has, in actors of their own."""

    def __init__(self, routers: int, dispatchers: int) -> None:
        options = {"num_cpus": 0, "max_concurrency": 10_000}
        self._dispatchers = [ray.remote(RawDispatcher).options(**options).remote() for _ in range(dispatchers)]
        self._routers = [ray.remote(RawRouter).options(**options).remote(self._dispatchers) for _ in range(routers)]
        self._turns = cycle(self._routers)
        ray.get([router.route.remote("", None) for router in self._routers for _ in self._dispatchers])

    async def send(self, message: Plain) -> None:
        """One message, in a call of its own."""
        await next(self._turns).route.remote(*message)

    def send_in_window(self, messages: Iterable[Plain], window: int) -> None:
        """All of them, in a call each, so many under way at once."""
        waiting: list[Any] = []
        for message in messages:
            if len(waiting) >= window:
                # A tenth at a time: to wait for each would be slower.
                done, waiting = ray.wait(waiting, num_returns=window // 10)
                ray.get(done)
            waiting.append(next(self._turns).route.remote(*message))
        ray.get(waiting)

    async def send_list(self, messages: Sequence[Plain]) -> None:
        """Many messages in one call."""
        done = await next(self._turns).route_list.remote(messages)
        assert len(done) == len(messages)

    def stop(self) -> None:
        for actor in (*self._routers, *self._dispatchers):
            ray.kill(actor)


class Serve:
    """Two composed deployments. Takes what `ray[serve]` brings."""

    def __init__(self, routers: int, dispatchers: int) -> None:
        from ray import serve

        @serve.deployment(num_replicas=dispatchers, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
        class ServeDispatcher:
            async def __call__(self, topic: str, payload: object) -> None:
                pass

        @serve.deployment(num_replicas=routers, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
        class ServeRouter:
            def __init__(self, dispatcher: Any) -> None:
                self._dispatcher = dispatcher

            async def __call__(self, topic: str, payload: object) -> None:
                await self._dispatcher.remote(topic, payload)

        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
        router: Any = ServeRouter
        dispatcher: Any = ServeDispatcher
        self._handle = serve.run(router.bind(dispatcher.bind()), name="online", route_prefix=None)
        self._shutdown = serve.shutdown

    async def send(self, message: Plain) -> None:
        """One message, in a call of its own."""
        await self._handle.remote(*message)

    def stop(self) -> None:
        self._shutdown()


async def closed_loop(
    send: Callable[[MessageT], Awaitable[object]], callers: int, messages: Iterable[MessageT]
) -> None:
    """So many callers, each of which sends its next message when the last one is done."""
    source = iter(messages)

    async def call() -> None:
        for message in source:
            await send(message)

    await asyncio.gather(*(call() for _ in range(callers)))

"""What the engine costs around a handler: against a bare time limit, and against bubus, another event bus."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

from bubus import BaseEvent, EventBus

from harness import Bar, Prepare, Work, measure, median_ratio, run
from raydispatch.bus.engine import DispatchEngine
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory

TOPIC = "dev.order.events.v1"
LIMIT_SECONDS = 1.0

Send = Callable[[], Awaitable[object]]
"""Sends one message, and waits until it is handled."""


class Peer(NamedTuple):
    """Who sends, how many messages in each round, and what to call at the end."""

    send: Send
    messages: int
    stop: Send | None = None


class OrderPlaced(BaseEvent[None]):  # type: ignore[misc]  # mypy is told to skip bubus.
    """The peer's message. Like ours, it has no time limit: bubus would set one of 300 seconds."""

    event_timeout: float | None = None


def bars(quick: bool) -> Iterator[Bar]:
    # Both keep their default levels; a warning would otherwise go to standard error.
    logging.getLogger("bubus").addHandler(logging.NullHandler())
    rounds = 7 if quick else 21
    yield Bar("dispatch with a time limit: time against asyncio.wait_for", limited_cost(rounds), 2, "lower", "x")
    yield Bar("dispatch: messages/s against bubus", speed_against_bubus(rounds), 100, "higher", "x")


def limited_cost(rounds: int) -> float:
    """Breaker, metrics, result and time limit together cost at most as much again as a time limit alone."""
    engine = engine_with(ignore, LIMIT_SECONDS)
    # Made once, for both: making it in the loop would add the same to either side and hide part of the difference. It
    # has no topic yet, as with a user, so that the engine has to fill it in.
    envelope = Envelope({"order": 7})

    async def dispatch() -> object:
        return await engine.dispatch(TOPIC, envelope)

    async def wait_for() -> object:
        return await asyncio.wait_for(ignore(envelope), LIMIT_SECONDS)

    seconds = compare({"engine": Peer(dispatch, 10_000), "peer": Peer(wait_for, 10_000)}, rounds)
    check_successes(engine, rounds * 10_000 + 1)
    return median_ratio(seconds["engine"], seconds["peer"])


def speed_against_bubus(rounds: int) -> float:
    """One message after the other, each made, sent and waited for: at least a hundred times as many per second."""
    engine = engine_with(ignore, None)
    bus = EventBus(name="Peer")
    handled = count()

    async def handle(_: OrderPlaced) -> None:
        next(handled)

    bus.on(OrderPlaced, handle)

    async def dispatch() -> object:
        return await engine.dispatch(TOPIC, Envelope({"order": 7}))

    async def dispatch_bubus() -> object:
        return await bus.dispatch(OrderPlaced())

    seconds = compare({"engine": Peer(dispatch, 20_000), "peer": Peer(dispatch_bubus, 200, bus.stop)}, rounds)
    check_successes(engine, rounds * 20_000 + 1)
    assert next(handled) == rounds * 200 + 1
    return median_ratio(seconds["peer"], seconds["engine"])


def compare(peers: dict[str, Peer], rounds: int) -> dict[str, list[float]]:
    """Seconds per message of each peer, one for each round."""
    with ExitStack() as stack:
        return measure({name: sending(started(peer, stack), peer) for name, peer in peers.items()}, rounds)


def started(peer: Peer, stack: ExitStack) -> asyncio.Runner:
    """A loop of its own, as what a peer leaves running in the background must not slow down another one.

    The first message is sent here: building handlers and starting tasks is no part of what is measured.
    """
    runner = stack.enter_context(asyncio.Runner())
    if peer.stop is not None:
        # bubus swallows cancellation: a loop with a bus that was not stopped would never close.
        stack.callback(runner.run, send_all(peer.stop, 1))
    runner.run(send_all(peer.send, 1))
    return runner


def sending(runner: asyncio.Runner, peer: Peer) -> Prepare:
    return lambda _: Work(lambda: runner.run(send_all(peer.send, peer.messages)), peer.messages)


async def send_all(send: Send, messages: int) -> None:
    for _ in range(messages):
        await send()


def engine_with(handler: Callable[[Envelope[Any]], Awaitable[None]], limit_seconds: float | None) -> DispatchEngine:
    """An engine with one dispatcher, and every default except the time limit."""
    engine = DispatchEngine()
    register = engine.dispatcher(
        "orders", topics="*.order.events.*", category=MessageCategory.EVENT, time_limit_seconds=limit_seconds
    )
    register(handler)
    engine.freeze()
    return engine


async def ignore(_: Envelope[Any]) -> None:
    pass


def check_successes(engine: DispatchEngine, expected: int) -> None:
    """All messages were handled, and counted: nobody wins by dropping some."""
    metrics = engine.get_dispatcher_metrics("orders")
    assert metrics is not None
    assert (metrics.success_count, metrics.error_count) == (expected, 0)


if __name__ == "__main__":
    run("Engine", bars)

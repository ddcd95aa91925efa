"""What the bus costs: to accept a message, to deliver it, to find who waits for a reply, and who listens."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from statistics import median, quantiles
from time import perf_counter
from typing import Any, TypeAlias

from bubus import EventBus

from engine import TOPIC, OrderPlaced, check_successes, engine_with, ignore
from harness import Bar, Prepare, Work, measure, median_ratio, run
from raydispatch.bus.correlation import Correlations
from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.pubsub import Subscription
from raydispatch.dispatch.outcome import Reply
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import new_id

MESSAGES = 5_000
"""In each round: half of what the queue holds, so that nothing is refused, and pressure stays low."""
CAPACITY = 10_000
RATE = 10_000
BUBUS_BURST = 50
"""As many as bubus takes before it raises."""
BUBUS_MESSAGES = 200
FAR_SECONDS = 3_600.0

Timed: TypeAlias = Callable[[], Coroutine[Any, Any, object]]
MakeRound: TypeAlias = Callable[[int], Coroutine[Any, Any, Timed]]
"""Given the number of the round, tidies up after the last one and makes what is timed."""


def bars(quick: bool) -> Iterator[Bar]:
    # As in engine.py: a warning would otherwise go to standard error.
    logging.getLogger("bubus").addHandler(logging.NullHandler())
    rounds = 15 if quick else 41
    yield Bar("publish accepts: time against asyncio.Queue.put", accept_cost(rounds), 8, "lower", "x")
    yield Bar("one call of publish: p99 at 10,000 messages/s", accept_p99_ms(3 if quick else 7), 1, "lower", "ms")
    yield Bar(
        "published and handled: messages/s against bubus", speed_against_bubus(7 if quick else 15), 20, "higher", "x"
    )
    yield Bar("request and reply: 100,000 pending against 100", correlation_cost(rounds), 1.5, "lower", "x")
    yield Bar("publish to 1 of 10,000 patterns against 1 of 10", subscription_cost(rounds), 2, "lower", "x")


def accept_cost(rounds: int) -> float:
    """From the call of `publish` to its receipt; who delivers has to wait until the round is over."""
    engine = engine_with(ignore, None)
    envelope = Envelope({"order": 7})

    async def publishing(_: int) -> Timed:
        await engine.drain()

        async def publish_all() -> None:
            for _ in range(MESSAGES):
                await engine.publish(TOPIC, envelope)

        return publish_all

    async def putting(_: int) -> Timed:
        queue: asyncio.Queue[Envelope[Any]] = asyncio.Queue(CAPACITY)

        async def put_all() -> None:
            for _ in range(MESSAGES):
                await queue.put(envelope)

        return put_all

    with asyncio.Runner() as ours, asyncio.Runner() as theirs:
        seconds = measure({"engine": in_loop(ours, publishing), "peer": in_loop(theirs, putting)}, rounds)
        ours.run(engine.stop())
    check_successes(engine, rounds * MESSAGES)
    return median_ratio(seconds["engine"], seconds["peer"])


def accept_p99_ms(rounds: int) -> float:
    """One second of messages that come by the clock, one by one, while those before them are delivered.

    What is timed is the call. It may begin late, when a batch is just being handled: that is not in here.
    """
    engine = engine_with(ignore, None)

    async def one_second() -> float | None:
        took = []
        handled_before = engine.get_structured_metrics().total_dispatches
        start = perf_counter()
        for due in (start + tick / RATE for tick in range(RATE)):
            envelope = Envelope({"order": 7})
            while perf_counter() < due:  # noqa: ASYNC110 - there is no event but the clock
                await asyncio.sleep(0)
            before = perf_counter()
            await engine.publish(TOPIC, envelope)
            took.append(perf_counter() - before)
        is_in_time = perf_counter() - start < 1.1
        handled = engine.get_structured_metrics().total_dispatches - handled_before
        await engine.drain()
        # On a busy machine the messages may not come at that rate; such a second does not count.
        return quantiles(took, n=100)[-1] * 1000.0 if is_in_time and handled > RATE / 2 else None

    with asyncio.Runner() as runner:
        tries: list[float | None] = []
        while sum(value is not None for value in tries) < rounds:
            assert len(tries) < 5 * rounds, "this machine is too busy to publish 10,000 messages/s"
            tries.append(runner.run(one_second()))
        runner.run(engine.stop())
    check_successes(engine, len(tries) * RATE)
    return median([value for value in tries if value is not None])


def speed_against_bubus(rounds: int) -> float:
    """Each message made and published, and then all of them waited for; bubus in bursts as large as it can take."""
    engine = engine_with(ignore, None)
    bus = EventBus(name="Peer")
    handled = count()

    async def handle(_: OrderPlaced) -> None:
        next(handled)

    bus.on(OrderPlaced, handle)

    async def publish_all() -> None:
        for _ in range(MESSAGES):
            await engine.publish(TOPIC, Envelope({"order": 7}))
        await engine.drain()

    async def publish_all_to_bubus() -> None:
        for _ in range(BUBUS_MESSAGES // BUBUS_BURST):
            for _ in range(BUBUS_BURST):
                bus.dispatch(OrderPlaced())
            await bus.wait_until_idle()

    with asyncio.Runner() as ours, asyncio.Runner() as theirs:
        # One round that does not count: building handlers and starting tasks is no part of what is measured.
        ours.run(publish_all())
        theirs.run(publish_all_to_bubus())
        seconds = measure(
            {
                "engine": in_loop(ours, always(publish_all)),
                "peer": in_loop(theirs, always(publish_all_to_bubus), BUBUS_MESSAGES),
            },
            rounds,
        )
        ours.run(engine.stop())
        # bubus swallows cancellation: a loop with a bus that was not stopped would never close.
        theirs.run(bus.stop())
    check_successes(engine, (rounds + 1) * MESSAGES)
    assert next(handled) == (rounds + 1) * BUBUS_MESSAGES
    return median_ratio(seconds["peer"], seconds["engine"])


def correlation_cost(rounds: int) -> float:
    """A request opened, answered and read, while so many others wait for their replies."""
    with asyncio.Runner() as many_loop, asyncio.Runner() as few_loop:
        seconds = measure(
            {
                "many": in_loop(many_loop, many_loop.run(asking(100_000))),
                "few": in_loop(few_loop, few_loop.run(asking(100))),
            },
            rounds,
        )
    return median_ratio(seconds["many"], seconds["few"])


async def asking(pending: int) -> MakeRound:
    correlations = Correlations()
    for _ in range(pending):
        correlations.open(new_id(), FAR_SECONDS)

    async def make_round(_: int) -> Timed:
        asked = [(new_id(), Reply(number)) for number in range(MESSAGES)]

        async def ask_all() -> None:
            for correlation_id, reply in asked:
                answer = correlations.open(correlation_id, FAR_SECONDS)
                correlations.resolve(correlation_id, reply)
                assert await answer is reply
            assert len(correlations) == pending

        return ask_all

    return make_round


def subscription_cost(rounds: int) -> float:
    """Every topic is new, so that none is found in a cache, and fits one of the patterns; each has its turn."""
    with asyncio.Runner() as many_loop, asyncio.Runner() as few_loop:
        seconds = measure(
            {"many": in_loop(many_loop, publishing_to(10_000)), "few": in_loop(few_loop, publishing_to(10))}, rounds
        )
    return median_ratio(seconds["many"], seconds["few"])


def publishing_to(subscribers: int) -> MakeRound:
    engine = DispatchEngine()
    engine.freeze()
    subscriptions = [engine.subscribe(f"dev.customer-{number}.*.events") for number in range(subscribers)]

    async def make_round(number: int) -> Timed:
        for subscription in subscriptions:
            await read_all(subscription)
        assert sum(subscription.delivered for subscription in subscriptions) == number * MESSAGES
        topics = [
            f"dev.customer-{message % subscribers}.order-{subscribers}-{number}-{message}.events"
            for message in range(MESSAGES)
        ]
        envelope = Envelope({"order": 7})

        async def publish_all() -> None:
            for topic in topics:
                assert (await engine.publish(topic, envelope)).subscribers == 1

        return publish_all

    return make_round


async def read_all(subscription: Subscription) -> None:
    while subscription.pending:
        await anext(subscription)


def always(work: Timed) -> MakeRound:
    """The same in every round, with nothing to tidy up."""

    async def make_round(_: int) -> Timed:
        return work

    return make_round


def in_loop(runner: asyncio.Runner, make_round: MakeRound, items: int = MESSAGES) -> Prepare:
    """Work in a loop of its own: what a peer leaves behind in the background must not slow down another one."""

    def prepare(number: int) -> Work:
        work = runner.run(make_round(number))
        return Work(lambda: runner.run(work()), items)

    return prepare


if __name__ == "__main__":
    run("Bus", bars)

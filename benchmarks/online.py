"""The engine on Ray: against one call per message, Ray Serve and plain lists, and against itself with more to do."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import ray

from _charts import Column, write_chart
from _online_peers import Plain, Raw, Serve, closed_loop
from harness import Bar, Prepare, Work, measure, median_ratio, run
from raydispatch import DispatchEngine, DispatchStatus, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem

RESULTS = Path(__file__).resolve().parent / "results"
TOPICS = 1_000
ROUTERS = REPLICAS = 2
IN_FLIGHT = 1_000
LIST_MESSAGES = 500
LIST_CALLS = 8
"""Lists under way at once; more or fewer make it slower."""
CALLERS = 256
SLEEP_SECONDS = 0.01

Message: TypeAlias = tuple[str, Envelope[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[object]]


class Amounts(NamedTuple):
    """How much is measured."""

    rounds: int
    batched: int
    """Messages of those who send many at a time."""
    at_once: int
    """Messages of the many who each wait for their own, all at the same time."""
    single: int
    """Messages of those who make a call for each, and are slow."""
    lone: int
    sleeping: int
    """Messages of ten milliseconds, for each replica."""


QUICK = Amounts(rounds=3, batched=30_000, at_once=30_000, single=1_500, lone=60, sleeping=1_500)
FULL = Amounts(rounds=7, batched=60_000, at_once=30_000, single=3_000, lone=200, sleeping=3_000)


class Peer(NamedTuple):
    """Something measured, as a chart names it."""

    label: str
    values: Sequence[float]
    """One for each round."""


def bars(quick: bool) -> Iterator[Bar]:
    amounts = QUICK if quick else FULL
    # As the README advises; it is for everyone here: with Python's 700, it is the collector that would be measured.
    gc.set_threshold(50_000)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with asyncio.Runner() as runner:
            yield from against_calls(runner, amounts)
            yield from while_sleeping(runner, amounts)
            yield from with_many_routes(amounts)
    finally:
        ray.shutdown()


def against_calls(runner: asyncio.Runner, amounts: Amounts) -> Iterator[Bar]:
    """Handlers that do nothing: what is left is the way to them and back."""
    with ExitStack() as stack:
        system = stack.enter_context(DispatchSystem.start(engine_of("online", replicas=REPLICAS), routers=ROUTERS))
        raw = stack.enter_context(stopping(Raw(ROUTERS, REPLICAS)))
        ours = {"many": many(system, amounts.batched), "concurrent": concurrent(runner, system, amounts.at_once)}
        warm_up(ours)
        yield from throughput(ours, runner, raw, amounts)
        yield from closed(runner, system, raw, amounts)
        yield from alone(runner, system, raw, amounts)
        try:
            serve = stack.enter_context(stopping(Serve(ROUTERS, REPLICAS)))
        except ImportError as error:
            print(f"Ray Serve is left out: {error}", file=sys.stderr)
            return
        yield from against_serve(ours, runner, serve, amounts)


def throughput(ours: Mapping[str, Prepare], runner: asyncio.Runner, raw: Raw, amounts: Amounts) -> Iterator[Bar]:
    peers = {"raw": windowed(raw, amounts.single), "lists": listed(runner, raw, amounts.batched)}
    warm_up(peers)
    seconds = measure({**ours, **peers}, amounts.rounds)
    calls, lists = Peer("a Ray call each", seconds["raw"]), Peer("lists of 500 by hand", seconds["lists"])
    many, each = Peer("dispatch_many", seconds["many"]), Peer("concurrent dispatch", seconds["concurrent"])
    yield rates("dispatch_many: messages/s against a Ray call each", "many-calls", many, calls, 50)
    yield rates("30,000 concurrent dispatch: messages/s against a Ray call each", "concurrent-calls", each, calls, 50)
    yield rates("dispatch_many: messages/s against lists by hand", "many-lists", many, lists, 0.35)
    yield rates("30,000 concurrent dispatch: messages/s against lists by hand", "concurrent-lists", each, lists, 0.35)


def closed(runner: asyncio.Runner, system: DispatchSystem, raw: Raw, amounts: Amounts) -> Iterator[Bar]:
    seconds = measure(
        {
            "ours": looping(runner, dispatching(system), envelopes, amounts.batched // 3),
            "raw": looping(runner, raw.send, plain, amounts.single),
        },
        amounts.rounds,
    )
    ours, calls = Peer("dispatch_async", seconds["ours"]), Peer("a Ray call each", seconds["raw"])
    yield rates(f"{CALLERS} callers, one message each at a time: against Ray calls", "closed-loop", ours, calls, 25)


def alone(runner: asyncio.Runner, system: DispatchSystem, raw: Raw, amounts: Amounts) -> Iterator[Bar]:
    ours, calls = Peer("dispatch_async", []), Peer("two Ray calls", [])
    sends: list[tuple[list[float], Send, Callable[[int], Sequence[Any]]]] = [
        (ours.values, dispatching(system), envelopes),  # type: ignore[list-item]
        (calls.values, raw.send, plain),  # type: ignore[list-item]
    ]
    for _ in range(amounts.rounds):
        for values, send, make in sends:
            values.append(runner.run(p50(send, make(amounts.lone))))
        sends.reverse()
    yield times("a lone dispatch: p50 against two Ray calls", "lone", ours, calls, 1.3)


def against_serve(ours: Mapping[str, Prepare], runner: asyncio.Runner, serve: Serve, amounts: Amounts) -> Iterator[Bar]:
    peer = {"serve": looping(runner, serve.send, plain, amounts.single, IN_FLIGHT)}
    warm_up(peer)
    seconds = measure({**ours, **peer}, amounts.rounds)
    composed = Peer("Ray Serve", seconds["serve"])
    many, each = Peer("dispatch_many", seconds["many"]), Peer("concurrent dispatch", seconds["concurrent"])
    yield rates("dispatch_many: messages/s against Ray Serve", "many-serve", many, composed, 100)
    yield rates("30,000 concurrent dispatch: messages/s against Ray Serve", "concurrent-serve", each, composed, 100)


def while_sleeping(runner: asyncio.Runner, amounts: Amounts) -> Iterator[Bar]:
    """Handlers that wait for something: ten dispatchers take a topic, or eight replicas share one."""
    engine = DispatchEngine("sleeping")
    for number in range(10):
        topics = ["dev.all.events.v1", *(["dev.one.events.v1"] if number == 0 else [])]
        register(engine, f"sleeper-{number}", topics, sleep, concurrency=10)
    register(engine, "sleepers", ["dev.eight.events.v1"], sleep, concurrency=10, replicas=8)
    with DispatchSystem.start(engine, routers=ROUTERS) as system:
        ten, one = Peer("to ten dispatchers", []), Peer("to one dispatcher", [])
        for number in range(amounts.rounds + 1):
            for peer, topic in ((ten, "dev.all.events.v1"), (one, "dev.one.events.v1")):
                value = runner.run(p50(dispatching(system), envelopes(amounts.lone // 3, topic)))
                if number > 0:  # The first one warms up.
                    peer.values.append(value)  # type: ignore[attr-defined]
        yield times("fan-out to 10 dispatchers of 10 ms: time against 1", "fan-out", ten, one, 2)
        replicas = {
            "eight": many(system, amounts.sleeping * 8, "dev.eight.events.v1"),
            "one": many(system, amounts.sleeping, "dev.one.events.v1"),
        }
        seconds = measure(replicas, max(1, amounts.rounds // 3))
        eight, single = Peer("8 replicas", seconds["eight"]), Peer("1 replica", seconds["one"])
        yield rates("handler of 10 ms, 10 at a time: messages/s of 8 replicas against 1", "replicas", eight, single, 7)


def with_many_routes(amounts: Amounts) -> Iterator[Bar]:
    with ExitStack() as stack:
        systems = {
            routes: stack.enter_context(
                DispatchSystem.start(engine_of(f"routes-{routes}", routes, replicas=REPLICAS), routers=ROUTERS)
            )
            for routes in (10_000, 10)
        }
        peers = {str(routes): many(system, amounts.batched) for routes, system in systems.items()}
        warm_up(peers)
        seconds = measure(peers, amounts.rounds)
        most, few = Peer("10,000 routes", seconds["10000"]), Peer("10 routes", seconds["10"])
        yield rates("10,000 routes: messages/s against 10", "routes", most, few, 0.85)


# What is sent


def topic_of(number: int) -> str:
    number %= TOPICS
    return f"dev.area-{number}.events.v{number % 10}"


def envelopes(count: int, topic: str | None = None) -> list[Message]:
    """New ones each time: a message that comes again is answered from memory."""
    return [(topic or topic_of(i), Envelope({"order": i}, message_type="Order")) for i in range(count)]


def plain(count: int) -> list[Plain]:
    return [(topic_of(i), {"order": i}) for i in range(count)]


def engine_of(name: str, routes: int = 10, **options: Any) -> DispatchEngine:
    """An engine with one dispatcher. Of ten routes, each takes a tenth of the topics; of more, one topic or none."""
    few, many = [f"dev.*.events.v{i}" for i in range(10)], [f"dev.area-{i}.events.*" for i in range(routes)]
    engine = DispatchEngine(name)
    register(engine, "orders", few if routes == 10 else many, ignore, **options)
    return engine


def register(engine: DispatchEngine, name: str, topics: list[str], handler: Any, **options: Any) -> None:
    engine.dispatcher(name, topics=topics, category=MessageCategory.EVENT, **options)(handler)


async def ignore(_: Envelope[Any]) -> None:
    pass


async def sleep(_: Envelope[Any]) -> None:
    await asyncio.sleep(SLEEP_SECONDS)


# Ways to send it


def many(system: DispatchSystem, messages: int, topic: str | None = None) -> Prepare:
    def prepare(_: int) -> Work:
        waiting = fresh(envelopes(messages, topic))
        return Work(lambda: check(list(system.dispatch_many(waiting))), messages)

    return prepare


def concurrent(runner: asyncio.Runner, system: DispatchSystem, messages: int) -> Prepare:
    async def send(waiting: list[Message]) -> None:
        check(await asyncio.gather(*(system.dispatch_async(topic, envelope) for topic, envelope in waiting)))

    def prepare(_: int) -> Work:
        waiting = fresh(envelopes(messages))
        return Work(lambda: runner.run(send(waiting)), messages)

    return prepare


def windowed(raw: Raw, messages: int) -> Prepare:
    def prepare(_: int) -> Work:
        waiting = fresh(plain(messages))
        return Work(lambda: raw.send_in_window(waiting, IN_FLIGHT), messages)

    return prepare


def listed(runner: asyncio.Runner, raw: Raw, messages: int) -> Prepare:
    def prepare(_: int) -> Work:
        source = iter(fresh(plain(messages)))
        lists = list(iter(lambda: list(islice(source, LIST_MESSAGES)), []))
        return Work(lambda: runner.run(closed_loop(raw.send_list, LIST_CALLS, lists)), messages)

    return prepare


def looping(
    runner: asyncio.Runner, send: Send, make: Callable[[int], list[Any]], messages: int, callers: int = CALLERS
) -> Prepare:
    def prepare(_: int) -> Work:
        waiting = fresh(make(messages))
        return Work(lambda: runner.run(closed_loop(send, callers, waiting)), messages)

    return prepare


def dispatching(system: DispatchSystem) -> Send:
    async def send(message: Message) -> None:
        result = await system.dispatch_async(*message)
        assert result.status is DispatchStatus.SUCCESS, result

    return send


async def p50(send: Send, messages: Sequence[Any]) -> float:
    """Seconds, one message after the other."""
    seconds: list[float] = []
    for message in messages:
        start = perf_counter()
        await send(message)
        seconds.append(perf_counter() - start)
    return median(seconds)


def check(results: Sequence[Any]) -> None:
    """Nobody wins by dropping some."""
    assert all(result.status is DispatchStatus.SUCCESS for result in results)


def fresh(messages: list[Any]) -> list[Any]:
    """Nobody pays for the garbage of the one before."""
    gc.collect()
    return messages


def warm_up(peers: Mapping[str, Prepare]) -> None:
    for prepare in peers.values():
        prepare(0).run()


@contextmanager
def stopping(peer: Any) -> Iterator[Any]:
    try:
        yield peer
    finally:
        peer.stop()


# What comes of it


def rates(name: str, slug: str, ours: Peer, peer: Peer, bar: float) -> Bar:
    """More per second is better."""
    columns = [Column(one.label, 1 / median(one.values), one is ours) for one in (ours, peer)]
    chart(slug, name, "messages/s", columns, bar, "higher")
    return Bar(name, median_ratio(peer.values, ours.values), bar, "higher", "x")


def times(name: str, slug: str, ours: Peer, peer: Peer, bar: float) -> Bar:
    """Less time is better."""
    columns = [Column(one.label, median(one.values) * 1_000, one is ours) for one in (ours, peer)]
    chart(slug, name, "ms", columns, bar, "lower")
    return Bar(name, median_ratio(ours.values, peer.values), bar, "lower", "x")


def chart(
    slug: str, title: str, unit: str, columns: list[Column], bar: float, better: Literal["higher", "lower"]
) -> None:
    words = f"the bar: {'≥' if better == 'higher' else '≤'} {bar:g} x"
    write_chart(RESULTS / f"online-{slug}.svg", title, unit, columns, bar * columns[1].value, words)


if __name__ == "__main__":
    run("On Ray", bars)

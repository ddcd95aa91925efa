"""Durable delivery on Ray: against SQLite and JetStream by hand, and against delivery that is not reliable."""

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter, sleep, time
from typing import Any, NamedTuple
from uuid import uuid4

import ray

from _charts import Column, write_chart
from _delivery_peers import Message, Table, nats_server, publish_raw, rows_of
from harness import Bar, Work, measure, median_ratio, run
from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.connect import local_ray
from raydispatch.actors.names import NAMESPACE, keeper_name
from raydispatch.settings import Delivery

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_SECONDS = 300.0
MODES = {
    "not-reliable": Delivery.shared(),
    "shared-1024": Delivery.reliable_shared(window=1_024),
    "shared-64": Delivery.reliable_shared(window=64),
    "shared-1": Delivery.reliable_shared(window=1),
    "exclusive-64": Delivery.reliable_exclusive(window=64),
    "key-shared-1024": Delivery.reliable_key_shared(window=1_024),
}


class Amounts(NamedTuple):
    """How much is measured."""

    rounds: int
    published: int
    delivered: int
    slowly: int
    """With a window of 1."""
    replayed: int
    failures: int


QUICK = Amounts(rounds=3, published=50_000, delivered=30_000, slowly=500, replayed=200_000, failures=5)
FULL = Amounts(rounds=5, published=200_000, delivered=60_000, slowly=2_000, replayed=1_000_000, failures=30)


def bars(quick: bool) -> Iterator[Bar]:
    amounts = QUICK if quick else FULL
    # For the peers, too: else it is Python's garbage collector that is measured.
    gc.set_threshold(50_000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raydispatch-bench-")))
        server = stack.enter_context(nats_server(folder))
        stack.enter_context(local_ray(num_cpus=8))
        yield from publishing(folder, server, amounts)
        yield from delivering(folder, amounts)
        yield from replaying(folder, amounts)
        yield from failing_over(folder, amounts)


def messages_of(count: int, topic: str = "dev.area-{}.events.v1") -> list[Message]:
    """About 100 bytes each, 1,000 topics, 1,000 keys."""
    note = "as always, please and thank you"
    return [
        (
            topic.format(number % 1_000),
            Envelope(
                {"number": number, "customer": f"customer-{number % 100}", "amount": number / 100, "note": note},
                "Order",
                key=f"key-{number % 1_000}",
            ),
        )
        for number in range(count)
    ]


async def nothing(envelope: Envelope[Any]) -> None:
    """What all handlers here do."""


def publishing(folder: Path, server: str, amounts: Amounts) -> Iterator[Bar]:
    """Nobody handles the messages meanwhile: that is not what the peers do either."""

    def engine(url: str) -> DispatchEngine:
        made = DispatchEngine(f"bench-{uuid4().hex[:8]}", journal=url)
        slow = Delivery.reliable_shared(per_second=0.01)
        made.dispatcher("later", topics="dev.**", category=MessageCategory.EVENT, delivery=slow)(nothing)
        return made

    few = max(2_000, amounts.published // 20)
    with (
        DispatchSystem.start(engine(f"sqlite://{folder}/published.db")) as on_sqlite,
        DispatchSystem.start(engine(server)) as on_nats,
    ):

        def ours(system: DispatchSystem, count: int) -> Callable[[int], Work]:
            def prepare(_: int) -> Work:
                messages = messages_of(count)
                return Work(lambda: accepted(system, messages), count)

            return prepare

        def by_hand(_: int) -> Work:
            messages, table = messages_of(amounts.published), Table(folder / f"{uuid4().hex}.db")
            return Work(lambda: table.insert(rows_of(messages)), amounts.published)

        def ready_made(_: int) -> Work:
            rows, table = rows_of(messages_of(amounts.published)), Table(folder / f"{uuid4().hex}.db")
            return Work(lambda: table.insert(rows), amounts.published)

        def jetstream(_: int) -> Work:
            messages = messages_of(few)
            return Work(lambda: asyncio.run(publish_raw(server, messages, f"raw-{uuid4().hex}")), few)

        seconds = measure(
            {
                "sqlite": ours(on_sqlite, amounts.published),
                "nats": ours(on_nats, amounts.published),
                "by-hand": by_hand,
                "ready-made": ready_made,
                "jetstream": jetstream,
            },
            amounts.rounds + 1,
        )
    sqlite, nats, rows, made, raw = (values[1:] for values in seconds.values())
    yield rates("durable publish: messages/s against rows inserted into SQLite by hand", "sqlite", sqlite, rows, 0.6)
    yield Bar("the same, against rows that were made before", median_ratio(made, sqlite), 0.4, "higher", "x")
    yield rates("durable publish on NATS: messages/s against JetStream, one by one", "jetstream", nats, raw, 0.6)


def accepted(system: DispatchSystem, messages: list[Message]) -> None:
    receipts = system.publish_many(messages, durable=True)
    assert all(receipt.status == "routed" for receipt in receipts)


def delivering(folder: Path, amounts: Amounts) -> Iterator[Bar]:
    """The same messages from the journal, to one replica, in each mode."""
    engine = DispatchEngine("modes", journal=f"sqlite://{folder}/modes.db")
    for name, delivery in MODES.items():
        engine.dispatcher(
            name, topics="dev.**", category=MessageCategory.EVENT, delivery=delivery, concurrency=1_000,
            breaker=None,
        )(nothing)  # fmt: skip
    with DispatchSystem.start(engine) as system:
        accepted(system, messages_of(amounts.delivered))
        for name in MODES:
            wait_for(system, name, amounts.delivered if name != "shared-1" else amounts.slowly)

        def again(name: str) -> Callable[[int], Work]:
            count = amounts.slowly if name == "shared-1" else amounts.delivered
            return lambda _: Work(lambda: replayed(system, name, amounts.delivered - count, count), count)

        seconds = measure({name: again(name) for name in MODES}, amounts.rounds + 1)
        latencies = {name: lone(system, name) for name in ("shared-64", "exclusive-64", "not-reliable")}
    free = seconds["not-reliable"][1:]
    for name, values in seconds.items():
        if name != "not-reliable":
            bar = 0.5 if name == "shared-1024" else 0.0
            yield Bar(f"{name}: messages/s of one consumer against not reliable", median_ratio(free, values[1:]), bar,
                      "higher", "x")  # fmt: skip
    for name, values in seconds.items():
        yield Bar(f"{name}: messages/s", 1 / median(values[1:]), 0, "higher", "/s")
    for name, value in latencies.items():
        yield Bar(f"{name}: from publish to the end of the handler, p50", value * 1_000, 1_000, "lower", "ms")


def statuses(system: DispatchSystem) -> dict[str, Any]:
    keeper = ray.get_actor(keeper_name(system.name), NAMESPACE)
    return {status.name: status for status in ray.get(keeper.status.remote())[0]}


def wait_for(system: DispatchSystem, name: str, count: int) -> None:
    deadline = monotonic() + LIMIT_SECONDS
    while statuses(system)[name].acked < count:
        assert monotonic() < deadline, statuses(system)
        sleep(0.002)


def replayed(system: DispatchSystem, name: str, start: int, count: int) -> None:
    """Deliver so many again, and wait for the last one. A subscription that begins anew counts from 0."""
    system.replay(name, start)
    wait_for(system, name, count)


def lone(system: DispatchSystem, name: str) -> float:
    """From the call of publish until the handler has ended, of a message that is alone."""
    taken = []
    for message in messages_of(50):
        before = statuses(system)[name].acked
        started = perf_counter()
        accepted(system, [message])
        while statuses(system)[name].acked == before:
            pass
        taken.append(perf_counter() - started)
    return median(taken)


def replaying(folder: Path, amounts: Amounts) -> Iterator[Bar]:
    engine = DispatchEngine("replay", journal=f"sqlite://{folder}/replay.db")
    idle = Delivery.reliable_shared(per_second=0.01)
    engine.dispatcher("idle", topics="dev.**", category=MessageCategory.EVENT, delivery=idle)(nothing)
    table = Table(folder / "raw.db")
    with DispatchSystem.start(engine) as system:
        for _ in range(0, amounts.replayed, 50_000):
            messages = messages_of(50_000)
            accepted(system, messages)
            table.insert(rows_of(messages))

        async def read() -> int:
            count = 0
            window = Delivery.reliable_shared(window=20_000)
            async with await system.consume(f"all-{uuid4().hex}", start="first", delivery=window) as reader:
                while count < amounts.replayed:
                    some = await reader.batch()
                    for message in some:
                        message.ack()
                    count += len(some)
            return count

        seconds = measure(
            {
                "ours": lambda _: Work(lambda: asyncio.run(read()), amounts.replayed),
                "raw": lambda _: Work(table.read, amounts.replayed),
            },
            amounts.rounds,
        )
    name = f"replay of {amounts.replayed:,} messages: messages/s against rows of SQLite, read and parsed"
    yield rates(name, "replay", seconds["ours"], seconds["raw"], 0.5)


def failing_over(folder: Path, amounts: Amounts) -> Iterator[Bar]:
    """Kill the active consumer, and see when the next one begins."""
    seen = folder / "seen"
    path = str(seen)

    async def note(envelope: Envelope[Any]) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{os.getpid()} {time()}\n".encode())
        os.close(handle)

    engine = DispatchEngine("failing", journal=f"sqlite://{folder}/failing.db")
    one = Delivery.reliable_exclusive(window=1)
    engine.dispatcher(
        "exclusive", topics="dev.**", category=MessageCategory.EVENT, delivery=one, replicas=2, breaker=None
    )(note)
    gaps: list[float] = []
    with DispatchSystem.start(engine) as system:
        gaps += [gap(system, seen) for _ in range(amounts.failures)]
    worst = quantiles(gaps, n=100)[98] if len(gaps) > 1 else gaps[0]
    yield Bar("exclusive: from kill -9 of the consumer to the next one's first message, p99", worst, 1.0, "lower", "s")


def gap(system: DispatchSystem, seen: Path) -> float:
    deadline = monotonic() + 60

    def alive() -> bool:
        return all(replica.alive for replica in system.status().dispatchers["exclusive"].replicas)

    while not alive():
        assert monotonic() < deadline
        sleep(0.1)
    accepted(system, messages_of(1))
    before = _lines(seen, deadline, 0)
    victim = int(before[-1].split()[0])
    os.kill(victim, signal.SIGKILL)
    killed = time()
    while True:
        accepted(system, messages_of(1))
        for line in _lines(seen, deadline, len(before)):
            pid, at = line.split()
            if int(pid) != victim and float(at) > killed:
                return float(at) - killed
        assert monotonic() < deadline
        sleep(0.005)


def _lines(seen: Path, deadline: float, after: int) -> list[str]:
    while monotonic() < deadline:
        lines = seen.read_text().splitlines() if seen.exists() else []
        if len(lines) > after or after:
            return lines[after:]
        sleep(0.005)
    raise TimeoutError("nobody handled a message")


def rates(name: str, slug: str, ours: list[float], peer: list[float], bar: float) -> Bar:
    columns = [Column("raydispatch", 1 / median(ours), True), Column("the other", 1 / median(peer), False)]
    write_chart(
        RESULTS / f"delivery-{slug}.svg", name, "messages/s", columns, bar * columns[1].value, f"the bar: ≥ {bar:g} x"
    )
    return Bar(name, median_ratio(peer, ours), bar, "higher", "x")


if __name__ == "__main__":
    run("Durable delivery", bars)

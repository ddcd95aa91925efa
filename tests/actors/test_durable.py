"""Durable messages on a real Ray: publishing, delivering, failing over, redriving, reading, with processes killed."""

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from time import monotonic, time
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray import cloudpickle
from tests.actors.helping import (
    actors_of,
    is_gone,
    journal_in,
    keeper_of,
    kill,
    numbers,
    recorded,
    recorder_class,
    replica_pids,
    wait_until,
)

from raydispatch import DispatchEngine, Envelope, MessageCategory, RetrySettings
from raydispatch.actors import DispatchSystem
from raydispatch.actors import durable as module
from raydispatch.actors.durable import DurableVerbs
from raydispatch.actors.status import SubscriptionInfo
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.letters import LetterFilter, pack_letter
from raydispatch.delivery.memories import unpacked_note
from raydispatch.delivery.reader import Delivered, Reader
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Receipt
from raydispatch.errors import ErrorCode, InvalidState, StartFailed
from raydispatch.settings import Delivery, EngineSettings, PoisonPolicy, SystemSettings

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

EVENT = MessageCategory.EVENT
ORDER, TABLE, MOODY = "dev.order.events.v1", "dev.table.events.v1", "dev.moody.events.v1"
ORDERED, KEYED = "dev.ordered.events.v1", "dev.keyed.events.v1"
POISON, MADE, DEADLY = "dev.poison.events.v1", "dev.made.events.v1", "dev.deadly.events.v1"
AT_ONCE = RetrySettings(tries=2, first_delay_seconds=0)
FOR_EVER = RetrySettings(tries=2, first_delay_seconds=0.02, max_delay_seconds=0.05)


def messages(topic: str, *payloads: Any, key: str | None = None) -> list[tuple[str, Envelope[Any]]]:
    return [(topic, Envelope(payload, message_type="Order", key=key)) for payload in payloads]


def note(path: str, envelope: Envelope[Any]) -> None:
    """As a `Recorder` does."""
    file = os.open(path, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
    os.write(file, f"{envelope.payload} {envelope.attempt} {os.getpid()}\n".encode())
    os.close(file)


def unless(flag: Path, seen: Path, *bad: int) -> Callable[[Envelope[Any]], None]:
    """A handler that fails with these, or with all, until the flag is there."""
    switch, place = str(flag), str(seen)

    def handle(envelope: Envelope[Any]) -> None:
        if (not bad or envelope.payload in bad) and not os.path.exists(switch):
            raise ConnectionError("down")
        note(place, envelope)

    return handle


def unless_deadly(seen: Path) -> Callable[[Envelope[Any]], None]:
    """A handler whose process does not survive 13."""
    place = str(seen)

    def handle(envelope: Envelope[Any]) -> None:
        if envelope.payload == 13:
            os._exit(1)
        note(place, envelope)

    return handle


def in_tables(seen: Path) -> Any:
    """A batch handler that notes its messages, and in another file how many came together."""
    place = str(seen)

    async def handle(table: pa.Table) -> None:
        for payload, attempt in zip(table["payload"].to_pylist(), table["attempt"].to_pylist(), strict=True):
            note(place, Envelope(int(payload), attempt=attempt))
        note(f"{place}-sizes", Envelope(len(table)))

    return handle


def forwarding(envelope: Envelope[Any]) -> str:
    return "dev.done.events.v1"


# Without Ray


class Front:
    """In the place of the engine in a system: notes batches, and holds them up."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.batches: list[int] = []
        self.now = self.most = 0
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.settings = settings or EngineSettings()

    async def publish_many(self, batch: Sequence[Any], *, durable: bool, deliver_at: Any) -> list[Receipt]:
        self.batches.append(len(batch))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return [Receipt(DispatchStatus.ROUTED, topic, one.message_id, one.correlation_id) for topic, one in batch]

    def remote_keeper(self) -> "Front":
        return self

    async def ask(self, *question: Any) -> Any:
        self.asked.append(question)
        return self.answers[question[0]]


class Verbs(DurableVerbs):
    """The verbs of a system that is none."""

    def __init__(self, front: Front) -> None:
        self._front: Any = front
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.in_memory: list[bytes] = []

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _ask(self, method: str, *arguments: object) -> Any:
        assert method == "dead_letters"
        return self.in_memory

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def verbs(tmp_path: Path) -> Iterator[Any]:
    verbs = Verbs(Front(journal_in(tmp_path)))
    yield verbs
    verbs.close()


def test_any_number_is_published_in_batches_a_few_at_a_time(verbs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 10)
    monkeypatch.setattr(module, "WINDOW", 3)
    many = messages(ORDER, *range(95))

    receipts = verbs.publish_many(iter(many), durable=True)

    assert [receipt.message_id for receipt in receipts] == [envelope.message_id for _, envelope in many]
    assert (verbs._front.batches, verbs._front.most) == ([10] * 9 + [5], 3)
    assert verbs.publish_many([]) == []


def letter_of(number: int, dispatcher_id: str = "a") -> DeadLetter:
    now = datetime.now(UTC)
    outcome = Outcome(dispatcher_id, DispatchStatus.DISPATCHER_ERROR, error_type="OSError")
    envelope = Envelope(number, message_type="Order", topic=ORDER, key=f"k{number}")
    return DeadLetter(ORDER, envelope, outcome, now, now, "version")


def test_dead_letters_are_those_of_the_journal_and_those_in_memory(verbs: Any) -> None:
    verbs.in_memory = [cloudpickle.dumps(letter_of(1)), cloudpickle.dumps(letter_of(2, "b"))]
    verbs._front.answers = {"letters": [pack_letter(letter_of(3))]}

    found = verbs.dead_letters("a", error_type="OSError")

    assert sorted(letter.envelope.payload for letter in found) == [1, 3]
    assert verbs._front.asked == [("letters", LetterFilter("a", "OSError"))]


def test_without_a_journal_dead_letters_are_those_in_memory() -> None:
    verbs: Any = Verbs(Front())
    verbs.in_memory = [cloudpickle.dumps(letter_of(number)) for number in range(3)]

    found = verbs.dead_letters(key="k1")
    verbs.close()

    assert [letter.envelope.payload for letter in found] == [1]


@pytest.mark.parametrize(("verb", "method"), [("redrive", "redrive"), ("purge_dead_letters", "purge")])
def test_every_filter_reaches_the_keeper(verbs: Any, verb: str, method: str) -> None:
    verbs._front.answers = {method: 7}
    now, number = datetime.now(UTC), letter_of(1).envelope.message_id
    filters: dict[str, Any] = {"error_type": "E", "key": "k", "since": now, "until": now, "message_id": number}

    assert getattr(verbs, verb)("a", **filters) == 7

    assert verbs._front.asked == [(method, LetterFilter("a", **filters))]


# On a real Ray


class Place:
    """A system with a dispatcher for each thing that is tested, and the files that they write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.system: DispatchSystem = None  # type: ignore[assignment]  # It is started when the engine is made.

    def seen(self, name: str) -> Path:
        return self.folder / name

    def flag(self, name: str) -> Path:
        return self.folder / f"{name}-is-well"

    def engine(self) -> DispatchEngine:
        engine = DispatchEngine("post", settings=journal_in(self.folder))

        def add(name: str, topic: str, handler: Any = None, **options: Any) -> None:
            handler = handler or recorder_class(self.seen(name))
            given = {"breaker": None, "retry": AT_ONCE, **options}
            engine.dispatcher(name, topics=topic, category=EVENT, **given)(handler)

        add("billing", ORDER)
        add("audit", ORDER, delivery=Delivery.reliable_exclusive(window=1_000))
        add("tables", TABLE, in_tables(self.seen("tables")), batch=True, delivery=Delivery(window=1_000))
        add("moody", MOODY, unless(self.flag("moody"), self.seen("moody")))
        add("steady", MOODY)
        strict = Delivery.reliable_exclusive(window=1)
        add("ordered", ORDERED, replicas=2, concurrency=1, delivery=strict)
        add("keyed", KEYED, delivery=Delivery.reliable_key_shared(window=64))
        add("dropping", POISON, unless(self.flag("never"), self.seen("dropping"), 13), poison=PoisonPolicy.DROP)
        stubborn = unless(self.flag("blocking"), self.seen("blocking"), 13)
        options: dict[str, Any] = {"poison": PoisonPolicy.BLOCK, "retry": FOR_EVER, "delivery": strict}
        add("blocking", POISON, stubborn, concurrency=1, **options)
        add("deadly", DEADLY, unless_deadly(self.seen("deadly")))
        add("maker", MADE, forwarding, outputs="journal")
        add("sink", "dev.done.events.v1")
        return engine

    def publish(self, topic: str, *payloads: Any, key: str | None = None) -> list[tuple[str, Envelope[Any]]]:
        sent = messages(topic, *payloads, key=key)
        receipts = self.system.publish_many(sent, durable=True)
        assert {receipt.status for receipt in receipts} == {DispatchStatus.ROUTED}
        return sent

    def subscription(self, name: str) -> SubscriptionInfo:
        return subscription_of(self.system, name)

    def wait_for(self, name: str, wanted: Sequence[int], times: int = 1) -> None:
        """Until a dispatcher has handled these, each so often."""

        def are_there() -> bool:
            ran = numbers(self.seen(name))
            return all(ran[number] >= times for number in wanted)

        wait_until(are_there)


def subscription_of(system: DispatchSystem, name: str) -> SubscriptionInfo:
    found: list[SubscriptionInfo] = []

    def is_there() -> bool:
        # While the keeper is being restarted, nobody knows.
        found.extend(one for one in system.status().subscriptions if one.name == name)
        return bool(found)

    wait_until(is_there)
    return found[0]


@pytest.fixture(scope="module")
def place(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("post"))
    with DispatchSystem.start(place.engine(), routers=1) as place.system:
        yield place
    assert is_gone("post")


def firsts(path: Path) -> list[int]:
    """In which order messages ran for the first time."""
    return list(dict.fromkeys(number for number, _, _ in recorded(path)))


# Delivering


@pytest.mark.slow
def test_a_durable_message_is_delivered_to_each_dispatcher_by_its_own_cursor(place: Place) -> None:
    sent = range(1_000, 1_500)

    place.publish(ORDER, *sent)
    place.wait_for("billing", sent)
    place.wait_for("audit", sent)
    wait_until(lambda: all(place.subscription(name).lag == 0 for name in ("billing", "audit")))

    billing, audit = place.subscription("billing"), place.subscription("audit")
    assert (str(billing.mode), str(audit.mode)) == ("shared", "exclusive")
    assert (billing.reliable, billing.consumers, billing.in_flight, billing.waiting) == (True, 1, 0, 0)
    assert min(billing.acked, audit.acked) >= 500
    assert [count for number, count in numbers(place.seen("billing")).items() if number in sent] == [1] * 500
    assert {attempt for number, attempt, _ in recorded(place.seen("billing")) if number in sent} == {1}


@pytest.mark.slow
def test_the_status_tells_of_every_subscription(place: Place) -> None:
    names = {one.name for one in place.system.status().subscriptions}

    assert names == set(place.system.status().dispatchers)


@pytest.mark.slow
def test_one_message_that_is_published_often_is_handled_once(place: Place) -> None:
    (message,) = place.publish(ORDER, 2_000)
    for _ in range(3):
        assert place.system.publish(*message, durable=True).status is DispatchStatus.ROUTED
    place.publish(ORDER, 2_001)

    place.wait_for("billing", [2_001])
    assert numbers(place.seen("billing"))[2_000] == 1


@pytest.mark.slow
def test_what_a_dispatcher_has_handled_is_known_after_its_process_was_killed(place: Place) -> None:
    (message,) = place.publish(ORDER, 3_000)
    place.wait_for("billing", [3_000])
    wait_until(lambda: message[1].message_id in remembered("post", "billing"))

    kill_and_wait(place.system, "billing")
    result = place.system.dispatch(*message)

    repeated = {outcome.dispatcher_id: outcome.repeated for outcome in result.outcomes}
    assert repeated == {"billing": True, "audit": True}
    assert numbers(place.seen("billing"))[3_000] == 1


def remembered(system: str, dispatcher_id: str) -> set[Any]:
    return {unpacked_note(note, dispatcher_id)[0] for note in ray.get(keeper_of(system).recall.remote(dispatcher_id))}


def kill_and_wait(system: DispatchSystem, dispatcher_id: str) -> None:
    """End the process of a dispatcher's replica, and wait for the next one."""
    (pid,) = replica_pids(system, dispatcher_id)
    kill(pid)
    wait_until(lambda: all(one.alive and one.pid != pid for one in system.status().dispatchers[dispatcher_id].replicas))


@pytest.mark.slow
def test_a_message_is_not_delivered_before_its_time(place: Place) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1)

    receipt = place.system.publish(*messages(ORDER, 4_000)[0], durable=True, deliver_at=due)
    place.publish(ORDER, 4_001)
    place.wait_for("billing", [4_001])
    early = numbers(place.seen("billing"))[4_000]
    at = time()
    place.wait_for("billing", [4_000])

    assert receipt.status is DispatchStatus.ROUTED
    assert at > due.timestamp() or early == 0
    assert time() >= due.timestamp()


@pytest.mark.slow
def test_a_batch_handler_gets_durable_messages_together(place: Place) -> None:
    place.publish(TABLE, *range(2_000))

    place.wait_for("tables", range(2_000))

    sizes = [size for size, _, _ in recorded(place.seen("tables-sizes"))]
    assert (sum(sizes), max(numbers(place.seen("tables")).values())) == (2_000, 1)
    assert max(sizes) > 20


@pytest.mark.slow
def test_outputs_may_go_into_the_journal(place: Place) -> None:
    place.publish(MADE, *range(50))

    place.wait_for("sink", range(50))

    assert set(numbers(place.seen("sink")).values()) == {1}


# Failures


@pytest.mark.slow
def test_dead_letters_are_listed_and_redriven_to_the_one_who_failed(place: Place) -> None:
    sent = place.publish(MOODY, 1, key="red") + place.publish(MOODY, 2, 3, key="blue")
    ids = {envelope.message_id for _, envelope in sent}
    wait_until(lambda: len(place.system.dead_letters("moody")) == 3)
    place.wait_for("steady", [1, 2, 3])

    found = place.system.dead_letters("moody", error_type="ConnectionError")
    assert {letter.envelope.message_id for letter in found} == ids
    assert {(letter.topic, letter.outcome.attempts, letter.envelope.attempt) for letter in found} == {(MOODY, 2, 2)}
    assert [letter.envelope.payload for letter in place.system.dead_letters("moody", key="red")] == [1]
    assert place.system.dead_letters("steady") == []

    place.flag("moody").touch()
    assert place.system.redrive("moody", key="blue") == 2
    place.wait_for("moody", [2, 3])
    again = place.system.redrive("moody", key="blue")
    assert place.system.redrive("moody") == 1
    place.wait_for("moody", [1])

    assert again == 0
    assert place.system.dead_letters("moody") == []
    assert sorted((number, attempt) for number, attempt, _ in recorded(place.seen("moody"))) == [(1, 3), (2, 3), (3, 3)]
    assert set(numbers(place.seen("steady")).values()) == {1}


@pytest.mark.slow
def test_poison_is_dropped_or_holds_up_the_rest_as_the_dispatcher_wants(place: Place) -> None:
    place.publish(POISON, *range(20))
    place.wait_for("dropping", [number for number in range(20) if number != 13])
    place.wait_for("blocking", range(13))
    wait_until(lambda: place.subscription("dropping").lag == 0)
    wait_until(lambda: place.subscription("blocking").retried >= 3)

    held_up = firsts(place.seen("blocking"))
    letters = place.system.dead_letters("dropping") + place.system.dead_letters("blocking")
    place.flag("blocking").touch()
    place.wait_for("blocking", range(20))

    assert (held_up, letters) == (list(range(13)), [])
    assert firsts(place.seen("blocking")) == list(range(20))
    assert place.subscription("dropping").given_up == 1
    assert 13 not in numbers(place.seen("dropping"))


@pytest.mark.slow
def test_a_message_that_kills_its_process_ends_alone_as_a_dead_letter(place: Place) -> None:
    place.publish(DEADLY, *range(100))

    wait_until(lambda: len(place.system.dead_letters("deadly")) == 1)
    place.wait_for("deadly", [number for number in range(100) if number != 13])

    (letter,) = place.system.dead_letters("deadly")
    assert (letter.envelope.payload, letter.outcome.error_code) == (13, ErrorCode.REPLICA_LOST)
    check_repeats_say_so(recorded(place.seen("deadly")))
    wait_until(lambda: place.subscription("deadly").lag == 0)


# Failing over


@pytest.mark.slow
def test_exclusive_delivery_keeps_order_and_fails_over(place: Place) -> None:
    total = 1_000
    place.publish(ORDERED, *range(total))
    wait_until(lambda: len(recorded(place.seen("ordered"))) >= 300)
    active = recorded(place.seen("ordered"))[-1][2]

    kill(active)
    killed_at = monotonic()
    wait_until(lambda: recorded(place.seen("ordered"))[-1][2] != active)
    took = monotonic() - killed_at
    place.wait_for("ordered", range(total))

    lines = recorded(place.seen("ordered"))
    assert firsts(place.seen("ordered")) == list(range(total))
    assert len(lines) - total <= 1  # Its window.
    check_repeats_say_so(lines)
    assert len({process for _, _, process in lines}) == 2
    assert took < 5


def check_repeats_say_so(lines: Sequence[tuple[int, int, int]]) -> None:
    """What runs again has a higher attempt than the first."""
    seen: set[int] = set()
    for number, attempt, _ in lines:
        assert number not in seen or attempt > 1, f"{number} ran again as if for the first time"
        seen.add(number)


@pytest.mark.slow
def test_key_shared_delivery_keeps_the_order_of_each_key_while_replicas_come_go_and_die(place: Place) -> None:
    ended = threading.Event()

    def publish() -> int:
        for start in count(0, 100):
            if ended.is_set():
                return start
            numbered = range(start, start + 100)
            sent = [(KEYED, Envelope(number, message_type="Order", key=f"k{number % 37}")) for number in numbered]
            assert {one.status for one in place.system.publish_many(sent, durable=True)} == {DispatchStatus.ROUTED}
            wait_until(lambda so_far=start: len(recorded(place.seen("keyed"))) >= so_far - 1_000)  # type: ignore[misc]
        raise AssertionError

    with ThreadPoolExecutor(1) as publisher:
        publishing = publisher.submit(publish)
        try:
            wait_until(lambda: len(recorded(place.seen("keyed"))) > 200)
            place.system.scale("keyed", 3)
            wait_until(lambda: len({process for _, _, process in recorded(place.seen("keyed"))}) == 3)
            kill(recorded(place.seen("keyed"))[-1][2])
            before = len(recorded(place.seen("keyed")))
            wait_until(lambda: len(recorded(place.seen("keyed"))) > before + 300)
            place.system.scale("keyed", 1)
        finally:
            ended.set()
        total = publishing.result()
    place.wait_for("keyed", range(total))
    check_repeats_say_so(recorded(place.seen("keyed")))

    by_key: dict[int, list[int]] = {}
    for number in firsts(place.seen("keyed")):
        by_key.setdefault(number % 37, []).append(number)
    assert all(ran == sorted(ran) for ran in by_key.values())
    assert place.subscription("keyed").consumers == 1


@pytest.mark.slow
def test_a_keeper_that_is_killed_loses_nothing_and_publishing_goes_on(place: Place) -> None:
    wanted = range(100_000, 106_000)

    def publish() -> Counter[DispatchStatus]:
        statuses: Counter[DispatchStatus] = Counter()
        for start in range(wanted.start, wanted.stop, 200):
            batch = messages(ORDER, *range(start, start + 200))
            statuses.update(receipt.status for receipt in place.system.publish_many(batch, durable=True))
        return statuses

    with ThreadPoolExecutor(1) as publisher:
        publishing: Future[Counter[DispatchStatus]] = publisher.submit(publish)
        wait_until(lambda: numbers(place.seen("billing"))[wanted.start + 1_000] > 0)
        keeper = keeper_of("post")
        pid = ray.get(keeper.pid.remote())
        kill(pid)
        statuses = publishing.result()
    place.wait_for("billing", wanted)
    place.wait_for("audit", wanted)

    assert statuses == {DispatchStatus.ROUTED: len(wanted)}
    assert ray.get(keeper.pid.remote()) != pid
    # The replicas live, and remember: what comes again is not handled again.
    for name in ("billing", "audit"):
        assert {count for number, count in numbers(place.seen(name)).items() if number in wanted} == {1}
    wait_until(lambda: all(place.subscription(name).lag == 0 for name in ("billing", "audit")))


# Reading and replaying


async def read(reader: Reader, count: int) -> list[Delivered]:
    found: list[Delivered] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await reader.batch(count - len(found))
    return found


def payloads(found: Sequence[Delivered]) -> list[Any]:
    return [message.envelope.payload for message in found]


@pytest.mark.slow
def test_messages_can_be_read_in_this_process(place: Place) -> None:
    wanted = list(range(200_000, 200_100))

    async def story() -> tuple[list[Any], list[int]]:
        async with await place.system.consume("feed", "*.order.**", start="head") as reader:
            place.publish(ORDER, *wanted)
            first = await read(reader, 50)
            for message in first[:49]:
                message.ack()
            first[49].nack(delay_seconds=0)
            rest = await read(reader, 51)
            attempts = [one.envelope.attempt for one in rest if one.envelope.payload == first[49].envelope.payload]
            rest[-1].reject("no such customer")
            for message in rest[:-1]:
                message.ack()
            rejected.append(rest[-1].envelope.message_id)
            await asyncio.to_thread(wait_until, lambda: len(place.system.dead_letters("feed")) == 1)
            return payloads(first) + payloads(rest), attempts

    rejected: list[Any] = []
    found, attempts = asyncio.run(story())

    assert set(found) == set(wanted)
    assert attempts == [2]
    (letter,) = place.system.dead_letters("feed")
    assert (letter.envelope.message_id, letter.outcome.error_message) == (rejected[0], "no such customer")
    assert place.system.purge_dead_letters("feed") == 1


@pytest.mark.slow
def test_readers_share_and_the_next_one_goes_on_where_they_were(place: Place) -> None:
    async def story() -> list[list[Any]]:
        async with (
            await place.system.consume("pair", "*.order.**", delivery=Delivery(window=40)) as one,
            await place.system.consume("pair", "*.order.**") as other,
        ):
            place.publish(ORDER, *range(210_000, 210_060))
            both = [await read(one, 20), await read(other, 20)]
            for message in both[0] + both[1]:
                message.ack()
        async with await place.system.consume("pair", "*.order.**", start="first") as third:
            return [*map(payloads, both), payloads(await read(third, 20))]

    one, other, third = asyncio.run(story())

    assert len(set(one + other)) == 40
    assert set(one + other + third) == set(range(210_000, 210_060))


@pytest.mark.slow
def test_a_reader_begins_where_it_wants(place: Place) -> None:
    place.publish(ORDER, 220_000)
    since = datetime.now(UTC)
    place.publish(ORDER, 220_001, 220_002)

    async def story() -> list[Any]:
        async with await place.system.consume("since", "*.order.**", start=since) as reader:
            late = await read(reader, 2)
        async with await place.system.consume("offset", "*.order.**", start=late[1].offset) as reader:
            exact = await read(reader, 1)
        async with await place.system.consume("all", "**", start="first") as reader:
            oldest = await read(reader, 1)
        return [payloads(late), payloads(exact), oldest[0].offset]

    assert asyncio.run(story()) == [[220_001, 220_002], [220_002], 0]


@pytest.mark.slow
def test_a_replay_runs_handlers_again(place: Place) -> None:
    since = datetime.now(UTC)
    wanted = range(230_000, 230_020)
    place.publish(ORDER, *wanted)
    place.wait_for("billing", wanted)
    wait_until(lambda: place.subscription("billing").lag == 0)

    place.system.replay("billing", since)

    place.wait_for("billing", wanted, times=2)
    wait_until(lambda: place.subscription("billing").lag == 0)
    ran = numbers(place.seen("billing"))
    assert {ran[number] for number in wanted} == {2}
    assert {numbers(place.seen("audit"))[number] for number in wanted} == {1}


# Stopping, starting, swapping


def shop(folder: Path, *names: str, journal: bool = True) -> DispatchEngine:
    """All its dispatchers get every order."""
    engine = DispatchEngine("shop-post", settings=journal_in(folder) if journal else None)
    for name in names:
        engine.dispatcher(name, topics=ORDER, category=EVENT, breaker=None)(recorder_class(folder / name))
    return engine


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_dispatchers_come_and_go_with_swaps_and_go_on_where_they_were_after_a_stop(tmp_path: Path) -> None:
    with DispatchSystem.start(shop(tmp_path, "a"), routers=1) as system:
        system.publish_many(messages(ORDER, *range(100)), durable=True)
        system.swap(shop(tmp_path, "a", "b"))
        system.publish_many(messages(ORDER, *range(100, 200)), durable=True)
        wait_until(lambda: set(numbers(tmp_path / "b")) >= set(range(100, 200)))
        system.swap(shop(tmp_path, "b"))
        assert [one.name for one in system.status().subscriptions] == ["b"]
        system.publish_many(messages(ORDER, *range(200, 3_000)), durable=True)  # And stop in the middle of it.
    assert is_gone("shop-post")

    with DispatchSystem.start(shop(tmp_path, "a", "b"), routers=1) as system:
        system.publish_many(messages(ORDER, *range(3_000, 3_100)), durable=True)
        wait_until(lambda: set(numbers(tmp_path / "a")) >= set(range(3_100)))
        wait_until(lambda: set(numbers(tmp_path / "b")) >= set(range(100, 3_100)))

    # A stop is no loss: nothing was in doubt, so that nothing ran twice.
    assert set(numbers(tmp_path / "a").values()) == {1}
    assert Counter(number for number in numbers(tmp_path / "b").elements()) == Counter(range(100, 3_100))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_journal_in_an_impossible_place_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(StartFailed) as caught:
        DispatchSystem.start(shop(tmp_path / "nowhere", "a"))

    words = f"There is no directory {tmp_path}/nowhere for the journal journal.db: make it first."
    assert words in str(caught.value)
    wait_until(lambda: not actors_of("shop-post"))


@pytest.fixture(scope="module")
def bare(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DispatchSystem, Path]]:
    """A system that has no journal yet."""
    folder = tmp_path_factory.mktemp("bare")
    settings = SystemSettings(stop_seconds=5)
    with DispatchSystem.start(shop(folder, "a", journal=False), routers=1, settings=settings) as system:
        yield system, folder


@pytest.mark.slow
def test_without_a_journal_nothing_is_durable(bare: tuple[DispatchSystem, Path]) -> None:
    system, _ = bare

    with pytest.raises(InvalidState, match="journal"):
        system.publish(*messages(ORDER, 1)[0], durable=True)
    with pytest.raises(InvalidState, match="journal"):
        system.redrive()
    with pytest.raises(InvalidState, match="journal"):
        asyncio.run(system.consume("feed"))
    assert (system.dead_letters(), system.status().subscriptions) == ([], ())


@pytest.mark.slow
def test_a_swap_can_bring_a_journal(bare: tuple[DispatchSystem, Path]) -> None:
    system, folder = bare

    system.swap(shop(folder, "a", "b"))
    attached = DispatchSystem.attach("shop-post")
    receipt = attached.publish(*messages(ORDER, 7)[0], durable=True)
    attached.close()

    assert receipt.status is DispatchStatus.ROUTED
    wait_until(lambda: numbers(folder / "a")[7] == numbers(folder / "b")[7] == 1)


@pytest.mark.slow
def test_who_has_swapped_a_journal_in_can_use_it(bare: tuple[DispatchSystem, Path]) -> None:
    system, folder = bare
    system.swap(shop(folder, "a", "b"))

    assert system.publish(*messages(ORDER, 8)[0], durable=True).status is DispatchStatus.ROUTED

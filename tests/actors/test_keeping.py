import asyncio
import threading
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from ray.exceptions import RayTaskError
from tests.actors.fakes import TOPIC, FakeHandle, FakeRay, Journals, Shared, run, turns, until
from tests.actors.fakes import Office as RealOffice

from raydispatch import Envelope
from raydispatch.actors import keeping as module
from raydispatch.actors.keeping import KeeperClient, RemoteKeeper, ReplicaKeeping
from raydispatch.actors.names import keeper_name
from raydispatch.delivery.memories import packed_note, unpacked_note
from raydispatch.delivery.segment import Segment
from raydispatch.dispatch.memory import OutcomeMemory
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import DispatchError, InvalidParameter, JournalUnavailable
from raydispatch.messages.stored import restored

PATIENCE = 0.3
SUCCESS = Outcome("billing", DispatchStatus.SUCCESS, "route", (), 1, 2.0)


class FakeKeeper(Shared):
    """Keeps segments and notes in lists, and fails as it is told."""

    def __init__(self) -> None:
        self.appends: list[list[bytes]] = []
        self.notes: list[tuple[str, list[bytes]]] = []
        self.known: list[bytes] = []
        self.readers: set[str] = set()
        self.fault: BaseException | None = None
        self.bad: bytes | None = None
        """A segment that it does not take."""

    async def append(self, packed: list[bytes], lane_id: str = "", number: int = 0) -> None:
        self._fail()
        if self.bad is not None and self.bad in packed:
            raise JournalUnavailable("the disk is full")
        self.appends.append(packed)

    async def note(self, dispatcher_id: str, notes: Sequence[bytes]) -> None:
        self._fail()
        self.notes.append((dispatcher_id, list(notes)))

    async def recall(self, dispatcher_id: str) -> list[bytes]:
        self._fail()
        return self.known if dispatcher_id == "billing" else []

    async def has_reader(self, topic: str, message_type: str) -> bool:
        self._fail()
        return topic in self.readers

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault

    @property
    def payloads(self) -> list[list[Any]]:
        """Of each call, of all its segments."""
        return [[one for data in packed for one in payloads_in(data)] for packed in self.appends]


def payloads_in(data: bytes) -> list[Any]:
    segment = Segment.unpack(data)
    keys = [segment.keys[code] for code in segment.codes]
    return [restored(blob, *key).payload for blob, key in zip(segment.blobs, keys, strict=True)]


class Office:
    """A fake keeper, where clients find it."""

    def __init__(self, fake: FakeRay) -> None:
        self.fake = fake
        self.keeper = FakeKeeper()
        self.handle = self.start()

    def start(self) -> FakeHandle:
        return self.fake.start(keeper_name("shop"), lambda: self.keeper)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return FakeRay(monkeypatch)


def message(payload: object) -> tuple[str, Envelope[Any]]:
    return TOPIC, Envelope(payload, message_type="Order")


# Asking


def test_a_question_is_answered(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.keeper.readers = {TOPIC}

        assert await KeeperClient("shop", PATIENCE).ask("has_reader", TOPIC, "Order") is True

    run(story())


def test_while_the_keeper_is_away_it_is_asked_again(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        client = KeeperClient("shop", PATIENCE)
        await client.ask("append", [b"1"])
        fake.kill(office.handle)

        asking = asyncio.create_task(client.ask("append", [b"2"]))
        await until(lambda: office.handle.count("append") == 2)
        office.start()
        await asking

        assert office.keeper.appends == [[b"1"], [b"2"]]

    run(story())


def test_an_answer_that_was_lost_is_asked_for_again(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.handle.lose_answer = "append"

        await KeeperClient("shop", PATIENCE).ask("append", [b"1"])

        assert office.keeper.appends == [[b"1"], [b"1"]]  # The journal knows message ids.

    run(story())


def test_when_its_patience_is_at_an_end_it_says_so(fake: FakeRay) -> None:
    async def story() -> None:
        with pytest.raises(JournalUnavailable, match=r"^the keeper of the journal of 'shop' does not answer \(ValueE"):
            await KeeperClient("shop", 0.05).ask("append", [])

    run(story())


def test_a_question_may_have_a_patience_of_its_own(fake: FakeRay) -> None:
    async def story() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(JournalUnavailable):
                await KeeperClient("shop", 1_000.0).ask("append", [], seconds=0.05)

    run(story())


def test_a_keeper_that_never_answers_is_given_up(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.handle.hold("append")

        with pytest.raises(JournalUnavailable, match="TimeoutError"):
            await KeeperClient("shop", 0.05).ask("append", [])

    run(story())


@pytest.mark.parametrize("error", [InvalidParameter("no such thing"), JournalUnavailable("the disk is full")])
def test_errors_of_ours_come_through_as_they_are(fake: FakeRay, error: DispatchError) -> None:
    async def story() -> None:
        office = Office(fake)
        office.keeper.fault = error

        with pytest.raises(type(error)) as caught:
            await KeeperClient("shop", PATIENCE).ask("append", [])

        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        assert office.handle.count("append") == 1

    run(story())


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), TimeoutError("x")])
def test_a_fault_in_the_keeper_is_not_asked_for_twice(fake: FakeRay, error: Exception) -> None:
    async def story() -> None:
        office = Office(fake)
        office.keeper.fault = error

        with pytest.raises(RayTaskError):
            await KeeperClient("shop", PATIENCE).ask("append", [])

        assert office.handle.count("append") == 1

    run(story())


def test_who_gives_up_waiting_is_let_go(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.handle.hold("append")
        asking = asyncio.create_task(KeeperClient("shop", 1_000.0).ask("append", []))
        await until(lambda: office.handle.count("append"))

        asking.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asking

    run(story())


# Publishing


def test_what_is_published_at_the_same_time_goes_in_few_calls(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", PATIENCE)

        await asyncio.gather(*(remote.append([message(number)], None) for number in range(500)))

        assert len(office.keeper.appends) == 1
        assert office.keeper.payloads == [list(range(500))]

    run(story())


def test_what_comes_while_calls_are_under_way_waits_for_the_next(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", 5.0)
        await remote.has_reader(TOPIC, "Order")  # So that it has found its keeper.
        office.handle.hold("append")

        publishing = []
        for number in range(10):
            publishing.append(asyncio.create_task(remote.append([message(number)], None)))
            await turns()
        under_way = office.handle.count("append")
        office.handle.release("append")
        await asyncio.gather(*publishing)

        assert (under_way, office.handle.count("append")) == (module.MOST_CALLS, module.MOST_CALLS + 1)
        assert sorted(office.keeper.payloads) == [[0], [1], [2], [3, 4, 5, 6, 7, 8, 9]]

    run(story())


def test_what_one_loop_publishes_is_kept_in_that_order(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1)  # Each goes alone.

    async def story() -> None:
        journals = Journals(monkeypatch)
        shop = await RealOffice(fake, journals).open()
        remote = RemoteKeeper("shop", 5.0)
        shop.handle.delay("append")

        await asyncio.gather(*(remote.append([message(number)], None) for number in range(5)))

        kept = [payload for one in shop.journal.batches for payload in payloads_in(one.data)]
        assert kept == list(range(5))

    run(story())


def test_a_call_is_no_larger_than_allowed(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1_000)

    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", PATIENCE)

        sizes = [100, 100, 5_000, 100, 400, 400, 400]
        await asyncio.gather(*(remote.append([message("x" * size)], None) for size in sizes))

        called = [[len(payload) for payload in payloads] for payloads in office.keeper.payloads]
        assert [size for sizes in called for size in sizes] == sizes
        assert [5_000] in called  # One that is larger still goes, alone.
        assert all(sum(sizes) <= 1_000 for sizes in called if sizes != [5_000])

    run(story())


def test_a_call_that_fails_costs_only_those_in_it(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1)  # Each goes alone.

    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", PATIENCE)
        messages = [message(number) for number in range(5)]
        office.keeper.bad = Segment.of(messages[2:3]).pack()

        ended = await asyncio.gather(*(remote.append([one], None) for one in messages), return_exceptions=True)

        assert [type(one) for one in ended] == [type(None)] * 2 + [JournalUnavailable] + [type(None)] * 2
        assert sorted(office.keeper.payloads) == [[0], [1], [3], [4]]

    run(story())


def test_a_payload_that_is_no_data_costs_nobody_a_call(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", PATIENCE)

        with pytest.raises(InvalidParameter, match="cannot be stored as data"):
            await remote.append([message(threading.Lock())], None)

        assert office.handle.calls == []

    run(story())


def test_who_gives_up_waiting_costs_the_others_nothing(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", 5.0)
        office.handle.hold("append")
        impatient = asyncio.create_task(remote.append([message(1)], None))
        patient = asyncio.create_task(remote.append([message(2)], None))
        await until(lambda: office.handle.count("append"))

        impatient.cancel()
        await turns()
        office.handle.release("append")
        await patient

        assert impatient.cancelled()
        assert office.keeper.payloads == [[1, 2]]

    run(story())


def test_the_time_stands_beside_each_message(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        remote = RemoteKeeper("shop", PATIENCE)

        await remote.append([message(1), message(2)], 1_234.5)
        await remote.append([message(3)], None)

        assert [Segment.unpack(data).due for (data,) in office.keeper.appends] == [[1_234.5, 1_234.5], None]

    run(story())


def test_every_event_loop_publishes_for_itself(fake: FakeRay) -> None:
    office = Office(fake)
    remote = RemoteKeeper("shop", 5.0)
    kept: list[int] = []

    async def story(number: int) -> None:
        # Fakes live in the loop that began them: each life is one of this loop's.
        office.handle.crash()
        await remote.append([message(number)], None)
        kept.append(len(remote._lanes))

    for number in range(3):
        run(story(number))

    assert kept == [1, 1, 1]  # Loops that are closed are forgotten.
    assert office.keeper.payloads == [[0], [1], [2]]


def test_readers_are_asked_for_and_a_keeper_that_is_away_knows_none(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.keeper.readers = {TOPIC}
        remote = RemoteKeeper("shop", 0.05)

        found = [await remote.has_reader(topic, "Order") for topic in (TOPIC, "dev.bill.events.v1")]
        fake.kill(office.handle)

        assert (found, await remote.has_reader(TOPIC, "Order")) == ([True, False], False)

    run(story())


# What a replica tells


def test_notes_gather_for_a_moment(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        keeping = ReplicaKeeping("shop", "billing", PATIENCE)
        ids = [uuid4() for _ in range(100)]

        for one in ids:
            keeping.note(one, SUCCESS)
            await asyncio.sleep(0)
        before = list(office.keeper.notes)
        await until(lambda: office.keeper.notes)

        assert before == []
        assert office.keeper.notes == [("billing", [packed_note(one, SUCCESS) for one in ids])]

    run(story())


def test_many_notes_do_not_wait(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NOTES", 10)
    monkeypatch.setattr(module, "NOTE_SECONDS", 1_000.0)

    async def story() -> None:
        office = Office(fake)
        keeping = ReplicaKeeping("shop", "billing", PATIENCE)

        for _ in range(25):
            keeping.note(uuid4(), SUCCESS)
        await until(lambda: len(office.keeper.notes) == 2)
        await keeping.flush()

        assert [len(notes) for _, notes in office.keeper.notes] == [10, 10, 5]

    run(story())


def test_only_what_must_not_run_again_is_noted(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        keeping = ReplicaKeeping("shop", "billing", PATIENCE)

        for status in DispatchStatus:
            keeping.note(uuid4(), Outcome("billing", status))
        await keeping.flush()

        ((_, notes),) = office.keeper.notes
        statuses = [unpacked_note(note, "billing")[1].status for note in notes]
        assert statuses == [DispatchStatus.SUCCESS]

    run(story())


def test_flushing_waits_until_the_keeper_knows(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        keeping = ReplicaKeeping("shop", "billing", 5.0)
        office.handle.hold("note")
        keeping.note(uuid4(), SUCCESS)

        flushing = asyncio.create_task(keeping.flush())
        await until(lambda: office.handle.count("note"))
        await turns()
        waits = not flushing.done()
        office.handle.release("note")
        await flushing
        await keeping.flush()  # Nothing is left.

        assert (waits, office.handle.count("note")) == (True, 1)

    run(story())


def test_notes_for_a_keeper_that_stays_away_are_given_up(fake: FakeRay) -> None:
    async def story() -> None:
        keeping = ReplicaKeeping("shop", "billing", 0.05)
        keeping.note(uuid4(), SUCCESS)

        await keeping.flush()

    run(story())


def test_a_new_process_remembers_what_the_dispatcher_has_handled(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        known, unknown = uuid4(), uuid4()
        office.keeper.known = [packed_note(known, SUCCESS)]
        memory = OutcomeMemory(10)

        await ReplicaKeeping("shop", "billing", PATIENCE).recall(memory)

        assert memory.recall(known) == SUCCESS._replace(route_id=None, repeated=True)
        assert memory.recall(unknown) is None

    run(story())


def test_a_memory_keeps_the_newest_of_what_is_recalled(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        ids = [uuid4() for _ in range(100)]
        office.keeper.known = [packed_note(one, SUCCESS) for one in ids]
        memory = OutcomeMemory(20)

        await ReplicaKeeping("shop", "billing", PATIENCE).recall(memory)

        assert all(one in memory for one in ids[-10:])
        assert len(memory) <= 20

    run(story())


def test_a_keeper_that_is_away_keeps_no_replica_from_starting(fake: FakeRay) -> None:
    async def story() -> None:
        memory = OutcomeMemory(10)

        async with asyncio.timeout(4):
            await ReplicaKeeping("shop", "billing", 0.05).recall(memory)

        assert len(memory) == 0

    run(story())


def test_a_keeper_that_cannot_open_its_journal_keeps_no_replica_from_starting(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.keeper.fault = InvalidParameter("There is no directory /gone.")

        await ReplicaKeeping("shop", "billing", PATIENCE).recall(OutcomeMemory(10))

    run(story())


def test_a_keeper_that_waits_for_its_journal_keeps_no_replica_from_starting(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.handle.hold("recall")

        async with asyncio.timeout(4):
            await ReplicaKeeping("shop", "billing", 1_000.0).recall(OutcomeMemory(10))

    run(story())


def test_outputs_go_into_the_journal(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        keeping = ReplicaKeeping("shop", "billing", PATIENCE)
        outputs = [Envelope(number, topic=TOPIC, message_type="Order") for number in (1, 2)]

        assert await keeping.accept_outputs(outputs)

        ((data,),) = office.keeper.appends
        segment = Segment.unpack(data)
        assert (segment.keys, payloads_in(data)) == ([[TOPIC, "Order"]], [1, 2])
        assert segment.ids == outputs[0].message_id.bytes + outputs[1].message_id.bytes

    run(story())


def test_outputs_that_find_no_room_are_refused(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        office.keeper.fault = JournalUnavailable("the disk is full")
        keeping = ReplicaKeeping("shop", "billing", PATIENCE)

        assert not await keeping.accept_outputs([Envelope(1, topic=TOPIC)])

    run(story())


def test_outputs_that_are_no_data_are_a_fault_of_the_program(fake: FakeRay) -> None:
    async def story() -> None:
        office = Office(fake)
        keeping = ReplicaKeeping("shop", "billing", PATIENCE)

        with pytest.raises(InvalidParameter, match="cannot be stored as data"):
            await keeping.accept_outputs([Envelope(threading.Lock(), topic=TOPIC)])

        assert office.handle.calls == []

    run(story())

"""Dead letters in a journal: kept, found by every filter, sent again to the one that failed, purged."""

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.delivery.fakes import MemoryJournal, turns

import raydispatch.delivery.letters as letters_module
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.letters import BUCKET, LetterFilter, Letters, pack_letter, unpack_letter
from raydispatch.delivery.log import RETRY_SECONDS, Log
from raydispatch.delivery.segment import FORMAT, Segment
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, InvalidParameter, JournalCorrupt, JournalUnavailable
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.stored import restored
from raydispatch.settings import JournalSettings
from raydispatch.testing.clock import FakeClock

TOPIC = "dev.order.events.v1"
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def letter(
    number: int = 1,
    *,
    dispatcher_id: str = "billing",
    payload: Any = None,
    code: ErrorCode = ErrorCode.HANDLER_EXCEPTION,
    error_type: str | None = "ConnectionError",
    key: str | None = None,
    at: datetime = NOON,
    attempt: int = 1,
) -> DeadLetter:
    envelope = Envelope(
        payload if payload is not None else number, message_type="Placed", topic=TOPIC, key=key,
        message_id=UUID(int=number), attempt=attempt,
    )  # fmt: skip
    outcome = Outcome(
        dispatcher_id, DispatchStatus.DISPATCHER_ERROR, "route", (), 3, 12.5, code, error_type, "no connection"
    )
    return DeadLetter(TOPIC, envelope, outcome, at - timedelta(minutes=1), at, "v1")


async def open_letters(
    *kept: DeadLetter, journal: MemoryJournal | None = None, clock: FakeClock | None = None
) -> Letters:
    log = Log(journal or MemoryJournal(), JournalSettings(url="sqlite:///x.db"), clock or FakeClock())
    await log.open()
    letters = Letters(log)
    for start in range(0, len(kept), 500):
        await letters.bury([pack_letter(one) for one in kept[start : start + 500]])
    return letters


async def found(letters: Letters, **wanted: Any) -> list[int]:
    """The numbers of those that a filter finds."""
    return [one.envelope.message_id.int async for one in letters.find(LetterFilter(**wanted))]


async def redriven(letters: Letters) -> list[tuple[int, str | None, int]]:
    """Of all that is in the log: number, the one it is for, and the attempt."""
    rows: list[tuple[int, str | None, int]] = []
    for one in await letters._log.journal.read(0, 1_000_000_000):
        segment = Segment.unpack(one.data)
        for row, blob in enumerate(segment.blobs):
            envelope = restored(blob, *segment.keys[segment.codes[row]])
            rows.append((envelope.message_id.int, segment.to[row] if segment.to else None, envelope.attempt))
    return rows


# As data


def test_a_letter_comes_back() -> None:
    before = letter(payload={"order": 7}, key="customer-1", attempt=2)

    assert unpack_letter(pack_letter(before)) == before


def test_a_letter_without_a_code_comes_back() -> None:
    before = letter()
    before = before._replace(outcome=Outcome("billing", DispatchStatus.TIMEOUT))

    assert unpack_letter(pack_letter(before)) == before


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("status", [DispatchStatus.INVALID_MESSAGE, DispatchStatus.PUBLISH_FAILED])
def test_every_code_comes_back(code: ErrorCode, status: DispatchStatus) -> None:
    before = letter()._replace(outcome=letter().outcome._replace(error_code=code, status=status))

    assert unpack_letter(pack_letter(before)).outcome == before.outcome


def test_a_table_comes_back() -> None:
    table = pa.table({"order": [1, 2]})

    after = unpack_letter(pack_letter(letter(payload=table)))

    assert after.envelope.payload.equals(table)


def test_times_come_back_in_utc() -> None:
    tokyo = NOON.astimezone(timezone(timedelta(hours=9)))

    after = unpack_letter(pack_letter(letter(at=tokyo)))

    assert after.last_at == NOON
    assert after.last_at.tzinfo is UTC


def test_a_payload_that_is_no_data_cannot_be_kept() -> None:
    with pytest.raises(InvalidParameter):
        pack_letter(letter(payload=object()))


def test_an_error_whose_words_are_no_text_can_be_kept() -> None:
    before = letter()._replace(outcome=letter().outcome._replace(error_message="no file \udcff", error_type="\udcff"))

    after = unpack_letter(pack_letter(before))

    assert after.outcome.dispatcher_id == "billing"


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"hello", msgpack.packb(7), msgpack.packb([FORMAT, TOPIC]), pack_letter(letter())[:-1]]
)
def test_bytes_that_are_no_letter_are_corrupt(data: bytes) -> None:
    with pytest.raises(JournalCorrupt):
        unpack_letter(data)


def test_another_format_is_refused_and_named() -> None:
    fields = msgpack.unpackb(pack_letter(letter()))

    with pytest.raises(JournalCorrupt, match=f"format {FORMAT + 1}.*reads {FORMAT}"):
        unpack_letter(msgpack.packb([FORMAT + 1, *fields[1:]]))


@pytest.mark.parametrize(("position", "value"), [(3, b"\xc1"), (5, "no status"), (9, "no code"), (12, "noon")])
def test_fields_that_mean_nothing_are_corrupt(position: int, value: object) -> None:
    fields = msgpack.unpackb(pack_letter(letter()))
    fields[position] = value

    with pytest.raises(JournalCorrupt):
        unpack_letter(msgpack.packb(fields))


@settings(max_examples=60, deadline=None)
@given(
    payload=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    words=st.none() | st.text(st.characters(codec="utf-8"), max_size=20),
    at=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    attempts=st.integers(0, 1_000),
)
def test_letters_come_back_whatever_is_in_them(payload: Any, words: str | None, at: datetime, attempts: int) -> None:
    before = letter(at=at)
    before = before._replace(
        envelope=before.envelope.with_payload(payload),
        outcome=before.outcome._replace(error_message=words, attempts=attempts),
    )

    after = unpack_letter(pack_letter(before))

    assert after.envelope == before.envelope
    assert after.outcome == before.outcome
    assert abs(after.last_at - at) < timedelta(milliseconds=1)


# Finding


def test_all_are_found_by_dispatcher() -> None:
    async def story() -> None:
        letters = await open_letters(
            letter(3, dispatcher_id="b"), letter(2, dispatcher_id="a"), letter(1, dispatcher_id="b")
        )

        assert await found(letters) == [2, 1, 3]
        assert await letters.count() == 3

    run(story())


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, [1, 2, 3, 4]),
        ({"dispatcher_id": "billing"}, [1, 2]),
        ({"dispatcher_id": "bill"}, []),
        ({"dispatcher_id": "nobody"}, []),
        ({"error_type": "ConnectionError"}, [1, 3]),
        ({"error_type": "time_limit"}, [4]),
        ({"error_type": ErrorCode.TIME_LIMIT}, [4]),
        ({"error_type": "connectionerror"}, []),
        ({"key": "a"}, [2, 3]),
        ({"message_id": UUID(int=3)}, [3]),
        ({"message_id": UUID(int=9)}, []),
        ({"since": NOON}, [2, 3]),
        ({"until": NOON}, [1, 4]),
        ({"since": NOON - timedelta(hours=1), "until": NOON + timedelta(seconds=1)}, [1, 2]),
        ({"dispatcher_id": "mailing", "key": "a", "error_type": "ConnectionError"}, [3]),
        ({"dispatcher_id": "billing", "key": "a", "error_type": "ConnectionError"}, []),
    ],
)
def test_a_filter_finds_what_is_meant(wanted: dict[str, Any], numbers: list[int]) -> None:
    async def story() -> None:
        letters = await open_letters(
            letter(1, at=NOON - timedelta(hours=1)),
            letter(2, key="a", error_type="ValueError"),
            letter(3, dispatcher_id="mailing", key="a", at=NOON + timedelta(hours=1)),
            letter(
                4, dispatcher_id="mailing", code=ErrorCode.TIME_LIMIT, error_type="TimeoutError",
                at=NOON - timedelta(days=1),
            ),
        )  # fmt: skip

        assert sorted(await found(letters, **wanted)) == numbers

    run(story())


def test_a_moment_without_a_zone_is_one_of_this_machine() -> None:
    async def story() -> None:
        letters = await open_letters(letter(1))
        local = NOON.astimezone().replace(tzinfo=None)

        assert await found(letters, since=local) == [1]
        assert await found(letters, until=local) == []

    run(story())


def test_dispatchers_whose_ids_begin_alike_are_told_apart() -> None:
    async def story() -> None:
        names = ["a", "a/b", "a-b", "a/", "aa", "A"]
        letters = await open_letters(*(letter(number, dispatcher_id=name) for number, name in enumerate(names)))

        for number, name in enumerate(names):
            assert await found(letters, dispatcher_id=name) == [number]

    run(story())


def test_one_message_has_a_letter_for_each_dispatcher() -> None:
    async def story() -> None:
        letters = await open_letters(letter(1), letter(1, dispatcher_id="mailing"), letter(1, error_type="Other"))

        assert [(one.outcome.dispatcher_id, one.outcome.error_type) async for one in letters.find()] == [
            ("billing", "Other"),
            ("mailing", "ConnectionError"),
        ]

    run(story())


def test_more_than_a_page_is_found() -> None:
    async def story() -> None:
        many = [letter(number, dispatcher_id=f"d{number % 3}") for number in range(2_500)]
        letters = await open_letters(*many)

        assert sorted(await found(letters)) == list(range(2_500))
        assert await letters.count() == 2_500
        assert await found(letters, dispatcher_id="d1") == list(range(1, 2_500, 3))

    run(story())


def test_of_one_dispatcher_only_its_own_pages_are_read() -> None:
    class Counting(MemoryJournal):
        pages = 0

        async def documents(self, bucket: str, after: str = "", most: int = 1_000) -> list[tuple[str, bytes]]:
            self.pages += 1
            return await super().documents(bucket, after, most)

    async def story() -> None:
        journal = Counting()
        many = [letter(number, dispatcher_id=f"d{number % 4}") for number in range(4_000)]
        letters = await open_letters(*many, journal=journal)

        assert len(await found(letters, dispatcher_id="d1")) == 1_000
        assert journal.pages <= 2

    run(story())


def test_letters_are_kept_however_long_the_journal_is_away() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        letters = await open_letters(journal=journal, clock=clock)
        journal.away = True
        burying = asyncio.ensure_future(letters.bury([pack_letter(letter())]))
        await clock.advance(60)
        assert not burying.done()

        journal.away = False
        await clock.advance(RETRY_SECONDS)
        await burying

        assert await found(letters) == [1]

    run(story())


# Redriving


def test_a_redriven_letter_goes_to_the_one_that_failed_and_is_gone() -> None:
    async def story() -> None:
        letters = await open_letters(letter(1), letter(2, dispatcher_id="mailing", attempt=3))

        count = await letters.redrive()

        assert count == 2
        assert await redriven(letters) == [(1, "billing", 2), (2, "mailing", 4)]
        assert await letters.count() == 0

    run(story())


def test_only_what_is_meant_is_redriven() -> None:
    async def story() -> None:
        letters = await open_letters(letter(1), letter(2, key="a"), letter(3, dispatcher_id="mailing", key="a"))

        count = await letters.redrive(LetterFilter(dispatcher_id="billing", key="a"))

        assert count == 1
        assert await redriven(letters) == [(2, "billing", 2)]
        assert await found(letters) == [1, 3]

    run(story())


def test_a_redriven_message_is_the_same_message() -> None:
    async def story() -> None:
        before = letter(1, payload={"order": 7}, key="a").envelope
        letters = await open_letters(letter(1, payload={"order": 7}, key="a"))

        await letters.redrive()

        (batch,) = await letters._log.journal.read(0)
        segment = Segment.unpack(batch.data)
        after = restored(segment.blobs[0], *segment.keys[0])
        assert after.with_attempt(1) == Envelope(
            {"order": 7}, "Placed", TOPIC, "a", before.message_id, after.correlation_id
        )
        assert (segment.orders, segment.due) == (["a"], None)

    run(story())


def test_a_redriven_message_is_no_repeat() -> None:
    async def story() -> None:
        letters = await open_letters(letter(1))
        await letters._log.append(Segment.of([(TOPIC, letter(1).envelope)]))

        await letters.redrive()

        assert await redriven(letters) == [(1, None, 1), (1, "billing", 2)]

    run(story())


def test_nothing_to_redrive_costs_nothing() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        letters = await open_letters(journal=journal)

        assert await letters.redrive() == 0
        assert journal.appends == 0

    run(story())


def test_more_than_a_page_is_redriven() -> None:
    async def story() -> None:
        letters = await open_letters(*(letter(number) for number in range(2_500)))

        assert await letters.redrive() == 2_500
        assert [number for number, _, _ in await redriven(letters)] == list(range(2_500))
        assert await letters.count() == 0

    run(story())


def test_a_redrive_that_was_broken_off_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters_module, "PAGE", 10)

    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        letters = await open_letters(*(letter(number) for number in range(35)), journal=journal, clock=clock)
        journal.turns = 2
        redriving = asyncio.ensure_future(letters.redrive())
        while journal.appends < 2:
            await turns(1)
        journal.away = True
        with pytest.raises(JournalUnavailable):
            await clock.run(redriving)
        journal.away = False

        again = await letters.redrive()

        numbers = [number for number, _, _ in await redriven(letters)]
        assert 0 < again < 35
        assert sorted(numbers) == list(range(35))
        assert await letters.count() == 0

    run(story())


def test_a_letter_goes_in_the_same_write_in_which_its_message_comes() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        letters = await open_letters(letter(1), journal=journal)
        writes = journal.writes

        await letters.redrive()

        assert (journal.appends, journal.writes) == (1, writes)
        assert journal.buckets[BUCKET] == {}

    run(story())


def test_what_fails_again_meanwhile_is_not_redriven_for_ever() -> None:
    class FailsAtOnce(MemoryJournal):
        async def append(self, batches: Any, changes: Any = ()) -> list[int]:
            firsts = await super().append(batches, changes)
            self._change([change._replace(value=pack_letter(letter(int(change.key[-32:], 16)))) for change in changes])
            return firsts

    async def story() -> None:
        letters = await open_letters(*(letter(number) for number in range(30)), journal=FailsAtOnce())

        assert await letters.redrive() == 30
        assert await letters.count() == 30

    run(story())


# Purging


def test_what_is_purged_is_gone() -> None:
    async def story() -> None:
        letters = await open_letters(letter(1), letter(2, dispatcher_id="mailing"), letter(3))

        assert await letters.purge(LetterFilter(dispatcher_id="billing")) == 2
        assert await found(letters) == [2]
        assert await letters.purge() == 1
        assert await letters.purge() == 0

    run(story())


def test_more_than_a_page_is_purged() -> None:
    async def story() -> None:
        letters = await open_letters(*(letter(number) for number in range(2_100)))

        assert await letters.purge() == 2_100
        assert await letters.count() == 0

    run(story())

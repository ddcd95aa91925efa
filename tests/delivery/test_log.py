"""The log: many publishers pay for one write, nothing is stored twice, and a journal that is away is waited for."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.delivery.fakes import MemoryJournal, turns, until

import raydispatch.delivery.log as log_module
from raydispatch.delivery.journal import Change
from raydispatch.delivery.log import RETRY_SECONDS, Log
from raydispatch.delivery.segment import Segment
from raydispatch.errors import JournalCorrupt, JournalUnavailable
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import JournalSettings
from raydispatch.testing.clock import FakeClock

TOPIC = "dev.order.events.v1"
PATIENCE = 10.0


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def segment(*numbers: int, size: int = 0, to: str | None = None) -> Segment:
    """Messages with these ids."""
    messages = [
        (TOPIC, Envelope(b"x" * size, message_type="Placed", topic=TOPIC, message_id=UUID(int=number)))
        for number in numbers
    ]
    return Segment.of(messages, to=None if to is None else [to] * len(numbers))


async def open_log(journal: MemoryJournal | None = None, clock: FakeClock | None = None, **chosen: Any) -> Log:
    chosen = {"patience_seconds": PATIENCE, **chosen}
    log = Log(journal or MemoryJournal(), JournalSettings(url="sqlite:///x.db", **chosen), clock or FakeClock())
    await log.open()
    return log


async def stored_numbers(log: Log) -> list[int]:
    """The ids of all that is kept, in order."""
    batches = await log.journal.read(0, 1_000_000_000)
    segments = [Segment.unpack(one.data) for one in batches]
    return [UUID(bytes=each.message_id(row)).int for each in segments for row in range(len(each))]


# Appending


def test_what_is_appended_is_in_the_journal_when_the_call_returns() -> None:
    async def story() -> None:
        log = await open_log()

        counts = [await log.append(segment(1, 2)), await log.append(segment(3))]

        assert counts == [2, 1]
        assert await stored_numbers(log) == [1, 2, 3]
        assert log.head == 3

    run(story())


def test_many_publishers_share_a_write() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        journal.turns = 3
        log = await open_log(journal)

        counts = await asyncio.gather(*(log.append(segment(number)) for number in range(500)))

        assert counts == [1] * 500
        assert await stored_numbers(log) == list(range(500))
        assert journal.appends <= 2

    run(story())


def test_who_comes_during_a_write_goes_with_the_next_one() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        journal.turns = 5
        log = await open_log(journal)
        first = asyncio.ensure_future(log.append(segment(1)))
        await turns(3)

        later = [asyncio.ensure_future(log.append(segment(number))) for number in (2, 3, 4)]
        await asyncio.gather(first, *later)

        assert journal.appends == 2
        assert await stored_numbers(log) == [1, 2, 3, 4]

    run(story())


def test_a_write_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "COMMIT_BYTES", 1_000)

    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal)

        await asyncio.gather(*(log.append(segment(number, size=300)) for number in range(9)))
        small = journal.appends
        await log.append(segment(100, size=5_000))

        assert small >= 3
        assert await stored_numbers(log) == [*range(9), 100]

    run(story())


def test_segments_stay_in_the_order_of_their_calls() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        journal.turns = 2
        log = await open_log(journal)

        for number in range(20):
            asyncio.ensure_future(log.append(segment(2 * number, 2 * number + 1)))  # noqa: RUF006
            await turns(number % 4)
        await until(lambda: log.head == 40)

        assert await stored_numbers(log) == list(range(40))

    run(story())


def test_listeners_hear_of_everything_new_until_they_want_no_more() -> None:
    async def story() -> None:
        log = await open_log()
        heard: list[int] = []

        def listener() -> None:
            heard.append(log.head)

        log.on_append(listener)
        await log.append(segment(1))
        log.forget(listener)
        log.forget(listener)
        await log.append(segment(2))

        assert heard == [1]

    run(story())


def test_documents_are_written_along_with_messages() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal)
        await log.write([Change("letters", "old", b"x")])

        await log.append(segment(1), [Change("letters", "old", None), Change("letters", "new", b"y")])

        assert journal.buckets["letters"] == {"new": b"y"}

    run(story())


def test_documents_are_written_even_if_the_messages_are_there_already() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal)
        await log.append(segment(1))

        count = await log.append(segment(1), [Change("letters", "new", b"y")])

        assert (count, journal.buckets["letters"]) == (0, {"new": b"y"})
        assert await stored_numbers(log) == [1]

    run(story())


def test_an_empty_segment_costs_nothing() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal)

        assert await log.append(segment()) == 0
        assert journal.appends == 0

    run(story())


def test_who_gives_up_waiting_disturbs_nobody() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        journal.turns = 5
        log = await open_log(journal)
        impatient = asyncio.ensure_future(log.append(segment(1)))
        patient = asyncio.ensure_future(log.append(segment(2)))
        await turns(2)

        impatient.cancel()

        assert await patient == 1
        assert await log.append(segment(3)) == 1
        assert impatient.cancelled()

    run(story())


# Repeats


def test_a_repeat_is_not_stored_again() -> None:
    async def story() -> None:
        log = await open_log()
        await log.append(segment(1, 2))

        counts = [await log.append(segment(2)), await log.append(segment(1, 3, 2))]

        assert counts == [0, 1]
        assert await stored_numbers(log) == [1, 2, 3]

    run(story())


def test_a_repeat_within_one_call_is_stored_once() -> None:
    async def story() -> None:
        log = await open_log()

        assert await log.append(segment(1, 1, 2, 1)) == 2
        assert await stored_numbers(log) == [1, 2]

    run(story())


def test_repeats_within_one_write_are_stored_once() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal)

        counts = await asyncio.gather(*(log.append(segment(number % 3, 10 + number)) for number in range(9)))

        assert sum(counts) == 12
        assert sorted(await stored_numbers(log)) == [0, 1, 2, *range(10, 19)]
        assert journal.appends == 1

    run(story())


def test_repeats_are_known_after_the_journal_was_opened_again() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        await (await open_log(journal)).append(segment(*range(50)))

        log = await open_log(journal)

        assert log.head == 50
        assert await log.append(segment(49, 50, 0)) == 1

    run(story())


def test_the_memory_of_repeats_is_bounded() -> None:
    async def story() -> None:
        log = await open_log(recent_ids=20)
        for number in range(100):
            await log.append(segment(number))

        kept = len(log._recent._young) + len(log._recent._old)
        repeats = [await log.append(segment(number)) for number in (0, 99, 95, 90)]

        assert kept <= 20
        assert repeats == [1, 0, 0, 0]

    run(story())


def test_after_opening_again_as_many_are_known_as_are_kept() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        first = await open_log(journal, recent_ids=20)
        for number in range(100):
            await first.append(segment(number))
        reads = journal.reads

        log = await open_log(journal, recent_ids=20)

        assert [await log.append(segment(number)) for number in (99, 95, 91)] == [0, 0, 0]
        assert journal.reads - reads <= 2

    run(story())


def test_what_is_sent_to_one_subscription_is_there_again_on_purpose() -> None:
    async def story() -> None:
        log = await open_log()
        await log.append(segment(1))

        assert await log.append(segment(1, to="billing")) == 1
        assert await log.append(segment(1)) == 0
        assert await stored_numbers(log) == [1, 1]

    run(story())


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=25),
    pauses=st.lists(st.integers(0, 4), min_size=25, max_size=25),
    reopen_after=st.integers(0, 25),
)
def test_every_id_is_stored_once_and_every_call_hears_how_many_were_new(
    calls: list[list[int]], pauses: list[int], reopen_after: int
) -> None:
    async def story() -> None:
        journal = MemoryJournal()
        journal.turns = 1
        log = await open_log(journal)
        counts: list[int] = []
        for part in (calls[:reopen_after], calls[reopen_after:]):
            log = await open_log(journal)
            running = []
            for numbers, pause in zip(part, pauses, strict=False):
                running.append(asyncio.ensure_future(log.append(segment(*numbers))))
                await turns(pause)
            counts += await asyncio.gather(*running)

        seen: set[int] = set()
        for numbers, count in zip(calls, counts, strict=True):
            assert count == len(set(numbers) - seen)
            seen |= set(numbers)
        assert sorted(await stored_numbers(log)) == sorted(seen)

    run(story())


# A journal that is away


def test_a_journal_that_comes_back_in_time_costs_a_wait_only() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        appending = asyncio.ensure_future(log.append(segment(1)))
        await clock.advance(PATIENCE / 2)
        assert not appending.done()

        journal.away = False
        await clock.advance(RETRY_SECONDS)

        assert await appending == 1

    run(story())


def test_a_journal_that_stays_away_is_told_of_when_the_patience_is_over() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        appending = asyncio.ensure_future(log.append(segment(1)))

        await clock.advance(PATIENCE - RETRY_SECONDS)
        assert not appending.done()
        await clock.advance(2 * RETRY_SECONDS)

        with pytest.raises(JournalUnavailable):
            await appending

    run(story())


def test_what_could_not_be_kept_is_no_repeat_when_it_comes_again() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        failed = await clock.run(asyncio.gather(log.append(segment(1, 2)), return_exceptions=True))
        journal.away = False

        count = await log.append(segment(1, 2))

        assert isinstance(failed[0], JournalUnavailable)
        assert count == 2
        assert await stored_numbers(log) == [1, 2]

    run(story())


def test_a_repeat_fails_along_with_what_it_repeats() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True

        failed = await clock.run(asyncio.gather(log.append(segment(1)), log.append(segment(1)), return_exceptions=True))

        assert [type(one) for one in failed] == [JournalUnavailable] * 2

    run(story())


def test_an_answer_that_was_lost_stores_nothing_twice() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.lost_answers = 2

        count = await clock.run(log.append(segment(1, 2)))

        assert count == 2
        assert await stored_numbers(log) == [1, 2]
        assert log.head == 2

    run(story())


def test_who_comes_late_has_a_patience_of_its_own() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        first = asyncio.ensure_future(log.append(segment(1)))
        await clock.advance(PATIENCE - 1)
        late = asyncio.ensure_future(log.append(segment(2)))
        await clock.advance(2)
        assert isinstance(first.exception(), JournalUnavailable)

        journal.away = False
        await clock.advance(RETRY_SECONDS)

        assert await late == 1

    run(story())


def test_in_one_write_each_has_a_patience_of_its_own() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        first = asyncio.ensure_future(log.append(segment(1)))
        await clock.advance(1)
        second = asyncio.ensure_future(log.append(segment(2)))
        await clock.advance(PATIENCE - 2)
        late = asyncio.ensure_future(log.append(segment(3)))
        await clock.advance(3)
        assert isinstance(first.exception(), JournalUnavailable)
        assert isinstance(second.exception(), JournalUnavailable)

        journal.away = False
        await clock.advance(RETRY_SECONDS)

        assert await late == 1

    run(story())


def test_a_repeat_of_what_was_given_up_is_stored() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        busy = asyncio.ensure_future(log.append(segment(99)))
        await clock.advance(1)
        first = asyncio.ensure_future(log.append(segment(1)))
        await clock.advance(PATIENCE - 2)
        second = asyncio.ensure_future(log.append(segment(1)))
        await clock.advance(3)
        assert isinstance(busy.exception(), JournalUnavailable)
        assert isinstance(first.exception(), JournalUnavailable)

        journal.away = False
        await clock.advance(RETRY_SECONDS)
        await second

        assert await stored_numbers(log) == [1]

    run(story())


def test_an_error_that_is_no_absence_is_told_at_once_and_to_those_only_whom_it_concerns() -> None:
    class Broken(MemoryJournal):
        async def append(self, batches: Any, changes: Any = ()) -> list[int]:
            if not self.appends:
                self.appends += 1
                raise JournalCorrupt("as the test wants it")
            return await super().append(batches, changes)

    async def story() -> None:
        log = await open_log(Broken())

        with pytest.raises(JournalCorrupt):
            await log.append(segment(1))

        assert await log.append(segment(2)) == 1

    run(story())


def test_documents_are_written_however_long_it_takes() -> None:
    async def story() -> None:
        journal, clock = MemoryJournal(), FakeClock()
        log = await open_log(journal, clock)
        journal.away = True
        writing = asyncio.ensure_future(log.write([Change("letters", "one", b"x")]))
        await clock.advance(10 * PATIENCE)
        assert not writing.done()

        journal.away = False
        await clock.advance(RETRY_SECONDS)
        await writing

        assert journal.buckets["letters"] == {"one": b"x"}

    run(story())


# Reading


def test_what_was_just_appended_is_read_from_memory() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal)
        await log.append(segment(1, 2))
        await log.append(segment(3))

        found = [await log.at(offset) for offset in (0, 2)]

        assert [one.first for one in found if one] == [0, 2]
        assert log.cached(2) is not None
        assert log.cached(1) is None
        assert journal.reads == 0

    run(story())


def test_an_offset_in_the_middle_finds_its_segment() -> None:
    async def story() -> None:
        log = await open_log()
        await log.append(segment(1, 2, 3))
        await log.append(segment(4, 5))

        found = [await log.at(offset) for offset in (1, 2, 4)]

        assert [one.first for one in found if one] == [0, 0, 3]

    run(story())


def test_there_is_nothing_at_the_head() -> None:
    async def story() -> None:
        log = await open_log()
        assert await log.at(0) is None

        await log.append(segment(1))

        assert await log.at(1) is None

    run(story())


def test_an_offset_that_is_gone_finds_the_oldest_kept() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        first = await open_log(journal)
        await first.append(segment(1, 2))
        await first.append(segment(3))
        await journal.trim(2)

        log = await open_log(journal)

        found = await log.at(0)
        assert found is not None
        assert found.first == 2

    run(story())


def test_what_is_kept_in_memory_is_bounded() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal, cache_bytes=5_000)
        for number in range(50):
            await log.append(segment(number, size=1_000))
        after_writing = log._cache._bytes
        for offset in range(50):
            assert (found := await log.at(offset)) is not None
            assert found.first == offset

        assert after_writing <= 5_000
        assert log._cache._bytes <= 5_000
        assert log._cache._bytes == sum(size for _, size in log._cache._kept.values())

    run(story())


def test_one_segment_is_kept_in_memory_however_large() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal, cache_bytes=0)

        await log.append(segment(1, size=10_000))

        assert log.cached(0) is not None
        await log.append(segment(2))
        assert log.cached(0) is None

    run(story())


def test_a_journal_that_cannot_be_read_says_so() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        log = await open_log(journal, cache_bytes=0)
        await log.append(segment(1))
        await log.append(segment(2))
        journal.away = True

        with pytest.raises(JournalUnavailable):
            await log.at(0)

    run(story())


def test_closing_waits_for_what_is_being_written() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        journal.turns = 5
        log = await open_log(journal)
        appending = asyncio.ensure_future(log.append(segment(1)))
        await turns(2)

        await log.close()

        assert await appending == 1
        assert journal.closes == 1

    run(story())

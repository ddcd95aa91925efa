"""Who may write, and what becomes of letters whose answers are lost."""

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.journals.helping import NatsServer, Place, batch, check_contiguous, open_nats, read_all, run

from raydispatch.delivery.journal import Batch, Change
from raydispatch.errors import InvalidParameter, JournalCorrupt, JournalUnavailable
from raydispatch.journals.nats import NatsJournal
from raydispatch.journals.nats_line import Letter


def lose_answer(journal: NatsJournal) -> None:
    """The next batches are taken, and nobody hears of it."""
    line = journal._line
    ask_once = line.ask_once

    async def deaf(letters: Sequence[Letter]) -> Any:
        answer = await ask_once(letters)
        if letters[0].headers is not None:
            line.ask_once = ask_once  # type: ignore[method-assign]
            raise JournalUnavailable("the answer is lost, as the test wants it")
        return answer

    line.ask_once = deaf  # type: ignore[method-assign]


def hold_back(journal: NatsJournal) -> list[Sequence[Letter]]:
    """The next batches do not arrive; these are they."""
    line, held = journal._line, list[Sequence[Letter]]()
    ask_once = line.ask_once

    async def deaf(letters: Sequence[Letter]) -> Any:
        if letters[0].headers is None:
            return await ask_once(letters)
        held.append(letters)
        line.ask_once = ask_once  # type: ignore[method-assign]
        raise JournalUnavailable("the letters are lost, as the test wants it")

    line.ask_once = deaf  # type: ignore[method-assign]
    return held


# Answers that are lost


def test_what_is_appended_again_after_a_lost_answer_keeps_its_offsets(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            batches = [batch(b"a", 2), batch(b"b", 3)]
            lose_answer(journal)
            with pytest.raises(JournalUnavailable):
                await journal.append(batches)

            assert await journal.append(batches) == [0, 2]
            assert await journal.append([*batches, batch(b"c")]) == [0, 2, 5]
            assert [one.data for one in await read_all(journal)] == [b"a", b"b", b"c"]

    run(story())


def test_after_a_lost_answer_others_go_on_behind_what_was_kept(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            lose_answer(journal)
            with pytest.raises(JournalUnavailable):
                await journal.append([batch(b"a", 2)])

            assert await journal.head() == 2
            assert await journal.append([batch(b"b")]) == [2]
            assert [one.data for one in await read_all(journal)] == [b"a", b"b"]

    run(story())


def test_what_a_former_life_appended_is_not_appended_again(nats_place: Place) -> None:
    async def story() -> None:
        batches = [batch(f"{number}".encode(), 2) for number in range(5)]
        async with open_nats(nats_place) as journal:
            await journal.append(batches[:3])
        async with open_nats(nats_place) as journal:
            assert await journal.append([batches[3], *batches[:3], batches[4]]) == [6, 0, 2, 4, 8]
            assert [one.data for one in await read_all(journal)] == [b"0", b"1", b"2", b"3", b"4"]

    run(story())


def test_documents_are_written_after_all_if_they_could_not_be_along(
    nats_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(letters: Sequence[Letter]) -> Any:
        raise JournalUnavailable("the server is away, as the test wants it")

    async def story() -> None:
        async with open_nats(nats_place) as journal:
            batches, changes = [batch()], [Change("b", "key", b"value")]
            with monkeypatch.context() as away:
                away.setattr(journal._line, "ask_all", unavailable)
                with pytest.raises(JournalUnavailable):
                    await journal.append(batches, changes)

            assert await journal.append(batches, changes) == [0]
            assert await journal.head() == 1
            assert await journal.documents("b") == [("key", b"value")]

    run(story())


def test_letters_that_come_late_are_refused(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            held = hold_back(journal)
            with pytest.raises(JournalUnavailable):
                await journal.append([batch(b"late"), batch(b"later")])
            assert await journal.append([batch(b"new")]) == [0]

            await journal._line.ask_once(held[0])

            assert await journal.append([batch(b"newer")]) == [1]
            assert [one.data for one in await read_all(journal)] == [b"new", b"newer"]

    run(story())


def test_letters_that_come_late_and_fit_are_ours(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            held, late = hold_back(journal), [batch(b"late"), batch(b"later")]
            with pytest.raises(JournalUnavailable):
                await journal.append(late)
            assert await journal.head() == 0
            await journal._line.ask_once(held[0])

            assert await journal.append([batch(b"new")]) == [2]
            assert await journal.append(late) == [0, 1]
            assert [one.data for one in await read_all(journal)] == [b"late", b"later", b"new"]

    run(story())


@pytest.mark.parametrize("sizes", [(2_000, 10), (10, 2_000), (10, 2_000, 10), (2_000,)])
def test_batches_are_not_kept_if_one_of_them_is_too_large_for_the_stream(
    nats_place: Place, sizes: tuple[int, ...]
) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            log = journal._address.log_stream
            config = (await journal._line.api(f"STREAM.INFO.{log}"))["config"]
            await journal._line.api(f"STREAM.UPDATE.{log}", {**config, "max_msg_size": 1_000})

            with pytest.raises(InvalidParameter, match=f"the stream {log} takes: raise its max_msg_size"):
                await journal.append([batch(bytes(size)) for size in sizes])

            assert await journal.append([batch(), batch()]) == [0, 1]

    run(story())


def test_what_a_full_server_kept_of_batches_is_completed_when_there_is_room(own_server: NatsServer) -> None:
    own_server.stop()
    own_server.configure(sync_interval="always, max_file_store: 2MB")
    own_server.start()

    async def story() -> None:
        async with open_nats((own_server.url, "orders")) as journal:
            old = [batch(os.urandom(400_000)) for _ in range(3)]
            new = [batch(os.urandom(400_000), 2) for _ in range(4)]
            await journal.append(old)
            for _ in range(2):
                with pytest.raises(JournalUnavailable, match=r"did not answer|refuses"):
                    await journal.append(new)

            found = await read_all(journal)
            assert [one.data for one in found] == [one.data for one in [*old, *new][: len(found)]]
            await journal.trim(3)
            assert await journal.append(new) == [3, 5, 7, 9]
            assert [one.data for one in await read_all(journal)] == [one.data for one in new]

    run(story())


def test_a_server_that_keeps_one_at_a_time_keeps_them_in_order(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal._log.open(is_atomic=False)  # As servers before 2.12.
            batches = [batch(str(number).encode(), number + 1) for number in range(10)]

            await journal.append(batches[:4])
            assert await journal.append(batches) == [number * (number + 1) // 2 for number in range(10)]
            assert [one.data for one in await read_all(journal)] == [one.data for one in batches]

    run(story())


# Who writes


def test_who_begins_to_write_takes_over(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as first, open_nats(nats_place) as second:
            await first.append([batch(b"a", 2)])
            assert await second.append([batch(b"b", 3)]) == [2]

            calls = [
                first.append([batch(b"c")]),
                first.append([batch(b"c")]),
                first.trim(5),
                first.head(),
                first.read(0),
            ]
            for call in calls:
                with pytest.raises(
                    JournalUnavailable, match=f"Another process has taken over the journal '{nats_place[1]}'"
                ):
                    await call

            assert await second.append([batch(b"d")]) == [5]
            assert [one.data for one in await read_all(second)] == [b"a", b"b", b"d"]

    run(story())


def test_one_that_was_taken_from_can_be_opened_again(nats_place: Place) -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            for life in range(4):
                journal = await stack.enter_async_context(open_nats(nats_place))
                assert await journal.append([batch()]) == [life]

    run(story())


def test_who_only_reads_disturbs_nobody_and_sees_all(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as writer, open_nats(nats_place) as reader:
            for number in range(6):
                await writer.append([batch(str(number).encode())], [Change("b", str(number), b"")])

                assert await reader.head() == number + 1
                assert (await reader.read(number))[0].data == str(number).encode()
                assert len(await reader.documents("b")) == number + 1
            await writer.trim(4)

            assert await reader.first() == 4
            assert [one.first for one in await reader.read(0)] == [4, 5]
            await writer.trim(6)
            assert (await reader.first(), await reader.read(0)) == (6, [])

    run(story())


def test_an_answer_lost_by_one_that_was_taken_from_is_not_its_own(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as first, open_nats(nats_place) as second:
            await first.append([batch(b"a")])
            lose_answer(first)
            with pytest.raises(JournalUnavailable, match="the answer is lost"):
                await first.append([batch(b"b")])
            await second.append([batch(b"c")])

            with pytest.raises(JournalUnavailable, match="Another process has taken over"):
                await first.append([batch(b"d")])
            assert [one.data for one in await read_all(second)] == [b"a", b"b", b"c"]

    run(story())


# A stream that others have changed


def test_acknowledged_messages_that_the_server_lost_are_missed(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.append([batch(), batch()])
            await journal._line.api(f"STREAM.DELETE.{journal._address.log_stream}")
            async with open_nats(nats_place):
                pass  # It makes a new stream.

            for _ in range(2):
                with pytest.raises(JournalCorrupt, match="has lost messages of the stream"):
                    await journal.append([batch()])

    run(story())


def test_a_stream_that_somebody_has_purged_is_refused(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.append([batch(), batch()])
            await journal._line.api(f"STREAM.PURGE.{journal._address.log_stream}")

        with pytest.raises(JournalCorrupt, match="Somebody has purged the stream"):
            async with open_nats(nats_place):
                pass

    run(story())


@pytest.mark.parametrize("sequence", [2, 3])
@pytest.mark.parametrize("is_writer", [True, False])
def test_a_message_that_somebody_has_deleted_is_missed(nats_place: Place, sequence: int, is_writer: bool) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as writer, open_nats(nats_place) as reader:
            await writer.append([batch(count=2) for _ in range(5)])
            await writer._line.api(f"STREAM.MSG.DELETE.{writer._address.log_stream}", {"seq": sequence})

            journal = writer if is_writer else reader
            for offset in (0, sequence * 2 - 2, sequence * 2 - 1):
                with pytest.raises(JournalCorrupt, match="missing"):
                    await read_all(journal, offset)

    run(story())


def test_what_is_let_go_of_while_it_is_looked_for_is_not_missed(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as writer:
            await writer.append([batch(count=2) for _ in range(50)])
            async with open_nats(nats_place) as reader:
                look = reader._log._stream.entry

                async def meanwhile(sequence: int) -> Any:
                    reader._log._stream.entry = look
                    await writer.trim(80)
                    return await look(sequence)

                reader._log._stream.entry = meanwhile
                assert (await reader.read(20))[0].first == 80
                assert await reader.first() == 80

    run(story())


def test_a_message_that_is_no_batch_is_named(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.append([batch()])
            await journal._line.ask(Letter(journal._address.log_subject, b"from somebody else"))

            with pytest.raises(JournalCorrupt, match=r"The message 2 of the stream .* is no batch"):
                await journal.append([batch()])

    run(story())


# Bounds


def test_ids_of_batches_are_known_for_a_while(nats_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydispatch.journals.nats_log.KNOWN_IDS", 10)

    async def story() -> None:
        async with open_nats(nats_place) as journal:
            batches: list[Batch] = [batch() for _ in range(30)]

            assert await journal.append(batches) == list(range(30))
            assert await journal.append(batches[-10:]) == list(range(20, 30))
            assert len(journal._log._known) == 10
            check_contiguous(await read_all(journal))

    run(story())

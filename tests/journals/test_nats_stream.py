import pytest
from tests.journals.helping import Place, batch, open_nats, run

from raydispatch.errors import JournalCorrupt
from raydispatch.journals import nats_stream
from raydispatch.journals.nats_line import Letter


def test_a_server_that_lags_behind_is_not_believed(nats_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def knows_nothing(letter: Letter) -> list[object]:
        assert "DIRECT.GET" in letter.subject
        return []

    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.append([batch(b"a", 2), batch(b"", 1)])
            monkeypatch.setattr(journal._line, "ask_for_many", knows_nothing)

            assert [(one.first, one.count, one.data) for one in await journal.read(0)] == [(0, 2, b"a")]
            assert [(one.first, one.count, one.data) for one in await journal.read(2)] == [(2, 1, b"")]

    run(story())


def test_places_are_found_in_few_steps(nats_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.append([batch(count=number % 3 + 1) for number in range(500)])
            head = await journal.head()
        async with open_nats(nats_place) as journal:
            stream, looked = journal._log._stream, list[int]()
            entry = stream.entry

            async def counted(sequence: int) -> object:
                looked.append(sequence)
                return await entry(sequence)

            monkeypatch.setattr(stream, "entry", counted)
            (found, *_) = await journal.read(head // 3)
            assert found.first <= head // 3 < found.first + found.count
            assert len(looked) <= 9
            looked.clear()
            offset = found.first
            while page := await journal.read(offset, 50):
                offset = page[-1].first + page[-1].count

            # One after the other, nothing has to be looked for.
            assert (offset, looked) == (head, [])

    run(story())


def test_a_batch_of_another_program_is_no_batch(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            headers = {nats_stream.FIRST: "0", nats_stream.COUNT: "many", nats_stream.AT: "0.0"}
            await journal._line.ask(Letter(journal._address.log_subject, b"", headers))

            with pytest.raises(JournalCorrupt, match=r"The message 1 of the stream .* is no batch"):
                await journal.head()

    run(story())

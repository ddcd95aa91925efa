import pytest
from tests.journals.helping import Place, open_nats, run

from raydispatch.delivery.journal import Change
from raydispatch.errors import InvalidParameter, JournalUnavailable
from raydispatch.journals.nats_line import Letter


def test_deleted_documents_leave_nothing_behind(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.write([Change("dead", str(number), b"letter") for number in range(200)])
            await journal.write([Change("dead", str(number), None) for number in range(200)])

            stream = await journal._line.api(f"STREAM.INFO.KV_{journal._address.bucket}")
            assert stream["state"]["messages"] == 0

    run(story())


def test_a_document_is_kept_once_however_often_it_is_written(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            for number in range(20):
                await journal.write([Change("cursors", "billing", str(number).encode())])

            stream = await journal._line.api(f"STREAM.INFO.KV_{journal._address.bucket}")
            assert stream["state"]["messages"] == 1

    run(story())


def test_documents_can_be_seen_with_the_tools_of_the_server(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.write([Change("cursors", "shop.billing", b"17")])

            bucket = await journal._line._client.jetstream().key_value(journal._address.bucket)
            assert (await bucket.get("cursors.shop=2Ebilling", validate_keys=False)).value == b"17"

    run(story())


def test_a_document_that_goes_while_it_is_listed_is_left_out(
    nats_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal, open_nats(nats_place) as other:
            await journal.write([Change("b", key, b"1") for key in "abcd"])
            first = await journal.documents("b", "", 1)
            await other.write([Change("b", "b", None)])

            assert first == [("a", b"1")]
            assert await journal.documents("b", "a", 2) == [("c", b"1"), ("d", b"1")]

    run(story())


def test_a_name_that_does_not_fit_into_a_line_is_refused(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            with pytest.raises(
                InvalidParameter, match=r"The name of a document is too long for NATS: \$KV\.raydispatch_"
            ):
                await journal.write([Change("b", "k" * 4_000, b"1")])

            await journal.write([Change("b", "日" * 200, b"1")])
            assert await journal.documents("b") == [("日" * 200, b"1")]

    run(story())


def test_a_bucket_that_is_gone_is_unavailable(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            await journal.write([Change("b", "key", b"1"), Change("b", "other", b"1")])
            await journal.documents("b", "", 1)
            await journal._line.api(f"STREAM.DELETE.KV_{journal._address.bucket}")

            for call in (
                journal.write([Change("b", "key", b"1")]),
                journal.write([Change("b", "key", None)]),
                journal.documents("b"),
                journal.documents("b", "key"),
            ):
                with pytest.raises(JournalUnavailable):
                    await call

    run(story())


def test_more_keys_than_a_server_lists_at_once_are_listed(nats_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            api, asked = journal._line.api, []

            async def two_at_once(verb: str, request: dict[str, object]) -> object:
                """Servers list 100,000."""
                answer = await api(verb, {"subjects_filter": request["subjects_filter"]})
                start = int(str(request["offset"]))
                subjects = sorted(answer["state"]["subjects"].items())
                asked.append(start)
                return {**answer, "state": {"subjects": dict(subjects[start : start + 2])}}

            await journal.write([Change("b", key, key.encode()) for key in "abcde"])
            monkeypatch.setattr(journal._line, "api", two_at_once)

            assert [key for key, _ in await journal.documents("b")] == list("abcde")
            assert asked == [0, 2, 4]

    run(story())


def test_letters_know_their_size() -> None:
    assert Letter("a", b"12345").size() == 5
    assert Letter("a", b"12345", {"A": "é"}).size() == 5 + len("NATS/1.0\r\nA: xx\r\n\r\n")

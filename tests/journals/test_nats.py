"""What a journal finds and makes on a server."""

import logging
from pathlib import Path

import pytest
from tests.journals.helping import (
    NatsServer,
    Place,
    batch,
    free_port,
    new_name,
    open_closed,
    open_nats,
    opened,
    read_all,
    run,
)

from raydispatch.delivery.journal import open_journal
from raydispatch.errors import InvalidParameter, JournalCorrupt, JournalUnavailable


def test_its_stream_refuses_what_it_has_no_room_for_and_forgets_nothing(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            for stream in (journal._address.log_stream, f"KV_{journal._address.bucket}"):
                config = (await journal._line.api(f"STREAM.INFO.{stream}"))["config"]

                assert (config["storage"], config["discard"], config["retention"]) == ("file", "new", "limits")
                assert (config["max_age"], config["max_bytes"], config["max_msgs"]) == (0, -1, -1)

    run(story())


def test_journals_of_several_names_and_prefixes_share_a_server(nats_server: NatsServer) -> None:
    name = new_name()
    places = [(nats_server.url, name), (nats_server.url, f"{name}."), (f"{nats_server.url}&prefix=other", name)]

    async def story() -> None:
        for number, place in enumerate(places):
            async with opened(place) as journal:
                assert await journal.append([batch(str(number).encode(), number + 1)]) == [0]
        for number, place in enumerate(places):
            async with opened(place) as journal:
                assert [one.data for one in await journal.read(0)] == [str(number).encode()]

    run(story())


def test_a_server_without_jetstream_says_how_to_have_it(tmp_path: Path) -> None:
    server = NatsServer.__new__(NatsServer)
    server.port = free_port()
    server._config, server._log = tmp_path / "nats.conf", tmp_path / "nats.log"
    server._config.write_text(f"listen: {server.host}\n")
    server.start()
    try:
        with pytest.raises(InvalidParameter, match=r"Put `jetstream \{ store_dir: …, sync_interval: always \}` into"):
            run(open_closed((f"nats://{server.host}?timeout=2", "orders")))
    finally:
        server.kill()


def test_an_account_without_jetstream_says_how_to_have_it(own_server: NatsServer) -> None:
    own_server.stop()
    own_server.configure("accounts { SYS {}, SHOP { users: [{ user: me, password: secret }] } }\nsystem_account: SYS\n")
    own_server.start()

    with pytest.raises(InvalidParameter, match="JetStream"):
        run(open_closed((own_server.url.replace("nats://", "nats://me:secret@"), "orders")))


def test_more_replicas_than_there_are_servers_are_refused(nats_server: NatsServer) -> None:
    with pytest.raises(InvalidParameter, match=r"The stream .*_log cannot be made at .*replicas"):
        run(open_closed((f"{nats_server.url}&replicas=3", new_name())))


def test_other_replicas_than_wanted_are_warned_of(nats_place: Place, caplog: pytest.LogCaptureFixture) -> None:
    url, name = nats_place
    run(open_closed(nats_place))

    with caplog.at_level(logging.WARNING, "raydispatch"):
        run(open_closed((f"{url}&replicas=3", name)))

    assert {record.message for record in caplog.records} == {"journal has another number of replicas"}
    assert [(vars(one)["replicas"], vars(one)["wanted"]) for one in caplog.records] == [(1, 3), (1, 3)]


def test_another_format_is_refused(nats_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as future:
        future.setattr("raydispatch.journals.nats.FORMAT", "2")
        run(open_closed(nats_place))

    with pytest.raises(JournalCorrupt, match="has format 2, and this version of raydispatch reads 1"):
        run(open_closed(nats_place))


def test_a_subject_that_is_another_stream_s_is_refused(nats_server: NatsServer, nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats((nats_server.url, new_name())) as helper:
            subject = f"raydispatch.{nats_place[1]}.log"
            await helper._line.api(f"STREAM.CREATE.{nats_place[1]}", {"name": nats_place[1], "subjects": [subject]})

        with pytest.raises(InvalidParameter, match=r"cannot be made at .*: subjects overlap"):
            await open_journal(*nats_place)

    run(story())


def test_a_server_that_is_full_is_unavailable_until_there_is_room(own_server: NatsServer) -> None:
    own_server.stop()
    own_server.configure(sync_interval="always, max_file_store: 1MB")
    own_server.start()

    async def story() -> None:
        async with open_nats((own_server.url, "orders")) as journal:

            async def fill() -> None:
                while await journal.head() < 10:
                    await journal.append([batch(bytes(300_000))])

            for _ in range(2):
                with pytest.raises(JournalUnavailable, match="The NATS server refuses: insufficient"):
                    await fill()

            head = await journal.head()
            assert len(await read_all(journal)) == head > 0
            await journal.trim(head)
            assert await journal.append([batch(bytes(300_000))]) == [head]

    run(story())

import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from tests.journals.helping import SHIPPED, NatsServer, free_port, new_name, opened, run

from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_flushing import warn_unless_flushed


def warnings_of(caplog: pytest.LogCaptureFixture, url: str) -> list[logging.LogRecord]:
    with caplog.at_level(logging.WARNING, "raydispatch"):
        run(warn_unless_flushed(NatsAddress.parse(url, "orders")))
    return caplog.records


def test_a_server_that_always_flushes_is_not_warned_of(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert "sync_interval: always" in SHIPPED.read_text()
    assert warnings_of(caplog, f"nats://one?monitor={nats_server.monitor}") == []


def test_a_server_that_flushes_now_and_then_is_warned_of(
    own_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.stop()
    own_server.configure(sync_interval='"2m"')
    own_server.start()

    (record,) = warnings_of(caplog, f"nats://one?monitor={own_server.monitor}")

    assert record.message == "journal may lose accepted messages when the power fails"
    assert vars(record)["sync_interval_seconds"] == 120
    assert "sync_interval: always" in vars(record)["advice"]


def test_without_a_monitor_the_advice_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    (record,) = warnings_of(caplog, "nats://one,two")

    assert record.message == "flushing of the journal cannot be seen"
    assert "sync_interval: always" in vars(record)["advice"]


def test_each_monitor_that_cannot_be_asked_is_named(nats_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"

    (record,) = warnings_of(caplog, f"nats://one,two?monitor={nats_server.monitor},{nobody}")

    assert record.message == "flushing of the journal cannot be seen"
    assert vars(record)["monitor"] == nobody
    assert "refused" in vars(record)["reason"]


@pytest.fixture
def other_site() -> Iterator[str]:
    """Something that is no server of NATS."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as site:
        thread = Thread(target=site.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()
        thread.join()


def test_a_monitor_that_is_something_else_is_named(other_site: str, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = warnings_of(caplog, f"nats://one?monitor={other_site}")

    assert record.message == "flushing of the journal cannot be seen"
    assert vars(record)["monitor"] == other_site


def test_a_journal_that_is_opened_is_looked_at(nats_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with opened((f"nats://{nats_server.host}", new_name())):
            pass

    with caplog.at_level(logging.WARNING, "raydispatch"):
        run(story())

    assert [record.message for record in caplog.records] == ["flushing of the journal cannot be seen"]

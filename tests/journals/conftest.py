"""Both journals, and a real NATS server for the whole run of tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.journals.helping import NatsServer, Place, nats_binary, new_name


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One that nobody stops."""
    need_binary()
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """One that this test may do anything to."""
    need_binary()
    server = NatsServer(tmp_path)
    yield server
    server.resume()
    server.kill()


@pytest.fixture
def nats_place(nats_server: NatsServer) -> Place:
    return nats_server.url, new_name()


@pytest.fixture
def file_place(tmp_path: Path) -> Place:
    return f"sqlite://{tmp_path}/{new_name()}.db", "orders"


@pytest.fixture(params=["sqlite", "nats"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Makes places for journals that are not there yet."""
    if request.param == "sqlite":
        return lambda: (f"sqlite://{tmp_path}/{new_name()}.db", "orders")
    url: str = request.getfixturevalue("nats_server").url
    return lambda: (url, new_name())


@pytest.fixture
def place(new_place: Callable[[], Place]) -> Place:
    return new_place()


def need_binary() -> None:
    try:
        nats_binary()
    except LookupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))

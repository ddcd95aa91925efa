"""Three servers, of which now one dies, now another."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.journals.conftest import need_binary
from tests.journals.helping import (
    NatsServer,
    batch,
    check_contiguous,
    free_port,
    open_nats,
    opened,
    read_all,
    run,
    until,
)

from raydispatch.delivery.journal import Batch, Change
from raydispatch.errors import JournalUnavailable

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[NatsServer]]:
    need_binary()
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
    servers = []
    for number, port in enumerate(ports):
        (tmp_path / str(number)).mkdir()
        more = f"server_name: n{number}\ncluster {{ name: c, listen: 127.0.0.1:{port}, routes: [{routes}] }}\n"
        servers.append(NatsServer(tmp_path / str(number), more))
    yield servers
    for server in servers:
        server.resume()
        server.kill()


def test_nothing_is_lost_or_doubled_while_servers_die_one_after_the_other(cluster: list[NatsServer]) -> None:
    monitors = ",".join(server.monitor for server in cluster)
    place = f"nats://{','.join(server.host for server in cluster)}?replicas=3&monitor={monitors}&timeout=2", "orders"
    kept: dict[int, Batch] = {}
    enough = asyncio.Event()

    async def can_be_opened() -> bool:
        try:
            async with opened(place):
                return True
        except JournalUnavailable:
            return False  # They have yet to choose a leader.

    async def story() -> None:
        await until(can_be_opened)
        async with open_nats(place) as journal:
            writing = asyncio.create_task(write(journal, kept, enough))
            for server in cluster[:2]:
                await more(kept)
                server.kill()
                await more(kept)
                server.start()
            await more(kept)
            enough.set()
            await writing

            found = await read_all(journal)
            check_contiguous(found)
            assert {one.first: (one.data, one.count) for one in found} == {
                first: one[:2] for first, one in kept.items()
            }
            assert await journal.documents("b") == [("last", found[-1].data)]

    run(story())


async def write(journal: object, kept: dict[int, Batch], enough: asyncio.Event) -> None:
    number = 0
    while not enough.is_set():
        batches = [batch(str(number + part).encode() * 100, part + 1) for part in range(4)]
        number += 4
        changes = [Change("b", "last", batches[-1].data)]
        while True:
            try:
                firsts: list[int] = await journal.append(batches, changes)  # type: ignore[attr-defined]
                break
            except JournalUnavailable:
                await asyncio.sleep(0.05)
        kept |= zip(firsts, batches, strict=True)


async def more(kept: dict[int, Batch]) -> None:
    wanted = len(kept) + 40

    async def are_there() -> bool:
        return len(kept) >= wanted

    await until(are_there)

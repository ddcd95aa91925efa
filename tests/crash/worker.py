"""A program to be killed: publishes numbers durably, and writes down which were accepted and which were handled.

Run as `worker.py JOURNAL FOLDER TOTAL [ray]`. Started again, it goes on where it was. Prints "done" when it is.
"""

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.settings import Delivery, JournalSettings

TOPIC = "crash.number.events"
WINDOW = 32
NAMESPACE = UUID("0d7f7f7e-8d0f-4e58-9f38-3b5a3c4c2d11")


def message(number: int) -> tuple[str, Envelope[int]]:
    """Always with the same id, so that a number whose acceptance nobody heard of can be published again."""
    return TOPIC, Envelope(number, "Number", message_id=uuid5(NAMESPACE, str(number)))


def make_engine(url: str, folder: str) -> DispatchEngine:
    engine = DispatchEngine("crash", journal=JournalSettings(url=url, cursor_seconds=0.2))

    @engine.dispatcher(
        "work",
        topics=TOPIC,
        category=MessageCategory.EVENT,
        delivery=Delivery.reliable_shared(window=WINDOW),
        breaker=None,
        replicas=2,
    )
    async def work(envelope: Envelope[int]) -> None:
        note(Path(folder) / "handled", [f"{envelope.payload} {envelope.attempt}"])
        await asyncio.sleep(0.0005)

    return engine


def note(file: Path, lines: Sequence[str]) -> None:
    """In one write: a line is there as a whole, or not at all. What the kernel has, a killed process cannot lose."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(handle)


def numbers_in(file: Path) -> list[int]:
    if not file.exists():
        return []
    return [int(line.split()[0]) for line in file.read_text().splitlines()]


def left_to_publish(folder: Path, total: int) -> list[int]:
    accepted = set(numbers_in(folder / "accepted"))
    return [number for number in range(total) if number not in accepted]


async def in_one_process(url: str, folder: Path, total: int) -> None:
    engine = make_engine(url, str(folder))
    async with engine:
        left = left_to_publish(folder, total)
        while left:
            count = random.randint(1, 40)
            some, left = left[:count], left[count:]
            await engine.publish_many([message(number) for number in some], durable=True)
            note(folder / "accepted", [str(number) for number in some])
        while engine.journal.statuses()[0].lag:  # noqa: ASYNC110 - as a user would
            await asyncio.sleep(0.01)


def on_ray(url: str, folder: Path, total: int) -> None:
    from raydispatch.actors import DispatchSystem
    from raydispatch.actors.connect import local_ray

    with local_ray(4), DispatchSystem.start(make_engine(url, str(folder)), routers=1) as system:
        left = left_to_publish(folder, total)
        while left:
            count = random.randint(1, 400)
            some, left = left[:count], left[count:]
            system.publish_many([message(number) for number in some], durable=True)
            note(folder / "accepted", [str(number) for number in some])
        while any(one.lag for one in system.status().subscriptions):
            pass


def main(url: str, folder: str, total: str, *rest: Any) -> None:
    if rest:
        on_ray(url, Path(folder), int(total))
    else:
        asyncio.run(in_one_process(url, Path(folder), int(total)))
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

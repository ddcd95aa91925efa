"""Kills a program that publishes and handles durable messages, again and again, and counts what became of them.

`python -m tests.crash.crashing --times 50` does so on both journals. Nothing that was accepted may be lost, and a
message may be handled twice only if the cursor that was kept last does not say that it was settled.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import psutil
from tests.crash import worker
from tests.journals.helping import NatsServer

from raydispatch.delivery.journal import Journal, open_journal
from raydispatch.delivery.post import CURSORS
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.window import Cursor

LIMIT_SECONDS = 120.0
A_LIFE = 4_000
"""Numbers that are published and handled in one life, at most about so many."""


class Tally(NamedTuple):
    """What became of the numbers."""

    accepted: int
    lost: int
    repeated: int
    unexplained: int
    """Repeats that the cursor had settled."""
    unmarked: int
    """Repeats that said to be the first attempt."""


class Victim:
    """The program, life after life."""

    def __init__(self, url: str, folder: Path, random_: random.Random, *, is_on_ray: bool = False) -> None:
        self._url = url
        self._folder = folder
        self._random = random_
        self._is_on_ray = is_on_ray
        self._process: subprocess.Popen[str] | None = None
        self._counted = 0
        self._excused: set[int] = set()
        """Numbers that may be handled again, since no cursor says that they were settled."""
        self._handled: Counter[int] = Counter()
        self.repeated = self.unexplained = self.unmarked = 0

    def live(self, total: int) -> None:
        """Begin a life."""
        mode = ["ray"] if self._is_on_ray else []
        command = [sys.executable, "-m", "tests.crash.worker", self._url, str(self._folder), str(total), *mode]
        errors = (self._folder / "errors").open("a")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.close()

    def die(self, after: int) -> None:
        """Kill it and all that it has started, when it has handled so many more."""
        assert self._process is not None
        goal = self._lines() + after
        deadline = monotonic() + LIMIT_SECONDS
        while self._lines() < goal and self._process.poll() is None:
            assert monotonic() < deadline, (self._folder / "errors").read_text()[-2_000:]
            sleep(0.001)
        end_all(self._process)
        self._look()

    def finish(self) -> None:
        """Let it live to its end."""
        assert self._process is not None
        out, _ = self._process.communicate(timeout=LIMIT_SECONDS)
        assert out.endswith("done\n"), (self._folder / "errors").read_text()[-2_000:]
        self._look(is_last=True)

    def tally(self) -> Tally:
        """What became of everything."""
        accepted = set(worker.numbers_in(self._folder / "accepted"))
        lost = len(accepted - self._handled.keys())
        return Tally(len(accepted), lost, self.repeated, self.unexplained, self.unmarked)

    def _look(self, *, is_last: bool = False) -> None:
        """Count what was handled in this life, and see what the journal says of it."""
        lines = (self._folder / "handled").read_text().splitlines() if self._lines() else []
        for line in lines[self._counted :]:
            number, attempt = map(int, line.split())
            if number in self._handled:
                self.repeated += 1
                self.unexplained += number not in self._excused
                self.unmarked += attempt < 2
            self._handled[number] += 1
        self._counted = len(lines)
        if not is_last:
            self._excused = asyncio.run(unsettled(self._url, set(self._handled)))

    def _lines(self) -> int:
        file = self._folder / "handled"
        return file.read_bytes().count(b"\n") if file.exists() else 0


async def unsettled(url: str, handled: set[int]) -> set[int]:
    """Of the numbers that were handled, those that the journal does not know as settled."""
    journal = await open_journal(url, "crash")
    try:
        cursor = await _cursor(journal)
        open_ones = {offset for offset, _, _ in cursor.open}
        ids = {worker.message(number)[1].message_id.bytes: number for number in handled}
        found = set()
        offset = await journal.first()
        while batches := await journal.read(offset):
            for one in batches:
                segment = Segment.unpack(one.data)
                for row in range(len(segment)):
                    at = one.first + row
                    number = ids.get(segment.message_id(row))
                    if number is not None and (at >= cursor.position or at in open_ones):
                        found.add(number)
            offset = batches[-1].first + batches[-1].count
        return found
    finally:
        await journal.close()


async def _cursor(journal: Journal) -> Cursor:
    documents = dict(await journal.documents(CURSORS))
    return Cursor.unpack(documents["work"]) if "work" in documents else Cursor()


def end_all(process: "subprocess.Popen[str]") -> None:
    """Kill a process with everything that it has started."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=LIMIT_SECONDS)
    process.communicate()


def crash(url: str, folder: Path, times: int, seed: int, *, is_on_ray: bool = False) -> Tally:
    """So many lives that end by kill -9, and one that may come to its end."""
    random_ = random.Random(seed)
    victim = Victim(url, folder, random_, is_on_ray=is_on_ray)
    total = 0
    for _ in range(times):
        total += A_LIFE
        victim.live(total)
        victim.die(after=random_.randint(1, A_LIFE))
    victim.live(total)
    victim.finish()
    return victim.tally()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--on-ray", type=int, default=5, help="as often with a whole Ray")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    is_well = True
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raydispatch-crash-")))
        server = NatsServer(root)
        stack.callback(server.stop)
        places = {"SQLite": f"sqlite://{root}/crash.db", "NATS": server.url, "SQLite on Ray": f"sqlite://{root}/ray.db"}
        for name, url in places.items():
            folder = root / name.replace(" ", "-")
            folder.mkdir()
            is_on_ray = name.endswith("Ray")
            times = options.on_ray if is_on_ray else options.times
            tally = crash(url, folder, times, options.seed, is_on_ray=is_on_ray)
            is_well = is_well and tally.lost == tally.unexplained == tally.unmarked == 0
            print(f"{name:<14} killed {times} times: {tally}", flush=True)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()

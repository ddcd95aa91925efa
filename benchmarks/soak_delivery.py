"""Durable delivery for ten minutes, with replicas killed meanwhile: memory flat, the file bounded, lag back to 0."""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import ray

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.connect import local_ray
from raydispatch.actors.names import NAMESPACE, keeper_name
from raydispatch.settings import Delivery, JournalSettings, SystemSettings

BATCH = 500
PER_SECOND = 4_000
KILL_SECONDS = 30.0
MOST_GROWTH = 1.25
"""Of the memory, from the first fifth of the time to the last."""


def engine(path: Path) -> DispatchEngine:
    journal = JournalSettings(url=f"sqlite://{path}", keep_seconds=30, recent_ids=20_000)
    made = DispatchEngine("soak", journal=journal)
    options: dict[str, Any] = {"topics": "dev.**", "category": MessageCategory.EVENT, "breaker": None, "replicas": 2}
    made.dispatcher("shared", delivery=Delivery.reliable_shared(window=256), **options)(nothing)
    made.dispatcher("by-key", delivery=Delivery.reliable_key_shared(window=256), **options)(nothing)
    return made


async def nothing(envelope: Envelope[Any]) -> None:
    pass


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes: float = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="raydispatch-soak-") as folder, local_ray(num_cpus=6):
        path = Path(folder) / "soak.db"
        settings = SystemSettings(remembered_ids=20_000)
        with DispatchSystem.start(engine(path), settings=settings) as system:
            is_well = soak(system, path, minutes * 60)
    sys.exit(0 if is_well else 1)


def soak(system: DispatchSystem, path: Path, seconds: float) -> bool:
    keeper = ray.get_actor(keeper_name("soak"), NAMESPACE)
    began = monotonic()
    killed_at = shown_at = began
    sent, kills = 0, 0
    memory: list[int] = []
    sizes: list[int] = []
    while (now := monotonic()) < began + seconds:
        receipts = system.publish_many(
            [
                ("dev.soak.events.v1", Envelope({"number": sent + one}, "Soak", key=f"key-{one % 100}"))
                for one in range(BATCH)
            ],
            durable=True,
        )
        assert all(receipt.status == "routed" for receipt in receipts)
        sent += BATCH
        if now - killed_at > KILL_SECONDS:
            killed_at = now
            replicas = [one for some in system.status().dispatchers.values() for one in some.replicas if one.pid]
            os.kill(replicas[kills % len(replicas)].pid or 0, signal.SIGKILL)
            kills += 1
        if now - shown_at > 10:
            shown_at = now
            memory.append(resident(ray.get(keeper.pid.remote())))
            sizes.append(sum(file.stat().st_size for file in path.parent.glob("soak.db*")))
            lags = {one.name: one.lag for one in system.status().subscriptions}
            print(
                f"{now - began:5.0f} s  {sent:>10,} sent  lag {lags}  keeper {memory[-1] / 1e6:.0f} MB  "
                f"file {sizes[-1] / 1e6:.0f} MB  {kills} kills",
                flush=True,
            )
        sleep(max(0.0, began + sent / PER_SECOND - monotonic()))
    deadline = monotonic() + 120
    while any(one.lag for one in system.status().subscriptions) and monotonic() < deadline:
        sleep(0.2)
    lags = {one.name: one.lag for one in system.status().subscriptions}
    early = max(memory[: max(1, len(memory) // 5)])
    late = max(memory[-max(1, len(memory) // 5) :])
    print(f"{sent:,} messages, {kills} replicas killed; lag at the end {lags}")
    print(f"memory of the keeper {early / 1e6:.0f} → {late / 1e6:.0f} MB ({late / early:.2f} x, at most {MOST_GROWTH})")
    return not any(lags.values()) and late / early <= MOST_GROWTH


if __name__ == "__main__":
    main()

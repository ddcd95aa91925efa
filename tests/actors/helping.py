"""What the tests on a real cluster share: handlers that write down what they do, and looking at processes."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import ray

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.names import NAMESPACE, keeper_name
from raydispatch.errors import SystemUnavailable
from raydispatch.settings import EngineSettings, JournalSettings

# Workers can't import test modules: what is defined here travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOPIC = "dev.order.events.v1"


class Recorder:
    """A handler in a process of its own that appends a line for each message to a file: number, attempt, process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = -1

    def start(self) -> None:
        self.file = os.open(self.path, os.O_APPEND | os.O_WRONLY | os.O_CREAT)

    async def handle(self, envelope: Envelope[Any]) -> None:
        os.write(self.file, f"{envelope.payload} {envelope.attempt} {os.getpid()}\n".encode())


def recorder_class(path: Path) -> type[Recorder]:
    """The recorder for this file, as a class that is built where it runs."""
    place = str(path)

    class Placed(Recorder):
        def __init__(self) -> None:
            super().__init__(place)

    return Placed


def recorded(path: Path) -> list[tuple[int, int, int]]:
    """The lines: number, attempt, process."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [(int(number), int(attempt), int(process)) for number, attempt, process in map(str.split, lines)]


def numbers(path: Path) -> Counter[int]:
    """How often each message ran."""
    return Counter(number for number, _, _ in recorded(path))


def orders(count: int) -> Any:
    """Messages with a number each, on a hundred topics."""
    return ((f"dev.order-{i % 100}.events.v1", Envelope(i, message_type="Order")) for i in range(count))


def engine_of(name: str, handler: Any, **options: Any) -> DispatchEngine:
    """An engine with one dispatcher, `orders`."""
    engine = DispatchEngine(name)
    engine.dispatcher("orders", topics="dev.*.events.*", category=MessageCategory.EVENT, **options)(handler)
    return engine


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Ask again and again, up to a limit."""
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, f"not within {seconds} s: {condition}"
        signal.sigtimedwait([], 0.02)


def replica_pids(system: DispatchSystem, dispatcher_id: str = "orders") -> list[int]:
    """The processes of a dispatcher's replicas."""
    return [replica.pid for replica in system.status().dispatchers[dispatcher_id].replicas if replica.pid]


def router_pids(system: DispatchSystem) -> list[int]:
    """The processes of the routers."""
    return [router.pid for router in system.status().routers if router.pid]


def journal_in(folder: Path, **options: Any) -> EngineSettings:
    """A journal in a file of this folder; what is acknowledged is kept five times a second."""
    journal = JournalSettings(**{"url": f"sqlite://{folder}/journal.db", "cursor_seconds": 0.2, **options})
    return EngineSettings(journal=journal)


def keeper_of(name: str) -> Any:
    """The handle of a system's keeper."""
    return ray.get_actor(keeper_name(name), NAMESPACE)


def kill(pid: int) -> None:
    """End a process of this test's own cluster, at once."""
    os.kill(pid, signal.SIGKILL)


def actors_of(name: str) -> list[str]:
    """The named actors of a system that the cluster knows."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in entries if entry["name"].startswith(f"raydispatch/{name}/")]


def is_gone(name: str) -> bool:
    """Whether nothing of a system is left."""
    try:
        DispatchSystem.attach(name).close()
    except SystemUnavailable:
        return not actors_of(name)
    return False

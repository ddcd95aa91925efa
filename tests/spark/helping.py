"""What the tests on a real Spark share: an engine whose handlers write down what they do, and looking at ledgers."""

import asyncio
import os
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pytest
import ray
from pydantic import BaseModel, ConfigDict

from raydispatch import BreakerSettings, DispatchEngine, Envelope, MessageCategory
from raydispatch.settings import EngineSettings

# Workers can't import test modules: what is defined here travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

EVENT = MessageCategory.EVENT
MAX_PAYLOAD_BYTES = 2_000

MARKS = [
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
    # PySpark's own: how it compares versions, and sockets that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore:distutils Version classes are deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


class Effect(NamedTuple):
    """What a handler has seen of one message."""

    topic: str
    message_type: str | None
    key: str | None
    message_id: str
    correlation_id: str
    attempt: int
    kind: str
    """The type of the payload: the Arrow type, or the class."""
    payload: Any


class Effects:
    """A folder with a file for each dispatcher and a line for each message that it has handled."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def of(self, dispatcher_id: str, topic: str) -> list[Effect]:
        """What a dispatcher did on one topic."""
        path = Path(self._folder, dispatcher_id)
        lines = path.read_text().splitlines() if path.exists() else []
        return [effect for effect in (Effect(*literal_eval(line)) for line in lines) if effect.topic == topic]

    def payloads(self, dispatcher_id: str, topic: str) -> list[Any]:
        """The same, payloads only, in order of their value."""
        return sorted(effect.payload for effect in self.of(dispatcher_id, topic))

    def allow(self, what: str) -> None:
        """Let handlers succeed that wait for this."""
        Path(self._folder, f"allowed-{what}").touch()

    def allows(self, what: str) -> bool:
        """Whether somebody has allowed it."""
        return os.path.exists(os.path.join(self._folder, f"allowed-{what}"))

    def add(self, dispatcher_id: str, effects: Iterable[Effect]) -> None:
        """Write them down, in one piece."""
        lines = "".join(f"{tuple(effect)!r}\n" for effect in effects).encode()
        file = os.open(os.path.join(self._folder, dispatcher_id), os.O_APPEND | os.O_WRONLY | os.O_CREAT)
        try:
            os.write(file, lines)
        finally:
            os.close(file)


class Order(BaseModel):
    """A payload that is checked."""

    model_config = ConfigDict(extra="forbid")

    number: int
    name: str = ""


def effect_of(envelope: Envelope[Any]) -> Effect:
    payload = envelope.payload.model_dump() if isinstance(envelope.payload, BaseModel) else envelope.payload
    return Effect(
        envelope.topic, envelope.message_type, envelope.key, str(envelope.message_id), str(envelope.correlation_id),
        envelope.attempt, type(envelope.payload).__name__, payload,
    )  # fmt: skip


def effects_of(table: pa.Table) -> list[Effect]:
    kind = str(table["payload"].type)
    return [
        Effect(
            row["topic"], row["message_type"], row["key"], str(UUID(bytes=row["message_id"])),
            str(UUID(bytes=row["correlation_id"])), row["attempt"], kind, row["payload"],
        )
        for row in table.to_pylist()
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """For a process that finds what this one finds, and no Ray but its own."""
    others = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**others, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}


def number_of(payload: Any) -> int:
    """The number in a payload, whatever it is packed in."""
    return int(payload["number"] if isinstance(payload, Mapping) else payload)


def route_engine(name: str, effects: Effects) -> DispatchEngine:
    """One dispatcher for each kind of test; topics are `dev.<test>.<kind>.events`."""
    engine = DispatchEngine(name, settings=EngineSettings(max_payload_bytes=MAX_PAYLOAD_BYTES))

    def add(kinds: str | list[str], dispatcher_id: str, handler: Any, **options: Any) -> None:
        topics = [f"dev.*.{kind}.events" for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        engine.dispatcher(dispatcher_id, topics=topics, category=EVENT, **options)(handler)

    add("table", "table", table_recorder(effects, "table"), batch=True)
    add(["single", "mixed"], "single", recorder(effects, "single"), replicas=2)
    add("typed", "typed", typed_recorder(effects))
    add(["both", "half"], "first", recorder(effects, "first"), priority=10)
    add("both", "second", recorder(effects, "second"))
    add("half", "mending", mending(effects), breaker=None, retry=None)
    add("shaky", "shaky", shaky(effects), breaker=None, retry=None)
    add("shaky-table", "shaky-table", shaky_table(effects), breaker=None, retry=None, batch=True)
    guard = BreakerSettings(failure_threshold=1, reset_after_seconds=1.5)
    add("opening", "opening", opening(effects), breaker=guard, retry=None, concurrency=1)
    return engine


def recorder(effects: Effects, dispatcher_id: str) -> Callable[[Envelope[Any]], Any]:
    """Writes down each message."""

    async def record(envelope: Envelope[Any]) -> None:
        effects.add(dispatcher_id, [effect_of(envelope)])

    return record


def table_recorder(effects: Effects, dispatcher_id: str) -> Callable[[pa.Table], None]:
    """Writes down the rows of each table."""

    def record(table: pa.Table) -> None:
        effects.add(dispatcher_id, effects_of(table))

    return record


def gated_recorder(effects: Effects, dispatcher_id: str) -> Callable[[Envelope[Any]], Any]:
    """Writes down each message, and ends when its topic is allowed."""

    async def record(envelope: Envelope[Any]) -> None:
        effects.add(dispatcher_id, [effect_of(envelope)])
        async with asyncio.timeout(60):
            while not effects.allows(envelope.topic):  # noqa: ASYNC110 - whoever allows it is another process
                await asyncio.sleep(0.02)

    return record


def typed_recorder(effects: Effects) -> Callable[[Envelope[Order]], Any]:
    """Takes orders only."""

    async def record(envelope: Envelope[Order]) -> None:
        effects.add("typed", [effect_of(envelope)])

    return record


def mending(effects: Effects) -> Callable[[Envelope[Any]], Any]:
    """Odd numbers fail until it is mended."""

    async def mend(envelope: Envelope[Any]) -> str:
        if number_of(envelope.payload) % 2 and not effects.allows(envelope.topic):
            raise ConnectionError("not mended yet")
        effects.add("mending", [effect_of(envelope)])
        return "dev.nobody.listens.events"

    return mend


def shaky(effects: Effects) -> Callable[[Envelope[Any]], Any]:
    """Three of ten fail."""

    async def shake(envelope: Envelope[Any]) -> None:
        if number_of(envelope.payload) % 10 < 3:
            raise ConnectionError("shaken")
        effects.add("shaky", [effect_of(envelope)])

    return shake


def shaky_table(effects: Effects) -> Callable[[pa.Table], list[str]]:
    """Three of ten rows fail; the others of the same table succeed."""

    def shake(table: pa.Table) -> list[str]:
        seen = effects_of(table)
        is_well = [number_of(effect.payload) % 10 >= 3 for effect in seen]
        effects.add("shaky-table", [effect for effect, well in zip(seen, is_well, strict=True) if well])
        return ["success" if well else "dispatcher_error" for well in is_well]

    return shake


def opening(effects: Effects) -> Callable[[Envelope[Any]], Any]:
    """Fails until it is allowed; the first failure opens its circuit."""

    async def handle(envelope: Envelope[Any]) -> None:
        if not effects.allows("opening"):
            raise ConnectionError("down")
        effects.add("opening", [effect_of(envelope)])

    return handle


def numbers(spark: Any, count: int, partitions: int = 2) -> Any:
    """A DataFrame of numbers, as text, in some partitions."""
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) as number")


def rows_of(report: Any) -> dict[str, Any]:
    """The ledger of a report, by row id."""
    rows = report.ledger.collect()
    found = {row["row_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found

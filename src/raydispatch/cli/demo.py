"""`raydispatch demo`: a small shop, so that one can see messages routed, failing, and being refused."""

import asyncio
from collections import Counter

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.outcome import DispatchResult
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, RetrySettings


class OrderPlaced(BaseModel):
    """What the shop tells when an order comes in."""

    order_id: int
    total: float


def build_engine() -> DispatchEngine:
    """Billing and audit work, the mail server is down, and one command ships orders."""
    engine = DispatchEngine("shop")

    @engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, priority=10)
    async def bill(envelope: Envelope[OrderPlaced]) -> str:
        return "dev.invoice.events.v1"

    @engine.dispatcher("audit", topics="**.events.**", category=MessageCategory.EVENT)
    async def audit(envelope: Envelope[object]) -> None:
        return None

    @engine.dispatcher(
        "mail",
        topics="*.customer.events.*",
        category=MessageCategory.EVENT,
        breaker=BreakerSettings(failure_threshold=5),
        retry=RetrySettings(tries=2, first_delay_seconds=0.01),
    )
    async def send_mail(envelope: Envelope[object]) -> None:
        raise ConnectionError("mail server refused, password=hunter2")

    @engine.dispatcher("shipping", topics="*.order.commands.ship", category=MessageCategory.COMMAND)
    async def ship(envelope: Envelope[object]) -> str:
        return "dev.parcel.events.v1"

    engine.freeze()
    return engine


def demo(messages: int = 2_000) -> None:
    """Send messages through a small shop and show what became of them."""
    console = Console()
    engine = build_engine()
    console.print(f"{engine!r}", highlight=False, markup=False)
    with console.status(f"dispatching {messages:,} messages"):
        results = asyncio.run(_send(engine, messages))
    console.print(_summary(results))
    console.print(_dispatchers(engine))
    for letter in engine.dead_letters.list()[:1]:
        outcome = letter.outcome
        text = f"first of {len(engine.dead_letters)} dead letters: {outcome.dispatcher_id}: {outcome.error_message}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


async def _send(engine: DispatchEngine, messages: int) -> list[DispatchResult]:
    return [await engine.dispatch(*_message(number)) for number in range(messages)]


def _message(number: int) -> tuple[str, Envelope[object]]:
    if number % 50 == 0:
        return "dev.customer.events.v1", Envelope({"customer": number}, message_type="CustomerJoined")
    if number % 50 == 1:
        return "dev.order.events.v1", Envelope({"order_id": "?"}, message_type="OrderPlaced")
    if number % 50 == 2:
        return "dev.stock.commands.count", Envelope({}, message_type="CountStock")
    if number % 5 == 3:
        return "dev.order.commands.ship", Envelope({"order_id": number}, message_type="ShipOrder")
    return "dev.order.events.v1", Envelope(OrderPlaced(order_id=number, total=9.99))


def _summary(results: list[DispatchResult]) -> Table:
    table = Table(title=f"What became of {len(results):,} messages", title_justify="left")
    for heading in ("status", "messages", "for example"):
        table.add_column(heading, justify="right" if heading == "messages" else "left")
    counts = Counter(result.status for result in results)
    for status, count in counts.most_common():
        example = next(result for result in results if result.status is status)
        table.add_row(status, f"{count:,}", example.error_message or f"{example.topic} → {', '.join(example.outputs)}")
    return table


def _dispatchers(engine: DispatchEngine) -> Table:
    table = Table(title="Dispatchers", title_justify="left")
    for heading in ("dispatcher", "ran", "refused", "failed", "average ms", "circuit"):
        table.add_column(heading, justify="left" if heading in ("dispatcher", "circuit") else "right")
    for name, part in sorted(engine.get_structured_metrics().dispatcher_metrics.items()):
        failed = part.error_count - part.refused_count
        table.add_row(
            name, f"{part.execution_count:,}", f"{part.refused_count:,}", f"{failed:,}",
            f"{part.avg_latency_ms:.3f}", engine.circuit_state(name),
        )  # fmt: skip
    return table

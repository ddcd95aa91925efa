"""The shop in this process, without Ray."""

import asyncio
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from raydispatch.bus.engine import DispatchEngine
from raydispatch.cli.demo.ledger import Ledger, Message
from raydispatch.cli.demo.shop import MailServer, build_shop, customer, everyday


def play_in_process(console: Console, messages: int) -> None:
    """Send the messages, one after the other, while the mail server is down all the time."""
    ledger = Ledger()
    with MailServer() as mail:
        engine = build_shop(mail.port)
        console.print(f"{engine!r}", highlight=False, markup=False)
        with console.status(f"dispatching {messages:,} messages"):
            asyncio.run(_send(engine, ledger, messages))
    ledger.show(console)
    console.print(_dispatchers(engine))
    for letter in engine.dead_letters.list()[:1]:
        outcome = letter.outcome
        text = f"first of {len(engine.dead_letters)} dead letters: {outcome.dispatcher_id}: {outcome.error_message}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


async def _send(engine: DispatchEngine, ledger: Ledger, messages: int) -> None:
    async with engine:
        for topic, envelope in ledger.outgoing(_messages(messages)):
            ledger.enter(await engine.dispatch(topic, envelope))


def _messages(count: int) -> Iterator[Message]:
    for number in range(count):
        yield customer(number) if number % 50 == 0 else everyday(number)


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

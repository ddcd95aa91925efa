"""The demo on Ray: three parts, their sum, and a DataFrame."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, takewhile
from time import monotonic, sleep

from rich.console import Console

from raydispatch.actors.connect import local_ray
from raydispatch.actors.system import DispatchSystem
from raydispatch.cli.demo.ledger import Ledger, Message
from raydispatch.cli.demo.night import route_orders
from raydispatch.cli.demo.screen import Screen
from raydispatch.cli.demo.shop import MailServer, build_shop, customer, everyday, order
from raydispatch.cli.status import Watch, drawn
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.settings import SystemSettings

BANK_SECONDS = 0.2
"""With 100 handlers at once, that makes 500 orders a second and replica: few enough for 2 cores to show scaling."""
SETTINGS = SystemSettings(batch_messages=50, window_calls=24)
"""Small batches and many: three replicas share them evenly, and rates show soon."""
CUSTOMERS = 600
"""Who order one thing after the other, all at once: enough to keep three replicas busy."""
REPAIR_AFTER_SECONDS = 2.5
PATIENCE_SECONDS = 15.0
MEASURED_SECONDS = 2.5


def play(console: Console, messages: int) -> bool:
    """All of it; whether the ledgers add up. Nothing that was started outlives this, however it ends."""
    screen, ledger = Screen(console), Ledger()
    with MailServer() as mail:
        screen.heading("Starting", "A Ray of our own on this machine, and on it a shop: 2 routers and 4 dispatchers.")
        with _open_shop(mail, console) as system:
            screen.say("the shop is open")
            with screen.watching(system):
                _route(screen, ledger, system, messages)
                _break_and_repair(screen, ledger, system, mail)
                _scale(screen, ledger, system)
            _sum_up(screen, console, ledger, system)
            rows_add_up = route_orders(screen, console, system)
    screen.say("the shop and its Ray are gone")
    return ledger.adds_up and rows_add_up


@contextmanager
def _open_shop(mail: MailServer, console: Console) -> Iterator[DispatchSystem]:
    with ExitStack() as stack:
        with console.status("starting Ray"):
            stack.enter_context(local_ray(num_cpus=4))
            system = DispatchSystem.start(build_shop(mail.port, BANK_SECONDS), settings=SETTINGS)
        try:
            yield system
        except BaseException:
            system.stop(seconds=0)
            raise
        system.stop()


def _route(screen: Screen, ledger: Ledger, system: DispatchSystem, messages: int) -> None:
    screen.heading(
        "1. Routing",
        f"{messages:,} messages: orders go to billing and audit, commands to shipping. Some have a fault, and some are",
        "for nobody: that is a result like any other.",
    )
    started = monotonic()
    for result in system.dispatch_many(ledger.outgoing(map(everyday, range(messages)))):
        ledger.enter(result)
    screen.say(f"{messages:,} messages done in {monotonic() - started:.1f} s")


def _break_and_repair(screen: Screen, ledger: Ledger, system: DispatchSystem, mail: MailServer) -> None:
    screen.heading(
        "2. A circuit breaker",
        "Customers join, each gets a mail, and the mail server is down. Each mail is tried twice; after 5 failures in",
        "a row the circuit opens: mails are refused at once, but for one trial a second. Then the server is repaired.",
    )
    began, repaired, seen = monotonic(), False, DispatchStatus.SUCCESS
    delivered = 0
    while delivered < 20 and monotonic() - began < PATIENCE_SECONDS:
        if not repaired and monotonic() - began > REPAIR_AFTER_SECONDS:
            mail.repair()
            repaired = True
            screen.say("[green]the mail server is repaired[/green]")
        result = _send(ledger, system, customer(ledger.sent))
        if result.status is not seen:
            screen.say(_NEWS.get((seen, result.status), str(result.status)))
            seen = result.status
        delivered += result.status is DispatchStatus.SUCCESS
        sleep(0.04)


_FAILED, _OPEN, _SENT = DispatchStatus.DISPATCHER_ERROR, DispatchStatus.CIRCUIT_OPEN, DispatchStatus.SUCCESS
_NEWS = {
    (_SENT, _FAILED): "[yellow]a mail failed: the server refuses the connection[/yellow]",
    (_FAILED, _OPEN): "[red]the circuit is open: mails are refused, nobody calls the server[/red]",
    (_OPEN, _FAILED): "[yellow]a trial failed: the server is still down[/yellow]",
    (_OPEN, _SENT): "[green]a trial went through, the circuit is closed: mails are sent again[/green]",
}


def _send(ledger: Ledger, system: DispatchSystem, message: Message) -> DispatchResult:
    [(topic, envelope)] = ledger.outgoing([message])
    result = system.dispatch(topic, envelope)
    ledger.enter(result)
    return result


def _scale(screen: Screen, ledger: Ledger, system: DispatchSystem) -> None:
    screen.heading(
        "3. Scaling under load",
        f"Billing waits {BANK_SECONDS * 1000:.0f} ms for the bank, and a replica works on 100 orders at once. For more",
        f"than {100 / BANK_SECONDS:,.0f} orders/s, it takes more replicas.",
    )
    with _orders_without_end(ledger, system):
        before = _rate(ledger)
        screen.say(f"billing with 1 replica: {before:,.0f} orders/s")
        started = monotonic()
        system.scale("billing", 3)
        screen.say(f"scaled to 3 replicas in {monotonic() - started:.1f} s, while orders went on")
        after = _rate(ledger)
        screen.say(f"billing with 3 replicas: {after:,.0f} orders/s, [green]{after / before:.1f} times as many[/green]")


@contextmanager
def _orders_without_end(ledger: Ledger, system: DispatchSystem) -> Iterator[None]:
    """Customers who order as long as the block runs, in another thread; in the end, wait for all their results."""
    ended = threading.Event()
    orders = ledger.outgoing(takewhile(lambda _: not ended.is_set(), map(order, count())))

    async def one() -> None:
        for topic, envelope in orders:
            ledger.enter(await system.dispatch_async(topic, envelope))

    async def everyone() -> None:
        await asyncio.gather(*(one() for _ in range(CUSTOMERS)))

    with ThreadPoolExecutor(1, "demo customers") as threads:
        ordering = threads.submit(asyncio.run, everyone())
        try:
            yield
        finally:
            ended.set()
        ordering.result()


def _rate(ledger: Ledger) -> float:
    """Messages per second, once things have settled."""
    sleep(1.0)
    before, began = ledger.ended, monotonic()
    sleep(MEASURED_SECONDS)
    return max(1.0, ledger.ended - before) / (monotonic() - began)


def _sum_up(screen: Screen, console: Console, ledger: Ledger, system: DispatchSystem) -> None:
    screen.heading("The shop after that")
    console.print(drawn(Watch(system).look()))
    screen.heading("The ledger", "What became of every message that was sent:")
    ledger.show(console)
    for letter in system.dead_letters()[-1:]:
        console.print(
            f"The last dead letter: {letter.outcome.dispatcher_id}, {letter.outcome.error_message}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip

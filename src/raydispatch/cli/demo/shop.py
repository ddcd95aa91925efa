"""The shop: four dispatchers, and the messages that come in."""

import asyncio
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from raydispatch.bus.engine import DispatchEngine
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, RetrySettings


class OrderPlaced(BaseModel):
    """What the shop tells when an order comes in."""

    order_id: int
    total: float


def build_shop(mail_port: int, bank_seconds: float = 0.0) -> DispatchEngine:
    """Billing asks a bank that takes its time, audit hears of every event, mail needs its server, shipping ships.

    The handlers are made in here so that they travel to other processes by value, with the two numbers in them.
    """
    engine = DispatchEngine("shop")

    @engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, priority=10)
    async def bill(envelope: Envelope[OrderPlaced]) -> str:
        if bank_seconds:
            await asyncio.sleep(bank_seconds)
        return "dev.invoice.events.v1"

    @engine.dispatcher("audit", topics="**.events.**", category=MessageCategory.EVENT)
    async def audit(envelope: Envelope[object]) -> None:
        return None

    @engine.dispatcher(
        "mail",
        topics="*.customer.events.*",
        category=MessageCategory.EVENT,
        breaker=BreakerSettings(failure_threshold=5, reset_after_seconds=1.0),
        retry=RetrySettings(tries=2, first_delay_seconds=0.01),
    )
    async def send_mail(envelope: Envelope[object]) -> None:
        try:
            _, connection = await asyncio.open_connection("127.0.0.1", mail_port)
        except ConnectionRefusedError:
            raise ConnectionError("mail server refused, password=hunter2") from None
        connection.close()

    @engine.dispatcher("shipping", topics="*.order.commands.ship", category=MessageCategory.COMMAND)
    async def ship(envelope: Envelope[object]) -> str:
        return "dev.parcel.events.v1"

    engine.freeze()
    return engine


def build_night_shop() -> DispatchEngine:
    """The shop with handlers of whole tables: a call to the bank for thousands of orders, not for each."""
    engine = DispatchEngine("shop")

    @engine.dispatcher(
        "billing",
        topics="*.order.events.*",
        category=MessageCategory.EVENT,
        priority=10,
        batch=True,
        retry=None,  # An order without a number has none the next time, either.
    )
    def bill(orders: pa.Table) -> pa.Array:
        numbers = pc.struct_field(orders["payload"], "order_id")
        return pc.if_else(pc.is_valid(numbers), "success", "invalid_message")

    @engine.dispatcher("audit", topics="**.events.**", category=MessageCategory.EVENT, batch=True)
    def audit(events: pa.Table) -> None:
        return None

    engine.freeze()
    return engine


def order(number: int) -> tuple[str, Envelope[object]]:
    """An order as it should be."""
    return "dev.order.events.v1", Envelope(OrderPlaced(order_id=number, total=9.99))


def customer(number: int) -> tuple[str, Envelope[object]]:
    """A customer joins, and gets a mail."""
    return "dev.customer.events.v1", Envelope({"customer": number}, message_type="CustomerJoined")


def everyday(number: int) -> tuple[str, Envelope[object]]:
    """Mostly orders; a fifth are commands to ship one; a few have a fault, or are for nobody."""
    if number % 50 == 1:
        return "dev.order.events.v1", Envelope({"order_id": "?"}, message_type="OrderPlaced")
    if number % 50 == 2:
        return "dev.stock.commands.count", Envelope({}, message_type="CountStock")
    if number % 5 == 3:
        return "dev.order.commands.ship", Envelope({"order_id": number}, message_type="ShipOrder")
    return order(number)


class MailServer:
    """A real port, on which nobody listens until the server is repaired."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def repair(self) -> None:
        """From now on, connections are taken."""
        self._socket.listen(128)
        threading.Thread(target=self._serve, name="mail server", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # Closed.
            while True:
                self._socket.accept()[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # Not connected, since it never was repaired; otherwise this wakes `accept`.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

"""The inbox: what others publish on NATS goes into an engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Receipt
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import InvalidParameter
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_messages import envelope_of
from raydispatch.journals.nats_outlet import connect
from raydispatch.messages.envelope import Envelope

Deliver = Callable[[str, Envelope[Any]], Awaitable[DispatchResult | Receipt]]
"""`engine.dispatch`, `system.dispatch_async`, or a publish with durable=True."""

FETCH_SECONDS = 1.0
AGAIN_SECONDS = 1.0
"""Until a message is delivered again that found an open circuit or no room; ten times that at most."""

_log = logging.getLogger("raydispatch")


class NatsInbox:
    """Takes messages of a stream of JetStream, delivers them, and acknowledges each when its end is known.

    The subject is the topic. A message that was refused (an open circuit, no room, no time) is delivered again later;
    every other end is an end: what failed is a dead letter. At least once: who dies in between gets it again, with the
    same message id.

    Example: `async with NatsInbox("nats://localhost:4222", "orders.>", engine.dispatch) as inbox: await inbox.run()`
    """

    def __init__(
        self,
        url: str,
        subject: str,
        deliver: Deliver,
        *,
        name: str = "raydispatch",
        stream: str | None = None,
        message_type: str = "",
        window: int = 256,
        ack_seconds: float = 30.0,
    ) -> None:
        if window < 1:
            raise InvalidParameter(f"window must be at least 1, not {window}.")
        self._address = NatsAddress.parse(url, name)
        self._subject = subject
        self._deliver = deliver
        self._stream = stream
        self._message_type = message_type
        self._window = window
        self._ack_seconds = ack_seconds
        self._client: Any = None
        self._source: Any = None
        self._under_way: dict[asyncio.Task[None], Msg] = {}
        self.delivered = 0
        """Messages that came to an end."""

    async def __aenter__(self) -> Self:
        self._client = await connect(self._address)
        try:
            jetstream = self._client.jetstream(timeout=self._address.timeout_seconds)
            stream = self._stream or await jetstream.find_stream_name_by_subject(self._subject)
            config = ConsumerConfig(
                ack_policy=AckPolicy.EXPLICIT, ack_wait=self._ack_seconds, max_ack_pending=self._window
            )
            durable = self._address.name.replace(".", "_")
            self._source = await jetstream.pull_subscribe(self._subject, durable=durable, stream=stream, config=config)
        except NotFoundError:
            await self._client.hang_up()
            raise InvalidParameter(
                f"No stream at {self._address.shown} keeps the subject '{self._subject}': add one there, so that what "
                "comes while nobody listens is not lost."
            ) from None
        except BaseException:
            await self._client.hang_up()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """What is under way may end; what was not begun stays in the stream."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=self._ack_seconds)
        await self._client.hang_up()

    async def run(self) -> None:
        """Deliver until cancelled."""
        loop = asyncio.get_running_loop()
        breathing = loop.create_task(self._breathe())
        try:
            while True:
                room = self._window - len(self._under_way)
                if room <= 0:
                    await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for message in await self._fetch(room):
                    task = loop.create_task(self._one(message))
                    self._under_way[task] = message
                    task.add_done_callback(lambda ended: self._under_way.pop(ended, None))
        finally:
            breathing.cancel()

    async def _fetch(self, most: int) -> list[Msg]:
        try:
            found: list[Msg] = await self._source.fetch(most, timeout=FETCH_SECONDS)
            return found
        except TimeoutError:
            return []
        except NatsError as error:
            _log.warning("NATS does not answer", extra={"server": self._address.shown, "error": str(error)})
            await asyncio.sleep(FETCH_SECONDS)
            return []

    async def _one(self, message: Msg) -> None:
        facts = message.metadata
        origin = f"{facts.stream}/{facts.sequence.stream}"
        try:
            envelope = envelope_of(message.data, message.headers, origin, self._message_type)
        except InvalidParameter as error:
            _log.error("message of NATS is none of ours", extra={"subject": message.subject, "error": str(error)})
            await _quietly(message.term())
            return
        try:
            result = await self._deliver(message.subject, envelope.with_attempt(facts.num_delivered))
        except Exception as error:
            _log.error("message of NATS not delivered", extra={"error": describe_exception(error)})
            await _quietly(message.nak(delay=AGAIN_SECONDS))
            return
        if result.status in _AGAIN:
            await _quietly(message.nak(delay=AGAIN_SECONDS * min(facts.num_delivered, 10)))
        else:
            await _quietly(message.ack())
            self.delivered += 1

    async def _breathe(self) -> None:
        """Say of what takes long that it is still worked on, so that nobody else gets it."""
        while True:
            await asyncio.sleep(self._ack_seconds / 3)
            for message in list(self._under_way.values()):
                await _quietly(message.in_progress())


_AGAIN = frozenset((DispatchStatus.CIRCUIT_OPEN, DispatchStatus.REJECTED, DispatchStatus.TIMEOUT))


async def _quietly(call: Awaitable[None]) -> None:
    # A word that does not arrive is one for a message that will be delivered again.
    with suppress(NatsError, OSError, TimeoutError):
        await call

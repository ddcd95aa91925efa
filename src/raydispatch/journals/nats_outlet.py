"""The outlet: what handlers made goes out on NATS subjects."""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from raydispatch.errors import InvalidParameter, JournalUnavailable
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_client import NatsClient
from raydispatch.journals.nats_messages import body_of, headers_of
from raydispatch.messages.envelope import Envelope

PAUSES = (0.1, 0.5, 2.0)
"""Between tries, before a message counts as not published."""

KNOWN_SECONDS = 10.0
MOST_SUBJECTS = 10_000

_log = logging.getLogger("raydispatch")


def open_outlet(url: str, name: str) -> "NatsOutlet":
    """An outlet to these servers; it connects when the first message goes out."""
    return NatsOutlet(NatsAddress.parse(url, name))


class NatsOutlet:
    """Publishes envelopes, each on the subject that its topic is. Belongs to one event loop.

    Where a stream of JetStream keeps the subject, a message counts as published when the stream has it, and a repeat of
    its id is stored once. On other subjects it counts when the server has it.

    Example: `@engine.dispatcher("billing", …, outputs="nats://localhost:4222")`.
    """

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self._client: NatsClient | None = None
        self._connecting = asyncio.Lock()
        self._kept: dict[str, tuple[bool, float]] = {}

    async def accept(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """Publish all; whether that went well, after a few tries. A repeat publishes all again, with the same ids."""
        for pause in (*PAUSES, None):
            try:
                await self._publish(outputs)
                return True
            except InvalidParameter as error:
                _log.error("output not published", extra={"error": str(error)})
                return False
            except (NatsError, OSError, TimeoutError, JournalUnavailable) as error:
                fields = {"server": self._address.shown, "error": f"{type(error).__name__}: {error}"}
                _log.warning("NATS does not take an output", extra=fields)
            if pause is not None:
                await asyncio.sleep(pause)
        return False

    async def close(self) -> None:
        """Hang up."""
        client, self._client = self._client, None
        if client is not None:
            await client.hang_up()

    async def _publish(self, outputs: Sequence[Envelope[Any]]) -> None:
        client = await self._connected()
        jetstream = client.jetstream(timeout=self._address.timeout_seconds)
        for envelope in outputs:
            body, headers = body_of(envelope), headers_of(envelope)
            if len(body) > client.max_payload:
                raise InvalidParameter(
                    f"The output {envelope.message_id} has {len(body):,} bytes; NATS takes {client.max_payload:,}."
                )
            if await self._is_kept(jetstream, envelope.topic):
                await jetstream.publish(envelope.topic, body, headers=headers)
            else:
                await client.publish(envelope.topic, body, headers=headers)
                await client.flush(int(self._address.timeout_seconds) or 1)

    async def _is_kept(self, jetstream: Any, subject: str) -> bool:
        """Whether a stream keeps a subject. Asked anew from time to time: streams come and go."""
        known = self._kept.get(subject)
        if known is not None and monotonic() < known[1]:
            return known[0]
        try:
            is_kept = bool(await jetstream.find_stream_name_by_subject(subject))
        except NotFoundError:
            is_kept = False
        if len(self._kept) >= MOST_SUBJECTS:
            self._kept.clear()
        self._kept[subject] = (is_kept, monotonic() + KNOWN_SECONDS)
        return is_kept

    async def _connected(self) -> NatsClient:
        async with self._connecting:
            if self._client is None or self._client.is_closed:
                self._client = await connect(self._address)
        return self._client


async def connect(address: NatsAddress) -> NatsClient:
    """A connection that comes back by itself; an error if there is none at first."""
    client = NatsClient(address)
    await client.dial(_on_message, _on_change, _on_change)
    return client


async def _on_message(_: Msg) -> None:
    """Nobody answers into this inbox: JetStream makes one of its own."""


async def _on_change() -> None:
    """Calls that fail meanwhile say so."""

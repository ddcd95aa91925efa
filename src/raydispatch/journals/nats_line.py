"""The line to NATS: what is sent is answered within a limited time, or known not to be."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from nats import errors
from nats.aio.msg import Msg

from raydispatch.errors import InvalidParameter, InvalidState, JournalUnavailable
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_client import NatsClient, not_connected

IN_FLIGHT_BYTES = 16_000_000
"""Sent before an answer is awaited. Servers refuse what piles up beyond 128 MB."""
IN_FLIGHT = 100
"""Each costs the server a flush of its disk, and all of them have to be answered in time."""
MOST_SUBJECT_BYTES = 3_900
"""Servers take lines of 4,096; where to send the answer stands there, too."""

_Box = asyncio.Queue[Msg | None]

_log = logging.getLogger("raydispatch")


class Letter(NamedTuple):
    """A message on its way to the servers."""

    subject: str
    data: bytes = b""
    headers: dict[str, str] | None = None

    def size(self) -> int:
        """As servers count it."""
        lines = sum(len(f"{name}: {value}\r\n".encode()) for name, value in (self.headers or {}).items())
        return len(self.data) + (lines and lines + len("NATS/1.0\r\n\r\n"))


class Refused(Exception):
    """JetStream has answered with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error)
        self.code: int = error.get("err_code", 0)
        self.status: int = error.get("code", 0)
        self.reason: str = error.get("description", "no reason given")

    def as_unavailable(self) -> JournalUnavailable:
        """As the error of a journal, for what may be accepted later."""
        return JournalUnavailable(f"The NATS server refuses: {self.reason}.")


class NobodyListens(JournalUnavailable):
    """There is a server, but no JetStream on it, at least for now."""


class Line:
    """A connection to the servers of a journal. nats-py mends it; meanwhile calls fail, and soon."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self._client: NatsClient | None = None
        self._inbox = ""
        self._numbers = count()
        self._waiting: dict[str, _Box] = {}
        self._opening = asyncio.Lock()
        self._mended = asyncio.Event()
        self._is_closed = False

    async def ask(self, letter: Letter) -> Msg:
        """Send one, and wait for its answer."""
        return await self.ask_once([letter])

    async def ask_all(self, letters: Sequence[Letter]) -> list[Msg]:
        """Send all of them in this order, many before the first is answered; their answers, in this order.

        Raises JournalUnavailable when an answer is missing. Nobody knows then what the servers did with the letters.
        """
        answers: list[Msg] = []
        client = await self._dialled()
        self._check(client, letters)
        for together in portions(letters, IN_FLIGHT):
            async with self._in_time() as limit:
                with self._boxes(len(together)) as boxes:
                    for letter, reply in zip(together, boxes, strict=True):
                        await _send(client, letter, reply, limit)
                    answers += [self._answered(await box.get()) for box in boxes.values()]
        return answers

    async def ask_once(self, letters: Sequence[Letter]) -> Msg:
        """Send all of them in this order, for one answer to all."""
        *silent, last = letters
        client = await self._dialled()
        self._check(client, letters)
        async with self._in_time() as limit:
            for letter in silent:
                await _send(client, letter, "", limit)
            with self._boxes(1) as boxes:
                ((reply, box),) = boxes.items()
                await _send(client, last, reply, limit)
                return self._answered(await box.get())

    async def ask_for_many(self, letter: Letter) -> list[Msg]:
        """Send one, and gather its answers, up to the one that says that it was the last."""
        found: list[Msg] = []
        client = await self._dialled()
        async with self._in_time() as limit:
            with self._boxes(1) as boxes:
                ((reply, box),) = boxes.items()
                await _send(client, letter, reply, limit)
                while "Status" not in (headers := (answer := self._answered(await box.get())).headers or {}):
                    found.append(answer)
                    if "Nats-Num-Pending" not in headers:
                        break  # A server before 2.11 sends one, whatever was asked for.
        return found

    async def api(self, verb: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream; raises Refused when it answers with an error."""
        data = json.dumps(request).encode() if request else b""
        return accepted(await self.ask(Letter(f"$JS.API.{verb}", data)))

    async def close(self) -> None:
        """Hang up."""
        self._is_closed = True
        if self._client is not None:
            await self._client.hang_up()

    async def _dialled(self) -> NatsClient:
        if self._is_closed:
            raise InvalidState(f"The journal '{self._address.name}' is closed.")
        async with self._opening:
            # nats-py gives up for good when a server says that it was wronged, by too many connections perhaps.
            if self._client is None or self._client.is_closed:
                client = NatsClient(self._address)
                self._inbox = await client.dial(self._take, partial(self._on_loss, client), self._on_return)
                self._client = client
                self._mended.set()
            return self._client

    def _check(self, client: NatsClient, letters: Sequence[Letter]) -> None:
        # The server closes the connection on anything larger.
        for letter in letters:
            if len(letter.subject) > MOST_SUBJECT_BYTES:
                raise InvalidParameter(
                    f"The name of a document is too long for NATS: {letter.subject[:100]}… has {len(letter.subject):,} "
                    f"bytes, of {MOST_SUBJECT_BYTES:,} at most."
                )
            if (size := letter.size()) > client.max_payload:
                raise InvalidParameter(
                    f"A batch or document of {size:,} bytes is larger than the NATS server takes: its max_payload is "
                    f"{client.max_payload:,} (max_payload: 8MB in its configuration allows more)."
                )

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[asyncio.Timeout]:
        seconds = self._address.timeout_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                # Otherwise nats-py would keep what is published, and send it at some later time.
                await self._mended.wait()
                yield limit
        except TimeoutError:
            raise JournalUnavailable(
                f"The journal '{self._address.name}' at {self._address.shown} did not answer within {seconds:g} s."
            ) from None
        except (errors.Error, OSError) as error:
            raise not_connected(error, self._address) from None

    @contextmanager
    def _boxes(self, wanted: int) -> Iterator[dict[str, _Box]]:
        boxes: dict[str, _Box] = {f"{self._inbox}.{next(self._numbers)}": asyncio.Queue() for _ in range(wanted)}
        self._waiting |= boxes
        try:
            yield boxes
        finally:
            for reply in boxes:
                del self._waiting[reply]

    def _answered(self, message: Msg | None) -> Msg:
        if message is None:
            raise errors.ConnectionReconnectingError
        if message.headers and message.headers.get("Status") == "503":
            raise NobodyListens(
                f"JetStream does not answer at {self._address.shown}: it is choosing a new leader, has switched itself "
                "off (as when its disk is full), or is not enabled there."
            )
        return message

    async def _take(self, message: Msg) -> None:
        if (box := self._waiting.get(message.subject)) is not None:
            box.put_nowait(message)

    async def _on_loss(self, client: NatsClient) -> None:
        if client is not self._client:
            return
        self._mended.clear()
        for box in self._waiting.values():
            box.put_nowait(None)
        if not self._is_closed:
            _log.warning("journal disconnected", extra={"journal": self._address.name, "servers": self._address.shown})

    async def _on_return(self) -> None:
        self._mended.set()
        _log.warning("journal connected again", extra={"journal": self._address.name, "servers": self._address.shown})


def accepted(answer: Msg) -> dict[str, Any]:
    """What JetStream has answered; raises Refused if that is an error."""
    found: dict[str, Any] = json.loads(answer.data)
    if "error" in found:
        raise Refused(found["error"])
    return found


async def _send(client: NatsClient, letter: Letter, reply: str, limit: asyncio.Timeout) -> None:
    await client.publish(letter.subject, letter.data, reply=reply, headers=letter.headers)
    # nats-py swallows the cancellation that a timeout is, when a server takes nothing for a while.
    if limit.expired():
        raise TimeoutError


def portions(letters: Sequence[Letter], most: int) -> Iterator[list[Letter]]:
    """Letters that go together: so many at most, and not too large."""
    portion: list[Letter] = []
    size = 0
    for letter in letters:
        if portion and (size + len(letter.data) > IN_FLIGHT_BYTES or len(portion) == most):
            yield portion
            portion, size = [], 0
        portion.append(letter)
        size += len(letter.data)
    if portion:
        yield portion

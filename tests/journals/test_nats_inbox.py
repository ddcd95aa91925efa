import asyncio
from contextlib import suppress
from typing import Any

import pytest
from tests.journals.helping import NatsServer, new_name, run, until

from raydispatch import BreakerSettings, DispatchEngine, Envelope, MessageCategory, RetrySettings
from raydispatch.errors import InvalidParameter
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_inbox import NatsInbox
from raydispatch.journals.nats_outlet import connect


class Source:
    """A stream, as another system has it."""

    def __init__(self, server: NatsServer) -> None:
        self.url = server.url
        self.root = new_name()
        self.client: Any = None
        self.jetstream: Any = None

    async def __aenter__(self) -> "Source":
        self.client = await connect(NatsAddress.parse(self.url, "source"))
        self.jetstream = self.client.jetstream()
        await self.jetstream.add_stream(name=self.root, subjects=[f"{self.root}.>"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.hang_up()

    async def send(self, body: bytes, **headers: str) -> None:
        await self.jetstream.publish(f"{self.root}.order.events.v1", body, headers=headers or None)

    async def pending(self, name: str) -> int:
        info = await self.jetstream.consumer_info(self.root, name)
        return int(info.num_pending + info.num_ack_pending)


async def running(inbox: NatsInbox, is_done: Any) -> None:
    task = asyncio.get_running_loop().create_task(inbox.run())
    try:
        await until(is_done)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_messages_of_others_reach_the_dispatchers_of_their_subject(nats_server: NatsServer) -> None:
    async def story() -> None:
        engine = DispatchEngine("orders")
        seen: list[Envelope[Any]] = []

        @engine.dispatcher("billing", topics="**.events.**", category=MessageCategory.EVENT)
        async def bill(envelope: Envelope[object]) -> None:
            seen.append(envelope)

        async with engine, Source(nats_server) as source:
            await source.send(b'{"order": 7}')
            await source.send(b"\x00no json", **{"Raydispatch-Type": "Blob", "X-Tenant": "acme"})
            async with NatsInbox(source.url, f"{source.root}.>", engine.dispatch, message_type="Order") as inbox:

                async def done() -> bool:
                    return await source.pending("raydispatch") == 0

                await running(inbox, done)

        assert [one.payload for one in seen] == [{"order": 7}, b"\x00no json"]
        assert [one.message_type for one in seen] == ["Order", "Blob"]
        assert seen[1].headers["x-tenant"] == "acme"
        assert inbox.delivered == 2

    run(story())


def test_a_message_that_met_an_open_circuit_comes_again_with_the_same_id(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydispatch.journals.nats_inbox.AGAIN_SECONDS", 0.05)

    async def story() -> None:
        engine = DispatchEngine("orders")
        seen: list[Envelope[Any]] = []

        @engine.dispatcher(
            "billing",
            topics="**.events.**",
            category=MessageCategory.EVENT,
            retry=None,
            breaker=BreakerSettings(failure_threshold=1, reset_after_seconds=0.3),
        )
        async def bill(envelope: Envelope[dict[str, bool]]) -> None:
            if envelope.payload["bad"]:
                raise ConnectionError("down")
            seen.append(envelope)

        async with engine, Source(nats_server) as source:
            await source.send(b'{"bad": true}')
            async with NatsInbox(source.url, f"{source.root}.>", engine.dispatch, message_type="Order") as inbox:

                async def opened() -> bool:
                    return inbox.delivered == 1

                async def closed() -> bool:
                    return inbox.delivered == 2

                await running(inbox, opened)
                await source.send(b'{"bad": false}')
                await running(inbox, closed)

        assert len(engine.dead_letters) == 1
        assert len({one.message_id for one in seen}) == 1
        assert seen[-1].attempt > 1

    run(story())


def test_what_was_not_acknowledged_waits_for_the_next_life(nats_server: NatsServer) -> None:
    async def story() -> None:
        engine = DispatchEngine("orders")
        seen: list[int] = []

        @engine.dispatcher("billing", topics="**.events.**", category=MessageCategory.EVENT, retry=RetrySettings())
        async def bill(envelope: Envelope[dict[str, int]]) -> None:
            seen.append(envelope.payload["order"])

        async with engine, Source(nats_server) as source:
            for number in range(5):
                await source.send(b'{"order": %d}' % number)
            async with NatsInbox(source.url, f"{source.root}.>", engine.dispatch, message_type="Order"):
                pass  # It dies before it has fetched anything.
            async with NatsInbox(source.url, f"{source.root}.>", engine.dispatch, message_type="Order") as inbox:

                async def done() -> bool:
                    return await source.pending("raydispatch") == 0

                await running(inbox, done)

        assert sorted(seen) == [0, 1, 2, 3, 4]

    run(story())


def test_a_subject_that_no_stream_keeps_is_a_mistake(nats_server: NatsServer) -> None:
    async def story() -> None:
        engine = DispatchEngine("orders")
        engine.freeze()

        with pytest.raises(InvalidParameter, match="keeps the subject"):
            async with NatsInbox(nats_server.url, f"{new_name()}.>", engine.dispatch):
                pass

    run(story())

from typing import Any

from tests.journals.helping import NatsServer, new_name, run, until

from raydispatch import DispatchEngine, DispatchStatus, Envelope, MessageCategory
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_outlet import NatsOutlet, connect, open_outlet


def address(server: NatsServer) -> NatsAddress:
    return NatsAddress.parse(server.url, "test")


async def stream_of(server: NatsServer, subject: str) -> Any:
    client = await connect(address(server))
    jetstream = client.jetstream()
    await jetstream.add_stream(name=new_name(), subjects=[subject])
    return client, jetstream


def test_outputs_of_a_handler_arrive_on_the_subject_of_their_topic(nats_server: NatsServer) -> None:
    async def story() -> None:
        subject = f"{new_name()}.invoice.events.v1"
        client, jetstream = await stream_of(nats_server, subject)
        engine = DispatchEngine("orders")

        @engine.dispatcher(
            "billing", topics="*.order.events.*", category=MessageCategory.EVENT, outputs=nats_server.url
        )
        async def bill(envelope: Envelope[dict[str, int]]) -> Envelope[dict[str, int]]:
            return envelope.follow_up({"invoice": envelope.payload["order"]}, subject, "Invoice")

        async with engine:
            sent = Envelope({"order": 7}, "OrderPlaced", key="customer-1")
            result = await engine.dispatch("dev.order.events.v1", sent)

        got = await (await jetstream.subscribe(subject)).next_msg(5)
        assert result.status is DispatchStatus.SUCCESS
        assert got.data == b'{"invoice":7}'
        assert got.headers["Raydispatch-Type"] == "Invoice"
        assert got.headers["Raydispatch-Key"] == "customer-1"
        assert got.headers["Raydispatch-Correlation-Id"] == str(sent.correlation_id)
        await client.hang_up()

    run(story())


def test_a_repeat_of_an_output_is_stored_once(nats_server: NatsServer) -> None:
    async def story() -> None:
        subject = f"{new_name()}.events"
        client, jetstream = await stream_of(nats_server, subject)
        outlet = open_outlet(nats_server.url, "test")
        output = Envelope({"order": 7}, "Order", subject)

        assert await outlet.accept([output])
        assert await outlet.accept([output])

        stream = await jetstream.find_stream_name_by_subject(subject)
        assert (await jetstream.stream_info(stream)).state.messages == 1
        await outlet.close()
        await client.hang_up()

    run(story())


def test_a_subject_that_no_stream_keeps_is_published_as_well(nats_server: NatsServer) -> None:
    async def story() -> None:
        subject = f"{new_name()}.events"
        client = await connect(address(nats_server))
        listening = await client.subscribe(subject)
        await client.flush()
        outlet = NatsOutlet(address(nats_server))

        assert await outlet.accept([Envelope("plain text", "Order", subject)])

        assert (await listening.next_msg(5)).data == b"plain text"
        await outlet.close()
        await client.hang_up()

    run(story())


def test_a_server_that_is_away_makes_publish_failed_and_the_retry_does_not_run_the_handler(
    own_server: NatsServer, monkeypatch: Any
) -> None:
    monkeypatch.setattr("raydispatch.journals.nats_outlet.PAUSES", ())

    async def story() -> None:
        ran = 0
        engine = DispatchEngine("orders")

        @engine.dispatcher(
            "billing",
            topics="*.order.events.*",
            category=MessageCategory.EVENT,
            outputs=own_server.url,
        )
        async def bill(envelope: Envelope[object]) -> str:
            nonlocal ran
            ran += 1
            return "dev.invoice.events.v1"

        own_server.kill()
        async with engine:
            message = Envelope({"order": 7}, "OrderPlaced")
            failed = await engine.dispatch("dev.order.events.v1", message)
            own_server.start()

            async def again() -> bool:
                return (await engine.dispatch("dev.order.events.v1", message)).status is DispatchStatus.SUCCESS

            await until(again)

        assert failed.status is DispatchStatus.PUBLISH_FAILED
        assert ran == 1

    run(story())


def test_what_cannot_be_written_as_json_is_not_published(nats_server: NatsServer) -> None:
    async def story() -> None:
        outlet = NatsOutlet(address(nats_server))

        assert not await outlet.accept([Envelope(object(), "Order", "some.events")])

        await outlet.close()

    run(story())

"""Commands have one dispatcher and a reply; events are published and go to everyone who cares."""

import asyncio

from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply

engine = DispatchEngine("shop")
stock = {"tea": 2}


@engine.dispatcher("stock", topics="shop.stock.commands.take", category=MessageCategory.COMMAND)
async def take(envelope: Envelope[str]) -> list[Reply | Envelope[dict[str, object]]]:
    item = envelope.payload
    stock[item] -= 1
    taken = {"item": item, "left": stock[item]}
    return [Reply(stock[item]), envelope.follow_up(taken, topic="shop.stock.events.taken", message_type="Taken")]


@engine.dispatcher("buyer", topics="shop.stock.events.taken", category=MessageCategory.EVENT)
async def reorder(envelope: Envelope[dict[str, object]]) -> str | None:
    return "shop.stock.events.reordered" if envelope.payload["left"] == 0 else None


async def main() -> None:
    async with engine, engine.subscribe("shop.**") as news:
        for _ in range(2):
            result = await engine.execute("shop.stock.commands.take", Envelope("tea", message_type="Take"))
            print("took tea:", result.status, "- left:", result.reply and result.reply.payload)

        receipt = await engine.publish("shop.door.events.opened", Envelope({}, message_type="DoorOpened"))
        print("door opened:", receipt.status, "to", receipt.subscribers, "subscriber")

        async with engine.session("inventory") as session:

            @session.dispatcher("dry-run", topics="shop.stock.commands.take", category=MessageCategory.COMMAND)
            async def pretend(envelope: Envelope[object]) -> Reply:
                return Reply("nothing taken, this is a dry run")

            result = await session.execute("shop.stock.commands.take", Envelope("tea", message_type="Take"))
            print("in a session:", result.reply and result.reply.payload)

        await engine.drain()
        news.unsubscribe()
        async for envelope in news:
            print("news:", envelope.topic, envelope.payload)


if __name__ == "__main__":
    asyncio.run(main())

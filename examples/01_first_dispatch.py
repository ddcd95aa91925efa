"""Route messages to handlers in one process: no Ray, no Spark, no set-up."""

import asyncio

from pydantic import BaseModel

from raydispatch import DispatchEngine, Envelope, MessageCategory


class OrderPlaced(BaseModel):
    order_id: int
    total: float


engine = DispatchEngine("orders")


@engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, message_types={"OrderPlaced"})
async def bill(envelope: Envelope[OrderPlaced]) -> str:
    print(f"billing: order {envelope.payload.order_id}, {envelope.payload.total:.2f} EUR")
    return "dev.invoice.events.v1"


@engine.dispatcher("audit", topics="**.events.**", category=MessageCategory.EVENT)
async def audit(envelope: Envelope[object]) -> None:
    print(f"audit:   {envelope.message_type} on {envelope.topic}")


async def main() -> None:
    async with engine:
        placed = await engine.dispatch("dev.order.events.v1", Envelope(OrderPlaced(order_id=7, total=99.5)))
        print(placed.status, [outcome.dispatcher_id for outcome in placed.outcomes], list(placed.outputs))
        await engine.drain()  # until what billing sent on has arrived, too

        wrong = Envelope({"order_id": "seven"}, message_type="OrderPlaced")
        broken = await engine.dispatch("dev.order.events.v1", wrong)
        print(broken.status, "-", broken.error_message)

        lost = await engine.dispatch("dev.order.commands.v1", Envelope({"order_id": 7}, message_type="ShipOrder"))
        print(lost.status, "-", lost.error_message)


if __name__ == "__main__":
    asyncio.run(main())

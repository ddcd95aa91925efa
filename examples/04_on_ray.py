"""The engine of the first example, on Ray: every dispatcher is a set of actors, and the words stay the same."""

from collections import Counter

from pydantic import BaseModel

from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply
from raydispatch.actors import DispatchSystem


class OrderPlaced(BaseModel):
    order_id: int
    total: float


engine = DispatchEngine("orders")


@engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, replicas=2)
async def bill(envelope: Envelope[OrderPlaced]) -> None:
    if envelope.payload.total < 0:
        raise ValueError("a negative total")


@engine.dispatcher("audit", topics="**.events.**", category=MessageCategory.EVENT)
def audit(envelope: Envelope[object]) -> None:
    """A sync handler runs in a thread of its actor."""


@engine.dispatcher("price", topics="shop.price.commands.ask", category=MessageCategory.COMMAND)
class Prices:
    """Built once, inside its actor: the place for models and connections."""

    def start(self) -> None:
        self.prices = {"tea": 4.5}

    async def handle(self, envelope: Envelope[str]) -> Reply:
        return Reply(self.prices[envelope.payload])


def main() -> None:
    with DispatchSystem.start(engine, routers=2) as system:
        result = system.dispatch("dev.order.events.v1", Envelope(OrderPlaced(order_id=7, total=99.5)))
        print("one:", result.status, [outcome.dispatcher_id for outcome in result.outcomes])

        reply = system.request("shop.price.commands.ask", Envelope("tea"), timeout=30)
        print("tea costs", reply.payload)

        orders = (
            ("dev.order.events.v1", Envelope({"order_id": i, "total": i}, message_type="OrderPlaced"))
            for i in range(20_000)
        )
        print("many:", dict(Counter(str(result.status) for result in system.dispatch_many(orders))))

        status = system.status()
        for name, dispatcher in sorted(status.dispatchers.items()):
            print(f"{name}: {len(dispatcher.replicas)} replicas, circuit {dispatcher.circuit}")


if __name__ == "__main__":
    main()

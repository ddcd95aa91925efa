"""Durable messages outlive every process: publish, get killed, start again. Then a message for later, and readers."""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory

from raydispatch import DispatchEngine, Envelope, MessageCategory

TOPIC = "dev.order.events.v1"
billed: asyncio.Queue[Envelope[int]] = asyncio.Queue()


def order(number: int) -> Envelope[int]:
    return Envelope(number, message_type="Order")


def engine_in(folder: str, *, bank_answers: bool) -> DispatchEngine:
    engine = DispatchEngine("orders", journal=f"sqlite:///{folder}/orders.db")

    @engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT)
    async def bill(envelope: Envelope[int]) -> None:
        if not bank_answers:
            print("begun", flush=True)
            await asyncio.Event().wait()
        billed.put_nowait(envelope)

    return engine


async def publish_and_hang(folder: str) -> None:
    async with engine_in(folder, bank_answers=False) as engine:
        await engine.publish_many([(TOPIC, order(number)) for number in (1, 2, 3)], durable=True)
        await asyncio.Event().wait()


async def go_on(folder: str) -> None:
    async with engine_in(folder, bank_answers=True) as engine:
        orders = [await billed.get() for _ in range(3)]
        print("billed now:", {f"order {one.payload}": f"attempt {one.attempt}" for one in orders})

        due = datetime.now(UTC) + timedelta(seconds=0.5)
        receipt = await engine.publish(TOPIC, order(4), durable=True, deliver_at=due)
        print("order 4, due in half a second:", receipt.status)
        print(f"billed when it was due: order {(await billed.get()).payload},", datetime.now(UTC) >= due)

        for who in ("a reader", "the next one"):
            numbers = []
            async with await engine.consume("report", "*.order.events.*", start="first") as reader:
                for _ in range(2):
                    message = await anext(reader)
                    numbers.append(message.envelope.payload)
                    message.ack()
            print(f"{who}: orders {numbers}")

        await engine.journal.replay("billing", start=2)
        print("billing once more, from the third on: orders", [(await billed.get()).payload for _ in range(2)])


def main() -> None:
    with TemporaryDirectory() as folder:
        with subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(3):
                child.stdout.readline()
            child.kill()
        print("killed while it billed three orders: signal", -child.returncode)
        asyncio.run(go_on(folder))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(publish_and_hang(sys.argv[1]))
    else:
        main()

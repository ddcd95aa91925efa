import asyncio
from typing import Any

from raydispatch.bus.intake import Message
from raydispatch.delivery.backpressure import BoundedQueue
from raydispatch.delivery.outbox import RETRY_SECONDS, Outbox
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import BackpressureSettings

OUTPUTS = [Envelope(number, topic=f"dev.part-{number}.events") for number in range(3)]


class Clock:
    """Sleeps at once; and while somebody sleeps, somebody else may make room."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []
        self.meanwhile: dict[int, Any] = {}

    def now(self) -> float:
        return sum(self.sleeps)

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.meanwhile.get(len(self.sleeps), lambda: None)()
        await asyncio.sleep(0)


def make_outbox(capacity: int = 3, filled: int = 0) -> tuple[Outbox, BoundedQueue[Message], Clock]:
    queue: BoundedQueue[Message] = BoundedQueue(BackpressureSettings(capacity=capacity))
    assert queue.offer_all([("dev.other.events", Envelope(None))] * filled)
    clock = Clock()
    return Outbox(queue, clock), queue, clock


def test_outputs_are_taken_at_once_with_the_topics_they_go_to() -> None:
    outbox, queue, clock = make_outbox()

    accepted = asyncio.run(outbox.accept(OUTPUTS))

    assert accepted
    assert queue.take(10) == [(envelope.topic, envelope) for envelope in OUTPUTS]
    assert clock.sleeps == []


def test_without_room_for_all_none_is_taken() -> None:
    outbox, queue, clock = make_outbox(filled=1)

    accepted = asyncio.run(outbox.accept(OUTPUTS))

    assert not accepted
    assert len(queue) == 1
    assert tuple(clock.sleeps) == RETRY_SECONDS


def test_room_is_asked_for_a_few_times() -> None:
    outbox, queue, clock = make_outbox(filled=1)
    clock.meanwhile[len(RETRY_SECONDS)] = lambda: queue.take(1)

    accepted = asyncio.run(outbox.accept(OUTPUTS))

    assert accepted
    assert len(queue) == 3


def test_more_outputs_than_the_outbox_can_ever_hold_are_refused() -> None:
    outbox, queue, _ = make_outbox(capacity=2)

    assert not asyncio.run(outbox.accept(OUTPUTS))
    assert len(queue) == 0


def test_no_outputs_always_fit() -> None:
    outbox, _, clock = make_outbox(capacity=1, filled=1)

    assert asyncio.run(outbox.accept([]))
    assert clock.sleeps == []


def test_an_offer_does_not_wait() -> None:
    outbox, queue, clock = make_outbox(filled=2)

    assert not outbox.offer(OUTPUTS)
    assert outbox.offer(OUTPUTS[:1])
    assert (len(queue), clock.sleeps) == (3, [])


def test_one_who_is_cancelled_while_waiting_for_room_leaves_nothing_behind() -> None:
    async def story() -> int:
        outbox, queue, clock = make_outbox(filled=1)
        waiting = asyncio.create_task(outbox.accept(OUTPUTS))
        clock.meanwhile[1] = waiting.cancel
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        return len(queue)

    assert asyncio.run(story()) == 1

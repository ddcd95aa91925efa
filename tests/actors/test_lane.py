import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from tests.actors.fakes import SETTINGS, TOPIC, run, turns

from raydispatch import Envelope
from raydispatch.actors import lane as module
from raydispatch.actors.lane import FEW_CALLS, Lane, Pending
from raydispatch.actors.wire import Message
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.messages.ids import new_id


class Street:
    """A lane, and what goes through it: calls are answered when the test says so."""

    def __init__(self, **settings: int) -> None:
        self.batches: list[list[Any]] = []
        self.answers: list[asyncio.Future[list[DispatchResult]]] = []
        self.lane = Lane(SETTINGS.model_copy(update=settings), self._send_batch)

    def send(self, *payloads: int, size: int = 1) -> list[Pending]:
        futures = [self.lane.send(Message((TOPIC, "Order"), Envelope(one), b"x" * size)) for one in payloads]
        for future in futures:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # Nobody need ask for it.
        return futures

    async def send_in_turns(self, *payloads: int) -> None:
        for payload in payloads:
            self.send(payload)
            await turns(3)

    async def answer(self, call: int) -> None:
        results = [DispatchResult(new_id(), DispatchStatus.SUCCESS, TOPIC, route_id=str(n)) for n in self.batches[call]]
        self.answers[call].set_result(results)
        await turns()

    def _send_batch(self, messages: Sequence[Message]) -> Awaitable[list[DispatchResult]]:
        self.batches.append([message.envelope.payload for message in messages])
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


def test_messages_of_one_turn_go_in_one_call_and_each_gets_its_own_result() -> None:
    async def story() -> None:
        street = Street()

        futures = street.send(1, 2, 3)
        await turns()
        await street.answer(0)

        assert street.batches == [[1, 2, 3]]
        assert [future.result().route_id for future in futures] == ["1", "2", "3"]

    run(story())


def test_a_message_can_be_made_a_task_like_a_coroutine() -> None:
    async def story() -> None:
        street = Street()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sent) for sent in street.send(1, 2)]
            await turns()
            await street.answer(0)

        assert [task.result().route_id for task in tasks] == ["1", "2"]

    run(story())


def test_a_message_whose_task_is_cancelled_before_it_goes_is_not_sent() -> None:
    async def story() -> None:
        street = Street(window_calls=1)
        await street.send_in_turns(1)
        (waiting,) = street.send(2)
        task = asyncio.create_task(waiting)
        await turns()

        task.cancel()
        await asyncio.wait([task])
        await street.answer(0)

        assert task.cancelled()
        assert street.batches == [[1]]

    run(story())


def test_a_lone_message_goes_in_the_next_turn_though_another_call_is_under_way() -> None:
    async def story() -> None:
        street = Street()

        await street.send_in_turns(1, 2)

        assert street.batches == [[1], [2]]

    run(story())


def test_a_full_batch_does_not_wait_for_the_next_turn() -> None:
    async def story() -> None:
        street = Street(batch_messages=2)

        street.send(1, 2, 3)

        assert street.batches == [[1, 2]]

    run(story())


def test_with_a_few_calls_under_way_messages_gather_until_a_call_is_full() -> None:
    async def story() -> None:
        street = Street(batch_messages=3)
        await street.send_in_turns(*range(FEW_CALLS))

        await street.send_in_turns(10, 11)
        gathered = len(street.batches)
        street.send(12)

        assert gathered == FEW_CALLS
        assert street.batches[FEW_CALLS:] == [[10, 11, 12]]

    run(story())


def test_what_has_gathered_goes_when_a_call_comes_back() -> None:
    async def story() -> None:
        street = Street(batch_messages=3)
        await street.send_in_turns(*range(FEW_CALLS), 10, 11)

        await street.answer(2)

        assert street.batches[FEW_CALLS:] == [[10, 11]]

    run(story())


def test_even_full_batches_wait_while_the_window_is_full() -> None:
    async def story() -> None:
        street = Street(batch_messages=1, window_calls=2)
        await street.send_in_turns(1, 2, 3)
        before = list(street.batches)

        await street.answer(0)

        assert (before, street.batches) == ([[1], [2]], [[1], [2], [3]])

    run(story())


@pytest.mark.parametrize(("size", "batches"), [(30, [[1, 2, 3], [4]]), (60, [[1], [2], [3]]), (500, [[1], [2]])])
def test_a_call_has_so_many_bytes_and_no_more_unless_it_is_one_message(
    size: int, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(module, "MAX_PARCEL_BYTES", 100)
        street = Street()

        street.send(*(one for batch in batches for one in batch), size=size)
        await turns()

        assert street.batches == batches

    run(story())


def test_cancelled_messages_are_not_sent() -> None:
    async def story() -> None:
        street = Street()

        futures = street.send(1, 2, 3)
        futures[1].cancel()
        await turns()

        assert street.batches == [[1, 3]]

    run(story())


def test_a_message_cancelled_under_way_costs_the_others_nothing() -> None:
    async def story() -> None:
        street = Street()
        given_up, other = street.send(1, 2)
        await turns()

        given_up.cancel()
        await street.answer(0)

        assert other.result().route_id == "2"

    run(story())


def test_an_exception_of_the_call_reaches_every_waiter_and_the_lane_goes_on() -> None:
    async def story() -> None:
        street = Street()
        futures = street.send(1, 2)
        await turns()

        street.answers[0].set_exception(OSError("down"))
        await turns()
        await street.send_in_turns(3)

        assert [type(future.exception()) for future in futures] == [OSError, OSError]
        assert street.batches == [[1, 2], [3]]

    run(story())


def test_a_call_that_cannot_even_begin_fails_for_every_waiter() -> None:
    def refuse(messages: Sequence[Message]) -> Awaitable[list[DispatchResult]]:
        raise OSError("no connection")

    async def story() -> None:
        lane = Lane(SETTINGS, refuse)
        futures = [lane.send(Message((TOPIC, "Order"), Envelope(one), b"x")) for one in (1, 2)]

        await turns()

        assert [type(future.exception()) for future in futures if future.done()] == [OSError, OSError]

    run(story())

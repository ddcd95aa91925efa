"""Requests and replies: each reply reaches its asker, and every other one is told apart."""

import asyncio
import gc
import threading
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.bus.correlation import Correlations
from raydispatch.dispatch.outcome import Reply
from raydispatch.errors import (
    ChannelClosed,
    CorrelationError,
    DuplicateReply,
    InvalidParameter,
    LateReply,
    RequestTimeout,
    UnknownReply,
)

T = TypeVar("T")

YES = Reply("yes")


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run a test for ten seconds at most; a thread counts them, since the time of the loop may be a fake."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(test)
        limit = threading.Timer(10, loop.call_soon_threadsafe, [task.cancel])
        limit.start()
        try:
            return loop.run_until_complete(task)
        finally:
            limit.cancel()
            limit.join()


class FakeTime:
    """The running loop's own clock, in our hands: its timers run when we say so."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        self._loop.time = lambda: self._now  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        self._now += seconds
        await turn()


async def turn() -> None:
    """Let everything run that is due, and what it causes."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_thousand_requests_at_once_each_get_their_own_reply() -> None:
    random = Random(1)

    async def ask(correlations: Correlations, number: int, asked: asyncio.Queue[tuple[int, UUID]]) -> object:
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 5)
        asked.put_nowait((number, correlation_id))
        return (await reply).payload

    async def test() -> None:
        loop = asyncio.get_running_loop()
        correlations = Correlations()
        asked: asyncio.Queue[tuple[int, UUID]] = asyncio.Queue()
        askers = [loop.create_task(ask(correlations, number, asked)) for number in range(1_000)]
        open_requests = [await asked.get() for _ in askers]
        assert len(correlations) == 1_000

        random.shuffle(open_requests)
        for number, correlation_id in open_requests:
            loop.call_later(random.random() / 100, correlations.resolve, correlation_id, Reply(number))

        assert await asyncio.gather(*askers) == list(range(1_000))
        assert len(correlations) == 0

    run(test())


def test_a_reply_completes_its_request_and_no_other() -> None:
    async def test() -> None:
        correlations = Correlations()
        one, other = uuid4(), uuid4()
        first, second = correlations.open(one, 5), correlations.open(other, 5)

        correlations.resolve(one, YES)

        assert await first == YES
        assert not second.done()
        assert not correlations.is_open(one)
        assert correlations.is_open(other)
        assert len(correlations) == 1

    run(test())


def test_a_reply_that_nobody_asked_for_is_unknown() -> None:
    correlation_id = uuid4()

    with pytest.raises(UnknownReply, match=str(correlation_id)):
        Correlations().resolve(correlation_id, YES)


def test_a_second_reply_is_a_duplicate() -> None:
    async def test() -> None:
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 5)
        correlations.resolve(correlation_id, YES)

        with pytest.raises(DuplicateReply, match=str(correlation_id)):
            correlations.resolve(correlation_id, Reply("no"))

        assert await reply == YES
        with pytest.raises(DuplicateReply):
            correlations.resolve(correlation_id, Reply("no"))

    run(test())


def test_a_request_times_out_and_its_reply_is_late() -> None:
    async def test() -> None:
        time = FakeTime()
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 30)

        await time.advance(29)
        assert correlations.is_open(correlation_id)
        await time.advance(2)

        assert len(correlations) == 0
        with pytest.raises(RequestTimeout, match=str(correlation_id)):
            await reply
        with pytest.raises(LateReply, match=str(correlation_id)):
            correlations.resolve(correlation_id, YES)

    run(test())


def test_an_answered_request_never_times_out() -> None:
    async def test() -> None:
        time = FakeTime()
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 30)
        correlations.resolve(correlation_id, YES)

        await time.advance(31)

        assert await reply == YES
        assert not timers()

    run(test())


def test_cancelling_the_future_removes_the_request_and_its_timer() -> None:
    async def test() -> None:
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 5)

        reply.cancel()
        assert not correlations.is_open(correlation_id)
        await turn()

        assert len(correlations) == 0
        assert not timers()
        with pytest.raises(LateReply):
            correlations.resolve(correlation_id, YES)

    run(test())


def test_a_reply_in_the_very_moment_of_cancelling_is_late() -> None:
    async def test() -> None:
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 5)

        reply.cancel()
        for _ in range(2):
            with pytest.raises(LateReply):
                correlations.resolve(correlation_id, YES)

        assert len(correlations) == 0

    run(test())


def test_cancelling_the_asking_task_removes_the_request() -> None:
    async def test() -> None:
        correlations = Correlations()

        async def ask() -> Reply:
            return await correlations.open(uuid4(), 5)

        asker = asyncio.get_running_loop().create_task(ask())
        await turn()
        assert len(correlations) == 1

        asker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asker
        await turn()

        assert len(correlations) == 0
        assert not timers()

    run(test())


def test_a_request_that_its_asker_ends_in_another_way_is_given_up() -> None:
    async def test() -> None:
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 5)

        reply.set_exception(ValueError("hopeless"))

        with pytest.raises(ValueError, match="hopeless"):
            await reply
        await turn()
        assert len(correlations) == 0
        with pytest.raises(LateReply):
            correlations.resolve(correlation_id, YES)

    run(test())


def test_an_id_is_open_once_at_a_time() -> None:
    async def test() -> None:
        correlations = Correlations()
        correlation_id = uuid4()
        first = correlations.open(correlation_id, 5)

        with pytest.raises(InvalidParameter, match="still open"):
            correlations.open(correlation_id, 5)

        correlations.resolve(correlation_id, YES)
        assert await first == YES

    run(test())


@pytest.mark.parametrize("ending", ["answered", "cancelled", "timed out"])
def test_an_id_may_be_used_again_and_its_past_does_it_no_harm(ending: str) -> None:
    async def test() -> None:
        time = FakeTime()
        correlations = Correlations()
        correlation_id = uuid4()
        first = correlations.open(correlation_id, 10)
        if ending == "answered":
            correlations.resolve(correlation_id, YES)
        elif ending == "cancelled":
            first.cancel()
        else:
            await time.advance(11)

        # At once: what the end of the first one causes in the loop comes after this.
        second = correlations.open(correlation_id, 100)
        await time.advance(20)

        assert correlations.is_open(correlation_id)
        assert len(correlations) == 1
        correlations.resolve(correlation_id, Reply("second"))
        assert await second == Reply("second")

    run(test())


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_timeout_must_be_positive_and_finite(seconds: float) -> None:
    async def test() -> None:
        correlations = Correlations()

        with pytest.raises(InvalidParameter, match="timeout_seconds"):
            correlations.open(uuid4(), seconds)

        assert len(correlations) == 0

    run(test())


def test_closing_tells_all_who_wait() -> None:
    async def test() -> None:
        correlations = Correlations()
        ids = [uuid4() for _ in range(10)]
        replies = [correlations.open(correlation_id, 5) for correlation_id in ids]

        correlations.close()
        correlations.close()

        answers = await asyncio.gather(*replies, return_exceptions=True)
        assert [type(answer) for answer in answers] == [ChannelClosed] * 10
        assert [answer.correlation_id for answer in answers if isinstance(answer, ChannelClosed)] == ids
        assert len(correlations) == 0
        assert not timers()

    run(test())


def test_a_closed_channel_takes_neither_requests_nor_replies_until_reopened() -> None:
    async def test() -> None:
        correlations = Correlations()
        before, after = uuid4(), uuid4()
        correlations.open(before, 5)
        correlations.close()

        for correlation_id in (before, after):
            with pytest.raises(ChannelClosed, match=str(correlation_id)):
                correlations.resolve(correlation_id, YES)
        with pytest.raises(ChannelClosed, match=str(after)):
            correlations.open(after, 5)

        correlations.reopen()
        reply = correlations.open(after, 5)
        correlations.resolve(after, YES)
        assert await reply == YES
        with pytest.raises(LateReply):
            correlations.resolve(before, YES)

    run(test())


def test_replies_may_come_from_other_threads() -> None:
    async def test() -> None:
        correlations = Correlations()
        ids = [uuid4() for _ in range(200)]
        replies = [correlations.open(correlation_id, 5) for correlation_id in ids]

        def answer(part: int) -> None:
            for number in range(part, len(ids), 4):
                correlations.resolve(ids[number], Reply(number))

        answering = [asyncio.to_thread(answer, part) for part in range(4)]
        *answers, _, _, _, _ = await asyncio.gather(*replies, *answering)

        assert answers == [Reply(number) for number in range(200)]
        assert len(correlations) == 0
        assert not timers()

    run(test())


def test_a_request_of_another_loop_is_answered_there() -> None:
    correlations = Correlations()
    correlation_id = uuid4()
    asked = threading.Event()
    answers: list[Reply] = []

    async def ask() -> None:
        reply = correlations.open(correlation_id, 5)
        asked.set()
        answers.append(await reply)

    async def answer() -> None:
        correlations.resolve(correlation_id, YES)

    asker = threading.Thread(target=run, args=(ask(),))
    asker.start()
    assert asked.wait(5)
    run(answer())
    asker.join(5)

    assert answers == [YES]


def test_of_racing_repliers_exactly_one_wins() -> None:
    repliers = 4

    async def race(correlations: Correlations) -> None:
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 5)
        ready = threading.Barrier(repliers)

        def answer(number: int) -> int | None:
            ready.wait(5)
            try:
                correlations.resolve(correlation_id, Reply(number))
            except DuplicateReply:
                return None
            return number

        outcomes = await asyncio.gather(*(asyncio.to_thread(answer, number) for number in range(repliers)))

        winners = [number for number in outcomes if number is not None]
        assert winners == [(await reply).payload]

    async def test() -> None:
        correlations = Correlations()
        for _ in range(50):
            await race(correlations)
        assert len(correlations) == 0

    run(test())


def test_a_reply_on_its_way_from_another_thread_is_not_overtaken_by_the_timer() -> None:
    async def test() -> None:
        time = FakeTime()
        correlations = Correlations()
        correlation_id = uuid4()
        reply = correlations.open(correlation_id, 10)

        replier = threading.Thread(target=correlations.resolve, args=(correlation_id, YES))
        replier.start()
        replier.join(5)
        await time.advance(11)

        assert await reply == YES

    run(test())


def test_closing_from_another_thread_wakes_all() -> None:
    async def test() -> None:
        correlations = Correlations()
        replies = [correlations.open(uuid4(), 5) for _ in range(10)]

        await asyncio.to_thread(correlations.close)

        answers = await asyncio.gather(*replies, return_exceptions=True)
        assert [type(answer) for answer in answers] == [ChannelClosed] * 10

    run(test())


def test_replies_to_a_loop_that_is_closed_are_late() -> None:
    correlations = Correlations()
    ids = [uuid4() for _ in range(3)]

    async def ask_and_leave() -> None:
        for correlation_id in ids:
            correlations.open(correlation_id, 5)

    run(ask_and_leave())

    assert len(correlations) == 3
    assert not correlations.is_open(ids[0])
    for _ in range(2):
        with pytest.raises(LateReply):
            correlations.resolve(ids[0], YES)
    assert len(correlations) == 2
    correlations.close()
    assert len(correlations) == 0


def test_the_next_loop_forgets_what_a_closed_one_left_open() -> None:
    correlations = Correlations()
    ids = [uuid4() for _ in range(3)]

    async def ask(correlation_id: UUID) -> None:
        correlations.open(correlation_id, 5)

    for correlation_id in [*ids, ids[0]]:
        run(ask(correlation_id))
        assert len(correlations) == 1
    with pytest.raises(LateReply):
        correlations.resolve(ids[1], YES)


def test_a_failure_that_nobody_awaits_makes_no_noise() -> None:
    noise: list[dict[str, Any]] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        time = FakeTime()
        correlations = Correlations()
        correlations.open(uuid4(), 1)
        await time.advance(2)
        correlations.open(uuid4(), 1)
        correlations.close()
        await turn()
        gc.collect()

    run(test())

    assert noise == []


def test_known_are_the_open_and_the_lately_ended() -> None:
    async def test() -> None:
        correlations = Correlations()
        waiting, answered, given_up = (uuid4() for _ in range(3))
        correlations.open(waiting, 5)
        correlations.open(answered, 5)
        correlations.open(given_up, 5).cancel()
        correlations.resolve(answered, YES)
        await turn()

        assert [correlations.knows(one) for one in (waiting, answered, given_up)] == [True, True, True]
        assert not correlations.knows(uuid4())

    run(test())


def test_the_ended_that_are_remembered_are_bounded() -> None:
    async def test() -> None:
        correlations = Correlations(remembered=100)
        ids = [uuid4() for _ in range(1_000)]
        for correlation_id in ids:
            correlations.open(correlation_id, 5)
            correlations.resolve(correlation_id, YES)
            assert len(correlations._ended) <= 100

        assert all(refusal(correlations, correlation_id) is DuplicateReply for correlation_id in ids[-50:])
        assert all(refusal(correlations, correlation_id) is UnknownReply for correlation_id in ids[:-100])

    run(test())


steps = st.tuples(st.sampled_from(["open", "resolve", "resolve", "cancel", "wait"]), st.integers(0, 7))


@given(st.lists(steps, max_size=60), st.integers(2, 6))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_each_reply_gets_the_answer_due(happenings: list[tuple[str, int]], remembered: int) -> None:
    async def test() -> None:
        time = FakeTime()
        correlations = Correlations(remembered)
        waiting: dict[int, asyncio.Future[Reply]] = {}
        ended: list[tuple[int, type[CorrelationError]]] = []

        for verb, number in happenings:
            # No two deadlines are the same, so that it is known which comes first.
            await time.advance(0.001)
            correlation_id = UUID(int=number)
            if verb == "open" and number not in waiting:
                waiting[number] = correlations.open(correlation_id, 10)
            elif verb == "resolve" and number in waiting:
                correlations.resolve(correlation_id, Reply(number))
                assert await waiting.pop(number) == Reply(number)
                ended.append((number, DuplicateReply))
            elif verb == "resolve":
                assert refusal(correlations, correlation_id) in due(ended, number, remembered)
            elif verb == "cancel" and number in waiting:
                waiting.pop(number).cancel()
                await turn()
                ended.append((number, LateReply))
            elif verb == "wait":
                await time.advance(11)
                ended += [(late, LateReply) for late in waiting]
                assert all(isinstance(reply.exception(), RequestTimeout) for reply in waiting.values())
                waiting.clear()
            assert len(correlations) == len(waiting)
            assert len(correlations._ended) <= remembered

    run(test())


def due(ended: list[tuple[int, type[CorrelationError]]], number: int, remembered: int) -> set[type[CorrelationError]]:
    """What a reply may be refused with: half of the memory is certain, the other half may be forgotten."""
    places = [place for place, (other, _) in enumerate(ended) if other == number]
    since = [other for other, _ in ended[places[-1] + 1 :]] if places else []
    if not places or len(set(since)) >= remembered:
        return {UnknownReply}
    last = ended[places[-1]][1]
    return {last} if len(since) < remembered // 2 else {last, UnknownReply}


def refusal(correlations: Correlations, correlation_id: UUID) -> type[CorrelationError]:
    with pytest.raises(CorrelationError) as caught:
        correlations.resolve(correlation_id, YES)
    return caught.type


def timers() -> list[asyncio.TimerHandle]:
    """The timers of the running loop that will still run."""
    scheduled: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return [timer for timer in scheduled if not timer.cancelled()]

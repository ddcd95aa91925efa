import asyncio
from uuid import UUID

from tests.actors.fakes import run, turns

from raydispatch.actors.replies import Mailbox
from raydispatch.dispatch.outcome import Reply

LONG = 5.0


def letter(number: int) -> tuple[UUID, Reply]:
    return UUID(int=number), Reply(number)


def test_letters_are_taken_in_the_order_of_their_arrival() -> None:
    async def story() -> None:
        mailbox = Mailbox()
        for number in (3, 1, 2):
            mailbox.put(letter(number))

        assert await mailbox.take(LONG) == [letter(3), letter(1), letter(2)]

    run(story())


def test_taking_waits_for_the_first_letter() -> None:
    async def story() -> None:
        mailbox = Mailbox()

        taking = asyncio.create_task(mailbox.take(LONG))
        await turns()
        waits = not taking.done()
        mailbox.put(letter(1))

        assert (waits, await taking) == (True, [letter(1)])

    run(story())


def test_a_letter_is_taken_once() -> None:
    async def story() -> None:
        mailbox = Mailbox()
        mailbox.put(letter(1))

        first = await mailbox.take(LONG)
        mailbox.put(letter(2))

        assert (first, await mailbox.take(LONG)) == ([letter(1)], [letter(2)])

    run(story())


def test_there_is_nothing_to_take_when_the_time_is_over() -> None:
    async def story() -> None:
        mailbox = Mailbox()
        mailbox.put(letter(1))
        await mailbox.take(LONG)

        assert await mailbox.take(0.01) == []

    run(story())


def test_a_letter_that_comes_after_the_time_is_there_for_the_next() -> None:
    async def story() -> None:
        mailbox = Mailbox()

        late = await mailbox.take(0.01)
        mailbox.put(letter(1))

        assert (late, await mailbox.take(LONG)) == ([], [letter(1)])

    run(story())


def test_of_too_many_letters_the_oldest_go() -> None:
    async def story() -> None:
        mailbox = Mailbox()
        for number in range(10_002):
            mailbox.put(letter(number))

        letters = await mailbox.take(LONG)

        assert (len(letters), letters[0], letters[-1]) == (10_000, letter(2), letter(10_001))

    run(story())

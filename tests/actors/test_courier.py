import asyncio
from typing import Any

import pytest
from ray.exceptions import RaySystemError
from tests.actors.fakes import (
    TOPIC,
    FakeReplica,
    Switchboard,
    exit_process,
    orders,
    run,
    table_of,
    turns,
    until,
)

from raydispatch.actors import courier
from raydispatch.actors.wire import Item, Part
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode

SIMPLE = table_of(("a", "dev.**", 0))


def codes(items: list[list[Item]]) -> list[list[str | None]]:
    """For each message and dispatcher: None for a success, else the error code."""
    return [[None if isinstance(item, float) else str(item.error_code) for item in row] for row in items]


def _marked(mark: int, payload: Any) -> Item:
    return payload * 10.0 + mark  # type: ignore[no-any-return]


def echo(payload: Any) -> Item:
    """An answer that tells one message from another."""
    return float(payload)


# Balance


def test_large_parts_are_spread_over_the_replicas() -> None:
    async def story() -> None:
        replicas = [FakeReplica(echo) for _ in range(3)]
        board = Switchboard(SIMPLE, {"a": replicas})

        delivery = await board.route(*orders(*range(3 * courier.CHUNK)))

        assert [item for (item,) in delivery.items] == [float(n) for n in range(3 * courier.CHUNK)]
        assert sum(len(part) for part in board.parts("a")) == 3 * courier.CHUNK
        assert max(len(part) for part in board.parts("a")) == courier.CHUNK
        assert sum(bool(replica.parts) for replica in replicas) >= 2

    run(story())


def test_a_small_part_stays_together() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(), FakeReplica()]})

        await board.route(*orders(*range(courier.CHUNK)))

        assert [len(part) for part in board.parts("a")] == [courier.CHUNK]

    run(story())


def test_the_less_busy_replica_gets_the_next_part() -> None:
    async def story() -> None:
        busy, free = FakeReplica(), FakeReplica()
        busy.gate = free.gate = asyncio.Event()
        board = Switchboard(SIMPLE, {"a": [busy, free]})

        routing = [asyncio.create_task(board.route(*orders(1)))]
        for number in range(2, 12):
            await until(lambda: len(busy.parts) + len(free.parts) == len(routing))
            routing.append(asyncio.create_task(board.route(*orders(number))))
        await until(lambda: len(busy.parts) + len(free.parts) == 11)

        assert abs(len(busy.parts) - len(free.parts)) == 1
        busy.gate.set()
        await asyncio.gather(*routing)

    run(story())


# Full replicas


def full_until(replica: FakeReplica, calls: int) -> Any:
    """Has no room during the first calls, and then for one message more with each call."""

    def answer(payload: Any) -> Item | None:
        return float(payload) if len(replica.parts) > calls + payload else None

    return answer


def test_messages_that_find_no_room_wait_for_it() -> None:
    async def story() -> None:
        replica = FakeReplica()
        replica._answer = full_until(replica, 2)
        board = Switchboard(SIMPLE, {"a": [replica]})

        delivery = await board.route(*orders(0, 1, 2))

        assert delivery.items == [[0.0], [1.0], [2.0]]
        assert board.parts("a") == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2], [2]]

    run(story())


def test_messages_that_find_no_room_are_rejected_if_they_shall_not_wait() -> None:
    async def story() -> None:
        replica = FakeReplica(lambda n: 1.0 if n == 0 else None)
        board = Switchboard(SIMPLE, {"a": [replica]}, reject_when_full=True)

        delivery = await board.route(*orders(0, 1))

        assert codes(delivery.items) == [[None], ["queue_full"]]
        outcome = delivery.items[1][0]
        assert isinstance(outcome, Outcome)
        assert (outcome.status, outcome.dispatcher_id, outcome.route_id) == (DispatchStatus.REJECTED, "a", "a:dev.**")
        assert len(replica.parts) == 1

    run(story())


def test_if_one_replica_is_full_another_one_is_tried_before_anything_is_rejected() -> None:
    async def story() -> None:
        full, free = FakeReplica(lambda n: None), FakeReplica()
        board = Switchboard(SIMPLE, {"a": [full, free]}, reject_when_full=True)

        deliveries = [await board.route(*orders(number)) for number in range(20)]

        assert all(delivery.items == [[1.0]] for delivery in deliveries)

    run(story())


def test_messages_that_never_find_room_end_when_their_time_is_up() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(lambda n: None)]})

        delivery = await board.route(*orders(1, 2), seconds=0.03)

        assert codes(delivery.items) == [["time_limit"], ["time_limit"]]

    run(story())


# Time


def test_what_takes_longer_than_the_sender_waits_is_a_timeout() -> None:
    async def story() -> None:
        slow = FakeReplica()
        slow.gate = asyncio.Event()
        board = Switchboard(table_of(("a", "dev.x.*", 0), ("b", "dev.y.*", 0)), {"a": [slow]})

        delivery = await board.route(*orders(1, topic="dev.x.events"), *orders(2, topic="dev.y.events"), seconds=0.02)

        assert codes(delivery.items) == [["time_limit"], [None]]
        outcome = delivery.items[0][0]
        assert isinstance(outcome, Outcome)
        assert outcome.status is DispatchStatus.TIMEOUT
        assert (await board.router.load()).in_flight == 0

    run(story())


def test_a_dispatcher_without_a_healthy_replica_is_waited_for_until_the_time_is_up() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        board.handles["a"]["a-1"].crash(for_good=True)

        delivery = await board.route(*orders(1), seconds=0.2)

        assert codes(delivery.items) == [["time_limit"]]

    run(story())


# Losing replicas


def test_what_a_lost_replica_had_goes_on_to_others_in_halves_and_is_marked() -> None:
    async def story() -> None:
        replicas = [FakeReplica(echo), FakeReplica(echo)]
        board = Switchboard(SIMPLE, {"a": replicas})
        for handle in board.handles["a"].values():
            handle.crash_at("process", 1)

        delivery = await board.route(*orders(*range(8)))

        assert delivery.items == [[float(n)] for n in range(8)]
        parts = [part for replica in replicas for part in replica.parts]
        assert all(part.resent for part in parts)
        assert max(len(part.rows) for part in parts) <= 4
        assert sorted(n for part in board.parts("a") for n in part) == list(range(8))

    run(story())


def test_a_lone_message_survives_the_loss_of_its_replica() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(), FakeReplica()]})
        for handle in board.handles["a"].values():
            handle.crash_at("process", 1)

        delivery = await board.route(*orders(1))

        assert delivery.items == [[1.0]]

    run(story())


def test_a_replica_whose_call_fails_gets_no_messages_until_it_answers() -> None:
    async def story() -> None:
        sick, well = FakeReplica(), FakeReplica()
        sick.is_well = False
        board = Switchboard(SIMPLE, {"a": [sick, well]})
        board.handles["a"]["a-1"].crash_at("process", 1)
        while board.handles["a"]["a-1"].count("process") == 0:
            await board.route(*orders(0))

        for number in range(20):
            await board.route(*orders(number))
        during = len(sick.parts)
        sick.is_well = True
        await until(lambda: board.router._targets["a"].endpoints.healthy_count == 2)
        for number in range(50):
            await board.route(*orders(number))

        assert during == 0
        assert sick.parts

    run(story())


def test_at_most_once_means_that_what_a_lost_replica_had_is_not_sent_again() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(), FakeReplica()]}, at_most_once=True)
        for handle in board.handles["a"].values():
            handle.crash_at("process", 1)

        delivery = await board.route(*orders(1, 2, 3))

        assert codes(delivery.items) == [["replica_lost"]] * 3
        assert board.parts("a") == []
        assert sum(handle.count("process") for handle in board.handles["a"].values()) == 1

    run(story())


@pytest.mark.parametrize("error", [RaySystemError("the raylet is gone")])
def test_trouble_of_ray_itself_counts_as_a_lost_replica(error: Exception) -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        handle = board.handles["a"]["a-1"]
        failing = [error]
        begin = handle._begin

        def fail_once(method: str, arguments: tuple[Any, ...]) -> Any:
            if method == "process" and failing:
                raise failing.pop()
            return begin(method, arguments)

        handle._begin = fail_once  # type: ignore[method-assign]

        assert (await board.route(*orders(1))).items == [[1.0]]

    run(story())


class Confused(FakeReplica):
    """Breaks on every call, and lives on."""

    async def process(self, part: Part) -> list[Item | None]:
        self.parts.append(part)
        raise ValueError("confused")


def test_a_replica_that_breaks_without_dying_gives_an_error_and_is_not_asked_again() -> None:
    async def story() -> None:
        confused = Confused()
        board = Switchboard(SIMPLE, {"a": [confused]})

        delivery = await board.route(*orders(1, 2))

        assert codes(delivery.items) == [["replica_lost"]] * 2
        outcome = delivery.items[0][0]
        assert isinstance(outcome, Outcome)
        assert "confused" in (outcome.error_message or "")
        assert len(confused.parts) == 1

    run(story())


# Messages that kill


class Mortal(FakeReplica):
    """Dies of some messages, and takes everybody with it."""

    def __init__(self, deadly: set[int], slow: bool = False) -> None:
        super().__init__(echo)
        self.deadly = deadly
        self.slow = slow
        self.busy = 0
        self.has_suspect = False

    async def process(self, part: Part) -> list[Item | None]:
        # As real ones: a part that is to run alone has the replica for itself.
        if self.has_suspect:
            return [None] * len(part.rows)
        self.has_suspect = part.alone
        try:
            await until(lambda: not (part.alone and self.busy))
            return await self._process(part)
        finally:
            if part.alone:
                self.has_suspect = False

    async def _process(self, part: Part) -> list[Item | None]:
        self.busy += 1
        try:
            if self.deadly & set(self._payloads(part)):
                await asyncio.sleep(0)
                self.parts.append(part)
                exit_process()
            if self.slow:
                await turns(5)
            return await super().process(part)
        finally:
            self.busy -= 1

    def _payloads(self, part: Part) -> list[int]:
        from tests.actors.fakes import payloads_of

        return payloads_of(part)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("tries", [1, 3])
def test_a_message_that_kills_its_replica_every_time_ends_alone(replicas: int, slow: bool, tries: int) -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [Mortal({5}, slow) for _ in range(replicas)]}, tries=tries)

        delivery = await board.route(*orders(*range(8)))

        lost = [n for n, row in enumerate(codes(delivery.items)) if row != [None]]
        assert lost == [5]
        assert codes(delivery.items)[5] == ["replica_lost"]
        alone = [part for part in board.parts("a") if part == [5]]
        assert len(alone) >= tries

    run(story())


def test_it_is_a_dead_letter_alone() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [Mortal({5})]})

        await board.route(*orders(*range(8)))
        await turns()

        (letter,) = board.controller.instance.letters
        key, blob, outcome, version = letter
        assert (key, version) == ((TOPIC, "Order"), SIMPLE.version)
        assert outcome.error_code is ErrorCode.REPLICA_LOST
        assert module_payload(blob, key) == 5

    run(story())


def module_payload(blob: bytes, key: tuple[str, str]) -> Any:
    from raydispatch.actors.wire import decode

    return decode(blob, key).payload


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_lone_messages_do_not_die_of_a_neighbour(tries: int) -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [Mortal({5}, slow=True)]}, tries=tries)
        await board.follow()

        deliveries = await asyncio.gather(*(board.route(*orders(number)) for number in range(8)))

        found = [codes(delivery.items)[0][0] for delivery in deliveries]
        assert found == ["replica_lost" if number == 5 else None for number in range(8)]

    run(story())


def test_two_messages_that_kill_end_alone_both() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [Mortal({2, 5}, slow=True), Mortal({2, 5}, slow=True)]})
        await board.follow()

        deliveries = await asyncio.gather(
            board.route(*orders(*range(4))), board.route(*orders(*range(4, 8))), board.route(*orders(*range(8, 12)))
        )

        found = [code for delivery in deliveries for (code,) in codes(delivery.items)]
        assert [n for n, code in enumerate(found) if code] == [2, 5]

    run(story())


# Parcels that are sent again


def test_whoever_knows_a_message_that_comes_again_gets_it() -> None:
    async def story() -> None:
        messages = orders(*range(6))
        numbers = [envelope.message_id.int for _, envelope in messages]
        one, other = FakeReplica(lambda n: n + 0.1, numbers[:3]), FakeReplica(lambda n: n + 0.2, numbers[3:])
        board = Switchboard(SIMPLE, {"a": [one, other]})

        delivery = await board.route(*messages, resent=True)

        assert delivery.items == [[0.1], [1.1], [2.1], [3.2], [4.2], [5.2]]
        assert all(part.resent for replica in (one, other) for part in replica.parts)

    run(story())


def test_messages_that_come_again_go_together_and_at_the_same_time() -> None:
    async def story() -> None:
        messages = orders(*range(6))
        numbers = [envelope.message_id.int for _, envelope in messages]
        one, other = FakeReplica(echo, numbers[::2]), FakeReplica(echo, numbers[1:3:2])
        one.gate = other.gate = asyncio.Event()
        board = Switchboard(SIMPLE, {"a": [one, other]})

        routing = asyncio.create_task(board.route(*messages, resent=True))
        await until(lambda: sum(len(part) for part in board.parts("a")) == 6)
        one.gate.set()

        assert (await routing).items == [[float(n)] for n in range(6)]

    run(story())


def test_a_message_that_nobody_knows_is_sent_again_if_it_may_be() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(echo)]})

        delivery = await board.route(*orders(1, 2), resent=True)

        assert delivery.items == [[1.0], [2.0]]
        assert all(part.resent for part in board.replicas["a"][0].parts)

    run(story())


def test_at_most_once_means_that_only_those_who_know_it_are_asked_again() -> None:
    async def story() -> None:
        messages = orders(1, 2)
        known = FakeReplica(echo, [messages[0][1].message_id.int])
        board = Switchboard(SIMPLE, {"a": [known]}, at_most_once=True)

        delivery = await board.route(*messages, resent=True)

        assert codes(delivery.items) == [[None], ["replica_lost"]]
        assert known.payloads == [[1]]

    run(story())


def test_if_the_one_who_knows_it_dies_another_one_gets_it() -> None:
    async def story() -> None:
        messages = orders(1)
        owner = FakeReplica(echo, [messages[0][1].message_id.int])
        board = Switchboard(SIMPLE, {"a": [owner, FakeReplica(echo)]})
        board.handles["a"]["a-1"].crash_at("process")

        delivery = await board.route(*messages, resent=True)

        assert delivery.items == [[1.0]]

    run(story())


def test_a_replica_that_cannot_say_what_it_knows_holds_up_nobody() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(echo), FakeReplica(echo)]})
        board.handles["a"]["a-1"].crash_at("known")

        delivery = await board.route(*orders(1), resent=True)

        assert delivery.items == [[1.0]]

    run(story())

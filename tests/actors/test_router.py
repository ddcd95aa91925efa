import asyncio
from typing import Any

from tests.actors.fakes import (
    DEFAULT_RULE,
    SETTINGS,
    FakeController,
    FakeHandle,
    FakeReplica,
    Switchboard,
    orders,
    parcel_of,
    run,
    table_of,
    turns,
    until,
)

from raydispatch.actors.plan import Plan
from raydispatch.actors.router import Router
from raydispatch.actors.wire import Item

SIMPLE = table_of(("a", "dev.**", 0))


def codes(items: list[list[Item]]) -> list[list[str | None]]:
    """For each message and dispatcher: None for a success, else the error code."""
    return [[None if isinstance(item, float) else str(item.error_code) for item in row] for row in items]


def _marked(mark: int, payload: Any) -> Item:
    return payload * 10.0 + mark  # type: ignore[no-any-return]


def echo(payload: Any) -> Item:
    """An answer that tells one message from another."""
    return float(payload)


# Plans


def test_a_parcel_keeps_its_table_while_another_one_comes() -> None:
    async def story() -> None:
        before = table_of(("first", "**", 9), ("second", "**", 1), ("gone", "**", 1))
        after = table_of(("first", "**", 9))
        first = FakeReplica()
        first.gate = asyncio.Event()
        board = Switchboard(before, {"first": [first]})

        routing = asyncio.create_task(board.route(*orders(1)))
        await until(lambda: first.parts)
        await board.follow(after)
        first.gate.set()
        old = await routing
        new = await board.route(*orders(2))

        assert (old.table_version, len(old.selections[0].targets), old.items) == (before.version, 3, [[1.0] * 3])
        assert (new.table_version, len(new.selections[0].targets), new.items) == (after.version, 1, [[1.0]])
        assert board.parts("gone") == [[1]]

    run(story())


def test_an_older_plan_does_not_replace_a_newer_one() -> None:
    async def story() -> None:
        board = Switchboard(table_of(("a", "**", 0), ("b", "**", 0)))
        await board.follow()
        older = await board.router.plan()
        await board.follow(table_of(("a", "**", 0)))
        assert older is not None

        await board.router.follow(older)

        assert (await board.router.load()).table_version == board.table.version

    run(story())


def test_replicas_that_come_and_go_with_a_plan_get_messages_or_none() -> None:
    async def story() -> None:
        one, other = FakeReplica(), FakeReplica()
        board = Switchboard(SIMPLE, {"a": [one, other]})
        handles = board.handles["a"]

        board.handles["a"] = {"a-1": handles["a-1"]}
        await board.route(*orders(*range(10)))
        board.handles["a"] = {"a-2": handles["a-2"]}
        await board.follow()
        await board.route(*orders(*range(10)))

        assert (len(one.parts), len(other.parts)) == (1, 1)

    run(story())


def test_a_replica_that_leaves_may_end_what_it_has_begun() -> None:
    async def story() -> None:
        one = FakeReplica()
        one.gate = asyncio.Event()
        board = Switchboard(SIMPLE, {"a": [one, FakeReplica()]})
        handles = board.handles["a"]
        board.handles["a"] = {"a-1": handles["a-1"]}

        routing = asyncio.create_task(board.route(*orders(1)))
        await until(lambda: one.parts)
        board.handles["a"] = {"a-2": handles["a-2"]}
        await board.follow()
        one.gate.set()

        assert (await routing).items == [[1.0]]

    run(story())


class Planner(FakeController):
    """A controller that is asked for the plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.known = plan
        self.gate = asyncio.Event()

    async def plan(self) -> Plan:
        await self.gate.wait()
        return self.known


def plan_of(board: Switchboard, generation: int) -> Plan:
    return Plan(generation, board.table, board.handles, dict.fromkeys(board.handles, DEFAULT_RULE), {})


def test_a_router_that_was_born_again_asks_for_the_plan() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        planner = Planner(plan_of(board, 7))
        planner.gate.set()
        controller = FakeHandle(lambda: planner)
        controller.crash_at("plan")  # It has to be asked twice, since it is being restarted itself.
        router = Router("shop", SETTINGS, controller)

        delivery = await router.route(parcel_of(orders(1)))

        assert delivery.by_message() == [[1.0]]
        assert (await router.load()).generation == 7

    run(story())


def test_a_plan_that_it_has_asked_for_does_not_replace_a_newer_one() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        planner = Planner(plan_of(board, 1))
        router = Router("shop", SETTINGS, FakeHandle(lambda: planner))

        routing = asyncio.create_task(router.route(parcel_of(orders(1))))
        await turns()
        await router.follow(plan_of(board, 2))
        planner.gate.set()
        await routing

        assert (await router.load()).generation == 2

    run(story())


def test_a_router_that_finds_no_controller_gives_up_in_time() -> None:
    async def story() -> None:
        controller = FakeHandle(FakeController)
        controller.crash(for_good=True)
        router = Router("shop", SETTINGS, controller)

        delivery = await router.route(parcel_of(orders(1, 2), seconds=0.02))

        assert [selection.fault and selection.fault[0] for selection in delivery.selections] == ["timeout"]
        assert delivery.items == [[], []]

    run(story())


# Ending


def test_draining_waits_for_what_is_under_way() -> None:
    async def story() -> None:
        slow = FakeReplica()
        slow.gate = asyncio.Event()
        board = Switchboard(SIMPLE, {"a": [slow]})
        routing = asyncio.create_task(board.route(*orders(1)))
        await until(lambda: slow.parts)

        too_short = await board.router.drain(0.01)
        draining = asyncio.create_task(board.router.drain(5))
        await turns()
        waits = not draining.done()
        slow.gate.set()

        assert (too_short, waits, await draining) == (False, True, True)
        await routing

    run(story())


def test_an_idle_router_is_drained_at_once() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)

        assert await board.router.drain(0)
        assert await board.router.ping()

    run(story())

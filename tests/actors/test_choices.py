import asyncio
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.fakes import (
    TOPIC,
    FakeReplica,
    Switchboard,
    orders,
    run,
    table_of,
    turns,
    until,
)

from raydispatch import Envelope
from raydispatch.actors.wire import Item
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode
from raydispatch.messages.topic import category_of

SIMPLE = table_of(("a", "dev.**", 0))


def codes(items: list[list[Item]]) -> list[list[str | None]]:
    """For each message and dispatcher: None for a success, else the error code."""
    return [[None if isinstance(item, float) else str(item.error_code) for item in row] for row in items]


def _marked(mark: int, payload: Any) -> Item:
    return payload * 10.0 + mark  # type: ignore[no-any-return]


def echo(payload: Any) -> Item:
    """An answer that tells one message from another."""
    return float(payload)


# Splitting and merging


def test_every_message_goes_to_its_dispatchers_and_their_outcomes_stand_in_order() -> None:
    async def story() -> None:
        table = table_of(("a", "dev.apple.events", 0), ("b", "dev.*.events", 0), ("c", "dev.cherry.events", 0))
        board = Switchboard(table, {"a": [FakeReplica(lambda n: n + 0.1)], "b": [FakeReplica(lambda n: n + 0.2)]})
        topics = ["dev.apple.events", "dev.pear.events", "dev.apple.events", "dev.plum.events"]

        delivery = await board.route(*((topic, Envelope(n, "Fruit")) for n, topic in enumerate(topics)))

        assert delivery.items == [[0.1, 0.2], [1.2], [2.1, 2.2], [3.2]]
        assert [len(selection.targets) for selection in delivery.selections] == [2, 1, 1]
        assert delivery.selections[0].targets == (("a", "a:dev.apple.events"), ("b", "b:dev.*.events"))
        assert delivery.table_version == table.version
        assert (board.parts("a"), board.parts("b"), board.parts("c")) == ([[0, 2]], [[0, 1, 2, 3]], [])

    run(story())


def test_a_part_names_for_each_key_the_route_that_led_there() -> None:
    async def story() -> None:
        board = Switchboard(table_of(("a", "dev.apple.events", 0), ("a", "dev.pear.*", 0)))

        await board.route(*orders(1, topic="dev.apple.events"), *orders(2, topic="dev.pear.events"))

        (part,) = board.replicas["a"][0].parts
        assert [part.route_ids[row] for row in part.rows] == ["a:dev.apple.events", "a:dev.pear.*"]

    run(story())


def test_an_empty_parcel_is_an_empty_delivery() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)

        delivery = await board.route()

        assert (delivery.items, delivery.selections, board.parts("a")) == ([], [], [])

    run(story())


@settings(max_examples=40, deadline=None)
@given(
    routes=st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["dev.x.events", "dev.*.events", "**"]), st.integers(0, 2)),
        unique_by=lambda route: route[:2],
        min_size=1,
    ),
    topics=st.lists(st.sampled_from(["dev.x.events", "dev.y.events", "dev.x.z.events", "dev.x.commands", "bad"])),
)
def test_it_selects_what_the_table_selects(routes: list[tuple[str, str, int]], topics: list[str]) -> None:
    async def story() -> None:
        table = table_of(*routes)
        names = {name: number for number, name in enumerate("abcd")}
        board = Switchboard(table, {name: [FakeReplica(partial(_marked, names[name]))] for name in table.dispatchers})

        delivery = await board.route(*((topic, Envelope(n, "T")) for n, topic in enumerate(topics)))

        for n, (topic, items) in enumerate(zip(topics, delivery.items, strict=True)):
            category = category_of(topic)
            selected = table.select(topic, category, "T") if category else ()
            assert items == [n * 10.0 + names[route.dispatcher_id] for route in selected]

    run(story())


# What goes nowhere


@pytest.mark.parametrize(
    ("topic", "status", "code"),
    [
        ("dev.order.events", DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER),
        ("dev.order.things", DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC),
        ("", DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC),
        ("dev..events", DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC),
    ],
)
def test_a_message_that_goes_nowhere_says_why_and_costs_the_others_nothing(
    topic: str, status: DispatchStatus, code: ErrorCode
) -> None:
    async def story() -> None:
        board = Switchboard(table_of(("a", "dev.known.events", 0)))

        delivery = await board.route(*orders(1, topic=topic), *orders(2, topic="dev.known.events"))

        fault = delivery.selections[0].fault
        assert fault is not None
        assert (fault[0], fault[1]) == (status.value, code.value)
        assert delivery.items == [[], [1.0]]

    run(story())


def test_everything_is_counted_by_topic_and_status() -> None:
    async def story() -> None:
        lost = Outcome("a", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.HANDLER_EXCEPTION, attempts=3)
        board = Switchboard(SIMPLE, {"a": [FakeReplica(lambda n: lost if n == 2 else 1.0)]})

        await board.route(*orders(1, 2), *orders(3, topic="bad"), *orders(4, topic="prod.events"))

        metrics = await board.router.metrics()
        assert metrics.statuses == {
            DispatchStatus.SUCCESS: 1,
            DispatchStatus.DISPATCHER_ERROR: 1,
            DispatchStatus.INVALID_MESSAGE: 1,
            DispatchStatus.NO_DISPATCHER: 1,
        }
        assert metrics.topic_metrics == {TOPIC: 2, "bad": 1, "prod.events": 1}
        assert (await board.router.load()).routed == 4

    run(story())


# Priorities


def test_dispatchers_of_one_priority_run_at_the_same_time() -> None:
    async def story() -> None:
        board = Switchboard(table_of(("a", "**", 5), ("b", "**", 5)))
        slow = board.replicas["a"][0]
        slow.gate = asyncio.Event()

        routing = asyncio.create_task(board.route(*orders(1)))
        await until(lambda: board.parts("b"))
        slow.gate.set()

        assert (await routing).items == [[1.0, 1.0]]

    run(story())


@pytest.mark.parametrize("fails", [False, True])
def test_higher_priorities_end_before_lower_ones_begin_failed_or_not(fails: bool) -> None:
    async def story() -> None:
        error = Outcome("first", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.HANDLER_EXCEPTION)
        first = FakeReplica(lambda n: error if fails else 1.0)
        first.gate = asyncio.Event()
        board = Switchboard(table_of(("second", "**", 1), ("first", "**", 9)), {"first": [first]})

        routing = asyncio.create_task(board.route(*orders(1, 2)))
        await until(lambda: first.parts)
        await turns()
        begun = board.parts("second")
        first.gate.set()
        delivery = await routing

        assert begun == []
        assert board.parts("second") == [[1, 2]]
        assert [target[0] for target in delivery.selections[0].targets] == ["first", "second"]
        assert delivery.items[0][1] == 1.0

    run(story())


def test_a_message_without_the_higher_priority_goes_with_the_first_stage() -> None:
    async def story() -> None:
        first = FakeReplica()
        first.gate = asyncio.Event()
        board = Switchboard(table_of(("first", "dev.x.events", 9), ("second", "**", 1)), {"first": [first]})

        routing = asyncio.create_task(board.route(*orders(1, topic="dev.x.events"), *orders(2, topic="dev.y.events")))
        await until(lambda: board.parts("second") == [[2]])
        first.gate.set()
        delivery = await routing

        assert board.parts("second") == [[2], [1]]
        assert delivery.items == [[1.0, 1.0], [1.0]]

    run(story())

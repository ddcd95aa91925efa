import asyncio
from typing import Any

import pytest
from tests.actors.fakes import (
    FakeReplica,
    Switchboard,
    orders,
    run,
    table_of,
    until,
)

from raydispatch.actors import plan as planning
from raydispatch.actors.circuit import CLOSED, Circuit
from raydispatch.actors.wire import Item
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.outcome import DispatchStatus, Outcome

SIMPLE = table_of(("a", "dev.**", 0))


def codes(items: list[list[Item]]) -> list[list[str | None]]:
    """For each message and dispatcher: None for a success, else the error code."""
    return [[None if isinstance(item, float) else str(item.error_code) for item in row] for row in items]


def _marked(mark: int, payload: Any) -> Item:
    return payload * 10.0 + mark  # type: ignore[no-any-return]


def echo(payload: Any) -> Item:
    """An answer that tells one message from another."""
    return float(payload)


# Circuits

OPEN = Circuit(CircuitState.OPEN, 60.0, "a-1")


def test_an_open_circuit_is_refused_without_a_call() -> None:
    async def story() -> None:
        board = Switchboard(table_of(("a", "**", 0), ("b", "**", 0)))
        await board.follow()

        await board.router.follow_circuit("a", OPEN)
        delivery = await board.route(*orders(1, 2))

        assert codes(delivery.items) == [["circuit_open", None]] * 2
        outcome = delivery.items[0][0]
        assert isinstance(outcome, Outcome)
        assert (outcome.status, outcome.attempts) == (DispatchStatus.CIRCUIT_OPEN, 0)
        assert (board.parts("a"), board.parts("b")) == ([], [[1, 2]])

    run(story())


def test_what_a_router_refuses_itself_is_counted_for_the_dispatcher() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        await board.follow(a=OPEN)

        await board.route(*orders(1, 2))

        part = (await board.router.metrics()).dispatcher_metrics["a"]
        assert (part.refused_count, part.execution_count) == (2, 0)
        assert part.statuses == {DispatchStatus.CIRCUIT_OPEN: 2}

    run(story())


def test_a_circuit_that_closes_lets_messages_through_again() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        await board.follow(a=OPEN)

        await board.router.follow_circuit("a", CLOSED)

        assert (await board.route(*orders(1))).items == [[1.0]]

    run(story())


def test_messages_that_wait_for_room_are_refused_when_the_circuit_opens() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE, {"a": [FakeReplica(lambda n: None)]})

        routing = asyncio.create_task(board.route(*orders(1)))
        await until(lambda: board.parts("a"))
        await board.router.follow_circuit("a", OPEN)

        assert codes((await routing).items) == [["circuit_open"]]

    run(story())


def test_after_the_pause_messages_go_to_the_one_with_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        now = [1_000.0]
        monkeypatch.setattr(planning, "monotonic", lambda: now[0])
        board = Switchboard(SIMPLE, {"a": [FakeReplica() for _ in range(5)]})
        await board.follow(a=OPEN._replace(trial_replica="a-3"))

        now[0] += 59.9
        early = await board.route(*orders(0))
        now[0] += 0.1
        for number in range(10):
            await board.route(*orders(number))

        assert codes(early.items) == [["circuit_open"]]
        assert [len(replica.parts) for replica in board.replicas["a"]] == [0, 0, 10, 0, 0]

    run(story())


def test_if_the_one_with_the_trial_is_gone_any_other_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        await board.follow(a=Circuit(CircuitState.HALF_OPEN, 0.0, "a-9"))

        assert (await board.route(*orders(1))).items == [[1.0]]

    run(story())


def test_a_router_remembers_circuits_for_a_controller_that_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        now = [1_000.0]
        monkeypatch.setattr(planning, "monotonic", lambda: now[0])
        board = Switchboard(SIMPLE)
        await board.follow(a=OPEN)

        now[0] += 20
        plan = await board.router.plan()

        assert plan is not None
        assert plan.circuits == {"a": OPEN._replace(seconds=40.0)}

    run(story())


def test_word_of_a_circuit_that_it_does_not_know_is_ignored() -> None:
    async def story() -> None:
        board = Switchboard(SIMPLE)
        await board.follow()

        await board.router.follow_circuit("stranger", OPEN)

        assert (await board.route(*orders(1))).items == [[1.0]]

    run(story())

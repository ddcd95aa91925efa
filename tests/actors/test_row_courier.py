import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ray.exceptions import ObjectStoreFullError
from tests.actors.fakes import DEFAULT_RULE, TOPIC, FakeHandle, exit_process, run, turns, until

from raydispatch.actors import row_courier
from raydispatch.actors.choices import Choice
from raydispatch.actors.circuit import CLOSED, Circuit
from raydispatch.actors.plan import Target
from raydispatch.actors.row_courier import RowCourier
from raydispatch.actors.rows import RowKey, RowPart, RowReport, RowsDone, Shipment
from raydispatch.actors.wire import Selection
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.metrics import MetricsRecorder
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode

OPEN = Circuit(CircuitState.OPEN, 60)
SUCCESS = Outcome("a", DispatchStatus.SUCCESS, attempts=1)
REFUSED = Outcome("a", DispatchStatus.CIRCUIT_OPEN, error_code=ErrorCode.CIRCUIT_OPEN)


class FakeReplica:
    """In the place of a replica: notes which rows come, and answers as it is told; None means that it has no room."""

    def __init__(self, answer: Callable[[int], Outcome | None] | None = None, knows: Iterable[int] = ()) -> None:
        self.parts: list[RowPart] = []
        self.gate: asyncio.Event | None = None
        self._answer = answer or echo
        self._knows = list(knows)

    async def process_rows(self, part: RowPart) -> RowReport | None:
        self.parts.append(part)
        if self.gate is not None:
            await self.gate.wait()
        outcomes = [self._answer(row) for row in rows_of(part)]
        kinds: dict[Outcome, int] = {}
        for outcome in outcomes:
            if outcome is None:
                return None
            kinds.setdefault(outcome, len(kinds))
        codes = np.array([kinds[outcome] for outcome in outcomes if outcome is not None], np.int32)
        return RowReport(list(kinds), codes if len(kinds) > 1 else None, 1.0)

    async def known_rows(self, part: RowPart) -> npt.NDArray[np.bool_]:
        return np.isin(rows_of(part), self._knows)

    @property
    def rows(self) -> list[list[int]]:
        """Of each part."""
        return [rows_of(part) for part in self.parts]


def echo(row: int) -> Outcome:
    """An answer that tells one row from another."""
    return SUCCESS._replace(attempts=row + 1)


def rows_of(part: RowPart) -> list[int]:
    return list(range(len(part.codes))) if part.rows is None else part.rows.tolist()


class Board:
    """A courier in front of fake replicas of the dispatcher `a`; one that died is restarted at once."""

    def __init__(self, *replicas: FakeReplica, **rule: Any) -> None:
        self.replicas = replicas or (FakeReplica(),)
        self.handles = {f"a-{number}": handle_of(one) for number, one in enumerate(self.replicas, start=1)}
        self.metrics = MetricsRecorder()
        self.target = Target("a")
        self.target.adopt(self.handles, DEFAULT_RULE._replace(**rule))
        self.losses = 0
        self.buried: list[tuple[RowPart, Outcome]] = []
        self._courier = RowCourier(
            self.metrics, lambda part, outcome: self.buried.append((part, outcome)), self._on_loss
        )

    async def send(self, count: int, seconds: float = 5.0, **options: Any) -> list[Outcome]:
        """What became of so many rows."""
        (done,) = await self.send_all(shipment_of(count, **options), {"a": self.target}, ("a",), seconds=seconds)
        return [done.report.kinds[code] for code in done.report.codes_of(count).tolist()]

    async def send_all(
        self, shipment: Shipment, targets: dict[str, Target], *stages: tuple[str, ...], seconds: float = 5.0
    ) -> list[RowsDone]:
        return await self._courier.send_all(shipment, [choice_of(*stages)], targets, monotonic() + seconds)

    def begin(self, count: int, **options: Any) -> "asyncio.Task[list[Outcome]]":
        return asyncio.create_task(self.send(count, **options))

    @property
    def rows(self) -> list[list[int]]:
        """Of each part that any replica got."""
        return [rows for replica in self.replicas for rows in replica.rows]

    @property
    def counted(self) -> dict[str, int]:
        """The outcomes that were made here."""
        found = self.metrics.snapshot().get_dispatcher_metrics("a")
        return {status.value: count for status, count in found.statuses.items()} if found else {}

    def _on_loss(self) -> None:
        self.losses += 1
        for replica_id, handle in self.handles.items():
            if not handle.is_down:
                self.target.endpoints.restore(replica_id)


def handle_of(replica: FakeReplica) -> FakeHandle:
    return FakeHandle(lambda: replica)


def shipment_of(count: int, **options: Any) -> Shipment:
    return Shipment([RowKey(TOPIC, "Order")], np.zeros(count, np.int32), ["content"], 5.0, **options)


def choice_of(*stages: tuple[str, ...]) -> Choice:
    targets = tuple(tuple((name, f"route {name}") for name in stage) for stage in stages)
    return Choice(Selection(tuple(target for stage in targets for target in stage)), targets)


def echoes(outcomes: list[Outcome]) -> list[int | str]:
    """For each row: its number, if it was handled, else the error code."""
    return [str(one.error_code) if one.error_code else one.attempts - 1 for one in outcomes]


# Pieces


def test_rows_of_a_batch_handler_stay_together_as_far_as_a_replica_takes_them() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica(), batch=True, max_in_flight=4_000)

        outcomes = await board.send(9_000)

        assert echoes(outcomes) == list(range(9_000))
        assert sorted(map(len, board.rows)) == [3_000] * 3

    run(story())


def test_rows_of_a_batch_handler_that_one_replica_takes_are_one_call() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica(), batch=True)

        await board.send(5_000)

        (part,) = [part for replica in board.replicas for part in replica.parts]
        assert (part.rows, len(part.codes)) == (None, 5_000)

    run(story())


def test_rows_of_a_handler_of_single_messages_are_for_all_replicas() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica(), FakeReplica())

        outcomes = await board.send(3 * row_courier.CHUNK)

        assert echoes(outcomes) == list(range(3 * row_courier.CHUNK))
        assert [len(rows) for rows in board.rows] == [row_courier.CHUNK] * 3
        assert sum(bool(replica.parts) for replica in board.replicas) >= 2

    run(story())


def test_a_few_rows_stay_together() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica())

        await board.send(row_courier.CHUNK)

        assert [len(rows) for rows in board.rows] == [row_courier.CHUNK]

    run(story())


def test_a_higher_priority_ends_before_a_lower_one_begins() -> None:
    async def story() -> None:
        first, second = Board(FakeReplica()), Board(FakeReplica())
        first.replicas[0].gate = asyncio.Event()
        targets = {"a": first.target, "b": second.target}

        sending = asyncio.create_task(first.send_all(shipment_of(2), targets, ("a",), ("b",)))
        await until(lambda: first.rows)
        await turns()
        before = list(second.rows)
        first.replicas[0].gate.set()
        done = await sending

        assert (before, second.rows) == ([], [[0, 1]])
        assert [(one.dispatcher_id, one.rows) for one in done] == [("a", None), ("b", None)]

    run(story())


def test_a_dispatcher_that_does_not_run_is_an_outcome_of_its_rows() -> None:
    async def story() -> None:
        board = Board()

        (done,) = await board.send_all(shipment_of(3), {}, ("a",))

        (outcome,) = done.report.kinds
        assert (outcome.status, outcome.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.REPLICA_LOST)
        assert outcome.error_message == "it does not run"
        assert board.counted == {"dispatcher_error": 3}

    run(story())


# Room


def full_for(calls: int) -> FakeReplica:
    """Has no room in the first calls."""
    replica = FakeReplica(lambda row: echo(row) if len(replica.parts) > calls else None)
    return replica


def test_rows_that_find_no_room_wait_for_it() -> None:
    async def story() -> None:
        board = Board(full_for(3))

        outcomes = await board.send(2)

        assert echoes(outcomes) == [0, 1]
        assert board.rows == [[0, 1]] * 4

    run(story())


def test_if_one_replica_is_full_another_one_is_tried_before_anything_is_rejected() -> None:
    async def story() -> None:
        board = Board(full_for(1_000), FakeReplica(), reject_when_full=True)

        outcomes = [await board.send(1) for _ in range(20)]

        assert outcomes == [[echo(0)]] * 20

    run(story())


def test_rows_that_find_no_room_are_rejected_if_they_shall_not_wait() -> None:
    async def story() -> None:
        board = Board(full_for(1_000), reject_when_full=True)

        outcomes = await board.send(2)

        assert {outcome.status for outcome in outcomes} == {DispatchStatus.REJECTED}
        assert echoes(outcomes) == ["queue_full"] * 2
        assert board.rows == [[0, 1]]
        assert board.counted == {"rejected": 2}

    run(story())


def test_a_store_without_room_is_waited_for_like_a_replica() -> None:
    async def story() -> None:
        board = Board()
        handle = board.handles["a-1"]
        failing, begin = [ObjectStoreFullError()], handle._begin

        def fail_once(method: str, arguments: tuple[Any, ...]) -> Any:
            if failing:
                raise failing.pop()
            return begin(method, arguments)

        handle._begin = fail_once  # type: ignore[method-assign]

        assert echoes(await board.send(2)) == [0, 1]
        assert board.losses == 0

    run(story())


# Time


@pytest.mark.parametrize("trouble", ["slow", "full", "gone"])
def test_rows_without_an_outcome_in_time_are_a_timeout(trouble: str) -> None:
    async def story() -> None:
        replica = full_for(1_000) if trouble == "full" else FakeReplica()
        replica.gate = asyncio.Event() if trouble == "slow" else None
        board = Board(replica)
        if trouble == "gone":
            board.target.endpoints.quarantine("a-1")

        outcomes = await board.send(2, seconds=0.03)

        assert {outcome.status for outcome in outcomes} == {DispatchStatus.TIMEOUT}
        assert echoes(outcomes) == ["time_limit"] * 2
        assert board.counted == {"timeout": 2}
        assert board.target.endpoints.all()[0].in_flight == 0

    run(story())


# Losing replicas


def test_at_most_once_means_that_rows_of_a_lost_replica_are_not_sent_again() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica(), at_most_once=True)
        for handle in board.handles.values():
            handle.crash_at("process_rows")

        outcomes = await board.send(3)

        assert echoes(outcomes) == ["replica_lost"] * 3
        assert sum(handle.count("process_rows") for handle in board.handles.values()) == 1
        assert (board.losses, board.counted) == (1, {"dispatcher_error": 3})

    run(story())


def test_what_a_lost_replica_had_goes_on_in_halves_and_is_marked() -> None:
    async def story() -> None:
        board = Board()
        board.handles["a-1"].crash_at("process_rows")

        outcomes = await board.send(5)

        assert echoes(outcomes) == [0, 1, 2, 3, 4]
        assert board.rows == [[0, 1], [2, 3, 4]]
        assert all(part.resent for part in board.replicas[0].parts)
        assert board.counted == {}

    run(story())


def test_a_lone_row_survives_the_loss_of_its_replica() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica())
        for handle in board.handles.values():
            handle.crash_at("process_rows")

        assert echoes(await board.send(1)) == [0]

    run(story())


class Confused(FakeReplica):
    """Breaks on every call, and lives on."""

    async def process_rows(self, part: RowPart) -> RowReport | None:
        self.parts.append(part)
        raise ValueError("confused")


def test_a_replica_that_breaks_without_dying_gives_an_error_and_is_not_asked_again() -> None:
    async def story() -> None:
        board = Board(Confused())

        outcomes = await board.send(2)

        assert echoes(outcomes) == ["replica_lost"] * 2
        assert "confused" in (outcomes[0].error_message or "")
        assert (board.rows, board.losses) == ([[0, 1]], 0)

    run(story())


class Mortal(FakeReplica):
    """Dies of some rows, and takes everybody with it."""

    def __init__(self, deadly: set[int]) -> None:
        super().__init__()
        self._deadly = deadly

    async def process_rows(self, part: RowPart) -> RowReport | None:
        await turns(2)
        if self._deadly & set(rows_of(part)):
            self.parts.append(part)
            exit_process()
        return await super().process_rows(part)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize("deadly", [{5}, {2, 5}, {0, 7}])
def test_rows_that_kill_their_replica_every_time_end_alone(replicas: int, tries: int, deadly: set[int]) -> None:
    async def story() -> None:
        board = Board(*(Mortal(deadly) for _ in range(replicas)), tries=tries)

        outcomes = await board.send(8)

        assert echoes(outcomes) == ["replica_lost" if row in deadly else row for row in range(8)]
        assert board.counted == {"dispatcher_error": len(deadly)}
        assert sorted(rows_of(part) for part, _ in board.buried) == [[row] for row in sorted(deadly)]
        for row in deadly:
            lone = [part for replica in board.replicas for part in replica.parts if rows_of(part) == [row]]
            assert len(lone) == tries
            assert [part.alone for part in lone].count(False) == 1

    run(story())


def test_a_row_alone_does_not_die_of_a_neighbour() -> None:
    async def story() -> None:
        board = Board(Mortal({5}), tries=2)
        killer, others = shipment_of(6), [shipment_of(2)] * 4

        done = await asyncio.gather(*(board.send_all(one, {"a": board.target}, ("a",)) for one in [killer, *others]))

        reports = [part.report for (part,) in done]
        assert echoes([reports[0].kinds[code] for code in reports[0].codes_of(6)]) == [0, 1, 2, 3, 4, "replica_lost"]
        assert all({kind.status for kind in report.kinds} == {DispatchStatus.SUCCESS} for report in reports[1:])

    run(story())


# An open circuit


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_courier, "HOLD_SECONDS", 0.001)


def test_an_open_circuit_refuses_rows_without_a_call() -> None:
    async def story() -> None:
        board = Board()
        board.target.follow(OPEN)

        outcomes = await board.send(3)

        assert {outcome.status for outcome in outcomes} == {DispatchStatus.CIRCUIT_OPEN}
        assert (board.rows, board.counted) == ([], {"circuit_open": 3})

    run(story())


def test_rows_that_may_wait_are_held_until_the_circuit_closes() -> None:
    async def story() -> None:
        board = Board()
        board.target.follow(OPEN)

        sending = board.begin(3, hold_seconds=60)
        await turns()
        before = list(board.rows)
        board.target.follow(CLOSED)
        outcomes = await sending

        assert (before, echoes(outcomes)) == ([], [0, 1, 2])
        assert board.counted == {}

    run(story())


def test_rows_that_have_waited_long_enough_are_refused() -> None:
    async def story() -> None:
        board = Board()
        board.target.follow(OPEN)

        outcomes = await board.send(2, hold_seconds=0.01)

        assert echoes(outcomes) == ["circuit_open"] * 2
        assert (board.rows, board.counted) == ([], {"circuit_open": 2})

    run(story())


def test_nothing_is_held_beyond_the_time_of_its_sender() -> None:
    async def story() -> None:
        board = Board()
        board.target.follow(OPEN)

        outcomes = await board.send(1, seconds=0.02, hold_seconds=60)

        assert outcomes[0].status in (DispatchStatus.CIRCUIT_OPEN, DispatchStatus.TIMEOUT)

    run(story())


def refusing(rows: set[int], calls: int) -> FakeReplica:
    """Refuses some rows in the first calls: its own breaker opened before the router heard of it."""
    replica = FakeReplica(lambda row: REFUSED if row in rows and len(replica.parts) <= calls else echo(row))
    return replica


def test_rows_that_a_replica_refused_go_again_later_and_only_those() -> None:
    async def story() -> None:
        board = Board(refusing({1, 3}, 2))

        outcomes = await board.send(5, hold_seconds=60)

        assert echoes(outcomes) == [0, 1, 2, 3, 4]
        assert board.rows == [[0, 1, 2, 3, 4], [1, 3], [1, 3]]

    run(story())


def test_rows_that_are_all_refused_go_again_together() -> None:
    async def story() -> None:
        board = Board(refusing({0, 1, 2}, 1))

        outcomes = await board.send(3, hold_seconds=60)

        assert echoes(outcomes) == [0, 1, 2]
        assert board.rows == [[0, 1, 2]] * 2

    run(story())


def test_rows_that_may_not_wait_stay_refused() -> None:
    async def story() -> None:
        board = Board(refusing({1}, 1))

        outcomes = await board.send(2)

        assert echoes(outcomes) == [0, "circuit_open"]
        assert len(board.rows) == 1

    run(story())


def test_a_replica_that_refuses_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(row_courier, "HOLD_SECONDS", 0.1)
        board = Board(refusing({0}, 1_000_000))

        await board.send(1, hold_seconds=0.25)

        assert len(board.rows) <= 5

    run(story())


# Shipments that are sent again


def test_rows_that_come_again_go_to_the_replica_that_knows_them() -> None:
    async def story() -> None:
        one, other = FakeReplica(knows=[0, 1, 4]), FakeReplica(knows=[2, 5])
        board = Board(one, other)

        outcomes = await board.send(6, resent=True)

        assert echoes(outcomes) == [0, 1, 2, 3, 4, 5]
        assert [0, 1, 4] in one.rows
        assert [2, 5] in other.rows
        assert sorted(map(tuple, board.rows)) == [(0, 1, 4), (2, 5), (3,)]
        assert all(part.resent for replica in board.replicas for part in replica.parts)

    run(story())


def test_rows_that_are_new_are_asked_for_nowhere() -> None:
    async def story() -> None:
        board = Board()

        await board.send(2)

        assert board.handles["a-1"].count("known_rows") == 0

    run(story())


def test_a_row_that_two_replicas_know_goes_to_one_of_them() -> None:
    async def story() -> None:
        board = Board(FakeReplica(knows=[0]), FakeReplica(knows=[0]))

        assert echoes(await board.send(1, resent=True)) == [0]
        assert board.rows == [[0]]

    run(story())


def test_at_most_once_means_that_only_those_who_know_a_row_are_asked_again() -> None:
    async def story() -> None:
        board = Board(FakeReplica(knows=[1]), at_most_once=True)

        outcomes = await board.send(2, resent=True)

        assert echoes(outcomes) == ["replica_lost", 1]
        assert (board.rows, board.counted) == ([[1]], {"dispatcher_error": 1})

    run(story())


def test_the_one_who_knows_a_row_is_waited_for_if_it_is_full() -> None:
    async def story() -> None:
        owner, other = full_for(2), FakeReplica()
        owner._knows = [0]
        board = Board(owner, other, reject_when_full=True)

        assert echoes(await board.send(1, resent=True)) == [0]
        assert (len(owner.parts), other.parts) == (3, [])

    run(story())


def test_if_the_one_who_knows_a_row_dies_another_one_gets_it() -> None:
    async def story() -> None:
        board = Board(FakeReplica(knows=[0]), FakeReplica())
        board.handles["a-1"].crash_at("process_rows")

        assert echoes(await board.send(1, resent=True)) == [0]

    run(story())


def test_a_replica_that_cannot_say_what_it_knows_holds_up_nobody() -> None:
    async def story() -> None:
        board = Board(FakeReplica(), FakeReplica(knows=[0]))
        board.handles["a-1"].crash_at("known_rows")

        assert echoes(await board.send(2, resent=True)) == [0, 1]
        assert [0] in board.replicas[1].rows

    run(story())


def test_rows_that_come_again_go_to_their_replicas_at_the_same_time() -> None:
    async def story() -> None:
        slow, quick = FakeReplica(knows=[0]), FakeReplica(knows=[1])
        slow.gate = asyncio.Event()
        board = Board(slow, quick)

        outcomes = await board.send(2, seconds=0.05, resent=True)

        assert echoes(outcomes) == ["time_limit", 1]

    run(story())

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from pydantic import BaseModel
from tests.actors.fakes import EVENT, TOPIC, run, turns, until

from raydispatch import Envelope
from raydispatch.actors import row_desk
from raydispatch.actors.row_desk import RowDesk
from raydispatch.actors.rows import RowKey, RowPart, RowReport
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.metrics import DispatcherMetrics, MetricsRecorder
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.workers import Workers
from raydispatch.errors import ErrorCode
from raydispatch.messages.batch import COLUMNS, NATIVE
from raydispatch.settings import BreakerSettings, RetrySettings

ONCE = RetrySettings(tries=1)
TWICE = RetrySettings(tries=2, first_delay_seconds=0)


class Log:
    """A handler, of tables or of single messages, that notes what it sees; some payloads fail, or fail at first."""

    def __init__(self, *bad: int, shaky: Sequence[int] = (), gate: asyncio.Event | None = None) -> None:
        self.seen: list[int] = []
        self.tables: list[pa.Table] = []
        self.envelopes: list[Envelope[Any]] = []
        self.gate = gate
        self._bad = bad
        self._shaky = list(shaky)

    async def bulk(self, table: pa.Table) -> list[str]:
        self.tables.append(table)
        payloads = table["payload"].to_pylist()
        self.seen += payloads
        await self._pass()
        return ["dispatcher_error" if self._fails(payload) else "success" for payload in payloads]

    async def one(self, envelope: Envelope[Any]) -> None:
        self.envelopes.append(envelope)
        self.seen.append(envelope.payload)
        await self._pass()
        if self._fails(envelope.payload):
            raise OSError("down")

    async def _pass(self) -> None:
        if self.gate is not None:
            await self.gate.wait()

    def _fails(self, payload: int) -> bool:
        if payload in self._shaky:
            self._shaky.remove(payload)
            return True
        return payload in self._bad


class Seat:
    """The desk of a replica of the dispatcher `billing`, and what it buries."""

    def __init__(self, handler: Any, *, batch: bool, remembered: int = 1_000, **options: Any) -> None:
        spec = DispatcherSpec("billing", handler, EVENT, batch=batch, **{"retry": ONCE, **options})
        self.metrics = MetricsRecorder()
        self.burials: list[Sequence[DeadLetter]] = []
        workers: Workers[Any] = Workers(spec.concurrency, lambda job: job[0].one(job[1]), lambda: None)
        self.desk = RowDesk(Dispatcher(spec), workers, self.metrics, remembered, self.burials.append)

    async def process(self, content: pa.Table, **marks: Any) -> list[Outcome]:
        """What became of each row."""
        part = part_of(content, **marks)
        return outcomes_of(await self.desk.process(part, content, "version"), len(part.codes))

    def begin(self, content: pa.Table, **marks: Any) -> "asyncio.Task[list[Outcome]]":
        return asyncio.create_task(self.process(content, **marks))

    def known(self, content: pa.Table) -> list[bool]:
        return list(map(bool, self.desk.known(part_of(content), content)))

    @property
    def letters(self) -> list[DeadLetter]:
        return [letter for letters in self.burials for letter in letters]

    @property
    def counts(self) -> DispatcherMetrics:
        found = self.metrics.snapshot().get_dispatcher_metrics("billing")
        assert found is not None
        return found


Sit = Callable[..., tuple[Log, Seat]]


@pytest.fixture(params=["bulk", "one"])
def sit(request: pytest.FixtureRequest) -> Sit:
    """A desk with a handler that notes what it sees: once of tables, and once of single messages."""

    def make(log: Log | None = None, **options: Any) -> tuple[Log, Seat]:
        log = log or Log()
        return log, Seat(getattr(log, request.param), batch=request.param == "bulk", **options)

    return make


def content_of(*payloads: int, **columns: Any) -> pa.Table:
    """Rows whose ids say what their payloads are."""
    ids = pa.array([id_of(payload).bytes for payload in payloads], pa.binary(16))
    return pa.table({"message_id": ids, "payload": pa.array(payloads, pa.int64()), **columns})


def id_of(payload: int) -> UUID:
    return UUID(int=payload * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128)


def part_of(content: pa.Table, rows: Sequence[int] | None = None, **marks: bool) -> RowPart:
    count = content.num_rows if rows is None else len(rows)
    positions = None if rows is None else np.array(rows, np.int64)
    return RowPart([RowKey(TOPIC, "Order")], ["route"], np.zeros(count, np.int32), positions, ["content"], **marks)


def outcomes_of(report: RowReport, count: int) -> list[Outcome]:
    assert len(report.durations_of(count)) == count
    return [report.kinds[code] for code in report.codes_of(count).tolist()]


def statuses_of(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.status.value for outcome in outcomes]


# Handling


def test_every_row_is_handled_and_its_outcome_stands_in_its_place(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(2, 4))

        outcomes = await seat.process(content_of(1, 2, 3, 4, 5))

        good, bad = "success", "dispatcher_error"
        assert statuses_of(outcomes) == [good, bad, good, bad, good]
        assert {(one.dispatcher_id, one.attempts, one.repeated) for one in outcomes} == {("billing", 1, False)}
        assert log.seen == [1, 2, 3, 4, 5]

    run(story())


def test_a_part_is_about_some_rows_of_its_content(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit()

        await seat.process(content_of(1, 2, 3, 4, 5), rows=[3, 0])

        assert log.seen == [4, 1]
        assert seat.known(content_of(1, 2, 3, 4, 5)) == [True, False, False, True, False]

    run(story())


@pytest.mark.parametrize(
    "cut",
    [lambda table: table.slice(2, 3), lambda table: pa.concat_tables([table.slice(2, 1), table.slice(3, 2)])],
    ids=["a slice", "chunks"],
)
def test_content_may_be_cut_in_any_way(sit: Sit, cut: Callable[[pa.Table], pa.Table]) -> None:
    async def story() -> None:
        log, seat = sit()

        await seat.process(cut(content_of(1, 2, 3, 4, 5, 6)))

        assert log.seen == [3, 4, 5]
        assert seat.known(content_of(1, 2, 3, 4, 5, 6)) == [False, False, True, True, True, False]

    run(story())


def test_a_batch_handler_gets_the_columns_of_a_batch() -> None:
    async def story() -> None:
        log = Log()
        seat = Seat(log.bulk, batch=True)
        content = content_of(1, 2, 3, key=["k", None, "l"])
        keys = [RowKey(TOPIC, "Order"), RowKey("dev.bill.events.v1", None)]
        part = RowPart(keys, ["x", "y"], np.array([0, 1, 0], np.int32), None, ["content"], resent=True)

        await seat.desk.process(part, content, "version")

        (table,) = log.tables
        columns = table.to_pydict()
        assert table.column_names == [*COLUMNS.names, "payload"]
        assert columns["topic"] == [TOPIC, "dev.bill.events.v1", TOPIC]
        assert columns["message_type"] == ["Order", None, "Order"]
        assert columns["key"] == ["k", None, "l"]
        assert columns["correlation_id"] == columns["message_id"] == [id_of(number).bytes for number in (1, 2, 3)]
        assert (columns["attempt"], columns["hops"], columns["encoding"]) == ([2] * 3, [0] * 3, [NATIVE] * 3)
        assert columns["headers"] == columns["traceparent"] == columns["causation_id"] == [None] * 3

    run(story())


def test_a_handler_of_single_messages_gets_envelopes() -> None:
    async def story() -> None:
        log = Log()
        seat = Seat(log.one, batch=False)
        traces = [None, f"00-{'a' * 32}-{'b' * 16}-01"]
        correlations = pa.array([id_of(7).bytes, id_of(8).bytes], pa.binary(16))
        content = content_of(1, 2, key=["k", None], traceparent=traces, correlation_id=correlations)
        keys = [RowKey(TOPIC, "Order"), RowKey(TOPIC, None)]
        part = RowPart(keys, ["x", "y"], np.array([0, 1], np.int32), None, ["content"], resent=True)

        await seat.desk.process(part, content, "version")

        first, second = log.envelopes
        assert (first.topic, first.message_type, first.key, first.payload) == (TOPIC, "Order", "k", 1)
        assert (first.message_id, first.correlation_id, first.attempt) == (id_of(1), id_of(7), 2)
        assert (second.message_type, second.key, second.traceparent) == ("int", None, traces[1])

    run(story())


def test_rows_of_a_handler_of_single_messages_run_at_once_as_far_as_it_allows() -> None:
    async def story() -> None:
        log = Log(gate=asyncio.Event())
        seat = Seat(log.one, batch=False, concurrency=3)

        processing = seat.begin(content_of(*range(8)))
        await until(lambda: len(log.seen) == 3)
        await turns()
        at_once = len(log.seen)
        assert log.gate is not None
        log.gate.set()
        await processing

        assert (at_once, len(log.seen)) == (3, 8)

    run(story())


class Order(BaseModel):
    number: int


def test_a_payload_that_does_not_fit_is_an_invalid_message_and_costs_the_others_nothing() -> None:
    async def story() -> None:
        seen: list[Order] = []

        async def handle(envelope: Envelope[Order]) -> None:
            seen.append(envelope.payload)

        seat = Seat(handle, batch=False)
        payloads = pa.array([{"number": "1"}, {"number": "x"}, {"number": "3"}])

        outcomes = await seat.process(content_of(1, 2, 3).set_column(1, "payload", payloads))

        assert statuses_of(outcomes) == ["success", "invalid_message", "success"]
        assert (outcomes[1].error_code, outcomes[1].attempts) == (ErrorCode.PAYLOAD_INVALID, 0)
        assert seen == [Order(number=1), Order(number=3)]
        assert [letter.envelope.payload for letter in seat.letters] == [{"number": "x"}]

    run(story())


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_handler_that_wants_to_exit_fails_like_any_other_and_costs_the_others_nothing(error: BaseException) -> None:
    async def story() -> None:
        async def handle(envelope: Envelope[Any]) -> None:
            if envelope.payload == 2:
                raise error

        outcomes = await Seat(handle, batch=False, breaker=None).process(content_of(1, 2, 3))

        assert statuses_of(outcomes) == ["success", "dispatcher_error", "success"]
        assert outcomes[1].error_type == type(error).__name__

    run(story())


def test_rows_are_refused_while_the_circuit_is_open(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(1), breaker=BreakerSettings(failure_threshold=1))
        await seat.process(content_of(1))

        outcomes = await seat.process(content_of(2, 3))

        assert statuses_of(outcomes) == ["circuit_open"] * 2
        assert log.seen == [1]
        assert seat.counts.refused_count == 2
        assert seat.known(content_of(2, 3)) == [False, False]

    run(story())


# Repeats


def test_a_repeat_is_answered_from_memory_and_counted_once(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit()
        await seat.process(content_of(1, 2, 3))

        outcomes = await seat.process(content_of(3, 1))

        assert [(one.status, one.repeated) for one in outcomes] == [(DispatchStatus.SUCCESS, True)] * 2
        assert log.seen == [1, 2, 3]
        assert seat.counts.success_count == 3

    run(story())


def test_a_stranger_among_repeats_is_handled(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit()
        await seat.process(content_of(1, 2))

        outcomes = await seat.process(content_of(1, 7, 2, 8))

        assert [one.repeated for one in outcomes] == [True, False, True, False]
        assert log.seen == [1, 2, 7, 8]
        assert seat.counts.success_count == 4

    run(story())


def test_a_row_that_failed_is_handled_when_it_comes_again(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(shaky=[2]))
        first = await seat.process(content_of(1, 2))

        second = await seat.process(content_of(1, 2))

        assert statuses_of(first) == ["success", "dispatcher_error"]
        assert [(one.status.value, one.repeated) for one in second] == [("success", True), ("success", False)]
        assert log.seen == [1, 2, 2]

    run(story())


def test_a_replica_knows_the_rows_that_it_has_handled_and_those_that_run(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(3))
        await seat.process(content_of(1, 3))
        log.gate = asyncio.Event()

        processing = seat.begin(content_of(2))
        await until(lambda: 2 in log.seen)
        known = seat.known(content_of(1, 2, 3, 4))
        log.gate.set()
        await processing

        assert known == [True, True, False, False]

    run(story())


def test_a_part_that_comes_again_waits_for_those_of_its_rows_that_run(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(gate=asyncio.Event()))
        assert log.gate is not None

        first = seat.begin(content_of(1, 2))
        await until(lambda: len(log.seen) == 2)
        again = seat.begin(content_of(2, 3), resent=True)
        await turns()
        meanwhile = list(log.seen)
        log.gate.set()

        assert meanwhile == [1, 2]
        assert [one.repeated for one in await again] == [True, False]
        assert [one.repeated for one in await first] == [False, False]
        assert log.seen == [1, 2, 3]

    run(story())


def test_a_part_that_comes_again_waits_for_no_stranger(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(gate=asyncio.Event()))
        assert log.gate is not None

        running = [seat.begin(content_of(1, 2)), seat.begin(content_of(3), resent=True)]
        await until(lambda: log.seen == [1, 2, 3])
        log.gate.set()

        assert [statuses_of(outcomes) for outcomes in await asyncio.gather(*running)] == [["success"] * 2, ["success"]]

    run(story())


def test_of_two_parts_that_come_again_only_one_runs_at_a_time(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(shaky=[1], gate=asyncio.Event()))
        assert log.gate is not None
        first = seat.begin(content_of(1))
        await until(lambda: log.seen == [1])

        again = [seat.begin(content_of(1), resent=True) for _ in range(2)]
        await turns()
        log.gate.set()
        log.gate = asyncio.Event()
        await first
        await turns()
        meanwhile = list(log.seen)
        log.gate.set()

        assert sorted(one.repeated for (one,) in await asyncio.gather(*again)) == [False, True]
        assert meanwhile == log.seen == [1, 1]

    run(story())


def test_at_most_once_means_that_a_row_that_comes_again_is_not_run_again_though_it_failed(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(1, gate=asyncio.Event()), at_most_once=True)
        assert log.gate is not None

        first = seat.begin(content_of(1))
        await until(lambda: log.seen == [1])
        again = seat.begin(content_of(1), resent=True)
        await turns()
        log.gate.set()

        assert statuses_of(await first + await again) == ["dispatcher_error"] * 2
        assert log.seen == [1]

    run(story())


def test_a_part_whose_handling_is_cancelled_leaves_nothing_under_way(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(gate=asyncio.Event()))

        processing = seat.begin(content_of(1))
        await until(lambda: log.seen == [1])
        processing.cancel()
        await asyncio.wait([processing])

        assert seat.known(content_of(1)) == [False]

    run(story())


# Dead letters


def test_rows_that_failed_are_dead_letters(sit: Sit) -> None:
    async def story() -> None:
        _, seat = sit(Log(2, 4))

        outcomes = await seat.process(content_of(1, 2, 3, 4, 5), rows=[1, 2, 3])

        assert [(letter.topic, letter.envelope.payload) for letter in seat.letters] == [(TOPIC, 2), (TOPIC, 4)]
        assert [letter.envelope.message_id for letter in seat.letters] == [id_of(2), id_of(4)]
        assert {letter.outcome._replace(route_id=None) for letter in seat.letters} == {outcomes[0]}
        assert all(letter.outcome.route_id for letter in seat.letters)
        assert all(letter.table_version == "version" for letter in seat.letters)
        assert all(letter.first_at <= letter.last_at for letter in seat.letters)

    run(story())


@pytest.mark.parametrize("status", ["success", "skipped", "circuit_open", "publish_failed", "timeout"])
def test_only_what_failed_for_good_is_a_dead_letter(status: str) -> None:
    async def story() -> None:
        async def handle(table: pa.Table) -> list[str]:
            return [status] * table.num_rows

        seat = Seat(handle, batch=True)

        await seat.process(content_of(1, 2))

        assert len(seat.letters) == (2 if status == "timeout" else 0)

    run(story())


def test_of_too_many_dead_letters_the_last_ones_are_kept(sit: Sit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(row_desk, "MOST_LETTERS", 2)
        _, seat = sit(Log(1, 2, 4))

        await seat.process(content_of(1, 2, 3, 4))

        assert [letter.envelope.payload for letter in seat.letters] == [2, 4]

    run(story())


def test_a_repeat_makes_no_second_dead_letter_of_another_row(sit: Sit) -> None:
    async def story() -> None:
        _, seat = sit(Log(2))
        await seat.process(content_of(1, 2))

        await seat.process(content_of(1, 3))

        assert [letter.envelope.payload for letter in seat.letters] == [2]

    run(story())


def test_rows_that_succeed_at_the_second_try_bury_nobody() -> None:
    async def story() -> None:
        seat = Seat(Log(shaky=[1]).bulk, batch=True, retry=TWICE)

        outcomes = await seat.process(content_of(1, 2))

        assert statuses_of(outcomes) == ["success"] * 2
        assert seat.burials == []

    run(story())


# Metrics


def test_rows_are_counted_by_what_became_of_them(sit: Sit) -> None:
    async def story() -> None:
        _, seat = sit(Log(2, 4), breaker=None)

        await seat.process(content_of(1, 2, 3, 4, 5))

        counts = seat.counts
        assert counts.statuses == {DispatchStatus.SUCCESS: 3, DispatchStatus.DISPATCHER_ERROR: 2}
        assert (counts.execution_count, counts.refused_count, counts.latency.count) == (5, 0, 5)
        assert counts.last_error_message is not None

    run(story())


def test_a_row_is_counted_once_however_often_it_was_tried(sit: Sit) -> None:
    async def story() -> None:
        log, seat = sit(Log(shaky=[2]), retry=TWICE)

        outcomes = await seat.process(content_of(1, 2))

        assert [one.attempts for one in outcomes] == [1, 2]
        assert log.seen == [1, 2, 2]
        assert (seat.counts.success_count, seat.counts.error_count, seat.counts.execution_count) == (2, 0, 2)

    run(story())


@pytest.mark.parametrize("log", [Log(shaky=[1]), Log(1)], ids=["a first try", "a success"])
def test_what_no_row_ended_with_is_not_in_the_metrics(log: Log) -> None:
    async def story() -> None:
        seat = Seat(log.bulk, batch=True, retry=TWICE)

        (outcome,) = await seat.process(content_of(1))

        assert seat.counts.statuses == {outcome.status: 1}
        assert seat.counts.last_error_message == outcome.error_message

    run(story())


def test_a_status_that_a_dictionary_has_and_no_row_does_no_harm() -> None:
    async def story() -> None:
        def handle(table: pa.Table) -> pa.Array:
            return pa.DictionaryArray.from_arrays([0] * table.num_rows, ["success", "dispatcher_error"])

        seat = Seat(handle, batch=True)

        outcomes = await seat.process(content_of(1, 2))

        assert statuses_of(outcomes) == ["success"] * 2
        assert seat.counts.statuses == {DispatchStatus.SUCCESS: 2}

    run(story())

"""Batch handlers: one call for what runs at the same time, one outcome for each message."""

import asyncio
import threading
from typing import Any

import pyarrow as pa
import pytest

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.middleware import Next
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.errors import ErrorCode, InvalidTable
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import RetrySettings

TOPIC = "dev.order.events.v1"


def engine_with(handler: Any, **options: Any) -> DispatchEngine:
    engine = DispatchEngine()
    options.setdefault("retry", None)
    engine.dispatcher("bulk", topics="**", category=MessageCategory.EVENT, batch=True, **options)(handler)
    return engine


def dispatched(engine: DispatchEngine, payloads: list[Any]) -> list[DispatchResult]:
    async def run() -> list[DispatchResult]:
        engine.freeze()
        return await asyncio.gather(*(engine.dispatch(TOPIC, Envelope(payload, "Order")) for payload in payloads))

    return asyncio.run(run())


def test_messages_that_run_at_the_same_time_share_a_table() -> None:
    tables: list[pa.Table] = []

    async def handle(table: pa.Table) -> None:
        tables.append(table)

    results = dispatched(engine_with(handle), [{"n": i} for i in range(50)])

    assert {result.status for result in results} == {DispatchStatus.SUCCESS}
    assert [table.num_rows for table in tables] == [50]
    assert tables[0]["topic"].unique().to_pylist() == [TOPIC]
    assert tables[0]["payload"][7].as_py() == b'{"n":7}'


def test_a_lone_message_is_a_table_of_one() -> None:
    sizes = []

    def handle(table: pa.Table) -> None:
        sizes.append(table.num_rows)

    (result,) = dispatched(engine_with(handle), ["hello"])

    assert result.is_successful()
    assert sizes == [1]


def test_only_the_rows_that_failed_are_tried_again() -> None:
    seen: list[list[bytes]] = []

    async def handle(table: pa.Table) -> list[str]:
        payloads = table["payload"].to_pylist()
        seen.append(payloads)
        return ["dispatcher_error" if payload == b"bad" and len(seen) == 1 else "success" for payload in payloads]

    engine = engine_with(handle, retry=RetrySettings(tries=2, first_delay_seconds=0))
    results = dispatched(engine, [b"good", b"bad", b"fine"])

    assert seen == [[b"good", b"bad", b"fine"], [b"bad"]]
    assert [result.outcomes[0].attempts for result in results] == [1, 2, 1]
    assert all(result.is_successful() for result in results)


def test_each_row_has_its_own_status() -> None:
    async def handle(table: pa.Table) -> list[DispatchStatus]:
        return [DispatchStatus.SUCCESS, DispatchStatus.DISPATCHER_ERROR, DispatchStatus.SKIPPED]

    results = dispatched(engine_with(handle), [1, 2, 3])

    assert [result.status for result in results] == [
        DispatchStatus.SUCCESS,
        DispatchStatus.DISPATCHER_ERROR,
        DispatchStatus.SKIPPED,
    ]


def test_one_payload_that_is_no_data_costs_the_others_nothing() -> None:
    async def handle(table: pa.Table) -> None:
        assert table.num_rows == 2

    results = dispatched(engine_with(handle), [1, threading.Lock(), 3])

    assert [result.status for result in results] == [
        DispatchStatus.SUCCESS,
        DispatchStatus.INVALID_MESSAGE,
        DispatchStatus.SUCCESS,
    ]
    assert results[1].error_code is ErrorCode.PAYLOAD_INVALID


@pytest.mark.parametrize("output", [["success"], 7, ["success", "no status"]])
def test_an_output_that_cannot_be_read_fails_all_rows(output: Any) -> None:
    async def handle(table: pa.Table) -> Any:
        return output

    results = dispatched(engine_with(handle), [1, 2])

    assert {result.status for result in results} == {DispatchStatus.DISPATCHER_ERROR}


def test_an_exception_fails_all_rows() -> None:
    def handle(table: pa.Table) -> None:
        raise ConnectionError("down")

    results = dispatched(engine_with(handle), [1, 2])

    assert [result.error_code for result in results] == [ErrorCode.HANDLER_EXCEPTION] * 2


def test_a_class_is_built_once_and_takes_tables() -> None:
    class Bulk:
        built = 0

        def __init__(self) -> None:
            Bulk.built += 1

        async def handle(self, table: pa.Table) -> None:
            assert table.num_rows == 3

    results = dispatched(engine_with(Bulk), [1, 2, 3])

    assert all(result.is_successful() for result in results)
    assert Bulk.built == 1


def test_no_middleware_goes_with_batches() -> None:
    async def passing(envelope: Envelope[Any], following: Next) -> Any:
        return await following(envelope)

    async def handle(table: pa.Table) -> None: ...

    engine = engine_with(handle)
    engine.add_middleware(passing)

    with pytest.raises(InvalidTable, match="'bulk' takes batches"):
        engine.freeze()

"""The conformance suite: what an engine promises, whatever runs it. Run it on your own cluster before you trust it.

Example, as a test::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_cluster(check):
        check(DispatchSystem.start)
"""

import asyncio
from collections import Counter
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.outcome import DispatchStatus, Reply
from raydispatch.errors import ErrorCode, RequestFailed, RequestTimeout
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, RetrySettings
from raydispatch.testing.runtimes import Start

EVENT, COMMAND, INTENT = MessageCategory.EVENT, MessageCategory.COMMAND, MessageCategory.INTENT
TOPIC = "dev.order.events.v1"


class _Order(BaseModel):
    number: int


def a_message_goes_to_all_that_fit_in_order(start: Start) -> None:
    """By priority, then by how exact the pattern is; each dispatcher once."""
    engine = DispatchEngine("conformance-order")
    for name, topics, priority in (
        ("wide", "**", 0),
        ("exact", TOPIC, 0),
        ("glob", ["*.order.events.*", "dev.**"], 0),
        ("first", "dev.**", 5),
    ):
        engine.dispatcher(name, topics=topics, category=EVENT, priority=priority)(_nothing)
    with start(engine) as runtime:
        result = runtime.dispatch(TOPIC, Envelope({}, "Order"))

    assert result.status is DispatchStatus.SUCCESS
    assert [outcome.dispatcher_id for outcome in result.outcomes] == ["first", "exact", "glob", "wide"]
    assert (result.dispatcher_id, result.route_id, result.table_version) == ("first", "first", engine.table.version)


def payloads_are_checked_before_the_handler_runs(start: Start) -> None:
    """One that does not fit is INVALID_MESSAGE, without its content."""

    async def handle(envelope: Envelope[_Order]) -> Reply:
        return Reply(envelope.payload.number)

    engine = DispatchEngine("conformance-payloads")
    engine.dispatcher("typed", topics="**", category=EVENT)(handle)
    with start(engine) as runtime:
        good = [
            runtime.dispatch(TOPIC, Envelope(payload, "Order"))
            for payload in ({"number": 7}, '{"number": 7}', b'{"number": 7}', _Order(number=7))
        ]
        bad = runtime.dispatch(TOPIC, Envelope({"number": "secret words"}, "Order"))

    assert [result.reply for result in good] == [Reply(7)] * 4
    assert (bad.status, bad.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID)
    assert "secret words" not in str(bad.error_message)


def what_a_message_can_cause_is_an_outcome(start: Start) -> None:
    """No dispatcher, no category, a failing handler: never an exception."""
    engine = DispatchEngine("conformance-outcomes")
    engine.dispatcher("broken", topics="*.broken.events.*", category=EVENT, retry=None)(_fails)
    engine.dispatcher("sound", topics="*.broken.events.*", category=EVENT)(_nothing)
    with start(engine) as runtime:
        nobody = runtime.dispatch(TOPIC, Envelope({}))
        nothing = runtime.dispatch("dev.order.v1", Envelope({}))
        failed = runtime.dispatch("dev.broken.events.v1", Envelope({}))

    assert (nobody.status, nobody.error_code) == (DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER)
    assert (nothing.status, nothing.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC)
    assert failed.status is DispatchStatus.DISPATCHER_ERROR
    statuses = {outcome.dispatcher_id: outcome.status for outcome in failed.outcomes}
    assert statuses == {"broken": DispatchStatus.DISPATCHER_ERROR, "sound": DispatchStatus.SUCCESS}
    assert "hunter2" not in repr(failed)


def failures_are_tried_again_and_counted(start: Start) -> None:
    """The attempt stands in the envelope, and in the outcome."""

    async def second_time(envelope: Envelope[object]) -> None:
        if envelope.attempt < 2:
            raise ConnectionError("not yet")

    engine = DispatchEngine("conformance-tries")
    retry = RetrySettings(tries=3, first_delay_seconds=0.001, max_delay_seconds=0.01)
    engine.dispatcher("flaky", topics="*.flaky.events.*", category=EVENT, retry=retry)(second_time)
    engine.dispatcher("broken", topics="*.broken.events.*", category=EVENT, retry=retry, breaker=None)(_fails)
    with start(engine) as runtime:
        flaky = runtime.dispatch("dev.flaky.events.v1", Envelope({}))
        broken = runtime.dispatch("dev.broken.events.v1", Envelope({}))

    assert (flaky.status, flaky.outcomes[0].attempts) == (DispatchStatus.SUCCESS, 2)
    assert (broken.status, broken.outcomes[0].attempts) == (DispatchStatus.DISPATCHER_ERROR, 3)


def a_breaker_stops_calls_to_what_keeps_failing(start: Start) -> None:
    """Once open, messages end as CIRCUIT_OPEN, and nothing runs."""
    engine = DispatchEngine("conformance-breaker")
    breaker = BreakerSettings(failure_threshold=3, reset_after_seconds=600)
    engine.dispatcher("broken", topics="**", category=EVENT, retry=None, breaker=breaker)(_fails)
    with start(engine) as runtime:
        results = [runtime.dispatch(TOPIC, Envelope(number, "Order")) for number in range(20)]

    statuses = Counter(result.status for result in results)
    assert set(statuses) == {DispatchStatus.DISPATCHER_ERROR, DispatchStatus.CIRCUIT_OPEN}
    # One more may be on its way while the word spreads over a cluster.
    assert 3 <= statuses[DispatchStatus.DISPATCHER_ERROR] <= 4
    assert results[-1].outcomes[0].attempts == 0


def a_time_limit_ends_what_hangs(start: Start) -> None:
    """And the others go on."""

    async def hang(envelope: Envelope[object]) -> None:
        if envelope.payload == 1:
            await asyncio.Event().wait()

    engine = DispatchEngine("conformance-limits")
    engine.dispatcher("slow", topics="**", category=EVENT, retry=None, time_limit_seconds=0.2)(hang)
    with start(engine) as runtime:
        results = list(runtime.dispatch_many((TOPIC, Envelope(number, "Order")) for number in range(3)))

    success = DispatchStatus.SUCCESS
    assert [result.status for result in results] == [success, DispatchStatus.TIMEOUT, success]


def a_command_has_one_dispatcher_and_a_reply(start: Start) -> None:
    """`execute` refuses what is no command."""
    engine = DispatchEngine("conformance-commands")
    engine.dispatcher("exact", topics="shop.commands.take", category=COMMAND)(_echo)
    engine.dispatcher("other", topics="shop.**", category=COMMAND)(_fails)
    with start(engine) as runtime:
        result = runtime.execute("shop.commands.take", Envelope("tea"))
        refused = runtime.execute(TOPIC, Envelope("tea"))

    assert (result.status, result.reply) == (DispatchStatus.SUCCESS, Reply("tea"))
    assert [outcome.dispatcher_id for outcome in result.outcomes] == ["exact"]
    assert (refused.status, refused.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.NOT_A_COMMAND)


def a_request_gets_its_reply_from_wherever_it_comes(start: Start) -> None:
    """From its handler, from further down the chain, or not at all."""
    engine = DispatchEngine("conformance-requests")
    engine.dispatcher("direct", topics="ask.intents.direct", category=INTENT)(_echo)
    engine.dispatcher("passes-on", topics="ask.intents.chain", category=INTENT)(_passes_on)
    engine.dispatcher("silent", topics="ask.intents.silent", category=INTENT)(_nothing)
    with start(engine) as runtime:
        direct = runtime.request("ask.intents.direct", Envelope("one"), timeout=30)
        chained = runtime.request("ask.intents.chain", Envelope("two"), timeout=30)
        errors = [
            _error(runtime.request, "ask.intents.silent", Envelope("three"), 0.2),
            _error(runtime.request, "ask.intents.nobody", Envelope("four"), 30),
        ]

    assert (direct, chained) == (Reply("one"), Reply("two"))
    assert errors == [RequestTimeout, RequestFailed]


def published_messages_are_delivered(start: Start) -> None:
    """The receipt comes at once; `drain` waits for the rest."""
    engine = DispatchEngine("conformance-publishing")
    engine.dispatcher("sound", topics="**", category=EVENT)(_nothing)
    with start(engine) as runtime:
        receipts = [runtime.publish(TOPIC, Envelope(number, "Order")) for number in range(100)]
        invalid = runtime.publish("no.category", Envelope({}))
        runtime.drain()

    assert {receipt.status for receipt in receipts} == {DispatchStatus.ROUTED}
    assert invalid.status is DispatchStatus.INVALID_MESSAGE


def many_messages_end_once_each_in_order(start: Start) -> None:
    """One bad message costs the others nothing."""
    engine = DispatchEngine("conformance-many")
    engine.dispatcher("typed", topics="**", category=EVENT, retry=None)(_only_even)
    with start(engine) as runtime:
        envelopes: list[Envelope[Any]] = [Envelope({"number": number}, "Order") for number in range(501)]
        envelopes[250] = Envelope({"number": "no number"}, "Order")
        results = list(runtime.dispatch_many((TOPIC, envelope) for envelope in envelopes))

    assert [result.correlation_id for result in results] == [envelope.correlation_id for envelope in envelopes]
    statuses = Counter(result.status for result in results)
    assert statuses == Counter({DispatchStatus.SUCCESS: 500, DispatchStatus.INVALID_MESSAGE: 1})


def batch_handlers_get_tables(start: Start) -> None:
    """And one status for each row comes back."""

    async def bulk(table: pa.Table) -> list[str]:
        return ["skipped" if payload == b"no" else "success" for payload in table["payload"].to_pylist()]

    engine = DispatchEngine("conformance-batches")
    engine.dispatcher("bulk", topics="**", category=EVENT, batch=True)(bulk)
    with start(engine) as runtime:
        payloads = [b"yes", b"no"] * 50
        results = list(runtime.dispatch_many((TOPIC, Envelope(payload, "Order")) for payload in payloads))

    assert [result.status.value for result in results] == ["success", "skipped"] * 50


CHECKS = (
    a_message_goes_to_all_that_fit_in_order,
    payloads_are_checked_before_the_handler_runs,
    what_a_message_can_cause_is_an_outcome,
    failures_are_tried_again_and_counted,
    a_breaker_stops_calls_to_what_keeps_failing,
    a_time_limit_ends_what_hangs,
    a_command_has_one_dispatcher_and_a_reply,
    a_request_gets_its_reply_from_wherever_it_comes,
    published_messages_are_delivered,
    many_messages_end_once_each_in_order,
    batch_handlers_get_tables,
)
"""Every check; each takes a `Start` and raises `AssertionError` where a promise is not kept."""


async def _nothing(envelope: Envelope[object]) -> None:
    return None


async def _fails(envelope: Envelope[object]) -> None:
    raise ConnectionError("refused, password=hunter2")


async def _echo(envelope: Envelope[object]) -> Reply:
    return Reply(envelope.payload)


async def _passes_on(envelope: Envelope[object]) -> str:
    return "ask.intents.direct"


async def _only_even(envelope: Envelope[_Order]) -> None:
    assert envelope.payload.number >= 0


def _error(call: Any, *arguments: object) -> type[Exception] | None:
    try:
        call(*arguments)
    except Exception as error:
        return type(error)
    return None

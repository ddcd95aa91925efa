import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from raydispatch import (
    DispatchEngine,
    DispatchResult,
    DispatchRoute,
    DispatchStatus,
    EngineSettings,
    Envelope,
    MessageCategory,
)
from raydispatch.bus.filters import not_types
from raydispatch.dispatch.middleware import Next
from raydispatch.dispatch.outcome import Outcome
from raydispatch.errors import InvalidParameter, NotRegistered
from raydispatch.testing import FakeClock, FaultInjector, RecordingHandler, double

TOPIC = "dev.order.events.v1"


def make_engine(**options: Any) -> DispatchEngine:
    engine = DispatchEngine("orders", **options)

    @engine.dispatcher(
        "billing", topics="*.order.events.*", category=MessageCategory.EVENT, message_types={"OrderPlaced"}, priority=5
    )
    async def bill(envelope: Envelope[dict[str, int]]) -> str:
        return "dev.invoice.events.v1"

    @engine.dispatcher("audit", topics="*.order.**", category=MessageCategory.EVENT, breaker=None, replicas=2)
    def audit(envelope: Envelope[object]) -> None: ...

    return engine


def order(payload: object = None) -> Envelope[Any]:
    return Envelope({"order_id": 7} if payload is None else payload, message_type="OrderPlaced")


def run(work: Coroutine[Any, Any, DispatchResult]) -> DispatchResult:
    return asyncio.run(work)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_double_has_the_same_table_and_the_same_rules(frozen: bool) -> None:
    engine = make_engine(settings=EngineSettings(max_hops=3))
    if frozen:
        engine.freeze()

    twin = double(engine)

    assert (twin.name, twin.settings) == (engine.name, engine.settings)
    assert not twin.is_frozen
    assert twin.freeze().version == engine.freeze().version
    assert list(twin.registry.dispatchers()) == list(engine.registry.dispatchers())


def test_what_happens_to_the_double_leaves_the_engine_alone() -> None:
    engine = make_engine()
    engine.freeze()
    recorder = RecordingHandler()

    twin = double(engine)
    twin.register_dispatcher("probe", recorder, MessageCategory.EVENT)
    twin.register_route(
        DispatchRoute(
            route_id="probe", topic_pattern="**", message_category=MessageCategory.EVENT, dispatcher_id="probe"
        )
    )
    twin.freeze()
    result = run(twin.dispatch(TOPIC, order()))

    assert {outcome.dispatcher_id for outcome in result.outcomes} == {"billing", "audit", "probe"}
    assert recorder.payloads[0] == {"order_id": 7}
    assert engine.dispatcher_count == 2
    assert engine.get_structured_metrics().total_dispatches == 0


def test_handlers_are_replaced_by_id() -> None:
    recorder = RecordingHandler(returns="other.events")

    twin = double(make_engine(), replace={"billing": recorder})
    twin.freeze()
    result = run(twin.dispatch(TOPIC, order()))

    assert list(result.outputs) == ["other.events"]
    assert recorder.payloads == [{"order_id": 7}]


def test_an_unknown_id_cannot_be_replaced() -> None:
    with pytest.raises(NotRegistered, match="no dispatcher 'biling'"):
        double(make_engine(), replace={"biling": RecordingHandler()})


def test_what_is_no_handler_cannot_stand_in_for_one() -> None:
    replace: Any = {"billing": "nothing to call"}

    with pytest.raises(InvalidParameter):
        double(make_engine(), replace=replace)


def test_faults_strike_all_handlers_stand_ins_included() -> None:
    faults, recorder, clock = FaultInjector(), RecordingHandler(), FakeClock()
    faults.fail(times=2)
    faults.drop_ack(dispatcher="audit", times=1)

    async def send() -> DispatchResult:
        twin = double(make_engine(), clock=clock, faults=faults, replace={"audit": recorder})
        twin.freeze()
        return await clock.run(twin.dispatch(TOPIC, order()))

    result = run(send())

    assert [outcome.attempts for outcome in result.outcomes] == [3, 2]
    assert [envelope.attempt for envelope in recorder.envelopes] == [1, 2]


def test_payloads_are_still_checked_under_faults() -> None:
    twin = double(make_engine(), faults=FaultInjector())
    twin.freeze()

    result = run(twin.dispatch(TOPIC, order({"order_id": "seven"})))

    assert result.status is DispatchStatus.INVALID_MESSAGE


def test_middleware_and_filters_come_along() -> None:
    seen: list[str] = []

    async def watch(envelope: Envelope[Any], following: Next) -> Outcome:
        seen.append(following.dispatcher_id)
        return await following(envelope)

    engine = make_engine()
    engine.add_middleware(watch)
    engine.add_filter(not_types("Secret"))

    async def use() -> DispatchStatus:
        async with double(engine) as twin:
            await twin.dispatch(TOPIC, order())
            return (await twin.publish(TOPIC, Envelope(1, message_type="Secret"))).status

    assert asyncio.run(use()) is DispatchStatus.SKIPPED
    assert seen == ["billing", "audit"]


@pytest.mark.parametrize("own", [True, False])
def test_results_of_published_messages_are_told_to_the_engines_listener_or_to_ones_own(own: bool) -> None:
    theirs: list[DispatchResult] = []
    mine: list[DispatchResult] = []
    engine = make_engine(on_result=theirs.append)

    async def use() -> None:
        async with double(engine, on_result=mine.append if own else None) as twin:
            await twin.publish(TOPIC, order())
            await twin.drain()

    asyncio.run(use())

    assert sorted(result.topic for result in (mine if own else theirs)) == ["dev.invoice.events.v1", TOPIC]
    assert not (theirs if own else mine)


def test_settings_can_be_others() -> None:
    twin = double(make_engine(), settings=EngineSettings(max_payload_bytes=1))
    twin.freeze()

    assert run(twin.dispatch(TOPIC, order("too long"))).status is DispatchStatus.INVALID_MESSAGE

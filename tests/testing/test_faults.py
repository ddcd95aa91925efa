import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from raydispatch import CircuitState, DispatchEngine, DispatchResult, DispatchStatus, Envelope, MessageCategory
from raydispatch.dispatch.handler import HandlerSource
from raydispatch.errors import DispatchError, EndpointLost, InvalidParameter
from raydispatch.settings import RetrySettings
from raydispatch.testing import AckLost, FakeClock, FaultInjector, RecordingHandler

AT_ONCE = RetrySettings(tries=3, first_delay_seconds=0)


def make_engine(faults: FaultInjector, source: HandlerSource, **options: Any) -> DispatchEngine:
    engine = DispatchEngine()
    register = engine.dispatcher(
        "billing", topics="a.events", category=MessageCategory.EVENT, **{"retry": AT_ONCE, "breaker": None, **options}
    )
    register(faults.wrap("billing", source))
    engine.freeze()
    return engine


def send(engine: DispatchEngine, payloads: Sequence[object] = ("one",)) -> list[DispatchResult]:
    async def run() -> list[DispatchResult]:
        return [await engine.dispatch("a.events", Envelope(payload)) for payload in payloads]

    return asyncio.run(run())


def test_without_rules_nothing_changes() -> None:
    recorder = RecordingHandler()

    (result,) = send(make_engine(FaultInjector(), recorder))

    assert result.is_successful()
    assert recorder.payloads == ["one"]


def test_a_failure_strikes_so_often_and_then_not() -> None:
    faults, recorder = FaultInjector(seed=7), RecordingHandler()
    rule = faults.fail(dispatcher="billing", times=2)

    first, second = send(make_engine(faults, recorder), ["one", "two"])

    assert [first.outcomes[0].attempts, second.outcomes[0].attempts] == [3, 1]
    assert [envelope.attempt for envelope in recorder.envelopes] == [3, 1]
    assert faults.counts == {"fail billing": 2}
    assert rule.struck == 2


def test_the_error_can_be_chosen() -> None:
    faults = FaultInjector()
    faults.fail(error=ConnectionError("down"))

    (result,) = send(make_engine(faults, RecordingHandler()))

    assert (result.outcomes[0].error_type, result.error_message) == (
        "ConnectionError",
        "billing: ConnectionError: down",
    )


def test_a_lost_endpoint_can_be_played() -> None:
    faults, recorder = FaultInjector(), RecordingHandler()
    faults.fail(error=EndpointLost, times=1)

    engine = make_engine(faults, recorder, replicas=2)
    (result,) = send(engine)

    assert (result.status, result.outcomes[0].attempts) == (DispatchStatus.SUCCESS, 1)
    assert sorted(info.state for info in engine.endpoints.find()) == ["healthy", "quarantined"]


def test_rules_added_later_hold_for_what_is_wrapped_already() -> None:
    faults = FaultInjector()
    engine = make_engine(faults, RecordingHandler())

    (before,) = send(engine)
    faults.fail()
    (after,) = send(engine)

    assert before.is_successful()
    assert after.status is DispatchStatus.DISPATCHER_ERROR


def test_a_lost_acknowledgement_makes_the_handler_run_again() -> None:
    faults, recorder = FaultInjector(), RecordingHandler()
    faults.drop_ack(dispatcher="billing", times=1)

    (result,) = send(make_engine(faults, recorder))

    assert result.is_successful()
    assert [envelope.attempt for envelope in recorder.envelopes] == [1, 2]
    assert len({envelope.message_id for envelope in recorder.envelopes}) == 1


def test_without_another_try_the_loss_is_the_outcome() -> None:
    faults, recorder = FaultInjector(), RecordingHandler(returns="next.events")
    faults.drop_ack()

    (result,) = send(make_engine(faults, recorder, retry=None))

    assert (result.outcomes[0].error_type, list(result.outputs)) == ("AckLost", [])
    assert len(recorder.envelopes) == 1


def test_a_handler_that_fails_has_no_acknowledgement_to_lose() -> None:
    faults = FaultInjector()
    faults.drop_ack()

    def fail(envelope: Envelope[Any]) -> None:
        raise OSError("down")

    (result,) = send(make_engine(faults, fail))

    assert result.outcomes[0].error_type == "OSError"
    assert faults.counts == {"drop_ack": 0}


def test_the_loss_survives_the_wire() -> None:
    copy = pickle.loads(pickle.dumps(AckLost("billing")))

    assert issubclass(AckLost, DispatchError)
    assert copy.dispatcher_id == "billing"
    assert str(copy) == "The acknowledgement of 'billing' was lost on purpose, after its handler had run."


def record_sync(recorder: RecordingHandler) -> HandlerSource:
    def handle(envelope: Envelope[Any]) -> None:
        recorder.envelopes.append(envelope)

    return handle


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_delay_goes_by_the_clock(kind: str) -> None:
    clock, recorder = FakeClock(), RecordingHandler()
    faults = FaultInjector(clock=clock)
    faults.delay(30, dispatcher="billing", times=1)
    engine = make_engine(faults, recorder if kind == "async" else record_sync(recorder))

    async def run() -> int:
        sending = asyncio.create_task(engine.dispatch("a.events", Envelope(1)))
        await clock.wait_for_sleepers(1)
        await clock.advance(29)
        early = len(recorder.envelopes)
        await clock.advance(1)
        await sending
        return early

    assert asyncio.run(run()) == 0
    assert len(recorder.envelopes) == 1


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_without_a_clock_a_delay_is_real(kind: str) -> None:
    faults, recorder = FaultInjector(), RecordingHandler()
    faults.delay(0.02)

    (result,) = send(make_engine(faults, recorder if kind == "async" else record_sync(recorder)))

    assert result.is_successful()
    assert result.duration_ms >= 20


def test_rules_strike_in_the_order_in_which_they_were_added() -> None:
    clock = FakeClock()
    faults = FaultInjector(clock=clock)
    faults.delay(5)
    faults.fail(times=1)
    faults.delay(100)

    async def run() -> DispatchResult:
        engine = make_engine(faults, RecordingHandler())
        return await clock.run(engine.dispatch("a.events", Envelope(1)))

    result = asyncio.run(run())

    assert result.is_successful()
    assert clock.now() == 5 + 5 + 100
    assert faults.counts == {"delay": 2, "fail": 1, "delay (rule 3)": 1}


def test_names_tell_rules_apart() -> None:
    faults = FaultInjector()

    faults.fail(dispatcher="billing", message_type="OrderPlaced")
    faults.fail(dispatcher="billing")
    faults.fail(dispatcher="billing")
    faults.drop_ack(dispatcher="billing")

    assert list(faults.counts) == [
        "fail billing OrderPlaced",
        "fail billing",
        "fail billing (rule 3)",
        "drop_ack billing",
    ]


def test_the_same_seed_gives_the_same_faults() -> None:
    def statuses(seed: int) -> list[DispatchStatus]:
        faults = FaultInjector(seed)
        faults.fail(share=0.5)
        faults.drop_ack(share=0.2)
        engine = make_engine(faults, RecordingHandler(), retry=None)
        return [result.status for result in send(engine, range(50))]

    assert statuses(7) == statuses(7)
    assert statuses(7) != statuses(8)


def test_faults_open_the_circuit_like_real_ones() -> None:
    faults = FaultInjector()
    faults.fail()

    def handle(envelope: Envelope[Any]) -> None: ...

    engine = DispatchEngine()
    engine.dispatcher("billing", topics="a.events", category=MessageCategory.EVENT, retry=None)(
        faults.wrap("billing", handle)
    )
    engine.freeze()
    results = send(engine, range(6))

    assert engine.circuit_state("billing") is CircuitState.OPEN
    assert results[-1].status is DispatchStatus.CIRCUIT_OPEN
    assert faults.counts == {"fail": 5}


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_delay_is_not_negative(seconds: float) -> None:
    with pytest.raises(InvalidParameter, match="0 seconds or more"):
        FaultInjector().delay(seconds)

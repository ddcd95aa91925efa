"""A user's story: an application's engine as it is, tested without Ray, without its servers, and without waiting."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from raydispatch import DispatchEngine, DispatchResult, DispatchStatus, Envelope, MessageCategory
from raydispatch.dispatch.outcome import Reply
from raydispatch.testing import FailingHandler, FakeClock, FaultInjector, RecordingHandler, double

ORDERS = "dev.order.events.v1"
STOCK = "dev.stock.commands.v1"


# The application.


class OrderPlaced(BaseModel):
    order_id: int


app = DispatchEngine("shop")
steps: list[str] = []


@app.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, message_types={"OrderPlaced"})
async def bill(envelope: Envelope[OrderPlaced]) -> str:
    steps.append(f"bill {envelope.payload.order_id}, attempt {envelope.attempt}")
    return "dev.invoice.events.v1"


@app.dispatcher("mail", topics="*.invoice.events.*", category=MessageCategory.EVENT)
def mail(envelope: Envelope[OrderPlaced]) -> None:
    raise AssertionError("a test must not send mail")


@app.dispatcher("stock", topics="*.stock.commands.*", category=MessageCategory.COMMAND)
class Stock:
    def start(self) -> None:
        self.left = 10
        steps.append("stock started")

    def stop(self) -> None:
        steps.append(f"stock stopped with {self.left}")

    def handle(self, envelope: Envelope[int]) -> Reply:
        self.left -= envelope.payload
        return Reply(self.left)


app.freeze()


# Its tests.


@pytest.fixture(autouse=True)
def forget() -> None:
    steps.clear()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def order(order_id: Any) -> Envelope[Any]:
    return Envelope({"order_id": order_id}, message_type="OrderPlaced")


def test_an_order_is_billed_and_the_customer_gets_mail() -> None:
    mails = RecordingHandler()

    async def use() -> DispatchResult:
        async with double(app, replace={"mail": mails}) as engine:
            result = await engine.dispatch(ORDERS, order(7))
            await mails.wait_for(1)
        return result

    result = asyncio.run(use())

    assert list(result.outputs) == ["dev.invoice.events.v1"]
    assert steps == ["stock started", "bill 7, attempt 1", "stock stopped with 10"]
    assert mails.envelopes[0].causation_id is not None


def test_an_order_that_does_not_fit_is_not_billed() -> None:
    engine = double(app, faults=FaultInjector(), replace={"mail": RecordingHandler()})
    engine.freeze()

    result = asyncio.run(engine.dispatch(ORDERS, order("seven")))

    assert result.status is DispatchStatus.INVALID_MESSAGE
    assert steps == []


def test_two_failures_are_survived_and_take_no_time(clock: FakeClock) -> None:
    faults = FaultInjector(seed=7)
    faults.fail(dispatcher="billing", times=2, error=ConnectionError("no route to the bank"))

    async def use() -> list[DispatchResult]:
        async with double(app, clock=clock, faults=faults, replace={"mail": RecordingHandler()}) as engine:
            return [await clock.run(engine.dispatch(ORDERS, order(number))) for number in (7, 8)]

    first, second = asyncio.run(use())

    assert (first.status, first.outcomes[0].attempts) == (DispatchStatus.SUCCESS, 3)
    assert (second.status, second.outcomes[0].attempts) == (DispatchStatus.SUCCESS, 1)
    assert steps[1:-1] == ["bill 7, attempt 3", "bill 8, attempt 1"]
    assert faults.counts == {"fail billing": 2}


def test_the_same_by_hand(clock: FakeClock) -> None:
    faults = FaultInjector(seed=7)
    faults.fail(dispatcher="billing", times=2)

    async def use() -> DispatchResult:
        engine = double(app, clock=clock, faults=faults, replace={"mail": RecordingHandler()})
        engine.freeze()
        sending = asyncio.create_task(engine.dispatch(ORDERS, order(7)))
        await clock.advance(60)
        assert sending.done()
        return await sending

    assert asyncio.run(use()).outcomes[0].attempts == 3


def test_an_order_is_billed_twice_when_the_acknowledgement_is_lost(clock: FakeClock) -> None:
    faults = FaultInjector()
    faults.drop_ack(dispatcher="billing", times=1)
    mails = RecordingHandler()

    async def use() -> DispatchResult:
        async with double(app, clock=clock, faults=faults, replace={"mail": mails}) as engine:
            result = await clock.run(engine.dispatch(ORDERS, order(7)))
            await engine.drain()
        return result

    result = asyncio.run(use())

    assert result.is_successful()
    assert steps[1:-1] == ["bill 7, attempt 1", "bill 7, attempt 2"]
    assert len(mails.envelopes) == 1


def test_faults_strike_a_class_and_its_start_and_stop_go_on(clock: FakeClock) -> None:
    faults = FaultInjector(clock=clock)
    faults.fail(dispatcher="stock", times=1)
    faults.delay(30, dispatcher="stock")

    async def use() -> DispatchResult:
        async with double(app, clock=clock, faults=faults) as engine:
            return await clock.run(engine.execute(STOCK, Envelope(3)))

    result = asyncio.run(use())

    assert result.reply == Reply(7)
    assert steps == ["stock started", "stock stopped with 7"]
    assert faults.counts == {"fail stock": 1, "delay stock": 1}


def test_a_bank_that_is_down_opens_the_circuit_and_closes_it_when_it_is_back(clock: FakeClock) -> None:
    bank = FailingHandler(times=5, then=bill)

    async def use() -> list[DispatchStatus]:
        engine = double(app, clock=clock, replace={"billing": bank, "mail": RecordingHandler()})
        engine.freeze()
        down = [await clock.run(engine.dispatch(ORDERS, order(number))) for number in range(3)]
        clock.tick(60)
        back = await clock.run(engine.dispatch(ORDERS, order(3)))
        return [result.status for result in (*down, back)]

    assert asyncio.run(use()) == [
        DispatchStatus.DISPATCHER_ERROR,
        DispatchStatus.DISPATCHER_ERROR,
        DispatchStatus.CIRCUIT_OPEN,
        DispatchStatus.SUCCESS,
    ]
    assert bank.calls == 6

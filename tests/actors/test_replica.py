import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import ray
from pydantic import BaseModel
from ray import cloudpickle
from tests.actors.fakes import (
    EVENT,
    SETTINGS,
    TOPIC,
    FakeController,
    FakeHandle,
    FakeRay,
    Log,
    Shared,
    orders,
    parcel_of,
    run,
    turns,
    until,
)

from raydispatch import Envelope
from raydispatch.actors.circuit import Circuit
from raydispatch.actors.names import keeper_name
from raydispatch.actors.replica import Duty, Replica
from raydispatch.actors.wire import Item, Journaled, Part, decode, encode
from raydispatch.delivery.letters import unpack_letter
from raydispatch.delivery.memories import unpacked_note
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply
from raydispatch.errors import ErrorCode, JournalUnavailable
from raydispatch.messages.stored import stored
from raydispatch.settings import BreakerSettings, EngineSettings, JournalSettings, RetrySettings, SystemSettings

ONCE = RetrySettings(tries=1)


class Seat:
    """A replica of the dispatcher `billing`, and the controller that it reports to."""

    def __init__(
        self,
        handler: Any,
        *,
        circuit: Circuit | None = None,
        middleware: tuple[Any, ...] = (),
        settings: SystemSettings = SETTINGS,
        engine: EngineSettings | None = None,
        **options: Any,
    ) -> None:
        spec = DispatcherSpec("billing", handler, EVENT, **{"retry": ONCE, **options})
        self.controller = FakeHandle(lambda: FakeController(circuit) if circuit else FakeController())
        blob = cloudpickle.dumps((spec, middleware))
        duty = Duty("shop", "billing-1", blob, engine or EngineSettings(), settings, "version")
        self.replica = Replica(duty, self.controller)

    async def process(self, *messages: tuple[str, Envelope[Any]], **marks: bool) -> list[Item | None]:
        return await self.replica.process(part_of(messages, **marks))

    def begin(self, *messages: tuple[str, Envelope[Any]], **marks: bool) -> "asyncio.Task[list[Item | None]]":
        return asyncio.create_task(self.process(*messages, **marks))

    async def letters(self) -> list[Any]:
        await turns()
        found: list[Any] = self.controller.instance.letters
        return found

    async def reports(self) -> list[str]:
        await turns()
        return [report for _, _, report in self.controller.instance.reports]


def part_of(messages: Any, **marks: Any) -> Part:
    parcel = parcel_of(messages)
    return Part(parcel.keys, parcel.rows, ["route"] * len(parcel.keys), parcel.blobs, **marks)


def outcome_of(item: Item | None) -> Outcome:
    assert isinstance(item, Outcome)
    return item


def plain(items: list[Item | None]) -> bool:
    return all(type(item) is float for item in items)


def gated() -> Log:
    log = Log()
    log.gate = asyncio.Event()
    return log


def raising(error: BaseException) -> Log:
    def act(envelope: Envelope[Any]) -> None:
        raise error

    return Log(act)


# Messages


def test_every_message_of_a_part_is_handled_and_its_item_stands_in_its_place() -> None:
    async def story() -> None:
        log = Log(lambda envelope: Reply(envelope.payload * 10) if envelope.payload else None)
        seat = Seat(log.handle)

        items = await seat.process(*orders(0, 1, 2))

        assert type(items[0]) is float
        assert [outcome_of(item).reply for item in items[1:]] == [Reply(10), Reply(20)]
        assert log.payloads == [0, 1, 2]
        assert {envelope.topic for envelope in log.seen} == {TOPIC}

    run(story())


def test_an_outcome_names_its_dispatcher_and_the_route_that_led_there() -> None:
    async def story() -> None:
        seat = Seat(Log(lambda envelope: Reply(1)).handle)

        (item,) = await seat.process(*orders(1))

        outcome = outcome_of(item)
        assert (outcome.dispatcher_id, outcome.route_id, outcome.attempts) == ("billing", "route", 1)

    run(story())


def test_a_failing_handler_is_an_outcome_and_a_dead_letter_and_costs_the_others_nothing() -> None:
    async def story() -> None:
        def act(envelope: Envelope[Any]) -> None:
            if envelope.payload == 2:
                raise OSError("down")

        seat = Seat(Log(act).handle)

        items = await seat.process(*orders(1, 2, 3))

        failed = outcome_of(items[1])
        assert plain([items[0], items[2]])
        assert (failed.status, failed.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_EXCEPTION)
        (letter,) = await seat.letters()
        assert (letter.topic, letter.envelope.payload, letter.outcome) == (TOPIC, 2, failed)
        assert (letter.table_version, letter.first_at <= letter.last_at) == ("version", True)

    run(story())


def test_a_handler_is_tried_as_often_as_its_rule_says() -> None:
    async def story() -> None:
        log = raising(OSError("down"))
        seat = Seat(log.handle, retry=RetrySettings(tries=3, first_delay_seconds=0))

        (item,) = await seat.process(*orders(1))

        assert outcome_of(item).attempts == 3
        assert [envelope.attempt for envelope in log.seen] == [1, 2, 3]

    run(story())


def test_a_payload_that_cannot_be_read_is_an_invalid_message_and_costs_the_others_nothing() -> None:
    async def story() -> None:
        seat = Seat(Log().handle)
        part = part_of(orders(1, 2))
        part.blobs[0] = b"rubbish"

        items = await seat.replica.process(part)

        assert outcome_of(items[0]).error_code is ErrorCode.PAYLOAD_INVALID
        assert plain(items[1:])

    run(story())


class Order(BaseModel):
    number: int


def test_payloads_are_checked_against_the_handlers_annotation() -> None:
    async def story() -> None:
        seen: list[Any] = []
        shared = SharedList(seen)

        async def handle(envelope: Envelope[Order]) -> None:
            shared.items.append(envelope.payload)

        seat = Seat(handle)

        items = await seat.process(*orders({"number": 7}, {"number": "x"}))

        assert seen == [Order(number=7)]
        assert type(items[0]) is float
        assert outcome_of(items[1]).status is DispatchStatus.INVALID_MESSAGE

    run(story())


class SharedList(Shared):
    def __init__(self, items: list[Any]) -> None:
        self.items = items


def test_a_reply_that_cannot_travel_is_the_handlers_fault_and_costs_the_others_nothing() -> None:
    async def story() -> None:
        seat = Seat(Log(lambda envelope: Reply(threading.Lock()) if envelope.payload == 1 else None).handle)

        items = await seat.process(*orders(1, 2))

        failed = outcome_of(items[0])
        assert (failed.status, failed.error_code, failed.reply) == (
            DispatchStatus.DISPATCHER_ERROR,
            ErrorCode.HANDLER_RESULT,
            None,
        )
        assert plain(items[1:])

    run(story())


def test_a_payload_that_the_handler_has_spoiled_is_buried_as_it_came() -> None:
    async def story() -> None:
        def act(envelope: Envelope[Any]) -> None:
            envelope.payload["lock"] = threading.Lock()
            raise OSError("down")

        seat = Seat(Log(act).handle)

        (item,) = await seat.process(*orders({"number": 7}))

        assert outcome_of(item).error_code is ErrorCode.HANDLER_EXCEPTION
        (letter,) = await seat.letters()
        assert letter.envelope.payload == {"number": 7}

    run(story())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_handler_that_wants_to_exit_fails_like_any_other(error: BaseException, count: int) -> None:
    async def story() -> None:
        def act(envelope: Envelope[Any]) -> None:
            if envelope.payload == 0:
                raise error

        seat = Seat(Log(act).handle, breaker=None)

        items = await seat.process(*orders(*range(count)))

        assert outcome_of(items[0]).status is DispatchStatus.DISPATCHER_ERROR
        assert outcome_of(items[0]).error_type == type(error).__name__
        assert plain(items[1:])
        assert plain(await seat.process(*orders(7)))

    run(story())


def test_middleware_runs_around_the_handler() -> None:
    async def story() -> None:
        async def answer(envelope: Envelope[Any], following: Any) -> Any:
            return Reply("from the middle") if envelope.payload == 1 else await following(envelope)

        log = Log()
        seat = Seat(log.handle, middleware=(answer,))

        items = await seat.process(*orders(1, 2))

        assert outcome_of(items[0]).reply == Reply("from the middle")
        assert log.payloads == [2]

    run(story())


def test_sync_handlers_do_not_hold_up_the_replica() -> None:
    async def story() -> None:
        gate = Doors()

        def wait(envelope: Envelope[Any]) -> None:
            gate.begun.append(1)
            assert gate.door.wait(10)

        seat = Seat(wait, concurrency=2)
        processing = seat.begin(*orders(1, 2))
        await until(lambda: len(gate.begun) == 2)

        answered = await seat.replica.ping()
        gate.door.set()

        assert answered
        assert plain(await processing)

    run(story())


class Doors(Shared):
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.door = threading.Event()


# Limits


@pytest.mark.parametrize("sizes", [(1,) * 8, (8,), (1, 3, 1, 3), (3, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_handlers_run_at_once_than_allowed_however_messages_come(
    sizes: tuple[int, ...], concurrency: int
) -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle, concurrency=concurrency)

        calls = []
        for size in sizes:
            calls.append(seat.begin(*orders(*range(size))))
            await turns()
        running = log.now
        assert log.gate is not None
        log.gate.set()
        items = await asyncio.gather(*calls)

        assert (running, log.most) == (concurrency, concurrency)
        assert [len(one) for one in items] == list(sizes)
        assert all(plain(one) for one in items)

    run(story())


def test_what_it_has_no_room_for_it_leaves_to_the_sender() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle, max_in_flight=3)
        first = seat.begin(*orders(1, 2))
        await until(lambda: len(log.seen) == 2)

        second = seat.begin(*orders(3, 4, 5))
        await until(lambda: len(log.seen) == 3)
        third = await seat.process(*orders(6, 7))
        assert log.gate is not None
        log.gate.set()

        assert plain(await first)
        assert [item is None for item in await second] == [False, True, True]
        assert third == [None, None]
        assert log.payloads == [1, 2, 3]
        assert plain(await seat.process(*orders(8)))

    run(story())


# Alone


def test_a_suspect_runs_alone() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle)
        before = seat.begin(*orders(1))
        await until(lambda: log.payloads == [1])

        suspect = seat.begin(*orders(2), alone=True)
        await turns()
        refused = await seat.process(*orders(3))
        waits = log.payloads == [1]
        assert log.gate is not None
        log.gate.set()
        items = [await before, await suspect]
        after = await seat.process(*orders(4))

        assert (waits, refused) == (True, [None])
        assert all(plain(one) for one in (*items, after))
        assert (log.payloads, log.most) == ([1, 2, 4], 1)

    run(story())


def test_while_a_suspect_runs_nobody_else_does() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle)

        suspect = seat.begin(*orders(1), alone=True)
        await until(lambda: log.payloads == [1])
        refused = [await seat.process(*orders(2)), await seat.process(*orders(3), alone=True)]
        assert log.gate is not None
        log.gate.set()

        assert plain(await suspect)
        assert refused == [[None], [None]]
        assert plain(await seat.process(*orders(2), alone=True))

    run(story())


# Repeats


def test_a_repeat_gets_the_stored_outcome() -> None:
    async def story() -> None:
        log = Log(lambda envelope: Reply(len(log.seen)))
        seat = Seat(log.handle)
        messages = orders(1)

        (first,) = await seat.process(*messages)
        (second,) = await seat.process(*messages, resent=True)

        assert outcome_of(second) == outcome_of(first)._replace(repeated=True)
        assert len(log.seen) == 1

    run(story())


def test_the_repeat_of_a_plain_success_is_marked_as_well() -> None:
    async def story() -> None:
        seat = Seat(Log().handle)
        messages = orders(1)
        await seat.process(*messages)

        (item,) = await seat.process(*messages)

        assert (outcome_of(item).status, outcome_of(item).repeated) == (DispatchStatus.SUCCESS, True)

    run(story())


def test_the_repeat_of_a_running_message_joins_it() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle)
        messages = orders(1)

        calls = [seat.begin(*messages)]
        await until(lambda: log.seen)
        calls += [seat.begin(*messages, resent=True), seat.begin(*messages)]
        await turns()
        assert log.gate is not None
        log.gate.set()
        first, *others = [item for items in await asyncio.gather(*calls) for item in items]

        assert type(first) is float
        assert [outcome_of(item).repeated for item in others] == [True, True]
        assert len(log.seen) == 1

    run(story())


def test_the_same_message_twice_in_one_part_runs_once() -> None:
    async def story() -> None:
        log = Log()
        seat = Seat(log.handle)
        messages = orders(1)

        items = await seat.process(*messages, *messages)

        assert len(log.seen) == 1
        assert [isinstance(item, Outcome) and item.repeated for item in items] == [False, True]

    run(story())


def test_one_who_joins_a_message_that_fails_hears_of_it() -> None:
    async def story() -> None:
        log = raising(OSError("down"))
        log.gate = asyncio.Event()
        seat = Seat(log.handle)
        messages = orders(1)
        calls = [seat.begin(*messages), seat.begin(*messages)]
        await until(lambda: log.seen)
        await turns()

        log.gate.set()
        items = [outcome_of(item) for items in await asyncio.gather(*calls) for item in items]

        assert {item.error_code for item in items} == {ErrorCode.HANDLER_EXCEPTION}
        assert len(log.seen) == 1

    run(story())


def test_a_failure_is_not_remembered_and_runs_again_as_another_attempt() -> None:
    async def story() -> None:
        def act(envelope: Envelope[Any]) -> None:
            if len(log.seen) == 1:
                raise OSError("down")

        log = Log(act)
        seat = Seat(log.handle)
        messages = orders(1)
        await seat.process(*messages)

        (item,) = await seat.process(*messages, resent=True)

        assert type(item) is float
        assert [envelope.attempt for envelope in log.seen] == [1, 2]
        assert len({envelope.message_id for envelope in log.seen}) == 1

    run(story())


def test_at_most_once_means_that_what_comes_again_never_runs_here() -> None:
    async def story() -> None:
        log = raising(OSError("down"))
        seat = Seat(log.handle, at_most_once=True)
        messages = orders(1)
        await seat.process(*messages)

        # Whoever asked before may have heard that it runs here; it has ended since, and was not worth remembering.
        (item,) = await seat.process(*messages, resent=True)

        assert outcome_of(item).error_code is ErrorCode.REPLICA_LOST
        assert len(log.seen) == 1

    run(story())


def test_only_so_many_ids_are_remembered() -> None:
    async def story() -> None:
        log = Log()
        seat = Seat(log.handle, settings=SystemSettings(remembered_ids=4))
        first = orders(0)
        await seat.process(*first)

        await seat.process(*orders(*range(1, 9)))
        await seat.process(*first)

        assert log.payloads.count(0) == 2

    run(story())


def test_it_knows_what_it_has_done_what_it_does_and_what_waits_here() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle, concurrency=1)
        done, running, waiting, strange = orders(1), orders(2), orders(3), orders(4)
        assert log.gate is not None
        log.gate.set()
        await seat.process(*done)
        log.gate.clear()

        calls = [seat.begin(*running), seat.begin(*waiting)]
        await until(lambda: len(log.seen) == 2)
        await turns()
        numbers = [envelope.message_id.int for ((_, envelope),) in (done, running, waiting, strange)]
        known = await seat.replica.known(numbers)
        log.gate.set()
        await asyncio.gather(*calls)

        assert known == [True, True, True, False]

    run(story())


def test_it_knows_nothing_before_it_has_begun() -> None:
    async def story() -> None:
        assert await Seat(Log().handle).replica.known([1, 2]) == [False, False]

    run(story())


# Being born


class Machine(Shared):
    """Handlers of a class, and what became of them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.faults = 0


def machine_class(machine: Machine) -> Any:
    class Handler:
        def __init__(self) -> None:
            machine.events.append("built")

        async def start(self) -> None:
            machine.events.append("started")
            await asyncio.sleep(0)
            if machine.faults:
                machine.faults -= 1
                raise OSError("no connection")

        async def handle(self, envelope: Envelope[Any]) -> None:
            machine.events.append(f"handled {envelope.payload}")

        async def stop(self) -> None:
            machine.events.append("stopped")

        def health(self) -> bool:
            return machine.faults == 0

    return Handler


def test_a_class_is_built_and_started_before_the_first_message_and_once() -> None:
    async def story() -> None:
        machine = Machine()
        seat = Seat(machine_class(machine))

        problems = await asyncio.gather(*(seat.replica.start() for _ in range(3)))
        await seat.process(*orders(1))

        assert problems == [None, None, None]
        assert machine.events == ["built", "started", "handled 1"]

    run(story())


def test_a_message_that_comes_first_starts_it_too() -> None:
    async def story() -> None:
        machine = Machine()
        seat = Seat(machine_class(machine))

        calls = await asyncio.gather(*(seat.process(*orders(number)) for number in range(3)))

        assert all(plain(items) for items in calls)
        assert machine.events[:2] == ["built", "started"]
        assert len(machine.events) == 5

    run(story())


def test_a_handler_that_does_not_start_says_why() -> None:
    async def story() -> None:
        machine = Machine()
        machine.faults = 1
        seat = Seat(machine_class(machine))

        problem = await seat.replica.start()

        assert problem is not None
        assert "no connection" in problem

    run(story())


def test_messages_for_a_handler_that_does_not_start_fail_each_and_the_next_may_find_things_better() -> None:
    async def story() -> None:
        machine = Machine()
        machine.faults = 1
        seat = Seat(machine_class(machine))

        items = await seat.process(*orders(1, 2))
        later = await seat.process(*orders(3))

        outcomes = [outcome_of(item) for item in items]
        assert {outcome.error_code for outcome in outcomes} == {ErrorCode.START_FAILED}
        assert {(outcome.dispatcher_id, outcome.route_id) for outcome in outcomes} == {("billing", "route")}
        assert all("no connection" in (outcome.error_message or "") for outcome in outcomes)
        assert plain(later)

    run(story())


def test_those_who_wait_for_a_start_that_fails_do_not_start_it_twice_at_once() -> None:
    async def story() -> None:
        machine = Machine()
        machine.faults = 1
        seat = Seat(machine_class(machine))

        async def insist() -> None:
            while await seat.replica.start() is not None:
                pass

        await asyncio.gather(*(insist() for _ in range(4)))

        assert machine.events.count("started") == 2

    run(story())


def test_a_start_that_fails_leaves_nothing_running() -> None:
    async def story() -> None:
        machine = Machine()
        machine.faults = 5
        seat = Seat(machine_class(machine))
        await seat.replica.start()
        before = len(asyncio.all_tasks())

        for _ in range(4):
            await seat.replica.start()

        assert len(asyncio.all_tasks()) <= before

    run(story())


class Missing:
    """Cannot be loaded, as if its module were not there."""

    def __reduce__(self) -> Any:
        return _not_here, ()


def _not_here() -> None:
    raise ModuleNotFoundError("No module named 'shop'")


def test_a_handler_whose_module_is_not_here_says_so() -> None:
    async def story() -> None:
        seat = Seat(Log().handle)
        duty = seat.replica._duty._replace(handler=cloudpickle.dumps(Missing()))
        replica = Replica(duty, seat.controller)

        problem = await replica.start()
        (item,) = await replica.process(part_of(orders(1)))

        assert problem is not None
        assert "ModuleNotFoundError" in problem
        assert outcome_of(item).error_code is ErrorCode.START_FAILED
        assert outcome_of(item).dispatcher_id == "billing"

    run(story())


def test_ping_asks_the_handler() -> None:
    async def story() -> None:
        machine = Machine()
        seat = Seat(machine_class(machine))

        unborn = await seat.replica.ping()
        await seat.replica.start()
        well = await seat.replica.ping()
        machine.faults = 1

        assert (unborn, well, await seat.replica.ping()) == (True, True, False)

    run(story())


# Circuits

OPEN = Circuit(CircuitState.OPEN, 60.0, "billing-2")
TWICE = BreakerSettings(failure_threshold=2)


def test_failures_are_reported_at_once_and_so_is_an_open_circuit() -> None:
    async def story() -> None:
        seat = Seat(raising(OSError("down")).handle, breaker=TWICE)

        await seat.process(*orders(1))
        first = await seat.reports()
        await seat.process(*orders(2))
        (refused,) = await seat.process(*orders(3))

        assert first == ["failed"]
        assert sorted(await seat.reports()) == ["failed", "failed", "opened"]
        assert outcome_of(refused).status is DispatchStatus.CIRCUIT_OPEN

    run(story())


def test_it_does_as_it_is_told() -> None:
    async def story() -> None:
        log = Log()
        seat = Seat(log.handle, breaker=TWICE)
        await seat.replica.start()

        await seat.replica.follow(OPEN)
        (refused,) = await seat.process(*orders(1))
        await seat.replica.follow(Circuit(CircuitState.CLOSED))
        (item,) = await seat.process(*orders(2))

        assert outcome_of(refused).status is DispatchStatus.CIRCUIT_OPEN
        assert type(item) is float
        assert log.payloads == [2]
        assert await seat.reports() == []

    run(story())


def test_a_replica_that_is_born_again_asks_for_the_circuit() -> None:
    async def story() -> None:
        seat = Seat(Log().handle, breaker=TWICE, circuit=OPEN)

        (item,) = await seat.process(*orders(1))

        assert outcome_of(item).status is DispatchStatus.CIRCUIT_OPEN

    run(story())


def test_while_nobody_knows_the_circuit_it_is_closed() -> None:
    async def story() -> None:
        seat = Seat(Log().handle, breaker=TWICE, circuit=OPEN)
        seat.controller.crash(for_good=True)

        assert plain(await seat.process(*orders(1)))

    run(story())


def test_told_to_be_alert_it_tells_of_its_next_success_and_stays_as_it_is() -> None:
    async def story() -> None:
        seat = Seat(Log().handle, breaker=TWICE)
        await seat.replica.start()

        await seat.replica.follow(Circuit(CircuitState.CLOSED), True)
        await seat.process(*orders(1))
        await seat.process(*orders(2))

        assert await seat.reports() == ["succeeded"]

    run(story())


def test_without_a_breaker_word_of_a_circuit_is_ignored() -> None:
    async def story() -> None:
        seat = Seat(Log().handle, breaker=None)

        await seat.replica.follow(OPEN)

        assert plain(await seat.process(*orders(1)))

    run(story())


def test_what_waits_when_the_circuit_opens_does_not_run() -> None:
    async def story() -> None:
        log = raising(OSError("down"))
        seat = Seat(log.handle, breaker=TWICE, concurrency=1)

        items = await seat.process(*orders(*range(6)))

        assert len(log.seen) == 2
        assert [outcome_of(item).status for item in items[2:]] == [DispatchStatus.CIRCUIT_OPEN] * 4

    run(story())


# Telling


class _Context:
    def get_node_id(self) -> str:
        return "node-7"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", _Context)


@pytest.mark.usefixtures("node")
def test_it_tells_how_busy_it_is() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle, concurrency=2)
        unborn = await seat.replica.load()
        processing = seat.begin(*orders(1, 2, 3))
        await until(lambda: len(log.seen) == 2)

        busy = await seat.replica.load()
        assert log.gate is not None
        log.gate.set()
        await processing
        idle = await seat.replica.load()

        assert (unborn.in_flight, unborn.handled, unborn.node, unborn.circuit) == (0, 0, "node-7", "closed")
        assert (busy.in_flight, busy.running, busy.handled) == (3, 2, 0)
        assert (idle.in_flight, idle.running, idle.handled) == (0, 0, 3)

    run(story())


def test_it_counts_its_outcomes_and_no_dispatches() -> None:
    async def story() -> None:
        seat = Seat(Log(lambda envelope: 1 / envelope.payload and None).handle)
        messages = orders(1, 0)

        await seat.process(*messages)

        metrics = await seat.replica.metrics()
        part = metrics.dispatcher_metrics["billing"]
        assert metrics.total_dispatches == 0
        assert part.statuses == {DispatchStatus.SUCCESS: 1, DispatchStatus.DISPATCHER_ERROR: 1}
        assert (part.execution_count, part.latency.count) == (2, 2)

    run(story())


def test_a_repeat_is_no_execution() -> None:
    async def story() -> None:
        seat = Seat(Log().handle)
        messages = orders(1)

        for _ in range(3):
            await seat.process(*messages)

        part = (await seat.replica.metrics()).dispatcher_metrics["billing"]
        assert part.execution_count == 1

    run(story())


# Ending


def test_draining_waits_for_what_is_under_way_and_stops_the_handler() -> None:
    async def story() -> None:
        machine = Machine()
        seat = Seat(machine_class(machine))
        await seat.process(*orders(1))

        assert await seat.replica.drain(5)

        assert machine.events[-1] == "stopped"

    run(story())


def test_draining_gives_up_when_its_time_is_up() -> None:
    async def story() -> None:
        log = gated()
        seat = Seat(log.handle)
        processing = seat.begin(*orders(1))
        await until(lambda: log.seen)

        too_short = await seat.replica.drain(0.01)
        draining = asyncio.create_task(seat.replica.drain(5))
        await turns()
        assert log.gate is not None
        log.gate.set()

        assert (too_short, await draining) == (False, True)
        assert plain(await processing)

    run(story())


def test_a_replica_that_never_had_anything_to_do_is_drained_at_once() -> None:
    async def story() -> None:
        assert await Seat(Log().handle).replica.drain(0)

    run(story())


# Messages from a journal

JOURNALED = EngineSettings(journal=JournalSettings(url="sqlite:///nowhere/shop.db", patience_seconds=0.1))
THRICE = RetrySettings(tries=3, first_delay_seconds=0)


class FakeKeeper(Shared):
    """Takes notes and outputs, and knows what it is told to know."""

    def __init__(self) -> None:
        self.known: list[bytes] = []
        self.outputs: list[bytes] = []
        self.has_room = True

    async def recall(self, dispatcher_id: str) -> list[bytes]:
        return self.known

    async def note(self, dispatcher_id: str, notes: list[bytes]) -> None:
        self.known = [*self.known, *notes]

    async def append(self, packed: list[bytes]) -> None:
        if not self.has_room:
            raise JournalUnavailable("the disk is full")
        self.outputs += packed


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> FakeKeeper:
    """Where replicas of a system with a journal find it."""
    keeper = FakeKeeper()
    FakeRay(monkeypatch).start(keeper_name("shop"), lambda: keeper)
    return keeper


def journaled(messages: Any, *deliveries: int, again: bool = False) -> Part:
    """As the keeper sends them."""
    part = part_of(messages)
    blobs = [stored(envelope) for _, envelope in messages]
    return part._replace(blobs=blobs, journaled=Journaled(list(deliveries) or [0] * len(blobs), again))


def test_a_message_from_a_journal_is_what_was_published() -> None:
    async def story() -> None:
        log = Log()
        envelope = Envelope({"n": 1}, message_type="Order", topic=TOPIC, key="k", headers={"from": "web"})

        items = await Seat(log.handle).replica.process(journaled([(TOPIC, envelope)]))

        assert plain(items)
        assert log.seen == [envelope]

    run(story())


@pytest.mark.parametrize("pack", [encode, stored])
def test_both_kinds_of_bytes_are_told_apart(pack: Callable[[Envelope[Any]], bytes]) -> None:
    envelope = Envelope([1, "x", None], message_type="Order", topic=TOPIC, key="k", attempt=3, hops=2)

    assert decode(pack(envelope), (TOPIC, "Order")) == envelope


def test_a_message_from_a_journal_is_tried_once_and_buried_by_nobody_here() -> None:
    async def story() -> None:
        log = raising(OSError("down"))
        seat = Seat(log.handle, retry=THRICE)

        (item,) = await seat.replica.process(journaled(orders(1)))

        outcome = outcome_of(item)
        assert (outcome.status, outcome.attempts, len(log.seen)) == (DispatchStatus.DISPATCHER_ERROR, 1, 1)
        assert await seat.letters() == []

    run(story())


def test_its_attempt_says_how_often_it_was_delivered() -> None:
    async def story() -> None:
        log = Log()
        first, second = orders("first", "second")
        redriven = (TOPIC, second[1].with_attempt(4))

        await Seat(log.handle).replica.process(journaled([first, redriven], 2, 1))

        assert {envelope.payload: envelope.attempt for envelope in log.seen} == {"first": 3, "second": 5}

    run(story())


def test_what_is_remembered_runs_again_only_in_a_replay() -> None:
    async def story() -> None:
        log = Log()
        seat = Seat(log.handle)
        messages = orders(1)

        await seat.replica.process(journaled(messages))
        (repeat,) = await seat.replica.process(journaled(messages))
        ran = len(log.seen)
        (replayed,) = await seat.replica.process(journaled(messages, again=True))

        assert (outcome_of(repeat).repeated, ran) == (True, 1)
        assert (type(replayed), len(log.seen)) == (float, 2)

    run(story())


def test_bytes_of_a_journal_that_cannot_be_read_are_an_invalid_message() -> None:
    async def story() -> None:
        seat = Seat(Log().handle)
        part = journaled(orders(1, 2))
        part.blobs[0] = part.blobs[0][:7]

        items = await seat.replica.process(part)

        assert outcome_of(items[0]).error_code is ErrorCode.PAYLOAD_INVALID
        assert plain(items[1:])

    run(story())


def test_a_batch_handler_gets_messages_from_a_journal_together() -> None:
    async def story() -> None:
        sizes = SharedList([])

        async def handle(table: pa.Table) -> None:
            sizes.items.append(len(table))

        seat = Seat(handle, batch=True, concurrency=100)

        items = await seat.replica.process(journaled(orders(*range(20))))

        assert plain(items)
        assert sizes.items == [20]

    run(story())


def test_what_a_replica_has_handled_it_tells_the_keeper(keeper: FakeKeeper) -> None:
    async def story() -> None:
        seat = Seat(Log().handle, engine=JOURNALED)
        durable, plain_one = orders(1, 2)

        await seat.replica.process(journaled([durable]))
        await seat.process(plain_one)
        await until(lambda: len(keeper.known) == 2)

        noted = {unpacked_note(note, "billing")[0] for note in keeper.known}
        assert noted == {durable[1].message_id, plain_one[1].message_id}

    run(story())


def test_what_was_handled_in_another_life_is_not_handled_again(keeper: FakeKeeper) -> None:
    async def story() -> None:
        log = Log()
        messages = orders(1)
        first = Seat(log.handle, engine=JOURNALED)
        await first.replica.process(journaled(messages))
        await first.replica.drain(5)

        born_again = Seat(log.handle, engine=JOURNALED)
        (durable,) = await born_again.replica.process(journaled(messages, 1))
        (sent,) = await born_again.process(*messages)

        assert log.payloads == [1]
        assert [outcome_of(item).repeated for item in (durable, sent)] == [True, True]

    run(story())


def test_draining_tells_the_keeper_what_is_left_to_tell(keeper: FakeKeeper) -> None:
    async def story() -> None:
        seat = Seat(Log().handle, engine=JOURNALED)
        await seat.replica.process(journaled(orders(1, 2)))
        before = len(keeper.known)

        assert await seat.replica.drain(5)

        assert (before, len(keeper.known)) == (0, 2)

    run(story())


def test_with_a_journal_dead_letters_are_data_where_that_can_be(keeper: FakeKeeper) -> None:
    async def story() -> None:
        seat = Seat(raising(OSError("down")).handle, engine=JOURNALED)

        await seat.process(*orders({"n": 1}), *orders(Opaque()))
        await turns()

        letters = [call.arguments[0] for call in seat.controller.calls if call.method == "bury"]
        data, pickled = letters if letters[0][0] != 0x80 else reversed(letters)
        assert unpack_letter(data).envelope.payload == {"n": 1}
        assert isinstance(cloudpickle.loads(pickled).envelope.payload, Opaque)

    run(story())


class Opaque(Shared):
    """Travels, and is no data."""


def test_outputs_that_found_no_room_are_published_later_without_running_the_handler(keeper: FakeKeeper) -> None:
    async def story() -> None:
        log = Log(lambda envelope: "dev.bill.events.v1")
        seat = Seat(log.handle, engine=JOURNALED, outputs="journal")
        messages = orders(1)
        keeper.has_room = False
        (first,) = await seat.replica.process(journaled(messages))
        (second,) = await seat.replica.process(journaled(messages, 1))

        keeper.has_room = True
        (third,) = await seat.replica.process(journaled(messages, 2))

        assert [outcome_of(item).status for item in (first, second)] == [DispatchStatus.PUBLISH_FAILED] * 2
        assert outcome_of(third).status is DispatchStatus.SUCCESS
        assert outcome_of(third).outputs == ("dev.bill.events.v1",)
        assert (log.payloads, len(keeper.outputs)) == ([1], 1)

    run(story())


def test_when_they_are_published_at_last_that_is_remembered(keeper: FakeKeeper) -> None:
    async def story() -> None:
        log = Log(lambda envelope: "dev.bill.events.v1")
        seat = Seat(log.handle, engine=JOURNALED, outputs="journal")
        messages = orders(1)
        keeper.has_room = False
        await seat.replica.process(journaled(messages))
        keeper.has_room = True
        await seat.replica.process(journaled(messages, 1))

        (repeat,) = await seat.replica.process(journaled(messages, 2))

        assert (outcome_of(repeat).status, outcome_of(repeat).repeated) == (DispatchStatus.SUCCESS, True)
        assert (len(log.seen), len(keeper.outputs)) == (1, 1)

    run(story())


def test_outputs_that_were_lost_with_their_process_are_made_again(keeper: FakeKeeper) -> None:
    async def story() -> None:
        log = Log(lambda envelope: "dev.bill.events.v1")
        messages = orders(1)
        keeper.has_room = False
        first = Seat(log.handle, engine=JOURNALED, outputs="journal")
        await first.replica.process(journaled(messages))

        keeper.has_room = True
        born_again = Seat(log.handle, engine=JOURNALED, outputs="journal")
        (item,) = await born_again.replica.process(journaled(messages, 1))

        assert outcome_of(item).status is DispatchStatus.SUCCESS
        assert len(keeper.outputs) == 1

    run(story())


class FakeOutlet:
    """In the place of a server."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        self.outputs: list[Envelope[Any]] = []
        self.closes = 0

    def open(self, url: str, name: str) -> "FakeOutlet":
        self.opened.append((url, name))
        return self

    async def accept(self, outputs: Any) -> bool:
        self.outputs += outputs
        return True

    async def close(self) -> None:
        self.closes += 1


def test_outputs_may_leave_the_system_and_draining_closes_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outlet = FakeOutlet()
    monkeypatch.setattr("raydispatch.actors.replica.open_outlet", outlet.open)

    async def story() -> None:
        seat = Seat(Log(lambda envelope: "dev.bill.events.v1").handle, outputs="nats://localhost:4222")

        await seat.process(*orders(1, 2))
        before = outlet.closes
        assert await seat.replica.drain(5)

        assert outlet.opened == [("nats://localhost:4222", "shop")]
        assert [(envelope.topic, envelope.payload) for envelope in outlet.outputs] == [
            ("dev.bill.events.v1", 1),
            ("dev.bill.events.v1", 2),
        ]
        assert (before, outlet.closes) == (0, 1)

    run(story())

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError
from tests.actors.fakes import (
    EVENT,
    JOURNAL,
    SETTINGS,
    TOPIC,
    FakeHandle,
    FakeRay,
    Journals,
    Log,
    Shared,
    System,
    living_in,
    orders,
    run,
    turns,
    until,
)

from raydispatch import DispatchEngine, Envelope
from raydispatch.actors import controller as module
from raydispatch.actors.blueprint import blueprint_of
from raydispatch.actors.circuit import Circuit, Report
from raydispatch.actors.names import controller_name
from raydispatch.actors.status import SystemStatus
from raydispatch.actors.wire import message_of
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.letters import pack_letter, unpack_letter
from raydispatch.delivery.segment import Segment
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply
from raydispatch.errors import DispatchError, ErrorCode, InvalidParameter, NotRegistered, StartFailed
from raydispatch.settings import BreakerSettings, EngineSettings, RetrySettings, SystemSettings
from raydispatch.settings import Delivery as JournalDelivery

CONTROLLER = controller_name("shop")
WATCHFUL = SETTINGS.model_copy(update={"health_seconds": 0.001})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The controller's."""
    time = FakeTime()
    monkeypatch.setattr(module, "monotonic", time)
    return time


@pytest.fixture
def _own_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life of an actor has its own, as on Ray."""
    pid, kept = os.getpid(), []

    def getpid() -> int:
        process = living_in.get()
        if process is None:
            return pid
        if process not in kept:
            kept.append(process)
        return 1_000_000 + kept.index(process)

    monkeypatch.setattr(os, "getpid", getpid)


class Starting(Shared):
    """A handler whose start waits at a gate if there is one, and fails if it is told to."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem
        self.gate: asyncio.Event | None = None
        self.waiting = 0

    async def start(self) -> None:
        self.waiting += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.problem is not None:
            raise ConnectionError(self.problem)

    async def handle(self, envelope: Envelope[Any]) -> None:
        """Does nothing."""


def engine_of(handlers: dict[str, Any] | None = None, **options: Any) -> DispatchEngine:
    """An engine with these handlers, or with the dispatcher `a`; all of them get every order."""
    engine = DispatchEngine("shop")
    for name, handler in (handlers or {"a": Log().handle}).items():
        engine.dispatcher(name, topics="dev.*.events.*", category=EVENT, **{"retry": None, **options})(handler)
    return engine


async def started(fake: FakeRay, engine: DispatchEngine | None = None, **options: Any) -> System:
    return await System(fake, engine or engine_of(), **options).start()


def begun(system: System, *payloads: object) -> "asyncio.Task[Any]":
    """Messages on their way."""
    return asyncio.create_task(system.send(*orders(*payloads)))


async def cause_of(reference: Any) -> BaseException:
    """What a call of the controller has raised there."""
    with pytest.raises(RayTaskError) as caught:
        await reference
    cause: BaseException = caught.value.cause
    return cause


async def status_of(system: System) -> SystemStatus:
    status: SystemStatus = await system.controller.status.remote()
    return status


async def planned(router: FakeHandle) -> dict[str, list[str]]:
    """Who runs, as a router sees it."""
    plan = await router.plan.remote()
    return {name: list(replicas) for name, replicas in plan.replicas.items()}


def raising(envelope: Envelope[Any]) -> None:
    raise ConnectionError("down")


# Beginning


def test_a_system_begins_with_its_routers_and_replicas(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of({"a": Log().handle, "b": Log().handle}, replicas=2))

        assert (set(system.routers), set(system.replicas)) == ({"1", "2"}, {"a-1", "a-2", "b-3", "b-4"})
        assert [await planned(router) for router in system.routers.values()] == [
            {"a": ["a-1", "a-2"], "b": ["b-3", "b-4"]}
        ] * 2
        assert [result.status for result in await system.send(*orders(1))] == [DispatchStatus.SUCCESS]

    run(story())


def test_actors_outlive_their_driver_and_are_placed_as_the_spec_says(fake: FakeRay) -> None:
    async def story() -> None:
        await started(fake, engine_of(num_cpus=2.0))

        replica, router = (fake.options[f"raydispatch/shop/{name}"] for name in ("replica/a-1", "router/1"))
        assert (replica["num_cpus"], router["num_cpus"]) == (2.0, 0)
        assert {options["lifetime"] for options in (replica, router)} == {"detached"}
        assert {options["max_restarts"] for options in (replica, router)} == {-1}

    run(story())


def test_beginning_waits_for_every_handler_to_start(fake: FakeRay) -> None:
    async def story() -> None:
        slow = Starting()
        slow.gate = asyncio.Event()

        starting = asyncio.create_task(started(fake, engine_of({"a": slow}, replicas=2)))
        await until(lambda: slow.waiting == 2)
        await turns()
        waits = not starting.done()
        slow.gate.set()

        assert waits
        await starting

    run(story())


def test_a_failing_start_ends_everything_that_was_started(fake: FakeRay) -> None:
    async def story() -> None:
        error = await cause_of(started(fake, engine_of({"a": Log().handle, "b": Starting("no database")})))

        assert isinstance(error, StartFailed)
        assert (error.dispatcher_id, "no database" in error.reason) == ("b", True)
        assert set(fake.actors) == {CONTROLLER}

    run(story())


def test_a_replica_that_fits_on_no_node_ends_everything_that_was_started(fake: FakeRay) -> None:
    async def story() -> None:
        engine = engine_of()
        engine.dispatcher("b", topics="dev.**", category=EVENT, num_cpus=64)(raising)

        with pytest.raises(StartFailed, match="64 CPU"):
            await started(fake, engine)

        assert set(fake.actors) == {CONTROLLER}

    run(story())


def test_a_router_that_does_not_come_up_ends_everything_that_was_started(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake.start

    def start_badly(name: str, make: Callable[[], Any]) -> FakeHandle:
        handle = start(name, make)
        handle.is_down = name.endswith("router/2")
        return handle

    async def story() -> None:
        monkeypatch.setattr(fake, "start", start_badly)

        with pytest.raises(DispatchError):
            await started(fake)

        assert set(fake.actors) == {CONTROLLER}

    run(story())


def test_a_new_controller_looks_around_before_it_starts_anything(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def look(all_namespaces: bool) -> list[dict[str, str]]:
        looked.wait(10)
        return fake.list_named_actors(all_namespaces)

    async def story() -> None:
        monkeypatch.setattr(ray.util, "list_named_actors", look)

        starting = asyncio.create_task(started(fake))
        await turns(100)
        before = set(fake.actors)
        looked.set()
        await starting

        assert before == {CONTROLLER}

    run(story())


def test_a_controller_of_nothing_says_so(fake: FakeRay) -> None:
    async def story() -> None:
        system = System(fake, engine_of())

        for method in ("status", "plan", "blueprint"):
            error = await cause_of(getattr(system.controller, method).remote())
            assert (type(error), str(error)) == (NotRegistered, "There is no system 'shop'.")

    run(story())


# Scaling


def test_scaling_up_adds_replicas_that_all_routers_know(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)

        await system.controller.scale.remote("a", 3)

        assert set(system.replicas) == {"a-1", "a-2", "a-3"}
        assert [await planned(router) for router in system.routers.values()] == [{"a": ["a-1", "a-2", "a-3"]}] * 2
        assert (await system.controller.blueprint.remote()).specs["a"].replicas == 3

    run(story())


def test_routers_are_told_before_a_replica_is_drained(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(replicas=2))
        leaving = system.replicas["a-2"]
        system.routers["2"].hold("follow")

        scaling = asyncio.create_task(_done(system.controller.scale.remote("a", 1)))
        await until(lambda: system.routers["2"].count("follow") == 2)
        await turns()
        before = leaving.count("drain")
        system.routers["2"].release("follow")
        await scaling

        assert (before, leaving.count("drain")) == (0, 1)
        assert set(system.replicas) == {"a-1"}
        assert await planned(system.routers["1"]) == {"a": ["a-1"]}

    run(story())


async def _done(reference: Any) -> Any:
    return await reference


def test_a_replica_that_leaves_ends_what_it_has_begun(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log()
        log.gate = asyncio.Event()
        system = await started(fake, engine_of({"a": log.handle}, replicas=2))
        sending = [begun(system, number) for number in range(10)]
        await until(lambda: log.now == 10)

        scaling = asyncio.create_task(_done(system.controller.scale.remote("a", 1)))
        await until(lambda: system.replicas["a-2"].count("drain"))
        await turns()
        waits = "a-2" in system.replicas
        log.gate.set()
        await scaling

        assert (waits, "a-2" in system.replicas) == (True, False)
        assert {result.status for (result,) in await asyncio.gather(*sending)} == {DispatchStatus.SUCCESS}
        assert len(log.seen) == 10

    run(story())


def test_a_failed_scaling_leaves_all_as_it_was(fake: FakeRay) -> None:
    async def story() -> None:
        handler = Starting()
        system = await started(fake, engine_of({"a": handler}))
        handler.problem = "no more connections"

        with pytest.raises(StartFailed, match="no more connections"):
            await system.controller.scale.remote("a", 3)

        assert set(system.replicas) == {"a-1"}
        assert await planned(system.routers["1"]) == {"a": ["a-1"]}
        assert (await system.controller.blueprint.remote()).specs["a"].replicas == 1

    run(story())


def test_a_scaling_that_finds_no_room_names_the_number_that_was_asked_for(fake: FakeRay) -> None:
    async def story() -> None:
        handler = Starting()
        settings = SETTINGS.model_copy(update={"start_seconds": 0.05})
        system = await started(fake, engine_of({"a": handler}, num_cpus=1), settings=settings)
        handler.gate = asyncio.Event()

        with pytest.raises(StartFailed, match="too few free CPUs for 3 replicas"):
            await system.controller.scale.remote("a", 3)

    run(story())


def test_what_is_not_there_cannot_be_scaled(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)

        error = await cause_of(system.controller.scale.remote("b", 2))

        assert (type(error), str(error)) == (NotRegistered, "There is no dispatcher 'b'.")

    run(story())


# Swapping


def test_new_replicas_are_well_before_any_router_moves(fake: FakeRay) -> None:
    async def story() -> None:
        log, new = Log(), Starting()
        new.gate = asyncio.Event()
        system = await started(fake, engine_of({"a": log.handle}))

        swap = blueprint_of(engine_of({"a": log.handle, "b": new}))
        swapping = asyncio.create_task(_done(system.controller.swap.remote(swap)))
        await until(lambda: new.waiting)
        await turns()
        told = [router.count("follow") for router in system.routers.values()]
        new.gate.set()
        await swapping

        assert told == [1, 1]
        assert [await planned(router) for router in system.routers.values()] == [{"a": ["a-1"], "b": ["b-2"]}] * 2
        assert (await system.send(*orders(1)))[0].table_version == swap.table.version

    run(story())


def test_changed_handlers_are_replaced_and_the_others_stay(fake: FakeRay) -> None:
    async def story() -> None:
        same, old, new = Log(), Log(), Log()
        system = await started(fake, engine_of({"a": same.handle, "b": old.handle}))

        await system.controller.swap.remote(blueprint_of(engine_of({"a": same.handle, "b": new.handle})))
        await system.send(*orders(1))

        assert set(system.replicas) == {"a-1", "b-3"}
        assert (same.payloads, old.payloads, new.payloads) == ([1], [], [1])

    run(story())


def test_what_is_gone_is_drained_after_the_routers_have_moved(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, engine_of({"a": log.handle, "b": Log().handle}))
        leaving = system.replicas["b-2"]
        system.routers["2"].hold("follow")

        swap = blueprint_of(engine_of({"a": log.handle}))
        swapping = asyncio.create_task(_done(system.controller.swap.remote(swap)))
        await until(lambda: system.routers["2"].count("follow") == 2)
        await turns()
        before = leaving.count("drain")
        system.routers["2"].release("follow")
        await swapping

        assert (before, leaving.count("drain")) == (0, 1)
        assert set(system.replicas) == {"a-1"}
        assert list((await status_of(system)).dispatchers) == ["a"]

    run(story())


def test_a_message_that_has_begun_by_the_old_table_finds_those_that_are_gone(fake: FakeRay) -> None:
    async def story() -> None:
        first, gone = Log(), Log()
        first.gate = asyncio.Event()
        before, after = DispatchEngine("shop"), engine_of({"first": first.handle}, priority=9)
        before.dispatcher("first", topics="dev.*.events.*", category=EVENT, priority=9, retry=None)(first.handle)
        before.dispatcher("gone", topics="dev.*.events.*", category=EVENT, retry=None)(gone.handle)
        system = await started(fake, before)

        sending = begun(system, 1)
        await until(lambda: first.seen)
        swapping = asyncio.create_task(_done(system.controller.swap.remote(blueprint_of(after))))
        await until(lambda: all(router.count("follow") == 2 for router in system.routers.values()))
        await turns(100)
        first.gate.set()
        await swapping

        assert (await sending)[0].status is DispatchStatus.SUCCESS
        assert gone.payloads == [1]

    run(story())


@pytest.mark.parametrize(
    "handlers", [{"b": Log().handle, "c": Starting("no database")}, {"b": Log().handle, "a": Starting("no database")}]
)
def test_a_failed_swap_leaves_the_old_state(fake: FakeRay, handlers: dict[str, Any]) -> None:
    async def story() -> None:
        log = Log()
        engine = engine_of({"a": log.handle})
        system = await started(fake, engine)

        with pytest.raises(StartFailed, match="no database"):
            await system.controller.swap.remote(blueprint_of(engine_of({"a": log.handle, **handlers})))

        assert set(system.replicas) == {"a-1"}
        assert list((await status_of(system)).dispatchers) == ["a"]
        assert (await system.send(*orders(1)))[0].table_version == engine.table.version
        assert log.payloads == [1]

    run(story())


def test_a_swap_that_ray_refuses_leaves_the_old_state(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    start = fake.start

    def start_or_refuse(name: str, make: Callable[[], Any]) -> FakeHandle:
        if "/c-" in name:
            raise ValueError("Use the 'num_cpus' keyword instead of 'CPU' in 'resources' keyword")
        return start(name, make)

    async def story() -> None:
        log = Log()
        system = await started(fake, engine_of({"a": log.handle}))
        monkeypatch.setattr(fake, "start", start_or_refuse)

        with pytest.raises(ValueError, match="keyword"):
            await system.controller.swap.remote(
                blueprint_of(engine_of({"a": log.handle, "b": Log().handle, "c": Log().handle}))
            )

        assert set(system.replicas) == {"a-1"}
        assert list((await status_of(system)).dispatchers) == ["a"]

    run(story())


def test_a_dispatcher_that_has_no_breaker_any_more_has_no_open_circuit(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, engine_of({"a": log.handle}))
        await system.controller.report.remote("a", "a-1", Report.OPENED)

        await system.controller.swap.remote(blueprint_of(engine_of({"a": log.handle}, breaker=None)))

        assert (await status_of(system)).dispatchers["a"].circuit is CircuitState.CLOSED
        assert (await system.send(*orders(1)))[0].status is DispatchStatus.SUCCESS

    run(story())


def test_a_scaling_that_ray_refuses_half_way_leaves_all_as_it_was(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake.start

    def start_or_refuse(name: str, make: Callable[[], Any]) -> FakeHandle:
        if name.endswith("a-3"):
            raise ValueError("The name is already taken")
        return start(name, make)

    async def story() -> None:
        system = await started(fake)
        monkeypatch.setattr(fake, "start", start_or_refuse)

        with pytest.raises(ValueError, match="taken"):
            await system.controller.scale.remote("a", 3)

        assert set(system.replicas) == {"a-1"}

    run(story())


def test_a_dead_letter_names_the_table_that_led_it_there(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log(raising)
        system = await started(fake, engine_of({"a": log.handle}))
        swap = blueprint_of(engine_of({"a": log.handle, "b": Log().handle}))

        await system.controller.swap.remote(swap)
        await system.send(*orders(1))
        await turns()

        (one,) = [cloudpickle.loads(one) for one in await system.controller.dead_letters.remote()]
        assert one.table_version == swap.table.version

    run(story())


# After a restart of the controller


def test_a_restarted_controller_goes_on_where_the_old_one_was(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        await system.controller.scale.remote("a", 3)
        before = await status_of(system)

        system.controller.crash()
        after = await status_of(system)
        await system.controller.scale.remote("a", 4)

        assert system.controller.lives == 2
        assert (after.table_version, after.generation >= before.generation) == (before.table_version, True)
        assert [replica.replica_id for replica in after.dispatchers["a"].replicas] == ["a-1", "a-2", "a-3"]
        assert set(system.replicas) == {"a-1", "a-2", "a-3", "a-4"}

    run(story())


def test_a_restarted_controller_takes_the_newest_plan_of_its_routers(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        plan = await system.controller.plan.remote()
        await system.routers["2"].follow.remote(plan._replace(generation=7))

        system.controller.crash()

        assert (await status_of(system)).generation >= 7

    run(story())


def test_a_restarted_controller_brings_all_routers_to_the_newest_plan(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        plan = await system.controller.plan.remote()
        await system.routers["2"].follow.remote(plan._replace(generation=7))

        system.controller.crash()
        await status_of(system)

        assert {(await router.load.remote()).generation for router in system.routers.values()} in ({7}, {8})

    run(story())


def test_a_restarted_controller_ends_those_that_belong_to_nobody(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        fake.start("raydispatch/shop/replica/a-99", Log)
        fake.start("raydispatch/shop-2/replica/a-1", Log)

        system.controller.crash()
        await status_of(system)

        assert set(system.replicas) == {"a-1"}
        assert "raydispatch/shop-2/replica/a-1" in fake.actors

    run(story())


def test_a_restarted_controller_does_not_mind_one_that_ends_meanwhile(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        system = await started(fake)
        ended = {"name": "raydispatch/shop/replica/a-99", "namespace": "raydispatch"}
        monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: [ended, *fake.list_named_actors(True)])

        system.controller.crash()

        assert list((await status_of(system)).dispatchers) == ["a"]

    run(story())


def test_an_open_circuit_outlives_the_controller(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(breaker=BreakerSettings(reset_after_seconds=60)))
        await system.controller.report.remote("a", "a-1", Report.OPENED)

        system.controller.crash()
        circuit: Circuit = await system.controller.circuit.remote("a")

        assert (circuit.state, circuit.trial_replica) == (CircuitState.OPEN, "a-1")
        assert circuit.seconds == pytest.approx(60, abs=10)

    run(story())


def test_a_report_that_meets_a_restarting_controller_counts(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)

        system.controller.crash()
        await system.controller.report.remote("a", "a-1", Report.OPENED)

        assert (await status_of(system)).dispatchers["a"].circuit is CircuitState.OPEN

    run(story())


# Circuits


def told(handle: FakeHandle, method: str) -> list[Any]:
    """The states that an actor was told to take, in order; to be alert is none."""
    calls = [call.arguments for call in handle.calls if call.method == method and call.arguments[-1] is not True]
    return [arguments[-1].state for arguments in calls]


def test_failures_of_ten_replicas_open_the_circuit_once_and_everybody_is_told(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(replicas=10, breaker=BreakerSettings(failure_threshold=5)))

        await asyncio.gather(
            *(_done(system.controller.report.remote("a", f"a-{number}", Report.FAILED)) for number in range(1, 11))
        )

        assert [told(router, "follow_circuit") for router in system.routers.values()] == [[CircuitState.OPEN]] * 2
        assert [told(replica, "follow") for replica in system.replicas.values()] == [[CircuitState.OPEN]] * 10
        assert (await status_of(system)).dispatchers["a"].circuit is CircuitState.OPEN

    run(story())


def test_failing_messages_on_many_replicas_end_in_a_refusal_by_the_routers(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log(raising)
        system = await started(fake, engine_of({"a": log.handle}, replicas=4))

        for number in range(5):
            await system.send(*orders(number))
            await turns()
        (refused,) = await system.send(*orders(6))

        assert refused.status is DispatchStatus.CIRCUIT_OPEN
        assert len(log.seen) == 5

    run(story())


def test_the_first_failure_makes_the_other_replicas_alert(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(replicas=3))

        for _ in range(2):
            await system.controller.report.remote("a", "a-1", Report.FAILED)

        assert {name: replica.count("follow") for name, replica in system.replicas.items()} == {
            "a-1": 0,
            "a-2": 1,
            "a-3": 1,
        }

    run(story())


def test_a_late_failure_makes_nobody_alert(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(replicas=2))
        await system.controller.report.remote("a", "a-1", Report.OPENED)
        before = system.replicas["a-2"].count("follow")

        await system.controller.report.remote("a", "a-1", Report.FAILED)

        assert system.replicas["a-2"].count("follow") == before

    run(story())


def test_a_circuit_that_closes_is_told_too(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(breaker=BreakerSettings(reset_after_seconds=60)))

        await system.controller.report.remote("a", "a-1", Report.OPENED)
        time.advance(60)
        await system.controller.report.remote("a", "a-1", Report.CLOSED)

        assert told(system.routers["1"], "follow_circuit") == [CircuitState.OPEN, CircuitState.CLOSED]

    run(story())


@pytest.mark.parametrize("name", ["a", "unknown"])
def test_without_a_breaker_nobody_is_told_of_failures(fake: FakeRay, name: str) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(breaker=None))

        for _ in range(10):
            await system.controller.report.remote(name, "a-1", Report.FAILED)

        assert told(system.routers["1"], "follow_circuit") == []
        assert (await system.controller.circuit.remote(name)).state is CircuitState.CLOSED

    run(story())


def test_a_new_replica_hears_of_the_open_circuit(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        await system.controller.report.remote("a", "a-1", Report.OPENED)

        await system.controller.scale.remote("a", 2)

        assert (await system.replicas["a-2"].load.remote()).circuit == "open"

    run(story())


# The lease


async def looks(system: System, count: int = 3) -> None:
    """Wait until the controller has looked after its actors so many times more."""
    router = system.routers["1"]
    enough = router.count("load") + count
    await until(lambda: router.count("load") >= enough)


def test_a_driver_that_vanishes_ends_the_system(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        await started(fake, settings=WATCHFUL, lease=True)

        time.advance(WATCHFUL.lease_seconds + 1)
        await until(lambda: not fake.actors)

    run(story())


def test_a_driver_that_is_heard_of_keeps_the_system(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, settings=WATCHFUL, lease=True)

        for _ in range(3):
            time.advance(WATCHFUL.lease_seconds - 1)
            await system.controller.heartbeat.remote()
        await looks(system)

        assert CONTROLLER in fake.actors

    run(story())


def test_without_a_lease_the_system_stays(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, settings=WATCHFUL)

        time.advance(WATCHFUL.lease_seconds * 100)
        await looks(system)

        assert CONTROLLER in fake.actors

    run(story())


def test_a_restarted_controller_gives_the_driver_time_again(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, settings=WATCHFUL, lease=True)

        time.advance(WATCHFUL.lease_seconds - 1)
        system.controller.crash()
        await status_of(system)
        time.advance(WATCHFUL.lease_seconds - 1)
        await looks(system)
        kept = CONTROLLER in fake.actors
        time.advance(2)

        assert kept
        await until(lambda: not fake.actors)

    run(story())


def test_a_slow_start_does_not_use_up_the_lease(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        slow = Starting()
        slow.gate = asyncio.Event()

        starting = asyncio.create_task(started(fake, engine_of({"a": slow}), settings=WATCHFUL, lease=True))
        await until(lambda: slow.waiting)
        time.advance(WATCHFUL.lease_seconds + 1)
        slow.gate.set()
        system = await starting
        router = system.routers["1"]
        await until(lambda: router.count("load") >= 3 or CONTROLLER not in fake.actors)

        assert CONTROLLER in fake.actors

    run(story())


def test_a_system_whose_plan_is_lost_ends_with_its_lease(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, settings=WATCHFUL, lease=True)

        for actor in (*system.routers.values(), system.controller):  # Their node is lost.
            actor.crash()
        await system.controller.routers.remote()
        time.advance(WATCHFUL.lease_seconds + 1)

        await _soon(lambda: not fake.actors)

    run(story())


async def _soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(0.5):
        await until(condition)


# Stopping


def test_stopping_waits_for_what_is_under_way_and_ends_all(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log()
        log.gate = asyncio.Event()
        system = await started(fake, engine_of({"a": log.handle}))
        sending = begun(system, 1)
        await until(lambda: log.seen)

        stopping = asyncio.create_task(_done(system.controller.stop.remote(5)))
        await turns(50)
        waits = not stopping.done()
        log.gate.set()

        assert (waits, await stopping) == (True, True)
        assert (await sending)[0].status is DispatchStatus.SUCCESS
        assert set(fake.actors) == {CONTROLLER}

    run(story())


def test_stopping_in_too_short_a_time_says_so_and_ends_all(fake: FakeRay) -> None:
    async def story() -> None:
        log = Log()
        log.gate = asyncio.Event()
        system = await started(fake, engine_of({"a": log.handle}))
        sending = begun(system, 1)
        await until(lambda: log.seen)

        assert await system.controller.stop.remote(0.02) is False
        assert set(fake.actors) == {CONTROLLER}
        await turns()  # In Python 3.11, wait_for forgets that it is cancelled if its call fails in the same turn.
        sending.cancel()

    run(story())


def test_a_replica_that_hangs_does_not_hold_up_the_others(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of({"a": Log().handle, "b": Log().handle}))
        hanging, other = system.replicas["a-1"], system.replicas["b-2"]
        hanging.hold("drain")

        stopping = asyncio.create_task(_done(system.controller.stop.remote(5)))
        await until(lambda: hanging.count("drain"))
        await turns()
        drained = other.count("drain")
        hanging.release("drain")
        await stopping

        assert drained == 1

    run(story())


# Dead letters and replies


def letter(number: int) -> bytes:
    outcome = Outcome("a", DispatchStatus.DISPATCHER_ERROR)
    now = datetime.now(UTC)
    blob: bytes = cloudpickle.dumps(DeadLetter(TOPIC, Envelope(number), outcome, now, now, "v1"))
    return blob


def test_of_too_many_dead_letters_the_oldest_go(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, settings=SETTINGS.model_copy(update={"dead_letters": 3}))

        for number in range(5):
            await system.controller.bury.remote(letter(number))

        letters = [cloudpickle.loads(one) for one in await system.controller.dead_letters.remote()]
        assert [one.envelope.payload for one in letters] == [2, 3, 4]
        assert (await status_of(system)).dead_letters == 3

    run(story())


def test_a_message_that_took_its_replicas_with_it_is_kept(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        ((topic, envelope),) = orders(7)
        message = message_of(topic, envelope)
        outcome = Outcome("a", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.REPLICA_LOST)

        await system.controller.bury_lost.remote(message.key, message.blob, outcome, "v1")

        (one,) = [cloudpickle.loads(one) for one in await system.controller.dead_letters.remote()]
        assert (one.topic, one.envelope.payload, one.envelope.message_id) == (topic, 7, envelope.message_id)
        assert (one.outcome, one.table_version) == (outcome, "v1")

    run(story())


class Foreign:
    """A payload of a module that the controller's process does not have."""

    def __reduce__(self) -> Any:
        return _import_foreign, ()


def _import_foreign() -> Foreign:
    process = living_in.get()
    if process is not None and process.handle.name == CONTROLLER:
        raise ModuleNotFoundError("No module named 'foreign'")
    return Foreign()


def test_a_dead_letter_that_the_controller_cannot_read_is_kept_all_the_same(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of({"a": Log(raising).handle}))

        await system.send(*orders(Foreign()))
        await turns()

        (one,) = [cloudpickle.loads(one) for one in await system.controller.dead_letters.remote()]
        assert isinstance(one.envelope.payload, Foreign)

    run(story())


def test_replies_wait_for_the_one_who_asked(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)

        await system.controller.deliver_reply.remote("one", UUID(int=1), Reply("yes"))

        assert await system.controller.collect_replies.remote("two", 0.01) == []
        assert await system.controller.collect_replies.remote("one", 5) == [(UUID(int=1), Reply("yes"))]

    run(story())


def test_a_gateway_that_has_its_replies_leaves_no_mailbox_behind(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)

        await system.controller.deliver_reply.remote("one", UUID(int=1), Reply("yes"))
        await system.controller.collect_replies.remote("one", 5)
        await system.controller.collect_replies.remote("two", 0.01)

        assert not system.controller.instance._replies

    run(story())


# Counting


def test_what_a_drained_replica_has_counted_stays(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, engine_of(replicas=2))
        for number in range(20):
            await system.send(*orders(number))
        handled = [(await replica.load.remote()).handled for replica in system.replicas.values()]

        await system.controller.scale.remote("a", 1)
        metrics = await system.controller.metrics.remote()

        assert min(handled) > 0
        assert (metrics.total_dispatches, metrics.dispatcher_metrics["a"].success_count) == (20, 20)

    run(story())


@pytest.mark.usefixtures("_own_pids")
def test_a_replica_that_was_lost_shows_as_restarted_and_its_counts_stay(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake, settings=WATCHFUL)
        await system.send(*orders(1, 2, 3))
        await looks(system)

        system.replicas["a-1"].crash()
        await system.send(*orders(4))
        status = await status_of(system)

        assert [(one.alive, one.restarts, one.handled) for one in status.dispatchers["a"].replicas] == [(True, 1, 1)]
        assert (await system.controller.metrics.remote()).dispatcher_metrics["a"].success_count == 4

    run(story())


def test_an_actor_that_is_away_is_not_alive(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)
        system.replicas["a-1"].is_down = system.routers["2"].is_down = True

        status = await status_of(system)

        assert [replica.alive for replica in status.dispatchers["a"].replicas] == [False]
        assert [(router.name, router.alive) for router in status.routers] == [("router-1", True), ("router-2", False)]

    run(story())


@pytest.mark.parametrize("change", ["scale", "swap"])
def test_the_status_can_be_asked_for_while_the_system_changes(fake: FakeRay, change: str) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, engine_of({"a": log.handle}))
        system.replicas["a-1"].hold("load")

        asking = asyncio.create_task(status_of(system))
        await until(lambda: system.replicas["a-1"].count("load"))
        if change == "scale":
            await system.controller.scale.remote("a", 2)
        else:
            await system.controller.swap.remote(blueprint_of(engine_of({"a": log.handle, "b": Log().handle})))
        system.replicas["a-1"].release("load")

        assert "a" in (await asking).dispatchers

    run(story())


def test_the_status_tells_how_many_messages_come(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake)

        await system.send(*orders(*range(50)))
        time.advance(5)

        assert (await status_of(system)).messages_per_second == 10.0

    run(story())


@pytest.mark.usefixtures("_own_pids")
def test_messages_count_after_a_router_was_lost(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake, settings=SystemSettings(routers=1))
        await system.send(*orders(*range(50)))
        time.advance(5)
        await status_of(system)

        system.routers["1"].crash()
        time.advance(10)
        await status_of(system)
        await system.send(*orders(*range(20)))
        time.advance(10)

        assert (await status_of(system)).messages_per_second == 2.0

    run(story())


def test_a_restarted_controller_does_not_count_what_was_before(fake: FakeRay, time: FakeTime) -> None:
    async def story() -> None:
        system = await started(fake)
        await system.send(*orders(*range(50)))

        system.controller.crash()
        await system.controller.plan.remote()
        time.advance(1)

        assert (await status_of(system)).messages_per_second == 0.0

    run(story())


# With a journal


@pytest.fixture
def journals(monkeypatch: pytest.MonkeyPatch) -> Journals:
    return Journals(monkeypatch)


def durable_engine(
    handlers: dict[str, Any] | None = None, url: str | None = JOURNAL.url, **options: Any
) -> DispatchEngine:
    """As `engine_of`, with the journal at this address."""
    journal = JOURNAL.model_copy(update={"url": url}) if url is not None else None
    engine = DispatchEngine("shop", settings=EngineSettings(journal=journal))
    for name, handler in (handlers or {"a": Log().handle}).items():
        engine.dispatcher(name, topics="dev.*.events.*", category=EVENT, **{"retry": None, **options})(handler)
    return engine


async def publish(system: System, *payloads: object) -> None:
    await system.keeper.append.remote([Segment.of(orders(*payloads)).pack()])


async def until_async(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_the_keeper_is_there_before_any_replica(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        await started(fake, durable_engine())

        names = list(fake.options)
        assert names.index("raydispatch/shop/keeper") < names.index("raydispatch/shop/replica/a-1")
        keeper = fake.options["raydispatch/shop/keeper"]
        assert (keeper["lifetime"], keeper["max_restarts"], keeper["num_cpus"]) == ("detached", -1, 0)

    run(story())


def test_without_a_journal_there_is_no_keeper(fake: FakeRay) -> None:
    async def story() -> None:
        system = await started(fake)

        assert "raydispatch/shop/keeper" not in fake.actors
        assert (await status_of(system)).subscriptions == ()

    run(story())


def test_the_keeper_of_a_file_stays_on_its_node(fake: FakeRay, journals: Journals) -> None:
    node = "a" * 56

    async def story() -> None:
        system = System(fake, durable_engine())
        await system.controller.begin.remote(blueprint_of(system.engine)._replace(home=node))

        placed = fake.options["raydispatch/shop/keeper"]["scheduling_strategy"]
        assert (placed.node_id, placed.soft) == (node, False)

    run(story())


def test_a_durable_message_reaches_every_dispatcher(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        logs = {"a": Log(), "b": Log()}
        system = await started(fake, durable_engine({name: log.handle for name, log in logs.items()}))

        await publish(system, 1, 2)
        await until(lambda: all(len(log.seen) == 2 for log in logs.values()))

    run(story())


def test_a_journal_that_cannot_be_opened_ends_everything_that_was_started(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        journals.faults = [InvalidParameter("There is no directory /nowhere for the journal shop.db: make it first.")]

        error = await cause_of(started(fake, durable_engine()))

        assert isinstance(error, StartFailed)
        assert error.dispatcher_id == "journal"
        assert "There is no directory /nowhere" in error.reason
        assert set(fake.actors) == {CONTROLLER}

    run(story())


def test_a_journal_that_cannot_be_opened_is_called_a_journal(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        journals.faults = [InvalidParameter("There is no directory /nowhere for the journal shop.db: make it first.")]

        error = await cause_of(started(fake, durable_engine()))

        assert "dispatcher" not in str(error)
        assert ".." not in str(error)

    run(story())


def test_the_keeper_hears_of_every_plan_and_every_circuit(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine(breaker=BreakerSettings(failure_threshold=1)))
        await system.controller.scale.remote("a", 2)

        await system.controller.report.remote("a", "a-1", Report.FAILED)

        plans = [call.arguments[0] for call in system.keeper.calls if call.method == "follow"]
        assert [list(plan.replicas["a"]) for plan in plans][-1] == ["a-1", "a-2"]
        circuits = [call.arguments for call in system.keeper.calls if call.method == "follow_circuit"]
        assert [(name, circuit.state) for name, circuit in circuits] == [("a", CircuitState.OPEN)]

    run(story())


def test_the_status_shows_subscriptions_and_dead_letters(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine({"a": raising, "b": Log().handle}, breaker=None))

        await publish(system, 1)

        async def has_ended() -> bool:
            status = await status_of(system)
            return status.dead_letters == 1 and all(one.lag == 0 for one in status.subscriptions)

        await until_async(has_ended)
        found = {one.name: one for one in (await status_of(system)).subscriptions}
        assert set(found) == {"a", "b"}
        assert (found["a"].given_up, found["b"].acked, found["b"].consumers) == (1, 1, 1)
        assert (str(found["a"].mode), found["a"].reliable) == ("shared", True)

    run(story())


def test_a_status_can_be_had_while_the_keeper_is_away(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine())
        system.keeper.is_down = True

        status = await status_of(system)

        assert (status.subscriptions, status.dead_letters) == ((), 0)

    run(story())


def test_a_keeper_that_dies_comes_back_and_goes_on(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))
        await publish(system, 1)
        await until(lambda: log.seen)

        system.keeper.crash()
        await publish(system, 2)
        await until(lambda: 2 in log.payloads)
        await turns(100)

        assert log.payloads == [1, 2]  # The first comes again, and is remembered.

    run(story())


async def handled(fake: FakeRay, delay: bool, delivery: JournalDelivery, count: int) -> list[Any]:
    """In which order the one handler sees messages, one at a time."""
    log = Log()
    system = await started(fake, durable_engine({"a": log.handle}, concurrency=1, delivery=delivery))
    if delay:
        system.replicas["a-1"].delay("process")
    await publish(system, *range(count))
    await until(lambda: len(log.seen) == count)
    return log.payloads


@pytest.mark.parametrize(
    ("delay", "window"),
    [
        (False, 16),
        (True, 1),
        (True, 16),
    ],
)
def test_exclusive_delivery_keeps_order_though_calls_may_overtake_each_other(
    fake: FakeRay, journals: Journals, delay: bool, window: int
) -> None:
    async def story() -> None:
        ran = await handled(fake, delay, JournalDelivery.reliable_exclusive(window=window), 40)

        assert ran == list(range(40))

    run(story())


# Dead letters in the journal


def test_dead_letters_that_are_data_go_to_the_keeper_and_others_stay(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine())
        data = pack_letter(cloudpickle.loads(letter(1)))

        await system.controller.bury_many.remote([data, letter(2)])
        await system.controller.bury.remote(letter(3))

        kept = [cloudpickle.loads(one).envelope.payload for one in await system.controller.dead_letters.remote()]
        assert (await system.keeper.letters.remote(), kept) == ([data], [2, 3])

    run(story())


def test_what_dispatch_could_not_handle_is_in_the_journal_too(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine({"a": raising}))

        await system.send(*orders({"n": 1}))

        async def kept() -> list[bytes]:
            found: list[bytes] = await system.keeper.letters.remote()
            return found

        await until_async(kept)
        (packed,) = await kept()
        assert unpack_letter(packed).envelope.payload == {"n": 1}

    run(story())


@pytest.mark.parametrize(("payload", "is_data"), [({"n": 1}, True), (Starting(), False)])
def test_a_message_that_took_its_replicas_with_it_is_in_the_journal_if_it_is_data(
    fake: FakeRay, journals: Journals, payload: object, is_data: bool
) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine())
        message = message_of(TOPIC, Envelope(payload, message_type="Order"))
        outcome = Outcome("a", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.REPLICA_LOST)

        await system.controller.bury_lost.remote(message.key, message.blob, outcome, "v")

        in_journal = len(await system.keeper.letters.remote())
        in_memory = len(await system.controller.dead_letters.remote())
        assert (in_journal, in_memory) == (int(is_data), int(not is_data))

    run(story())


def test_a_dead_letter_that_meets_a_keeper_that_is_away_is_not_lost(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine())
        data = pack_letter(cloudpickle.loads(letter(1)))
        system.keeper.crash_at("bury")

        with suppress(Exception):
            await system.controller.bury_many.remote([data])

        found = [*await system.keeper.letters.remote(), *await system.controller.dead_letters.remote()]
        assert len(found) == 1

    run(story())


def test_dead_letters_are_kept_after_a_swap_that_takes_the_journal_away(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine({"a": raising}))
        await system.controller.swap.remote(blueprint_of(durable_engine({"a": raising}, url=None)))

        await system.send(*orders({"n": 1}))
        await turns(100)

        assert len(await system.controller.dead_letters.remote()) == 1

    run(story())


class Forwarding(Shared):
    """A handler with an output, which waits at the gate of its message if there is one."""

    def __init__(self, *held: object) -> None:
        self.ran: list[Any] = []
        self.gates = {payload: asyncio.Event() for payload in held}

    async def handle(self, envelope: Envelope[Any]) -> str:
        self.ran.append(envelope.payload)
        if envelope.payload in self.gates:
            await self.gates[envelope.payload].wait()
        return "dev.done.results.v1"


def test_outputs_that_found_no_room_are_published_later_without_running_the_handler_elsewhere(
    fake: FakeRay, journals: Journals
) -> None:
    async def story() -> None:
        handler = Forwarding("first", "there", "here")
        engine = durable_engine(
            {"a": handler}, replicas=2, outputs="journal", delivery=JournalDelivery(window=1),
            retry=RetrySettings(tries=9, first_delay_seconds=1, max_delay_seconds=1),
        )  # fmt: skip
        system = await started(fake, engine)
        await publish(system, "first")
        await until(lambda: handler.ran)
        await publish(system, "there", "here")  # One for the other replica, and one that waits for a place.
        await until(lambda: len(handler.ran) == 2)
        journals[JOURNAL.url].away = True
        handler.gates["first"].set()
        await until(lambda: len(handler.ran) == 3)
        journals[JOURNAL.url].away = False

        handler.gates["there"].set()
        await until(lambda: len(journals[JOURNAL.url].batches) == 4)

        assert handler.ran.count("first") == 1

    run(story())


# Changes with a journal


def test_a_swap_brings_and_takes_subscriptions(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        logs = {name: Log() for name in "abc"}
        handlers = {name: log.handle for name, log in logs.items()}
        system = await started(fake, durable_engine({name: handlers[name] for name in "ab"}))
        await publish(system, 1)
        await until(lambda: logs["a"].seen and logs["b"].seen)

        await system.controller.swap.remote(blueprint_of(durable_engine({name: handlers[name] for name in "bc"})))
        await publish(system, 2)
        await until(lambda: len(logs["b"].seen) == 2 and logs["c"].seen)

        assert {name: log.payloads for name, log in logs.items()} == {"a": [1], "b": [1, 2], "c": [2]}
        assert [one.name for one in (await status_of(system)).subscriptions] == ["b", "c"]

    run(story())


def test_a_swap_changes_how_messages_are_delivered(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))

        swap = durable_engine({"a": log.handle}, delivery=JournalDelivery.reliable_exclusive(window=1))
        await system.controller.swap.remote(blueprint_of(swap))
        await publish(system, 1)
        await until(lambda: log.seen)

        (subscription,) = (await status_of(system)).subscriptions
        assert (str(subscription.mode), subscription.consumers) == ("exclusive", 1)

    run(story())


def test_a_swap_can_bring_a_journal(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}, url=None))

        await system.controller.swap.remote(blueprint_of(durable_engine({"a": log.handle})))
        await publish(system, 1)

        await until(lambda: log.payloads == [1])

    run(story())


def test_after_a_swap_that_brings_a_journal_replicas_remember_in_it(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}, url=None))

        await system.controller.swap.remote(blueprint_of(durable_engine({"a": log.handle})))
        await publish(system, 1)
        await until(lambda: log.seen)

        async def knows() -> list[bytes]:
            found: list[bytes] = await system.keeper.recall.remote("a")
            return found

        async with asyncio.timeout(0.5):
            await until_async(knows)

    run(story())


def test_replicas_that_come_with_a_journal_know_what_is_remembered_there(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        messages = orders(1)
        first, second = Log(), Log()
        system = await started(fake, durable_engine({"a": first.handle}))
        await system.send(*messages)
        await system.controller.stop.remote(5.0)

        system = await started(fake, durable_engine({"b": Log().handle}, url=None))
        await system.controller.swap.remote(blueprint_of(durable_engine({"a": second.handle})))
        await system.send(*messages)

        assert (len(first.seen), len(second.seen)) == (1, 0)

    run(story())


def test_a_swap_can_take_the_journal_away(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))
        await publish(system, 1)
        await until(lambda: log.seen)

        await system.controller.swap.remote(blueprint_of(durable_engine({"a": log.handle}, url=None)))
        await system.controller.swap.remote(blueprint_of(durable_engine({"a": log.handle})))
        await publish(system, 2)
        await until(lambda: len(log.seen) == 2)

        assert log.payloads == [1, 2]
        assert journals[JOURNAL.url].closes == 1

    run(story())


def test_a_swap_to_another_journal_leaves_the_old_one_behind(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))

        await system.controller.swap.remote(blueprint_of(durable_engine({"a": log.handle}, url="sqlite:///new.db")))
        await publish(system, 1)
        await until(lambda: log.seen)

        assert [len(journals[url].batches) for url in (JOURNAL.url, "sqlite:///new.db")] == [0, 1]
        assert journals[JOURNAL.url].closes == 1

    run(story())


def test_a_swap_to_a_journal_that_cannot_be_opened_leaves_the_old_state(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))
        journals.faults = [InvalidParameter("There is no directory /nowhere.")]

        with pytest.raises(StartFailed, match="no directory"):
            await system.controller.swap.remote(blueprint_of(durable_engine({"a": log.handle}, url="sqlite:///x/y.db")))
        await publish(system, 1)
        await until(lambda: log.seen)

        assert (await system.controller.blueprint.remote()).engine.journal == JOURNAL

    run(story())


def test_scaling_changes_who_gets_what_comes_from_the_journal(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))

        await system.controller.scale.remote("a", 3)
        grown = (await status_of(system)).subscriptions[0].consumers
        await system.controller.scale.remote("a", 1)
        await publish(system, *range(50))
        await until(lambda: len(log.seen) == 50)

        assert (grown, (await status_of(system)).subscriptions[0].consumers) == (3, 1)

    run(story())


def test_a_replica_that_leaves_gets_nothing_more_from_the_journal(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        log.gate = asyncio.Event()
        system = await started(fake, durable_engine({"a": log.handle}, replicas=2))
        await publish(system, *range(10))
        await until(lambda: log.now == 10)

        scaling = asyncio.create_task(_done(system.controller.scale.remote("a", 1)))
        await until(lambda: system.replicas["a-2"].count("drain"))
        parts = system.replicas["a-2"].count("process")
        await publish(system, *range(10, 20))
        await until(lambda: log.now == 20)
        log.gate.set()
        leaving = system.replicas["a-2"]
        await scaling

        assert leaving.count("process") == parts
        assert sorted(log.payloads) == list(range(20))

    run(story())


def test_a_restarted_controller_keeps_the_keeper(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))
        keeper = system.keeper

        system.controller.crash()
        await system.controller.scale.remote("a", 2)
        await publish(system, 1)
        await until(lambda: log.seen)

        assert (system.keeper is keeper, keeper.lives) == (True, 1)
        (subscription,) = (await status_of(system)).subscriptions
        assert subscription.consumers == 2

    run(story())


def test_keeper_and_controller_may_die_together(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        system = await started(fake, durable_engine({"a": log.handle}))

        system.controller.crash()
        system.keeper.crash()
        await publish(system, 1)

        await until(lambda: log.payloads == [1])

    run(story())


# Stopping with a journal


def test_stopping_ends_what_is_under_way_and_keeps_the_cursors(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        log = Log()
        log.gate = asyncio.Event()
        system = await started(fake, durable_engine({"a": log.handle}))
        await publish(system, 1)
        await until(lambda: log.seen)

        stopping = asyncio.create_task(_done(system.controller.stop.remote(5.0)))
        await until(lambda: system.keeper.count("drain"))
        await publish(system, 2)  # Kept, and delivered in the next life.
        log.gate.set()

        assert await stopping is True
        assert set(fake.actors) == {CONTROLLER}
        assert (log.payloads, journals[JOURNAL.url].closes) == ([1], 1)

    run(story())


def test_the_next_life_goes_on_where_the_last_one_was(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        first, second = Log(), Log()
        system = await started(fake, durable_engine({"a": first.handle}))
        await publish(system, 1, 2)
        await until(lambda: len(first.seen) == 2)
        assert await system.controller.stop.remote(5.0)

        again = await started(fake, durable_engine({"a": second.handle}))
        await publish(again, 3)
        await until(lambda: second.seen)
        await turns(100)

        assert (first.payloads, second.payloads) == ([1, 2], [3])
        assert second.seen[0].attempt == 1

    run(story())


def test_what_a_reader_holds_when_the_system_stops_comes_in_the_next_life(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        system = await started(fake, durable_engine())
        reader = await system.keeper.consume.remote("feed", "**", JournalDelivery(), None)
        await publish(system, 1)
        held = await system.keeper.pull.remote(reader, 1, 1.0)

        in_time = await system.controller.stop.remote(0.1)
        again = await started(fake, durable_engine())
        reader = await again.keeper.consume.remote("feed", "**", JournalDelivery(), None)
        found = await again.keeper.pull.remote(reader, 1, 1.0)

        assert not in_time
        assert found.offsets == held.offsets
        assert found.deliveries[0] > 0

    run(story())

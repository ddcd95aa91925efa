import asyncio
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError
from tests.actors.fakes import (
    EVENT,
    SETTINGS,
    TOPIC,
    FakeHandle,
    FakeRay,
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
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply
from raydispatch.errors import DispatchError, ErrorCode, NotRegistered, StartFailed
from raydispatch.settings import BreakerSettings, SystemSettings

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

"""Processes killed in the middle: what was promised holds.

Each kill happens when so many outcomes have been seen, with messages in flight at that moment.
"""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.actors.helping import (
    TOPIC,
    actors_of,
    engine_of,
    is_gone,
    kill,
    numbers,
    orders,
    recorded,
    recorder_class,
    replica_pids,
    router_pids,
    wait_until,
)

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.errors import ErrorCode
from raydispatch.settings import SystemSettings

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

MESSAGES = 100_000


def sent_with_a_strike(
    system: DispatchSystem, strike: Callable[[], None], at: int = 20_000, messages: int = MESSAGES
) -> list[DispatchResult]:
    """All results, with something bad happening when so many have been seen."""
    results = []
    for number, result in enumerate(system.dispatch_many(orders(messages)), start=1):
        results.append(result)
        if number == at:
            assert number < messages - system._settings.batch_messages  # There is more under way.
            strike()
    return results


def check_at_least_once(results: list[DispatchResult], path: Path, messages: int = MESSAGES) -> None:
    assert Counter(result.status for result in results) == {DispatchStatus.SUCCESS: messages}
    ran = numbers(path)
    assert set(ran) == set(range(messages))
    attempts: dict[int, list[int]] = {}
    for number, attempt, _ in recorded(path):
        attempts.setdefault(number, []).append(attempt)
    for number in (number for number, count in ran.items() if count > 1):
        assert sorted(attempts[number])[1] > 1, f"{number} ran twice with attempts {attempts[number]}"


def test_a_killed_replica_costs_no_message(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    with DispatchSystem.start(engine_of("replica-killed", recorder_class(path), replicas=2)) as system:
        results = sent_with_a_strike(system, lambda: kill(replica_pids(system)[0]))
        wait_until(lambda: all(replica.alive for replica in system.status().dispatchers["orders"].replicas))

    check_at_least_once(results, path)


def test_all_replicas_killed_cost_no_message(tmp_path: Path) -> None:
    path = tmp_path / "seen"

    def strike() -> None:
        for pid in replica_pids(system):
            kill(pid)

    with DispatchSystem.start(engine_of("all-killed", recorder_class(path), replicas=2)) as system:
        results = sent_with_a_strike(system, strike)

    check_at_least_once(results, path)


def test_a_killed_router_costs_no_message(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    with DispatchSystem.start(engine_of("router-killed", recorder_class(path), replicas=2)) as system:
        results = sent_with_a_strike(system, lambda: kill(router_pids(system)[0]))

    check_at_least_once(results, path)


def test_a_killed_controller_costs_no_message_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    with DispatchSystem.start(engine_of("controller-killed", recorder_class(path))) as system:
        system.scale("orders", 2)
        pid = ray.get(system._controller.pid.remote())
        results = sent_with_a_strike(system, lambda: kill(pid))
        status = system.status()
        system.scale("orders", 3)
        after = system.status()

    check_at_least_once(results, path)
    assert len(status.dispatchers["orders"].replicas) == 2
    assert len(after.dispatchers["orders"].replicas) == 3
    assert is_gone("controller-killed")


@pytest.mark.parametrize("victim", ["replica", "router"])
def test_at_most_once_repeats_nothing(tmp_path: Path, victim: str) -> None:
    path = tmp_path / "seen"
    engine = engine_of(f"at-most-once-{victim}", recorder_class(path), replicas=2, at_most_once=True)
    with DispatchSystem.start(engine) as system:

        def strike() -> None:
            kill((replica_pids(system) if victim == "replica" else router_pids(system))[0])

        results = sent_with_a_strike(system, strike)

    statuses = Counter(result.status for result in results)
    assert statuses[DispatchStatus.SUCCESS] + statuses[DispatchStatus.DISPATCHER_ERROR] == MESSAGES
    lost = [result for result in results if result.status is DispatchStatus.DISPATCHER_ERROR]
    assert {result.error_code for result in lost} <= {ErrorCode.REPLICA_LOST}
    assert max(numbers(path).values()) == 1
    succeeded = {number for number, result in enumerate(results) if result.is_successful()}
    assert succeeded <= set(numbers(path))


def test_a_message_that_kills_its_process_ends_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "seen")

    async def deadly(envelope: Envelope[Any]) -> None:
        if envelope.payload == 777:
            os._exit(1)
        with open(path, "a") as file:  # noqa: ASYNC230
            file.write(f"{envelope.payload} {envelope.attempt} 0\n")

    with DispatchSystem.start(engine_of("deadly", deadly, replicas=2, breaker=None)) as system:
        results = list(system.dispatch_many(orders(1_000)))

    failed = [number for number, result in enumerate(results) if not result.is_successful()]
    assert failed == [777]
    assert results[777].error_code is ErrorCode.REPLICA_LOST
    assert set(numbers(Path(path))) == set(range(1_000)) - {777}


def test_a_handler_that_hangs_is_cut_off_by_its_time_limit() -> None:
    async def hang(envelope: Envelope[Any]) -> None:
        if envelope.payload == 3:
            await __import__("asyncio").Event().wait()

    with DispatchSystem.start(engine_of("hanging", hang, time_limit_seconds=0.5, retry=None)) as system:
        results = list(system.dispatch_many(orders(10)))

    assert [result.status for result in results].count(DispatchStatus.SUCCESS) == 9
    assert results[3].status is DispatchStatus.TIMEOUT


def test_a_handler_that_hangs_for_ever_ends_with_the_callers_deadline() -> None:
    def hang(envelope: Envelope[Any]) -> None:
        threading.Event().wait()

    settings = SystemSettings(call_seconds=2, stop_seconds=1)
    with DispatchSystem.start(engine_of("stuck", hang), settings=settings) as system:
        result = system.dispatch(TOPIC, Envelope(1, message_type="Order"))

    assert result.status is DispatchStatus.TIMEOUT
    assert is_gone("stuck")


def test_a_reply_that_does_not_pickle_is_the_handlers_fault() -> None:
    async def reply(envelope: Envelope[Any]) -> Any:
        from raydispatch import Reply

        return Reply(threading.Lock() if envelope.payload == 1 else envelope.payload)

    with DispatchSystem.start(engine_of("unpicklable-reply", reply, retry=None)) as system:
        results = list(system.dispatch_many(orders(3)))

    assert [result.status for result in results] == [
        DispatchStatus.SUCCESS,
        DispatchStatus.DISPATCHER_ERROR,
        DispatchStatus.SUCCESS,
    ]
    assert results[1].error_code is ErrorCode.HANDLER_RESULT


DRIVER = """
import sys
from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.settings import SystemSettings

engine = DispatchEngine(sys.argv[1])

@engine.dispatcher("orders", topics="dev.*.events.*", category=MessageCategory.EVENT)
async def handle(envelope):
    return None

settings = SystemSettings(lease_seconds=4, stop_seconds=2)
system = DispatchSystem.start(engine, lease=sys.argv[2] == "lease", settings=settings)
print("started", flush=True)
for number in range(10**9):
    system.dispatch("dev.order.events.v1", Envelope(number))
"""


def driver(name: str, lease: str) -> "subprocess.Popen[str]":
    address = ray.get_runtime_context().gcs_address
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, name, lease],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_a_driver_that_vanishes_leaves_nothing_running() -> None:
    process = driver("vanishing", "lease")
    assert actors_of("vanishing")

    process.kill()
    process.communicate(timeout=30)

    wait_until(lambda: not actors_of("vanishing"), 60)


def test_a_deployed_system_outlives_its_driver() -> None:
    process = driver("deployed", "none")

    process.kill()
    process.communicate(timeout=30)
    system = DispatchSystem.attach("deployed")

    assert system.dispatch(TOPIC, Envelope(1)).is_successful()
    system.stop()
    assert is_gone("deployed")


def test_the_circuit_survives_the_restart_of_its_replica_and_of_the_controller() -> None:
    async def fail(envelope: Envelope[Any]) -> None:
        raise ConnectionError("down")

    engine = DispatchEngine("remembering")
    engine.dispatcher("orders", topics="dev.*.events.*", category=MessageCategory.EVENT, retry=None)(fail)
    with DispatchSystem.start(engine) as system:

        def status() -> DispatchStatus:
            return system.dispatch(TOPIC, Envelope(1, message_type="Order")).status

        wait_until(lambda: status() is DispatchStatus.CIRCUIT_OPEN)
        kill(replica_pids(system)[0])
        wait_until(lambda: all(replica.alive for replica in system.status().dispatchers["orders"].replicas))
        after_replica = status()
        kill(ray.get(system._controller.pid.remote()))
        wait_until(lambda: system.status().dispatchers["orders"].circuit == "open")

        assert (after_replica, status()) == (DispatchStatus.CIRCUIT_OPEN, DispatchStatus.CIRCUIT_OPEN)


class Eater:
    """Eats more memory than its process may have."""

    def start(self) -> None:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, resource.RLIM_INFINITY))

    async def handle(self, envelope: Envelope[Any]) -> None:
        if envelope.payload == 3:
            bytearray(1_000_000_000)


def test_a_handler_that_eats_memory_costs_its_own_message_only() -> None:
    with DispatchSystem.start(engine_of("eating", Eater, retry=None)) as system:
        results = list(system.dispatch_many(orders(10)))

    assert [result.status for result in results].count(DispatchStatus.SUCCESS) == 9
    assert results[3].outcomes[0].error_type == "MemoryError"


def test_a_million_messages_need_no_more_memory_than_a_few_batches() -> None:
    async def ignore(envelope: Envelope[Any]) -> None:
        return None

    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with DispatchSystem.start(engine_of("million", ignore, replicas=2)) as system:
        assert sum(result.is_successful() for result in system.dispatch_many(orders(50_000))) == 50_000
        before = memory()
        most = done = 0
        for number, result in enumerate(system.dispatch_many(orders(1_000_000))):
            done += result.is_successful()
            if number % 10_000 == 0:
                most = max(most, memory())

    assert done == 1_000_000
    assert most - before < 200_000_000

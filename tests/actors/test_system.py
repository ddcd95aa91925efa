"""The same engine on a real Ray: sending, scaling, swapping, attaching, stopping."""

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import Any

import pytest
import ray
from pydantic import BaseModel
from tests.actors.helping import (
    TOPIC,
    actors_of,
    engine_of,
    is_gone,
    numbers,
    orders,
    recorded,
    recorder_class,
    wait_until,
)

from raydispatch import BreakerSettings, DispatchEngine, Envelope, MessageCategory, Reply, RetrySettings
from raydispatch.actors import DispatchSystem
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import ErrorCode, InvalidParameter, InvalidState, RequestFailed, StartFailed, SystemUnavailable
from raydispatch.settings import SystemSettings

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Order(BaseModel):
    number: int


async def ignore(envelope: Envelope[Any]) -> None:
    return None


def shop() -> DispatchEngine:
    engine = DispatchEngine("shop")

    @engine.dispatcher("typed", topics="*.order.events.*", category=MessageCategory.EVENT, replicas=2)
    async def typed(envelope: Envelope[Order]) -> None:
        assert envelope.payload.number >= 0

    @engine.dispatcher("echo", topics="*.echo.commands.*", category=MessageCategory.COMMAND)
    def echo(envelope: Envelope[Any]) -> Reply:
        return Reply(envelope.payload)

    @engine.dispatcher("first", topics="*.chain.intents.one", category=MessageCategory.INTENT)
    async def first(envelope: Envelope[Any]) -> str:
        return "dev.chain.intents.two"

    @engine.dispatcher("second", topics="*.chain.intents.two", category=MessageCategory.INTENT)
    async def second(envelope: Envelope[Any]) -> Reply:
        return Reply(f"hop {envelope.hops}")

    @engine.dispatcher("broken", topics="*.broken.events.*", category=MessageCategory.EVENT, retry=None, breaker=None)
    async def broken(envelope: Envelope[Any]) -> None:
        raise ConnectionError("refused, password=hunter2")

    return engine


@pytest.fixture(scope="module")
def system(ray_cluster: None) -> Any:
    with DispatchSystem.start(shop()) as running:
        yield running
    assert is_gone("shop")


def test_a_message_reaches_its_dispatcher_and_its_result_comes_back(system: DispatchSystem) -> None:
    result = system.dispatch(TOPIC, Envelope({"number": 7}, message_type="Order"))

    assert result.status is DispatchStatus.SUCCESS
    assert (result.dispatcher_id, result.route_id, result.topic) == ("typed", "typed", TOPIC)
    assert result.table_version == system.status().table_version


def test_a_model_of_the_sender_arrives_as_the_model_asked_for(system: DispatchSystem) -> None:
    assert system.dispatch(TOPIC, Envelope(Order(number=1))).is_successful()


def test_what_a_message_can_cause_is_an_outcome(system: DispatchSystem) -> None:
    misfit = system.dispatch(TOPIC, Envelope({"number": "seven"}, message_type="Order"))
    nobody = system.dispatch("dev.nobody.events.v1", Envelope({}))
    no_category = system.dispatch("dev.order.v1", Envelope({}))
    failing = system.dispatch("dev.broken.events.v1", Envelope({}))

    assert (misfit.status, misfit.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID)
    assert nobody.status is DispatchStatus.NO_DISPATCHER
    assert (no_category.status, no_category.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC)
    assert failing.status is DispatchStatus.DISPATCHER_ERROR
    assert "hunter2" not in repr(failing)


def test_a_failed_message_is_a_dead_letter(system: DispatchSystem) -> None:
    envelope = Envelope({"id": 1}, message_type="Lost")
    system.dispatch("dev.broken.events.v1", envelope)

    def buried() -> bool:
        return envelope.message_id in [letter.envelope.message_id for letter in system.dead_letters()]

    wait_until(buried)
    assert "hunter2" not in repr([letter.outcome for letter in system.dead_letters()])


def test_commands_requests_and_replies(system: DispatchSystem) -> None:
    assert system.execute("dev.echo.commands.x", Envelope({"a": 1})).reply == Reply({"a": 1})
    assert system.request("dev.echo.commands.x", Envelope("hello"), timeout=20) == Reply("hello")
    with pytest.raises(RequestFailed):
        system.request("dev.nobody.events.x", Envelope("hello"), timeout=20)


def test_a_reply_comes_back_from_further_down_the_chain(system: DispatchSystem) -> None:
    reply = system.request("dev.chain.intents.one", Envelope("hello"), timeout=20)

    assert reply == Reply("hop 1")


def test_many_results_come_in_the_order_of_the_messages(system: DispatchSystem) -> None:
    envelopes = [Envelope({"number": i}, message_type="Order") for i in range(5_000)]

    results = list(system.dispatch_many((TOPIC, envelope) for envelope in envelopes))

    assert [result.correlation_id for result in results] == [envelope.correlation_id for envelope in envelopes]
    assert {result.status for result in results} == {DispatchStatus.SUCCESS}


def test_one_bad_message_costs_its_batch_nothing(system: DispatchSystem) -> None:
    payloads: list[Any] = [{"number": i} for i in range(1_000)]
    payloads[500] = "no json"

    results = list(system.dispatch_many((TOPIC, Envelope(payload, message_type="Order")) for payload in payloads))

    assert Counter(result.status for result in results) == {
        DispatchStatus.SUCCESS: 999,
        DispatchStatus.INVALID_MESSAGE: 1,
    }
    assert results[500].status is DispatchStatus.INVALID_MESSAGE


def test_one_message_is_all_that_asyncio_run_needs(system: DispatchSystem) -> None:
    result = asyncio.run(system.dispatch_async(TOPIC, Envelope({"number": 1}, message_type="Order")))

    assert result.status is DispatchStatus.SUCCESS


def test_tasks_and_threads_share_a_system(system: DispatchSystem) -> None:
    statuses: list[DispatchStatus] = []

    async def many() -> None:
        envelopes = [Envelope({"number": i}, message_type="Order") for i in range(500)]
        results = await asyncio.gather(*(system.dispatch_async(TOPIC, envelope) for envelope in envelopes))
        statuses.extend(result.status for result in results)

    def one_by_one() -> None:
        for i in range(20):
            statuses.append(system.dispatch(TOPIC, Envelope({"number": i}, message_type="Order")).status)

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(2)]
    threads += [threading.Thread(target=one_by_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert Counter(statuses) == {DispatchStatus.SUCCESS: 2 * 500 + 3 * 20}


def test_published_messages_are_delivered_and_subscribers_hear_of_them(system: DispatchSystem) -> None:
    async def scenario() -> list[Any]:
        async with system.subscribe("dev.order.**") as news:
            receipt = await system.publish_async(TOPIC, Envelope({"number": 3}, message_type="Order"))
            assert (receipt.status, receipt.subscribers) == (DispatchStatus.ROUTED, 1)
            return [await asyncio.wait_for(anext(news), 10)]

    before = system.get_structured_metrics().total_dispatches
    heard = asyncio.run(scenario())
    receipt = system.publish(TOPIC, Envelope({"number": 4}, message_type="Order"))
    system.drain()

    assert heard[0].payload == {"number": 3}
    assert receipt.status is DispatchStatus.ROUTED
    wait_until(lambda: system.get_structured_metrics().total_dispatches >= before + 1)


def test_a_session_lives_in_the_process_that_opened_it(system: DispatchSystem) -> None:
    async def scenario() -> tuple[Any, Any]:
        async with system.session("job") as session:

            @session.dispatcher("own", topics="*.echo.commands.*", category=MessageCategory.COMMAND)
            async def own(envelope: Envelope[Any]) -> Reply:
                return Reply("mine")

            inside = await session.execute("dev.echo.commands.x", Envelope("theirs"))
            outside = await system.execute_async("dev.echo.commands.x", Envelope("theirs"))
            return inside.reply, outside.reply

    assert asyncio.run(scenario()) == (Reply("mine"), Reply("theirs"))


def test_metrics_are_summed_over_all_actors(system: DispatchSystem) -> None:
    before = system.get_structured_metrics()
    list(system.dispatch_many((TOPIC, Envelope({"number": i}, message_type="Order")) for i in range(300)))
    after = system.get_structured_metrics()

    assert after.total_dispatches - before.total_dispatches == 300
    typed_before, typed_after = before.dispatcher_metrics["typed"], after.dispatcher_metrics["typed"]
    assert typed_after.success_count - typed_before.success_count == 300


def test_a_second_process_attaches(system: DispatchSystem) -> None:
    program = (
        "from raydispatch import Envelope\n"
        "from raydispatch.actors import DispatchSystem\n"
        "with DispatchSystem.attach('shop') as system:\n"
        "    print(system.execute('dev.echo.commands.x', Envelope('from afar')).reply)\n"
    )
    address = ray.get_runtime_context().gcs_address

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**__import__("os").environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "from afar" in done.stdout, done.stderr
    assert system.status().name == "shop"


def test_a_name_is_taken_once(system: DispatchSystem) -> None:
    with pytest.raises(InvalidState, match="attach"):
        DispatchSystem.start(shop())


def test_nobody_attaches_to_what_is_not_there(ray_cluster: None) -> None:
    with pytest.raises(SystemUnavailable, match="no system 'nothing'"):
        DispatchSystem.attach("nothing")


def test_scaling_under_load_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    with DispatchSystem.start(engine_of("scaling", recorder_class(path))) as system:
        sizes = iter((4, 1))
        results = []
        for number, result in enumerate(system.dispatch_many(orders(60_000)), start=1):
            results.append(result.status)
            if number in (10_000, 40_000):
                system.scale("orders", next(sizes))
        replicas = system.status().dispatchers["orders"].replicas

    assert Counter(results) == {DispatchStatus.SUCCESS: 60_000}
    assert numbers(path) == Counter(range(60_000))
    assert len(replicas) == 1
    assert len({process for _, _, process in recorded(path)}) == 4


def test_swapping_under_load_routes_every_batch_by_one_table(tmp_path: Path) -> None:
    old = engine_of("swapping", ignore)
    new = DispatchEngine("swapping")
    new.dispatcher("orders", topics="dev.*.events.*", category=MessageCategory.EVENT)(ignore)
    new.dispatcher("audit", topics="dev.**", category=MessageCategory.EVENT)(recorder_class(tmp_path / "audit"))
    settings = SystemSettings(batch_messages=500)

    with DispatchSystem.start(old, settings=settings) as system:
        results = []
        for number, result in enumerate(system.dispatch_many(orders(30_000)), start=1):
            results.append(result)
            if number == 10_000:
                system.swap(new)
        dispatchers = set(system.status().dispatchers)

    batches = [results[start : start + 500] for start in range(0, 30_000, 500)]
    assert all(len({result.table_version for result in batch}) == 1 for batch in batches)
    assert {result.table_version for result in results} == {old.table.version, new.table.version}
    audited = [result for result in results if result.table_version == new.table.version]
    assert all([outcome.dispatcher_id for outcome in result.outcomes] == ["orders", "audit"] for result in audited)
    assert sum(numbers(tmp_path / "audit").values()) == len(audited)
    assert dispatchers == {"orders", "audit"}


def test_swapping_to_a_table_whose_dispatcher_does_not_start_changes_nothing() -> None:
    class Broken:
        def start(self) -> None:
            raise ConnectionError("no database")

        async def handle(self, envelope: Envelope[Any]) -> None:
            return None

    bad = DispatchEngine("careful")
    bad.dispatcher("orders", topics="dev.*.events.*", category=MessageCategory.EVENT)(ignore)
    bad.dispatcher("audit", topics="dev.**", category=MessageCategory.EVENT)(Broken)

    with DispatchSystem.start(engine_of("careful", ignore)) as system:
        version = system.status().table_version
        with pytest.raises(StartFailed, match="no database"):
            system.swap(bad)
        result = system.dispatch(TOPIC, Envelope(1, message_type="Order"))

        assert result.table_version == version
        assert result.is_successful()


def test_replicas_that_fail_together_trip_together(tmp_path: Path) -> None:
    place = str(tmp_path / "calls")

    async def fail(envelope: Envelope[Any]) -> None:
        with open(place, "a") as file:  # noqa: ASYNC230
            file.write("called\n")
        raise ConnectionError("down")

    breaker = BreakerSettings(failure_threshold=5, reset_after_seconds=30)
    engine = engine_of("tripping", fail, replicas=5, breaker=breaker, retry=None)
    with DispatchSystem.start(engine) as system:
        statuses = [system.dispatch(TOPIC, Envelope(i, message_type="Order")).status for i in range(40)]
        circuit = system.status().dispatchers["orders"].circuit

    calls = len(Path(place).read_text().splitlines())
    assert circuit is CircuitState.OPEN
    # One at a time, so that at most one was in flight beyond the threshold, and one more till the word had spread.
    assert 5 <= calls <= 7
    assert statuses.count(DispatchStatus.CIRCUIT_OPEN) == 40 - calls


def test_when_ten_replicas_fail_together_every_router_knows_within_a_quarter_of_a_second(tmp_path: Path) -> None:
    # The best of three: a busy machine has other reasons to be late.
    delays: list[float] = []
    while not delays or (min(delays) >= 0.25 and len(delays) < 3):
        delays.append(tripped(f"ten-{len(delays)}", tmp_path / str(len(delays))))

    assert min(delays) < 0.25


def tripped(name: str, path: Path) -> float:
    """How long it took from the tenth failure until all routers knew that the circuit is open."""
    place = str(path)

    async def fail(envelope: Envelope[Any]) -> None:
        if envelope.payload == "well":
            return
        if envelope.payload != "ill":
            with open(place, "a") as file:  # noqa: ASYNC230
                file.write(f"{time()}\n")
            await asyncio.sleep(0.3)
        raise ConnectionError("down")

    breaker = BreakerSettings(failure_threshold=10, reset_after_seconds=60)
    engine = engine_of(name, fail, replicas=10, concurrency=2, breaker=breaker, retry=None)
    with DispatchSystem.start(engine, routers=3) as system:
        routers = [router for _, router in ray.get(system._controller.routers.remote())]
        for payload in ["ill", "well"] * 30:  # So that nobody has to make its first connections and imports later.
            system.dispatch(TOPIC, Envelope(payload, message_type="Order"))
        ray.get(circuits_of(routers))
        with ThreadPoolExecutor(1) as sender:
            sending = sender.submit(lambda: list(system.dispatch_many(orders(1_000))))
            wait_until(lambda: all(one.state == "open" for one in ray.get(circuits_of(routers))))
            known_at = time()
            results = sending.result()

    calls = sorted(map(float, path.read_text().split()))
    # Those that ran when the tenth failed, and those that took their places before the word had spread.
    assert 10 <= len(calls) <= 10 + 2 * (10 * 2)
    assert Counter(result.status for result in results)[DispatchStatus.CIRCUIT_OPEN] == 1_000 - len(calls)
    return known_at - (calls[9] + 0.3)


def circuits_of(routers: list[Any]) -> list[Any]:
    return [router.circuit.remote("orders") for router in routers]


def test_an_open_circuit_closes_again_after_a_good_trial(tmp_path: Path) -> None:
    switch = tmp_path / "repaired"

    async def moody(envelope: Envelope[Any]) -> None:
        if not switch.exists():
            raise ConnectionError("down")

    breaker = BreakerSettings(failure_threshold=2, reset_after_seconds=1)
    engine = engine_of("healing", moody, replicas=2, breaker=breaker, retry=None)
    with DispatchSystem.start(engine) as system:

        def status() -> DispatchStatus:
            return system.dispatch(TOPIC, Envelope(1, message_type="Order")).status

        wait_until(lambda: status() is DispatchStatus.CIRCUIT_OPEN)
        switch.touch()
        wait_until(lambda: status() is DispatchStatus.SUCCESS)
        wait_until(lambda: system.status().dispatchers["orders"].circuit is CircuitState.CLOSED)

        assert {status() for _ in range(20)} == {DispatchStatus.SUCCESS}


def test_a_full_dispatcher_makes_callers_wait_or_be_rejected() -> None:
    async def slow(envelope: Envelope[Any]) -> None:
        await asyncio.sleep(0.05)

    for reject in (False, True):
        name = f"full-{reject}".lower()
        engine = engine_of(name, slow, concurrency=5, max_in_flight=10, reject_when_full=reject)
        with DispatchSystem.start(engine) as system:
            results = Counter(result.status for result in system.dispatch_many(orders(100)))

        assert results[DispatchStatus.SUCCESS] + results[DispatchStatus.REJECTED] == 100
        assert bool(results[DispatchStatus.REJECTED]) is reject


def test_sync_handlers_do_not_block_the_replica() -> None:
    def slow(envelope: Envelope[Any]) -> None:
        threading.Event().wait(0.2)

    with DispatchSystem.start(engine_of("threads", slow, concurrency=20)) as system:
        results = list(system.dispatch_many(orders(20)))

    assert all(result.duration_ms < 2_000 for result in results)


def test_what_cannot_run_is_told_within_seconds() -> None:
    lock = threading.Lock()

    async def holds_a_lock(envelope: Envelope[Any]) -> None:
        lock.acquire()

    with pytest.raises(InvalidParameter, match="'orders' cannot be sent to another process"):
        DispatchSystem.start(engine_of("unpicklable", holds_a_lock))
    with pytest.raises(StartFailed, match="1000 CPU, which no node"):
        DispatchSystem.start(engine_of("greedy", ignore, num_cpus=1000))
    assert not actors_of("unpicklable")
    wait_until(lambda: not actors_of("greedy"))


def test_a_module_that_workers_do_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("async def handle(envelope):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(StartFailed, match=r"only_here.*install it there"):
        DispatchSystem.start(engine_of("missing", only_here.handle))


def test_custom_resources_decide_where_replicas_run() -> None:
    with DispatchSystem.start(engine_of("placed", ignore, resources={"disk": 1})) as system:
        assert ray.available_resources().get("disk", 0) == 1
        assert system.dispatch(TOPIC, Envelope(1, message_type="Order")).is_successful()


def test_middleware_runs_in_the_replica() -> None:
    async def stamp(envelope: Envelope[Any], following: Any) -> Any:
        outcome = await following(envelope)
        return outcome._replace(reply=Reply(f"through {following.dispatcher_id}"))

    engine = engine_of("stamped", ignore)
    engine.add_middleware(stamp)
    with DispatchSystem.start(engine) as system:
        assert system.dispatch(TOPIC, Envelope(1, message_type="Order")).reply == Reply("through orders")


def test_a_repeat_returns_the_stored_outcome(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    envelope = Envelope(7, message_type="Order")
    engine = engine_of("repeats", recorder_class(path), retry=RetrySettings(tries=1))
    with DispatchSystem.start(engine) as system:
        first = system.dispatch(TOPIC, envelope)
        second = system.dispatch(TOPIC, envelope)

    assert (first.outcomes[0].repeated, second.outcomes[0].repeated) == (False, True)
    assert numbers(path) == Counter([7])


def test_stopping_drains_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    system = DispatchSystem.start(engine_of("stopping", recorder_class(path)))
    receipts = [system.publish(TOPIC, Envelope(i, message_type="Order")) for i in range(500)]

    assert system.stop()

    assert all(receipt.status is DispatchStatus.ROUTED for receipt in receipts)
    assert numbers(path) == Counter(range(500))
    assert is_gone("stopping")

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raydispatch.dispatch.endpoints import Endpoint, EndpointInfo, Endpoints, EndpointState
from raydispatch.errors import DuplicateRegistration, NotRegistered


def make_endpoints(*ids: str, seed: int = 1) -> Endpoints[str]:
    endpoints: Endpoints[str] = Endpoints("billing", now=lambda: 7.0, random=Random(seed))
    for endpoint_id in ids:
        endpoints.join(endpoint_id, f"target of {endpoint_id}")
    return endpoints


def picked(endpoints: Endpoints[str], excluding: tuple[str, ...] = ()) -> set[str]:
    found = [endpoints.pick(excluding) for _ in range(100)]
    return {endpoint.endpoint_id for endpoint in found if endpoint is not None}


def begun(endpoints: Endpoints[str]) -> Endpoint[str]:
    endpoint = endpoints.pick()
    assert endpoint is not None
    endpoints.begun(endpoint)
    return endpoint


def states(endpoints: Endpoints[str]) -> dict[str, EndpointState]:
    return {info.endpoint_id: info.state for info in endpoints.find()}


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_one_that_joins_is_healthy_and_is_picked() -> None:
    endpoints = make_endpoints()

    joined = endpoints.join("a", "target")

    assert endpoints.pick() is joined
    assert (joined.target, joined.state, joined.in_flight, joined.joined_at) == (
        "target",
        EndpointState.HEALTHY,
        0,
        7.0,
    )
    assert endpoints.find() == [EndpointInfo("a", "billing", EndpointState.HEALTHY, 0, 0)]


def test_nobody_is_picked_where_nobody_joined() -> None:
    assert make_endpoints().pick() is None


def test_an_id_joins_once() -> None:
    endpoints = make_endpoints("a")

    with pytest.raises(DuplicateRegistration, match="'a'"):
        endpoints.join("a", "another")


def test_they_are_counted_found_and_listed_in_the_order_of_joining() -> None:
    endpoints = make_endpoints("b", "a", "c")

    assert len(endpoints) == 3
    assert "a" in endpoints
    assert "d" not in endpoints
    assert [endpoint.target for endpoint in endpoints.all()] == ["target of b", "target of a", "target of c"]


def test_all_healthy_ones_are_picked() -> None:
    endpoints = make_endpoints("a", "b", "c")

    assert picked(endpoints) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("excluded", "left"), [(("a",), {"b", "c"}), (("a", "c"), {"b"}), (("a", "b", "c"), set()), (("d",), set("abc"))]
)
def test_excluded_ones_are_not_picked(excluded: tuple[str, ...], left: set[str]) -> None:
    endpoints = make_endpoints("a", "b", "c")

    assert picked(endpoints, excluded) == left


def test_the_only_one_is_not_picked_when_it_is_excluded() -> None:
    assert make_endpoints("a").pick(excluding={"a"}) is None


def test_of_two_the_less_busy_one_is_picked() -> None:
    endpoints = make_endpoints("a", "b")
    busy = begun(endpoints)

    assert picked(endpoints) == {"a", "b"} - {busy.endpoint_id}


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(10))
def test_calls_are_spread(count: int, seed: int) -> None:
    endpoints = make_endpoints(*map(str, range(count)), seed=seed)

    for _ in range(1_000):
        begun(endpoints)

    # Picking at random would leave them dozens apart.
    in_flight = [info.in_flight for info in endpoints.find()]
    assert max(in_flight) - min(in_flight) <= 8


def test_a_quarantined_one_is_not_picked_until_it_is_restored() -> None:
    endpoints = make_endpoints("a", "b")

    endpoints.quarantine("a")
    meanwhile = picked(endpoints)
    endpoints.restore("a")

    assert meanwhile == {"b"}
    assert picked(endpoints) == {"a", "b"}


def test_failures_are_counted_until_it_is_well_again() -> None:
    endpoints = make_endpoints("a")

    changes = [endpoints.quarantine("a"), endpoints.quarantine("a")]
    failures = endpoints.find()[0].failures
    changes += [endpoints.restore("a"), endpoints.restore("a")]

    assert failures == 2
    assert endpoints.find()[0].failures == 0
    assert changes == [True, False, True, False]


def test_changes_are_logged_and_repetitions_are_not(caplog: pytest.LogCaptureFixture) -> None:
    endpoints = make_endpoints("a")

    with caplog.at_level(logging.INFO, "raydispatch"):
        for report in (endpoints.restore, endpoints.quarantine, endpoints.quarantine, endpoints.restore):
            report("a")

    assert [(line.levelname, line.message) for line in caplog.records] == [
        ("WARNING", "endpoint quarantined"),
        ("INFO", "endpoint restored"),
    ]
    assert all((line.dispatcher_id, line.endpoint_id) == ("billing", "a") for line in caplog.records)  # type: ignore[attr-defined]


def test_a_late_word_on_one_that_left_changes_nothing() -> None:
    endpoints = make_endpoints("a")
    endpoints.leave("a")

    assert not endpoints.quarantine("a")
    assert not endpoints.restore("a")


def test_an_idle_one_that_leaves_is_gone_at_once() -> None:
    endpoints = make_endpoints("a")

    left = endpoints.leave("a")
    asyncio.run(endpoints.drained(left))

    assert left.state is EndpointState.LEAVING
    assert endpoints.pick() is None
    assert len(endpoints) == 0
    with pytest.raises(NotRegistered, match="no endpoint 'a'"):
        endpoints.leave("a")


def test_one_that_leaves_ends_its_calls_first() -> None:
    endpoints = make_endpoints("a")
    endpoint = begun(endpoints)

    endpoints.leave("a")
    meanwhile = states(endpoints), endpoints.pick()
    with pytest.raises(DuplicateRegistration):
        endpoints.join("a", "its successor")
    endpoints.ended(endpoint)

    assert meanwhile == ({"a": EndpointState.LEAVING}, None)
    assert endpoints.join("a", "its successor") is endpoints.pick()


def test_one_that_leaves_is_neither_quarantined_nor_restored() -> None:
    endpoints = make_endpoints("a")
    begun(endpoints)
    endpoints.leave("a")

    changes = [endpoints.quarantine("a"), endpoints.restore("a")]

    assert changes == [False, False]
    assert states(endpoints) == {"a": EndpointState.LEAVING}
    assert endpoints.pick() is None


def test_one_may_be_told_to_leave_twice() -> None:
    endpoints = make_endpoints("a")
    begun(endpoints)

    assert endpoints.leave("a") is endpoints.leave("a")


def test_drained_waits_for_the_last_call() -> None:
    endpoints = make_endpoints("a")
    calls = [begun(endpoints), begun(endpoints)]

    async def drain() -> list[bool]:
        draining = asyncio.create_task(endpoints.drained(endpoints.leave("a")))
        seen = []
        for endpoint in calls:
            await asyncio.sleep(0)
            seen.append(draining.done())
            endpoints.ended(endpoint)
        await asyncio.wait_for(draining, 5)
        return seen

    assert asyncio.run(drain()) == [False, False]


def test_one_that_stays_can_be_drained_too() -> None:
    endpoints = make_endpoints("a")
    endpoint = begun(endpoints)

    async def drain() -> None:
        draining = asyncio.create_task(endpoints.drained(endpoint))
        await asyncio.sleep(0)
        endpoints.ended(endpoint)
        await asyncio.wait_for(draining, 5)

    asyncio.run(drain())

    assert endpoints.pick() is endpoint


def test_one_who_gives_up_waiting_does_not_end_it_for_others() -> None:
    endpoints = make_endpoints("a")
    endpoint = begun(endpoints)
    endpoints.leave("a")

    async def drain() -> bool:
        impatient, patient = (asyncio.create_task(endpoints.drained(endpoint)) for _ in range(2))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        waits = not patient.done()
        endpoints.ended(endpoint)
        await asyncio.wait_for(patient, 5)
        return waits

    assert asyncio.run(drain())


def test_calls_that_end_in_other_threads_are_waited_for(eager_threads: None) -> None:
    for _ in range(200):
        endpoints = make_endpoints("a")
        calls = [begun(endpoints) for _ in range(3)]
        barrier = threading.Barrier(4)

        def end(endpoint: Endpoint[str], barrier: threading.Barrier, endpoints: Endpoints[str]) -> None:
            barrier.wait()
            endpoints.ended(endpoint)

        async def drain(barrier: threading.Barrier, endpoints: Endpoints[str]) -> None:
            barrier.wait()
            await asyncio.wait_for(endpoints.drained(endpoints.leave("a")), 5)

        threads = [threading.Thread(target=end, args=(call, barrier, endpoints)) for call in calls]
        for thread in threads:
            thread.start()
        # A thread may end its call before `leave` is reached; it is still there then.
        asyncio.run(drain(barrier, endpoints))
        for thread in threads:
            thread.join()

        assert len(endpoints) == 0


def test_no_call_is_miscounted_by_threads(eager_threads: None) -> None:
    endpoints = make_endpoints("a", "b")

    def call(_: int) -> None:
        for _ in range(20_000):
            endpoints.ended(begun(endpoints))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))

    assert [info.in_flight for info in endpoints.find()] == [0, 0]


def test_a_call_may_carry_many_messages() -> None:
    endpoints = make_endpoints("a", "b")
    busy, free = endpoints.all()

    endpoints.begun(busy, 500)
    endpoints.begun(free, 499)
    meanwhile = picked(endpoints)
    endpoints.ended(busy, 500)

    assert meanwhile == {"b"}
    assert [info.in_flight for info in endpoints.find()] == [0, 499]


def test_one_that_leaves_is_gone_when_the_last_of_many_messages_has_ended() -> None:
    endpoints = make_endpoints("a")
    (endpoint,) = endpoints.all()
    endpoints.begun(endpoint, 3)
    endpoints.begun(endpoint, 2)

    endpoints.leave("a")
    endpoints.ended(endpoint, 3)
    between = len(endpoints)
    endpoints.ended(endpoint, 2)

    assert (between, len(endpoints)) == (1, 0)


def test_one_is_found_by_its_id_only_while_it_is_healthy() -> None:
    endpoints = make_endpoints("a", "b")
    leaving = endpoints.all()[1]
    endpoints.begun(leaving)

    well = endpoints.get("a")
    endpoints.quarantine("a")
    endpoints.leave("b")

    assert well is endpoints.all()[0]
    assert endpoints.get("a") is None
    assert endpoints.get("b") is None
    assert endpoints.get("stranger") is None
    endpoints.restore("a")
    assert endpoints.get("a") is well


def test_it_knows_how_many_are_well_and_whether_one_may_come_back() -> None:
    endpoints = make_endpoints("a", "b", "c")
    seen = []

    for change in (lambda: None, lambda: endpoints.quarantine("a"), lambda: endpoints.leave("a")):
        change()
        seen.append((endpoints.healthy_count, endpoints.is_any_quarantined))

    assert seen == [(3, False), (2, True), (2, False)]


def test_check_restores_those_that_answer_and_quarantines_the_others() -> None:
    endpoints = make_endpoints("well", "was ill", "unwell", "broken", "confused")
    endpoints.quarantine("was ill")

    async def ping(target: str) -> bool:
        if target == "target of broken":
            raise OSError("gone")
        if target == "target of confused":
            raise asyncio.CancelledError
        return target != "target of unwell"

    asyncio.run(endpoints.check(ping, 5))

    assert states(endpoints) == {
        "well": EndpointState.HEALTHY,
        "was ill": EndpointState.HEALTHY,
        "unwell": EndpointState.QUARANTINED,
        "broken": EndpointState.QUARANTINED,
        "confused": EndpointState.QUARANTINED,
    }


def test_a_ping_that_fails_before_it_can_be_awaited_is_no_answer() -> None:
    endpoints = make_endpoints("a")

    def ping(target: str) -> asyncio.Future[bool]:
        raise OSError("gone")

    asyncio.run(endpoints.check(ping, 5))

    assert states(endpoints) == {"a": EndpointState.QUARANTINED}


def test_check_asks_all_at_the_same_time() -> None:
    endpoints = make_endpoints("a", "b", "c")
    waiting: list[str] = []

    async def check() -> None:
        everyone = asyncio.Event()

        async def ping(target: str) -> bool:
            waiting.append(target)
            if len(waiting) == 3:
                everyone.set()
            return await everyone.wait()

        await endpoints.check(ping, 5)

    asyncio.run(check())

    assert set(states(endpoints).values()) == {EndpointState.HEALTHY}


def test_one_that_does_not_answer_in_time_is_quarantined_even_if_it_ignores_being_cancelled() -> None:
    endpoints = make_endpoints("quick", "slow", "stubborn")

    async def check() -> dict[str, EndpointState]:
        released = asyncio.Event()

        async def ping(target: str) -> bool:
            if target == "target of stubborn":
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    await released.wait()
            elif target == "target of slow":
                await released.wait()
            return True

        await asyncio.wait_for(endpoints.check(ping, 0.01), 5)
        found = states(endpoints)
        released.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert states(endpoints) == found, "an answer that comes too late is none"
        return found

    assert asyncio.run(check()) == {
        "quick": EndpointState.HEALTHY,
        "slow": EndpointState.QUARANTINED,
        "stubborn": EndpointState.QUARANTINED,
    }


def test_one_that_fails_is_quarantined_while_others_still_think() -> None:
    endpoints = make_endpoints("broken", "slow")

    async def check() -> dict[str, EndpointState]:
        released = asyncio.Event()

        async def ping(target: str) -> bool:
            return target != "target of broken" and await released.wait()

        checking = asyncio.create_task(endpoints.check(ping, 5))
        for _ in range(5):
            await asyncio.sleep(0)
        found = states(endpoints)
        released.set()
        await checking
        return found

    assert asyncio.run(check())["broken"] is EndpointState.QUARANTINED


def test_one_that_leaves_is_not_asked() -> None:
    endpoints = make_endpoints("a", "b")
    for endpoint in endpoints.all():
        endpoints.begun(endpoint)
    endpoints.leave("a")
    asked: list[str] = []

    async def ping(target: str) -> bool:
        asked.append(target)
        return True

    asyncio.run(endpoints.check(ping, 5))

    assert asked == ["target of b"]


def test_a_cancelled_check_ends_its_questions_and_judges_nobody() -> None:
    endpoints = make_endpoints("a", "b")
    cancelled: list[str] = []

    async def ping(target: str) -> bool:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(target)
            raise

    async def check() -> None:
        checking = asyncio.create_task(endpoints.check(ping, 5))
        for _ in range(5):
            await asyncio.sleep(0)
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking
        await asyncio.sleep(0)
        assert len(cancelled) == 2

    asyncio.run(check())

    assert set(states(endpoints).values()) == {EndpointState.HEALTHY}


def test_check_of_nobody_is_over_at_once() -> None:
    async def ping(target: str) -> bool:
        raise AssertionError

    asyncio.run(make_endpoints().check(ping, 5))


IDS = st.sampled_from("abcd")


class EndpointsAgainstModel(RuleBasedStateMachine):
    """The model: a state and a number of calls for each id, and those that leave are gone with their last call."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoints = make_endpoints()
        self.states: dict[str, EndpointState] = {}
        self.failures: dict[str, int] = {}
        self.calls: list[Endpoint[str]] = []

    @rule(endpoint_id=IDS)
    def join(self, endpoint_id: str) -> None:
        if endpoint_id in self.states:
            with pytest.raises(DuplicateRegistration):
                self.endpoints.join(endpoint_id, "x")
            return
        self.endpoints.join(endpoint_id, "x")
        self.states[endpoint_id] = EndpointState.HEALTHY
        self.failures[endpoint_id] = 0

    @rule(endpoint_id=IDS)
    def leave(self, endpoint_id: str) -> None:
        if endpoint_id not in self.states:
            with pytest.raises(NotRegistered):
                self.endpoints.leave(endpoint_id)
            return
        self.endpoints.leave(endpoint_id)
        self.states[endpoint_id] = EndpointState.LEAVING
        self.forget_the_drained()

    @rule(endpoint_id=IDS, well=st.booleans())
    def judge(self, endpoint_id: str, well: bool) -> None:
        wanted = EndpointState.HEALTHY if well else EndpointState.QUARANTINED
        state = self.states.get(endpoint_id)
        changed = self.endpoints.restore(endpoint_id) if well else self.endpoints.quarantine(endpoint_id)
        assert changed == (state not in (None, wanted, EndpointState.LEAVING))
        if state not in (None, EndpointState.LEAVING):
            self.states[endpoint_id] = wanted
            self.failures[endpoint_id] = 0 if well else self.failures[endpoint_id] + 1

    @rule(excluding=st.sets(IDS))
    def pick(self, excluding: set[str]) -> None:
        allowed = {name for name, state in self.states.items() if state is EndpointState.HEALTHY} - excluding
        endpoint = self.endpoints.pick(excluding)
        assert (endpoint is None) == (not allowed)
        if endpoint is not None:
            assert endpoint.endpoint_id in allowed
            self.endpoints.begun(endpoint)
            self.calls.append(endpoint)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.calls:
            self.endpoints.ended(self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1))))
            self.forget_the_drained()

    def forget_the_drained(self) -> None:
        busy = {endpoint.endpoint_id for endpoint in self.calls}
        self.states = {k: v for k, v in self.states.items() if v is not EndpointState.LEAVING or k in busy}

    @invariant()
    def they_agree(self) -> None:
        expected = {
            name: EndpointInfo(
                name,
                "billing",
                state,
                sum(endpoint.endpoint_id == name for endpoint in self.calls),
                self.failures[name],
            )
            for name, state in self.states.items()
        }
        assert {info.endpoint_id: info for info in self.endpoints.find()} == expected
        assert len(self.endpoints) == len(expected)


EndpointsAgainstModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEndpointsAgainstModel = EndpointsAgainstModel.TestCase

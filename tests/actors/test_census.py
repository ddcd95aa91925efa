from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raydispatch.actors.census import Census
from raydispatch.actors.names import router_name
from raydispatch.actors.replica import ReplicaLoad
from raydispatch.actors.router import RouterLoad
from raydispatch.dispatch.metrics import DispatchMetrics, MetricsRecorder
from raydispatch.dispatch.outcome import DispatchStatus, Outcome

ROUTER = router_name("shop", 1)
AWAY = ActorDiedError()


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def census(time: FakeTime) -> Census:
    return Census(1_000, time)


def replica_load(pid: int = 1, handled: int = 0) -> ReplicaLoad:
    return ReplicaLoad(in_flight=3, running=2, handled=handled, pid=pid, node="node", circuit="closed")


def router_load(pid: int = 1, routed: int = 0) -> RouterLoad:
    return RouterLoad(in_flight=3, routed=routed, table_version="v1", pid=pid, generation=1)


def counted(times: int, dispatcher_id: str = "billing") -> DispatchMetrics:
    """So many successes."""
    recorder = MetricsRecorder()
    for _ in range(times):
        recorder.record("t", None, DispatchStatus.SUCCESS, 1.0, 0.1, [Outcome(dispatcher_id, DispatchStatus.SUCCESS)])
    return recorder.snapshot()


def note(census: Census, **answers: tuple[Any, Any]) -> None:
    """Load and counts, by the name of the actor."""
    census.note(answers, [load for load, _ in answers.values()], [count for _, count in answers.values()])


# Restarts


def test_another_pid_is_a_restart(census: Census) -> None:
    restarts = [census.replica("billing-1", replica_load(pid)).restarts for pid in (1, 1, 2, 3, 3)]

    assert restarts == [0, 0, 1, 2, 2]


def test_restarts_are_counted_for_each_actor(census: Census) -> None:
    for name, pid in (("billing-1", 1), ("billing-2", 2), ("billing-1", 3)):
        census.replica(name, replica_load(pid))

    assert census.replica("billing-2", replica_load(2)).restarts == 0


def test_a_restart_that_only_the_watch_has_seen_counts_once(census: Census) -> None:
    note(census, billing=(replica_load(1), counted(0)))
    note(census, billing=(replica_load(2), counted(0)))

    assert census.replica("billing", replica_load(2)).restarts == 1


def test_one_that_is_away_is_not_alive_and_keeps_its_restarts(census: Census) -> None:
    for pid in (1, 2):
        census.replica("billing-1", replica_load(pid))
        census.router(ROUTER, router_load(pid))

    replica, router = census.replica("billing-1", AWAY), census.router(ROUTER, AWAY)

    assert (replica.alive, replica.restarts, replica.pid) == (False, 1, None)
    assert (router.alive, router.restarts, router.pid) == (False, 1, None)


def test_one_that_comes_back_as_it_was_has_not_been_restarted(census: Census) -> None:
    for load in (replica_load(1), AWAY):
        census.replica("billing-1", load)

    assert census.replica("billing-1", replica_load(1)).restarts == 0


def test_what_an_actor_answers_stands_in_its_status(census: Census) -> None:
    replica = census.replica("billing-1", replica_load(7, handled=9))
    router = census.router(ROUTER, router_load(8, routed=9))

    assert (replica.in_flight, replica.running, replica.handled, replica.pid, replica.node) == (3, 2, 9, 7, "node")
    assert (router.name, router.in_flight, router.routed, router.pid) == ("router-1", 3, 9, 8)
    assert router.table_version == "v1"


# Counts


def test_the_sum_is_what_all_actors_have_counted(census: Census) -> None:
    note(census, one=(replica_load(1), counted(2, "a")), two=(replica_load(2), counted(3, "b")))

    metrics = census.metrics()

    assert (metrics.total_dispatches, metrics.statuses) == (5, {DispatchStatus.SUCCESS: 5})
    assert {name: part.success_count for name, part in metrics.dispatcher_metrics.items()} == {"a": 2, "b": 3}


def test_the_newest_count_of_a_process_replaces_its_older_one(census: Census) -> None:
    for times in (2, 5):
        note(census, one=(replica_load(1), counted(times)))

    assert census.metrics().total_dispatches == 5


def test_what_a_lost_process_has_counted_stays(census: Census) -> None:
    note(census, one=(replica_load(1), counted(5)))
    note(census, one=(AWAY, AWAY))
    note(census, one=(replica_load(2), counted(1)))

    assert census.metrics().total_dispatches == 6


def test_what_an_actor_that_was_let_go_has_counted_stays(census: Census) -> None:
    note(census, one=(replica_load(1), counted(5)), two=(replica_load(2), counted(1)))
    note(census, two=(replica_load(2), counted(2)))

    assert census.metrics().total_dispatches == 7


def test_half_an_answer_counts_as_none(census: Census) -> None:
    note(census, one=(replica_load(1), counted(5)))
    note(census, one=(replica_load(2), AWAY))
    note(census, one=(AWAY, counted(1)))

    assert census.metrics().total_dispatches == 5


def test_what_a_lost_process_has_counted_stays_if_its_heir_answers_in_its_place(census: Census) -> None:
    note(census, one=(replica_load(1), counted(5)))
    note(census, one=(replica_load(1), counted(1)))  # Lost between the two questions.
    note(census, one=(replica_load(2), counted(1)))

    assert census.metrics().total_dispatches == 6


def test_topics_beyond_the_limit_are_counted_together(time: FakeTime) -> None:
    census = Census(0, time)

    note(census, one=(replica_load(1), counted(5)))

    assert census.metrics().topic_metrics == {"(other)": 5}


# The rate


def test_the_rate_is_that_of_the_last_seconds(census: Census, time: FakeTime) -> None:
    for second in range(1, 101):
        time.advance(1)
        census.rate(second * 100)
    for _ in range(5):
        time.advance(1)
        half = census.rate(10_000)
    for _ in range(5):
        time.advance(1)
        idle = census.rate(10_000)

    assert [half, idle] == pytest.approx([50, 0])


@pytest.mark.parametrize("every", [0.1, 1.0, 3.0, 10.0, 30.0])
def test_a_steady_rate_does_not_depend_on_how_often_it_is_asked(time: FakeTime, every: float) -> None:
    census = Census(1_000, time)

    rates = []
    for _ in range(int(60 / every)):
        time.advance(every)
        rates.append(census.rate(round(time() * 100)))

    assert rates == [pytest.approx(100)] * len(rates)


def test_who_asks_twice_at_once_gets_the_same(census: Census, time: FakeTime) -> None:
    time.advance(5)

    assert (census.rate(500), census.rate(500)) == (100.0, 100.0)


def test_no_time_has_no_rate(census: Census) -> None:
    assert census.rate(500) == 0.0


def test_a_changing_rate_does_not_depend_on_how_often_it_is_asked(time: FakeTime) -> None:
    often, rarely = Census(1_000, time), Census(1_000, time)

    routed = 0
    for second in range(1, 101):
        if second % 5 == 1:  # The watch goes on, whoever asks.
            for census in (often, rarely):
                census.note({ROUTER: None}, [router_load(1, routed)], [counted(0)])
        time.advance(1)
        routed += 100 if second <= 50 else 0
        often.rate(routed)

    assert rarely.rate(routed) == often.rate(routed) == 0.0

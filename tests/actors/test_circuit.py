from itertools import cycle

import pytest

from raydispatch.actors.circuit import CLOSED, Circuit, CircuitBoard, Report, ReportingBreaker
from raydispatch.dispatch.breaker import CircuitState, Permit
from raydispatch.settings import BreakerSettings

SETTINGS = BreakerSettings(failure_threshold=3, reset_after_seconds=60)


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


class Site:
    """A dispatcher's replicas and the controller's board, with nothing in between that could be slow or lost."""

    def __init__(self, time: FakeTime, replicas: int, settings: BreakerSettings = SETTINGS) -> None:
        self.board = CircuitBoard(settings, time)
        self.reports: list[tuple[str, Report]] = []
        self.told: list[Circuit] = []
        self.changes: list[CircuitState] = []
        self.breakers = {
            f"replica-{number}": self._breaker(number, settings, time) for number in range(1, replicas + 1)
        }

    def _breaker(self, number: int, settings: BreakerSettings, time: FakeTime) -> ReportingBreaker:
        replica_id = f"replica-{number}"
        return ReportingBreaker(
            settings, report=lambda report: self.hear(replica_id, report), on_change=self.changes.append, now=time
        )

    def hear(self, replica_id: str, report: Report) -> None:
        self.reports.append((replica_id, report))
        if self.board.hear(report, replica_id):
            self.told.append(self.board.circuit)
            for name, breaker in self.breakers.items():
                breaker.follow(self.board.circuit, name)

    def admitted(self, number: int) -> Permit:
        permit = self.breakers[f"replica-{number}"].admit()
        assert permit is not None
        return permit

    def fail(self, number: int) -> None:
        self.breakers[f"replica-{number}"].failed(self.admitted(number))

    def succeed(self, number: int) -> None:
        self.breakers[f"replica-{number}"].succeeded(self.admitted(number))

    @property
    def states(self) -> set[CircuitState]:
        return {breaker.state for breaker in self.breakers.values()}


# Opening together


def test_failures_of_all_replicas_count_together(time: FakeTime) -> None:
    site = Site(time, replicas=10, settings=BreakerSettings(failure_threshold=10))

    for number in range(1, 10):
        site.fail(number)
    before = site.states
    site.fail(10)

    assert before == {CircuitState.CLOSED}
    assert site.states == {CircuitState.OPEN}
    assert site.board.circuit == Circuit(CircuitState.OPEN, 60.0, "replica-10")


def test_a_replica_that_fails_alone_opens_for_all(time: FakeTime) -> None:
    site = Site(time, replicas=2)

    for _ in range(3):
        site.fail(1)

    assert site.states == {CircuitState.OPEN}
    assert site.board.circuit.trial_replica == "replica-1"


def test_a_replica_decides_alone_while_nobody_listens(time: FakeTime) -> None:
    breaker = ReportingBreaker(SETTINGS, report=lambda report: None, on_change=lambda state: None, now=time)

    for _ in range(3):
        permit = breaker.admit()
        assert permit is not None
        breaker.failed(permit)

    assert breaker.state is CircuitState.OPEN


def test_a_success_anywhere_ends_the_run_if_its_replica_knows_that_one_is_counted(time: FakeTime) -> None:
    site = Site(time, replicas=2)
    site.fail(1)
    site.fail(1)
    site.breakers["replica-2"].is_alert = True

    site.succeed(2)
    site.fail(2)

    assert site.states == {CircuitState.CLOSED}
    assert site.board.failures == 1


def test_successes_are_not_told_while_nothing_fails(time: FakeTime) -> None:
    site = Site(time, replicas=1)

    for _ in range(5):
        site.succeed(1)

    assert site.reports == []


def test_only_the_first_success_after_a_failure_is_told(time: FakeTime) -> None:
    site = Site(time, replicas=1)
    site.fail(1)

    for _ in range(5):
        site.succeed(1)

    assert site.reports == [("replica-1", Report.FAILED), ("replica-1", Report.SUCCEEDED)]


def test_old_failures_are_forgotten_over_all_replicas(time: FakeTime) -> None:
    site = Site(time, replicas=3, settings=BreakerSettings(failure_threshold=3, window_seconds=10))
    site.fail(1)
    site.fail(2)

    time.advance(11)
    site.fail(3)

    assert site.board.failures == 1
    assert site.states == {CircuitState.CLOSED}


def test_what_was_under_way_when_the_circuit_opened_is_not_worth_telling(time: FakeTime) -> None:
    site = Site(time, replicas=2)
    late = [site.admitted(2) for _ in range(100)]
    for _ in range(3):
        site.fail(1)
    told = len(site.reports)

    for permit in late:
        site.breakers["replica-2"].failed(permit)

    assert len(site.reports) == told
    assert len(site.told) == 1


def test_what_began_before_the_circuit_opened_does_not_count_after_it_has_closed(time: FakeTime) -> None:
    site = Site(time, replicas=2)
    late = [site.admitted(2) for _ in range(3)]
    for _ in range(3):
        site.fail(1)
    time.advance(60)
    site.succeed(1)

    for permit in late:
        site.breakers["replica-2"].failed(permit)

    assert site.board.failures == 0
    assert site.states == {CircuitState.CLOSED}


def test_a_success_that_began_before_the_circuit_opened_ends_no_run(time: FakeTime) -> None:
    site = Site(time, replicas=2)
    late = site.admitted(1)
    for _ in range(3):
        site.fail(1)
    time.advance(60)
    site.succeed(1)
    site.fail(1)

    site.breakers["replica-1"].succeeded(late)

    assert site.board.failures == 1


# Trying again


def test_the_trial_is_with_one_replica_and_the_others_wait_half_as_long_again(time: FakeTime) -> None:
    site = Site(time, replicas=3)
    for _ in range(3):
        site.fail(2)

    time.advance(60)
    first = {name: breaker.admit() is not None for name, breaker in site.breakers.items()}
    time.advance(30)
    later = site.breakers["replica-1"].admit()

    assert first == {"replica-1": False, "replica-2": True, "replica-3": False}
    assert later is not None


def test_a_good_trial_closes_for_all(time: FakeTime) -> None:
    site = Site(time, replicas=3)
    for _ in range(3):
        site.fail(1)
    time.advance(60)

    site.succeed(1)

    assert site.states == {CircuitState.CLOSED}
    assert site.told[-1] == CLOSED
    assert site.board.circuit == CLOSED


def test_a_bad_trial_opens_for_all_for_another_pause(time: FakeTime) -> None:
    site = Site(time, replicas=3)
    for _ in range(3):
        site.fail(1)
    time.advance(60)

    site.fail(1)

    assert site.board.circuit == Circuit(CircuitState.OPEN, 60.0, "replica-1")
    assert site.states == {CircuitState.OPEN}
    time.advance(59)
    assert all(breaker.admit() is None for breaker in site.breakers.values())


def test_if_the_one_with_the_trial_is_silent_another_one_closes_for_all(time: FakeTime) -> None:
    site = Site(time, replicas=2)
    for _ in range(3):
        site.fail(1)

    time.advance(90)
    site.succeed(2)

    assert site.states == {CircuitState.CLOSED}


def test_it_can_go_on_like_that(time: FakeTime) -> None:
    site = Site(time, replicas=2)

    for number, _ in zip(cycle([1, 2]), range(6), strict=False):
        for _ in range(3):
            site.fail(number)
        assert site.states == {CircuitState.OPEN}
        time.advance(60)
        site.succeed(number)
        assert site.states == {CircuitState.CLOSED}


# Being told


def test_what_a_breaker_is_told_it_does_not_report(time: FakeTime) -> None:
    site = Site(time, replicas=1)

    site.breakers["replica-1"].follow(Circuit(CircuitState.OPEN, 60.0), "replica-1")
    site.breakers["replica-1"].follow(CLOSED, "replica-1")

    assert site.reports == []
    assert site.changes == [CircuitState.OPEN, CircuitState.CLOSED]


def test_a_replica_born_into_an_open_circuit_waits_for_what_is_left(time: FakeTime) -> None:
    site = Site(time, replicas=1)

    site.breakers["replica-1"].follow(Circuit(CircuitState.OPEN, 10.0, "replica-1"), "replica-1")
    time.advance(9)
    early = site.breakers["replica-1"].admit()
    time.advance(1)

    assert early is None
    assert site.breakers["replica-1"].admit() is not None


# The board


def test_the_board_tells_what_is_left_of_the_pause(time: FakeTime) -> None:
    board = CircuitBoard(SETTINGS, time)
    board.hear(Report.OPENED, "replica-1")

    time.advance(20)
    during = board.circuit
    time.advance(50)

    assert during == Circuit(CircuitState.OPEN, 40.0, "replica-1")
    assert board.circuit == Circuit(CircuitState.HALF_OPEN, 0.0, "replica-1")


def test_the_board_says_whether_anybody_must_be_told(time: FakeTime) -> None:
    board = CircuitBoard(SETTINGS, time)
    reports = [
        Report.FAILED, Report.SUCCEEDED, Report.CLOSED, Report.FAILED, Report.FAILED, Report.FAILED, Report.FAILED,
        Report.SUCCEEDED, Report.CLOSED, Report.CLOSED,
    ]  # fmt: skip

    told = [board.hear(report, "replica-1") for report in reports]

    assert told == [False] * 5 + [True] + [False] * 2 + [True, False]


def test_a_late_failure_does_not_make_the_pause_longer(time: FakeTime) -> None:
    board = CircuitBoard(SETTINGS, time)
    board.hear(Report.OPENED, "replica-1")
    time.advance(30)

    board.hear(Report.FAILED, "replica-2")

    assert board.circuit == Circuit(CircuitState.OPEN, 30.0, "replica-1")


# After a restart of the controller


def test_a_new_board_takes_over_what_others_remember(time: FakeTime) -> None:
    board = CircuitBoard(SETTINGS, time)

    board.adopt(Circuit(CircuitState.OPEN, 25.0, "replica-2"))

    assert board.circuit == Circuit(CircuitState.OPEN, 25.0, "replica-2")
    time.advance(25)
    assert board.circuit.state is CircuitState.HALF_OPEN
    assert board.hear(Report.CLOSED, "replica-2")
    assert board.circuit == CLOSED


def test_what_was_half_open_is_so_again(time: FakeTime) -> None:
    board = CircuitBoard(SETTINGS, time)

    board.adopt(Circuit(CircuitState.HALF_OPEN, 0.0, "replica-2"))

    assert board.circuit == Circuit(CircuitState.HALF_OPEN, 0.0, "replica-2")


def test_what_was_closed_stays_closed_and_what_is_open_already_stays_as_it_is(time: FakeTime) -> None:
    closed, opened = CircuitBoard(SETTINGS, time), CircuitBoard(SETTINGS, time)
    opened.hear(Report.OPENED, "replica-1")

    closed.adopt(CLOSED)
    opened.adopt(Circuit(CircuitState.OPEN, 5.0, "replica-9"))

    assert closed.circuit == CLOSED
    assert opened.circuit == Circuit(CircuitState.OPEN, 60.0, "replica-1")

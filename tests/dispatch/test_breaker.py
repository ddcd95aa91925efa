import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raydispatch.dispatch.breaker import CircuitBreaker, CircuitState, Permit
from raydispatch.errors import CircuitOpen
from raydispatch.settings import BreakerSettings


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


def make_breaker(time: FakeTime, threshold: int = 1, trials: int = 1, pause: float = 60) -> CircuitBreaker:
    chosen = BreakerSettings(failure_threshold=threshold, trial_successes=trials, reset_after_seconds=pause)
    return CircuitBreaker(chosen, now=time)


def admitted(breaker: CircuitBreaker) -> Permit:
    permit = breaker.admit()
    assert permit is not None
    return permit


def open_breaker(time: FakeTime, trials: int = 1) -> CircuitBreaker:
    breaker = make_breaker(time, trials=trials)
    breaker.failed(admitted(breaker))
    return breaker


def test_counts_failures_though_nothing_ever_succeeded(time: FakeTime) -> None:
    breaker = make_breaker(time, threshold=3)

    for _ in range(2):
        breaker.failed(admitted(breaker))
    before = breaker.state
    breaker.failed(admitted(breaker))

    assert before is CircuitState.CLOSED
    assert breaker.state is CircuitState.OPEN
    assert breaker.admit() is None


def test_a_success_ends_the_run_of_failures(time: FakeTime) -> None:
    breaker = make_breaker(time, threshold=2)

    breaker.failed(admitted(breaker))
    breaker.succeeded(admitted(breaker))
    breaker.failed(admitted(breaker))

    assert breaker.state is CircuitState.CLOSED
    assert breaker.failures == 1


def test_failures_older_than_the_window_are_forgotten(time: FakeTime) -> None:
    breaker = CircuitBreaker(BreakerSettings(failure_threshold=2, window_seconds=10), now=time)

    breaker.failed(admitted(breaker))
    time.advance(10.5)
    breaker.failed(admitted(breaker))

    assert breaker.state is CircuitState.CLOSED
    assert breaker.failures == 1


def test_open_circuit_lets_one_trial_through_after_the_pause(time: FakeTime) -> None:
    breaker = open_breaker(time)

    time.advance(59.9)
    early = breaker.admit()
    time.advance(0.1)

    assert early is None
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.admit() is not None
    assert breaker.admit() is None


def test_a_good_trial_closes_the_circuit(time: FakeTime) -> None:
    breaker = open_breaker(time)
    time.advance(60)

    breaker.succeeded(admitted(breaker))

    assert breaker.state is CircuitState.CLOSED
    assert breaker.failures == 0


def test_a_bad_trial_opens_the_circuit_for_another_pause(time: FakeTime) -> None:
    breaker = open_breaker(time)
    time.advance(60)

    breaker.failed(admitted(breaker))
    time.advance(59)

    assert breaker.state is CircuitState.OPEN
    assert breaker.admit() is None


def test_all_of_several_trials_must_succeed(time: FakeTime) -> None:
    breaker = open_breaker(time, trials=2)
    time.advance(60)

    first, second, third = breaker.admit(), breaker.admit(), breaker.admit()
    assert first is not None
    assert second is not None
    breaker.succeeded(first)
    between = breaker.state
    breaker.succeeded(second)

    assert third is None
    assert between is CircuitState.HALF_OPEN
    assert breaker.state is CircuitState.CLOSED


def test_one_bad_trial_among_several_opens_the_circuit(time: FakeTime) -> None:
    breaker = open_breaker(time, trials=2)
    time.advance(60)

    breaker.succeeded(admitted(breaker))
    breaker.failed(admitted(breaker))

    assert breaker.state is CircuitState.OPEN


def test_a_silent_trial_is_replaced_after_a_pause(time: FakeTime) -> None:
    breaker = open_breaker(time)
    time.advance(60)
    silent = admitted(breaker)

    time.advance(59)
    too_early = breaker.admit()
    time.advance(1)
    replacement = breaker.admit()
    breaker.failed(silent)

    assert too_early is None
    assert replacement is not None
    assert breaker.state is CircuitState.HALF_OPEN


def test_a_withdrawn_trial_leaves_its_place_to_another(time: FakeTime) -> None:
    breaker = open_breaker(time)
    time.advance(60)

    breaker.withdrawn(admitted(breaker))

    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.admit() is not None


@pytest.mark.parametrize("report", ["succeeded", "failed", "withdrawn"])
def test_a_late_report_from_an_earlier_state_changes_nothing(time: FakeTime, report: str) -> None:
    breaker = make_breaker(time)
    late = admitted(breaker)
    breaker.failed(admitted(breaker))
    time.advance(60)
    admitted(breaker)

    getattr(breaker, report)(late)

    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.admit() is None


def test_presets_are_those_that_are_promised() -> None:
    chosen = [BreakerSettings.http(), BreakerSettings.database(), BreakerSettings.kafka()]

    assert [(s.failure_threshold, s.reset_after_seconds) for s in chosen] == [(5, 60.0), (5, 30.0), (3, 20.0)]


def test_every_change_is_announced_once(time: FakeTime) -> None:
    seen: list[CircuitState] = []
    breaker = CircuitBreaker(BreakerSettings(failure_threshold=1), now=time, on_change=seen.append)

    breaker.failed(admitted(breaker))
    time.advance(60)
    admitted(breaker)
    time.advance(60)
    breaker.succeeded(admitted(breaker))

    assert seen == [CircuitState.OPEN, CircuitState.HALF_OPEN, CircuitState.CLOSED]


def test_the_listener_may_ask_the_breaker(time: FakeTime) -> None:
    seen: list[object] = []
    breaker = CircuitBreaker(
        BreakerSettings(failure_threshold=1), now=time, on_change=lambda _: seen.append(breaker.admit())
    )

    breaker.failed(admitted(breaker))

    assert seen == [None]


def test_guard_counts_failures_and_then_does_not_enter(time: FakeTime) -> None:
    breaker = make_breaker(time)
    entered = False

    with pytest.raises(OSError, match="down"), breaker.guard():
        raise OSError("down")
    with pytest.raises(CircuitOpen), breaker.guard():
        entered = True

    assert not entered


def test_guard_closes_the_circuit_from_async_code(time: FakeTime) -> None:
    breaker = open_breaker(time)
    time.advance(60)

    async def call() -> None:
        with breaker.guard():
            await asyncio.sleep(0)

    asyncio.run(call())

    assert breaker.state is CircuitState.CLOSED


def test_cancelling_a_guarded_block_withdraws_its_permit(time: FakeTime) -> None:
    breaker = open_breaker(time)
    time.advance(60)

    async def call() -> None:
        with breaker.guard():
            await asyncio.Event().wait()

    async def cancel_it() -> None:
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancel_it())

    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.admit() is not None


def test_threads_that_hammer_it_never_break_it(time: FakeTime) -> None:
    states: list[CircuitState] = []
    breaker = CircuitBreaker(
        BreakerSettings(failure_threshold=3, reset_after_seconds=1, trial_successes=2),
        now=time,
        on_change=states.append,
    )
    barrier = threading.Barrier(8)

    def hammer(number: int) -> None:
        barrier.wait()
        for step in range(1_500):
            permit = breaker.admit()
            if permit is None:
                time.advance(0.3)
            elif (step + number) % 3:
                breaker.failed(permit)
            else:
                breaker.succeeded(permit)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, range(8)))
    time.advance(10)
    for _ in range(2):
        breaker.succeeded(admitted(breaker))

    allowed = {
        CircuitState.CLOSED: {CircuitState.OPEN},
        CircuitState.OPEN: {CircuitState.HALF_OPEN},
        CircuitState.HALF_OPEN: {CircuitState.OPEN, CircuitState.CLOSED},
    }
    assert breaker.state is CircuitState.CLOSED
    assert all(after in allowed[before] for before, after in pairwise(states))
    assert CircuitState.HALF_OPEN in states


# Told by somebody who sees more


def test_it_opens_for_as_long_as_it_is_told(time: FakeTime) -> None:
    breaker = make_breaker(time, threshold=5, pause=60)

    breaker.open_for(90)
    time.advance(89.9)
    early = breaker.admit()
    time.advance(0.2)

    assert early is None
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.admit() is not None


def test_told_to_open_for_a_shorter_time_it_tries_again_earlier(time: FakeTime) -> None:
    breaker = open_breaker(time)

    breaker.open_for(10)
    time.advance(10)

    assert breaker.state is CircuitState.HALF_OPEN


def test_told_to_open_for_no_time_at_all_it_tries_at_once(time: FakeTime) -> None:
    breaker = make_breaker(time)

    breaker.open_for(0)

    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.admit() is not None
    assert breaker.admit() is None


def test_after_a_bad_trial_the_pause_is_its_own_again(time: FakeTime) -> None:
    breaker = make_breaker(time, pause=60)
    breaker.open_for(10)
    time.advance(10)

    breaker.failed(admitted(breaker))
    time.advance(59)
    early = breaker.state
    time.advance(1)

    assert early is CircuitState.OPEN
    assert breaker.state is CircuitState.HALF_OPEN


def test_told_to_close_it_forgets_what_it_has_counted(time: FakeTime) -> None:
    breaker = open_breaker(time)

    breaker.close()

    assert breaker.state is CircuitState.CLOSED
    assert breaker.failures == 0
    assert breaker.admit() is not None


def test_told_to_close_while_closed_it_goes_on_counting(time: FakeTime) -> None:
    breaker = make_breaker(time, threshold=2)
    breaker.failed(admitted(breaker))

    breaker.close()
    breaker.failed(admitted(breaker))

    assert breaker.state is CircuitState.OPEN


@pytest.mark.parametrize("word", ["open_for", "close"])
def test_a_report_from_before_the_word_changes_nothing(time: FakeTime, word: str) -> None:
    breaker = open_breaker(time)
    time.advance(60)
    trial = admitted(breaker)

    breaker.open_for(60) if word == "open_for" else breaker.close()
    state = breaker.state
    breaker.failed(trial)
    breaker.succeeded(trial)

    assert breaker.state is state
    assert breaker.failures == 0


def test_told_changes_are_announced_once(time: FakeTime) -> None:
    seen: list[CircuitState] = []
    breaker = CircuitBreaker(BreakerSettings(), now=time, on_change=seen.append)

    for word in (breaker.close, lambda: breaker.open_for(5), lambda: breaker.open_for(7), breaker.close):
        word()

    assert seen == [CircuitState.OPEN, CircuitState.CLOSED]


class Model:
    """The breaker as one would tell it: a state, its permits, and no thought of threads."""

    def __init__(self, threshold: int, window: float, pause: float, trials: int) -> None:
        self.threshold, self.window, self.pause, self.needed = threshold, window, pause, trials
        self.now = 0.0
        self.enter("closed")

    def enter(self, state: str) -> None:
        self.state, self.since = state, self.now
        self.failed_at: list[float] = []
        self.out = self.good = 0
        self.last_trial = 0.0
        self.era: object = object()

    def admit(self) -> object | None:
        if self.state == "open" and self.now - self.since >= self.pause:
            self.enter("half_open")
        if self.state == "half_open" and self.out and self.now - self.last_trial >= self.pause:
            self.enter("half_open")
        if self.state == "open" or (self.state == "half_open" and self.out + self.good >= self.needed):
            return None
        if self.state == "half_open":
            self.out += 1
            self.last_trial = self.now
        return self.era

    def report(self, era: object, how: str) -> None:
        if era is not self.era:
            return
        if self.state == "closed":
            if how == "succeeded":
                self.failed_at = []
            elif how == "failed":
                recent = self.failed_at and self.now - self.failed_at[0] <= self.window
                self.failed_at = [*self.failed_at, self.now] if recent else [self.now]
                if len(self.failed_at) >= self.threshold:
                    self.enter("open")
            return
        self.out -= 1
        if how == "failed":
            self.enter("open")
        elif how == "succeeded":
            self.good += 1
            if self.good >= self.needed:
                self.enter("closed")


class BreakerAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.time = FakeTime()
        chosen = BreakerSettings(failure_threshold=2, window_seconds=8, reset_after_seconds=5, trial_successes=2)
        self.breaker = CircuitBreaker(chosen, now=self.time)
        self.model = Model(threshold=2, window=8, pause=5, trials=2)
        self.held: list[tuple[Permit, object]] = []

    @rule()
    def admit(self) -> None:
        permit, era = self.breaker.admit(), self.model.admit()
        assert (permit is None) == (era is None)
        if permit is not None:
            self.held.append((permit, era))

    @rule(how=st.sampled_from(["succeeded", "failed", "failed", "withdrawn"]), data=st.data())
    def report(self, how: str, data: st.DataObject) -> None:
        if not self.held:
            return
        permit, era = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        getattr(self.breaker, how)(permit)
        self.model.report(era, how)

    @rule(seconds=st.sampled_from([1, 4, 5, 9]))
    def advance(self, seconds: int) -> None:
        self.time.advance(seconds)
        self.model.now += seconds

    @invariant()
    def they_agree(self) -> None:
        due = self.model.state == "open" and self.model.now - self.model.since >= self.model.pause
        assert self.breaker.state == ("half_open" if due else self.model.state)
        assert self.breaker.failures == len(self.model.failed_at)


BreakerAgainstModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBreakerAgainstModel = BreakerAgainstModel.TestCase

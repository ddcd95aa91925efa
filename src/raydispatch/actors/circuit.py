"""The circuit of a dispatcher, as the cluster sees it.

Each replica has a breaker and decides at once, alone if it must. It reports failures to the controller, whose board
counts those of all replicas together, and opens or closes the circuit for all of them.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from raydispatch.dispatch.breaker import CircuitBreaker, CircuitState, Permit
from raydispatch.dispatch.clock import SystemClock
from raydispatch.settings import BreakerSettings


class Report(StrEnum):
    """What a replica tells of its calls."""

    FAILED = "failed"
    SUCCEEDED = "succeeded"
    """Told only while failures are being counted: it ends the run."""
    OPENED = "opened"
    CLOSED = "closed"


class Circuit(NamedTuple):
    """The state of a dispatcher's circuit, as it is told to replicas and routers."""

    state: CircuitState
    seconds: float = 0.0
    """How long it stays open yet."""
    trial_replica: str | None = None
    """The one that gets the trial when the time is up; the others wait half as long again, and then decide alone."""


CLOSED = Circuit(CircuitState.CLOSED)


class ReportingBreaker(CircuitBreaker):
    """The breaker of one replica. It tells of failures, and of changes that it made itself."""

    def __init__(
        self,
        settings: BreakerSettings,
        *,
        report: Callable[[Report], None],
        on_change: Callable[[CircuitState], None],
        now: Callable[[], float] = SystemClock.now,
    ) -> None:
        self._report = report
        self._told = False
        self.is_alert = False
        """Whether failures are being counted somewhere, so that a success is worth telling."""
        super().__init__(settings, now=now, on_change=lambda state: self._changed(state, on_change))

    def failed(self, permit: Permit) -> None:
        """Count it here and there; if it began in an earlier state, nowhere."""
        counts = permit == self._generation and self._state is CircuitState.CLOSED
        super().failed(permit)
        if counts:
            self.is_alert = True
            self._report(Report.FAILED)

    def succeeded(self, permit: Permit) -> None:
        """Tell only if that ends a run of failures."""
        counts = permit == self._generation
        super().succeeded(permit)
        if self.is_alert and counts and self._state is CircuitState.CLOSED:
            self.is_alert = False
            self._report(Report.SUCCEEDED)

    def follow(self, circuit: Circuit, replica_id: str) -> None:
        """Do as the controller says."""
        self._told = True
        try:
            if circuit.state is CircuitState.CLOSED:
                self.close()
            else:
                patience = 1.0 if circuit.trial_replica == replica_id else 1.5
                self.open_for(circuit.seconds * patience)
        finally:
            self._told = False

    def _changed(self, state: CircuitState, on_change: Callable[[CircuitState], None]) -> None:
        on_change(state)
        if not self._told and state is not CircuitState.HALF_OPEN:
            self._report(Report.OPENED if state is CircuitState.OPEN else Report.CLOSED)


class CircuitBoard:
    """The controller's view of one dispatcher's circuit."""

    def __init__(self, settings: BreakerSettings, now: Callable[[], float]) -> None:
        self._breaker = CircuitBreaker(settings, now=now)
        self._settings = settings
        self._now = now
        self._opened_at = 0.0
        self._trial_replica: str | None = None

    def hear(self, report: Report, replica_id: str) -> bool:
        """Take a report; whether the circuit has changed, so that everybody must be told."""
        before = self._breaker.state
        if report is Report.FAILED:
            if before is CircuitState.CLOSED and (permit := self._breaker.admit()) is not None:
                self._breaker.failed(permit)
        elif report is Report.SUCCEEDED:
            if before is CircuitState.CLOSED and (permit := self._breaker.admit()) is not None:
                self._breaker.succeeded(permit)
        elif report is Report.OPENED:
            self._breaker.open_for(self._settings.reset_after_seconds)
        else:
            self._breaker.close()
        is_open = self._breaker.state is CircuitState.OPEN
        if is_open and (report is Report.OPENED or before is CircuitState.CLOSED):
            self._opened_at = self._now()
            self._trial_replica = replica_id
            return True
        return not is_open and before is not CircuitState.CLOSED and report is Report.CLOSED

    @property
    def failures(self) -> int:
        """Failures in a row, over all replicas."""
        return self._breaker.failures

    @property
    def circuit(self) -> Circuit:
        """What to tell."""
        if self._breaker.state is CircuitState.CLOSED:
            return CLOSED
        left = self._opened_at + self._settings.reset_after_seconds - self._now()
        state = CircuitState.OPEN if left > 0 else CircuitState.HALF_OPEN
        return Circuit(state, max(0.0, left), self._trial_replica)

    def adopt(self, circuit: Circuit) -> None:
        """Take over what others remember, after a restart."""
        if circuit.state is not CircuitState.CLOSED and self._breaker.state is CircuitState.CLOSED:
            self._breaker.open_for(circuit.seconds)
            self._opened_at = self._now() + circuit.seconds - self._settings.reset_after_seconds
            self._trial_replica = circuit.trial_replica

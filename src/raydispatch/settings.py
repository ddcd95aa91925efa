"""Settings: frozen, checked, with the unit in the name. The environment is read here and nowhere else."""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from raydispatch.errors import InvalidParameter

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """What all settings share: unknown names are refused, and nothing changes after birth."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class BreakerSettings(Settings):
    """When a dispatcher's circuit opens, and how it closes again.

    Example: `BreakerSettings(failure_threshold=3, reset_after_seconds=20)`.
    """

    failure_threshold: int = Field(default=5, ge=1, description="failures in a row that open the circuit")
    window_seconds: PositiveSeconds = Field(default=60.0, description="a run of failures older than this is forgotten")
    reset_after_seconds: PositiveSeconds = Field(default=60.0, description="how long an open circuit refuses")
    trial_successes: int = Field(default=1, ge=1, description="trials in a row that close the circuit")

    @classmethod
    def http(cls) -> Self:
        """For handlers that call HTTP services."""
        return cls(failure_threshold=5, reset_after_seconds=60.0)

    @classmethod
    def database(cls) -> Self:
        """For handlers that write to a database."""
        return cls(failure_threshold=5, reset_after_seconds=30.0)

    @classmethod
    def kafka(cls) -> Self:
        """For handlers that produce to Kafka."""
        return cls(failure_threshold=3, reset_after_seconds=20.0)


class RetrySettings(Settings):
    """How often a failing handler is tried, and how long to wait between tries (full jitter).

    Example: `RetrySettings(tries=5, max_delay_seconds=30)`.
    """

    tries: int = Field(default=3, ge=1, le=100)
    first_delay_seconds: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    max_delay_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    factor: float = Field(default=2.0, ge=1, allow_inf_nan=False)


class BackpressureStrategy(StrEnum):
    """What happens to a message for which there is no room."""

    WAIT = "wait"
    """Its sender waits."""
    REJECT_NEW = "reject_new"
    """It is refused."""
    DROP_OLDEST = "drop_oldest"
    """The oldest one goes instead."""
    ADAPTIVE_RATE_LIMIT = "adaptive_rate_limit"
    """Fewer are let in while the queue is high, and more again when it is low."""


class BackpressureSettings(Settings):
    """How long a queue may grow, and what happens then.

    Example: `BackpressureSettings(strategy=BackpressureStrategy.WAIT, capacity=1_000)`.
    """

    strategy: BackpressureStrategy = BackpressureStrategy.REJECT_NEW
    capacity: int = Field(default=10_000, ge=1)
    high_mark: float = Field(default=0.8, gt=0, le=1, description="above this share of the capacity, pressure is high")
    low_mark: float = Field(default=0.5, ge=0, lt=1, description="below this share, it is over")
    adjust_seconds: PositiveSeconds = Field(default=0.1, description="how often an adaptive rate changes")
    rate_factor: float = Field(default=0.5, gt=0, lt=1, description="an adaptive rate is multiplied by this when high")
    rate_step: float = Field(default=100.0, gt=0, description="messages/s that it gains at each change when it is not")
    least_rate: float = Field(default=10.0, gt=0, description="messages/s that it never falls below")

    @model_validator(mode="after")
    def _marks_in_order(self) -> Self:
        if self.low_mark >= self.high_mark:
            raise ValueError(f"low_mark ({self.low_mark}) must be below high_mark ({self.high_mark})")
        return self


class DeliveryMode(StrEnum):
    """Which consumer of a subscription gets a message from the journal."""

    SHARED = "shared"
    """Any of them: the least busy."""
    EXCLUSIVE = "exclusive"
    """One, in order; when it is lost, the next takes over."""
    KEY_SHARED = "key_shared"
    """For each key always the same, one message of a key at a time; the order of a key survives scaling."""


class Delivery(Settings):
    """How a subscription delivers what was published durably.

    Example: `@engine.dispatcher("billing", …, delivery=Delivery.reliable_exclusive(window=1))`.
    """

    mode: DeliveryMode = DeliveryMode.SHARED
    reliable: bool = Field(default=True, description="at least once, from the journal; else at most once, from now on")
    window: int = Field(default=64, ge=1, le=100_000, description="unacknowledged messages of each consumer")
    per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="of all consumers together")

    @classmethod
    def reliable_shared(cls, window: int = 64, per_second: float | None = None) -> Self:
        """Work for a pool: at least once, any consumer."""
        return cls(mode=DeliveryMode.SHARED, window=window, per_second=per_second)

    @classmethod
    def reliable_exclusive(cls, window: int = 64, per_second: float | None = None) -> Self:
        """A state machine: at least once, one consumer after the other. A window of 1 is strict order."""
        return cls(mode=DeliveryMode.EXCLUSIVE, window=window, per_second=per_second)

    @classmethod
    def reliable_key_shared(cls, window: int = 64, per_second: float | None = None) -> Self:
        """A pool that keeps the order of each key: at least once."""
        return cls(mode=DeliveryMode.KEY_SHARED, window=window, per_second=per_second)

    @classmethod
    def shared(cls, per_second: float | None = None) -> Self:
        """Telemetry: at most once, any consumer, nothing from before its start."""
        return cls(mode=DeliveryMode.SHARED, reliable=False, window=4_096, per_second=per_second)

    @classmethod
    def exclusive(cls, per_second: float | None = None) -> Self:
        """A live feed: at most once, one consumer, nothing from before its start."""
        return cls(mode=DeliveryMode.EXCLUSIVE, reliable=False, window=4_096, per_second=per_second)


class PoisonPolicy(StrEnum):
    """What happens to a message from the journal that failed on every try."""

    DEAD_LETTER = "dead_letter"
    """It is kept apart, with the reason, and can be redriven."""
    DROP = "drop"
    """It is logged, counted, and gone."""
    BLOCK = "block"
    """It is tried for ever; in exclusive mode nothing, and in key-shared mode nothing of its key, overtakes it."""


class JournalSettings(Settings):
    """Where durable messages are kept, and for how long.

    Example: `EngineSettings(journal=JournalSettings(url="sqlite:///var/orders.db"))`.
    """

    url: str = Field(description="sqlite:///path/to/file.db, or nats://host:4222")
    cursor_seconds: float = Field(
        default=5.0, ge=0, allow_inf_nan=False, description="how long acknowledgements may gather before they are kept"
    )
    watchdog_seconds: PositiveSeconds = Field(default=0.5, description="how often subscriptions look for what they lag")
    keep_seconds: float = Field(
        default=7 * 86_400.0, ge=0, description="how long messages stay for replay, after all subscriptions are done"
    )
    patience_seconds: float = Field(
        default=10.0, ge=0, allow_inf_nan=False, description="how long a publish waits for a journal that is away"
    )
    recent_ids: int = Field(default=100_000, ge=2, description="message ids that are refused as repeats when published")
    most_open: int = Field(
        default=100_000, ge=1, description="messages that a subscription has taken and not settled, scheduled ones too"
    )
    cache_bytes: int = Field(default=64_000_000, ge=0, description="of recent messages, kept in memory for reading")

    @field_validator("url")
    @classmethod
    def _whole_path(cls, url: str) -> str:
        """Another process has another working directory."""
        scheme, _, path = url.partition(":")
        if scheme not in ("sqlite", "nats", "tls"):
            # Without the address itself, in which may be a password.
            raise InvalidParameter(
                f"A journal is at sqlite:///path/to/file.db or at nats://host:4222; not at {scheme[:20]!r}…"
            )
        if scheme == "sqlite" and path and not path.startswith("/"):
            return f"sqlite://{os.path.abspath(path)}"
        return url


class EngineSettings(Settings):
    """Limits of one engine. Every one of them bounds something that could otherwise grow without end.

    Example: `DispatchEngine("orders", settings=EngineSettings(max_payload_bytes=4_000_000))`.
    """

    max_payload_bytes: int = Field(default=1_000_000, ge=1, description="a larger payload is an INVALID_MESSAGE")
    match_cache_entries: int = Field(default=65_536, ge=1, description="distinct (topic, category, type) remembered")
    metric_topics: int = Field(default=1_000, ge=0, description="topics counted by name; the rest count as '(other)'")
    dead_letters: int = Field(default=1_000, ge=0, description="dead letters kept in memory; the oldest go first")
    slow_sync_handler_seconds: PositiveSeconds = Field(default=0.1, description="a slower sync handler is warned of")
    backpressure: BackpressureSettings = Field(
        default=BackpressureSettings(), description="the queue of published messages"
    )
    batch_size: int = Field(default=100, ge=1, description="published messages that are taken from the queue at once")
    batch_wait_seconds: float = Field(
        default=0.1, ge=0, allow_inf_nan=False, description="how long a batch that is not full waits for more"
    )
    max_concurrent_deliveries: int = Field(default=1_000, ge=1, description="published messages under way at once")
    outbox_capacity: int = Field(default=10_000, ge=1, description="outputs of handlers that wait to be sent on")
    max_hops: int = Field(default=16, ge=1, description="how many handlers an output may have come through")
    request_timeout_seconds: PositiveSeconds = Field(default=30.0, description="how long a request waits for its reply")
    journal: JournalSettings | None = Field(default=None, description="where durable messages are kept")
    health_interval_seconds: PositiveSeconds = Field(default=5.0, description="how often endpoints are asked")
    stop_seconds: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="how long stop() waits for the rest"
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read `RAYDISPATCH_<NAME>` variables: `RAYDISPATCH_BATCH_SIZE`, `RAYDISPATCH_BACKPRESSURE_CAPACITY`."""
        return cls.model_validate(_read(cls, "RAYDISPATCH_", os.environ if environment is None else environment))


class SystemSettings(Settings):
    """Limits of an engine that runs on Ray.

    Example: `DispatchSystem.start(engine, settings=SystemSettings(routers=4))`.
    """

    routers: int = Field(default=2, ge=1, le=1_000)
    batch_messages: int = Field(default=2_000, ge=1, description="messages that a gateway sends in one call at most")
    window_calls: int = Field(default=12, ge=1, description="calls that a gateway has under way at once")
    call_seconds: PositiveSeconds = Field(default=300.0, description="how long a caller waits for an outcome")
    start_seconds: PositiveSeconds = Field(default=60.0, description="how long actors may take to start")
    stop_seconds: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="how long stop() waits for the rest"
    )
    lease_seconds: PositiveSeconds = Field(
        default=30.0, description="how long a system outlives a driver that vanished"
    )
    health_seconds: PositiveSeconds = Field(default=5.0, description="how often actors are asked how they are")
    remembered_ids: int = Field(default=100_000, ge=2, description="message ids that each replica remembers")
    remembered_rows: int = Field(
        default=1_000_000, ge=2, description="ids of DataFrame rows that each replica remembers"
    )
    metric_topics: int = Field(default=1_000, ge=0, description="topics counted by name; the rest count as '(other)'")
    dead_letters: int = Field(default=1_000, ge=0, description="dead letters kept in memory; the oldest go first")


def _read(settings: type[Settings], prefix: str, environment: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, field in settings.model_fields.items():
        key = prefix + name.upper()
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            if part := _read(inner, f"{key}_", environment):
                found[name] = part
        elif key in environment:
            found[name] = environment[key]
    return found

"""Settings: frozen, checked, with the unit in the name. The environment is read here and nowhere else."""

import os
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

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


class EngineSettings(Settings):
    """Limits of one engine. Every one of them bounds something that could otherwise grow without end.

    Example: `DispatchEngine("orders", settings=EngineSettings(max_payload_bytes=4_000_000))`.
    """

    max_payload_bytes: int = Field(default=1_000_000, ge=1, description="a larger payload is an INVALID_MESSAGE")
    match_cache_entries: int = Field(default=65_536, ge=1, description="distinct (topic, category, type) remembered")
    metric_topics: int = Field(default=1_000, ge=0, description="topics counted by name; the rest count as '(other)'")
    dead_letters: int = Field(default=1_000, ge=0, description="dead letters kept in memory; the oldest go first")
    slow_sync_handler_seconds: PositiveSeconds = Field(default=0.1, description="a slower sync handler is warned of")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read `RAYDISPATCH_<NAME>` variables, such as `RAYDISPATCH_MAX_PAYLOAD_BYTES`."""
        source = os.environ if environment is None else environment
        names = {name: f"RAYDISPATCH_{name.upper()}" for name in cls.model_fields}
        return cls.model_validate({name: source[key] for name, key in names.items() if key in source})

"""raydispatch: a message dispatcher.

Five words carry you: an *envelope* holds a message, a *route* says which *dispatcher* gets it, an *engine* does the
work, and a *result* tells how it ended.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raydispatch.bus.engine import DispatchEngine
    from raydispatch.bus.pubsub import Subscription
    from raydispatch.bus.session import Session
    from raydispatch.dispatch.breaker import CircuitBreaker, CircuitState
    from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome, Receipt, Reply
    from raydispatch.dispatch.registry import DispatcherRegistry
    from raydispatch.errors import DispatchError, ErrorCode
    from raydispatch.messages.batch import MessageBatch
    from raydispatch.messages.envelope import Envelope
    from raydispatch.messages.topic import MessageCategory
    from raydispatch.routing.route import DispatchRoute
    from raydispatch.routing.table import RouteTable
    from raydispatch.settings import (
        BackpressureSettings,
        BackpressureStrategy,
        BreakerSettings,
        Delivery,
        EngineSettings,
        JournalSettings,
        PoisonPolicy,
        RetrySettings,
    )

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in the order of the story
    # The five words
    "Envelope",
    "DispatchRoute",
    "DispatchEngine",
    "DispatchResult",
    "DispatcherRegistry",
    # Asking and publishing
    "Reply",
    "Receipt",
    "Session",
    "Subscription",
    # What they are made of
    "MessageCategory",
    "DispatchStatus",
    "Outcome",
    "RouteTable",
    "MessageBatch",
    "CircuitBreaker",
    "CircuitState",
    # Settings and errors
    "BreakerSettings",
    "RetrySettings",
    "BackpressureSettings",
    "BackpressureStrategy",
    "EngineSettings",
    "Delivery",
    "PoisonPolicy",
    "JournalSettings",
    "DispatchError",
    "ErrorCode",
]

# Loaded on first use: `import raydispatch` costs next to nothing, and what is never asked for is never loaded.
_HOMES = {
    "DispatchEngine": "bus.engine",
    "Session": "bus.session",
    "Subscription": "bus.pubsub",
    "CircuitBreaker": "dispatch.breaker",
    "CircuitState": "dispatch.breaker",
    "DispatchResult": "dispatch.outcome",
    "DispatchStatus": "dispatch.outcome",
    "Outcome": "dispatch.outcome",
    "Receipt": "dispatch.outcome",
    "Reply": "dispatch.outcome",
    "DispatcherRegistry": "dispatch.registry",
    "DispatchError": "errors",
    "ErrorCode": "errors",
    "MessageBatch": "messages.batch",
    "Envelope": "messages.envelope",
    "MessageCategory": "messages.topic",
    "DispatchRoute": "routing.route",
    "RouteTable": "routing.table",
    "BackpressureSettings": "settings",
    "BackpressureStrategy": "settings",
    "BreakerSettings": "settings",
    "EngineSettings": "settings",
    "Delivery": "settings",
    "PoisonPolicy": "settings",
    "JournalSettings": "settings",
    "RetrySettings": "settings",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'raydispatch' has no attribute '{name}'")
    found = getattr(import_module(f"raydispatch.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""What is registered: routes and dispatchers, in any order, until the registry is frozen."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.dispatch.handler import Handler, MessageDispatcher
from raydispatch.errors import DuplicateRegistration, InvalidParameter, InvalidState
from raydispatch.messages.envelope import MAX_ID_LENGTH
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.settings import BreakerSettings, Delivery, PoisonPolicy, RetrySettings

MAX_REPLICAS = 10_000
BATCH_CONCURRENCY = 5_000
"""Messages that a batch handler gets at once on Ray, where nothing else is said."""
BATCH_IN_FLIGHT = 200_000
"""Messages and rows that a replica of it accepts, where nothing else is said: a few tables of a DataFrame."""


class DispatcherOptions(TypedDict, total=False):
    """How a dispatcher is guarded, and where and how often it runs; `DispatcherSpec` has the defaults."""

    breaker: BreakerSettings | None
    retry: RetrySettings | None
    time_limit_seconds: float | None
    replicas: int
    batch: bool
    node_kind: str | None
    delivery: Delivery
    poison: PoisonPolicy
    outputs: str
    concurrency: int
    max_in_flight: int
    reject_when_full: bool
    at_most_once: bool
    num_cpus: float
    num_gpus: float
    memory: int | None
    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any] | None
    scheduling_strategy: Any


class Registry(Protocol):
    """The extension point: whatever keeps routes and dispatchers can stand behind an engine."""

    def add_route(self, route: DispatchRoute) -> None:
        """Keep a route; raises `DuplicateRegistration` if its id is taken."""

    def add_dispatcher(self, spec: DispatcherSpec) -> None:
        """Keep a dispatcher; raises `DuplicateRegistration` if its id is taken."""

    def routes(self) -> Sequence[DispatchRoute]:
        """All routes."""

    def dispatchers(self) -> Sequence[DispatcherSpec]:
        """All dispatchers."""


class DispatcherRegistry:
    """The registry in memory; also the place for objects that say themselves what they take.

    Example: `DispatchEngine("orders", registry=registry)` after `registry.register_dispatcher(OrderDispatcher())`.
    """

    def __init__(self) -> None:
        self._routes: dict[str, DispatchRoute] = {}
        self._dispatchers: dict[str, DispatcherSpec] = {}
        self._frozen = False

    def register_dispatcher(self, dispatcher: MessageDispatcher, **options: Unpack[DispatcherOptions]) -> None:
        """Add an object with `dispatcher_id`, `category`, `message_types` and `handle`."""
        if inspect.isclass(dispatcher) or not isinstance(dispatcher, MessageDispatcher):
            raise InvalidParameter(
                f"{dispatcher!r} is no protocol dispatcher: it needs dispatcher_id, category, message_types and handle."
            )
        options.setdefault("node_kind", getattr(dispatcher, "node_kind", None))
        self.add_dispatcher(
            make_spec(dispatcher.dispatcher_id, dispatcher, dispatcher.category, dispatcher.message_types, **options)
        )

    def freeze(self) -> None:
        """Take no more."""
        self._frozen = True

    def add_route(self, route: DispatchRoute) -> None:
        """Keep a route."""
        self._check_open()
        if self._routes.setdefault(route.route_id, route) is not route:
            raise DuplicateRegistration("route", route.route_id)

    def add_dispatcher(self, spec: DispatcherSpec) -> None:
        """Keep a dispatcher."""
        self._check_open()
        if self._dispatchers.setdefault(spec.dispatcher_id, spec) is not spec:
            raise DuplicateRegistration("dispatcher", spec.dispatcher_id)

    def copy(self) -> "DispatcherRegistry":
        """One with the same content that can go its own way."""
        copy = DispatcherRegistry()
        copy._routes, copy._dispatchers = dict(self._routes), dict(self._dispatchers)
        return copy

    def routes(self) -> Sequence[DispatchRoute]:
        """All routes."""
        return list(self._routes.values())

    def dispatchers(self) -> Sequence[DispatcherSpec]:
        """All dispatchers."""
        return list(self._dispatchers.values())

    def _check_open(self) -> None:
        if self._frozen:
            raise InvalidState("The registry is frozen: register everything first, then freeze.")


def make_spec(
    dispatcher_id: str,
    source: Any,
    category: MessageCategory,
    message_types: Any = None,
    **options: Unpack[DispatcherOptions],
) -> DispatcherSpec:
    """A checked spec: an id that can be used, a handler that can be called, types that are a set of names."""
    check_id("dispatcher_id", dispatcher_id)
    if message_types is not None:
        if isinstance(message_types, str) or not all(isinstance(name, str) and name.strip() for name in message_types):
            raise InvalidParameter(
                f"message_types must be a set of type names, or None for all; not {message_types!r}."
            )
        message_types = frozenset(message_types)
    unknown = set(options) - set(DispatcherOptions.__annotations__)
    if unknown:
        known = ", ".join(sorted(DispatcherOptions.__annotations__))
        raise InvalidParameter(f"A dispatcher has no option {', '.join(sorted(unknown))}; it has {known}.")
    limit = options.get("time_limit_seconds")
    if limit is not None and not limit > 0:
        raise InvalidParameter(f"time_limit_seconds must be above 0, or None for no limit; not {limit!r}.")
    for name, most in (("replicas", MAX_REPLICAS), ("concurrency", MAX_REPLICAS), ("max_in_flight", 10_000_000)):
        value = options.get(name, 1)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise InvalidParameter(f"{name} must be a number from 1 to {most:,}; not {value!r}.")
    _check_ways(options)
    Handler(source)  # Raises now, at the place of the mistake, if this is nothing to call.
    try:
        category = MessageCategory(category)
    except ValueError:
        raise InvalidParameter(f"category must be one of {', '.join(MessageCategory)}; not {category!r}.") from None
    if options.get("batch"):
        options.setdefault("concurrency", BATCH_CONCURRENCY)
        options.setdefault("max_in_flight", BATCH_IN_FLIGHT)
    kind = options.get("node_kind")
    options["node_kind"] = None if kind is None else str(getattr(kind, "value", kind))
    return DispatcherSpec(dispatcher_id, source, category, message_types, **options)


def _check_ways(options: DispatcherOptions) -> None:
    """How messages come from a journal, and where outputs go."""
    delivery = options.setdefault("delivery", Delivery.shared() if options.get("at_most_once") else Delivery())
    if not isinstance(delivery, Delivery):
        raise InvalidParameter(f"delivery must be a Delivery, such as Delivery.reliable_shared(); not {delivery!r}.")
    if options.get("at_most_once") and delivery.reliable:
        raise InvalidParameter(
            "at_most_once goes with Delivery.shared() or Delivery.exclusive(), which are not reliable."
        )
    try:
        options["poison"] = PoisonPolicy(options.get("poison", PoisonPolicy.DEAD_LETTER))
    except ValueError:
        raise InvalidParameter(f"poison must be one of {', '.join(PoisonPolicy)}; not {options['poison']!r}.") from None
    outputs = options.get("outputs", "engine")
    if outputs not in ("engine", "journal") and not str(outputs).startswith(("nats://", "tls://")):
        raise InvalidParameter(f"outputs must be 'engine', 'journal' or nats://host:4222; not {outputs!r}.")


def check_id(name: str, value: object) -> None:
    """Ids are strings that are not blank, and not too long for a log line."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_ID_LENGTH:
        shown = (
            f"{value[:40]!r}… ({len(value)} characters)" if isinstance(value, str) and value.strip() else repr(value)
        )
        raise InvalidParameter(f"{name} must be a string of 1 to {MAX_ID_LENGTH} characters, not blank; not {shown}.")

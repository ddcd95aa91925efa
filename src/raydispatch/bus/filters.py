"""Filters: which messages are let through. A filter is any function of an envelope that says True or False."""

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from raydispatch.delivery.rate import TokenBucket
from raydispatch.dispatch.clock import SystemClock
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope

Filter: TypeAlias = Callable[[Envelope[Any]], bool]
"""True lets the message through."""

_log = logging.getLogger("raydispatch")


def only_types(*names: str) -> Filter:
    """Messages of these types."""
    return _OnlyTypes(_checked("only_types", names))


def not_types(*names: str) -> Filter:
    """Messages of all types but these."""
    return _NotTypes(_checked("not_types", names))


def only_sessions(*ids: str) -> Filter:
    """Messages that belong to one of these sessions."""
    return _OnlySessions(_checked("only_sessions", ids))


def at_most(per_second: float, burst: int | None = None, now: Callable[[], float] = SystemClock.now) -> Filter:
    """So many messages a second. It counts what it is asked about: put it behind the filters that hold back more."""
    return _AtMost(TokenBucket(per_second, burst, now))


def passes(filters: Iterable[Filter], envelope: Envelope[Any]) -> str | None:
    """The name of the first filter that holds the message back, or None.

    A filter that raises holds it back too: what it was there to stop is not known.
    """
    for one in filters:
        try:
            if not _verdict(one, envelope):
                return _name_of(one)
        except Exception as error:
            _log.error(
                "filter failed",
                extra={
                    "filter": _name_of(one),
                    "error_type": type(error).__name__,
                    "error": describe_exception(error),
                    "correlation_id": str(envelope.correlation_id),
                },
            )
            return _name_of(one)
    return None


def _name_of(one: Filter) -> str:
    """What a filter is called: its `name` if it has one, else that of its function or class."""
    while isinstance(one, partial):
        one = one.func
    return str(getattr(one, "name", None) or getattr(one, "__name__", None) or type(one).__name__)


def _verdict(one: Filter, envelope: Envelope[Any]) -> bool:
    verdict: object = one(envelope)
    if inspect.iscoroutine(verdict):
        # It would count as True, and let everything through.
        verdict.close()
        raise TypeError("a filter must not be async")
    return bool(verdict)


def _checked(name: str, values: tuple[str, ...]) -> frozenset[str]:
    if not values or not all(isinstance(value, str) for value in values):
        raise InvalidParameter(f"{name} takes one or more strings, as in {name}('a', 'b').")
    return frozenset(values)


# Classes rather than closures, since filters travel to Ray actors with whatever pickles them.


@dataclass(frozen=True, slots=True)
class _OnlyTypes:
    names: frozenset[str]
    name: str = field(default="only_types", init=False, repr=False)

    def __call__(self, envelope: Envelope[Any]) -> bool:
        return envelope.message_type in self.names


@dataclass(frozen=True, slots=True)
class _NotTypes:
    names: frozenset[str]
    name: str = field(default="not_types", init=False, repr=False)

    def __call__(self, envelope: Envelope[Any]) -> bool:
        return envelope.message_type not in self.names


@dataclass(frozen=True, slots=True)
class _OnlySessions:
    ids: frozenset[str]
    name: str = field(default="only_sessions", init=False, repr=False)

    def __call__(self, envelope: Envelope[Any]) -> bool:
        return envelope.session_id in self.ids


@dataclass(frozen=True, slots=True)
class _AtMost:
    bucket: TokenBucket
    name: str = field(default="at_most", init=False, repr=False)

    def __call__(self, envelope: Envelope[Any]) -> bool:
        return self.bucket.take()

"""Rules of a fault injector: whom they strike, and how often."""

import threading
from collections.abc import Callable
from random import Random
from typing import Any, TypedDict

from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope


class Whom(TypedDict, total=False):
    """Which attempts a rule strikes: all of these must fit, and what is left out always does."""

    dispatcher: str | None
    """The id of a dispatcher."""
    message_type: str | None
    when: Callable[[Envelope[Any]], bool] | None
    """A function of your own."""
    share: float
    """How many of those that fit: 0.5 is half of them, picked at random, and the same ones for the same seed."""
    times: int | None
    """How often at most."""


class FaultRule:
    """One planned fault. `struck` tells how often it has come true; threads may ask and strike at the same time."""

    def __init__(
        self,
        name: str,
        seed: str,
        *,
        dispatcher: str | None = None,
        message_type: str | None = None,
        when: Callable[[Envelope[Any]], bool] | None = None,
        share: float = 1.0,
        times: int | None = None,
    ) -> None:
        if not 0 <= share <= 1:
            raise InvalidParameter(f"share must be a number from 0 to 1; not {share!r}.")
        if times is not None and not times >= 1:
            raise InvalidParameter(f"times must be 1 or more, or None for no limit; not {times!r}.")
        if when is not None and not callable(when):
            raise InvalidParameter(f"'when' must be a function of one envelope; not {when!r}.")
        self.name = name
        self.struck = 0
        self._dispatcher = dispatcher
        self._message_type = message_type
        self._when = when
        self._share = share
        self._times = times
        # Its own: what other rules draw does not change what this one does.
        self._random = Random(seed)  # noqa: S311 - it has to be repeatable
        self._lock = threading.Lock()

    def strikes(self, dispatcher_id: str, envelope: Envelope[Any]) -> bool:
        """Whether it strikes this attempt; if so, that is counted."""
        if not self._fits(dispatcher_id, envelope):
            return False
        with self._lock:
            if self._times is not None and self.struck >= self._times:
                return False
            # Below 1 always: a share of 1 strikes every time, a share of 0 never.
            if self._random.random() >= self._share:
                return False
            self.struck += 1
            return True

    def _fits(self, dispatcher_id: str, envelope: Envelope[Any]) -> bool:
        return (
            self._dispatcher in (None, dispatcher_id)
            and self._message_type in (None, envelope.message_type)
            and (self._when is None or bool(self._when(envelope)))
        )

    def __repr__(self) -> str:
        return f"<FaultRule '{self.name}': struck {self.struck} times>"

"""Faults on purpose: handlers that fail, wait, or do their work and cannot say so."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from raydispatch.dispatch.clock import Clock
from raydispatch.dispatch.handler import HandlerSource
from raydispatch.errors import DispatchError, ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.testing.handlers import PLANNED_FAILURE, Planned, to_raise
from raydispatch.testing.rules import FaultRule, Whom
from raydispatch.testing.wrapping import wrapped


class AckLost(DispatchError):
    """The handler has done its work, and its acknowledgement was lost on purpose."""

    error_code = ErrorCode.HANDLER_EXCEPTION

    def __init__(self, dispatcher_id: str) -> None:
        super().__init__(dispatcher_id)
        self.dispatcher_id = dispatcher_id

    def __str__(self) -> str:
        return f"The acknowledgement of '{self.dispatcher_id}' was lost on purpose, after its handler had run."


class FaultInjector:
    """Strikes attempts of handlers by rules, in the order in which the rules were added.

    A failure ends the attempt before the handler runs, so that rules behind it do not get to see it. The same seed and
    the same attempts give the same faults. Delays go by the clock, if there is one.

    Example: `faults.fail(dispatcher="billing", times=2)`, then `double(engine, faults=faults)`.
    """

    def __init__(self, seed: int = 0, *, clock: Clock | None = None) -> None:
        self._seed = seed
        self._clock = clock
        self._rules: list[FaultRule] = []
        self._before: list[tuple[FaultRule, float | Planned]] = []
        """With each rule, the seconds to wait or the exception to raise."""
        self._after: list[FaultRule] = []

    def fail(self, *, error: Planned = PLANNED_FAILURE, **whom: Unpack[Whom]) -> FaultRule:
        """Raise this in the handler's place."""
        rule = self._add("fail", whom)
        self._before.append((rule, error))
        return rule

    def delay(self, seconds: float, **whom: Unpack[Whom]) -> FaultRule:
        """Wait before the handler runs."""
        if not seconds >= 0:
            raise InvalidParameter(f"A delay takes 0 seconds or more; not {seconds!r}.")
        rule = self._add("delay", whom)
        self._before.append((rule, seconds))
        return rule

    def drop_ack(self, **whom: Unpack[Whom]) -> FaultRule:
        """Let the handler do its work, and end the attempt with `AckLost` all the same."""
        rule = self._add("drop_ack", whom)
        self._after.append(rule)
        return rule

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each rule struck, by its name: `{"fail billing": 2}`."""
        return {rule.name: rule.struck for rule in self._rules}

    def wrap(self, dispatcher_id: str, source: HandlerSource) -> HandlerSource:
        """A handler of the same kind that meets these faults as the dispatcher of this id."""
        return wrapped(source, _Faults(self, dispatcher_id, self._clock))

    def before(self, dispatcher_id: str, envelope: Envelope[Any]) -> Iterator[float]:
        """The seconds to wait before this attempt, rule by rule; raises what a rule says instead of going on."""
        for rule, effect in tuple(self._before):
            if rule.strikes(dispatcher_id, envelope):
                if not isinstance(effect, int | float):
                    raise to_raise(effect)
                yield effect

    def after(self, dispatcher_id: str, envelope: Envelope[Any]) -> None:
        """Lose the acknowledgement, if a rule says so."""
        if any(rule.strikes(dispatcher_id, envelope) for rule in tuple(self._after)):
            raise AckLost(dispatcher_id)

    def _add(self, kind: str, whom: Whom) -> FaultRule:
        words = (kind, whom.get("dispatcher"), whom.get("message_type"))
        name = " ".join(word for word in words if word)
        # Rules with the same words are told apart by their numbers.
        number = len(self._rules) + 1
        taken = any(rule.name == name for rule in self._rules)
        rule = FaultRule(f"{name} (rule {number})" if taken else name, f"{self._seed}/{number}", **whom)
        self._rules.append(rule)
        return rule


@dataclass(frozen=True)
class _Faults:
    """What an injector does around the attempts of one dispatcher."""

    injector: FaultInjector
    dispatcher_id: str
    clock: Clock | None

    def before(self, envelope: Envelope[Any]) -> Iterator[float]:
        return self.injector.before(self.dispatcher_id, envelope)

    def after(self, envelope: Envelope[Any]) -> None:
        self.injector.after(self.dispatcher_id, envelope)

    async def sleep(self, seconds: float) -> None:
        await (self.clock.sleep(seconds) if self.clock else asyncio.sleep(seconds))

    def sleep_in_thread(self, seconds: float) -> None:
        if self.clock is None:
            time.sleep(seconds)
        else:
            # A handler in a thread has no event loop; it gets one for as long as it waits.
            asyncio.run(self.sleep(seconds))

"""The dispatchers of a plan, as those who send to them keep them: known ones stay, sick ones are asked until well."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from raydispatch.actors.circuit import CLOSED
from raydispatch.actors.plan import Plan, Target

PING_SECONDS = 2.0
AGAIN_SECONDS = 0.2


def targets_of(plan: Plan, before: Mapping[str, Target]) -> dict[str, Target]:
    """The dispatchers of a plan; those that were there keep their health and their counts.

    Always another dict: who has begun by an older plan keeps its own, with all dispatchers that its table knows.
    """
    targets: dict[str, Target] = {}
    for dispatcher_id, replicas in plan.replicas.items():
        target = targets[dispatcher_id] = before.get(dispatcher_id) or Target(dispatcher_id)
        target.adopt(replicas, plan.rules[dispatcher_id])
        target.follow(plan.circuits.get(dispatcher_id, CLOSED))
    return targets


class Infirmary:
    """Asks quarantined replicas until they are well: Ray restarts them."""

    def __init__(self, targets: Callable[[], Mapping[str, Target]], on_change: Callable[[], None]) -> None:
        self._targets = targets
        self._on_change = on_change
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Somebody has fallen ill."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        while sick := [target for target in self._targets().values() if target.endpoints.is_any_quarantined]:
            await asyncio.gather(*(target.endpoints.check(_ping, PING_SECONDS) for target in sick))
            self._on_change()
            await asyncio.sleep(AGAIN_SECONDS)


async def _ping(replica: Any) -> bool:
    return bool(await replica.ping.remote())

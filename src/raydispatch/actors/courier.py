"""The courier: brings the parts of a parcel to replicas, whatever happens to those on the way."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from ray.exceptions import RayError

from raydispatch.actors.choices import Choice, split
from raydispatch.actors.plan import Target
from raydispatch.actors.wire import LOSSES, STORE_FULL, Item, Key, Parcel, Part
from raydispatch.dispatch.endpoints import Endpoint
from raydispatch.dispatch.metrics import MetricsRecorder
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode

CHUNK = 100
"""A part larger than this is spread over the replicas."""
BUSY_SECONDS = (0.002, 0.05)
"""How long to wait for a replica that is full: at first, and at most."""
NO_REPLICA_SECONDS = 0.05
MOST_LOSSES = 10
"""Of replicas with one message, alone or not."""


class Courier:
    """Sends, waits for room, and sends again what was with a replica that died, if it may be."""

    def __init__(
        self, metrics: MetricsRecorder, bury: Callable[[Key, bytes, Outcome], None], on_loss: Callable[[], None]
    ) -> None:
        self._metrics = metrics
        self._bury = bury
        self._on_loss = on_loss

    async def send_all(
        self, parcel: Parcel, choices: list[Choice], targets: dict[str, Target], deadline: float
    ) -> tuple[list[Any], str | None]:
        """For each message, an item for each of its dispatchers, in their order; or, if there is one dispatcher for
        all, just an item for each message, and who that is."""
        lone = choices[0].lone if choices else None
        if lone is not None and all(choice.lone == lone for choice in choices):
            # All to one dispatcher: nothing to split, nothing to put together.
            route_ids = [choice.selection.targets[0][1] for choice in choices]
            part = Part(parcel.keys, parcel.rows, route_ids, parcel.blobs, parcel.resent)
            everyone = range(len(parcel.rows))
            items = await self._send(targets.get(lone), lone, part, parcel.ids, everyone, deadline)
            return items, lone
        by_row: list[list[Item]] = [[] for _ in parcel.rows]
        for stage in range(max((len(choice.stages) for choice in choices), default=0)):
            parts = split(parcel, choices, stage)
            outcomes = await asyncio.gather(
                *(
                    self._send(targets.get(dispatcher_id), dispatcher_id, part, parcel.ids, positions, deadline)
                    for dispatcher_id, positions, part in parts
                )
            )
            found = {
                dispatcher_id: dict(zip(positions, items, strict=True))
                for (dispatcher_id, positions, _), items in zip(parts, outcomes, strict=True)
            }
            columns = [
                [found[dispatcher_id] for dispatcher_id, _ in choice.stages[stage]]
                if stage < len(choice.stages)
                else ()
                for choice in choices
            ]
            for position, row in enumerate(parcel.rows):
                for column in columns[row]:
                    by_row[position].append(column[position])
        return by_row, None

    async def _send(
        self,
        target: Target | None,
        dispatcher_id: str,
        part: Part,
        ids: list[int] | None,
        positions: Sequence[int],
        deadline: float,
    ) -> list[Item]:
        """One dispatcher's part: where it has been already, or else spread over its replicas if it is large."""
        if target is None:
            return self._counted(_lost(dispatcher_id, part, row, "it does not run") for row in range(len(part.rows)))
        if part.resent and ids is not None:
            return await self._send_again(target, part, [ids[position] for position in positions], deadline)
        return await self._spread(target, part, deadline)

    async def _spread(self, target: Target, part: Part, deadline: float) -> list[Item]:
        count = min(target.endpoints.healthy_count, -(-len(part.rows) // CHUNK))
        if count <= 1:
            return await self._send_part(target, part, deadline)
        size = -(-len(part.rows) // count)
        pieces = [_piece(part, start, start + size) for start in range(0, len(part.rows), size)]
        sending = []
        taken: set[str] = set()
        for piece in pieces:
            # A piece for each: chosen apart, some replicas would get two, and others none.
            first = target.pick(taken)
            taken.add(first.endpoint_id if first else "")
            sending.append(self._send_part(target, piece, deadline, first=first))
        return [item for items in await asyncio.gather(*sending) for item in items]

    async def _send_again(self, target: Target, part: Part, ids: list[int], deadline: float) -> list[Item]:
        """Messages that a lost router may have sent already: whoever knows one gets it, and answers from memory."""
        by_owner: dict[Endpoint[Any] | None, list[int]] = {}
        for row, owner in enumerate(await target.owners(ids)):
            by_owner.setdefault(owner, []).append(row)
        done = await asyncio.gather(
            *(self._send_to(owner, target, _rows(part, rows), deadline) for owner, rows in by_owner.items())
        )
        found = {
            row: item
            for rows, items in zip(by_owner.values(), done, strict=True)
            for row, item in zip(rows, items, strict=True)
        }
        return [found[row] for row in range(len(part.rows))]

    async def _send_to(self, owner: Endpoint[Any] | None, target: Target, part: Part, deadline: float) -> list[Item]:
        if owner is not None:
            return await self._send_part(target, part, deadline, owner=owner)
        if target.rule.at_most_once:
            words = "a router was lost: it may have run"
            return self._counted(_lost(target.dispatcher_id, part, row, words) for row in range(len(part.rows)))
        return await self._spread(target, part, deadline)

    async def _send_part(
        self,
        target: Target,
        part: Part,
        deadline: float,
        losses: "Losses | None" = None,
        owner: Endpoint[Any] | None = None,
        first: Endpoint[Any] | None = None,
    ) -> list[Item]:
        """Send to one replica, and what it has no room for to another, until every message has an outcome."""
        items: list[Item | None] = [None] * len(part.rows)
        waiting = list(range(len(part.rows)))
        pause = BUSY_SECONDS[0]
        full: set[str] = set()
        while waiting:
            left = deadline - monotonic()
            if not target.admits() or left <= 0:
                end = _refused if left > 0 else _late
                self._end(items, waiting, [end(target.dispatcher_id, part, row) for row in waiting])
                break
            endpoint = first or target.pick(full) if owner is None else None if full else owner
            first = None
            if endpoint is None and full and target.rule.reject_when_full and owner is None:
                self._end(items, waiting, [_no_room(target.dispatcher_id, part, row) for row in waiting])
                break
            if endpoint is None:
                await asyncio.sleep(min(left, pause if full else NO_REPLICA_SECONDS))
                pause = min(pause * 2, BUSY_SECONDS[1])
                full.clear()
                continue
            current = part if len(waiting) == len(part.rows) else _rows(part, waiting)
            answers = await self._call(target, endpoint, current, left)
            if isinstance(answers, Lost):
                answers = [*await self._recovered(target, current, deadline, losses or Losses(), answers.alone)]
            for row, answer in zip(waiting, answers, strict=True):
                items[row] = answer
            waiting = [row for row in waiting if items[row] is None]
            full.add(endpoint.endpoint_id)
        return items  # type: ignore[return-value]  # None is left in it nowhere.

    async def _call(
        self, target: Target, endpoint: Endpoint[Any], part: Part, seconds: float
    ) -> "list[Item | None] | Lost":
        """One call to one replica: its answers, or that it was lost."""
        count = len(part.rows)
        target.endpoints.begun(endpoint, count)
        try:
            try:
                call = endpoint.target.process.remote(part)
            except STORE_FULL:
                return [None] * count  # Nothing was sent: as if there had been no room.
            async with asyncio.timeout(seconds):
                answers: list[Item | None] = await call
            return answers
        except LOSSES:
            # Of several calls that are lost together, the last one to hear of it is not alone, though it seems so.
            alone = endpoint.in_flight == 1
            alone = target.endpoints.quarantine(endpoint.endpoint_id) and alone
            self._on_loss()
            return Lost(alone or part.alone)
        except TimeoutError:
            return [*self._counted(_late(target.dispatcher_id, part, row) for row in range(count))]
        except RayError as error:
            message = f"the replica failed: {describe_exception(error)}"
            return [*self._counted(_lost(target.dispatcher_id, part, row, message) for row in range(count))]
        finally:
            target.endpoints.ended(endpoint, count)

    async def _recovered(
        self, target: Target, part: Part, deadline: float, losses: "Losses", alone: bool
    ) -> list[Item]:
        """What was with a replica when it died: halves go on to others, until the one that kills them is alone."""
        count = len(part.rows)
        if target.rule.at_most_once:
            words = "its replica was lost: it may have run"
            return self._counted(_lost(target.dispatcher_id, part, row, words) for row in range(count))
        part = part._replace(resent=True, alone=False)
        if count > 1:
            # One after the other: side by side in one process, the half that kills would take the other one with it.
            first = await self._send_part(target, _piece(part, 0, count // 2), deadline)
            return [*first, *await self._send_part(target, _piece(part, count // 2, count), deadline)]
        # Others that ran in the same process are as suspicious, and as likely innocent: only a loss alone counts.
        losses = Losses(losses.alone + alone, losses.all + 1)
        if losses.alone >= target.rule.tries or losses.all >= MOST_LOSSES:
            outcome = _lost(target.dispatcher_id, part, 0, f"{losses.all} replicas were lost while it ran")
            self._bury(part.keys[part.rows[0]], part.blobs[0], outcome)
            return self._counted([outcome])
        # From the second time on, where nothing else runs: so nobody dies of another's fault, from whichever router.
        suspect = part._replace(alone=alone or losses.all > 1)
        return await self._send_part(target, suspect, deadline, losses)

    def _end(self, items: "list[Item | None]", rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        for row, outcome in zip(rows, self._counted(outcomes), strict=True):
            items[row] = outcome

    def _counted(self, outcomes: Iterable[Outcome]) -> list[Item]:
        """Outcomes that were made here: no replica has counted them."""
        made: list[Item] = []
        for outcome in outcomes:
            self._metrics.record_outcome(outcome)
            made.append(outcome)
        return made


class Lost(NamedTuple):
    """A replica died during a call."""

    alone: bool
    """Whether nothing else was there, as far as this router knows."""


class Losses(NamedTuple):
    """How many replicas were lost with a message."""

    alone: int = 0
    all: int = 0


def _piece(part: Part, start: int, end: int) -> Part:
    return part._replace(rows=part.rows[start:end], blobs=part.blobs[start:end])


def _rows(part: Part, rows: Sequence[int]) -> Part:
    return part._replace(rows=[part.rows[row] for row in rows], blobs=[part.blobs[row] for row in rows])


def _ended(dispatcher_id: str, part: Part, row: int, status: DispatchStatus, code: ErrorCode, message: str) -> Outcome:
    route_id = part.route_ids[part.rows[row]]
    return Outcome(dispatcher_id, status, route_id, error_code=code, error_message=message)


def _lost(dispatcher_id: str, part: Part, row: int, message: str) -> Outcome:
    return _ended(dispatcher_id, part, row, DispatchStatus.DISPATCHER_ERROR, ErrorCode.REPLICA_LOST, message)


def _refused(dispatcher_id: str, part: Part, row: int) -> Outcome:
    message = "its circuit breaker is open: the handler was not called"
    return _ended(dispatcher_id, part, row, DispatchStatus.CIRCUIT_OPEN, ErrorCode.CIRCUIT_OPEN, message)


def _late(dispatcher_id: str, part: Part, row: int) -> Outcome:
    return _ended(dispatcher_id, part, row, DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, "no outcome in time")


def _no_room(dispatcher_id: str, part: Part, row: int) -> Outcome:
    return _ended(dispatcher_id, part, row, DispatchStatus.REJECTED, ErrorCode.QUEUE_FULL, "all its replicas are full")

"""The way to the keeper of a system's journal: for those who publish, and for replicas."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from raydispatch.actors.names import NAMESPACE, keeper_name
from raydispatch.actors.wire import LOSSES
from raydispatch.delivery.memories import packed_note, unpacked_note
from raydispatch.delivery.segment import Segment
from raydispatch.dispatch.memory import OutcomeMemory
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import DispatchError, JournalUnavailable
from raydispatch.messages.envelope import Envelope

MOST_CALLS = 3
"""Appends under way from one event loop; what comes meanwhile goes together in the next."""
MOST_BYTES = 8_000_000
"""Of one append."""
RETRY_SECONDS = 0.1
NOTE_SECONDS = 0.05
"""How long outcomes gather before the keeper is told."""
MOST_NOTES = 2_000

# Its own thread: in those of the handlers, it would wait for the slowest.
_finding = ThreadPoolExecutor(1, "raydispatch find")


class KeeperClient:
    """Calls the keeper of a system; while it is away, again until the time is up."""

    def __init__(self, system: str, patience_seconds: float) -> None:
        self._system = system
        self._patience = patience_seconds
        self._handle: Any = None

    async def ask(self, method: str, *arguments: object, seconds: float | None = None) -> Any:
        """Its answer. Errors of ours come as they are; `JournalUnavailable` when it does not come back in time."""
        deadline = monotonic() + (self._patience if seconds is None else seconds)
        while True:
            try:
                keeper = self._handle or await self._find()
                # A keeper may be patient with its journal as long as this client is with the keeper.
                left = max(0.1, deadline - monotonic()) + (self._patience if seconds is None else 0.0)
                async with asyncio.timeout(left):
                    return await getattr(keeper, method).remote(*arguments)
            except RayTaskError as error:
                if isinstance(error.cause, DispatchError):
                    raise error.cause from None
                raise
            except (*LOSSES, ValueError, TimeoutError) as error:
                self._handle = None
                if monotonic() >= deadline:
                    raise JournalUnavailable(
                        f"the keeper of the journal of '{self._system}' does not answer ({type(error).__name__})"
                    ) from None
                await asyncio.sleep(RETRY_SECONDS)

    async def _find(self) -> Any:
        loop = asyncio.get_running_loop()
        self._handle = await loop.run_in_executor(_finding, ray.get_actor, keeper_name(self._system), NAMESPACE)
        return self._handle


class _Waiting(NamedTuple):
    data: bytes
    done: "asyncio.Future[None]"


class RemoteKeeper:
    """Publishes durably, from any number of event loops; what is published at the same time goes in one call."""

    def __init__(self, system: str, patience_seconds: float) -> None:
        self._client = KeeperClient(system, patience_seconds)
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}

    async def append(self, messages: Sequence[tuple[str, Envelope[Any]]], due: float | None) -> None:
        """Keep these for good. Raises InvalidParameter for a payload that is no data, JournalUnavailable in time."""
        data = Segment.of(messages, None if due is None else [due] * len(messages)).pack()
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            for closed in [known for known in list(self._lanes) if known.is_closed()]:
                self._lanes.pop(closed, None)
            lane = self._lanes[loop] = _Lane(lambda *call: self._client.ask("append", *call))
        await lane.send(data)

    async def has_reader(self, topic: str, message_type: str) -> bool:
        """Whether a reader wants such messages, though no dispatcher does."""
        try:
            return bool(await self._client.ask("has_reader", topic, message_type))
        except JournalUnavailable:
            return False

    async def ask(self, method: str, *arguments: object, seconds: float | None = None) -> Any:
        """Anything else."""
        return await self._client.ask(method, *arguments, seconds=seconds)


class _Lane:
    """Segments of one event loop on their way."""

    def __init__(self, send: Callable[[list[bytes], str, int], Awaitable[Any]]) -> None:
        self._send = send
        self._lane_id = uuid4().hex
        self._next = 0
        """Number of the next call: Ray lets calls overtake each other, and the keeper puts them in order."""
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(data, loop.create_future())
        self._waiting.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        await waiting.done

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < MOST_CALLS:
            size, count = 0, 0
            for waiting in self._waiting:
                size += len(waiting.data)
                if count and size > MOST_BYTES:
                    break
                count += 1
            group, self._waiting = self._waiting[:count], self._waiting[count:]
            call = asyncio.get_running_loop().create_task(self._call(group, self._next))
            self._next += 1
            self._calls.add(call)
            call.add_done_callback(self._returned)

    async def _call(self, group: list[_Waiting], number: int) -> None:
        try:
            await self._send([waiting.data for waiting in group], self._lane_id, number)
        except BaseException as error:
            for waiting in group:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for waiting in group:
            if not waiting.done.done():
                waiting.done.set_result(None)

    def _returned(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._flush()


class ReplicaKeeping:
    """What a replica tells the keeper, and asks it: which messages its dispatcher has handled."""

    def __init__(self, system: str, dispatcher_id: str, patience_seconds: float) -> None:
        self._client = KeeperClient(system, patience_seconds)
        self._dispatcher_id = dispatcher_id
        self._notes: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def recall(self, memory: OutcomeMemory) -> None:
        """Remember what was known before this process. A keeper that is away must not keep a replica from starting."""
        with suppress(DispatchError, RayError):
            for note in await self._client.ask("recall", self._dispatcher_id, seconds=2.0):
                memory.keep(*unpacked_note(note, self._dispatcher_id))

    def note(self, message_id: UUID, outcome: Outcome) -> None:
        """Tell the keeper, soon."""
        if outcome.status is not DispatchStatus.SUCCESS:
            return  # Of one whose outputs found no way out, only this process has those: another one makes them anew.
        self._notes.append(packed_note(message_id, outcome))
        if len(self._notes) >= MOST_NOTES:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTE_SECONDS, self._begin)

    async def flush(self) -> None:
        """Tell it now, and wait until it knows."""
        self._begin()
        while self._telling:
            await asyncio.wait(self._telling)

    async def accept_outputs(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """As an outbox: what a handler made goes into the journal. Raises InvalidParameter for what is no data."""
        data = Segment.of([(envelope.topic, envelope) for envelope in outputs]).pack()
        try:
            await self._client.ask("append", [data])
        except JournalUnavailable:
            return False
        return True

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        notes, self._notes = self._notes, []
        if notes:
            telling = asyncio.get_running_loop().create_task(self._tell(notes))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell(self, notes: list[bytes]) -> None:
        with suppress(DispatchError, RayError):
            await self._client.ask("note", self._dispatcher_id, notes)

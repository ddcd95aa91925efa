"""A replica: one handler of a dispatcher, in a Ray actor."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from time import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import ray
from ray import cloudpickle
from ray.exceptions import RayError

from raydispatch.actors.circuit import CLOSED, Circuit, Report, ReportingBreaker
from raydispatch.actors.keeping import ReplicaKeeping
from raydispatch.actors.outgoing import Outgoing
from raydispatch.actors.row_desk import RowDesk, RowsUnderWay
from raydispatch.actors.rows import RowPart, RowReport
from raydispatch.actors.wire import Item, Part, decode, pack
from raydispatch.delivery.dead_letters import FINAL_FAILURES, DeadLetter
from raydispatch.delivery.letters import pack_letter
from raydispatch.delivery.outlet import Outlet, open_outlet
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec, Publish
from raydispatch.dispatch.memory import OutcomeMemory
from raydispatch.dispatch.metrics import DispatchMetrics, MetricsRecorder
from raydispatch.dispatch.middleware import Middleware
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.dispatch.workers import Workers
from raydispatch.errors import ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import uuid_of
from raydispatch.settings import EngineSettings, SystemSettings

MAX_THREADS = 64
QUIET_SECONDS = 5.0
"""How long a part that must run alone waits for those that run already."""
MOST_UNCOUNTED = 10_000

_SUCCESS = DispatchStatus.SUCCESS


class Duty(NamedTuple):
    """What a replica is told at its birth. The handler is pickled by value, so that the main program can define it."""

    system: str
    replica_id: str
    handler: bytes
    """A pickled pair of spec and middleware."""
    engine: EngineSettings
    settings: SystemSettings
    table_version: str


class ReplicaLoad(NamedTuple):
    """How a replica is."""

    in_flight: int
    running: int
    handled: int
    pid: int
    node: str
    circuit: str


class Replica:
    """Runs the messages of parts, as many at once as its spec allows, and remembers what it did.

    Everything here runs in one event loop and in between awaits: no locks.
    """

    def __init__(self, duty: Duty, controller: Any) -> None:
        self._duty = duty
        self._controller = controller
        self._dispatcher: Dispatcher | None = None
        self._loading: asyncio.Task[Dispatcher] | None = None
        self._memory = OutcomeMemory(duty.settings.remembered_ids)
        self._running: dict[int, asyncio.Future[Outcome] | None] = {}
        self._admitted = 0
        self._has_suspect = False
        """Whether a part that may kill this process has it for itself."""
        self._outgoing: Outgoing | None = None
        self._outlet: Outlet | None = None
        self._keeping: ReplicaKeeping | None = None
        """What it tells to, and asks of, the keeper of the system's journal, if there is one."""
        self._handled = 0
        self._idle = asyncio.Event()
        self._metrics = MetricsRecorder()
        self._successes: list[float] = []
        """Durations of plain successes that are not in the metrics yet."""
        self._succeeded_at = 0.0
        self._reporting: set[asyncio.Future[Any]] = set()

    # Data

    async def process(self, part: Part) -> list[Item | None]:
        """What became of each message; None for those that there was no room for."""
        try:
            dispatcher = self._dispatcher or await self._load()
        except Exception as error:
            return [self._unstarted(error, part.route_ids[row]) for row in part.rows]
        items: list[Item | None] = [None] * len(part.blobs)
        if self._has_suspect:
            return items
        if part.alone:
            async with self._quiet():
                await self._process(_Batch(part, items, len(part.blobs)), len(part.blobs))
            return items
        count = min(len(part.blobs), dispatcher.spec.max_in_flight - self._admitted)
        if count > 0:
            await self._process(_Batch(part, items, count), count)
        return items

    async def process_rows(self, part: RowPart) -> RowReport | None:
        """What became of each row of a DataFrame; None if there is no room for them."""
        try:
            dispatcher = self._dispatcher or await self._load()
        except Exception as error:
            return RowReport.alike(self._unstarted(error, None))
        try:
            content = await part.content[0]
        except RayError as error:
            words = f"its rows are gone, most likely with the process that sent them: {describe_exception(error)}"
            return RowReport.alike(_ended(self._id, None, ErrorCode.REPLICA_LOST, words))
        room = dispatcher.spec.max_in_flight - self._admitted
        if self._has_suspect or (self._admitted and len(part.codes) > room):
            return None
        async with self._quiet() if part.alone else nullcontext():
            with self._admission(len(part.codes)):
                report = await self._desk.process(part, content, self._duty.table_version)
        self._handled += len(part.codes)
        return report

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Nobody may die of this part: let those end that have begun, and admit nobody until it has ended itself."""
        self._has_suspect = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._until_idle()
            yield
        finally:
            self._has_suspect = False

    @contextmanager
    def _admission(self, count: int) -> Iterator[None]:
        self._admitted += count
        try:
            yield
        finally:
            self._admitted -= count
            if self._admitted == 0:
                self._idle.set()

    async def _process(self, batch: "_Batch", count: int) -> None:
        with self._admission(count):
            if count == 1 and self._workers.has_place:
                await self._workers.do((batch, 0))
            else:
                self._workers.add([(batch, index) for index in range(count)])
            await batch.done

    async def _until_idle(self) -> None:
        while self._admitted:
            self._idle.clear()
            await self._idle.wait()

    # Control

    async def start(self) -> str | None:
        """Load and start the handler; what is wrong, if anything is."""
        try:
            await self._load()
        except Exception as error:
            return describe_exception(error)
        return None

    async def ping(self) -> bool:
        """Whether the handler is well."""
        if self._dispatcher is None:
            return True
        return all([await endpoint.target.is_healthy() for endpoint in self._dispatcher.endpoints.all()])

    async def linger(self) -> None:
        """Never answers: who waits for it learns at once when this process is gone."""
        await asyncio.Event().wait()

    async def follow(self, circuit: Circuit, is_alert: bool = False) -> None:
        """The controller's word on the circuit."""
        breaker = (await self._load()).breaker
        if isinstance(breaker, ReportingBreaker):
            breaker.is_alert = breaker.is_alert or is_alert
            if not is_alert:
                breaker.follow(circuit, self._duty.replica_id)

    async def use_table(self, version: str) -> None:
        """The table that leads here from now on; dead letters name it."""
        self._duty = self._duty._replace(table_version=version)

    async def known(self, message_ids: Sequence[int]) -> list[bool]:
        """Which of these messages it has handled, or is handling, or has waiting for a handler."""
        waiting = set(map(_id_of, self._workers.waiting)) if self._dispatcher is not None else ()
        return [
            number in self._running or number in waiting or uuid_of(number) in self._memory for number in message_ids
        ]

    async def known_rows(self, part: RowPart) -> "npt.NDArray[np.bool_]":
        """Which of these rows it has handled, or is handling."""
        await self._load()
        return self._desk.known(part, await part.content[0])

    async def load(self) -> ReplicaLoad:
        """How busy it is."""
        breaker = self._dispatcher.breaker if self._dispatcher else None
        node = ray.get_runtime_context().get_node_id()
        state = breaker.state.value if breaker else "closed"
        return ReplicaLoad(self._admitted, len(self._running), self._handled, os.getpid(), node, state)

    async def metrics(self) -> DispatchMetrics:
        """What it has counted since it was born."""
        self._count_successes()
        return self._metrics.snapshot()

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing is under way, then stop the handler; False if the time was too short."""
        try:
            async with asyncio.timeout(seconds):
                await self._until_idle()
                if self._outgoing is not None:
                    await self._outgoing.drained()
                if self._keeping is not None:
                    await self._keeping.flush()
                if self._outlet is not None:
                    await self._outlet.close()
        except TimeoutError:
            return False
        finally:
            if self._dispatcher is not None:
                await self._dispatcher.stop()
        return True

    # One message

    async def _one(self, job: "tuple[_Batch | RowsUnderWay, int]") -> None:
        batch, index = job
        if isinstance(batch, RowsUnderWay):
            await batch.one(index)
            return
        part = batch.part
        key = part.rows[index]
        try:
            outcome = await self._outcome(part, index)
        except BaseException as error:
            # Nothing may leave a batch waiting for ever.
            outcome = self._failed(error, part.route_ids[key])
            if isinstance(error, asyncio.CancelledError):
                batch.end(index, outcome)
                raise
        item = pack(outcome)
        batch.end(index, item)
        self._handled += 1
        if type(item) is float:
            self._successes.append(item)
            self._succeeded_at = time()
            if len(self._successes) >= MOST_UNCOUNTED:
                self._count_successes()
        elif not outcome.repeated:
            self._metrics.record_outcome(outcome)

    async def _outcome(self, part: Part, index: int) -> Outcome:
        blob, row, resent, journaled = part.blobs[index], part.rows[index], part.resent, part.journaled
        key, route_id = part.keys[row], part.route_ids[row]
        try:
            envelope = decode(blob, key)
        except Exception as error:
            message = f"its payload cannot be read here: {describe_exception(error)}"
            return Outcome(
                self._id, DispatchStatus.INVALID_MESSAGE, route_id, error_code=ErrorCode.PAYLOAD_INVALID,
                error_type=type(error).__name__, error_message=message,
            )  # fmt: skip
        number = envelope.message_id.int
        stored = self._memory.recall(envelope.message_id) if journaled is None or not journaled.again else None
        if stored is not None and stored.error_code is not ErrorCode.OUTBOX_FULL:
            return stored
        if number in self._running:
            return await self._joined(number)
        if resent and self._at_most_once:
            return _ended(
                self._id, route_id, ErrorCode.REPLICA_LOST, "it was sent before, and may have run: it is not run again"
            )
        if resent:
            envelope = envelope.with_attempt(envelope.attempt + 1)
        run = self._run
        if journaled is not None:
            run = self._run_once
            envelope = envelope.with_attempt(envelope.attempt + journaled.deliveries[index])
        self._running[number] = None
        try:
            started = time()
            outcome = await run(envelope, route_id)
            if outcome.reply is not None:
                outcome = _portable(outcome)
        except (SystemExit, KeyboardInterrupt) as error:
            # Further out it would end the event loop, and leave a process that answers nobody.
            outcome = _ended(self._id, route_id, ErrorCode.HANDLER_EXCEPTION, describe_exception(error), error)
        except BaseException as error:
            self._end_running(number, self._failed(error, route_id))
            raise
        self._memory.keep(envelope.message_id, outcome)
        if self._keeping is not None:
            self._keeping.note(envelope.message_id, outcome)
        self._end_running(number, outcome)
        if outcome.status is not _SUCCESS and outcome.status in FINAL_FAILURES and journaled is None:
            started_at = datetime.fromtimestamp(started, UTC)
            # As it came: the handler may have changed the payload to something that does not pickle.
            envelope = decode(blob, key).with_attempt(envelope.attempt)
            letter = DeadLetter(key[0], envelope, outcome, started_at, datetime.now(UTC), self._duty.table_version)
            self._tell(self._controller.bury.remote(self._packed(letter)))
        return outcome

    def _packed(self, letter: DeadLetter) -> bytes:
        """For a journal as data; else, or if it is none, for the controller's memory."""
        if self._keeping is not None:
            with suppress(InvalidParameter):
                return pack_letter(letter)
        packed: bytes = cloudpickle.dumps(letter)
        return packed

    def _count_successes(self) -> None:
        """Plain successes are only noted, and counted when somebody asks: that saves a tenth of a message's time."""
        if self._successes:
            at = datetime.fromtimestamp(self._succeeded_at, UTC)
            self._metrics.record_successes(self._id, self._successes, at)
            self._successes = []

    async def _joined(self, number: int) -> Outcome:
        """The same message runs already: wait for that."""
        waiting = self._running[number]
        if waiting is None:
            waiting = self._running[number] = asyncio.get_running_loop().create_future()
        return (await asyncio.shield(waiting))._replace(repeated=True)

    def _end_running(self, number: int, outcome: Outcome) -> None:
        waiting = self._running.pop(number)
        if waiting is not None:
            waiting.set_result(outcome)

    def _failed(self, error: BaseException, route_id: str) -> Outcome:
        return _ended(self._id, route_id, ErrorCode.REPLICA_LOST, describe_exception(error), error)

    def _unstarted(self, error: Exception, route_id: str | None) -> Outcome:
        # The handler may be what could not be loaded, and its id with it.
        dispatcher_id = self._duty.replica_id.rpartition("-")[0]
        return _ended(dispatcher_id, route_id, ErrorCode.START_FAILED, describe_exception(error), error)

    # Being born

    async def _load(self) -> Dispatcher:
        if self._dispatcher is not None:
            return self._dispatcher
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load_once())
        loading = self._loading
        try:
            return await asyncio.shield(loading)
        except Exception:
            if self._loading is loading:
                self._loading = None  # The next message may find things better.
            raise

    async def _load_once(self) -> Dispatcher:
        spec: DispatcherSpec
        middleware: Sequence[Middleware]
        spec, middleware = cloudpickle.loads(self._duty.handler)
        self._id = spec.dispatcher_id
        self._at_most_once = spec.at_most_once
        if self._outgoing is None:  # Else an earlier try got so far.
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(min(spec.concurrency, MAX_THREADS), "raydispatch handler"))
            self._outgoing = Outgoing(self._duty.system, self._duty.engine, self._duty.settings)
        self._workers: Workers[Any] = Workers(spec.concurrency, self._one, lambda: None)
        breaker = None
        if spec.breaker is not None:
            breaker = ReportingBreaker(spec.breaker, report=self._report, on_change=lambda state: None)
        engine = self._duty.engine
        dispatcher = Dispatcher(
            replace(spec, replicas=1),
            middleware=middleware,
            slow_sync_handler_seconds=engine.slow_sync_handler_seconds,
            publish=self._way_out(spec, self._outgoing),
            max_hops=engine.max_hops,
            health_seconds=engine.health_interval_seconds,
            breaker=breaker,
        )
        self._run, self._run_once, self._holds = dispatcher.run, dispatcher.run_once, dispatcher.holds
        self._desk = RowDesk(
            dispatcher, self._workers, self._metrics, self._duty.settings.remembered_rows, self._bury_rows
        )
        await dispatcher.start()
        if engine.journal is not None and self._keeping is None:
            keeping = ReplicaKeeping(self._duty.system, self._id, engine.journal.patience_seconds)
            await keeping.recall(self._memory)
            self._keeping = keeping
        if breaker is not None:
            breaker.follow(await self._known_circuit(), self._duty.replica_id)
        self._dispatcher = dispatcher
        return dispatcher

    def _way_out(self, spec: DispatcherSpec, outgoing: Outgoing) -> Publish:
        if spec.outputs == "engine":
            return outgoing.accept
        if spec.outputs == "journal":
            return self._accept_durably
        self._outlet = self._outlet or open_outlet(spec.outputs, self._duty.system)
        return self._outlet.accept

    async def _accept_durably(self, outputs: Sequence[Envelope[Any]]) -> bool:
        return self._keeping is not None and await self._keeping.accept_outputs(outputs)

    async def _known_circuit(self) -> Circuit:
        """What the others know of the circuit: it survives this replica's restart."""
        try:
            async with asyncio.timeout(2):
                circuit: Circuit = await self._controller.circuit.remote(self._id)
                return circuit
        except Exception:
            return CLOSED

    def _bury_rows(self, letters: Sequence[DeadLetter]) -> None:
        self._tell(self._controller.bury_many.remote([self._packed(letter) for letter in letters]))

    def _report(self, report: Report) -> None:
        self._tell(self._controller.report.remote(self._id, self._duty.replica_id, report))

    def _tell(self, reference: Any) -> None:
        """Wait for it in the background: a call whose reference is dropped at once might be given up."""
        telling = asyncio.ensure_future(_quietly(reference))
        self._reporting.add(telling)
        telling.add_done_callback(self._reporting.discard)


class _Batch:
    """A part on its way through the workers."""

    __slots__ = ("_left", "done", "items", "part")

    def __init__(self, part: Part, items: "list[Item | None]", count: int) -> None:
        self.part = part
        self.items = items
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = count

    def end(self, index: int, item: Item) -> None:
        self.items[index] = item
        self._left -= 1
        if self._left == 0 and not self.done.done():
            self.done.set_result(None)


def _id_of(job: "tuple[_Batch | RowsUnderWay, int]") -> int | None:
    """The message id of a job that waits; None if it cannot be read, or is a row's, which are known elsewhere."""
    batch, index = job
    if isinstance(batch, RowsUnderWay):
        return None
    try:
        return decode(batch.part.blobs[index], batch.part.keys[batch.part.rows[index]]).message_id.int
    except Exception:
        return None


def _ended(
    dispatcher_id: str, route_id: str | None, code: ErrorCode, message: str, error: BaseException | None = None
) -> Outcome:
    return Outcome(
        dispatcher_id, DispatchStatus.DISPATCHER_ERROR, route_id, error_code=code,
        error_type=type(error).__name__ if error is not None else None, error_message=message,
    )  # fmt: skip


def _portable(outcome: Outcome) -> Outcome:
    """A reply that does not pickle is the handler's fault; found here, it costs nobody else anything."""
    try:
        cloudpickle.dumps(outcome.reply)
    except Exception as error:
        return outcome._replace(
            status=DispatchStatus.DISPATCHER_ERROR, reply=None, error_code=ErrorCode.HANDLER_RESULT,
            error_type=type(error).__name__,
            error_message=f"its reply cannot be sent to another process: {describe_exception(error)}",
        )  # fmt: skip
    return outcome


async def _quietly(reference: Any) -> None:
    # While the controller is away, replicas decide alone.
    with suppress(Exception):
        await reference


# No concurrency groups: in an async actor each would be a thread and an event loop of its own.
ReplicaActor = ray.remote(Replica)

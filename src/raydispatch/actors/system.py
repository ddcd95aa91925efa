"""The system: an engine that runs on Ray, as its users see it."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID, uuid4

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raydispatch.actors.blueprint import Blueprint, blueprint_of
from raydispatch.actors.connect import use_ray
from raydispatch.actors.controller import ControllerActor
from raydispatch.actors.durable import DurableVerbs
from raydispatch.actors.frames import DataFrameVerbs
from raydispatch.actors.front import FrontEngine
from raydispatch.actors.gateway import Gateway
from raydispatch.actors.names import FORMAT, NAMESPACE, check_name, controller_name, system_prefix
from raydispatch.actors.outgoing import find_routers
from raydispatch.actors.status import SystemStatus
from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.filters import Filter
from raydispatch.bus.publishing import OnPressure, OnResult
from raydispatch.bus.pubsub import OnMissed, Subscription
from raydispatch.bus.session import Session
from raydispatch.dispatch.metrics import DispatchMetrics, MetricsRecorder
from raydispatch.dispatch.outcome import DispatchResult, Reply
from raydispatch.errors import DispatchError, InvalidParameter, InvalidState, SystemUnavailable
from raydispatch.messages.envelope import REPLY_TO_HEADER, Envelope
from raydispatch.settings import SystemSettings

if TYPE_CHECKING:
    from raydispatch.routing.table import RouteTable
    from raydispatch.spark.routing import Target

T = TypeVar("T")

CONTROL_SECONDS = 30.0
"""How long to wait for a controller that is away; Ray restarts it within a few."""


class DispatchSystem(DurableVerbs, DataFrameVerbs):
    """An engine on a Ray cluster. The words of the engine, as plain calls and, with `_async`, as coroutines.

    Example: `with DispatchSystem.start(engine) as system: system.dispatch(topic, Envelope(payload))`.
    """

    def __init__(
        self,
        name: str,
        controller: Any,
        blueprint: Blueprint,
        settings: SystemSettings,
        *,
        owner: bool,
        on_result: OnResult | None = None,
        on_pressure: OnPressure | None = None,
    ) -> None:
        self.name = name
        self._controller = controller
        self._settings = settings
        self._owner = owner
        self._gateway_id = str(uuid4())
        gateway = Gateway(settings, lambda: find_routers(name), self._follow_table)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"raydispatch {name}", daemon=True)
        self._thread.start()
        self._front = FrontEngine(
            name,
            blueprint.table,
            gateway,
            settings=blueprint.engine,
            on_result=on_result,
            on_pressure=on_pressure,
        )
        self._collector: Future[Any] | None = None
        self._closed = False
        if owner:
            self._lease = asyncio.run_coroutine_threadsafe(self._hold_lease(), self._loop)

    # Beginning and ending

    @classmethod
    def start(
        cls,
        engine: DispatchEngine,
        *,
        routers: int | None = None,
        settings: SystemSettings | None = None,
        lease: bool = True,
    ) -> Self:
        """Start an engine's routers and dispatchers on Ray (`ray.init()` if need be), and wait until they are well.

        With a lease, the system drains and stops when this process vanishes. Without one it stays until it is stopped.
        """
        if not isinstance(engine, DispatchEngine):
            raise InvalidParameter(f"start takes a DispatchEngine, not {type(engine).__name__}.")
        settings = settings or SystemSettings()
        if routers is not None:
            settings = SystemSettings(**{**settings.model_dump(), "routers": routers})
        check_name(engine.name)
        use_ray()
        blueprint = blueprint_of(engine)
        controller = _new_controller(engine.name, settings, lease)
        try:
            _answer(controller.begin.remote(blueprint), settings.start_seconds + CONTROL_SECONDS)
        except BaseException:
            _end_all(engine.name, controller)
            raise
        system = cls(
            engine.name, controller, blueprint, settings,
            owner=lease, on_result=engine.on_result, on_pressure=engine.on_pressure,
        )  # fmt: skip
        for condition in engine.filters:
            system.add_filter(condition)
        return system

    @classmethod
    def attach(cls, name: str, *, on_result: OnResult | None = None, on_pressure: OnPressure | None = None) -> Self:
        """Use a system that runs already, from any process of its Ray cluster."""
        use_ray()
        try:
            controller = ray.get_actor(controller_name(name), NAMESPACE)
        except ValueError:
            raise SystemUnavailable(
                f"There is no system '{name}' on this Ray cluster: start it, or look at the name."
            ) from None
        spoken = _ask(controller, "format")
        if spoken != FORMAT:
            raise InvalidState(f"The system '{name}' speaks format {spoken}, this is {FORMAT}: use the same version.")
        blueprint, settings = _ask(controller, "blueprint"), _ask(controller, "settings")
        return cls(name, controller, blueprint, settings, owner=False, on_result=on_result, on_pressure=on_pressure)

    def stop(self, seconds: float | None = None) -> bool:
        """Deliver what was accepted, drain the actors, end them all. Whether everything was done in time."""
        seconds = self._settings.stop_seconds if seconds is None else seconds
        deadline = monotonic() + seconds
        self.close(seconds)
        drained = False
        try:
            left = max(0.0, deadline - monotonic())
            drained = bool(_ask(self._controller, "stop", left, seconds=seconds + CONTROL_SECONDS))
        except SystemUnavailable:
            return True  # Somebody else has stopped it.
        finally:
            ray.kill(self._controller, no_restart=True)
            _wait_until_gone(self.name)
        return drained

    def close(self, seconds: float | None = None) -> None:
        """Let go of the system, which runs on; what this process has published is delivered first."""
        if self._closed:
            return
        self._closed = True
        try:
            self._call(self._front.stop(self._settings.stop_seconds if seconds is None else seconds))
        finally:
            self._call(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            if not self._loop.is_running():
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner:
            self.stop()
        else:
            self.close()

    # Sending

    def dispatch(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send one message to all its dispatchers, and wait for their outcomes."""
        return self._call(self._front.dispatch(topic, envelope))

    def dispatch_async(self, topic: str, envelope: Envelope[Any]) -> Coroutine[Any, Any, DispatchResult]:
        """As `dispatch`; thousands at a time go in batches. In an event loop, a message is on its way at once."""
        if asyncio._get_running_loop() is None:
            return self._front.dispatch(topic, envelope)  # For `asyncio.run`, and the like.
        return self._front.begin(topic, envelope)

    def dispatch_many(self, messages: Iterable[tuple[str, Envelope[Any]]]) -> Iterator[DispatchResult]:
        """Send many, in batches; the results come in the order of the messages.

        Like `Executor.map`, it begins at once, and goes on as you take the results: any number of messages needs no
        more memory than a few batches.
        """
        return _Many(self, messages)

    async def dispatch_many_async(self, messages: Iterable[tuple[str, Envelope[Any]]]) -> AsyncIterator[DispatchResult]:
        """As `dispatch_many`, for an event loop."""
        source = iter(messages)
        calls: deque[asyncio.Task[list[DispatchResult]]] = deque()
        try:
            while True:
                while len(calls) < self._settings.window_calls and (batch := self._next_batch(source)):
                    calls.append(asyncio.get_running_loop().create_task(self._front.send_many(batch)))
                if not calls:
                    return
                for result in await calls.popleft():
                    yield result
        finally:
            for call in calls:
                call.cancel()

    def execute(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """Send a command to its one dispatcher; `result.reply` is what its handler replied."""
        return self._call(self._front.execute(topic, envelope))

    async def execute_async(self, topic: str, envelope: Envelope[Any]) -> DispatchResult:
        """As `execute`."""
        return await self._front.execute(topic, envelope)

    def request(self, topic: str, envelope: Envelope[Any], timeout: float | None = None) -> Reply:
        """Send a message and wait for a reply with its correlation id."""
        return self._call(self.request_async(topic, envelope, timeout))

    async def request_async(self, topic: str, envelope: Envelope[Any], timeout: float | None = None) -> Reply:
        """As `request`."""
        if isinstance(envelope, Envelope):
            # So that a reply from further down the chain finds its way back to this process.
            envelope = replace(envelope, headers={**envelope.headers, REPLY_TO_HEADER: self._gateway_id})
            self._collect_replies()
        return await self._front.request(topic, envelope, timeout)

    def reply(self, correlation_id: UUID, payload: object) -> None:
        """Answer a request that this process has made, from outside a handler."""
        self._front.reply(correlation_id, payload)

    def drain(self) -> None:
        """Wait until everything that this process has published is done."""
        self._call(self._front.drain())

    def subscribe(self, pattern: str, capacity: int = 1000, *, on_missed: OnMissed | None = None) -> Subscription:
        """Read what this process publishes on topics that fit."""
        return self._front.subscribe(pattern, capacity, on_missed=on_missed)

    def session(self, session_id: str) -> Session:
        """Dispatchers in this process for the messages of one job."""
        return self._front.session(session_id)

    def add_filter(self, condition: Filter) -> None:
        """Publish from here only what this lets through."""
        self._front.add_filter(condition)

    # Steering

    def scale(self, dispatcher_id: str, replicas: int) -> None:
        """Start or drain replicas of a dispatcher, until there are so many; messages flow meanwhile."""
        if not isinstance(replicas, int) or replicas < 1:
            raise InvalidParameter(f"replicas must be a number above 0, not {replicas!r}.")
        seconds = self._settings.start_seconds + self._settings.stop_seconds + CONTROL_SECONDS
        _ask(self._controller, "scale", dispatcher_id, replicas, seconds=seconds)

    def swap(self, engine: DispatchEngine) -> None:
        """Move to another engine's table under load: new dispatchers start first, then the routers move, then those
        that are gone are drained."""
        blueprint = blueprint_of(engine)
        seconds = self._settings.start_seconds + self._settings.stop_seconds + CONTROL_SECONDS
        _ask(self._controller, "swap", blueprint, seconds=seconds)
        self._front.use(blueprint.table, blueprint.engine.journal)

    def status(self) -> SystemStatus:
        """How everything is."""
        status: SystemStatus = _ask(self._controller, "status")
        return status

    def get_structured_metrics(self) -> DispatchMetrics:
        """The counts of all actors together, and of what this process refused itself."""
        total = MetricsRecorder(_ask(self._controller, "metrics"))
        total.add(self._front.get_structured_metrics())
        return total.snapshot()

    # Parts

    def _target(self) -> "Target":
        from raydispatch.spark.routing import Target

        def ask(job_id: str) -> dict[str, int]:
            return dict(self._ask("noted_rows", job_id))

        return Target(self.name, self._settings, self._front.settings.max_payload_bytes, ask)

    def _table(self) -> "RouteTable":
        return self._front.table

    def _ask(self, method: str, *arguments: object) -> Any:
        return _ask(self._controller, method, *arguments)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidState("This is the system's own thread: use the methods that end in _async.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _next_batch(self, source: Iterator[tuple[str, Envelope[Any]]]) -> list[tuple[str, Envelope[Any]]]:
        return list(islice(source, self._settings.batch_messages))

    async def _follow_table(self, version: str) -> None:
        """Somebody has swapped the table."""
        if version != self._front.table.version:
            with contextlib.suppress(RayError):
                blueprint: Blueprint = await self._controller.blueprint.remote()
                self._front.use(blueprint.table, blueprint.engine.journal)

    async def _hold_lease(self) -> None:
        while True:
            with contextlib.suppress(RayError):
                await self._controller.heartbeat.remote()
            await asyncio.sleep(self._settings.lease_seconds / 4)

    def _collect_replies(self) -> None:
        if self._collector is None or self._collector.done():
            self._collector = asyncio.run_coroutine_threadsafe(self._collect(), self._loop)

    async def _collect(self) -> None:
        """Fetch replies from further down the chain, as long as anybody waits for one."""
        idle_since = monotonic()
        while monotonic() - idle_since < 60:
            try:
                letters = await self._controller.collect_replies.remote(self._gateway_id, 10.0)
            except RayError:
                await asyncio.sleep(0.5)
                continue
            for correlation_id, reply in letters:
                idle_since = monotonic()
                with contextlib.suppress(DispatchError):  # Late or answered already.
                    self._front.reply(correlation_id, reply.payload)

    def __repr__(self) -> str:
        return f"<DispatchSystem '{self.name}'{', closed' if self._closed else ''}>"


class _Many(Iterator[DispatchResult]):
    """The results of many messages, in order, with a few batches under way."""

    def __init__(self, system: DispatchSystem, messages: Iterable[tuple[str, Envelope[Any]]]) -> None:
        self._system = system
        self._source = iter(messages)
        self._calls: deque[Future[list[DispatchResult]]] = deque()
        self._ready: deque[DispatchResult] = deque()
        self._top_up()

    def __next__(self) -> DispatchResult:
        if not self._ready:
            if not self._calls:
                raise StopIteration
            self._ready.extend(self._calls.popleft().result())
            self._top_up()
        return self._ready.popleft()

    def _top_up(self) -> None:
        system = self._system
        while len(self._calls) < system._settings.window_calls and (batch := system._next_batch(self._source)):
            work = system._front.send_many(batch)
            self._calls.append(asyncio.run_coroutine_threadsafe(work, system._loop))


async def _cancel_others() -> None:
    """End what runs in the background of this event loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=5) if tasks else None


def _new_controller(name: str, settings: SystemSettings, lease: bool) -> Any:
    try:
        return ControllerActor.options(
            name=controller_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=10_000,
            num_cpus=0,
        ).remote(name, settings, lease)
    except ValueError:
        raise InvalidState(
            f"A system '{name}' runs on this Ray cluster already: DispatchSystem.attach('{name}') finds it."
        ) from None


def _ask(controller: Any, method: str, *arguments: object, seconds: float = CONTROL_SECONDS) -> Any:
    """Ask the controller; while it is being restarted, ask again."""
    deadline = monotonic() + seconds
    while True:
        try:
            return _answer(getattr(controller, method).remote(*arguments), max(0.1, deadline - monotonic()))
        except RayActorError as error:
            if monotonic() > deadline or "was killed by `ray.kill`" in str(error) or "ray.kill" in str(error):
                raise SystemUnavailable("The system was stopped, or its controller does not come back.") from None
            threading.Event().wait(0.2)


def _answer(reference: Any, seconds: float) -> Any:
    try:
        return ray.get(reference, timeout=seconds)
    except RayTaskError as error:
        if isinstance(error.cause, DispatchError):
            raise error.cause from None
        raise
    except ray.exceptions.GetTimeoutError:
        raise SystemUnavailable(f"The controller gave no answer within {seconds:g} s.") from None


def _end_all(name: str, controller: Any) -> None:
    """End a system whose start failed or was broken off, wherever it was: first who makes actors, then those."""
    ray.kill(controller, no_restart=True)
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(system_prefix(name)):
            with contextlib.suppress(ValueError):  # It has ended meanwhile.
                ray.kill(ray.get_actor(entry["name"], NAMESPACE), no_restart=True)
    _wait_until_gone(name)


def _wait_until_gone(name: str) -> None:
    """A name is free again only some time after its actor was killed."""
    deadline = monotonic() + 10
    while monotonic() < deadline:
        try:
            ray.get_actor(controller_name(name), NAMESPACE)
        except ValueError:
            return
        threading.Event().wait(0.05)

"""Ray without Ray: actors as plain objects in one event loop, which can be held up, killed and started again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayTaskError
from tests.delivery.fakes import MemoryJournal

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors.blueprint import blueprint_of
from raydispatch.actors.circuit import CLOSED, Circuit
from raydispatch.actors.controller import Controller
from raydispatch.actors.gateway import Gateway
from raydispatch.actors.keeper import Keeper
from raydispatch.actors.names import NAMESPACE, controller_name, keeper_name
from raydispatch.actors.plan import Plan, Rule
from raydispatch.actors.replica import Replica
from raydispatch.actors.router import Router
from raydispatch.actors.wire import Delivery, Item, Message, Parcel, Part, decode, message_of
from raydispatch.bus.freezing import checked_table
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.subscription import Rules, SubscriptionStatus
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.dispatch.outcome import DispatchResult
from raydispatch.errors import NotRegistered
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import RouteTable
from raydispatch.settings import Delivery as JournalDelivery
from raydispatch.settings import JournalSettings, RetrySettings, SystemSettings

T = TypeVar("T")

EVENT = MessageCategory.EVENT
TOPIC = "dev.order.events.v1"
SETTINGS = SystemSettings(call_seconds=5, stop_seconds=1, start_seconds=5)


# Running


def run(story: Coroutine[Any, Any, T]) -> T:
    """Run a test's story, in a loop that knows which task belongs to which fake process."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_task_factory(_make_task)
        return runner.run(asyncio.wait_for(story, 20))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    """Let everybody do what can be done without waiting for anything."""
    for _ in range(count):
        await asyncio.sleep(0)


# Actors


class Shared:
    """Pickles as a reference, so that a test sees what handlers write down, wherever they travel."""

    _all: ClassVar[dict[int, "Shared"]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        self._all[id(self)] = self
        return _shared, (id(self),)


def _shared(number: int) -> Shared:
    return Shared._all[number]


class FakeProcess:
    """One life of an actor: its instance, and all tasks that came from it."""

    def __init__(self, handle: "FakeHandle") -> None:
        self.handle = handle
        self.tasks: set[asyncio.Task[Any]] = set()
        self.instance: Any = None


living_in: ContextVar[FakeProcess | None] = ContextVar("living_in", default=None)


def exit_process() -> NoReturn:
    """What a handler calls to take its whole process with it."""
    process = living_in.get()
    assert process is not None
    process.handle.crash()
    raise asyncio.CancelledError


class Call(NamedTuple):
    method: str
    arguments: tuple[Any, ...]


class FakeHandle(Shared):
    """The handle of an actor: `handle.method.remote(...)` begins the call, and gives something to await.

    What travels is pickled on its way, there and back. A call whose caller gives up goes on, as on Ray.
    """

    def __init__(self, make: Callable[[], Any], name: str = "actor") -> None:
        self.name = name
        self.calls: list[Call] = []
        self.is_down = False
        self.lives = 0
        self.lose_answer: str | None = None
        """The method whose next answer gets lost with the process: it ran, and nobody hears of it."""
        self._make = make
        self._process: FakeProcess | None = None
        self._answers: set[asyncio.Future[Any]] = set()
        self._gates: dict[str, asyncio.Event] = {}
        self._crashes: set[tuple[str, int]] = set()
        self._late: set[tuple[str, int]] = set()
        self._counts: Counter[str] = Counter()

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self, method)

    @property
    def instance(self) -> Any:
        """The plain object of this life."""
        return (self._process or self._start()).instance

    def count(self, method: str) -> int:
        return self._counts[method]

    def hold(self, method: str) -> None:
        """Let calls of this method wait at the door."""
        self._gates[method] = asyncio.Event()

    def release(self, method: str) -> None:
        self._gates.pop(method).set()

    def delay(self, method: str) -> None:
        """Let the next call of this method begin a little later: those behind it may overtake it. Ray promises no
        order to actors of many calls at once."""
        self._late.add((method, self._counts[method] + 1))

    def crash_at(self, method: str, number: int = 1) -> None:
        """Die when this method is called for the n-th time."""
        self._crashes.add((method, self._counts[method] + number))

    def crash(self, *, for_good: bool = False) -> None:
        """Die with everything that is under way; the next call finds a new life, unless this is for good."""
        self.is_down = self.is_down or for_good
        for answer in [one for one in self._answers if not one.done()]:
            answer.set_exception(ActorDiedError())
        process, self._process = self._process, None
        for task in list(process.tasks) if process else ():
            task.cancel()

    def _begin(self, method: str, arguments: tuple[Any, ...]) -> "FakeReference":
        self.calls.append(Call(method, arguments))
        self._counts[method] += 1
        if (method, self._counts[method]) in self._crashes:
            self.crash()
            return self._failed()
        if self.is_down:
            return self._failed()
        process = self._process or self._start()
        answer = self._answer()
        is_late = (method, self._counts[method]) in self._late
        work = self._work(process, method, travelled(arguments), answer, is_late)
        asyncio.get_running_loop().create_task(work, context=_context_of(process))
        return FakeReference(answer)

    async def _work(
        self,
        process: FakeProcess,
        method: str,
        arguments: tuple[Any, ...],
        answer: "asyncio.Future[Any]",
        is_late: bool = False,
    ) -> None:
        try:
            if is_late:
                await turns()
            if method in self._gates:
                await self._gates[method].wait()
            found = travelled(await getattr(process.instance, method)(*arguments))
        except Exception as error:
            if not answer.done():
                answer.set_exception(RayTaskError(method, repr(error), error).as_instanceof_cause())
            return
        if self.lose_answer == method:
            self.lose_answer = None
            self.crash()
        elif not answer.done():
            answer.set_result(found)

    def _start(self) -> FakeProcess:
        process = self._process = FakeProcess(self)
        self.lives += 1
        process.instance = _context_of(process).run(self._make)
        return process

    def _answer(self) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        answer.add_done_callback(lambda done: done.exception())  # Nobody need ask for it.
        return answer

    def _failed(self) -> "FakeReference":
        answer = self._answer()
        answer.set_exception(ActorDiedError())
        return FakeReference(answer)


class _Method:
    def __init__(self, handle: FakeHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *arguments: Any) -> "FakeReference":
        return self._handle._begin(self._name, arguments)


class FakeReference:
    def __init__(self, answer: "asyncio.Future[Any]") -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._answer).__await__()


def travelled(value: T) -> T:
    """What arrives of this in another process."""
    copy: T = cloudpickle.loads(cloudpickle.dumps(value))
    return copy


def _context_of(process: FakeProcess) -> Context:
    context = copy_context()
    context.run(living_in.set, process)
    return context


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> "asyncio.Task[Any]":
    task = asyncio.Task(work, loop=loop, context=context)
    process = (context.get(living_in) if context is not None else None) or living_in.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


# The parts of a system, on their own


class FakeController:
    """Listens, and knows a circuit."""

    def __init__(self, circuit: Circuit = CLOSED) -> None:
        self.reports: list[tuple[str, str, str]] = []
        self.letters: list[Any] = []
        self.now = circuit

    async def report(self, dispatcher_id: str, replica_id: str, report: str) -> None:
        self.reports.append((dispatcher_id, replica_id, str(report)))

    async def circuit(self, dispatcher_id: str) -> Circuit:
        return self.now

    async def bury(self, letter: bytes) -> None:
        self.letters.append(cloudpickle.loads(letter))

    async def bury_lost(self, *parts: Any) -> None:
        self.letters.append(parts)


class FakeReplica:
    """In the place of a replica: notes what comes, and answers as it is told."""

    def __init__(self, answer: Callable[[Any], Item | None] | None = None, knows: Iterable[int] = ()) -> None:
        self.parts: list[Part] = []
        self.gate: asyncio.Event | None = None
        self.is_well = True
        self._answer = answer or (lambda payload: 1.0)
        self._knows = set(knows)

    async def process(self, part: Part) -> list[Item | None]:
        self.parts.append(part)
        if self.gate is not None:
            await self.gate.wait()
        return [self._answer(payload) for payload in payloads_of(part)]

    async def known(self, message_ids: Sequence[int]) -> list[bool]:
        return [number in self._knows for number in message_ids]

    async def ping(self) -> bool:
        return self.is_well

    async def linger(self) -> None:
        await asyncio.Event().wait()

    @property
    def payloads(self) -> list[list[Any]]:
        """Of each part."""
        return [payloads_of(part) for part in self.parts]


def payloads_of(part: Part) -> list[Any]:
    return [decode(blob, part.keys[row]).payload for blob, row in zip(part.blobs, part.rows, strict=True)]


def parcel_of(messages: Sequence[tuple[str, Envelope[Any]]], seconds: float = 5.0, resent: bool = False) -> Parcel:
    keys = list(dict.fromkeys((topic, envelope.message_type) for topic, envelope in messages))
    rows = [keys.index((topic, envelope.message_type)) for topic, envelope in messages]
    blobs = [message_of(topic, envelope).blob for topic, envelope in messages]
    ids = [envelope.message_id.int for _, envelope in messages] if resent else None
    return Parcel(keys, rows, blobs, seconds, resent, ids)


def table_of(*routes: tuple[str, str, int]) -> RouteTable:
    """A table of (dispatcher id, pattern, priority); the route is named after both."""
    specs = [DispatcherSpec(name, print, EVENT) for name in dict.fromkeys(name for name, _, _ in routes)]
    paths = [
        DispatchRoute(
            route_id=f"{name}:{pattern}",
            topic_pattern=pattern,
            message_category=EVENT,
            dispatcher_id=name,
            priority=priority,
        )
        for name, pattern, priority in routes
    ]
    return checked_table(paths, specs, cache_entries=100, log=logging.getLogger("raydispatch"))


DEFAULT_RULE = Rule(at_most_once=False, reject_when_full=False, tries=3)


class Switchboard:
    """A router in front of fake replicas; a dispatcher has one unless more are given."""

    def __init__(self, table: RouteTable, replicas: dict[str, list[FakeReplica]] | None = None, **rule: Any) -> None:
        self.controller = FakeHandle(FakeController)
        self.router = Router("shop", SETTINGS, self.controller)
        self.table = table
        given = replicas or {}
        self.replicas = {name: given.get(name, [FakeReplica()]) for name in table.dispatchers}
        self.handles = {
            name: {f"{name}-{number}": _handle_of(one) for number, one in enumerate(ones, start=1)}
            for name, ones in self.replicas.items()
        }
        self.rule = DEFAULT_RULE._replace(**rule)
        self.generation = 0

    async def route(self, *messages: tuple[str, Envelope[Any]], **options: Any) -> Delivery:
        if self.generation == 0:
            await self.follow()
        delivery = await self.router.route(parcel_of(messages, **options))
        return delivery._replace(selections=delivery.by_key(), items=delivery.by_message(), lone=None)

    async def follow(self, table: RouteTable | None = None, **circuits: Circuit) -> None:
        self.table = table or self.table
        self.generation += 1
        handles = {name: self.handles[name] for name in self.table.dispatchers}
        rules = dict.fromkeys(handles, self.rule)
        await self.router.follow(Plan(self.generation, self.table, handles, rules, circuits))

    def parts(self, name: str) -> list[list[Any]]:
        """The payloads of each part that a dispatcher got."""
        return [payloads for replica in self.replicas[name] for payloads in replica.payloads]


def _handle_of(replica: FakeReplica) -> FakeHandle:
    return FakeHandle(lambda: replica)


def orders(*payloads: object, topic: str = TOPIC) -> list[tuple[str, Envelope[Any]]]:
    return [(topic, Envelope(payload, message_type="Order")) for payload in payloads]


# A whole system


class FakeRay:
    """The few words of Ray that the actors use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, FakeHandle] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.nodes: list[dict[str, Any]] = [{"Alive": True, "Resources": {"CPU": 4.0}}]
        self.cancelled: list[Any] = []
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "cancel", self.cancel)
        monkeypatch.setattr(ray, "get_actor", self.get_actor)
        monkeypatch.setattr(ray, "nodes", lambda: self.nodes)
        monkeypatch.setattr(ray.util, "list_named_actors", self.list_named_actors)
        monkeypatch.setattr(ray, "get_runtime_context", _RuntimeContext)
        monkeypatch.setattr("raydispatch.actors.controller.RouterActor", _ActorClass(self, Router))
        monkeypatch.setattr("raydispatch.actors.controller.ReplicaActor", _ActorClass(self, Replica))
        monkeypatch.setattr("raydispatch.actors.controller.KeeperActor", _ActorClass(self, Keeper))

    def kill(self, handle: FakeHandle, *, no_restart: bool = True) -> None:
        handle.crash(for_good=no_restart)
        if no_restart:
            self.actors = {name: one for name, one in self.actors.items() if one is not handle}

    def cancel(self, reference: Any, *, recursive: bool) -> None:
        self.cancelled.append(reference)

    def get_actor(self, name: str, namespace: str) -> FakeHandle:
        if name not in self.actors:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return self.actors[name]

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": NAMESPACE} for name in self.actors]

    def start(self, name: str, make: Callable[[], Any]) -> FakeHandle:
        handle = self.actors[name] = FakeHandle(make, name)
        return handle


class _ActorClass:
    def __init__(self, fake: FakeRay, kind: type, options: dict[str, Any] | None = None) -> None:
        self._fake = fake
        self._kind = kind
        self._options = options or {}

    def options(self, **options: Any) -> "_ActorClass":
        return _ActorClass(self._fake, self._kind, options)

    def remote(self, *arguments: Any) -> FakeHandle:
        name = self._options["name"]
        self._fake.options[name] = self._options
        given = travelled(arguments)
        return self._fake.start(name, lambda: self._kind(*given))


class _RuntimeContext:
    @property
    def current_actor(self) -> FakeHandle:
        process = living_in.get()
        assert process is not None
        return process.handle

    def get_node_id(self) -> str:
        return "ab" * 28  # As Ray's own: 56 hex digits.


class System:
    """An engine with its controller, routers, replicas and a gateway: all real, on a fake Ray."""

    def __init__(
        self, fake: FakeRay, engine: DispatchEngine, settings: SystemSettings = SETTINGS, lease: bool = False
    ) -> None:
        self.fake = fake
        self.engine = engine
        self.controller = fake.start(controller_name(engine.name), lambda: Controller(engine.name, settings, lease))
        self.gateway = Gateway(settings, self._find_routers)

    async def start(self) -> "System":
        await self.controller.begin.remote(blueprint_of(self.engine))
        return self

    async def send(self, *messages: tuple[str, Envelope[Any]]) -> list[DispatchResult]:
        return await self.gateway.send_batch([message_of(topic, envelope) for topic, envelope in messages])

    async def _find_routers(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = await self.controller.routers.remote()
        return found

    def named(self, kind: str) -> dict[str, FakeHandle]:
        """The actors of a kind, `router` or `replica`, by the last part of their names."""
        prefix = f"raydispatch/{self.engine.name}/{kind}/"
        return {name.removeprefix(prefix): one for name, one in self.fake.actors.items() if name.startswith(prefix)}

    @property
    def replicas(self) -> dict[str, FakeHandle]:
        return self.named("replica")

    @property
    def routers(self) -> dict[str, FakeHandle]:
        return self.named("router")

    @property
    def keeper(self) -> FakeHandle:
        return self.fake.actors[keeper_name(self.engine.name)]


Story = Callable[[], Awaitable[None]]


class Log(Shared):
    """A handler that notes what it sees, waits at a gate if there is one, and then does as it is told."""

    def __init__(self, act: Callable[[Envelope[Any]], Any] | None = None) -> None:
        self.seen: list[Envelope[Any]] = []
        self.gate: asyncio.Event | None = None
        self.now = self.most = 0
        self._act = act

    async def handle(self, envelope: Envelope[Any]) -> Any:
        self.seen.append(envelope)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.gate is not None:
                await self.gate.wait()
            return self._act(envelope) if self._act is not None else None
        finally:
            self.now -= 1

    @property
    def payloads(self) -> list[Any]:
        return [envelope.payload for envelope in self.seen]


class Journals(dict[str, MemoryJournal]):
    """The journals at all addresses, in memory: each stays when its keeper goes, and may be there before it comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.faults: list[Exception] = []
        """What is wrong when one is opened, the next time and the times after."""
        monkeypatch.setattr("raydispatch.delivery.post.open_journal", self._open)

    def __missing__(self, url: str) -> MemoryJournal:
        return self.setdefault(url, MemoryJournal())

    async def _open(self, url: str, name: str) -> MemoryJournal:
        self.opened.append(url)
        if self.faults:
            raise self.faults.pop(0)
        return self[url]


JOURNAL = JournalSettings(url="sqlite:///nowhere/shop.db", patience_seconds=0.2, watchdog_seconds=0.05)
TWICE = RetrySettings(tries=2, first_delay_seconds=0)
MODEST = Rules(JournalDelivery(window=16), TWICE)
"""Parts of up to four messages."""


class Office:
    """A keeper, the journal that it keeps, and fake replicas that follow no controller but the test.

    Every dispatcher wants everything. The keeper can be crashed; its next life begins with the next call.
    """

    def __init__(self, fake: FakeRay, journals: Journals, *names: str, way: Rules = MODEST) -> None:
        self.fake = fake
        self.journals = journals
        self.journal = journals[JOURNAL.url]
        self.ways = dict.fromkeys(names, way)
        self.replicas: dict[str, FakeReplica] = {}
        self.handles: dict[str, dict[str, FakeHandle]] = {}
        self.circuits: dict[str, Circuit] = {}
        self.generation = 0
        self.is_planned = True
        """Whether the controller answers when the keeper asks for the plan."""
        for name in names:
            self.join(f"{name}-1")
        self.handle = fake.start(
            keeper_name("shop"), lambda: Keeper("shop", JOURNAL, 1_000, FakeHandle(lambda: _Planner(self)))
        )

    async def open(self) -> "Office":
        assert await self.keeper.start() is None
        await self.follow()
        return self

    @property
    def keeper(self) -> Keeper:
        """The one of this life."""
        keeper: Keeper = self.handle.instance
        return keeper

    def join(self, replica_id: str, replica: FakeReplica | None = None) -> FakeReplica:
        """One more replica, in the next plan."""
        replica = self.replicas[replica_id] = replica or FakeReplica()
        self.handles.setdefault(replica_id.rpartition("-")[0], {})[replica_id] = _handle_of(replica)
        return replica

    def plan(self) -> Plan:
        table = table_of(*((name, "**", 0) for name in self.ways))
        rules = {name: DEFAULT_RULE._replace(way=way) for name, way in self.ways.items()}
        replicas = {name: self.handles.get(name, {}) for name in self.ways}
        return Plan(self.generation, table, replicas, rules, self.circuits)

    async def follow(self) -> None:
        """Tell the keeper what is now."""
        self.generation += 1
        await self.keeper.follow(travelled(self.plan()))

    async def publish(self, *payloads: object, key: str | None = None, due: float | None = None) -> None:
        messages = [(TOPIC, Envelope(payload, message_type="Order", key=key)) for payload in payloads]
        await self.send(messages, due)

    async def send(self, messages: Sequence[tuple[str, Envelope[Any]]], due: float | None = None) -> None:
        await self.keeper.append([Segment.of(messages, None if due is None else [due] * len(messages)).pack()])

    async def subscription(self, name: str) -> SubscriptionStatus:
        statuses, _ = await self.keeper.status()
        return next(one for one in statuses if one.name == name)

    async def settled(self, *names: str) -> None:
        """Wait until nothing is left to do for these."""
        async with asyncio.timeout(10):
            while any([(await self.subscription(name)).lag for name in names]):  # noqa: ASYNC110
                await asyncio.sleep(0)

    def got(self, replica_id: str) -> list[Any]:
        """The payloads that a replica was sent, in order."""
        return [payload for payloads in self.replicas[replica_id].payloads for payload in payloads]


class _Planner:
    """The controller of an office."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def plan(self) -> Plan:
        if not self._office.is_planned:
            raise NotRegistered("system", "shop")
        return self._office.plan()


def messages_of(pairs: Iterable[tuple[str, Envelope[Any]]]) -> list[Message]:
    return [message_of(topic, envelope) for topic, envelope in pairs]

"""The controller: starts, watches, scales and stops the actors of a system. No message passes through it."""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import UUID

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydispatch.actors.blueprint import Blueprint, PortableSpec, check_resources, explained
from raydispatch.actors.census import Census
from raydispatch.actors.circuit import CLOSED, Circuit, CircuitBoard, Report
from raydispatch.actors.keeper import KeeperActor
from raydispatch.actors.names import (
    FORMAT,
    NAMESPACE,
    controller_name,
    keeper_name,
    replica_name,
    router_name,
    system_prefix,
)
from raydispatch.actors.plan import Plan
from raydispatch.actors.replica import Duty, ReplicaActor
from raydispatch.actors.replies import Mailbox
from raydispatch.actors.router import RouterActor
from raydispatch.actors.row_desk import envelopes_of
from raydispatch.actors.rows import RowPart
from raydispatch.actors.status import DispatcherStatus, SubscriptionInfo, SystemStatus
from raydispatch.actors.wire import Key, decode
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.letters import pack_letter
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.metrics import DispatchMetrics
from raydispatch.dispatch.outcome import Outcome, Reply
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import InvalidParameter, NotRegistered, PartFailed, StartFailed
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import EngineSettings, SystemSettings

_log = logging.getLogger("raydispatch")

ANSWER_SECONDS = 5.0
"""How long an actor may take to answer a question of the controller."""
_PICKLE = 0x80
"""The first byte of a letter that is no data."""
QUICK_LOSSES = {"RAY_timeout_ms_task_wait_for_death_info": "50", "RAY_core_worker_internal_heartbeat_ms": "50"}
"""Ray takes up to two seconds to say that a process is gone: it would like to say why, and looks once a second.
Fail-over needs to know it at once; so the keeper's own Ray looks twenty times a second, and does not wait."""
MOST_JOBS = 100
"""Whose progress is kept; the oldest goes first."""
MOST_MAILBOXES = 1_000
"""Of gateways that have asked and may be gone; the oldest goes first."""


class Controller:
    """One per system, detached and named. If it dies, Ray starts it again, and it takes over the actors that run.

    Changes (start, scale, swap, stop) happen one at a time; everything runs in one event loop.
    """

    def __init__(self, name: str, settings: SystemSettings, lease: bool) -> None:
        self._name = name
        self._settings = settings
        self._has_lease = lease
        self._heard_at = monotonic()
        self._blueprint: Blueprint | None = None
        self._generation = 0
        self._jobs: dict[str, Counter[str]] = {}
        self._next_number = 1
        self._routers: dict[str, Any] = {}
        self._keeper: Any = None
        """The one who has the journal, if there is one."""
        self._replicas: dict[str, dict[str, Any]] = {}
        self._boards: dict[str, CircuitBoard] = {}
        self._census = Census(settings.metric_topics, monotonic)
        self._letters: deque[bytes] = deque(maxlen=settings.dead_letters)
        """Pickled: their payloads may be of modules that this process does not have."""
        self._replies: dict[str, Mailbox] = {}
        self._changing = asyncio.Lock()
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._adopting = self._spawn(self._adopt())

    # For drivers

    async def format(self) -> int:
        """Of what travels between processes."""
        return FORMAT

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def begin(self, blueprint: Blueprint) -> None:
        """Start the routers and the replicas, and wait until all of them are well."""
        await self._adopting
        async with self._changing:
            self._blueprint = blueprint
            try:
                me = self._myself()
                for number in range(1, self._settings.routers + 1):
                    name = router_name(self._name, number)
                    self._routers[name] = _start(RouterActor, name, {}, self._name, self._settings, me)
                await self._start_keeper(blueprint)
                for spec in blueprint.specs.values():
                    await self._grow(spec, spec.replicas)
                answers = await self._tell_routers(seconds=self._settings.start_seconds)
                if problems := [describe_exception(one) for one in answers if isinstance(one, Exception)]:
                    raise PartFailed("routers", "; ".join(problems))
            except BaseException:
                await self._end_all()
                raise
            self._heard_at = monotonic()
            self._spawn(self._supervise())

    async def routers(self) -> list[tuple[str, Any]]:
        """Names and handles, for gateways."""
        await self._adopting
        return list(self._routers.items())

    async def blueprint(self) -> Blueprint:
        """What runs now."""
        await self._adopting
        if self._blueprint is None:
            raise NotRegistered("system", self._name)
        return self._blueprint

    async def settings(self) -> SystemSettings:
        """As it was started with."""
        return self._settings

    async def heartbeat(self) -> None:
        """The driver that holds the lease is alive."""
        self._heard_at = monotonic()

    async def scale(self, dispatcher_id: str, replicas: int) -> None:
        """Start or drain replicas until there are so many."""
        await self._adopting
        async with self._changing:
            spec = self._spec(dispatcher_id)
            have = list(self._replicas[dispatcher_id])
            if len(have) < replicas:
                await self._grow(spec._replace(replicas=replicas), replicas - len(have))
                await self._tell_routers()
            elif len(have) > replicas:
                await self._shrink(dispatcher_id, have[replicas:])
            specs = {**self._blueprint_now().specs, dispatcher_id: spec._replace(replicas=replicas)}
            self._blueprint = self._blueprint_now()._replace(specs=specs)
            await self._tell_routers()

    async def swap(self, blueprint: Blueprint) -> None:
        """Another engine: start what is new, move all routers to its table, then drain what is gone."""
        await self._adopting
        async with self._changing:
            old = self._blueprint_now()
            blueprint = blueprint._replace(home=old.home or blueprint.home)
            # Replicas tell the keeper what they have handled, and ask it when they start.
            has_other_journal = blueprint.engine.journal != old.engine.journal
            new = [spec for name, spec in blueprint.specs.items() if name not in old.specs]
            changed = [
                spec
                for name, spec in blueprint.specs.items()
                if name in old.specs and (spec.handler != old.specs[name].handler or has_other_journal)
            ]
            before = {spec.dispatcher_id: list(self._replicas[spec.dispatcher_id]) for spec in changed}
            try:
                if has_other_journal:
                    await self._end_keeper(self._settings.stop_seconds)
                    await self._start_keeper(blueprint)
                for spec in (*new, *changed):
                    await self._grow(spec, spec.replicas, blueprint.engine, blueprint.table.version)
            except BaseException:
                if has_other_journal:
                    await self._end_keeper(0.0)
                    await self._start_keeper(old)
                for spec in (*new, *changed):
                    kept = before.get(spec.dispatcher_id, [])
                    extra = [name for name in self._replicas.get(spec.dispatcher_id, {}) if name not in kept]
                    self._kill(self._replicas[spec.dispatcher_id].pop(name) for name in extra)
                for spec in new:
                    self._replicas.pop(spec.dispatcher_id, None)
                raise
            gone = [name for name in old.specs if name not in blueprint.specs]
            self._blueprint = blueprint
            for spec in changed:
                if spec.breaker != old.specs[spec.dispatcher_id].breaker:
                    self._boards.pop(spec.dispatcher_id, None)
            await self._tell_routers(without=gone)
            stay = [one for name, some in self._replicas.items() if name not in gone for one in some.values()]
            await _ask_all(one.use_table.remote(blueprint.table.version) for one in stay)
            await self._settled()
            for dispatcher_id, replicas in before.items():
                await self._shrink(dispatcher_id, replicas)
            for dispatcher_id in gone:
                await self._shrink(dispatcher_id, list(self._replicas[dispatcher_id]), told=True)
                del self._replicas[dispatcher_id]
                self._boards.pop(dispatcher_id, None)

    async def status(self) -> SystemStatus:
        """Everything that can be seen from here."""
        await self._adopting
        blueprint = self._blueprint_now()
        router_names = list(self._routers)
        router_loads = await _ask_all(self._routers[name].load.remote() for name in router_names)
        dispatchers = {}
        # Copies, since a change may come while an answer is waited for.
        for dispatcher_id, replicas in {name: dict(some) for name, some in self._replicas.items()}.items():
            loads = await _ask_all(replica.load.remote() for replica in replicas.values())
            statuses = tuple(self._census.replica(*pair) for pair in zip(replicas, loads, strict=True))
            state = self._boards[dispatcher_id].circuit.state if dispatcher_id in self._boards else CircuitState.CLOSED
            dispatchers[dispatcher_id] = DispatcherStatus(dispatcher_id=dispatcher_id, circuit=state, replicas=statuses)
        subscriptions, letters = await self._keeper_status()
        routers = tuple(self._census.router(*pair) for pair in zip(router_names, router_loads, strict=True))
        return SystemStatus(
            name=self._name,
            table_version=blueprint.table.version,
            generation=self._generation,
            routers=routers,
            dispatchers=dispatchers,
            messages_per_second=self._census.rate(self._census.routed),
            dead_letters=len(self._letters) + letters,
            subscriptions=subscriptions,
            has_lease=self._has_lease,
        )

    async def metrics(self) -> DispatchMetrics:
        """The counts of all actors, those of lost processes included as far as they were heard of."""
        await self._adopting
        await self._take_census()
        return self._census.metrics()

    async def dead_letters(self) -> list[bytes]:
        """Those kept, each pickled, the oldest first."""
        return list(self._letters)

    async def stop(self, seconds: float) -> bool:
        """Drain everything, for so long; then end all actors. Whether all was done in time."""
        await self._adopting
        async with self._changing:
            self._stopped = True
            deadline = monotonic() + seconds
            drained = True
            everyone = [one for some in self._replicas.values() for one in some.values()]
            # The journal first: what it would deliver now can wait for the next life.
            keepers = [self._keeper] if self._keeper is not None else []
            for actors in (keepers, list(self._routers.values()), everyone):
                left = max(0.0, deadline - monotonic())
                answers = await _ask_all((actor.drain.remote(left) for actor in actors), left + ANSWER_SECONDS)
                drained = drained and all(answer is True for answer in answers)
            await self._end_keeper(0.0)
            await self._end_all()
            return drained

    # For replicas

    async def report(self, dispatcher_id: str, replica_id: str, report: Report) -> None:
        """A replica tells of its calls. When that changes the circuit, everybody hears of it at once."""
        await self._adopting
        board = self._board(dispatcher_id)
        if board is None:
            return
        is_closed = board.circuit.state is CircuitState.CLOSED
        first = report is Report.FAILED and is_closed and board.failures == 0
        if board.hear(report, replica_id):
            await self._spread(dispatcher_id, board.circuit)
        elif first:
            others = [one for name, one in self._replicas.get(dispatcher_id, {}).items() if name != replica_id]
            await _ask_all(other.follow.remote(board.circuit, True) for other in others)

    async def circuit(self, dispatcher_id: str) -> Circuit:
        """The state of a dispatcher's circuit, for a replica that was started again."""
        await self._adopting
        board = self._board(dispatcher_id)
        return board.circuit if board else CLOSED

    async def bury(self, letter: bytes) -> None:
        """Keep a dead letter."""
        await self.bury_many([letter])

    async def bury_many(self, letters: Sequence[bytes]) -> None:
        """Keep dead letters: those that are data in the journal, if there is one."""
        self._letters.extend(letters)
        await self._hand_over()

    async def _hand_over(self) -> None:
        """Give the keeper what is data; while it is away, that waits here."""
        data = [letter for letter in self._letters if letter[0] != _PICKLE]
        if not data or self._keeper is None:
            return
        others = [letter for letter in self._letters if letter[0] == _PICKLE]
        self._letters.clear()
        self._letters.extend(others)
        try:
            await self._keeper.bury.remote(data)
        except Exception as error:
            self._letters.extend(data)
            _log.warning("journal takes no dead letters", extra={"error": describe_exception(error)})

    async def bury_lost(self, key: Key, blob: bytes, outcome: Outcome, table_version: str) -> None:
        """Keep a message that took its replicas with it."""
        await self._bury_here(key[0], decode(blob, key), outcome, table_version)

    async def bury_row(self, part: RowPart, outcome: Outcome, table_version: str) -> None:
        """Keep a row that took its replicas with it."""
        (envelope,) = envelopes_of(part, await part.content[0])
        await self._bury_here(envelope.topic, envelope, outcome, table_version)

    async def _bury_here(self, topic: str, envelope: Envelope[Any], outcome: Outcome, table_version: str) -> None:
        now = datetime.now(UTC)
        letter = DeadLetter(topic, envelope, outcome, now, now, table_version)
        packed = cloudpickle.dumps(letter)
        if self._keeper is not None:
            with suppress(InvalidParameter):  # Its payload is no data: then it stays in memory.
                packed = pack_letter(letter)
        await self.bury_many([packed])

    async def note_rows(self, job_id: str, counts: Mapping[str, int]) -> None:
        """So many more rows of a job have ended so; told by those who send them, to be shown while it runs."""
        self._jobs.setdefault(job_id, Counter()).update(counts)
        while len(self._jobs) > MOST_JOBS:
            del self._jobs[next(iter(self._jobs))]

    async def noted_rows(self, job_id: str) -> dict[str, int]:
        """How far a job is."""
        return dict(self._jobs.get(job_id, {}))

    async def deliver_reply(self, asker: str, correlation_id: UUID, reply: Reply) -> None:
        """A reply for a request of some gateway."""
        self._mailbox(asker).put((correlation_id, reply))

    async def collect_replies(self, asker: str, seconds: float) -> list[tuple[UUID, Reply]]:
        """The replies for a gateway; waits for the first."""
        letters = await self._mailbox(asker).take(seconds)
        if not self._mailbox(asker):
            del self._replies[asker]
        return letters

    # For routers

    async def plan(self) -> Plan:
        """What to route by."""
        await self._adopting
        return self._plan()

    # Changing

    async def _grow(
        self, spec: PortableSpec, count: int, engine: EngineSettings | None = None, version: str | None = None
    ) -> None:
        """Start replicas and wait until they are well; those of a failed attempt are ended."""
        blueprint = self._blueprint_now()
        started: dict[str, Any] = {}
        check_resources(spec)
        for _ in range(count):
            replica_id = f"{spec.dispatcher_id}-{self._next_number}"
            self._next_number += 1
            duty = Duty(
                self._name, replica_id, spec.handler, engine or blueprint.engine, self._settings,
                version or blueprint.table.version,
            )  # fmt: skip
            name = replica_name(self._name, replica_id)
            try:
                started[replica_id] = _start(ReplicaActor, name, spec.options, duty, self._myself())
            except BaseException:
                self._kill(started.values())
                raise
        answers = await _ask_all((one.start.remote() for one in started.values()), self._settings.start_seconds)
        problems = {str(answer) for answer in answers if answer is not None}
        if problems:
            self._kill(started.values())
            raise StartFailed(spec.dispatcher_id, explained(sorted(problems), spec))
        self._replicas.setdefault(spec.dispatcher_id, {}).update(started)

    async def _shrink(self, dispatcher_id: str, replica_ids: Sequence[str], told: bool = False) -> None:
        """Tell the routers first, so that nothing new comes; then let what is there end."""
        leaving = {name: self._replicas[dispatcher_id].pop(name) for name in replica_ids}
        if not told:
            await self._tell_routers()
        await _ask_all(
            (one.drain.remote(self._settings.stop_seconds) for one in leaving.values()),
            self._settings.stop_seconds + ANSWER_SECONDS,
        )
        await self._take_census(leaving)
        self._kill(leaving.values())

    async def _tell_routers(self, without: Sequence[str] = (), seconds: float = ANSWER_SECONDS) -> list[Any]:
        self._generation += 1
        plan = self._plan(without)
        followers = [*self._routers.values(), *([self._keeper] if self._keeper is not None else [])]
        return await _ask_all((one.follow.remote(plan) for one in followers), seconds)

    async def _settled(self) -> None:
        """Wait until no router works by an older plan: what has begun by it may still need those that are gone."""
        seconds = self._settings.stop_seconds
        await _ask_all((router.settled.remote(seconds) for router in self._routers.values()), seconds + ANSWER_SECONDS)

    async def _spread(self, dispatcher_id: str, circuit: Circuit) -> None:
        _log.warning("circuit %s", circuit.state.value, extra={"dispatcher_id": dispatcher_id, "system": self._name})
        senders = [*self._routers.values(), *([self._keeper] if self._keeper is not None else [])]
        routers = [sender.follow_circuit.remote(dispatcher_id, circuit) for sender in senders]
        replicas = [one.follow.remote(circuit) for one in self._replicas.get(dispatcher_id, {}).values()]
        await _ask_all((*routers, *replicas))

    def _plan(self, without: Sequence[str] = ()) -> Plan:
        blueprint = self._blueprint_now()
        replicas = {name: dict(handles) for name, handles in self._replicas.items() if name not in without}
        rules = {name: blueprint.specs[name].rule for name in replicas if name in blueprint.specs}
        circuits = {name: board.circuit for name, board in self._boards.items() if name in replicas}
        memo = cloudpickle.dumps((blueprint, self._next_number))
        replicas = {name: handles for name, handles in replicas.items() if name in rules}
        return Plan(self._generation, blueprint.table, replicas, rules, circuits, memo)

    async def _start_keeper(self, blueprint: Blueprint) -> None:
        journal = blueprint.engine.journal
        if journal is None:
            return
        options: dict[str, Any] = {"runtime_env": {"env_vars": QUICK_LOSSES}}
        if blueprint.home is not None:
            # The file is there and nowhere else.
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(blueprint.home, soft=False)
        remembered = self._settings.remembered_ids
        name = keeper_name(self._name)
        self._keeper = _start(KeeperActor, name, options, self._name, journal, remembered, self._myself())
        (problem,) = await _ask_all((self._keeper.start.remote(),), self._settings.start_seconds)
        if problem is not None:
            raise PartFailed("journal", str(problem) or "no answer in time")

    async def _end_keeper(self, seconds: float) -> bool:
        """Let what is under way end, keep the cursors, close the journal."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return True
        (drained,) = await _ask_all((keeper.close.remote(seconds),), seconds + 2 * ANSWER_SECONDS)
        self._kill((keeper,))
        return drained is True

    async def _keeper_status(self) -> tuple[tuple[SubscriptionInfo, ...], int]:
        if self._keeper is None:
            return (), 0
        (answer,) = await _ask_all((self._keeper.status.remote(),))
        if not isinstance(answer, tuple):
            return (), 0
        statuses, letters = answer
        return tuple(SubscriptionInfo(**status._asdict()) for status in statuses), letters

    async def _end_all(self) -> None:
        self._stopped = True
        if self._keeper is not None:
            self._kill((self._keeper,))
            self._keeper = None
        everyone = [*self._routers.values(), *(one for some in self._replicas.values() for one in some.values())]
        self._kill(everyone)
        self._routers.clear()
        self._replicas.clear()

    def _kill(self, actors: Iterable[Any]) -> None:
        for actor in actors:
            ray.kill(actor, no_restart=True)

    # Watching

    async def _adopt(self) -> None:
        """After a restart: find the actors that run, and take the newest plan that a router remembers."""
        prefix = system_prefix(self._name)
        names = [
            entry["name"]
            for entry in await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
            if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)
        ]
        found = {}
        for name in names:
            with suppress(ValueError):  # It may have ended meanwhile.
                if name != controller_name(self._name):
                    found[name] = ray.get_actor(name, NAMESPACE)
        routers = {name: handle for name, handle in found.items() if name.startswith(f"{prefix}router/")}
        if not routers:
            return
        plans = [
            plan for plan in await _ask_all(one.plan.remote() for one in routers.values()) if isinstance(plan, Plan)
        ]
        if not plans:
            # Nobody knows what these are for. They end with the lease, or when somebody stops the system.
            self._routers = routers
            self._replicas = {"": {name: one for name, one in found.items() if name not in routers}}
            self._heard_at = monotonic()
            self._spawn(self._supervise())
            return
        newest = max(plans, key=lambda plan: plan.generation)
        self._blueprint, self._next_number = cloudpickle.loads(newest.memo)
        self._generation = newest.generation
        self._routers = routers
        self._replicas = {name: dict(handles) for name, handles in newest.replicas.items()}
        known = {replica_name(self._name, one) for some in self._replicas.values() for one in some}
        # Those that were being started or drained when the controller died belong to nobody.
        self._keeper = found.pop(keeper_name(self._name), None)
        self._kill(handle for name, handle in found.items() if name not in known and name not in routers)
        for dispatcher_id, circuit in newest.circuits.items():
            if (board := self._board(dispatcher_id)) is not None:
                board.adopt(circuit)
        self._heard_at = monotonic()
        await self._tell_routers()
        await self._take_census()
        self._census.forget_rate()
        _log.warning("controller restarted", extra={"system": self._name, "generation": self._generation})
        self._spawn(self._supervise())

    async def _supervise(self) -> None:
        """Ask every actor how it is, count, and end the system when the driver that holds the lease has vanished."""
        while not self._stopped:
            await asyncio.sleep(min(self._settings.health_seconds, self._settings.lease_seconds / 4))
            await self._take_census()
            await self._hand_over()
            if self._has_lease and monotonic() - self._heard_at > self._settings.lease_seconds:
                _log.warning("driver vanished, the system stops", extra={"system": self._name})
                await self.stop(self._settings.stop_seconds)
                ray.kill(self._myself(), no_restart=True)

    async def _take_census(self, more: Mapping[str, Any] | None = None) -> None:
        actors: dict[str, Any] = {**self._routers, **(more or {})}
        for replicas in self._replicas.values():
            actors.update(replicas)
        loads = await _ask_all(actor.load.remote() for actor in actors.values())
        counts = await _ask_all(actor.metrics.remote() for actor in actors.values())
        self._census.note(actors, loads, counts)

    # Small things

    def _blueprint_now(self) -> Blueprint:
        if self._blueprint is None:
            raise NotRegistered("system", self._name)
        return self._blueprint

    def _spec(self, dispatcher_id: str) -> PortableSpec:
        spec = self._blueprint_now().specs.get(dispatcher_id)
        if spec is None:
            raise NotRegistered("dispatcher", dispatcher_id)
        return spec

    def _board(self, dispatcher_id: str) -> CircuitBoard | None:
        spec = self._blueprint.specs.get(dispatcher_id) if self._blueprint else None
        if spec is None or spec.breaker is None:
            return None
        if dispatcher_id not in self._boards:
            self._boards[dispatcher_id] = CircuitBoard(spec.breaker, monotonic)
        return self._boards[dispatcher_id]

    def _mailbox(self, asker: str) -> Mailbox:
        if asker not in self._replies and len(self._replies) >= MOST_MAILBOXES:
            del self._replies[next(iter(self._replies))]
        return self._replies.setdefault(asker, Mailbox())

    def _myself(self) -> Any:
        return ray.get_runtime_context().current_actor

    def _spawn(self, work: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _start(actor: Any, name: str, options: Mapping[str, Any], *arguments: object) -> Any:
    return actor.options(
        **{"num_cpus": 0, **options},
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=10_000,
    ).remote(*arguments)


async def _ask_all(references: Iterable[Awaitable[Any]], seconds: float = ANSWER_SECONDS) -> list[Any]:
    """All answers, in order; an exception where there is none in time. Never raises."""
    return await asyncio.gather(*(asyncio.wait_for(one, seconds) for one in references), return_exceptions=True)


ControllerActor = ray.remote(Controller)

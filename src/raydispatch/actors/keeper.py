"""The keeper: owns the journal of a system, and brings what is in it to replicas and readers.

One actor per system, on the node of the journal's file. It routes by the same plan as the routers do.
"""

import asyncio
import gc
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from ray.exceptions import RayError

from raydispatch.actors.circuit import Circuit
from raydispatch.actors.plan import Plan, Target
from raydispatch.actors.targets import Infirmary, targets_of
from raydispatch.actors.wire import LOSSES, STORE_FULL, Journaled, Key, Part
from raydispatch.bus.durable import check_reader, fitting, routed_to
from raydispatch.delivery.consumer import ACKED, LOST, REFUSED, Item, Tell, Verdict, verdict_of
from raydispatch.delivery.letters import EVERY, LetterFilter, pack_letter
from raydispatch.delivery.post import Post
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.subscription import Rules, Start, Subscription, SubscriptionStatus, Wants
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.endpoints import Endpoint, EndpointState
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import JournalUnavailable, NotRegistered
from raydispatch.settings import Delivery, DeliveryMode, JournalSettings, RetrySettings

AGAIN_SECONDS = 0.2
"""Until a journal that is away is asked for again."""
TURN_SECONDS = 2.0
"""How long an append waits for the one before it, of the same publisher."""
FEW_CALLS = 3
"""As many as a publisher has under way at once: the first of them need not be the first to come."""
MOST_LANES = 10_000
GC_THRESHOLD = 50_000
HOLD_SECONDS = 0.05
LEASE_SECONDS = 5.0
"""How long a reader that says nothing keeps its messages; it says something every second."""

_log = logging.getLogger("raydispatch")


class ReplicaConsumer:
    """A replica as a consumer of its dispatcher's subscription."""

    def __init__(
        self,
        endpoint: Endpoint[Any],
        target: Target,
        infirmary: Infirmary,
        again_until: "_AgainUntil",
        is_ordered: bool = False,
    ) -> None:
        self.consumer_id = endpoint.endpoint_id
        self.endpoint = endpoint
        self._target = target
        self._infirmary = infirmary
        self._again_until = again_until
        self._is_ordered = is_ordered
        """Whether a call waits for the one before: Ray lets calls to one actor overtake each other."""
        self._last: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process is gone."""
        self._holding = asyncio.get_running_loop().create_task(self._hold_on())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is with it."""
        return not self._calls

    def let_go(self) -> None:
        """It is nobody's consumer any more."""
        self._holding.cancel()

    async def _hold_on(self) -> None:
        """A call that never ends: Ray says at once when the process that has it is gone. What is sent to one that is
        being restarted waits until it is there again, a second or two, while another one could have it."""
        while True:
            try:
                await self.endpoint.target.linger.remote()
            except RayError:
                if self.endpoint.state is EndpointState.LEAVING:
                    return
                self._lost()
            await asyncio.sleep(HOLD_SECONDS)
            while self.endpoint.state is EndpointState.QUARANTINED:  # noqa: ASYNC110 - the infirmary decides that
                await asyncio.sleep(HOLD_SECONDS)

    def _lost(self) -> None:
        if not self._loss.done():
            self._loss.set_result(None)
        self._loss = asyncio.get_running_loop().create_future()
        self._target.endpoints.quarantine(self.consumer_id)
        self._infirmary.watch()

    def is_well(self) -> bool:
        """Whether it takes messages: it answers, and its circuit lets it."""
        if self.endpoint.state is not EndpointState.HEALTHY or not self._target.admits():
            return False
        circuit = self._target.circuit
        if circuit.state is CircuitState.CLOSED or circuit.trial_replica is None:
            return True
        # With the trial of one that is gone, anybody will do.
        return circuit.trial_replica == self.consumer_id or self._target.endpoints.get(circuit.trial_replica) is None

    def take(self, items: list[Item], tell: Tell) -> None:
        """Send it these."""
        before = self._last if self._is_ordered else None
        call = self._last = asyncio.get_running_loop().create_task(self._call(items, tell, before))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def give_back(self) -> list[Item]:
        """Nothing: what a replica has is on its way."""
        return []

    async def _call(self, items: list[Item], tell: Tell, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait((before,))
            if not self.is_well():  # The one before was lost, or refused: nothing overtakes it.
                tell(self.consumer_id, items, [REFUSED] * len(items))
                return
        endpoints = self._target.endpoints
        endpoints.begun(self.endpoint, len(items))
        try:
            verdicts = await self._verdicts(self.endpoint.target.process.remote(_part(items, self._again_until.offset)))
        except STORE_FULL:
            verdicts = [REFUSED] * len(items)
        except (*LOSSES, RayError) as error:
            _log.warning("replica lost", extra={"replica": self.consumer_id, "error": type(error).__name__})
            self._lost()
            verdicts = None
        finally:
            endpoints.ended(self.endpoint, len(items))
        tell(self.consumer_id, items, [LOST] * len(items) if verdicts is None else verdicts)

    async def _verdicts(self, call: Any) -> list[Verdict] | None:
        """What a call has brought; None if its process is gone before. Without looking, a call that came too late for
        the old process would wait for the new one."""
        answer = asyncio.ensure_future(_answer(call))
        await asyncio.wait((answer, self._loss), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return [_verdict(one) for one in answer.result()]
        answer.cancel()
        with suppress(RayError, ValueError):
            ray.cancel(call, recursive=False)
        return None


async def _answer(call: Any) -> Any:
    return await call


class _AgainUntil:
    """Up to where a subscription replays."""

    offset = 0


class Pulled(NamedTuple):
    """Messages on their way to a reader in another process, as columns: an object for each would take longer to
    pickle than all the rest."""

    keys: list[Key]
    codes: list[int]
    offsets: list[int]
    blobs: list[bytes]
    deliveries: list[int]

    @classmethod
    def of(cls, items: Sequence[Item]) -> "Pulled":
        """Items as columns."""
        keys: dict[Key, int] = {}
        codes = [keys.setdefault((item.topic, item.message_type), len(keys)) for item in items]
        offsets = [item.entry.offset for item in items]
        return cls(list(keys), codes, offsets, [item.blob for item in items], [item.deliveries for item in items])


class Settled(NamedTuple):
    """What became of messages at a reader in another process."""

    acked: list[int]
    """Their offsets."""
    others: list[tuple[int, Verdict]]


class PulledConsumer:
    """A reader in another process, which comes to fetch its messages. One that stays away for long is gone."""

    def __init__(self, consumer_id: str) -> None:
        self.consumer_id = consumer_id
        self._heard_at = monotonic()
        self._waiting: deque[Item] = deque()
        self._held: dict[int, Item] = {}
        self._tell: Tell | None = None
        self._arrived = asyncio.Event()

    @property
    def is_gone(self) -> bool:
        """Whether nothing was heard of it for too long."""
        return monotonic() - self._heard_at > LEASE_SECONDS

    def is_well(self) -> bool:
        """Whether it takes messages."""
        return not self.is_gone

    def take(self, items: list[Item], tell: Tell) -> None:
        """Hold these ready."""
        self._tell = tell
        self._held.update([(item.entry.offset, item) for item in items])
        self._waiting.extend(items)
        self._arrived.set()

    def give_back(self) -> list[Item]:
        """What was not fetched yet."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for item in waiting:
            self._held.pop(item.entry.offset, None)
        return waiting

    def settle(self, settled: Settled) -> None:
        """What became of some."""
        self._heard_at = monotonic()
        if self._tell is None:
            return
        acked = [item for offset in settled.acked if (item := self._held.pop(offset, None)) is not None]
        if acked:
            self._tell(self.consumer_id, acked, [ACKED] * len(acked))
        others = [(item, verdict) for offset, verdict in settled.others if (item := self._held.pop(offset, None))]
        if others:
            self._tell(self.consumer_id, [item for item, _ in others], [verdict for _, verdict in others])

    async def pull(self, most: int, seconds: float) -> Pulled:
        """The next ones, for which it waits a while."""
        self._heard_at = monotonic()
        if not self._waiting:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
        self._heard_at = monotonic()
        return Pulled.of([self._waiting.popleft() for _ in range(min(most, len(self._waiting)))])


class _Lane:
    """Calls of one publisher, put back into their order."""

    def __init__(self, number: int) -> None:
        self._next = number
        self._moved = asyncio.Event()

    async def turn(self, number: int) -> None:
        """Wait for those before. One that never comes is waited for only so long: its publisher has given up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN_SECONDS):
                while number > self._next:
                    self._moved.clear()
                    await self._moved.wait()

    def done(self, number: int) -> None:
        """The next one may go."""
        self._next = max(self._next, number + 1)
        self._moved.set()


class _Lanes:
    """The lanes of all publishers; those that were not heard of for longest are forgotten."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()

    def of(self, lane_id: str, number: int) -> _Lane:
        """A lane; an unknown one begins with this number, unless it is near its beginning."""
        lane = self._lanes.get(lane_id)
        if lane is None:
            lane = self._lanes[lane_id] = _Lane(0 if number < FEW_CALLS else number)
            if len(self._lanes) > MOST_LANES:
                self._lanes.popitem(last=False)
        self._lanes.move_to_end(lane_id)
        return lane


class Keeper:
    """The post of a system, in an actor. If it dies, Ray starts it again, and the journal knows how far it was."""

    def __init__(self, system: str, settings: JournalSettings, remembered: int, controller: Any) -> None:
        self._system = system
        self._settings = settings
        self._remembered = remembered
        self._controller = controller
        self._plan: Plan | None = None
        self._targets: dict[str, Target] = {}
        self._infirmary = Infirmary(lambda: self._targets, self._poke_all)
        self._consumers: dict[str, dict[str, ReplicaConsumer]] = {}
        self._until: dict[str, _AgainUntil] = {}
        self._lanes = _Lanes()
        self._patterns: dict[str, tuple[str, Wants]] = {}
        self._readers: dict[str, tuple[str, PulledConsumer]] = {}
        self._changing = asyncio.Lock()
        self._post: Post | None = None
        self._trouble = ""
        """Why the journal cannot be opened yet."""
        self._is_closed = False
        # In this process is nothing but messages, which live shortly and make no circles: looking for some more often
        # than that costs a third of its time.
        gc.set_threshold(GC_THRESHOLD)
        self._opening = asyncio.get_running_loop().create_task(self._open())
        self._tasks = {self._opening}

    # For the controller

    async def start(self) -> str | None:
        """Open the journal; what is wrong, if anything is."""
        await asyncio.wait((self._opening,), timeout=self._settings.patience_seconds)
        if not self._opening.done():
            return f"its journal is away: {self._trouble}"
        error = self._opening.exception()
        return None if error is None else describe_exception(error)

    async def follow(self, plan: Plan) -> None:
        """Deliver by this from now on."""
        if self._plan is not None and plan.generation < self._plan.generation:
            return
        self._plan = plan
        self._targets = targets_of(plan, self._targets)
        await self._adjust()

    async def follow_circuit(self, dispatcher_id: str, circuit: Circuit) -> None:
        """The controller's word on one circuit."""
        if (target := self._targets.get(dispatcher_id)) is not None:
            target.follow(circuit)
            self._poke_all()

    async def status(self) -> tuple[list[SubscriptionStatus], int]:
        """How the subscriptions are, and how many dead letters there are."""
        post = await self._opened()
        return post.statuses(), await post.letters.count()

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def drain(self, seconds: float) -> bool:
        """Deliver nothing more, and let replicas end what they have; whether they did within so long."""
        return await (await self._opened()).drain(seconds)

    async def close(self, seconds: float) -> bool:
        """Deliver nothing more, let replicas end what they have, keep all cursors, let go of the journal."""
        if self._is_closed:
            return True
        self._is_closed = True
        with suppress(Exception):
            post = await self._opened()
            return await post.close(seconds)
        return False

    # For publishers

    async def append(self, packed: list[bytes], lane_id: str = "", number: int = 0) -> None:
        """Keep these segments for good; those of one lane in the order of their numbers."""
        log = (await self._opened()).log
        segments = [Segment.unpack(data) for data in packed]
        lane = self._lanes.of(lane_id, number)
        await lane.turn(number)
        begun = [log.begin(segment, (), data) for segment, data in zip(segments, packed, strict=True)]
        lane.done(number)
        await asyncio.gather(*begun)

    async def has_reader(self, topic: str, message_type: str) -> bool:
        """Whether a reader wants such messages."""
        await self._opened()
        return any(wants(topic, message_type) is not None for _, wants in self._patterns.values())

    # For replicas

    async def note(self, dispatcher_id: str, notes: Sequence[bytes]) -> None:
        """Messages that a dispatcher has handled."""
        (await self._opened()).memories.note(dispatcher_id, notes)

    async def recall(self, dispatcher_id: str) -> list[bytes]:
        """What is known of them."""
        return await (await self._opened()).memories.recall(dispatcher_id)

    # Dead letters and replay

    async def bury(self, letters: Sequence[bytes]) -> None:
        """Keep dead letters."""
        await (await self._opened()).bury(letters)

    async def letters(self, wanted: LetterFilter = EVERY, most: int | None = None) -> list[bytes]:
        """Dead letters, as data."""
        post = await self._opened()
        found: list[bytes] = []
        async for letter in post.letters.find(wanted):
            found.append(pack_letter(letter))
            if most is not None and len(found) >= most:
                break
        return found

    async def redrive(self, wanted: LetterFilter = EVERY) -> int:
        """Send dead letters again, each to the dispatcher that failed."""
        return await (await self._opened()).letters.redrive(wanted)

    async def purge(self, wanted: LetterFilter = EVERY) -> int:
        """Let dead letters go."""
        return await (await self._opened()).letters.purge(wanted)

    async def replay(self, name: str, start: Start) -> int:
        """Let a subscription begin anew, from there."""
        post = await self._opened()
        async with self._changing:
            offset = await post.replay(name, start)
            self._until.setdefault(name, _AgainUntil()).offset = post.log.head
            return offset

    # For readers

    async def consume(self, name: str, topics: str, delivery: Delivery, start: Start | None) -> str:
        """A reader of a subscription; the first one makes it. Its id."""
        post = await self._opened()
        async with self._changing:
            subscription = post.subscriptions.get(name)
            if subscription is None:
                wants = fitting(topics)
                subscription = await post.subscribe(name, Rules(delivery, RetrySettings()), wants, start)
                self._patterns[name] = (topics, wants)
            else:
                check_reader(name, topics, self._patterns)
            consumer = PulledConsumer(f"{name}-{uuid4().hex[:8]}")
            self._readers[consumer.consumer_id] = (name, consumer)
            subscription.join(consumer)
            return consumer.consumer_id

    async def pull(self, consumer_id: str, most: int, seconds: float) -> Pulled:
        """A reader fetches its next messages, for which it waits a while."""
        return await (await self._reader(consumer_id)).pull(most, seconds)

    async def settle(self, consumer_id: str, settled: Settled) -> None:
        """What became of messages at a reader."""
        (await self._reader(consumer_id)).settle(settled)

    async def leave(self, consumer_id: str, settled: Settled) -> None:
        """A reader says goodbye, with its last words."""
        if consumer_id in self._readers:
            self._readers[consumer_id][1].settle(settled)
            await self._dismiss(consumer_id)

    async def _reader(self, consumer_id: str) -> PulledConsumer:
        await self._opened()
        if consumer_id not in self._readers:
            raise NotRegistered("reader", consumer_id)
        return self._readers[consumer_id][1]

    # Parts

    async def _opened(self) -> Post:
        await asyncio.shield(self._opening)
        assert self._post is not None
        return self._post

    async def _open(self) -> None:
        while self._post is None:
            try:
                self._post = await Post.open(
                    self._settings, self._system, remembered=self._remembered,
                    table_version=lambda: self._plan.table.version if self._plan else "",
                )  # fmt: skip
            except JournalUnavailable as error:
                self._trouble = str(error)
                await asyncio.sleep(AGAIN_SECONDS)
        if self._plan is None:
            with suppress(Exception):  # It was not told yet; then it will be.
                plan = await self._controller.plan.remote()
                if self._plan is None:  # Else it was told meanwhile.
                    self._plan, self._targets = plan, targets_of(plan, self._targets)
        await self._adjust()
        watching = asyncio.get_running_loop().create_task(self._watch_readers())
        self._tasks.add(watching)

    async def _adjust(self) -> None:
        """Make the subscriptions what the plan says: who is new joins, who is gone leaves when it has ended."""
        async with self._changing:
            # Looked at only now: a newer plan may have come while this one waited for its turn.
            plan, post = self._plan, self._post
            if plan is None or post is None or self._is_closed:
                return
            for name in [one for one in post.subscriptions if one in self._consumers and one not in self._targets]:
                await post.unsubscribe(name, seconds=5.0)
                self._let_go(name)
            for name, target in self._targets.items():
                subscription = await self._subscription(post, plan, name)
                self._seat(subscription, target)

    async def _subscription(self, post: Post, plan: Plan, name: str) -> Subscription:
        rules, wants = plan.rules[name].way, routed_to(plan.table, name)
        subscription = post.subscriptions.get(name)
        if subscription is not None and (subscription.rules != rules or name not in self._consumers):
            # The name may have been a reader's.
            self._patterns.pop(name, None)
            await post.unsubscribe(name, seconds=5.0)
            self._let_go(name)
            subscription = None
        if subscription is None:
            self._consumers[name] = {}
            return await post.subscribe(name, rules, wants)
        subscription.want(wants)
        return subscription

    def _let_go(self, name: str) -> None:
        for consumer in self._consumers.pop(name, {}).values():
            consumer.let_go()

    def _seat(self, subscription: Subscription, target: Target) -> None:
        seated = self._consumers[subscription.name]
        endpoints = {endpoint.endpoint_id: endpoint for endpoint in target.endpoints.all()}
        for endpoint_id, endpoint in endpoints.items():
            if endpoint_id not in seated and endpoint.state is not EndpointState.LEAVING:
                until = self._until.setdefault(subscription.name, _AgainUntil())
                is_ordered = subscription.rules.delivery.mode is DeliveryMode.EXCLUSIVE
                seated[endpoint_id] = ReplicaConsumer(endpoint, target, self._infirmary, until, is_ordered)
                subscription.join(seated[endpoint_id])
        for consumer_id, consumer in list(seated.items()):
            if consumer.endpoint.state is EndpointState.LEAVING or consumer_id not in endpoints:
                del seated[consumer_id]
                leaving = asyncio.get_running_loop().create_task(_left(subscription, consumer))
                self._tasks.add(leaving)
                leaving.add_done_callback(self._tasks.discard)

    async def _watch_readers(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for consumer_id, (_, consumer) in list(self._readers.items()):
                if consumer.is_gone:
                    await self._dismiss(consumer_id)

    async def _dismiss(self, consumer_id: str) -> None:
        name, _ = self._readers.pop(consumer_id)
        post = await self._opened()
        async with self._changing:
            subscription = post.subscriptions.get(name)
            if subscription is None:
                return
            subscription.leave(consumer_id)
            if not subscription.consumers:
                await post.unsubscribe(name)
                self._patterns.pop(name, None)

    def _poke_all(self) -> None:
        for subscription in self._post.subscriptions.values() if self._post else ():
            subscription.poke()


async def _left(subscription: Subscription, consumer: ReplicaConsumer) -> None:
    """A replica that leaves ends what it has; then its place is taken away."""
    while not consumer.is_idle:
        await asyncio.wait(consumer._calls)
    subscription.leave(consumer.consumer_id)
    consumer.let_go()


def _part(items: list[Item], again_until: int) -> Part:
    pairs: dict[tuple[str, str], int] = {}
    routes: list[str] = []
    rows = []
    for item in items:
        pair = (item.topic, item.message_type)
        row = pairs.get(pair)
        if row is None:
            row = pairs[pair] = len(pairs)
            routes.append(item.route_id)
        rows.append(row)
    is_again = any(item.entry.offset < again_until for item in items)
    journaled = Journaled([item.deliveries for item in items], is_again)
    alone = len(items) == 1 and items[0].entry.is_suspect
    return Part(list(pairs), rows, routes, [item.blob for item in items], False, alone, journaled)


def _verdict(answer: Any) -> Verdict:
    if type(answer) is float:
        return ACKED
    return REFUSED if answer is None else verdict_of(answer)


# No concurrency groups: in an async actor each would be a thread and an event loop of its own.
KeeperActor = ray.remote(Keeper)

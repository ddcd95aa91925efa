"""Scale a dispatcher and swap the route table while messages flow; nothing is lost, nothing runs twice."""

import os
from collections import Counter
from collections.abc import Iterator

from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply
from raydispatch.actors import DispatchSystem


async def work(envelope: Envelope[int]) -> Reply:
    return Reply(os.getpid())


async def audit(envelope: Envelope[int]) -> None:
    return None


def first_engine() -> DispatchEngine:
    engine = DispatchEngine("factory")
    engine.dispatcher("work", topics="factory.parts.events.*", category=MessageCategory.EVENT)(work)
    return engine


def second_engine() -> DispatchEngine:
    engine = first_engine()
    engine.dispatcher("audit", topics="factory.**", category=MessageCategory.EVENT)(audit)
    return engine


def parts(count: int) -> Iterator[tuple[str, Envelope[int]]]:
    return (("factory.parts.events.made", Envelope(number, message_type="Part")) for number in range(count))


def main() -> None:
    with DispatchSystem.start(first_engine()) as system:
        statuses: Counter[str] = Counter()
        processes: set[int] = set()
        dispatchers: Counter[int] = Counter()
        for number, result in enumerate(system.dispatch_many(parts(60_000)), start=1):
            statuses[str(result.status)] += 1
            dispatchers[len(result.outcomes)] += 1
            if result.reply is not None:
                processes.add(result.reply.payload)
            if number == 5_000:
                system.scale("work", 3)
            if number == 30_000:
                system.swap(second_engine())
        print("statuses:", dict(statuses))
        print("processes that worked:", len(processes))
        print("some went to one dispatcher, later ones to two:", sorted(dispatchers), sum(dispatchers.values()))


if __name__ == "__main__":
    main()

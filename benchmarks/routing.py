"""How fast the table answers: against scanning regular expressions, against itself, a dict, and Arrow."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random

import pyarrow as pa
import pyarrow.compute as pc

from harness import Bar, Prepare, Work, measure, median_ratio, run
from raydispatch.messages.batch import MessageBatch
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable

EVENT = MessageCategory.EVENT
DISPATCHER = "billing"
LETTERS = "abcd"
BATCH_ROWS = 2_000_000

Scan = Callable[[str], list[int]]


def bars(quick: bool) -> Iterator[Bar]:
    rounds = 5 if quick else 15
    yield Bar("uncached match, 1,000 routes: speed against a linear scan", plain_speed(rounds), 50, "higher", "x")
    yield Bar("uncached match, 100,000 routes: time against 100 routes", growth(rounds), 2, "lower", "x")
    yield Bar("uncached match, 800 routes with two '**': speed against a scan", adverse_speed(rounds), 3, "higher", "x")
    yield Bar("cached match: time against a dict look-up", cached_cost(rounds), 6, "lower", "x")
    yield Bar("match_distinct, 2M rows: rows/s against dictionary_encode", batch_speed(rounds), 0.4, "higher", "x")


def plain_speed(rounds: int) -> float:
    return speed_against_scan([order_pattern(i) for i in range(1_000)], order_topics(range(1_000)), rounds)


def growth(rounds: int) -> float:
    # The names of the few are spread over those of the many, so that both have the same lengths.
    few, many = range(0, 100_000, 1_000), range(100_000)
    small, large = (table_of([order_pattern(i) for i in orders]) for orders in (few, many))
    for table, orders in ((small, few), (large, many)):
        check_order_routes(table, orders)
    # A round has as many topics as the large table has routes: each route is met once.
    seconds = measure(
        {
            "small": uncached(small, order_topics(few), len(many)),
            "large": uncached(large, order_topics(many), len(many)),
        },
        rounds,
    )
    return median_ratio(seconds["large"], seconds["small"])


def adverse_speed(rounds: int) -> float:
    return speed_against_scan(overlapping_patterns(800), letter_topics(), rounds)


def cached_cost(rounds: int) -> float:
    table = table_of([order_pattern(i) for i in range(1_000)])
    topics = order_topics(range(1_000))
    keys = [(next(topics), EVENT, "OrderPlaced") for _ in range(1_000)]
    known = {key: table.match(*key) for key in keys}
    assert all(known.values())
    asked = keys * 100
    seconds = measure(
        {
            "loop": lambda _: Work(lambda: loop_only(asked)),
            "dict": lambda _: Work(lambda: look_up_all(known, asked)),
            "table": lambda _: Work(lambda: match_all(table, asked)),
        },
        rounds,
    )
    # The loop is not part of either look-up; left in, it would flatter us.
    rounds_seconds = list(zip(seconds["table"], seconds["dict"], seconds["loop"], strict=True))
    return median_ratio(
        [ours - loop for ours, _, loop in rounds_seconds], [plain - loop for _, plain, loop in rounds_seconds]
    )


def batch_speed(rounds: int) -> float:
    table = table_of([order_pattern(i) for i in range(1_000)])
    batch = batch_of(BATCH_ROWS)
    check_batch(table, batch)
    columns = [batch.table["topic"], batch.table["message_type"]]
    seconds = measure(
        {
            "arrow": lambda _: Work(lambda: [pc.dictionary_encode(column) for column in columns]),
            "table": lambda _: Work(lambda: table.match_distinct(batch)),
        },
        rounds,
    )
    return median_ratio(seconds["arrow"], seconds["table"])


def speed_against_scan(patterns: Sequence[str], topics: Iterator[str], rounds: int) -> float:
    table = table_of(patterns)
    scan = linear_scan(patterns)
    check_same_routes(table, scan, [next(topics) for _ in range(200)])
    seconds = measure({"scan": scanning(scan, topics, 300), "table": uncached(table, topics, 10_000)}, rounds)
    return median_ratio(seconds["scan"], seconds["table"])


def uncached(table: RouteTable, topics: Iterator[str], topic_count: int) -> Prepare:
    """Match topics that the table has never seen; looking into its cache and filling it is part of the time."""

    def prepare(_: int) -> Work:
        asked = [(next(topics), EVENT, None) for _ in range(topic_count)]
        return Work(lambda: match_all(table, asked), topic_count)

    return prepare


def scanning(scan: Scan, topics: Iterator[str], topic_count: int) -> Prepare:
    def prepare(_: int) -> Work:
        asked = [next(topics) for _ in range(topic_count)]
        return Work(lambda: scan_all(scan, asked), topic_count)

    return prepare


def match_all(table: RouteTable, keys: Sequence[tuple[str, MessageCategory, str | None]]) -> None:
    match = table.match
    for topic, category, message_type in keys:
        match(topic, category, message_type)


def look_up_all(
    known: dict[tuple[str, MessageCategory, str], tuple[DispatchRoute, ...]],
    keys: Sequence[tuple[str, MessageCategory, str]],
) -> None:
    for topic, category, message_type in keys:
        known[topic, category, message_type]


def loop_only(keys: Sequence[tuple[str, MessageCategory, str]]) -> None:
    for _topic, _category, _message_type in keys:
        pass


def scan_all(scan: Scan, topics: Sequence[str]) -> None:
    for topic in topics:
        scan(topic)


def table_of(patterns: Sequence[str]) -> RouteTable:
    """A table whose routes are named by their pattern's position."""
    routes = [
        DispatchRoute(route_id=str(i), topic_pattern=pattern, message_category=EVENT, dispatcher_id=DISPATCHER)
        for i, pattern in enumerate(patterns)
    ]
    return RouteTable(routes, {DISPATCHER: DispatcherTypes(EVENT)})


def linear_scan(patterns: Sequence[str]) -> Scan:
    """What one would write without a table: try every regular expression. It gives the positions of all that fit."""
    # Folding the topic once is faster than ignoring case in every expression: the peer gets the better of the two.
    matchers = [(i, re.compile(regex_of(pattern)).fullmatch) for i, pattern in enumerate(patterns)]

    def scan(topic: str) -> list[int]:
        folded = topic.casefold() + "."
        return [i for i, fits in matchers if fits(folded)]

    return scan


def regex_of(pattern: str) -> str:
    """A pattern as a regular expression for the topic with a dot after each segment, the last one too."""
    # With well-formed topics, `(?:.*\.)?` is any number of segments, and faster than repeating `[^.]+\.`.
    wildcards = {"*": r"[^.]+\.", "**": r"(?:.*\.)?"}
    return "".join(wildcards.get(part) or re.escape(part) + r"\." for part in pattern.split("."))


def order_pattern(order: int) -> str:
    return f"*.order{order:06}.events.*"


def order_topics(orders: Sequence[int]) -> Iterator[str]:
    """Topics without end and without repetition, going round all orders in a random but fixed sequence."""
    shuffled = Random(1).sample(orders, len(orders))
    for turn in count():
        for order in shuffled:
            yield f"dev{turn:06}.order{order:06}.events.v1"


def overlapping_patterns(pattern_count: int) -> list[str]:
    """Distinct patterns of two to four letters with two `**` that do not touch, such as `a.**.b.**.d`."""
    random = Random(2)
    found: dict[str, None] = {}
    while len(found) < pattern_count:
        parts = random.choices(LETTERS, k=random.randint(2, 4))
        first, second = sorted(random.sample(range(len(parts) + 1), 2))
        parts.insert(second, "**")
        parts.insert(first, "**")
        found[".".join(parts)] = None
    return list(found)


def letter_topics() -> Iterator[str]:
    """Topics of eleven segments, none twice, over the letters of the patterns."""
    random = Random(3)
    seen: set[str] = set()
    while True:
        letters = random.choices(LETTERS, k=10)
        topic = ".".join([*letters[:-1], "events", letters[-1]])
        if topic not in seen:
            seen.add(topic)
            yield topic


def batch_of(rows: int) -> MessageBatch:
    """Rows in random order over 1,000 pairs: 250 topics with 4 types each."""
    random = Random(4)
    topics = pa.array([f"dev.order{order:06}.events.v1" for order in range(250)])
    types = pa.array(["OrderPlaced", "OrderPaid", "OrderShipped", "OrderCancelled"])
    pairs = pa.array(random.choices(range(1_000), k=rows), pa.int32())
    topic_codes = pc.divide(pairs, 4)
    type_codes = pc.subtract(pairs, pc.multiply(topic_codes, 4))
    columns = {"topic": topics.take(topic_codes), "message_type": types.take(type_codes), "payload": pa.nulls(rows)}
    return MessageBatch.from_table(pa.table(columns))


def check_same_routes(table: RouteTable, scan: Scan, topics: Sequence[str]) -> None:
    answers = [(sorted(int(route.route_id) for route in table.match(topic, EVENT)), scan(topic)) for topic in topics]
    assert all(ours == theirs for ours, theirs in answers), "the table and the scan disagree"
    assert any(ours for ours, _ in answers), "no topic matches anything"


def check_order_routes(table: RouteTable, orders: Sequence[int]) -> None:
    for order in orders[:: max(1, len(orders) // 100)]:
        found = table.match(f"check.order{order:06}.events.v1", EVENT)
        assert [route.topic_pattern for route in found] == [order_pattern(order)]


def check_batch(table: RouteTable, batch: MessageBatch) -> None:
    distinct = table.match_distinct(batch)
    assert len(distinct.keys) == 1_000
    for (topic, message_type), match in zip(distinct.keys, distinct.matches, strict=True):
        assert topic is not None
        assert match.routes == table.match(topic, EVENT, message_type) != ()
    names = pa.array([topic for topic, _ in distinct.keys])
    assert pa.chunked_array([names.take(codes) for codes in distinct.codes.chunks]).equals(batch.table["topic"])


if __name__ == "__main__":
    run("Routing", bars)

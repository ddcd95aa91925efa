"""Dry runs: where rows would go. Nobody is called; and what is said agrees with what routing then does."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.spark.helping import EVENT, MARKS, Effects, recorder, table_recorder

from raydispatch import DispatchEngine, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.errors import InvalidParameter

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = MARKS

ROWS = "topic string, message_type string, payload string"


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Effects:
    return Effects(tmp_path_factory.mktemp("effects"))


@pytest.fixture(scope="module")
def system(ray_cluster: None, effects: Effects) -> Iterator[DispatchSystem]:
    with DispatchSystem.start(shop("dry", effects), routers=1) as running:
        yield running


def shop(name: str, effects: Effects) -> DispatchEngine:
    """Routes that overlap, by pattern, by type and by category."""
    engine = DispatchEngine(name)
    topics = ["*.order.events.**", "*.payment.events"]
    engine.dispatcher("billing", topics=topics, category=EVENT)(recorder(effects, "billing"))
    record = table_recorder(effects, "audit")
    engine.dispatcher("audit", topics="prod.**", category=EVENT, batch=True, priority=5)(record)
    words: dict[str, Any] = {"category": EVENT, "message_types": {"Return"}}
    engine.dispatcher("returns", topics="*.order.events.**", **words)(recorder(effects, "returns"))
    command = MessageCategory.COMMAND
    engine.dispatcher("clerk", topics="*.*.commands", category=command)(recorder(effects, "clerk"))
    return engine


def other_shop() -> DispatchEngine:
    """Without the audit, with a newcomer."""
    engine = DispatchEngine("other")
    for name, topics in (("billing", "*.order.events.**"), ("archive", "*.payment.events")):
        engine.dispatcher(name, topics=topics, category=EVENT)(print)
    return engine


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    several = [
        *[("dev.order.events.v1", "Order", "x")] * 5,
        *[("dev.order.events.v1", "Return", "x")] * 2,
        *[("prod.order.events", "Order", "x")] * 3,
        *[("prod.payment.events", None, "x")] * 4,
        ("dev.stock.events", "Order", "x"),
        ("dev.order.commands", "Order", "x"),
        ("dev.order", "Order", "x"),
        (None, "Order", "x"),
    ]
    return spark.createDataFrame(several, ROWS).cache()


def test_a_dry_run_counts_rows_by_end_dispatcher_and_route(system: DispatchSystem, rows: Any) -> None:
    found = system.dry_run(rows)

    assert found.counts == {"routed": 15, "no_dispatcher": 1, "invalid_message": 2}
    assert found.dispatchers == {"billing": 14, "audit": 7, "returns": 2, "clerk": 1}
    assert found.routes == {"billing-1": 10, "billing-2": 4, "audit": 7, "returns": 2, "clerk": 1}


def test_what_nobody_takes_is_listed(system: DispatchSystem, rows: Any) -> None:
    unmatched = system.dry_run(rows).unmatched.collect()

    assert {(row["topic"], row["message_type"], row["rows"], row["status"]) for row in unmatched} == {
        ("dev.stock.events", "Order", 1, "no_dispatcher"),
        ("dev.order", "Order", 1, "invalid_message"),
        (None, "Order", 1, "invalid_message"),
    }


def test_what_another_engine_would_change_is_listed(system: DispatchSystem, rows: Any) -> None:
    changed = system.dry_run(rows, against=other_shop()).changed.collect()

    assert {
        (row["topic"], row["message_type"]): (set(row["dispatchers"]), set(row["other_dispatchers"])) for row in changed
    } == {
        ("dev.order.events.v1", "Return"): ({"billing", "returns"}, {"billing"}),
        ("prod.order.events", "Order"): ({"audit", "billing"}, {"billing"}),
        ("prod.payment.events", None): ({"audit", "billing"}, {"archive"}),
        ("dev.order.commands", "Order"): ({"clerk"}, set()),
    }


def test_the_same_table_changes_nothing(system: DispatchSystem, rows: Any, effects: Effects) -> None:
    found = system.dry_run(rows, against=shop("same", effects).freeze())

    assert found.changed.count() == 0
    assert "the other table changes: nothing" in found.text()


def test_a_dry_run_reads_as_a_summary(system: DispatchSystem, rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    system.dry_run(rows, against=other_shop()).show()

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["18 rows, nothing sent", "routed 15", "invalid_message 2", "no_dispatcher 1"]
    assert "billing 14" in lines
    assert "1 dev.stock.events (Order)" in lines
    assert "3 prod.order.events (Order): audit, billing → billing" in lines
    assert "1 dev.order.commands (Order): clerk → nobody" in lines


def test_mistakes_are_said_in_sentences(system: DispatchSystem, spark: Any, rows: Any) -> None:
    with pytest.raises(InvalidParameter, match="There is no other table to compare with"):
        _ = system.dry_run(rows).changed
    with pytest.raises(InvalidParameter, match="dry_run takes a Spark DataFrame, not list"):
        system.dry_run([])
    with pytest.raises(InvalidParameter, match="against takes an engine or a table, not str"):
        system.dry_run(rows, against="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="has no column 'topic'; it has id"):
        system.dry_run(spark.range(1))


TELLING = ("events", "event", "commands", "intents", "orders", "")


def random_rows(count: int) -> list[tuple[str | None, str | None, str]]:
    """Topics from few words, so that many fit: some malformed, some without a category, some with several."""
    chance = random.Random(7)
    environments, nouns = ("dev", "prod", "PROD", "prod.eu"), ("order", "payment", "stock", "events")
    topics: list[str | None] = [None, "", "a..b"]
    while len(topics) < count:
        words = [chance.choice(environments), chance.choice(nouns), chance.choice(TELLING)]
        words += [f"v{chance.randrange(40)}"] * chance.randrange(2)
        topics.append(".".join(words if chance.random() < 0.9 else words[:2]))
    return [(topic, chance.choice((None, "Order", "Return")), str(row)) for row, topic in enumerate(topics)]


def test_a_dry_run_sends_nothing_and_agrees_with_what_is_then_done_and_with_its_ledger(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    df = spark.createDataFrame(random_rows(600), ROWS).repartition(2).cache()

    before = system.status().dispatchers
    said = system.dry_run(df)
    keys = {(row["topic"], row["message_type"]): row for row in said.keys.collect()}
    ended = {"success" if status == "routed" else status: rows for status, rows in said.counts.items()}
    dispatchers, after = said.dispatchers, system.status().dispatchers
    report = system.route(df, message_id="payload", ledger=tmp_path / "ledger")
    replayed = system.dry_run(report.ledger, against=shop("replay", effects))
    done = report.ledger.collect()

    assert len(keys) > 200
    assert [each.handled for each in after.values()] == [each.handled for each in before.values()]
    for row in done:
        key = keys[row["topic"], row["message_type"]]
        assert [one["id"] for one in row["dispatchers"]] == key["dispatchers"]
        assert row["status"] == ("success" if key["status"] == "routed" else key["status"])
    assert Counter(row["status"] for row in done) == ended
    assert Counter(one["id"] for row in done for one in row["dispatchers"]) == dispatchers
    assert (replayed.counts, replayed.dispatchers) == (said.counts, dispatchers)
    assert replayed.changed.count() == 0
    assert system.dry_run(report.ledger, against=other_shop()).changed.count() > 0

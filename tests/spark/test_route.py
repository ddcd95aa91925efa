"""Rows of DataFrames through a real Spark and a real Ray: what handlers see, and what the ledger says of it."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow.parquet as pq
import pytest
import ray
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import _parse_datatype_string
from tests.spark.helping import MARKS, MAX_PAYLOAD_BYTES, Effects, numbers, route_engine, rows_of

from raydispatch.actors import DispatchSystem
from raydispatch.errors import InvalidParameter, LedgerUnbalanced
from raydispatch.spark.ledger import LEDGER, LEDGER_DDL
from raydispatch.spark.report import RouteReport

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = MARKS


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Effects:
    return Effects(tmp_path_factory.mktemp("effects"))


@pytest.fixture(scope="module")
def system(ray_cluster: None, effects: Effects) -> Iterator[DispatchSystem]:
    with DispatchSystem.start(route_engine("rows", effects)) as running:
        yield running


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A segment of topics that only this test has."""
    return f"t{abs(hash(request.node.name))}"


# The ledger


def test_every_row_is_in_the_ledger_once(system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path) -> None:
    df = numbers(spark, 3_000, partitions=3)

    report = system.route(
        df, topic=F.lit("dev.once.table.events"), payload="number", message_id="number", ledger=tmp_path / "ledger"
    )

    assert report.submitted == 3_000
    assert report.counts == {"success": 3_000}
    assert report.verify() == (3_000, 3_000, 3_000, {"success": 3_000})
    assert Counter(row["row_id"] for row in report.ledger.select("row_id").collect()) == Counter(map(str, range(3_000)))
    assert Counter(map(int, effects.payloads("table", "dev.once.table.events"))) == Counter(range(3_000))


def test_the_ledger_has_the_columns_that_are_promised(
    system: DispatchSystem, spark: Any, name: str, tmp_path: Path
) -> None:
    topic = f"dev.{name}.half.events"
    df = numbers(spark, 2).withColumn("message_type", F.lit("Order"))

    report = system.route(df, topic=F.lit(topic), payload="number", message_id="number", ledger=tmp_path / "ledger")

    assert report.ledger.schema == _parse_datatype_string(LEDGER_DDL)
    written = pq.read_table(tmp_path / "ledger").schema
    assert [(field.name, field.type) for field in written] == [(field.name, field.type) for field in LEDGER]
    good, bad = rows_of(report)["0"].asDict(True), rows_of(report)["1"].asDict(True)
    assert (good["topic"], good["message_type"], good["status"]) == (topic, "Order", "success")
    assert [(one["id"], one["status"], one["attempts"]) for one in good["dispatchers"]] == [
        ("first", "success", 1),
        ("mending", "success", 1),
    ]
    assert (good["outputs"], good["error"], good["error_code"]) == (["dev.nobody.listens.events"], None, None)
    assert (bad["status"], bad["error_code"], bad["outputs"]) == ("dispatcher_error", "handler_exception", [])
    assert bad["error"] == "mending: ConnectionError: not mended yet"
    assert [one["error_code"] for one in bad["dispatchers"]] == [None, "handler_exception"]
    assert bad["attempts"] == 1
    assert bad["duration_ms"] > 0
    assert UUID(bad["correlation_id"])
    assert bad["table_version"] == system.status().table_version


def test_a_ledger_that_lost_a_row_does_not_balance(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    df = numbers(spark, 20)
    report = system.route(df, topic=F.lit("dev.lost.single.events"), payload="number", ledger=tmp_path / "ledger")
    one = report.ledger.first()["row_id"]
    report.ledger.where(F.col("row_id") != one).write.parquet(str(tmp_path / "tampered"))

    tampered = RouteReport(spark, str(tmp_path / "tampered"), report.job_id, report.submitted)

    assert report.verify().recorded == 20
    with pytest.raises(LedgerUnbalanced, match="20 rows were submitted, and 19 are in the ledger"):
        tampered.verify()


def test_a_ledger_that_contradicts_itself_does_not_balance(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    df = numbers(spark, 20)
    report = system.route(df, topic=F.lit("dev.wrong.shaky.events"), payload="number", ledger=tmp_path / "ledger")
    report.ledger.withColumn("status", F.lit("success")).write.parquet(str(tmp_path / "glossed"))
    report.ledger.withColumn("status", F.lit("routed")).write.parquet(str(tmp_path / "open"))

    glossed = RouteReport(spark, str(tmp_path / "glossed"), report.job_id, report.submitted)
    unfinished = RouteReport(spark, str(tmp_path / "open"), report.job_id, report.submitted)

    with pytest.raises(LedgerUnbalanced, match="of 6 rows, the status does not fit"):
        glossed.verify()
    with pytest.raises(LedgerUnbalanced, match="20 rows have no end"):
        unfinished.verify()


def test_reading_the_ledger_sends_nothing(system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path) -> None:
    df = numbers(spark, 50)
    report = system.route(df, topic=F.lit("dev.read.single.events"), payload="number", ledger=tmp_path / "ledger")

    ledgers = [report.ledger for _ in range(3)]
    counted = [ledger.count() for ledger in ledgers]
    ledgers[0].where("status = 'success'").collect()
    report.failed().count()
    str(report)

    assert counted == [50, 50, 50]
    assert len(effects.of("single", "dev.read.single.events")) == 50


def test_a_ledger_can_be_opened_later(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    df = numbers(spark, 10)
    report = system.route(df, topic=F.lit("dev.later.single.events"), payload="number", ledger=tmp_path / "ledger")

    opened = RouteReport.open(spark, tmp_path / "ledger")

    assert (opened.job_id, opened.submitted, opened.counts) == (report.job_id, None, {"success": 10})
    assert opened.verify().submitted == 10
    with pytest.raises(InvalidParameter, match="There is no ledger in"):
        RouteReport.open(spark, tmp_path / "elsewhere")


def test_without_a_folder_the_ledger_is_among_the_temporary_files(
    system: DispatchSystem, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    report = system.route(numbers(spark, 3), topic=F.lit("dev.temporary.single.events"), payload="number")

    assert str(tmp_path) in report.path
    assert report.verify().recorded == 3


def test_no_rows_make_an_empty_ledger(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    df = numbers(spark, 10).where("number = 'none'")

    report = system.route(df, topic=F.lit("dev.empty.single.events"), payload="number", ledger=tmp_path / "ledger")

    assert (report.submitted, report.counts) == (0, {})
    assert report.verify().recorded == 0
    assert str(report).startswith("0 rows")


# Payloads and columns

PAYLOADS = [
    ("string", "cast(id as string)", "str", "7"),
    ("binary", "cast(cast(id as string) as binary)", "bytes", b"7"),
    ("struct<number: int64 not null, name: string not null>", "struct(id as number, 'x' as name)", "dict",
     {"number": 7, "name": "x"}),
    ("map<string, int64 ('payload')>", "map('number', id)", "dict", {"number": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("arrow", "expression", "kind", "value"), PAYLOADS, ids=["text", "bytes", "struct", "map"])
def test_a_payload_arrives_as_what_it_is(
    system: DispatchSystem,
    spark: Any,
    effects: Effects,
    tmp_path: Path,
    arrow: str,
    expression: str,
    kind: str,
    value: Any,
) -> None:
    test = f"payload-{kind}-{arrow[:3]}"
    df = spark.range(7, 8).select(
        F.expr(expression).alias("payload"), F.explode(F.array(*map(F.lit, "ts"))).alias("to")
    )
    kinds = F.when(F.col("to") == "t", f"dev.{test}.table.events").otherwise(f"dev.{test}.single.events")

    report = system.route(df, topic=kinds, ledger=tmp_path / "ledger")

    (of_table,) = effects.of("table", f"dev.{test}.table.events")
    (of_single,) = effects.of("single", f"dev.{test}.single.events")
    assert report.counts == {"success": 2}
    assert of_table.kind.partition("<")[0] == arrow.partition("<")[0]
    assert (of_table.payload if "map" not in arrow else dict(of_table.payload)) == value
    assert (of_single.kind, of_single.payload) == (kind, value)


def test_all_other_columns_can_be_the_payload(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    df = spark.createDataFrame(
        [(f"dev.star.{kind}.events", "k", 5, "x") for kind in ("table", "single", "typed")],
        "topic string, key string, number long, name string",
    )

    report = system.route(df, payload="*", ledger=tmp_path / "ledger")

    assert report.counts == {"success": 3}
    for kind, seen in (("table", "struct<"), ("single", "dict"), ("typed", "Order")):
        (effect,) = effects.of(kind, f"dev.star.{kind}.events")
        assert effect.kind.startswith(seen)
        assert (effect.payload, effect.key) == ({"number": 5, "name": "x"}, "k")


def test_a_typed_handler_gets_a_checked_model_from_text_bytes_structs_and_maps(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    text = '\'{"number": 7, "name": "x"}\''
    packed = [text, f"cast({text} as binary)", "struct(7 as number, 'x' as name)", "map('number', '7', 'name', 'x')"]
    for position, expression in enumerate(packed):
        df = spark.range(1).selectExpr(f"{expression} as payload")
        system.route(df, topic=F.lit("dev.model.typed.events"), ledger=tmp_path / str(position))

    seen = effects.of("typed", "dev.model.typed.events")
    assert [(effect.kind, effect.payload) for effect in seen] == [("Order", {"number": 7, "name": "x"})] * 4


def test_columns_can_be_expressions(system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path) -> None:
    df = spark.range(3).withColumn("inner", F.struct(F.col("id").cast("string").alias("text")))

    report = system.route(
        df,
        topic=F.concat(F.lit("dev.expressions."), F.lit("single.events")),
        payload="inner.text",
        message_type=F.concat(F.lit("Type"), F.col("id")),
        key=F.col("id") % 2,
        message_id=F.col("id") + 100,
        ledger=tmp_path / "ledger",
    )

    seen = sorted(effects.of("single", "dev.expressions.single.events"), key=lambda effect: str(effect.payload))
    assert [(one.payload, one.message_type, one.key) for one in seen] == [
        ("0", "Type0", "0"), ("1", "Type1", "1"), ("2", "Type2", "0"),
    ]  # fmt: skip
    assert {row_id: row["message_type"] for row_id, row in rows_of(report).items()} == {
        "100": "Type0", "101": "Type1", "102": "Type2",
    }  # fmt: skip


def test_key_correlation_and_trace_reach_the_handler_and_the_ledger(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    correlation, trace = str(uuid4()), "0af7651916cd43dd8448eb211c80319c"
    df = spark.createDataFrame(
        [
            ("1", "a", correlation, f"00-{trace}-b7ad6b7169203331-01"),
            ("2", None, None, "no trace at all"),
        ],
        "payload string, key string, correlation_id string, traceparent string",
    ).coalesce(1)

    report = system.route(df, topic=F.lit("dev.ids.mixed.events"), message_id="payload", ledger=tmp_path / "ledger")

    first, second = sorted(effects.of("single", "dev.ids.mixed.events"), key=lambda effect: str(effect.payload))
    rows = rows_of(report)
    assert (first.key, first.correlation_id) == ("a", correlation)
    assert (rows["1"]["correlation_id"], rows["1"]["trace_id"]) == (correlation, trace)
    assert (second.key, second.correlation_id) == (None, second.message_id)
    assert (rows["2"]["correlation_id"], rows["2"]["trace_id"]) == (second.message_id, None)


# Rows that cannot be sent


def test_a_bad_row_costs_its_neighbours_nothing(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic, good = "dev.bad.typed.events", '{"number": 1}'
    rows = [
        ("good-1", topic, good, None),
        ("broken", topic, '{"number": ', None),
        ("misfit", topic, '{"number": "x"}', None),
        ("untold", None, good, None),
        ("unknown", "dev.bad.nobody.events", good, None),
        ("shapeless", "dev.bad.typed", good, None),
        ("large", topic, '{"number": 1, "name": "' + "x" * MAX_PAYLOAD_BYTES + '"}', None),
        ("unrelated", topic, good, "no uuid"),
        ("good-2", topic, good, str(uuid4())),
    ]
    df = spark.createDataFrame(rows, "message_id string, topic string, payload string, correlation_id string")

    report = system.route(df.coalesce(1), ledger=tmp_path / "ledger")

    ended = {row_id: (row["status"], row["error_code"]) for row_id, row in rows_of(report).items()}
    assert ended == {
        "good-1": ("success", None),
        "broken": ("invalid_message", "payload_invalid"),
        "misfit": ("invalid_message", "payload_invalid"),
        "untold": ("invalid_message", "invalid_topic"),
        "unknown": ("no_dispatcher", "no_dispatcher"),
        "shapeless": ("invalid_message", "invalid_topic"),
        "large": ("invalid_message", "payload_too_large"),
        "unrelated": ("invalid_message", "payload_invalid"),
        "good-2": ("success", None),
    }
    assert all(row["error"] for row in report.failed().collect())
    assert report.verify().recorded == len(rows)
    assert len(effects.of("typed", topic)) == 2


@pytest.mark.parametrize("expression", ["cast(text as binary)", "struct(text as name)", "map('name', text)"])
def test_a_payload_is_too_large_whatever_it_is_packed_in(
    system: DispatchSystem, spark: Any, tmp_path: Path, expression: str
) -> None:
    df = spark.createDataFrame([("large", "x" * (MAX_PAYLOAD_BYTES + 1)), ("small", "x")], "id string, text string")

    report = system.route(
        df.coalesce(1), topic=F.lit("dev.large.single.events"), payload=F.expr(expression), message_id="id",
        ledger=tmp_path / "ledger",
    )  # fmt: skip

    ended = {row_id: (row["status"], row["error_code"]) for row_id, row in rows_of(report).items()}
    assert ended == {"large": ("invalid_message", "payload_too_large"), "small": ("success", None)}


# Dispatchers


def test_every_row_reaches_both_dispatchers_in_the_order_of_their_priorities(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic = "dev.fan.both.events"

    report = system.route(
        numbers(spark, 200), topic=F.lit(topic), payload="number", message_id="number", ledger=tmp_path / "ledger"
    )

    assert report.counts == {"success": 200}
    for row in rows_of(report).values():
        assert [(one["id"], one["status"]) for one in row["dispatchers"]] == [
            ("first", "success"), ("second", "success"),
        ]  # fmt: skip
    assert sorted(map(int, effects.payloads("first", topic))) == list(range(200))
    assert sorted(map(int, effects.payloads("second", topic))) == list(range(200))


@pytest.mark.parametrize("kind", ["shaky", "shaky-table"])
def test_what_a_failing_dispatcher_did_agrees_with_the_ledger(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path, kind: str
) -> None:
    topic = f"dev.sums.{kind}.events"

    report = system.route(
        numbers(spark, 2_000), topic=F.lit(topic), payload="number", message_id="number", ledger=tmp_path / "ledger"
    )

    assert report.counts == {"success": 1_400, "dispatcher_error": 600}
    assert report.verify().recorded == 2_000
    succeeded = [row_id for row_id, row in rows_of(report).items() if row["status"] == "success"]
    assert sorted(effects.payloads(kind, topic)) == sorted(succeeded)


def test_equal_rows_all_run(system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path) -> None:
    df = spark.range(0, 300, 1, 1).selectExpr("cast(id % 3 as string) as payload")

    report = system.route(df, topic=F.lit("dev.equal.table.events"), ledger=tmp_path / "ledger")

    assert report.verify().distinct == 300
    seen = effects.of("table", "dev.equal.table.events")
    assert Counter(effect.payload for effect in seen) == {"0": 100, "1": 100, "2": 100}
    assert len({effect.message_id for effect in seen}) == 300


# Jobs that run again


@pytest.mark.parametrize("message_id", ["number", None], ids=["own-ids", "made-ids"])
def test_a_job_id_that_is_used_twice_repeats_no_effect(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path, message_id: str | None
) -> None:
    topic, df = f"dev.again-{message_id}.single.events", numbers(spark, 500)

    reports = [
        system.route(
            df, topic=F.lit(topic), payload="number", message_id=message_id, job_id=f"job-{message_id}",
            ledger=tmp_path / run,
        )
        for run in ("once", "twice")
    ]  # fmt: skip

    once, twice = (rows_of(report) for report in reports)
    assert [report.counts for report in reports] == [{"success": 500}] * 2
    assert once.keys() == twice.keys()
    assert len(effects.of("single", topic)) == 500
    # From memory: no time was spent on them.
    assert min(row["duration_ms"] for row in once.values()) > 0
    assert {row["duration_ms"] for row in twice.values()} == {0}


def test_resuming_sends_only_what_failed_to_those_that_failed(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic, df = "dev.resume.half.events", numbers(spark, 100)
    words: dict[str, Any] = {"topic": F.lit(topic), "payload": "number", "message_id": "number"}
    report = system.route(df, **words, ledger=tmp_path / "once")
    effects.allow(topic)

    resumed = system.route(df, **words, resume=report, ledger=tmp_path / "resumed")

    odd = {str(number) for number in range(100) if number % 2}
    assert report.counts == {"success": 50, "dispatcher_error": 50}
    assert (resumed.counts, resumed.job_id) == ({"success": 50}, report.job_id)
    assert rows_of(resumed).keys() == odd
    assert {tuple(one["id"] for one in row["dispatchers"]) for row in rows_of(resumed).values()} == {("mending",)}
    assert Counter(effects.payloads("first", topic)) == Counter(map(str, range(100)))
    assert Counter(effects.payloads("mending", topic)) == Counter(map(str, range(100)))


def test_resuming_sends_what_is_not_in_the_ledger(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic = "dev.torn.single.events"
    words: dict[str, Any] = {"topic": F.lit(topic), "payload": "number", "message_id": "number"}
    system.route(numbers(spark, 60), **words, ledger=tmp_path / "torn")

    resumed = system.route(numbers(spark, 100), **words, resume=tmp_path / "torn", ledger=tmp_path / "resumed")

    assert rows_of(resumed).keys() == {str(number) for number in range(60, 100)}
    assert Counter(effects.payloads("single", topic)) == Counter(map(str, range(100)))


def test_resuming_sends_the_same_payload_of_all_other_columns(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic = "dev.resume-star.half.events"
    df = numbers(spark, 2).select(F.col("number").alias("message_id"), "number", F.lit("x").alias("name"))
    report = system.route(df, topic=F.lit(topic), payload="*", ledger=tmp_path / "once")
    effects.allow(topic)

    system.route(df, topic=F.lit(topic), payload="*", resume=report, ledger=tmp_path / "resumed")

    assert [effect.payload for effect in effects.of("mending", topic)] == [
        {"number": "0", "name": "x"}, {"number": "1", "name": "x"},
    ]  # fmt: skip


def test_resuming_needs_ids(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    df = numbers(spark, 2)
    report = system.route(df, topic=F.lit("dev.no-ids.single.events"), payload="number", ledger=tmp_path / "once")

    with pytest.raises(InvalidParameter, match="resume needs a message_id column"):
        system.route(df, topic=F.lit("dev.no-ids.single.events"), payload="number", resume=report)


# Circuits and progress


def test_rows_of_an_open_circuit_are_refused_or_wait_for_it(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic, df = "dev.circuit.opening.events", numbers(spark, 50, partitions=1)
    words: dict[str, Any] = {"topic": F.lit(topic), "payload": "number", "message_id": "number"}

    refused = system.route(df, **words, ledger=tmp_path / "refused")
    still_open = system.status().dispatchers["opening"].circuit
    effects.allow("opening")
    waited = system.route(df, **words, on_open="wait", ledger=tmp_path / "waited")

    assert refused.counts == {"circuit_open": 49, "dispatcher_error": 1}
    assert still_open == "open"
    assert waited.counts == {"success": 50}
    assert Counter(effects.payloads("opening", topic)) == Counter(map(str, range(50)))


def test_progress_is_told_up_to_the_end(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    told: list[dict[str, int]] = []

    system.route(
        numbers(spark, 100), topic=F.lit("dev.progress.shaky.events"), payload="number", on_progress=told.append,
        ledger=tmp_path / "ledger",
    )  # fmt: skip

    assert told[-1] == {"success": 70, "dispatcher_error": 30}


# Mistakes


def test_a_column_that_is_missing_is_named(system: DispatchSystem, spark: Any) -> None:
    df = numbers(spark, 1)

    with pytest.raises(InvalidParameter, match="has no column 'topic'; it has number"):
        system.route(df, payload="number")
    with pytest.raises(InvalidParameter, match="has no column 'there' for topic; it has number"):
        system.route(df, topic="there", payload="number")
    with pytest.raises(InvalidParameter, match=r"has no column 'payload'; it has number.*takes all other columns"):
        system.route(df, topic=F.lit("dev.x.single.events"))
    with pytest.raises(InvalidParameter, match="There are no other columns"):
        system.route(df, topic="number", payload="*")


def test_a_column_of_the_wrong_type_is_named(system: DispatchSystem, spark: Any) -> None:
    df = spark.range(1)

    with pytest.raises(InvalidParameter, match="The column for topic is bigint; it must be a string"):
        system.route(df, topic="id", payload=F.lit("x"))
    with pytest.raises(InvalidParameter, match="The payload is bigint; it must be a string, binary, a struct or a map"):
        system.route(df, topic=F.lit("dev.x.single.events"), payload="id")
    with pytest.raises(InvalidParameter, match="topic must be the name of a column or an expression, not int"):
        system.route(df, topic=7, payload="id")


def test_a_stream_is_led_to_route_stream(system: DispatchSystem, spark: Any) -> None:
    stream = spark.readStream.format("rate").load().selectExpr("'dev.x.single.events' as topic", "'x' as payload")

    with pytest.raises(InvalidParameter, match=r"This DataFrame is a stream: route_stream\(df, checkpoint=…\)"):
        system.route(stream)


def test_a_ledger_is_never_written_over(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    df, topic = numbers(spark, 3), F.lit("dev.over.single.events")
    system.route(df, topic=topic, payload="number", ledger=tmp_path / "ledger")
    copied = shutil.copytree(tmp_path / "ledger", tmp_path / "copy")

    with pytest.raises(InvalidParameter, match=r"There is a ledger in .* already: name another folder"):
        system.route(df, topic=topic, payload="number", ledger=tmp_path / "ledger")

    assert pq.read_table(tmp_path / "ledger").equals(pq.read_table(copied))


def test_only_data_frames_can_be_routed(system: DispatchSystem) -> None:
    with pytest.raises(InvalidParameter, match="route takes a Spark DataFrame, not list"):
        system.route([1, 2])


def test_on_open_is_one_of_two_words(system: DispatchSystem, spark: Any) -> None:
    with pytest.raises(InvalidParameter, match='on_open is "refuse" or "wait", not \'hope\''):
        system.route(numbers(spark, 1), topic="number", payload="number", on_open="hope")  # type: ignore[arg-type]


# Words


def test_a_row_is_explained_in_words(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    report = system.route(
        numbers(spark, 2), topic=F.lit("dev.words.half.events"), payload="number", message_id="number",
        message_type=F.lit("Order"), ledger=tmp_path / "ledger",
    )  # fmt: skip

    good, bad = report.explain("0"), report.explain("1")

    assert good.startswith("Row 0: success\n  topic dev.words.half.events, type Order\n  first: success after 1 try\n")
    assert "sent on to dev.nobody.listens.events" in good
    assert "  mending: dispatcher_error after 1 try (handler_exception)\n" in bad
    assert "  error handler_exception: mending: ConnectionError: not mended yet\n" in bad
    assert report.explain("7") == "There is no row '7' in the ledger."


def test_a_report_reads_as_a_summary(
    system: DispatchSystem, spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = system.route(
        numbers(spark, 1_000), topic=F.lit("dev.summary.shaky.events"), payload="number", ledger=tmp_path / "ledger"
    )

    report.show()

    first, success, failure, error, place = capsys.readouterr().out.splitlines()
    assert first.startswith("1,000 rows in ")
    assert first.endswith(" rows/s")
    assert success.split() == ["success", "700", "70.00%"]
    assert failure.split() == ["dispatcher_error", "300", "30.00%"]
    assert error.strip() == "300 × handler_exception: shaky: ConnectionError: shaken"
    assert place.strip() == f"ledger: {report.path}"

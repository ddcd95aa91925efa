from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from tests.spark.helping import MARKS

from raydispatch.errors import InvalidParameter
from raydispatch.spark.frame import Columns, key_frame, message_frame, message_id_column

pytestmark = MARKS


def frame_of(spark: Any, *columns: str, rows: int = 1) -> Any:
    """Columns of SQL, in one partition; a topic is always there."""
    return spark.range(0, rows, 1, 1).selectExpr("'dev.order.events' as topic", *columns)


def hashes(df: Any, job_id: str = "job", **columns: Any) -> list[tuple[int, int]]:
    rows = message_frame(df, Columns(**columns), job_id).collect()
    return [(row["hash_1"], row["hash_2"]) for row in rows]


# Columns


def test_columns_are_found_by_their_names_and_the_rest_stays_behind(spark: Any) -> None:
    df = frame_of(spark, "'Order' as message_type", "'x' as payload", "7 as key", "1 as something")

    frame = message_frame(df, Columns(), "job")

    assert frame.columns == ["topic", "message_type", "payload", "key", "hash_1", "hash_2"]
    assert dict(frame.dtypes)["key"] == "string"
    assert frame.first()["key"] == "7"


def test_columns_are_named_or_made(spark: Any) -> None:
    df = frame_of(spark, "struct('a' as name) as meta", "'b' as `a.b`", "id", "'x' as payload")

    frame = message_frame(
        df, Columns(topic="meta.name", message_type="a.b", message_id="id", key=F.lit("k")), "job", F.lit("a\nb")
    )

    row = frame.first()
    assert frame.columns == ["topic", "message_type", "payload", "key", "row_id", "only", "hash_1", "hash_2"]
    assert (row["topic"], row["message_type"], row["key"], row["row_id"], row["only"]) == ("a", "b", "k", "0", "a\nb")


def test_all_other_columns_make_a_payload(spark: Any) -> None:
    df = frame_of(spark, "'Order' as kind", "id", "'x' as name")

    frame = message_frame(df, Columns(message_type="kind", payload="*"), "job")

    assert frame.first()["payload"].asDict() == {"id": 0, "name": "x"}


def test_a_route_is_chosen_by_topic_and_type_only(spark: Any) -> None:
    df = frame_of(spark, "'x' as payload", "'Order' as kind")

    assert key_frame(df, Columns(message_type="kind")).collect() == [("dev.order.events", "Order")]
    assert key_frame(df, Columns()).collect() == [("dev.order.events", None)]


def test_rows_know_their_ids_as_text(spark: Any) -> None:
    df = frame_of(spark, "id + 7 as number", "id as message_id")

    assert df.select(message_id_column(df, Columns(message_id="number"))).first()[0] == "7"
    assert df.select(message_id_column(df, Columns())).first()[0] == "0"
    with pytest.raises(InvalidParameter, match="resume needs a message_id column"):
        message_id_column(df.drop("message_id"), Columns())


# Hashes


def test_the_same_rows_have_the_same_hashes_in_the_same_job_only(spark: Any) -> None:
    df = frame_of(spark, "cast(id as string) as payload", rows=3)

    once, again, other = hashes(df), hashes(df), hashes(df, "another job")

    assert once == again
    assert len({number for pair in once for number in pair}) == 6
    assert not set(once) & set(other)


def test_rows_with_ids_are_known_by_these_alone(spark: Any) -> None:
    before = frame_of(spark, "'x' as payload", "id as message_id", rows=2)
    after = frame_of(spark, "'y' as payload", "cast(id as string) as message_id", rows=2).repartition(2, "message_id")

    assert sorted(hashes(before)) == sorted(hashes(after))
    assert len(set(hashes(before))) == 2


@pytest.mark.parametrize(
    "payload",
    [
        "map('a', id)",
        "map(id, array(id))",
        "struct(id, map('a', id) as inside)",
        "struct(array(map('a', id)) as inside)",
        "map('a', map('b', id))",
    ],
)
def test_payloads_with_maps_have_hashes_though_spark_hashes_none(spark: Any, payload: str) -> None:
    df = frame_of(spark, f"{payload} as payload", rows=2)

    assert hashes(df) == hashes(df)
    assert len(set(hashes(df))) == 2


@pytest.mark.parametrize(
    "columns",
    [
        ("struct(if(id = 0, 'x', null) as a, if(id = 0, null, 'x') as b) as payload",),
        ("'x' as payload", "if(id = 0, 'k', null) as key", "if(id = 0, null, 'k') as traceparent"),
    ],
    ids=["struct", "columns"],
)
def test_a_value_in_another_place_makes_another_row(spark: Any, columns: tuple[str, ...]) -> None:
    assert len(set(hashes(frame_of(spark, *columns, rows=2)))) == 2


# Mistakes


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            Columns(topic="subject"),
            "has no column 'subject' for topic; it has topic, payload, number. Name another one.",
        ),
        (Columns(key="customer.id"), "has no column 'customer.id' for key"),
        (Columns(payload="body"), "has no column 'body' for payload"),
        (Columns(key=7), "key must be the name of a column or an expression, not int."),
        (Columns(topic="number"), "The column for topic is bigint; it must be a string: cast it"),
        (Columns(traceparent="number"), "The column for traceparent is bigint"),
        (Columns(payload="number"), r"The payload is bigint; it must be a string, binary, a struct or a map\."),
    ],
)
def test_mistakes_are_said_in_sentences(spark: Any, columns: Columns, words: str) -> None:
    df = frame_of(spark, "'x' as payload", "id as number")

    with pytest.raises(InvalidParameter, match=words):
        message_frame(df, columns, "job")


def test_columns_that_must_be_there_are_missed(spark: Any) -> None:
    df = frame_of(spark, "id as number")

    with pytest.raises(InvalidParameter, match=r"has no column 'topic'; it has number\. Name another one\."):
        message_frame(df.select("number"), Columns(), "job")
    with pytest.raises(InvalidParameter, match="has no column 'topic'"):
        key_frame(df.select("number"), Columns())
    with pytest.raises(InvalidParameter, match=r'has no column \'payload\'.* payload="\*" takes all other columns.'):
        message_frame(df, Columns(), "job")
    with pytest.raises(InvalidParameter, match="no other columns that could be the payload"):
        message_frame(df.select("topic"), Columns(payload="*"), "job")


def test_a_stream_is_led_to_route_stream(spark: Any) -> None:
    stream = spark.readStream.format("rate").load()

    with pytest.raises(InvalidParameter, match="route_stream"):
        message_frame(stream, Columns(), "job")

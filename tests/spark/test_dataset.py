"""Ray Datasets through a real Ray: the same ledger, sent by Ray Data's tasks."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
import ray
from tests.spark.helping import MARKS, MAX_PAYLOAD_BYTES, Effects, numbers, route_engine

from raydispatch.actors import DispatchSystem
from raydispatch.errors import InvalidParameter
from raydispatch.spark.dataset import _found, _messages

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ON_RAY = [
    *MARKS,
    # Ray Data's own: it sets what it has deprecated.
    pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning"),
    # RayDP's.
    pytest.mark.filterwarnings("ignore:DataFrame.sql_ctx is an internal property:UserWarning"),
]


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Effects:
    return Effects(tmp_path_factory.mktemp("effects"))


@pytest.fixture(scope="module")
def system(ray_cluster: None, effects: Effects) -> Iterator[DispatchSystem]:
    with DispatchSystem.start(route_engine("datasets", effects)) as running:
        yield running


def table_of(topic: str, *payloads: Any, **columns: list[Any]) -> pa.Table:
    return pa.table({"topic": [topic] * len(payloads), "payload": list(payloads), **columns})


def hashes(table: pa.Table, job: str = "job", task: int = 0, **columns: str) -> list[tuple[int, int]]:
    names = _found(table.schema, {"topic": None, "message_type": None, "payload": None, "message_id": None, **columns})
    batch = _messages(table, names, job, task)
    return list(zip(batch.column("hash_1").to_pylist(), batch.column("hash_2").to_pylist(), strict=True))


# Messages


def test_rows_have_the_same_hashes_in_the_same_job_and_task_only() -> None:
    table = table_of("dev.a.events", "1", "2", "2", None)

    once = hashes(table)

    assert hashes(table) == once
    assert once[1] == once[2]
    assert len(set(once)) == 3
    assert not set(once) & (set(hashes(table, "another job")) | set(hashes(table, task=1)))


def test_rows_with_ids_are_known_by_these_alone() -> None:
    before = table_of("dev.a.events", "x", "y", message_id=[1, 2])
    after = table_of("dev.a.events", "other", "values", message_id=["1", "2"])

    assert hashes(before) == hashes(after, task=3)
    assert len(set(hashes(before))) == 2


def test_structs_and_maps_and_all_other_columns_have_hashes() -> None:
    table = pa.table({"topic": ["dev.a.events"] * 2, "one": [{"x": 1}, {"x": 2}], "two": [float("nan"), None]})

    assert len(set(hashes(table, payload="*"))) == 2
    assert len(set(hashes(table, payload="one"))) == 2


def test_all_other_columns_make_a_payload() -> None:
    table = pa.table({"subject": ["dev.a.events"], "number": [1], "name": ["x"]})
    names = _found(table.schema, {"topic": "subject", "payload": "*", "key": "number"})

    batch = _messages(table, names, "job", 0)

    assert batch.column("payload").to_pylist() == [{"name": "x"}]
    assert batch.column("key").to_pylist() == ["1"]


def test_a_topic_that_is_no_text_is_said() -> None:
    with pytest.raises(InvalidParameter, match="The column for topic is int64; it must be a string"):
        hashes(pa.table({"topic": [1], "payload": ["x"]}))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"topic": "subject"}, "The Dataset has no column 'subject' for topic; it has topic, number."),
        (
            {"topic": None, "payload": None},
            r"no column 'payload' for payload; .* payload=\"\*\" takes all other columns",
        ),
        ({"topic": None, "key": "customer"}, "has no column 'customer' for key"),
    ],
)
def test_a_column_that_is_missing_is_named(columns: dict[str, str | None], words: str) -> None:
    schema = pa.schema([("topic", pa.string()), ("number", pa.int64())])

    with pytest.raises(InvalidParameter, match=words):
        _found(schema, columns)


def test_no_other_columns_make_no_payload() -> None:
    with pytest.raises(InvalidParameter, match="no other columns that could be the payload"):
        _found(pa.schema([("topic", pa.string())]), {"topic": None, "payload": "*"})


# Routing


class TestRay:
    pytestmark = ON_RAY

    def test_every_row_is_in_the_ledger_once(self, system: DispatchSystem, effects: Effects, tmp_path: Path) -> None:
        topic = "dev.arrow.table.events"
        ds = ray.data.from_arrow([table_of(topic, *map(str, range(start, start + 250))) for start in (0, 250)])

        report = system.route_dataset(ds, ledger=tmp_path / "ledger")

        assert report.submitted == 500
        assert report.verify() == (500, 500, 500, {"success": 500})
        assert Counter(effects.payloads("table", topic)) == Counter(map(str, range(500)))
        assert {UUID(effect.message_id) for effect in effects.of("table", topic)} == {
            UUID(row["row_id"]) for row in report.ledger.take_all()
        }

    def test_bad_rows_cost_their_neighbours_nothing(
        self, system: DispatchSystem, effects: Effects, tmp_path: Path
    ) -> None:
        topic = "dev.bad.single.events"
        items = [
            {"topic": topic, "payload": "1", "id": 1},
            {"topic": None, "payload": "2", "id": 2},
            {"topic": topic, "payload": "x" * (MAX_PAYLOAD_BYTES + 1), "id": 3},
            {"topic": "dev.nobody.events", "payload": "4", "id": 4},
        ]

        report = system.route_dataset(ray.data.from_items(items), message_id="id", ledger=tmp_path / "ledger")

        assert report.counts == {"invalid_message": 2, "success": 1, "no_dispatcher": 1}
        assert report.verify().recorded == 4
        assert effects.payloads("single", topic) == ["1"]
        assert report.explain("2").splitlines()[0] == "Row 2: invalid_message"
        assert sorted(row["row_id"] for row in report.failed().take_all()) == ["2", "3", "4"]

    def test_equal_rows_all_run(self, system: DispatchSystem, effects: Effects, tmp_path: Path) -> None:
        topic = "dev.equal.single.events"
        ds = ray.data.from_items([{"topic": topic, "payload": "same"}] * 40, override_num_blocks=2)

        report = system.route_dataset(ds, ledger=tmp_path / "ledger")

        assert report.verify() == (40, 40, 40, {"success": 40})
        assert effects.payloads("single", topic) == ["same"] * 40

    def test_all_other_columns_can_be_the_payload(
        self, system: DispatchSystem, effects: Effects, tmp_path: Path
    ) -> None:
        topic = "dev.star.single.events"
        ds = ray.data.from_items([{"subject": topic, "number": number, "name": "x"} for number in range(3)])

        report = system.route_dataset(ds, topic="subject", payload="*", ledger=tmp_path / "ledger")

        assert report.counts == {"success": 3}
        assert sorted(effect.payload["number"] for effect in effects.of("single", topic)) == [0, 1, 2]
        assert {effect.payload["name"] for effect in effects.of("single", topic)} == {"x"}

    def test_a_dataset_of_spark_is_routed(
        self, system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
    ) -> None:
        topic = "dev.spark.table.events"
        df = numbers(spark, 300, partitions=2).selectExpr(f"'{topic}' as topic", "number")

        report = system.route_dataset(
            ray.data.from_spark(df), payload="number", message_id="number", ledger=tmp_path / "ledger"
        )

        assert report.verify() == (300, 300, 300, {"success": 300})
        assert Counter(effects.payloads("table", topic)) == Counter(map(str, range(300)))

    def test_the_ledger_of_a_dataset_of_spark_is_a_dataset_as_well(
        self, system: DispatchSystem, spark: Any, tmp_path: Path
    ) -> None:
        df = numbers(spark, 10).selectExpr("'dev.again.table.events' as topic", "number")

        report = system.route_dataset(ray.data.from_spark(df), payload="number", ledger=tmp_path / "ledger")

        assert len(report.ledger.take_all()) == 10
        assert report.failed().take_all() == []

    def test_a_job_id_that_is_used_twice_repeats_no_effect(
        self, system: DispatchSystem, effects: Effects, tmp_path: Path
    ) -> None:
        topic = "dev.twice.single.events"
        ds = ray.data.from_arrow(table_of(topic, *map(str, range(20)), message_id=list(range(20))))

        for place in ("once", "again"):
            assert system.route_dataset(ds, job_id="nightly", ledger=tmp_path / place).counts == {"success": 20}

        assert Counter(effects.payloads("single", topic)) == Counter(map(str, range(20)))

    def test_progress_is_told_up_to_the_end(self, system: DispatchSystem, tmp_path: Path) -> None:
        heard: list[dict[str, int]] = []
        ds = ray.data.from_arrow(table_of("dev.told.table.events", *map(str, range(30))))

        system.route_dataset(ds, ledger=tmp_path / "ledger", on_progress=heard.append)

        assert heard

    def test_a_ledger_is_never_written_over(self, system: DispatchSystem, tmp_path: Path) -> None:
        ds = ray.data.from_arrow(table_of("dev.over.table.events", "1"))
        system.route_dataset(ds, ledger=tmp_path / "ledger")

        with pytest.raises(InvalidParameter, match=r"There is a ledger in .*/ledger already: name another folder"):
            system.route_dataset(ds, ledger=tmp_path / "ledger")

    def test_mistakes_are_said_in_sentences(self, system: DispatchSystem, tmp_path: Path) -> None:
        ds = ray.data.from_items([{"topic": "dev.mistake.table.events", "number": 1}])

        with pytest.raises(InvalidParameter, match="route_dataset takes a Ray Dataset, not list"):
            system.route_dataset([])
        with pytest.raises(
            InvalidParameter, match="The Dataset has no column 'payload' for payload; it has topic, number"
        ):
            system.route_dataset(ds, ledger=tmp_path / "ledger")
        assert not (tmp_path / "ledger").exists()

    def test_on_open_is_one_of_two_words(self, system: DispatchSystem, tmp_path: Path) -> None:
        ds = ray.data.from_arrow(table_of("dev.word.table.events", "1"))

        with pytest.raises(InvalidParameter, match='on_open is "refuse" or "wait", not \'hold\''):
            system.route_dataset(ds, ledger=tmp_path / "ledger", on_open="hold")  # type: ignore[arg-type]

from pathlib import Path
from typing import Any

import pytest
from tests.spark.helping import MARKS

from raydispatch.errors import InvalidParameter
from raydispatch.spark.files import Folder

pytestmark = MARKS


def test_what_is_written_is_read_again(spark: Any, tmp_path: Path) -> None:
    folder = Folder(spark, str(tmp_path / "new"))
    content = {"job_id": "nightly – ü", "format": 1}

    folder.write("about.json", {"job_id": "an earlier one"})
    folder.write("about.json", content)

    assert folder.read("about.json") == content
    assert Folder(spark, folder.path).read("about.json") == content
    assert (tmp_path / "new" / "about.json").is_file()


def test_a_file_that_is_not_there_is_none(spark: Any, tmp_path: Path) -> None:
    assert Folder(spark, str(tmp_path)).read("about.json") is None
    assert Folder(spark, str(tmp_path / "nowhere")).read("about.json") is None


def test_a_folder_has_its_whole_address(spark: Any, tmp_path: Path) -> None:
    assert Folder(spark, str(tmp_path / "ledger")).path == f"file:{tmp_path}/ledger"
    assert Folder(spark, f"file://{tmp_path}/ledger").path.endswith(f"{tmp_path}/ledger")


def test_somebody_has_written_where_there_is_parquet(spark: Any, tmp_path: Path) -> None:
    folder = Folder(spark, str(tmp_path / "ledger"))
    was_there = [folder.has_parquet()]
    folder.write("about.json", {})
    was_there.append(folder.has_parquet())

    spark.range(2).write.mode("append").parquet(folder.path)

    assert was_there == [False, False]
    assert folder.has_parquet()


def test_a_folder_is_removed_with_all_that_is_in_it(spark: Any, tmp_path: Path) -> None:
    folder = Folder(spark, str(tmp_path / "ledger"))
    spark.range(2).write.parquet(folder.path)

    folder.remove()
    folder.remove()

    assert not (tmp_path / "ledger").exists()
    assert not folder.has_parquet()


def test_a_scheme_that_spark_does_not_know_is_named_with_the_reason(spark: Any) -> None:
    with pytest.raises(InvalidParameter, match="Spark knows no way to the folder 'nope://there/ledger'") as raised:
        Folder(spark, "nope://there/ledger")

    assert 'No FileSystem for scheme "nope"' in str(raised.value)


@pytest.mark.parametrize("path", ["", "s3a:", "::"])
def test_what_is_no_path_is_said(spark: Any, path: str) -> None:
    with pytest.raises(InvalidParameter, match="Spark knows no way to the folder"):
        Folder(spark, path)

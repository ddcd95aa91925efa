"""The rows that a command is about: a file of parquet, JSON lines or CSV, or a folder of such files."""

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydispatch.errors import InvalidParameter


class Format(StrEnum):
    """How the rows are written."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"


_SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".json": Format.JSONL,
    ".csv": Format.CSV,
}
_PACKED = (".gz", ".bz2", ".zst")
_CORRUPT = "_corrupt_record"


def has_spark() -> bool:
    """Whether the extra `spark` is installed."""
    return find_spec("raydp") is not None and find_spec("pyspark") is not None


def is_local(path: str) -> bool:
    """Whether a path is on this machine; a URL is for Spark to find."""
    return "://" not in path


def format_of(path: str, given: Format | None) -> Format:
    """The format that was given, or the one that the suffixes say. A file that is not there is a sentence."""
    place = Path(path)
    if is_local(path) and not place.exists():
        raise InvalidParameter(f"There is no file or folder '{path}'.")
    if given is not None:
        return given
    if is_local(path) and place.is_dir():
        return _format_of_folder(place)
    found = _format_of_name(place.name)
    if found is None:
        raise InvalidParameter(f"'{path}' has none of the suffixes {', '.join(_SUFFIXES)}: name its format, --format …")
    return found


def read(spark: Any, path: str, written_as: Format) -> Any:
    """The rows as a DataFrame."""
    place = str(Path(path).resolve()) if is_local(path) else path
    try:
        if written_as is Format.PARQUET:
            return spark.read.parquet(place)
        if written_as is Format.JSONL:
            # A line that is no JSON is a row without a topic: it gets its place in the ledger, too.
            return spark.read.json(place, columnNameOfCorruptRecord=_CORRUPT).drop(_CORRUPT)
        # Quotes within quotes are doubled, as everybody but Spark writes them.
        return spark.read.csv(place, header=True, inferSchema=False, escape='"')
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidParameter(f"Spark cannot read '{path}' as {written_as}: {words}") from None


def row_count(path: str, written_as: Format) -> int | None:
    """About how many rows there are, for a bar; None if that takes more than a glance."""
    files = _files(Path(path)) if is_local(path) else []
    if not files or any(file.suffix in _PACKED for file in files):
        return None
    if written_as is not Format.PARQUET:
        return sum(_lines(file) - (written_as is Format.CSV) for file in files)
    try:
        return sum(int(pq.read_metadata(file).num_rows) for file in files)
    except (OSError, pa.ArrowException):
        return None


def _lines(file: Path) -> int:
    with file.open("rb") as content:
        return sum(piece.count(b"\n") for piece in iter(lambda: content.read(1 << 20), b""))


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    # Names that begin like this are notes of those who write such folders; Spark leaves them out, too.
    return [file for file in place.rglob("*") if file.is_file() and file.name[0] not in "._"]


def _format_of_folder(folder: Path) -> Format:
    files = _files(folder)
    found = {_format_of_name(file.name) for file in files}
    if len(found) == 1 and (only := found.pop()) is not None:
        return only
    what = "is empty" if not files else f"has more than files of one of the suffixes {', '.join(_SUFFIXES)}"
    raise InvalidParameter(f"The folder '{folder}' {what}{': name a format, --format …' if files else ''}.")


def _format_of_name(name: str) -> Format | None:
    place = Path(name)
    return _SUFFIXES.get(Path(place.stem if place.suffix in _PACKED else name).suffix.lower())

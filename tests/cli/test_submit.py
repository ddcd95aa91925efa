"""`submit`: mistakes before anything is started, and files through a real Ray and a real Spark."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raydispatch import Envelope
from raydispatch.cli.main import app
from raydispatch.cli.source import Format, format_of, row_count
from raydispatch.errors import InvalidParameter, MissingExtra, SystemUnavailable

SHOP = """
import asyncio
from pathlib import Path
from pydantic import BaseModel
from raydispatch import DispatchEngine, Envelope, MessageCategory

engine = DispatchEngine("shop")
seen = str(Path("seen").resolve())

class Order(BaseModel):
    order_id: int
    seconds: float = 0.0

@engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT)
async def bill(envelope: Envelope[Order]) -> None:
    if envelope.payload.seconds:
        Path(seen).touch()
        await asyncio.sleep(envelope.payload.seconds)
"""
TOPIC = "dev.order.events.v1"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.fixture
def events(shop: Path) -> Path:
    (shop / "events.csv").write_text(f"topic,order_id\n{TOPIC},1\n{TOPIC},2\n")
    return shop


def started(folder: Path, *arguments: str, address: str = "local", mark: str = "") -> "subprocess.Popen[str]":
    """In a process group of its own, as a shell starts it; on a Ray of its own, unless told of another."""
    return subprocess.Popen(
        [sys.executable, "-m", "raydispatch", "submit", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": address, "COLUMNS": "120", "RAYDISPATCH_TEST_MARK": mark},
    )


def raydispatch(folder: Path, *arguments: str, address: str = "local") -> "subprocess.CompletedProcess[str]":
    with started(folder, *arguments, address=address) as process:
        try:
            out, errors = process.communicate(timeout=300)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, f"not within {seconds} s"
        signal.sigtimedwait([], 0.05)


def marked(mark: str) -> list[str]:
    """The processes that have inherited a mark: everything that a process has started, and what that has started."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " ")[:200])
        except OSError:  # It has ended meanwhile.
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.csv", "--app", "shop:engine"], "There is no file or folder 'nothing.csv'"),
        (["shop.py", "--app", "shop:engine"], "name its format, --format"),
        (["events.csv"], "Name either an engine, --app MODULE:ENGINE, or a system"),
        (["events.csv", "--app", "shop:engine", "--system", "shop"], "not both"),
        (["events.csv", "--app", "shpo:engine"], "There is no module 'shpo'"),
        (["events.csv", "--app", "shop:engine", "--dry-run", "--ledger", "out"], "A dry run sends nothing"),
        (["events.csv", "--app", "shop:engine", "--ledger", "shop.py"], "shop.py is a file"),
        (["events.csv", "--app", "shop:engine", "--resume", "out"], "There is no ledger in out"),
    ],
)
def test_mistakes_are_found_before_ray_is(
    events: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(events)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    monkeypatch.delenv("RAYDISPATCH_APP", raising=False)

    done = CliRunner().invoke(app, ["submit", *arguments])

    assert isinstance(done.exception, InvalidParameter), done.output
    assert words in str(done.exception)


def test_a_ledger_that_is_there_is_not_written_over(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(events)
    (events / "out").mkdir()
    (events / "out" / "part-0.parquet").touch()

    done = CliRunner().invoke(app, ["submit", "events.csv", "--app", "shop:engine", "--ledger", "out"])

    assert isinstance(done.exception, InvalidParameter)
    assert "There is a ledger in out already" in str(done.exception)


def test_without_spark_it_says_what_to_install(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(events)
    monkeypatch.setattr("raydispatch.cli.submit.has_spark", lambda: False)

    done = CliRunner().invoke(app, ["submit", "events.csv", "--app", "shop:engine"])

    assert isinstance(done.exception, MissingExtra)
    assert "pip install 'raydispatch[spark]'" in str(done.exception)


def test_a_system_that_is_named_counts_more_than_an_engine_in_the_environment(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(events)
    monkeypatch.setenv("RAYDISPATCH_APP", "nothing:engine")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    done = CliRunner().invoke(app, ["submit", "events.csv", "--system", "shop"])

    assert isinstance(done.exception, SystemUnavailable)


def test_help_has_an_example() -> None:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["submit", "--help"])

    assert "raydispatch submit events.parquet --app shop.orders:engine" in done.output


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a.parquet"], Format.PARQUET),
        (["a.JSONL", "b.ndjson"], Format.JSONL),
        (["a.csv.gz", "_SUCCESS", ".hidden"], Format.CSV),
        (["day=1/a.csv", "day=2/b.csv"], Format.CSV),
        (["a.csv", "b.parquet"], "name a format"),
        (["notes.txt"], "name a format"),
        ([], "is empty"),
    ],
)
def test_the_format_of_a_folder_is_that_of_its_files(tmp_path: Path, names: list[str], found: Format | str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    if isinstance(found, Format):
        assert format_of(str(tmp_path), None) is found
    else:
        with pytest.raises(InvalidParameter, match=found):
            format_of(str(tmp_path), None)
    assert format_of(str(tmp_path), Format.CSV) is Format.CSV


def test_rows_are_counted_at_a_glance_or_not_at_all(events: Path) -> None:
    pq.write_table(pa.table({"topic": [TOPIC] * 7}), events / "seven.parquet")
    (events / "packed.csv.gz").touch()

    assert row_count(str(events / "events.csv"), Format.CSV) == 2
    assert row_count(str(events / "seven.parquet"), Format.PARQUET) == 7
    assert row_count(str(events / "shop.py"), Format.PARQUET) is None
    assert row_count(str(events / "packed.csv.gz"), Format.CSV) is None
    assert row_count("s3://bucket/events.csv", Format.CSV) is None


@pytest.mark.slow
def test_a_file_with_a_bad_row_ends_with_1_and_a_ledger_that_tells_which(shop: Path) -> None:
    payloads = ['{"order_id": 1}', '{"order_id": "one"}', '{"order_id": 3}']
    rows = {"topic": [TOPIC] * 3, "message_id": ["a", "b", "c"], "payload": payloads}
    pq.write_table(pa.table(rows), shop / "events.parquet")

    done = raydispatch(shop, "events.parquet", "--app", "shop:engine", "--ledger", "out")

    assert done.returncode == 1, done.stderr
    assert "3 rows" in done.stdout
    assert "payload_invalid" in done.stdout
    assert "Input should be a valid integer" in done.stdout
    ledger = pq.read_table(shop / "out").to_pylist()
    assert {row["row_id"]: row["status"] for row in ledger} == {
        "a": "success",
        "b": "invalid_message",
        "c": "success",
    }


@pytest.mark.slow
def test_a_csv_of_good_rows_ends_with_0_and_nothing_but_json(shop: Path) -> None:
    (shop / "orders.csv").write_text(f'where,order_id,note\n{TOPIC},1,"say ""hello"", please"\n{TOPIC},2,\n')

    done = raydispatch(shop, "orders.csv", "--app", "shop:engine", "--topic-column", "where", "--json")

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["succeeded"], summary["rows"], summary["counts"]) == (True, 2, {"success": 2})
    assert done.stderr == ""


@pytest.mark.slow
def test_a_dry_run_tells_where_rows_would_go_and_sends_none(shop: Path) -> None:
    lines = [
        {"topic": TOPIC, "payload": {"order_id": 1, "seconds": 0.1}},
        {"topic": "dev.stock.commands.count", "payload": {"order_id": 2}},
    ]
    (shop / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0]]))

    done = raydispatch(shop, "events.jsonl", "--app", "shop:engine", "--dry-run")

    assert done.returncode == 1, done.stderr
    assert "3 rows, nothing sent" in done.stdout
    assert "dev.stock.commands.count" in done.stdout
    assert not (shop / "seen").exists()


@pytest.mark.slow
def test_a_system_that_was_deployed_takes_rows_and_stays(events: Path, ray_cluster: None) -> None:
    import ray
    from tests.actors.helping import engine_of

    from raydispatch.actors import DispatchSystem

    async def take(envelope: Envelope[object]) -> None:
        return None

    with DispatchSystem.start(engine_of("submitted-to", take), routers=1) as system:
        address = ray.get_runtime_context().gcs_address
        done = raydispatch(events, "events.csv", "--system", "submitted-to", "--cores", "1", address=address)

        assert done.returncode == 0, done.stderr
        assert system.status().dispatchers["orders"].handled == 2


@pytest.mark.slow
def test_ctrl_c_stops_the_job_and_leaves_nothing_behind(shop: Path) -> None:
    mark = uuid4().hex
    payload = json.dumps({"order_id": 1, "seconds": 120})
    pq.write_table(pa.table({"topic": [TOPIC] * 500, "payload": [payload] * 500}), shop / "slow.parquet")

    with started(shop, "slow.parquet", "--app", "shop:engine", "--ledger", "out", mark=mark) as process:
        wait_until(lambda: (shop / "seen").exists() or process.poll() is not None, 240)
        # As a terminal does it: to everything that runs in the foreground.
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors
    assert "Stopped early" in errors
    assert "Traceback" not in out + errors
    wait_until(lambda: not marked(mark), 30)

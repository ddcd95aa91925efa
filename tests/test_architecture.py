"""The tree is the dependency rule, and this is its proof."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "raydispatch"

CORE = ["messages", "routing", "dispatch", "delivery", "bus"]
MAY_IMPORT = {
    **{folder: set(CORE[:position]) for position, folder in enumerate(CORE)},
    "journals": {*CORE},
    "actors": {*CORE},
    "spark": {*CORE, "actors"},
    "testing": {*CORE, "actors", "spark"},
    "cli": {*CORE, "actors", "spark", "testing"},
}
HOMES = {
    "ray": {"actors", "spark"},  # Spark's workers call routers, too.
    "pyspark": {"spark"},
    "raydp": {"spark"},
    "opentelemetry": {"telemetry"},
    "sqlite3": {"journals"},
    "nats": {"journals"},
    "typer": {"cli"},
    "pytest": {"testing"},
}
EXCEPTIONS = {Path("actors/system.py"): {"spark"}, Path("actors/frames.py"): {"spark"}}
"""`DispatchSystem.route` and its like import what they need when they are called."""


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] != "_")
)
def test_a_folder_imports_only_from_those_before_it(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder, "errors", "settings"}

    for file in (SOURCE / folder).rglob("*.py"):
        ours = {name.split(".")[1] for name in imports_of(file) if name.startswith("raydispatch.")}
        ours -= EXCEPTIONS.get(file.relative_to(SOURCE), set())
        assert ours <= allowed, f"{file} imports {ours - allowed}"


def test_each_library_has_one_home() -> None:
    for file in SOURCE.rglob("*.py"):
        for name in imports_of(file):
            folder = file.relative_to(SOURCE).parts[0]
            assert folder in HOMES.get(name.split(".")[0], {folder}), f"{file} imports {name}"


def test_every_module_has_its_test() -> None:
    tested = {path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE)
        if place.parts[0] == "cli" or place.name.startswith("__") or place.name == "clock.py":
            continue
        assert place.with_name(f"test_{place.name}") in tested, f"{place} has no test"


def test_importing_raydispatch_loads_no_heavy_library() -> None:
    program = (
        "import sys, raydispatch; from raydispatch import *; "
        "print(*(name for name in ('ray', 'pyspark', 'opentelemetry', 'raydp') if name in sys.modules))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SOURCE.parent)},
    )

    assert done.stdout.strip() == ""


def test_every_public_name_is_there() -> None:
    import raydispatch

    for name in raydispatch.__all__:
        assert getattr(raydispatch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raydispatch.nothing
    assert set(raydispatch.__all__) <= set(dir(raydispatch))

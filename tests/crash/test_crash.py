from pathlib import Path

import pytest
from tests.crash.crashing import Tally, crash
from tests.journals.conftest import need_binary
from tests.journals.helping import NatsServer


def check(tally: Tally) -> None:
    assert tally.accepted > 0
    assert tally.lost == 0
    assert tally.unexplained == 0
    assert tally.unmarked == 0


@pytest.mark.slow
def test_five_lives_that_end_by_kill_lose_nothing(tmp_path: Path) -> None:
    check(crash(f"sqlite://{tmp_path}/crash.db", tmp_path, times=5, seed=11))


@pytest.mark.slow
def test_nor_do_they_with_a_journal_on_nats(tmp_path: Path) -> None:
    need_binary()
    server = NatsServer(tmp_path)

    try:
        tally = crash(server.url, tmp_path, times=5, seed=13)
    finally:
        server.stop()

    check(tally)


@pytest.mark.slow
def test_a_whole_ray_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    check(crash(f"sqlite://{tmp_path}/crash.db", tmp_path, times=2, seed=12, is_on_ray=True))

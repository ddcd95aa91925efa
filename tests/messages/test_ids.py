"""Ids: random, of version 4, and never handed out twice."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

import pytest

from raydispatch.messages import ids
from raydispatch.messages.ids import new_id, uuid_of


def test_an_id_is_a_uuid_of_version_4() -> None:
    drawn = [new_id() for _ in range(1_000)]

    assert {type(one) for one in drawn} == {UUID}
    assert {one.version for one in drawn} == {4}
    assert {one.variant for one in drawn} == {RFC_4122}


def test_ids_are_distinct_over_several_blocks() -> None:
    assert len({new_id() for _ in range(5_000)}) == 5_000


def test_threads_never_draw_the_same_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: [new_id() for _ in range(1_000)], range(8)))

    assert len({one for part in drawn for one in part}) == 8_000


def test_a_uuid_made_without_checks_is_like_any_other() -> None:
    usual = UUID("12345678-1234-4234-8234-123456789abc")

    made = uuid_of(usual.int)

    assert made == usual
    assert hash(made) == hash(usual)
    assert str(made) == str(usual)
    assert made.bytes == usual.bytes
    assert made.is_safe is usual.is_safe
    assert pickle.loads(pickle.dumps(made)) == usual


def test_all_bits_but_the_version_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_pool", [2**128 - 1, 0])

    assert new_id() == UUID("00000000-0000-4000-8000-000000000000")
    assert new_id() == UUID("ffffffff-ffff-4fff-bfff-ffffffffffff")


def test_a_forked_child_draws_ids_of_its_own() -> None:
    new_id()
    reading, writing = os.pipe()

    child = os.fork()
    if child == 0:
        os.write(writing, new_id().bytes)
        os._exit(0)
    os.waitpid(child, 0)
    of_the_child = UUID(bytes=os.read(reading, 16))
    os.close(reading)
    os.close(writing)

    assert of_the_child not in {new_id() for _ in range(1_000)}

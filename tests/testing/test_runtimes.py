"""An engine in this process, through plain calls."""

import threading
from typing import Any

import pytest

from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply
from raydispatch.testing.runtimes import in_process


def engine_of_one() -> DispatchEngine:
    engine = DispatchEngine()

    @engine.dispatcher("echo", topics="**", category=MessageCategory.COMMAND)
    async def echo(envelope: Envelope[Any]) -> Reply:
        return Reply(envelope.payload)

    return engine


def test_all_words_work_without_async() -> None:
    with in_process(engine_of_one()) as runtime:
        assert runtime.dispatch("a.commands.b", Envelope(1)).reply == Reply(1)
        assert runtime.execute("a.commands.b", Envelope(2)).reply == Reply(2)
        assert runtime.request("a.commands.b", Envelope(3), timeout=5) == Reply(3)
        assert [result.reply for result in runtime.dispatch_many([("a.commands.b", Envelope(4))])] == [Reply(4)]
        runtime.publish("a.commands.b", Envelope(5))
        runtime.drain()


def test_its_thread_is_gone_at_the_end_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), in_process(engine_of_one()):
        _ = 1 / 0

    assert "raydispatch in process" not in [thread.name for thread in threading.enumerate()]

import asyncio
import sys

import pytest

from raydispatch.delivery.journal import open_journal
from raydispatch.errors import InvalidParameter, MissingExtra


@pytest.mark.parametrize("url", ["", "orders.db", "redis://localhost", "http://localhost:4222"])
def test_an_address_that_is_none_is_refused_with_examples(url: str) -> None:
    with pytest.raises(InvalidParameter, match="sqlite:///path"):
        asyncio.run(open_journal(url, "orders"))


def test_a_password_is_not_shown() -> None:
    with pytest.raises(InvalidParameter) as refused:
        asyncio.run(open_journal("mysql://me:secret@localhost/orders", "orders"))

    assert "localhost" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["nats", "tls"])
def test_a_library_that_is_missing_is_named_with_its_extra(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "raydispatch.journals.nats", None)

    with pytest.raises(MissingExtra, match=r"raydispatch\[nats\]"):
        asyncio.run(open_journal(f"{scheme}://localhost:4222", "orders"))

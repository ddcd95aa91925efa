import sys

import pytest

from raydispatch.delivery.outlet import open_outlet
from raydispatch.errors import InvalidParameter, MissingExtra


def without(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """As if it were not installed."""
    homes = [name for name in sys.modules if name.startswith("raydispatch.journals.nats")]
    for name in [*homes, *(name for name in sys.modules if name == library or name.startswith(f"{library}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Refuses(library), *sys.meta_path])


class _Refuses:
    """Finds nothing of a library."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._library or name.startswith(f"{self._library}."):
            raise ModuleNotFoundError(f"No module named {self._library!r}", name=self._library)


def test_without_its_library_it_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "nats")

    with pytest.raises(MissingExtra) as caught:
        open_outlet("nats://localhost:4222", "shop")

    assert str(caught.value) == "nats is not installed: pip install 'raydispatch[nats]'."
    assert caught.value.extra == "nats"


def test_it_connects_to_nobody_until_something_goes_out() -> None:
    pytest.importorskip("nats")

    outlet = open_outlet("nats://127.0.0.1:1", "shop")

    assert callable(outlet.accept)
    assert callable(outlet.close)


def test_an_address_that_is_none_is_refused() -> None:
    pytest.importorskip("nats")

    with pytest.raises(InvalidParameter):
        open_outlet("nats://", "shop")

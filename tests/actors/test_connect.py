"""Coming to a cluster, and the sentences for when there is none. Nothing here starts Ray."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raydispatch.actors import connect as connecting
from raydispatch.actors.connect import connect, local_ray
from raydispatch.errors import SystemUnavailable


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A Ray that is not connected yet, and only writes down what it is asked for."""
    made: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: made.append(("init", options)))
    monkeypatch.setattr(ray, "shutdown", lambda: made.append(("shutdown", {})))
    return made


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(connecting, "canonicalize_bootstrap_address", lambda _: address)
        yield address


def test_the_cluster_that_is_found_is_joined_in_our_namespace(
    calls: list[tuple[str, dict[str, Any]]], somebody: str
) -> None:
    connect()

    [(verb, options)] = calls
    assert verb == "init"
    assert (options["address"], options["namespace"]) == ("auto", "raydispatch")


def test_who_is_connected_stays_so(calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    connect()

    assert calls == []


def test_without_a_cluster_the_sentence_says_how_to_get_one(
    calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(address: str) -> str:
        raise ConnectionError("Could not find any running Ray instance. Please specify the `--address` flag.")

    monkeypatch.setattr(connecting, "canonicalize_bootstrap_address", find)

    with pytest.raises(SystemUnavailable, match="Could not find any running Ray instance") as raised:
        connect()

    assert "`ray start --head`" in str(raised.value)
    assert "RAY_ADDRESS=" in str(raised.value)
    assert "--address" not in str(raised.value)
    assert calls == []


@pytest.mark.parametrize(
    ("address", "reason"), [("local", "means a new one"), ("nowhere", "nowhere"), ("127.0.0.1:1", ":1: ")]
)
def test_an_address_that_leads_nowhere_is_a_sentence_at_once(
    calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, address: str, reason: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)

    with pytest.raises(SystemUnavailable, match="There is no Ray cluster to connect to") as raised:
        connect()

    assert reason in str(raised.value)
    assert calls == []


@pytest.mark.parametrize("error", [ConnectionError("no"), RuntimeError("Version mismatch"), ray.exceptions.RayError()])
def test_a_cluster_that_refuses_us_may_want_a_token(
    calls: list[tuple[str, dict[str, Any]]], somebody: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(**options: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)

    with pytest.raises(SystemUnavailable, match="RAY_AUTH_MODE=token") as raised:
        connect()

    assert somebody in str(raised.value)


def test_a_ray_of_our_own_is_new_and_gone_after_the_block(calls: list[tuple[str, dict[str, Any]]]) -> None:
    with local_ray(num_cpus=3):
        assert [verb for verb, _ in calls] == ["init"]

    assert [verb for verb, _ in calls] == ["init", "shutdown"]
    assert (calls[0][1]["address"], calls[0][1]["num_cpus"]) == ("local", 3)


def test_a_ray_of_our_own_is_gone_after_an_error_too(calls: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(KeyboardInterrupt), local_ray(num_cpus=3):
        raise KeyboardInterrupt

    assert [verb for verb, _ in calls] == ["init", "shutdown"]

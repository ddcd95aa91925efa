from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydispatch.errors import InvalidParameter
from raydispatch.journals.nats_address import NatsAddress, safe, unsafe


def test_an_address_may_say_everything(tmp_path: Path) -> None:
    creds, ca = tmp_path / "me.creds", tmp_path / "ca.pem"
    creds.touch()
    ca.touch()

    address = NatsAddress.parse(
        f"nats://me:p%40ss@one:1111,two,[::1]:3333?replicas=3&creds={creds}&tls_ca={ca}&timeout=0.5&prefix=shop"
        "&monitor=http://one:8222,https://two:8222/",
        "orders",
    )

    assert address == NatsAddress(
        servers=("tls://one:1111", "tls://two:4222", "tls://[::1]:3333"),
        name="orders",
        user="me",
        password="p@ss",
        is_encrypted=True,
        replicas=3,
        creds=creds,
        tls_ca=ca,
        monitors=("http://one:8222", "https://two:8222"),
        prefix="shop",
        timeout_seconds=0.5,
    )


def test_a_plain_address_has_defaults() -> None:
    address = NatsAddress.parse("nats://localhost", "orders")

    assert address == NatsAddress(servers=("nats://localhost:4222",), name="orders")
    assert (address.log_stream, address.bucket) == ("raydispatch_orders_log", "raydispatch_orders")


def test_a_login_without_a_colon_is_a_token() -> None:
    address = NatsAddress.parse("tls://s3cret@localhost", "orders")

    assert (address.token, address.user, address.password) == ("s3cret", None, None)
    assert address.is_encrypted


def test_no_secret_is_shown() -> None:
    for url in ("nats://me:s3cret@localhost", "nats://s3cret@localhost"):
        address = NatsAddress.parse(url, "orders")

        assert "s3cret" not in f"{address!r} {address.shown}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nats://", "at host:port, not at ''"),
        ("nats://one,", "at host:port, not at ''"),
        ("nats://one:port", "not at 'one:port'"),
        ("nats://one:99999", "not at 'one:99999'"),
        ("nats://one?replica=3", "no option 'replica': replicas, creds"),
        ("nats://one?replicas=0", "replicas=0 cannot be"),
        ("nats://one?replicas=many", "replicas=many cannot be"),
        ("nats://one?timeout=0", "timeout=0 cannot be"),
        ("nats://one?timeout=0.0", "timeout=0.0 cannot be"),
        ("nats://one?timeout=-1", "timeout=-1 cannot be"),
        ("nats://one?timeout=nan", "timeout=nan cannot be"),
        ("nats://one?creds=/no/such/file", "creds: there is no file /no/such/file"),
        ("nats://one?tls_ca=/no/such/file", "tls_ca: there is no file /no/such/file"),
        ("nats://one?monitor=one:8222", "The monitor of a server is at http://host:8222, not at 'one:8222'"),
        ("nats://one?monitor=file:///etc/passwd", "The monitor of a server is at http://host:8222"),
        ("nats://one?prefix=a.b", "prefix='a.b' cannot begin the name of a stream"),
        ("nats://one?prefix=", "prefix='' cannot begin the name of a stream"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused(url: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        NatsAddress.parse(url, "orders")


def test_a_journal_needs_a_name() -> None:
    with pytest.raises(InvalidParameter, match="A journal needs a name"):
        NatsAddress.parse("nats://one", "")


def test_journals_of_different_names_never_share_a_stream() -> None:
    names = ["a.b", "a_b", "a b", "a*b", "a-b", "A-b", "é", "日本", "a" * 200, "a." * 100]
    addresses = [NatsAddress.parse("nats://one", name) for name in names]

    for made in ([one.log_stream for one in addresses], [one.bucket for one in addresses]):
        assert len(set(made)) == len(names)
        assert all(len(one) < 255 and set(one) <= set("abcdefghijklmnopqrstuvwxyzAé_-0123456789") for one in made)


@given(st.text())
def test_any_name_can_be_a_part_of_a_subject(name: str) -> None:
    part = safe(name)

    assert unsafe(part) == name
    assert not set(part) & set(" .*>\t\r\n")


def test_usual_names_can_be_read_in_a_subject() -> None:
    assert safe("billing_v2-a") == "billing_v2-a"
    assert safe("shop.billing") == "shop=2Ebilling"

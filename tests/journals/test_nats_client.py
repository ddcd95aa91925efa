"""Who may connect to whom."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.journals.helping import NatsServer, Place, batch, open_nats, run

from raydispatch.errors import InvalidParameter, MissingExtra


async def connect(place: Place) -> None:
    async with open_nats(place) as journal:
        await journal.append([batch()])


def with_login(server: NatsServer, login: str, scheme: str = "nats") -> Place:
    return server.url.replace("nats://", f"{scheme}://{login}@"), "orders"


@pytest.fixture
def guarded(own_server: NatsServer) -> NatsServer:
    own_server.stop()
    own_server.configure("authorization { user: me, password: 'p@ss' }\n")
    own_server.start()
    return own_server


def test_a_login_opens_the_door(guarded: NatsServer) -> None:
    run(connect(with_login(guarded, "me:p%40ss")))


@pytest.mark.parametrize("login", ["me:wrong", "token"])
def test_a_wrong_login_is_refused_without_being_shown(guarded: NatsServer, login: str) -> None:
    with pytest.raises(InvalidParameter, match="refuses this login: Authorization Violation") as refused:
        run(connect(with_login(guarded, login)))

    assert login not in str(refused.value)


def test_a_token_opens_the_door(own_server: NatsServer) -> None:
    own_server.stop()
    own_server.configure("authorization { token: 's3cret' }\n")
    own_server.start()

    run(connect(with_login(own_server, "s3cret")))


def test_no_password_goes_to_a_server_that_does_not_encrypt(guarded: NatsServer) -> None:
    with pytest.raises(InvalidParameter, match="does not encrypt"):
        run(connect(with_login(guarded, "me:p%40ss", "tls")))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of this machine, signed by itself; its key is beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file = tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", tmp_path / "key.pem", "-out", file], check=True, capture_output=True)
    return file


@pytest.fixture
def encrypted(own_server: NatsServer, certificate: Path) -> NatsServer:
    own_server.stop()
    own_server.configure(f'tls {{ cert_file: "{certificate}", key_file: "{certificate.with_name("key.pem")}" }}\n')
    own_server.start()
    return own_server


def test_an_encrypted_server_is_known_by_its_certificate(encrypted: NatsServer, certificate: Path) -> None:
    url = encrypted.url.replace("nats://", "tls://")

    run(connect((f"{url}&tls_ca={certificate}", "orders")))
    run(connect((f"{encrypted.url}&tls_ca={certificate}", "orders")))


def test_an_encrypted_server_that_nobody_vouches_for_is_refused(encrypted: NatsServer) -> None:
    with pytest.raises(InvalidParameter, match="is not to be trusted"):
        run(connect((encrypted.url.replace("nats://", "tls://"), "orders")))


def test_a_file_that_is_no_certificate_is_named(nats_server: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    with pytest.raises(InvalidParameter, match=r"ca\.pem holds no certificate"):
        run(connect((f"{nats_server.url}&tls_ca={tmp_path / 'ca.pem'}", "orders")))


def test_credentials_need_another_library(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nkeys", None)
    (tmp_path / "me.creds").touch()

    with pytest.raises(MissingExtra, match="nkeys is not installed"):
        run(connect((f"{nats_server.url}&creds={tmp_path / 'me.creds'}", "orders")))

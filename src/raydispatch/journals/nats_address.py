"""Where a journal is on NATS, and what it is called there."""

import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from raydispatch.errors import InvalidParameter

_PORT = 4222
_OPTIONS = ("replicas", "creds", "tls_ca", "monitor", "prefix", "timeout")
_SAFE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class NatsAddress:
    """What stands in an address such as `nats://user:secret@one:4222,two:4222?replicas=3`."""

    servers: tuple[str, ...]
    name: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    is_encrypted: bool = False
    replicas: int = 1
    creds: Path | None = None
    """A file of credentials, as `nsc` makes them."""
    tls_ca: Path | None = None
    monitors: tuple[str, ...] = ()
    """Where the servers tell how they are configured."""
    prefix: str = "raydispatch"
    timeout_seconds: float = 5.0
    """How long a call waits for the servers before it fails."""

    @classmethod
    def parse(cls, url: str, name: str) -> Self:
        """From a url; raises InvalidParameter for what makes no sense there."""
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := options.keys() - set(_OPTIONS):
            raise InvalidParameter(f"A journal on NATS has no option '{min(unknown)}': {', '.join(_OPTIONS)}.")
        if not name:
            raise InvalidParameter("A journal needs a name: its streams are called after it.")
        user, colon, password = (unquote(part) for part in login.partition(":"))
        tls_ca = _file(options, "tls_ca")
        is_encrypted = parts.scheme == "tls" or tls_ca is not None
        return cls(
            servers=tuple(_server(host, "tls" if is_encrypted else "nats") for host in hosts.split(",")),
            name=name,
            user=user if colon else None,
            password=password if colon else None,
            token=user if user and not colon else None,
            is_encrypted=is_encrypted,
            replicas=int(_number(options, "replicas", "1", r"[1-5]")),
            creds=_file(options, "creds"),
            tls_ca=tls_ca,
            monitors=tuple(_monitor(one) for one in options.get("monitor", "").split(",") if one),
            prefix=_prefix(options.get("prefix", "raydispatch")),
            timeout_seconds=float(_number(options, "timeout", "5", r"0*[1-9]\d{0,3}(\.\d+)?|0\.\d*[1-9]\d*")),
        )

    @property
    def shown(self) -> str:
        """For sentences: without what is secret."""
        return ",".join(self.servers)

    @property
    def log_stream(self) -> str:
        """The stream of the log."""
        return f"{self.prefix}_{_token(self.name)}_log"

    @property
    def log_subject(self) -> str:
        """Its only subject."""
        return f"{self.prefix}.{_token(self.name)}.log"

    @property
    def bucket(self) -> str:
        """The key-value bucket of the documents."""
        return f"{self.prefix}_{_token(self.name)}"


def safe(key: str) -> str:
    """A name as one part of a subject: letters, digits, `_` and `-` as they are, `=2E` for a dot."""
    return quote(key, safe="").replace(".", "%2E").replace("~", "%7E").replace("%", "=")


def unsafe(part: str) -> str:
    """The name again."""
    return unquote(part.replace("=", "%"))


def _token(name: str) -> str:
    # Streams and buckets may be called less than documents may: what is lost is made up for by a checksum.
    if _SAFE.fullmatch(name):
        return name
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}_{sha256(name.encode()).hexdigest()[:8]}"


def _server(host: str, scheme: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        port = parts.port or _PORT
    except ValueError:
        raise InvalidParameter(f"A server of NATS is at host:port, not at {host!r}.") from None
    if not parts.hostname or parts.path:
        raise InvalidParameter(f"A server of NATS is at host:port, not at {host!r}.")
    shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{scheme}://{shown}:{port}"


def _number(options: dict[str, str], name: str, default: str, pattern: str) -> str:
    value = options.get(name, default)
    if not re.fullmatch(pattern, value):
        raise InvalidParameter(f"{name}={value} cannot be: replicas is 1 to 5, timeout a number of seconds.")
    return value


def _file(options: dict[str, str], name: str) -> Path | None:
    if name not in options:
        return None
    path = Path(options[name])
    if not path.is_file():
        raise InvalidParameter(f"{name}: there is no file {path}.")
    return path


def _monitor(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise InvalidParameter(f"The monitor of a server is at http://host:8222, not at {url!r}.")
    return url.rstrip("/")


def _prefix(prefix: str) -> str:
    if not _SAFE.fullmatch(prefix):
        raise InvalidParameter(f"prefix={prefix!r} cannot begin the name of a stream: letters, digits, _ and - can.")
    return prefix

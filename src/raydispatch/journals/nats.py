"""A journal on servers of NATS JetStream: for many machines."""

import logging
from collections.abc import Sequence
from typing import Any

from raydispatch.delivery.journal import Batch, Change, Stored
from raydispatch.errors import InvalidParameter, JournalCorrupt
from raydispatch.journals.checking import check_batches, check_changes
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_documents import NatsDocuments
from raydispatch.journals.nats_flushing import warn_unless_flushed
from raydispatch.journals.nats_line import Line, NobodyListens, Refused
from raydispatch.journals.nats_log import NatsLog

FORMAT = "1"
"""Of the messages in a stream; another one is refused."""
DUPLICATES_SECONDS = 120
"""How long servers know the ids of batches."""

_ENABLE = "Put `jetstream { store_dir: …, sync_interval: always }` into the configuration of the server."
_NOT_ENABLED = (10039, 10076)
_NOT_CLUSTERED = 10074
_NOT_FOUND = 404

_log = logging.getLogger("raydispatch")


async def open_journal(url: str, name: str) -> "NatsJournal":
    """The journal of this name at `nats://[user:password@]host:4222[,host2:4222]`, or `tls://…`; it is made if it is
    not there.

    Options: `replicas=3`, `creds=` and `tls_ca=` (files), `monitor=http://host:8222` (to check how servers flush),
    `prefix=` (of the names of streams), `timeout=` (seconds).
    """
    address = NatsAddress.parse(url, name)
    journal = NatsJournal(address)
    try:
        await journal.open()
    except BaseException:
        await journal.close()
        raise
    await warn_unless_flushed(address)
    return journal


class NatsJournal:
    """A log as a stream, and documents as a key-value bucket; see `Journal`. Belongs to one event loop.

    A call that raised JournalUnavailable may have been done all the same: the answer may be what was lost. Called again
    with the same batches, it tells their offsets, and appends what is missing.

    Example: `journal = await open_journal("nats://nats-1:4222,nats-2:4222?replicas=3", "orders")`.
    """

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self._line = Line(address)
        self._log = NatsLog(self._line, address)
        self._documents = NatsDocuments(self._line, address)

    async def open(self) -> None:
        """Connect; make the stream and the bucket, if they are not there."""
        shared = {"storage": "file", "discard": "new", "num_replicas": self._address.replicas}
        stream = {
            **shared,
            "name": self._address.log_stream,
            "subjects": [self._address.log_subject],
            "duplicate_window": DUPLICATES_SECONDS * 10**9,
            "allow_direct": True,
            "allow_atomic": True,
            "metadata": {"raydispatch.format": FORMAT, "raydispatch.name": self._address.name},
        }
        bucket = {
            **shared,
            "name": f"KV_{self._address.bucket}",
            "subjects": [f"$KV.{self._address.bucket}.>"],
            "max_msgs_per_subject": 1,
            "deny_delete": True,
            "allow_rollup_hdrs": True,
        }
        found = await self._found_or_made(stream)
        await self._found_or_made(bucket)
        self._check(found.get("metadata") or {})
        await self._log.open(is_atomic=found.get("allow_atomic", False))

    async def append(self, batches: Sequence[Batch], changes: Sequence[Change] = ()) -> list[int]:
        """Keep all of them: the log first, then the documents."""
        check_batches(batches)
        check_changes(changes)
        firsts = await self._log.append(batches)
        await self._documents.write(changes)
        return firsts

    async def read(self, offset: int, most_bytes: int = 1_000_000) -> list[Stored]:
        """Batches from this offset on."""
        return await self._log.read(offset, most_bytes)

    async def head(self) -> int:
        """The offset that the next message will get."""
        return await self._log.head()

    async def first(self) -> int:
        """The oldest offset kept; the head, if nothing is."""
        return await self._log.first()

    async def offset_at(self, at: float) -> int:
        """The first message that was appended at this time or later; the head, if there is none."""
        return await self._log.offset_at(at)

    async def trim(self, before: int) -> None:
        """Let go of older batches."""
        await self._log.trim(before)

    async def write(self, changes: Sequence[Change]) -> None:
        """Write and delete documents, one after the other."""
        check_changes(changes)
        await self._documents.write(changes)

    async def documents(self, bucket: str, after: str = "", most: int = 1_000) -> list[tuple[str, bytes]]:
        """Documents of a bucket in the order of their keys."""
        return await self._documents.page(bucket, after, most)

    async def close(self) -> None:
        """Hang up."""
        await self._line.close()

    async def _found_or_made(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration of the stream."""
        name = config["name"]
        try:
            try:
                answer = await self._line.api(f"STREAM.INFO.{name}")
            except Refused as error:
                if error.status != _NOT_FOUND:
                    raise
                answer = await self._line.api(f"STREAM.CREATE.{name}", config)
        except Refused as error:
            raise self._not_made(error, name) from None
        except NobodyListens as error:
            raise InvalidParameter(f"{error} {_ENABLE}") from None
        found: dict[str, Any] = answer["config"]
        if found["num_replicas"] != self._address.replicas:
            _log.warning(
                "journal has another number of replicas",
                extra={"stream": name, "replicas": found["num_replicas"], "wanted": self._address.replicas},
            )
        return found

    def _not_made(self, error: Refused, stream: str) -> Exception:
        if error.code in _NOT_ENABLED:
            return InvalidParameter(f"JetStream is not enabled at {self._address.shown}. {_ENABLE}")
        if error.status >= 500 and error.code != _NOT_CLUSTERED:
            return error.as_unavailable()
        return InvalidParameter(f"The stream {stream} cannot be made at {self._address.shown}: {error.reason}.")

    def _check(self, metadata: dict[str, str]) -> None:
        spoken = metadata.get("raydispatch.format")
        if spoken != FORMAT:
            raise JournalCorrupt(
                f"The stream {self._address.log_stream} has format {spoken}, and this version of raydispatch reads "
                f"{FORMAT}: open it with the version that wrote it, or choose another prefix."
            )

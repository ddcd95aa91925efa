"""The documents of a journal as a key-value bucket: the newest value of each key, and nothing of what was deleted."""

import base64
from bisect import bisect_right
from collections.abc import Sequence

from nats.aio.msg import Msg

from raydispatch.delivery.journal import Change
from raydispatch.journals.nats_address import NatsAddress, safe, unsafe
from raydispatch.journals.nats_line import Letter, Line, Refused, accepted

_NOT_FOUND = 404


class NatsDocuments:
    """Buckets of ours are parts of the subjects of one bucket of the server."""

    def __init__(self, line: Line, address: NatsAddress) -> None:
        self._line = line
        self._stream = f"KV_{address.bucket}"
        self._subject = f"$KV.{address.bucket}"
        self._keys: dict[str, list[str]] = {}
        self._version = 0

    async def write(self, changes: Sequence[Change]) -> None:
        """Write and delete. If it fails, some may have been written; to ask again is no repetition."""
        newest = {(bucket, key): value for bucket, key, value in changes}
        # A purge leaves nothing behind. The tombstones of a bucket would stay for ever, one for each dead letter.
        letters = [
            Letter(self._place(*place), value)
            if value is not None
            else Letter(f"$JS.API.STREAM.PURGE.{self._stream}", f'{{"filter":"{self._place(*place)}"}}'.encode())
            for place, value in newest.items()
        ]
        try:
            for answer in await self._line.ask_all(letters):
                accepted(answer)
        except Refused as error:
            raise error.as_unavailable() from None
        finally:
            self._version += 1
            for bucket, _ in newest:
                self._keys.pop(bucket, None)

    async def page(self, bucket: str, after: str, most: int) -> list[tuple[str, bytes]]:
        """So many documents behind a key, in the order of the keys."""
        # A listing begins with what is there now; its further pages go on with that, unless we write meanwhile.
        keys = self._keys.get(bucket) if after else None
        if keys is None:
            version = self._version
            keys = await self._all_keys(bucket)
            if version == self._version:
                self._keys[bucket] = keys
        start = bisect_right(keys, after) if after else 0
        found: list[tuple[str, bytes]] = []
        while start < len(keys) and len(found) < most:
            portion = keys[start : start + most - len(found)]
            found += await self._values(bucket, portion)
            start += len(portion)
        return found

    async def _all_keys(self, bucket: str) -> list[str]:
        keys: list[str] = []
        total = 1
        while len(keys) < total:
            request = {"subjects_filter": f"{self._subject}.{safe(bucket)}.*", "offset": len(keys)}
            try:
                answer = await self._line.api(f"STREAM.INFO.{self._stream}", request)
            except Refused as error:
                raise error.as_unavailable() from None
            subjects: dict[str, int] = answer["state"].get("subjects") or {}
            keys += (unsafe(subject.rpartition(".")[2]) for subject in subjects)
            total = answer.get("total", 0) if subjects else 0
        return sorted(keys)

    async def _values(self, bucket: str, keys: Sequence[str]) -> list[tuple[str, bytes]]:
        # From the server that leads: any other one may not know yet what was written last.
        verb = f"$JS.API.STREAM.MSG.GET.{self._stream}"
        letters = [Letter(verb, f'{{"last_by_subj":"{self._place(bucket, key)}"}}'.encode()) for key in keys]
        answers = await self._line.ask_all(letters)
        return [(key, value) for key, value in zip(keys, map(_value, answers), strict=True) if value is not None]

    def _place(self, bucket: str, key: str) -> str:
        return f"{self._subject}.{safe(bucket)}.{safe(key)}"


def _value(answer: Msg) -> bytes | None:
    try:
        return base64.b64decode(accepted(answer)["message"].get("data", ""))
    except Refused as error:
        if error.status == _NOT_FOUND:
            return None  # Deleted since the keys were listed.
        raise error.as_unavailable() from None

"""The stream of a log: batches as messages, by their place, and the place of an offset."""

import base64
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import uuid4

from raydispatch.delivery.journal import Batch
from raydispatch.errors import JournalCorrupt
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_line import Letter, Line, Refused
from raydispatch.journals.nats_marks import Mark, Marks

FIRST, COUNT, AT, WRITER = "Raydispatch-First", "Raydispatch-Count", "Raydispatch-At", "Raydispatch-Writer"
"""Headers of a batch."""
BATCH_ID = "Nats-Msg-Id"
"""By which servers know what they have already."""

_MOST_MESSAGES = 1_000
_NOT_FOUND = 404


class Entry(NamedTuple):
    """A batch as it is in the stream."""

    mark: Mark
    writer: str
    batch_id: str
    data: bytes


class Missing(JournalCorrupt):
    """A message is not there: somebody has deleted it, or it was let go of just now."""

    def __init__(self, sequence: int, stream: str) -> None:
        super().__init__(sequence, stream)
        self.sequence = sequence
        self.stream = stream

    def __str__(self) -> str:
        return (
            f"The message {self.sequence} of the stream {self.stream} is missing: somebody has deleted it. Restore the "
            "stream from a backup, or delete it and its bucket to begin with an empty journal."
        )


class Stream:
    """Reads. Where the answer of a server that may lag behind is not enough, it asks the one that leads."""

    def __init__(self, line: Line, address: NatsAddress) -> None:
        self._line = line
        self._name = address.log_stream
        self._marks = Marks()

    def remember(self, mark: Mark) -> None:
        """One that was just written."""
        self._marks.add(mark)

    def forget_before(self, sequence: int) -> None:
        """Those up to this one are gone."""
        self._marks.forget_before(sequence)

    async def entries(self, sequence: int, most_bytes: int) -> list[Entry]:
        """From this one on, without a gap, together as large as wanted, or a little larger."""
        request = f'{{"seq":{sequence},"batch":{_MOST_MESSAGES},"max_bytes":{most_bytes}}}'.encode()
        answers = await self._line.ask_for_many(Letter(f"$JS.API.DIRECT.GET.{self._name}", request))
        found = [
            self._entry(int(headers["Nats-Sequence"]), headers, answer.data)
            for answer in answers
            if (headers := answer.headers) is not None
        ]
        found = found or [await self.entry(sequence)]
        if found[0].mark.sequence > sequence:
            raise Missing(sequence, self._name)
        found = found[: _connected([entry.mark for entry in found], self._name)]
        for entry in (found[0], found[-1]):
            self._marks.add(entry.mark)
        return found

    async def entry(self, sequence: int) -> Entry:
        """This one, from the server that leads."""
        try:
            answer = await self._line.api(f"STREAM.MSG.GET.{self._name}", {"seq": sequence})
        except Refused as error:
            if error.status == _NOT_FOUND:
                raise Missing(sequence, self._name) from None
            raise error.as_unavailable() from None
        message = answer["message"]
        entry = self._entry(sequence, _headers(message), base64.b64decode(message.get("data", "")))
        self._marks.add(entry.mark)
        return entry

    async def find(self, is_behind: Callable[[Mark], bool], first: int, last: int) -> Mark:
        """The first one of which this is true, out of these. It is true of the last one, and of all behind any."""
        while True:
            before, behind = self._marks.around(is_behind)
            low = first if before is None else max(first, before.sequence + 1)
            high = last if behind is None else min(last, behind.sequence)
            if low >= high:
                return behind if behind is not None and behind.sequence == high else (await self.entry(high)).mark
            await self.entry((low + high) // 2)

    async def sequence_of(self, offset: int, first: int, last: int) -> int:
        """Where the batch is that has this offset, or the first one behind it."""
        before, _ = self._marks.around(lambda mark: mark.end > offset)
        if before is not None and before.end == offset:
            return before.sequence + 1  # As when one is read after the other.
        return (await self.find(lambda mark: mark.end > offset, first, last)).sequence

    def _entry(self, sequence: int, headers: Mapping[str, Any], data: bytes) -> Entry:
        try:
            first, count, at = int(headers[FIRST]), int(headers[COUNT]), float(headers[AT])
            return Entry(Mark(sequence, first, first + count, at), headers[WRITER], headers[BATCH_ID], data)
        except (KeyError, ValueError):
            raise JournalCorrupt(
                f"The message {sequence} of the stream {self._name} is no batch: something else writes there, too."
            ) from None


def _connected(marks: Sequence[Mark], stream: str) -> int:
    """How many of them follow each other. Some may have been let go of between two answers."""
    for position, (one, other) in enumerate(pairwise(marks), 1):
        if other.sequence != one.sequence + 1:
            return position
        if other.first != one.end:
            raise JournalCorrupt(f"In the stream {stream}, offset {one.end} is followed by {other.first}.")
    return len(marks)


def letters_of(batches: Sequence[Batch], marks: Sequence[Mark], writer: str, subject: str) -> list[Letter]:
    """Batches on their way to the places of these marks. For the server, they are one: it keeps all, or none."""
    letters = []
    together = uuid4().hex
    for number, (batch, mark) in enumerate(zip(batches, marks, strict=True), 1):
        headers = {
            BATCH_ID: batch.batch_id,
            FIRST: str(mark.first),
            COUNT: str(batch.count),
            AT: repr(mark.at),
            WRITER: writer,
        }
        if number == 1:
            headers["Nats-Expected-Last-Sequence"] = str(mark.sequence - 1)
        if len(batches) > 1:
            headers |= {"Nats-Batch-Id": together, "Nats-Batch-Sequence": str(number)}
        if 1 < number == len(batches):
            headers["Nats-Batch-Commit"] = "1"
        letters.append(Letter(subject, batch.data, headers))
    return letters


def _headers(message: Mapping[str, str]) -> dict[str, str]:
    lines = base64.b64decode(message.get("hdrs", "")).decode(errors="replace").split("\r\n")
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

"""What no journal takes, said the same way by all of them, before anything is kept."""

from collections.abc import Sequence

from raydispatch.delivery.journal import Batch, Change
from raydispatch.errors import InvalidParameter


def check_batches(batches: Sequence[Batch]) -> None:
    """Refuse a batch without messages: it would have an offset that is another one's, too."""
    for batch in batches:
        if batch.count < 1:
            raise InvalidParameter(f"The batch {batch.batch_id} has {batch.count} messages: each has at least one.")


def check_changes(changes: Sequence[Change]) -> None:
    """Refuse names that cannot be stored, and the empty key, behind which a listing begins."""
    for change in changes:
        if not change.key:
            raise InvalidParameter(f"A document of the bucket '{change.bucket}' has no key.")
        for name in (change.bucket, change.key):
            try:
                name.encode()
            except UnicodeEncodeError:
                raise InvalidParameter(f"{name!r} cannot be the name of a document: it is no valid text.") from None


def until_full(sizes: Sequence[int], most_bytes: int) -> int:
    """How many of these go together: at least one, if there is one."""
    total = 0
    for position, size in enumerate(sizes):
        total += size
        if position and total > most_bytes:
            return position
    return len(sizes)

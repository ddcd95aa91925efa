import pytest

from raydispatch.delivery.journal import Batch, Change
from raydispatch.errors import InvalidParameter
from raydispatch.journals.checking import check_batches, check_changes, until_full


def test_what_can_be_kept_passes() -> None:
    check_batches([Batch(b"", 1, "a"), Batch(b"x", 1_000, "b")])
    check_changes([Change("", "key", b""), Change("b", "\0 😀", None)])


def test_a_batch_without_messages_is_named() -> None:
    with pytest.raises(InvalidParameter, match="The batch two has 0 messages: each has at least one"):
        check_batches([Batch(b"", 1, "one"), Batch(b"", 0, "two")])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change("bucket", "", b""), "A document of the bucket 'bucket' has no key"),
        (Change("bucket", "\udcff", b""), r"'\\udcff' cannot be the name"),
        (Change("\udcff", "key", None), r"'\\udcff' cannot be the name"),
    ],
)
def test_names_that_cannot_be_kept_are_named(change: Change, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        check_changes([Change("b", "fine", b""), change])


@pytest.mark.parametrize(
    ("sizes", "most_bytes", "count"),
    [([], 10, 0), ([20], 10, 1), ([20, 1], 10, 1), ([5, 5], 10, 2), ([5, 5, 1], 10, 2), ([5, 0, 5, 0, 1], 10, 4)],
)
def test_a_page_is_full_before_it_is_too_large_but_never_empty(sizes: list[int], most_bytes: int, count: int) -> None:
    assert until_full(sizes, most_bytes) == count

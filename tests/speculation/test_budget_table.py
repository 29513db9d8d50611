"""--draft-len-by-batch: how it is spelled, and what it means for a batch."""

import pytest

from engine.speculation.batch_table import NO_TABLE, parse_batch_table

TABLE = parse_batch_table("1:5, 8:3,32:1,64:0")


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(1, 5), (7, 5), (8, 3), (31, 3), (32, 1), (63, 1), (64, 0), (4096, 0)]
)
def test_the_last_entry_that_the_batch_reaches_decides(num_rows: int, expected: int) -> None:
    assert TABLE.most(num_rows, 7) == expected


def test_a_table_shortens_and_never_lengthens() -> None:
    assert TABLE.most(1, 2) == 2
    assert NO_TABLE.most(9, 4) == 4


def test_batches_smaller_than_the_first_entry_are_not_limited() -> None:
    table = parse_batch_table("4:0")
    assert [table.most(size, 6) for size in (1, 3, 4, 5)] == [6, 6, 0, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not BATCH_SIZE:DRAFT_TOKENS"),
        ("1:5,", "'' is not BATCH_SIZE:DRAFT_TOKENS"),
        ("5", "'5' is not BATCH_SIZE:DRAFT_TOKENS"),
        ("1:-2", "'1:-2' is not BATCH_SIZE:DRAFT_TOKENS"),
        ("1:2:3", "'1:2:3' is not BATCH_SIZE:DRAFT_TOKENS"),
        ("1:٣", "is not BATCH_SIZE:DRAFT_TOKENS"),
        ("0:5", "0 does not fit"),
        ("1:5,1:3", "1 does not fit"),
        ("8:5,4:3", "4 does not fit"),
        ("1:65", "65 draft tokens are more than 64"),
    ],
)
def test_what_is_no_table_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="--draft-len-by-batch") as caught:
        parse_batch_table(text)
    assert words in str(caught.value)


def test_an_entry_that_the_drafter_can_never_use_is_refused() -> None:
    parse_batch_table("1:5").check(5)
    with pytest.raises(ValueError, match=r"--draft-len-by-batch 1:5 allows more .* at most 4 tokens"):
        TABLE.check(4)

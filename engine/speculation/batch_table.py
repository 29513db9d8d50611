"""The operator's word on draft lengths: the more rows share a step, the fewer tokens each may draft.

Owns the spelling of --draft-len-by-batch and what it means; never sees a row. Read by engine.config (spelling),
engine.intake (against the drafter's length) and engine.draft_lengths (every step). Without torch.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass

MAX_DRAFT_LEN = 64
_ENTRY = re.compile(r"\s*(\d{1,6}):(\d{1,6})\s*", re.ASCII)


@dataclass(frozen=True)
class BatchTable:
    """Most draft tokens per row, by how many rows decode in the step. Smaller batches than the first are not limited."""

    sizes: tuple[int, ...]  # batch sizes, rising
    lengths: tuple[int, ...]  # from sizes[i] rows on: at most lengths[i] draft tokens each

    def most(self, num_rows: int, otherwise: int) -> int:
        """Most draft tokens for one of `num_rows` rows; `otherwise` where the table says nothing."""
        found = bisect_right(self.sizes, num_rows)
        return min(self.lengths[found - 1], otherwise) if found else otherwise

    def check(self, max_draft_len: int) -> None:
        """Raise ValueError when an entry allows more than the drafter ever drafts: it would be ignored."""
        for size, length in zip(self.sizes, self.lengths, strict=True):
            if length > max_draft_len:
                raise ValueError(
                    f"--draft-len-by-batch {size}:{length} allows more than this drafter drafts: at most "
                    f"{max_draft_len} tokens (--num-draft-tokens)"
                )


NO_TABLE = BatchTable((), ())


def parse_batch_table(text: str) -> BatchTable:
    """Read "1:5,8:3,64:0" (batch size at least : most draft tokens). Raises ValueError with a sentence."""
    sizes: list[int] = []
    lengths: list[int] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"--draft-len-by-batch: {entry!r} is not BATCH_SIZE:DRAFT_TOKENS, as in 1:5,8:3,64:0")
        size, length = int(match[1]), int(match[2])
        if size < 1 or (sizes and size <= sizes[-1]):
            raise ValueError(f"--draft-len-by-batch: batch sizes rise and begin at 1 or above; {size} does not fit")
        if length > MAX_DRAFT_LEN:
            raise ValueError(f"--draft-len-by-batch: {length} draft tokens are more than {MAX_DRAFT_LEN}, the most")
        sizes.append(size)
        lengths.append(length)
    return BatchTable(tuple(sizes), tuple(lengths))

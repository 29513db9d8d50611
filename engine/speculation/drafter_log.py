"""What a start says about a drafter that has weights of its own: all it settled on, and what it cannot draft for.

Owns the wording, so that every such drafter's line reads alike; decides nothing. Called by their recipes, once each.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrafterSummary:
    """A checked drafter, before its weights are loaded."""

    speculator: str
    path: Path
    conventions: str  # key=value pairs of the drafter's own
    context_length: int  # tokens; the longest text it was made for
    weight_bytes: int


def log_drafter(summary: DrafterSummary, max_model_len: int) -> None:
    """`max_model_len` (tokens): the longest sequence there can be, which may be longer than the drafter can read."""
    logger.info(
        "drafter speculator=%s path=%s %s context=%d weight_mib=%d",
        summary.speculator, summary.path, summary.conventions, summary.context_length, summary.weight_bytes >> 20,
    )  # fmt: skip
    if summary.context_length < max_model_len:
        logger.warning(
            "the drafter was made for shorter texts: sequences longer than that run without drafts "
            "speculator=%s context=%d max_model_len=%d",
            summary.speculator, summary.context_length, max_model_len,
        )  # fmt: skip


def vocabulary_line(drafted: int, of: int, *, has_embedding: bool, has_head: bool) -> str:
    """Tokens it can draft of the target's, and which of the two ends are its own rather than the target's."""
    own = [name for name, is_own in (("embedding", has_embedding), ("head", has_head)) if is_own]
    return f"vocabulary={drafted} of {of} own={'+'.join(own) or 'nothing'}"

"""Two tokenizers as one vocabulary: which tokens of a draft model are tokens of the target, and what it reads for others.

Owns the comparison of token strings, the map of ids both ways, and the refusal of a draft model that shares too little.
Never tokenises text. Made by `draft_model` before any weights are loaded; applied by `TokenMap` on the device.
Source: token-level intersection (Timor et al., arXiv 2502.05202, algorithm 4): the draft model chooses among the shared
tokens only. What it reads in place of a token it lacks is ours, see `_stand_in`. V = target logits, Vd = draft logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from protocol.model_files import ModelFiles, Vocabulary, read_eos_token_ids, read_vocabulary

# Of the smaller vocabulary's tokens. Two tokenizers of one language share most of the frequent ones; when under a quarter
# is common, one of them was made for something else, and a draft would end at nearly every token.
LEAST_SHARED = 0.25

_SPACE_MARKS = ("Ġ", "▁")  # byte-level and metaspace spelling of a leading space


@dataclass(frozen=True)
class SharedVocabulary:
    """Ids below belong together by position; ascending target ids. `is_same`: every shared id is the same on both sides."""

    target_size: int  # V
    draft_size: int  # Vd
    target_ids: tuple[int, ...] = field(repr=False)
    draft_ids: tuple[int, ...] = field(repr=False)
    fed: tuple[int, ...] = field(repr=False)  # V: what the draft model reads for each token of the target
    is_same: bool

    def __str__(self) -> str:
        if self.is_same:
            return f"the target's ({len(self.target_ids)} tokens)"
        return f"{len(self.target_ids)} tokens shared of {self.draft_size} here and {self.target_size} there"


def share_vocabulary(target: ModelFiles, draft: ModelFiles, target_size: int, draft_size: int) -> SharedVocabulary:
    """Compare the two. `target_size`, `draft_size`: how many logits the models give, padding included.

    Equal strings under equal ids are the same tokenizer whatever the padding; then padding ids count as shared too. Raises
    ValueError naming --draft-model when too few tokens are common, `ModelFilesError` for files without a vocabulary.
    """
    ours, theirs = read_vocabulary(target), read_vocabulary(draft)
    fallback = next((token for token in read_eos_token_ids(draft) if token < draft_size), 0)
    if ours.hash == theirs.hash:
        common = min(target_size, draft_size)
        fed = (*range(common), *(fallback,) * (target_size - common))
        return SharedVocabulary(target_size, draft_size, tuple(range(common)), tuple(range(common)), fed, is_same=True)
    target_ids, draft_ids = _ids_by_text(ours, target_size), _ids_by_text(theirs, draft_size)
    shared = sorted((target_id, draft_ids[text]) for text, target_id in target_ids.items() if text in draft_ids)
    smaller = min(len(target_ids), len(draft_ids))
    if len(shared) < LEAST_SHARED * smaller:
        raise ValueError(
            f"--draft-model {draft.path}: only {len(shared)} of the {smaller} tokens of the smaller vocabulary are also "
            f"tokens of the other; at least {LEAST_SHARED:.0%} must be, or hardly any draft would be accepted"
        )
    return SharedVocabulary(
        target_size,
        draft_size,
        tuple(target_id for target_id, _ in shared),
        tuple(draft_id for _, draft_id in shared),
        _fed(ours, target_size, draft_ids, fallback),
        is_same=False,
    )


class TokenMap:
    """The shared vocabulary where the draft model runs."""

    def __init__(self, shared: SharedVocabulary, device: torch.device) -> None:
        self.target_size = shared.target_size  # V
        is_identity = shared.is_same and shared.draft_size >= shared.target_size
        self._fed = None if is_identity else torch.tensor(shared.fed, dtype=torch.int64, device=device)
        ids = None if shared.is_same else (shared.target_ids, shared.draft_ids)
        self._ids = None if ids is None else torch.tensor(ids, dtype=torch.int64, device=device)  # [2, shared]

    def fed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Int64 [T] of the target to what the draft model reads for them."""
        return tokens if self._fed is None else self._fed[tokens]

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits [n, Vd] as [n, V]: -inf for what the draft model cannot say."""
        size = self.target_size
        if self._ids is not None:
            spread = logits.new_full((logits.shape[0], size), -torch.inf)
            return spread.index_copy_(1, self._ids[0], logits.index_select(1, self._ids[1]))
        missing = size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, :size]


def _ids_by_text(vocabulary: Vocabulary, size: int) -> dict[bytes, int]:
    """What each token below `size` stands for, as bytes; of two that stand for the same the first."""
    spell = _Spelling(vocabulary.tokens)
    ids: dict[bytes, int] = {}
    for token_id, token in enumerate(vocabulary.tokens[:size]):
        if token:
            ids.setdefault(spell.text(token), token_id)
    return ids


def _fed(target: Vocabulary, target_size: int, draft_ids: Mapping[bytes, int], fallback: int) -> tuple[int, ...]:
    spell = _Spelling(target.tokens)
    named = [_stand_in(spell.text(token), draft_ids, fallback) if token else fallback for token in target.tokens]
    return (*named, *(fallback,) * (target_size - len(named)))[:target_size]


def _stand_in(text: bytes, draft_ids: Mapping[bytes, int], fallback: int) -> int:
    """The draft model's token for `text`, or for the longest end of it that is a token.

    One token must stay one token, since both models share positions. The end of a word says more about what follows
    than an unknown-token symbol, and it is what the draft model's own tokenizer would have ended on.
    """
    return next((found for start in range(len(text)) if (found := draft_ids.get(text[start:])) is not None), fallback)


class _Spelling:
    """How a vocabulary writes bytes: byte-level (each byte a printable character) or metaspace (a mark for the space)."""

    def __init__(self, tokens: Sequence[str | None]) -> None:
        byte_level, metaspace = (
            sum(token is not None and token.startswith(mark) for token in tokens) for mark in _SPACE_MARKS
        )
        self._bytes = _BYTE_LEVEL if byte_level > metaspace else None

    def text(self, token: str) -> bytes:
        """A special token whose name cannot be read this way stands for its name."""
        if self._bytes is not None:
            values = [self._bytes.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode("utf-8", "surrogatepass")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace(_SPACE_MARKS[1], " ").encode("utf-8", "surrogatepass")


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the other bytes follow from U+0100 on (GPT-2's choice)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()

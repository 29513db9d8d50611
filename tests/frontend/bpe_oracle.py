"""Byte-level BPE written from its definition: slow, short, and sharing no code with the tokenizers library.

Text is cut by llama.cpp's regular expressions for the pre-tokenizer (src/llama-vocab.cpp, llm_tokenizer_bpe), each piece
becomes bytes in GPT-2's spelling, and the pair with the lowest merge rank is joined until none is left.
"""

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import regex

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_LLAMA3],
    "qwen2": [_LLAMA3.replace("{1,3}", "")],
}


class BpeOracle:
    def __init__(self, tokens: Sequence[str], merges: Sequence[str], specials: Sequence[str], pre: str) -> None:
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.specials = sorted(specials, key=len, reverse=True)
        self.pre = pre
        self.spelling = _spelling()

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        pattern = "|".join(regex.escape(special) for special in self.specials)
        pieces = regex.split(f"({pattern})", text) if parse_special and pattern else [text]
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            ids += [self.ids[piece]] if index % 2 else self._encode_plain(piece)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        words = [unicodedata.normalize("NFC", text) if self.pre == "qwen2" else text]
        for pattern in SPLITS[self.pre]:
            words = [part for word in words for part in _cut(pattern, word)]
        return [token_id for word in words for token_id in self._merge(word)]

    def _merge(self, word: str) -> list[int]:
        # A byte that the vocabulary lacks is dropped before merging.
        parts = [self.spelling[byte] for byte in word.encode() if self.spelling[byte] in self.ids]
        whole = "".join(parts)
        if self.pre == "llama-bpe" and whole in self.ids:
            return [self.ids[whole]]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, len(self.ranks)), index) for index, pair in enumerate(pairwise(parts))]
            rank, index = min(ranked)
            if rank == len(self.ranks):
                break
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        return [self.ids[part] for part in parts]


def _cut(pattern: str, text: str) -> list[str]:
    """`text` cut at the matches of `pattern`; what lies between matches is kept as pieces of its own."""
    return [part for part in regex.split(f"({pattern})", text, flags=regex.V0) if part]


def _spelling() -> dict[int, str]:
    kept = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(moved)}

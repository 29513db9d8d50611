"""Text to token ids and token ids to bytes, for the one model a frontend serves.

Owns the tokenizer and the policy for control tokens typed by people. Never holds the state of a request: everything here
is read-only after construction, so worker threads may share it. Called by `frontend.text` and the detokeniser.

Control tokens. `special` tokens (GGUF type CONTROL, `special: true` in tokenizer.json) may be written by templates and by
people. `encode` parses them, as vLLM does for /v1/completions; `encode_guarded` parses only those the template wrote.
Added tokens that are not special (`<think>`, `<tool_call>`) are ordinary text with one id and are always parsed.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from frontend.gguf_tokenizer import build_from_gguf
from protocol.model_files import ModelFiles, ModelFilesError, read_eos_token_ids, read_vocabulary

_METASPACE = "▁"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class EncodingError(ValueError):
    """Text that cannot be encoded; the message says why."""


class Tokenizer:
    """One model's tokenizer. `eos_token_ids` and `special_token_ids` come from the model's files."""

    def __init__(self, files: ModelFiles, engine: Engine) -> None:
        """`engine`: the tokenizers library's object for `files`; it must not be changed afterwards."""
        vocabulary = read_vocabulary(files)
        self.vocab_size = vocabulary.size  # logits of the model
        self.vocabulary_hash = vocabulary.hash
        self.eos_token_ids = read_eos_token_ids(files)
        self._engine = engine
        added = engine.get_added_tokens_decoder()
        self._specials = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(self._specials.values())
        self._guard = _Guard(self._specials)
        self._guarded_engine, self._guarded_ids = _guarded_engine(engine, added, self._guard)
        self.tokens = vocabulary.tokens  # by id, as the files spell them
        contents = {token_id: token.content for token_id, token in added.items()}
        self._bytes = _byte_table(files, _decoder_kinds(engine), vocabulary.tokens, contents)
        self._length_bound = None if _may_shorten(engine) else _LengthBound(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are parsed. Adds BOS where the model wants it.

        Bytes that the vocabulary has no token for are dropped, as in the library and in llama.cpp: the embedded model
        lacks six control characters and planes 4 to 11, so a text may have no tokens. Releases the interpreter lock
        while it works (1 MB takes about 1 s). Raises `EncodingError`.
        """
        return _encode(self._engine, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` in which special tokens are nothing but text. Adds no BOS. Raises `EncodingError`."""
        return self._encode_guarded_text(text)

    def shield(self, text: str) -> str:
        """`text` with every special token replaced by a mark that only `encode_guarded` understands."""
        return self._guard.shield(text)

    def encode_guarded(self, text: str) -> list[int]:
        """Token ids of a rendered template: special tokens are parsed, except those that went through `shield`.

        Adds no BOS: templates write it themselves. Raises `EncodingError`.
        """
        if not self._guard.is_shielding(text):
            return _encode(self._engine, text, add_special_tokens=False)
        return self._encode_guarded_text(self._guard.swap(text))

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))` that costs no tokenising: refuse the hopelessly long at once.

        0 where the model shortens text before it counts: by normalising, or by dropping space around added tokens.
        """
        return 0 if self._length_bound is None else self._length_bound.of(text)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """All bytes joined, then decoded as UTF-8 with U+FFFD for what is none: what the detokeniser gives in steps."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset[int]()
        joined = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in hidden)
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to the text; empty for ids without a token (padding of the vocabulary)."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """One token as text by itself, for log-probs; bytes that are part of a character become U+FFFD, as in vLLM.

        `token_bytes` has the exact bytes.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string (not its text), None where there is none."""
        found = self._engine.token_to_id(token)
        return None if found is None else int(found)

    def _encode_guarded_text(self, text: str) -> list[int]:
        ids = _encode(self._guarded_engine, text, add_special_tokens=False)
        return [self._guarded_ids.get(token_id, token_id) for token_id in ids]


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Build the tokenizer of `files`; the embedded model's takes about 0.5 s. Raises `ModelFilesError`."""
    if files.kind == "gguf":
        return Tokenizer(files, build_from_gguf(files))
    path = files.path / "tokenizer.json"
    read_vocabulary(files)  # gives the sentence where the file is absent or is no tokenizer
    try:
        engine = Engine.from_file(str(path))
    except BaseException as error:
        # The library raises bare Exception for a bad file and, where it panics, something that is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFilesError(f"{path} is not a tokenizer this version can read: {error}") from error
    engine.no_truncation()
    engine.no_padding()
    return Tokenizer(files, engine)


def bad_word_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban for `words`: each as it begins a text and, where one id differs, after a space.

    Source: vLLM SamplingParams.update_from_tokenizer. A word of white space alone gives an empty sequence, which
    `SamplingParams.check` refuses.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        sequences.append(bare)
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(sequences)


class _Guard:
    """Tells special tokens of the template from those of people, with marks nobody can guess.

    Before rendering, `shield` swaps each special token in people's strings for a mark that holds 128 random bits, so the
    template (which may trim, split or compare) sees neither a special token nor any character of one. After rendering,
    every special token in the text is the template's: `swap` turns those into the marks that the guarded engine knows
    as special, and people's marks back into what they typed.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        self._nonce = f"{secrets.randbits(128):039d}"  # digits: a template that changes case cannot change it
        # Longest first: the engine matches the leftmost, then longest special token, and so must this.
        self._tokens = sorted(specials, key=len, reverse=True)
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._any_token = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._any_mark = re.compile(f"\ue002{self._nonce}:(\\d+)\ue003")
        self.marks = {token: f"\ue000{self._nonce}:{number}\ue001" for token, number in self._numbers.items()}

    def shield(self, text: str) -> str:
        return self._any_token.sub(lambda match: f"\ue002{self._nonce}:{self._numbers[match[0]]}\ue003", text)

    def is_shielding(self, text: str) -> bool:
        return self._nonce in text

    def swap(self, text: str) -> str:
        if self._nonce in self._any_mark.sub("", text):
            # Sending a broken mark to the model would let it be read back, and then forged.
            raise EncodingError("the chat template takes apart text in which special tokens were typed")
        guarded = self._any_token.sub(lambda match: self.marks[match[0]], text)
        return self._any_mark.sub(lambda match: self._tokens[int(match[1])], guarded)


class _LengthBound:
    """How few tokens a text can be, from the longest token. For byte-level tokenizers."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._longest = max(len(token) for token in token_bytes)
        single = {token for token in token_bytes if len(token) == 1}
        # A vocabulary may lack bytes its training text never had; text of those has no tokens at all.
        self._without_token = [chr(byte) for byte in range(128) if bytes([byte]) not in single]

    def of(self, text: str) -> int:
        num_bytes = len(text) - sum(text.count(char) for char in self._without_token)
        return -(-num_bytes // self._longest)


def _may_shorten(engine: Engine) -> bool:
    added = engine.get_added_tokens_decoder().values()
    if engine.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return True
    # Beyond ASCII one missing continuation byte could make a character vanish: then no bound is safe.
    spelling = _ByteLevel()
    continuation = (spelling.char_of(byte) for byte in range(0x80, 0xC0))
    return "ByteLevel" not in _decoder_kinds(engine) or any(engine.token_to_id(char) is None for char in continuation)


def _guarded_engine(engine: Engine, added: Mapping[int, AddedToken], guard: _Guard) -> tuple[Engine, dict[int, int]]:
    """An engine that shares `engine`'s model but knows special tokens only by their marks, and its ids to real ids."""
    guarded = Engine(engine.model)
    if engine.normalizer is not None:
        guarded.normalizer = engine.normalizer
    if engine.pre_tokenizer is not None:
        guarded.pre_tokenizer = engine.pre_tokenizer
    marks = guard.marks
    contents = {}
    for token_id, token in sorted(added.items()):
        content = marks[token.content] if token.special else token.content
        contents[content] = token_id
        copy = AddedToken(
            content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and not token.special,
            special=token.special,
        )
        (guarded.add_special_tokens if token.special else guarded.add_tokens)([copy])
    ids_of_guarded = guarded.get_vocab(with_added_tokens=True)
    return guarded, {ids_of_guarded[content]: token_id for content, token_id in contents.items()}


def _encode(engine: Engine, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodingError("the text holds half of a surrogate pair, which is not a character") from error
    # A batch of one: unlike `encode` it lets other threads run (measured: the event loop waits 3 ms, not 4 s).
    ids: list[int] = engine.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _byte_table(
    files: ModelFiles, kinds: set[str], tokens: tuple[str | None, ...], added: Mapping[int, str]
) -> tuple[bytes, ...]:
    """The bytes of every token. Raises `ModelFilesError` for a decoder that is not a mapping from token to bytes."""
    if "ByteLevel" in kinds:
        to_bytes = _ByteLevel().to_bytes
    elif kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        # Strip drops the space that the encoder puts before a whole text; a completion is not a whole text.
        to_bytes = _metaspace_bytes
    else:
        named = ", ".join(sorted(kinds)) or "none"
        raise ModelFilesError(
            f"{files.path}: the tokenizer's decoder ({named}) is not supported; byte-level and metaspace decoders are"
        )
    return tuple(
        added[token_id].encode() if token_id in added else b"" if token is None else to_bytes(token)
        for token_id, token in enumerate(tokens)
    )


def _decoder_kinds(engine: Engine) -> set[str]:
    if engine.decoder is None:
        return set()
    state = json.loads(engine.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return {part["type"] for part in parts}


class _ByteLevel:
    """GPT-2's printable spelling of bytes. Source: openai/gpt-2 encoder.py, bytes_to_unicode."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + index): byte for index, byte in enumerate(others)}
        self._char_of = {byte: char for char, byte in self._byte_of.items()}

    def char_of(self, byte: int) -> str:
        return self._char_of[byte]

    def to_bytes(self, token: str) -> bytes:
        """A token with a character outside the table stands for itself, as in the tokenizers library."""
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode()


def _metaspace_bytes(token: str) -> bytes:
    match = _BYTE_FALLBACK.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_METASPACE, " ").encode()

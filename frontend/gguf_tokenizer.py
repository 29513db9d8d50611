"""A tokenizer of the `tokenizers` library from the metadata of a GGUF file.

Owns the table from GGUF's pre-tokenizer names to what Hugging Face's originals do. Never guesses: a name that is not in
the table is refused, because a wrong split gives a model prompts it never saw. Called by `frontend.tokenizer`.
"""

from dataclasses import dataclass
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from protocol.model_files import ModelFiles, ModelFilesError, read_vocabulary

_CONTROL = 3  # llama_token_type
_USER_DEFINED = 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before BPE. `split_regex` None: GPT-2's own rule, built into the byte-level step."""

    split_regex: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is taken whole
    adds_bos: bool = False  # unless the file says otherwise


# "default" is what converters wrote before `pre` existed; like transformers, we read it as GPT-2.
_PRE_TOKENIZERS = {
    "default": _PreTokenizer(),
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _PreTokenizer(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
    "qwen2": _PreTokenizer(_QWEN2_SPLIT, nfc=True),
}


def build_from_gguf(files: ModelFiles) -> Tokenizer:
    """Raises `ModelFilesError` for a kind of tokenizer, or a pre-tokenizer, that is not supported."""
    metadata = files.header.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFilesError(
            f"{files.path}: GGUF tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2') is; "
            "use the model's Hugging Face directory, which has a tokenizer.json"
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ModelFilesError(
            f"{files.path}: pre-tokenizer {name!r} is not supported ({', '.join(_PRE_TOKENIZERS)} are); "
            "use the model's Hugging Face directory, which has a tokenizer.json"
        )
    tokens, types = _tokens_and_types(files)
    tokenizer = Tokenizer(_model(files, tokens, rule))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_steps(rule))
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    _add_post_processor(files, tokenizer, tokens, rule)
    return tokenizer


def _tokens_and_types(files: ModelFiles) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Token strings and llama_token_type per id; `read_vocabulary` has checked their kinds and lengths."""
    read_vocabulary(files)
    metadata = files.header.metadata
    tokens = cast(tuple[str, ...], metadata["tokenizer.ggml.tokens"])
    types = cast(tuple[int, ...], metadata.get("tokenizer.ggml.token_type", (1,) * len(tokens)))
    return tokens, types


def _model(files: ModelFiles, tokens: tuple[str, ...], rule: _PreTokenizer) -> models.BPE:
    merges = files.header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple) or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise ModelFilesError(f"{files.path}: tokenizer.ggml.merges is missing or holds something other than pairs")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelFilesError(f"{files.path}: two ids of tokenizer.ggml.tokens have the same string")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for left, right in pairs:  # the library panics on what this refuses
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelFilesError(f"{files.path}: the merge of {left!r:.40} and {right!r:.40} does not fit the tokens")
    return models.BPE(vocabulary, pairs, ignore_merges=rule.ignore_merges)


def _steps(rule: _PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    if rule.split_regex is not None:
        return [
            pre_tokenizers.Split(Regex(rule.split_regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [pre_tokenizers.Digits(individual_digits=True), byte_level] if rule.single_digits else [byte_level]


def _add_tokens(tokenizer: Tokenizer, tokens: tuple[str, ...], types: tuple[int, ...]) -> None:
    """Control tokens become special, user-defined ones merely added; both keep their ids, which the model knows."""
    control, user_defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL and token:
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and token:
            user_defined.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _add_post_processor(files: ModelFiles, tokenizer: Tokenizer, tokens: tuple[str, ...], rule: _PreTokenizer) -> None:
    """BOS and EOS around a prompt where the file, or its pre-tokenizer, asks for them."""
    metadata = files.header.metadata
    template, specials = ["$A"], []
    for key, wanted in (("bos", rule.adds_bos), ("eos", False)):
        if not metadata.get(f"tokenizer.ggml.add_{key}_token", wanted):
            continue
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelFilesError(f"{files.path} asks for a {key.upper()} token but names none of its vocabulary")
        token = tokens[token_id]
        template = [token, *template] if key == "bos" else [*template, token]
        specials.append((token, token_id))
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)

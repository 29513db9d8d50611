"""Loading weights: ggml's blocks are dequantised exactly, GGUF and safetensors give one model, broken files are refused."""

import json
import resource
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.model.arch import read_arch
from engine.model.decoder import DecoderModel
from engine.model.dequantize import DEQUANTIZERS, dequantize
from engine.model.weights import load_model
from protocol.gguf import GGMLType
from protocol.model_files import ModelFiles, ModelFilesError, resolve
from tests.tiny import write_tiny_model

CPU = torch.device("cpu")


def load(path: Path) -> DecoderModel:
    kind = "gguf" if path.suffix == ".gguf" else "hf"
    return load_model(ModelFiles(kind, path, "tiny"), torch.float32, CPU)


# ---- dequantisation ----


@pytest.mark.parametrize("kind", list(DEQUANTIZERS), ids=lambda kind: kind.name)
def test_dequantised_blocks_equal_the_gguf_packages(kind: GGMLType):
    """Bit for bit, on random bytes (which hold every scale, infinities and NaN included)."""
    raw = np.random.default_rng(kind.value).integers(0, 256, size=(512, kind.block_bytes), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the package computes with the random NaN and says so
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name]).reshape(-1)
    actual = dequantize(kind, torch.from_numpy(raw)).numpy()
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_values_come_back_near_the_originals(kind: str):
    values = np.random.default_rng(5).standard_normal((8, 256)).astype(np.float32)
    quantised = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    back = dequantize(GGMLType[kind], torch.from_numpy(quantised.reshape(-1, GGMLType[kind].block_bytes)))
    assert np.abs(back.numpy().reshape(values.shape) - values).mean() < (0.02 if kind == "Q8_0" else 0.15)


# ---- GGUF and safetensors are one model ----

_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(path: Path, directory: Path, change: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """The model of a tiny Hugging Face directory as a GGUF file, as llama.cpp's converter would write it."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    family, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if change is not None:
        change(writer)
    for name, tensor in load_file(str(directory / "model.safetensors")).items():
        values = tensor.numpy()
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if family == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleave(values, heads if stem.endswith("q_proj") else kv_heads)
        writer.add_tensor(f"{prefix}{_TO_GGUF[stem]}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_holds_the_weights_of_its_directory(tmp_path: Path, family: str, tied: bool):
    directory = write_tiny_model(tmp_path / "hf", family, seed=21, tied=tied)
    ours, theirs = load(write_gguf(tmp_path / "model.gguf", directory)), load(directory)
    assert replace(ours.arch, norm_eps=theirs.arch.norm_eps) == theirs.arch  # the epsilon is float32 in GGUF
    assert (ours.weights.output is ours.weights.embedding) is tied
    pairs = [(ours.weights.embedding, theirs.weights.embedding), (ours.weights.output, theirs.weights.output)]
    for mine, other in zip(ours.weights.layers, theirs.weights.layers, strict=True):
        for name, value in vars(other).items():
            assert (getattr(mine, name) is None) is (value is None)
            pairs += [] if value is None else [(getattr(mine, name), value)]
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_rope_factors_of_a_gguf_file_divide_the_frequencies(tmp_path: Path):
    directory = write_tiny_model(tmp_path / "hf", "llama", seed=22)
    factors = np.linspace(1, 8, 8).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", directory, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    plain, scaled = load(directory), load(path)
    expected = plain.weights.inverse_frequencies / torch.from_numpy(factors)
    torch.testing.assert_close(scaled.weights.inverse_frequencies, expected)


def test_progress_ends_at_its_total(tmp_path: Path):
    calls: list[tuple[int, int]] = []
    files = resolve(str(write_tiny_model(tmp_path, "llama")))
    load_model(files, torch.float32, CPU, lambda done, total: calls.append((done, total)))
    assert (
        calls[-1][0]
        == calls[-1][1]
        == sum(tensor.numel() * 4 for tensor in load_file(str(tmp_path / "model.safetensors")).values())
    )
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# ---- what is not supported is refused by name ----


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": 5}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "experts"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 100_000}, "layers"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 1 << 20}, "shape"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"head_dim": 15}, "odd"),
        ({"attention_bias": True}, "q_proj.bias"),
    ],
)
def test_configurations_we_do_not_compute_are_refused_by_name(tmp_path: Path, overrides: dict[str, Any], named: str):
    directory = write_tiny_model(tmp_path, "llama")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.update(overrides)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFilesError, match=named) as error:
        load_model(ModelFiles("hf", directory, "tiny"), torch.float32, CPU)
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)


def test_rope_parameters_of_transformers_5_are_read(tmp_path: Path):
    old = read_arch(resolve(str(write_tiny_model(tmp_path / "old", rope_theta=5e5))))
    directory = write_tiny_model(
        tmp_path / "new", rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    assert read_arch(resolve(str(directory))).rope == old.rope


# ---- broken safetensors (A-FILES-2) ----


def _header(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def _with_header(data: bytes, header: object) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + length :]


def _edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header = _header(data)
        edit(header)
        return _with_header(data, header)

    return change


def _set(field: str, value: object) -> Callable[[bytes], bytes]:
    return _edited(lambda header: header["model.norm.weight"].update({field: value}))


def _cut(fraction: Callable[[int, int], int]) -> Callable[[bytes], bytes]:
    """Keep fraction(header bytes, all bytes) bytes."""
    return lambda data: data[: fraction(8 + struct.unpack("<Q", data[:8])[0], len(data))]


BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "four bytes": lambda data: data[:4],
    "half the header": _cut(lambda header, size: header // 2),
    "header only": _cut(lambda header, size: header),
    "half the data": _cut(lambda header, size: (header + size) // 2),
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"\0",
    "header of 2**63": lambda data: struct.pack("<Q", 1 << 63) + data[8:],
    "header of a list": lambda data: _with_header(data, []),
    "no JSON": lambda data: data[:8] + b"\xff" + data[9:],
    "deep JSON": lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no tensors": lambda data: _with_header(data, {}),
    "unknown dtype": _set("dtype", "F99"),
    "unreadable dtype": _set("dtype", "I32"),
    "dtype of the wrong size": _set("dtype", "F16"),
    "negative shape": _set("shape", [-64]),
    "huge shape": _set("shape", [1 << 61, 1 << 61]),
    "no shape": _set("shape", None),
    "other shape": _set("shape", [32, 2]),
    "offsets past the end": _set("data_offsets", [1 << 40, (1 << 40) + 256]),
    "offsets backwards": _set("data_offsets", [256, 0]),
    "overlapping offsets": _set("data_offsets", [0, 256]),
    "offsets of text": _set("data_offsets", ["0", "256"]),
    "one offset": _set("data_offsets", [0]),
    "entry is a number": _edited(lambda header: header.update({"model.norm.weight": 5})),
    "tensor missing": _edited(lambda header: header.update({"model.other.weight": header.pop("model.norm.weight")})),
}


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_broken_safetensors_are_refused_in_one_sentence_and_without_memory(tmp_path: Path, name: str):
    directory = write_tiny_model(tmp_path, "llama")
    path = directory / "model.safetensors"
    path.write_bytes(BREAKS[name](path.read_bytes()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFilesError) as error:
        load(directory)
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({}, "weight_map"),
        ([], "weight_map"),
        ({"model.norm.weight": "../outside.safetensors"}, "outside"),
        ({"model.norm.weight": "/etc/passwd"}, "passwd"),
        ({"model.norm.weight": "absent.safetensors"}, "absent"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, weight_map: object, named: str):
    directory = write_tiny_model(tmp_path, "llama")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(ModelFilesError, match=named):
        load(directory)


def test_pickled_weights_are_refused(tmp_path: Path):
    directory = write_tiny_model(tmp_path, "llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match="pickled"):
        load(directory)


# ---- broken GGUF (A-FILES-1 is protocol.gguf's; here: sound headers of unusable models) ----


def _gguf_change(key: str, value: object) -> Callable[[gguf.GGUFWriter], None]:
    adders = {str: "add_string", int: "add_uint32", float: "add_float32"}
    return lambda writer: getattr(writer, adders[type(value)])(key, value)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.expert_count", 8, "experts"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.rope.dimension_count", 8, "part of each head"),
        ("llama.attention.value_length", 8, "widths"),
        ("llama.attention.key_length", 32, "shape"),
    ],
)
def test_gguf_models_we_do_not_compute_are_refused_by_name(tmp_path: Path, key: str, value: object, named: str):
    directory = write_tiny_model(tmp_path / "hf", "llama")
    path = write_gguf(tmp_path / "m.gguf", directory, _gguf_change(key, value))
    with pytest.raises(ModelFilesError, match=named) as error:
        load(path)
    assert str(path) in str(error.value)


def test_gguf_tensors_of_unreadable_types_and_unknown_names_are_refused(tmp_path: Path):
    directory = write_tiny_model(tmp_path / "hf", "llama")
    extra = np.zeros((2, 4), dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", directory, lambda writer: writer.add_tensor("blk.0.surprise.weight", extra))
    with pytest.raises(ModelFilesError, match="surprise"):
        load(path)
    whole = np.zeros((2, 4), dtype=np.int32)
    path = write_gguf(tmp_path / "i.gguf", directory, lambda writer: writer.add_tensor("blk.0.ids.weight", whole))
    with pytest.raises(ModelFilesError, match="I32"):
        load(path)


def test_a_truncated_gguf_file_is_refused(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", write_tiny_model(tmp_path / "hf", "llama"))
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelFilesError, match="truncated"):
        load(path)

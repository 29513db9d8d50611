"""From files to a `DecoderModel`: which tensors a decoder needs, and filling them one by one.

Owns the names, the shapes and the order of loading; memory never holds more than the model and one tensor. Every needed
tensor is checked against the file's header before anything is allocated. Called by `engine.model_executor`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.model.arch import ArchConfig, read_arch
from engine.model.decoder import DecoderModel, DecoderWeights
from engine.model.gguf_weights import GGUFSource
from engine.model.layers import LayerWeights
from engine.model.rope import inverse_frequencies
from engine.model.safetensors_weights import SafetensorsSource
from protocol.model_files import ModelFiles, ModelFilesError

Progress = Callable[[int, int], None]  # (bytes of the files done, bytes in total)


@dataclass(frozen=True)
class Slot:
    """Where a file's tensor goes: a view into the model's weights, under its Hugging Face name."""

    name: str
    target: torch.Tensor


def load_model(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, on_progress: Progress | None = None
) -> DecoderModel:
    """Read the whole model. Raises `ModelFilesError` with one sentence when the files do not hold it."""
    arch = read_arch(files)
    source = GGUFSource(files, arch) if files.kind == "gguf" else SafetensorsSource(files, arch)
    _check(source, arch, files)
    weights = _allocate(arch, source.rope_factors(), dtype, device)
    done, total = 0, source.num_bytes
    for slot in _slots(arch, weights):
        source.copy(slot.name, slot.target)
        done += source.size(slot.name)
        if on_progress is not None:
            on_progress(done, total)
    return DecoderModel(arch, weights)


def expected_shapes(arch: ArchConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        for part, shape in _layer_shapes(arch).items():
            shapes[f"model.layers.{layer}.{part}"] = shape
    shapes["model.norm.weight"] = (arch.hidden_size,)
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden_size)
    return shapes


def _layer_shapes(arch: ArchConfig) -> dict[str, tuple[int, ...]]:
    hidden, query, kv, ffn = arch.hidden_size, arch.query_size, arch.kv_size, arch.ffn_size
    matrices = {
        "self_attn.q_proj": ((query, hidden), arch.qkv_bias),
        "self_attn.k_proj": ((kv, hidden), arch.qkv_bias),
        "self_attn.v_proj": ((kv, hidden), arch.qkv_bias),
        "self_attn.o_proj": ((hidden, query), arch.out_bias),
        "mlp.gate_proj": ((ffn, hidden), arch.ffn_bias),
        "mlp.up_proj": ((ffn, hidden), arch.ffn_bias),
        "mlp.down_proj": ((hidden, ffn), arch.ffn_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, (shape, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    if arch.qk_norm:
        shapes["self_attn.q_norm.weight"] = (arch.head_dim,)
        shapes["self_attn.k_norm.weight"] = (arch.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _check(source: GGUFSource | SafetensorsSource, arch: ArchConfig, files: ModelFiles) -> None:
    """Refuse missing, misshapen and unknown tensors before a byte is allocated."""
    expected = expected_shapes(arch)
    for name, shape in expected.items():
        found = source.shape(name)
        if found is None:
            raise ModelFilesError(f"{files.path}: the tensor {source.file_name(name)} is missing")
        if found != shape:
            raise ModelFilesError(
                f"{files.path}: the tensor {source.file_name(name)} has shape {found}; the configuration says {shape}"
            )
    unknown = source.unknown(expected)
    if unknown:
        raise ModelFilesError(f"{files.path}: the tensor {unknown[0]} is not part of a {arch.family} model")


def _allocate(
    arch: ArchConfig, rope_factors: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    frequencies = inverse_frequencies(arch.rope, arch.head_dim)
    if rope_factors is not None:
        frequencies = frequencies / rope_factors
    embedding = matrix(arch.vocab_size, arch.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_allocate_layer(arch, dtype, device) for _ in range(arch.num_layers)),
        final_norm=torch.empty(arch.hidden_size, device=device),
        output=embedding if arch.tied else matrix(arch.vocab_size, arch.hidden_size),
        inverse_frequencies=frequencies.to(device),
    )


def _allocate_layer(arch: ArchConfig, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    hidden, qkv = arch.hidden_size, arch.query_size + 2 * arch.kv_size

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def norm(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    return LayerWeights(
        input_norm=norm(hidden),
        qkv=empty(qkv, hidden),
        qkv_bias=empty(qkv) if arch.qkv_bias else None,
        query_norm=norm(arch.head_dim) if arch.qk_norm else None,
        key_norm=norm(arch.head_dim) if arch.qk_norm else None,
        out=empty(hidden, arch.query_size),
        out_bias=empty(hidden) if arch.out_bias else None,
        ffn_norm=norm(hidden),
        gate_up=empty(2 * arch.ffn_size, hidden),
        gate_up_bias=empty(2 * arch.ffn_size) if arch.ffn_bias else None,
        down=empty(hidden, arch.ffn_size),
        down_bias=empty(hidden) if arch.ffn_bias else None,
    )


def _slots(arch: ArchConfig, weights: DecoderWeights) -> Iterator[Slot]:
    yield Slot("model.embed_tokens.weight", weights.embedding)
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_slots(arch, layer):
            yield Slot(f"model.layers.{index}.{name}", target)
    yield Slot("model.norm.weight", weights.final_norm)
    if not arch.tied:
        yield Slot("lm_head.weight", weights.output)


def _layer_slots(arch: ArchConfig, layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
    fused = (
        ("qkv", layer.qkv, layer.qkv_bias, (arch.query_size, arch.kv_size, arch.kv_size)),
        ("out", layer.out, layer.out_bias, (arch.hidden_size,)),
        ("gate_up", layer.gate_up, layer.gate_up_bias, (arch.ffn_size, arch.ffn_size)),
        ("down", layer.down, layer.down_bias, (arch.hidden_size,)),
    )
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for key, weight, bias, sizes in fused:
        for name, target in zip(parts[key], torch.split_with_sizes(weight, sizes), strict=True):
            yield f"{name}.weight", target
        if bias is not None:
            for name, target in zip(parts[key], torch.split_with_sizes(bias, sizes), strict=True):
                yield f"{name}.bias", target
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.ffn_norm
    if layer.query_norm is not None and layer.key_norm is not None:
        yield "self_attn.q_norm.weight", layer.query_norm
        yield "self_attn.k_norm.weight", layer.key_norm

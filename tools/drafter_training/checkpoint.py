"""A trained drafter as a Hugging Face directory, in the layout in which drafters of its kind are published.

Owns the names of tensors and the keys of config.json; what it writes is read by `engine.speculation` like anybody's.
Matrices are written in bfloat16. What the target has itself (embedding, output) is not written. Called by
`tools.train_drafter`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.arch import ArchConfig
from tools.drafter_training.block_model import BlockLayer, DFlashModel, DSparkModel
from tools.drafter_training.medusa_model import MedusaModel
from tools.drafter_training.pair_model import Eagle3Model, MtpModel, PairModel


def write_eagle3(directory: Path, model: Eagle3Model, taps: tuple[int, ...], vocabulary: torch.Tensor) -> None:
    """SafeAILab's layout, without a head: the target's rows of the tokens in d2t."""
    tensors = {
        **{f"midlayer.{name}": tensor for name, tensor in _decoder_layer(model).items()},
        "midlayer.hidden_norm.weight": model.hidden_norm,
        "midlayer.input_layernorm.weight": model.input_norm,
        "norm.weight": model.output_norm,
        "fc.weight": model.fc,
        **_vocabulary_map(vocabulary, model.arch.vocab_size),
    }
    config = {
        **_layer_config(model.arch, num_layers=1),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(vocabulary),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps], "use_aux_hidden_state": True},
    }
    _write(directory, config, tensors)


def write_mtp(directory: Path, model: MtpModel) -> None:
    """speculators' layout: one module, fed with its own output."""
    tensors = {
        **_decoder_layer(model),
        "input_layernorm.weight": model.input_norm,
        "token_layernorm.weight": model.embedding_norm,
        "hidden_layernorm.weight": model.hidden_norm,
        "final_layernorm.weight": model.output_norm,
        "input_proj.weight": model.fc,
    }
    config = {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": _layer_config(model.arch, num_layers=model.arch.num_layers),
    }
    _write(directory, config, {f"mtp_layers.0.{name}": tensor for name, tensor in tensors.items()})


def write_medusa(directory: Path, model: MedusaModel, vocabulary: torch.Tensor) -> None:
    """FasterDecoding's layout, with a vocabulary of its own."""
    tensors: dict[str, torch.Tensor] = {"token_map": vocabulary}
    for head, (weight, bias, output) in enumerate(zip(model.weights, model.biases, model.outputs, strict=True)):
        tensors |= {f"{head}.0.linear.weight": weight, f"{head}.0.linear.bias": bias, f"{head}.1.weight": output}
    config = {
        "model_type": "medusa",
        "medusa_num_heads": len(model.outputs),
        "medusa_num_layers": 1,
        "truncated_vocab_size": len(vocabulary),
    }
    _write(directory, config, tensors)


def write_dflash(directory: Path, model: DFlashModel, taps: tuple[int, ...], vocabulary: torch.Tensor) -> None:
    """z-lab's layout: the anchor's row drafts nothing. A vocabulary of its own is written as speculators writes it."""
    config = {
        **_block_config(model, vocabulary),
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": model.size.mask_token_id, "target_layer_ids": [tap - 1 for tap in taps]},
    }
    _write(directory, config, _block_tensors(model, vocabulary))


def write_dspark(directory: Path, model: DSparkModel, taps: tuple[int, ...], vocabulary: torch.Tensor) -> None:
    """DeepSpec's layout: every row drafts. A vocabulary of its own is written as speculators writes it."""
    config = {
        **_block_config(model, vocabulary),
        "architectures": ["LlamaDSparkModel"],
        "num_anchors": model.size.num_anchors,
        "mask_token_id": model.size.mask_token_id,
        "target_layer_ids": [tap - 1 for tap in taps],
        "markov_rank": model.successors.shape[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    tensors = {
        **_block_tensors(model, vocabulary),
        "markov_head.markov_w1.weight": model.predecessors,
        "markov_head.markov_w2.weight": model.successors,
        "confidence_head.proj.weight": model.confidence,
        "confidence_head.proj.bias": model.confidence_bias,
    }
    _write(directory, config, tensors)


def _block_config(model: DFlashModel, vocabulary: torch.Tensor) -> dict[str, object]:
    config = _layer_config(model.arch, num_layers=len(model.layers))
    config |= {"block_size": model.num_rows, "num_target_layers": model.arch.num_layers}
    return config if len(vocabulary) == model.arch.vocab_size else {**config, "draft_vocab_size": len(vocabulary)}


def _block_tensors(model: DFlashModel, vocabulary: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    tensors |= {"fc.weight": model.fc, "hidden_norm.weight": model.hidden_norm, "norm.weight": model.output_norm}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, BlockLayer)
        own = {**_decoder_layer(layer), "input_layernorm.weight": layer.input_norm}
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    if len(vocabulary) == model.arch.vocab_size:
        return tensors
    return {**tensors, **_vocabulary_map(vocabulary, model.arch.vocab_size)}


def _vocabulary_map(vocabulary: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """Offsets from the drafter's tokens to the target's, and which of the target's are among them."""
    known = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    return {"d2t": (vocabulary - torch.arange(len(vocabulary))).int(), "t2d": known}


def _decoder_layer(model: PairModel | BlockLayer) -> dict[str, torch.Tensor]:
    arch = model.arch
    queries, keys, values = torch.split_with_sizes(model.qkv, (arch.query_size, arch.kv_size, arch.kv_size))
    gate, up = model.gate_up.chunk(2)
    matrices = {
        "self_attn.q_proj": queries,
        "self_attn.k_proj": keys,
        "self_attn.v_proj": values,
        "self_attn.o_proj": model.out,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": model.down,
        "post_attention_layernorm": model.ffn_norm,
    }
    return {f"{name}.weight": tensor for name, tensor in matrices.items()}


def _layer_config(arch: ArchConfig, num_layers: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "max_position_embeddings": arch.context_length,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope.base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _write(directory: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {
        name: (tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in tensors.items()
    }
    save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})

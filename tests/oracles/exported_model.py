"""A loaded target written as a Hugging Face directory, so that a peer which reads no GGUF runs the very same weights, and
drafters completed as vLLM wants them.

Owns the names; writes float32 and no tokenizer: peers are given token ids. Used by `tests.bench.peers`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.model.decoder import DecoderModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export(model: DecoderModel, eos_token_ids: Sequence[int], directory: Path) -> Path:
    """Raises ValueError for a model with what the directory could not say: scaled rotation, biases, norms of heads."""
    arch = model.arch
    if arch.family != "llama" or arch.rope.scaling is not None or arch.qkv_bias or arch.out_bias or arch.ffn_bias:
        raise ValueError(
            f"a {arch.family} model with biases or scaled rotation is not exported: give its own directory"
        )
    config = {
        "architectures": [ARCHITECTURES[arch.family]],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "max_position_embeddings": arch.context_length,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope.base,
        "tie_word_embeddings": arch.tied,
        "eos_token_id": list(eos_token_ids),
        "hidden_act": "silu",
        "dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.float().contiguous().clone() for name, tensor in _tensors(model).items()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def complete(drafter: Path, model: DecoderModel, directory: Path) -> Path:
    """A copy of a drafter for `model`, without what vLLM 0.32.0 would guess wrong.

    It reads SafeAILab's numbers of layers as numbers of hidden states, one too low; gives a drafter that has a reduced
    vocabulary and leaves its head to the target the target's whole head; and drops biases of Medusa heads that config.json
    does not announce. Raises OSError for a drafter whose weights are not in one safetensors file.
    """
    config, tensors = json.loads((drafter / "config.json").read_text()), load_file(drafter / "model.safetensors")
    eagle = config.get("eagle_config", {})
    if "eagle_aux_hidden_state_layer_ids" in eagle:
        eagle["eagle_aux_hidden_state_layer_ids"] = [one + 1 for one in eagle["eagle_aux_hidden_state_layer_ids"]]
    if "d2t" in tensors and "lm_head.weight" not in tensors:
        rows = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        tensors["lm_head.weight"] = model.weights.output[rows].float()
    if "0.0.linear.bias" in tensors:
        config |= {"medusa_fc_bias": True, "hidden_size": model.arch.hidden_size}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _tensors(model: DecoderModel) -> dict[str, torch.Tensor]:
    arch, weights = model.arch, model.weights
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not arch.tied:
        tensors["lm_head.weight"] = weights.output
    for index, layer in enumerate(weights.layers):
        queries, keys, values = layer.qkv.split_with_sizes((arch.query_size, arch.kv_size, arch.kv_size))
        gate, up = layer.gate_up.chunk(2)
        own = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": layer.out,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.ffn_norm,
        }
        tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in own.items()}
    return tensors

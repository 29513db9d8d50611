"""Tiny random models on disk, in the layout of a Hugging Face directory: what every test of a real engine runs on.

Owns the recipe of weights, configuration and tokenizer; never touches a network. `tests.tiny.write_tiny_model` is the
one entry. Weights are scaled so that logits have a spread of about 3 and greedy decoding has no near ties.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Family = Literal["llama", "qwen2", "qwen3"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
EOS_TOKEN_IDS = (2, 0)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MERGES = (  # noqa: SIM905
    "Ġ t|Ġ a|h e|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d|Ġ f|in g|Ġ p|o u|Ġa n|a l|"
    "a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|a s|l e|Ġt h|i on|o m|l l|en t|Ġ n|Ġ l|s t|Ġ re|v e|Ġ e|r o|l y|Ġb e|"
    "Ġ g|Ġ T|c t|Ġ S|i d|o t|Ġ I|u t|e t|Ġ A"
).split("|")


def write_tiny_model(
    directory: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 320,
    num_layers: int = 2,
    context_length: int = 512,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    num_shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Write config.json, generation_config.json, safetensors, tokenizer.json and tokenizer_config.json; return `directory`.

    `vocab_size` >= 259 (3 special tokens and 256 bytes); ids beyond the tokenizer's 320 have weights but no token.
    `config_overrides` replace or add keys of config.json before the weights are drawn (head_dim, attention_bias, ...).
    `num_shards` > 1 writes that many files and model.safetensors.index.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, vocab_size, num_layers, context_length, tied)
    if rope_scaling is not None:
        config["rope_scaling"] = rope_scaling
    config.update(config_overrides)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": list(EOS_TOKEN_IDS), "bos_token_id": 1})
    _write_weights(directory, tiny_weights(config, seed), num_shards)
    _write_json(directory / "tokenizer.json", _tokenizer(vocab_size))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_length,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return directory


def write_noisy_copy(directory: Path, model: Path, noise: float = 0.03, seed: int = 1) -> Path:
    """A model that agrees with `model` most of the time: its files, and its weights with noise relative to their spread."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(seed)
    for path in sorted(directory.glob("*.safetensors")):
        weights = {
            name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.std() * noise
            for name, tensor in load_file(path).items()
        }
        save_file(weights, str(path), metadata={"format": "pt"})
    return directory


def tiny_config(family: Family, vocab_size: int, num_layers: int, context_length: int, tied: bool) -> dict[str, Any]:
    """The config.json of a tiny model: hidden 64, 4 heads over 2 KV heads of 16, feed-forward 128."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
    }
    if family == "qwen3":
        config["head_dim"] = 32  # differs from hidden / heads, as in the real ones
    return config


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 weights under Hugging Face names for `config`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def linear(prefix: str, out: int, inner: int, gain: float, bias: bool) -> None:
        weights[f"{prefix}.weight"] = draw(out, inner, scale=gain / math.sqrt(inner))
        if bias:
            weights[f"{prefix}.bias"] = draw(out, scale=0.3)

    hidden, feed_forward, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
    qkv_bias = config["model_type"] == "qwen2" or bool(config.get("attention_bias"))
    out_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    weights: dict[str, torch.Tensor] = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, scale=0.4)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        linear(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, 1.5, qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, 1.5, qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, 1.5, qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, 2.0, out_bias)
        linear(f"{prefix}.mlp.gate_proj", feed_forward, hidden, 1.5, mlp_bias)
        linear(f"{prefix}.mlp.up_proj", feed_forward, hidden, 1.5, mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, feed_forward, 2.0, mlp_bias)
        norms = ["input_layernorm", "post_attention_layernorm"]
        for name in norms:
            weights[f"{prefix}.{name}.weight"] = 1.0 + draw(hidden, scale=0.1)
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = 1.0 + draw(head_dim, scale=0.1)
    weights["model.norm.weight"] = 1.0 + draw(hidden, scale=0.1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden, scale=0.4)
    return weights


def _write_weights(directory: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(weights, str(directory / "model.safetensors"), metadata=metadata)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        chosen = {name: weights[name] for name in names[shard::num_shards]}
        save_file(chosen, str(directory / file_name), metadata=metadata)
        weight_map.update(dict.fromkeys(chosen, file_name))
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: ids 0..2 special, 3..258 the bytes, then merges."""
    symbols = [*SPECIAL_TOKENS, *_byte_symbols()]
    merges = [tuple(merge.split(" ")) for merge in _MERGES][: max(0, vocab_size - len(symbols))]
    symbols += ["".join(merge) for merge in merges]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: index for index, symbol in enumerate(symbols)},
            "merges": [list(merge) for merge in merges],
        },
    }


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte value, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {value: chr(value) for value in printable}
    others = [value for value in range(256) if value not in symbols]
    symbols.update({value: chr(256 + index) for index, value in enumerate(others)})
    return [symbols[value] for value in range(256)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")

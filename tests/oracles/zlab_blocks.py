"""z-lab's own DFlash layers (PyPI `dflash` 0.1.0) over the files of a drafter of ours.

Owns reading the files into their class and asking it for one block; judges nothing. Loaded only in `.venv-oracles`.
"""

from collections.abc import Sequence
from pathlib import Path

import dflash.model as dflash
import torch
from safetensors.torch import load_file

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from tests.tiny_blocks import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, PublishedBlock
from tests.tiny_drafters import taps_of


def their_model(published: PublishedBlock, arch: ArchConfig, directory: Path) -> dflash.DFlashDraftModel:
    """z-lab's layers with the file's weights, but a head: theirs is always the target's."""
    sliding = published.sliding[: published.num_layers]
    config = dflash.Qwen3Config(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size, intermediate_size=128,
        num_hidden_layers=published.num_layers, num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM, attention_bias=published.attention_bias, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
        layer_types=["sliding_attention" if one else "full_attention" for one in sliding],
    )  # fmt: skip
    config.sliding_window, config.is_causal = published.window, published.says_causal
    config.num_target_layers, config.block_size = arch.num_layers, published.block_size
    layer_ids = [tap - 1 for tap in published.taps]
    config.dflash_config = {"mask_token_id": published.mask_token_id, "target_layer_ids": layer_ids}
    config.dflash_config |= dict(published.extras)
    model = dflash.DFlashDraftModel(config).eval()
    stored = load_file(directory / "model.safetensors")
    backbone = {name: tensor for name, tensor in stored.items() if "_head." not in name}
    missing = model.load_state_dict(backbone, strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return model


@torch.inference_mode()
def their_rows(
    published: PublishedBlock, target: DecoderModel, model: torch.nn.Module, history: Sequence[int], num_rows: int
) -> torch.Tensor:
    """[B, h], their hidden states of a whole block behind `history`."""
    states = taps_of(target, torch.tensor([list(history)]), tuple(range(target.arch.num_layers + 1)))[0]
    context = states[:-1, list(published.taps)].flatten(1)[None]
    token_ids = torch.tensor([[history[-1], *[published.mask_token_id] * (num_rows - 1)]])
    scale = dict(published.extras).get("input_embedding_scale", 1.0)
    embedded = torch.nn.functional.embedding(token_ids, target.weights.embedding) * scale
    positions = torch.arange(len(history) - 1 + num_rows)[None]
    return model(position_ids=positions, noise_embedding=embedded, target_hidden=context)[0]

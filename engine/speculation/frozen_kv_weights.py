"""From a frozen-KV assistant's files to its weights on the target's device.

Owns which tensor is which part; everything was checked by `frozen_kv_layout`. Called by `frozen_kv_recipe`.
"""

import torch

from engine.model.decoder import DecoderModel
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.frozen_kv_head import Clusters, FrozenLayer, FrozenWeights
from engine.speculation.frozen_kv_layout import CENTROIDS, ORDERING, FrozenKvFacts


def load_assistant(tensors: DrafterTensors, facts: FrozenKvFacts, target: DecoderModel) -> FrozenWeights:
    """Matrices in the target's dtype, norms in float32, all on its device."""
    reader = _Reader(tensors, facts, target)
    clusters = None
    if facts.clusters is not None:
        ordering = tensors.read(ORDERING).to(torch.int64).to(target.device)
        clusters = Clusters(
            centroids=reader.matrix(CENTROIDS),
            members=ordering.view(facts.clusters.num_clusters, -1),
            num_scored=facts.clusters.num_scored,
        )
    return FrozenWeights(
        before=reader.matrix("pre_projection.weight"),
        layers=tuple(reader.layer(number) for number in range(facts.arch.num_layers)),
        norm=reader.norm("norm.weight"),
        after=reader.matrix("post_projection.weight"),
        output=reader.matrix(facts.output),
        clusters=clusters,
    )


class _Reader:
    def __init__(self, tensors: DrafterTensors, facts: FrozenKvFacts, target: DecoderModel) -> None:
        self._tensors, self._facts, self._target = tensors, facts, target

    def layer(self, number: int) -> FrozenLayer:
        prefix = f"layers.{number}."
        return FrozenLayer(
            kv_layer=self._facts.kv_layers[number],
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            query=self.matrix(f"{prefix}self_attn.q_proj.weight"),
            query_bias=self.matrix(f"{prefix}self_attn.q_proj.bias") if self._facts.has_query_bias else None,
            query_norm=self.norm(f"{prefix}self_attn.q_norm.weight"),
            out=self.matrix(f"{prefix}self_attn.o_proj.weight"),
            out_bias=self.matrix(f"{prefix}self_attn.o_proj.bias") if self._facts.has_out_bias else None,
            attended_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            ffn_norm=self.norm(f"{prefix}pre_feedforward_layernorm.weight"),
            gate_up=torch.cat([self.matrix(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]),
            down=self.matrix(f"{prefix}mlp.down_proj.weight"),
            fed_norm=self.norm(f"{prefix}post_feedforward_layernorm.weight"),
            scale=self.matrix(f"{prefix}layer_scalar"),
        )

    def matrix(self, name: str) -> torch.Tensor:
        return self._filled(name, self._target.dtype)

    def norm(self, name: str) -> torch.Tensor:
        return self._filled(name, torch.float32)

    def _filled(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._tensors.shape(name)
        assert shape is not None, name
        filled = torch.empty(shape, dtype=dtype, device=self._target.device)
        self._tensors.copy(name, filled)
        return filled

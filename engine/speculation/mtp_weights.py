"""From a checkpoint's files to `MtpWeights`: which tensors its modules need, their shapes, and filling them.

Owns the names and the check of every tensor before anything is allocated. Embedding and head are the target's own unless
a module brings others; what its file merely repeats is not kept twice. Called by `mtp_recipe`. h = width, V = vocabulary.
"""

import torch

from engine.model.decoder import DecoderModel
from engine.model.layers import LayerWeights
from engine.model.rope import inverse_frequencies
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.mtp_head import MtpWeights
from engine.speculation.mtp_layout import MtpFacts


def check_tensors(tensors: DrafterTensors, facts: MtpFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the modules and its shape. Raises `ModelFilesError` for a missing, misshapen or unknown one."""
    expected: dict[str, tuple[int, ...]] = {}
    for module in range(facts.num_modules):
        expected |= _module_shapes(tensors, facts, module)
    own = tuple(facts.name(facts.layout.own, module) for module in range(facts.num_modules))
    others = frozenset(name for name in tensors.matching("") if not name.startswith(own))
    tensors.check(expected, others, "the MTP modules")
    return expected


def _module_shapes(tensors: DrafterTensors, facts: MtpFacts, module: int) -> dict[str, tuple[int, ...]]:
    layout, arch = facts.layout, facts.arch
    width, layer = arch.hidden_size, facts.name(layout.layer, module)
    query_rows = arch.query_size * (2 if facts.is_gated else 1)
    matrices = {
        "self_attn.q_proj": ((query_rows, width), arch.qkv_bias),
        "self_attn.k_proj": ((arch.kv_size, width), arch.qkv_bias),
        "self_attn.v_proj": ((arch.kv_size, width), arch.qkv_bias),
        "self_attn.o_proj": ((width, arch.query_size), arch.out_bias),
        "mlp.gate_proj": ((arch.ffn_size, width), arch.ffn_bias),
        "mlp.up_proj": ((arch.ffn_size, width), arch.ffn_bias),
        "mlp.down_proj": ((width, arch.ffn_size), arch.ffn_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{facts.name(layout.fc, module)}.weight": (width, 2 * width)}
    for name, (shape, has_bias) in matrices.items():
        shapes[f"{layer}{name}.weight"] = shape
        if has_bias:
            shapes[f"{layer}{name}.bias"] = shape[:1]
    for pattern in (layout.embedding_norm, layout.hidden_norm, layout.output_norm):
        shapes[f"{facts.name(pattern, module)}.weight"] = (width,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{name}.weight"] = (width,)
    for name in ("self_attn.q_norm", "self_attn.k_norm") if arch.qk_norm else ():
        shapes[f"{layer}{name}.weight"] = (arch.head_dim,)
    for copied in (layout.embedding, layout.head):
        if copied is not None and (name := f"{facts.name(copied, module)}.weight") in tensors:
            shapes[name] = (arch.vocab_size, width)
    return shapes


def load_modules(tensors: DrafterTensors, facts: MtpFacts, target: DecoderModel) -> tuple[MtpWeights, ...]:
    """Every module in the target's dtype on its device. `check_tensors` found nothing wrong."""
    read: dict[str, torch.Tensor] = {}
    return tuple(_Reader(tensors, facts, target, module, read).module() for module in range(facts.num_modules))


class _Reader:
    """One module's tensors. `read`: what was read before, for modules share some."""

    def __init__(
        self,
        tensors: DrafterTensors,
        facts: MtpFacts,
        target: DecoderModel,
        module: int,
        read: dict[str, torch.Tensor],
    ) -> None:
        self._tensors, self._facts, self._target, self._module = tensors, facts, target, module
        self._layer = facts.name(facts.layout.layer, module)
        self._read = read

    def module(self) -> MtpWeights:
        layout, weights = self._facts.layout, self._target.weights
        queries, gate = self._queries("weight")
        query_bias, gate_bias = self._queries("bias") if self._facts.arch.qkv_bias else (None, None)
        frequencies = inverse_frequencies(self._facts.arch.rope, self._facts.rotary_dim)
        return MtpWeights(
            embedding=self._shared(layout.embedding, weights.embedding),
            embedding_norm=self._norm(self._named(layout.embedding_norm)),
            hidden_norm=self._norm(self._named(layout.hidden_norm)),
            fc=self._matrix(self._named(layout.fc)),
            layer=self._decoder_layer(queries, query_bias),
            gate=gate,
            gate_bias=gate_bias,
            output_norm=self._norm(self._named(layout.output_norm)),
            output=self._shared(layout.head, weights.output),
            inverse_frequencies=frequencies.to(self._target.device),
        )

    def _decoder_layer(self, queries: torch.Tensor, query_bias: torch.Tensor | None) -> LayerWeights:
        arch, attention = self._facts.arch, f"{self._layer}self_attn."
        keys, values = f"{attention}k_proj", f"{attention}v_proj"
        qkv_bias = None
        if query_bias is not None:
            qkv_bias = torch.cat([query_bias, self._bias(keys), self._bias(values)])
        return LayerWeights(
            input_norm=self._norm(f"{self._layer}input_layernorm"),
            qkv=torch.cat([queries, self._matrix(keys), self._matrix(values)]),
            qkv_bias=qkv_bias,
            query_norm=self._norm(f"{attention}q_norm") if arch.qk_norm else None,
            key_norm=self._norm(f"{attention}k_norm") if arch.qk_norm else None,
            out=self._matrix(f"{attention}o_proj"),
            out_bias=self._bias(f"{attention}o_proj") if arch.out_bias else None,
            ffn_norm=self._norm(f"{self._layer}post_attention_layernorm"),
            gate_up=torch.cat([self._matrix(f"{self._layer}mlp.{name}_proj") for name in ("gate", "up")]),
            gate_up_bias=torch.cat([self._bias(f"{self._layer}mlp.{name}_proj") for name in ("gate", "up")])
            if arch.ffn_bias
            else None,
            down=self._matrix(f"{self._layer}mlp.down_proj"),
            down_bias=self._bias(f"{self._layer}mlp.down_proj") if arch.ffn_bias else None,
        )

    def _queries(self, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of q_proj that give queries, and those that give the gate: each head has one after the other."""
        arch = self._facts.arch
        stored = self._filled(f"{self._layer}self_attn.q_proj.{kind}", self._target.dtype)
        if not self._facts.is_gated:
            return stored, None
        by_head = stored.view(arch.num_heads, 2, arch.head_dim, *stored.shape[1:])
        shape = (arch.query_size, *stored.shape[1:])
        return by_head[:, 0].reshape(shape), by_head[:, 1].reshape(shape)

    def _named(self, pattern: str) -> str:
        return self._facts.name(pattern, self._module)

    def _matrix(self, name: str) -> torch.Tensor:
        return self._filled(f"{name}.weight", self._target.dtype)

    def _bias(self, name: str) -> torch.Tensor:
        return self._filled(f"{name}.bias", self._target.dtype)

    def _norm(self, name: str) -> torch.Tensor:
        """Float32, as it multiplies."""
        norm = self._filled(f"{name}.weight", torch.float32)
        return norm + 1 if self._facts.zero_centred else norm

    def _shared(self, pattern: str | None, own: torch.Tensor) -> torch.Tensor:
        """The module's own tensor; the target's where it has none or a copy, which publishers often ship."""
        if pattern is None or f"{self._named(pattern)}.weight" not in self._tensors:
            return own
        read = self._matrix(self._named(pattern))
        return own if torch.equal(read, own) else read

    def _filled(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._read:
            shape = self._tensors.shape(name)
            assert shape is not None, name
            self._read[name] = torch.empty(shape, dtype=dtype, device=self._target.device)
            self._tensors.copy(name, self._read[name])
        return self._read[name]

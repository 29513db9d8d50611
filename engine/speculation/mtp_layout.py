"""Where a checkpoint keeps its MTP modules, and what they look like: one table of layouts, one form of facts.

Owns recognising a layout from tensor names, and what config.json says about the modules' decoder layer; never loads a
weight. What cannot be computed here (mixtures of experts, latent attention) is refused by the name of its tensor. Called
by `mtp_recipe`. Sources: Qwen3-Next and Qwen3.5, DeepSeek-V3 (arXiv 2412.19437, section 2.2), speculators, as published;
their conventions, none of their code. N = the target's decoder layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from engine.model.arch import ArchConfig, arch_of_config
from engine.speculation.drafter_tensors import DrafterTensors

MAX_MODULES = 16


@dataclass(frozen=True)
class MtpLayout:
    """One publisher's names, without `.weight`: {module} counts modules from 0, {layer} decoder layers from N."""

    name: str
    fc: str  # reads [normed embedding, normed hidden state]; that it exists is what recognises the layout
    embedding_norm: str
    hidden_norm: str
    output_norm: str
    layer: str  # prefix of the decoder layer's tensors
    own: str  # prefix of everything that belongs to a module; what else is in the files is not looked at
    count_key: str  # of config.json: the number of modules
    layer_config: str | None = None  # key of config.json under which the decoder layer is described; None: the top
    embedding: str | None = None  # where a copy of the target's embedding may be
    head: str | None = None  # and of its output projection


LAYOUTS = (
    MtpLayout(
        name="qwen",
        fc="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        output_norm="mtp.norm",
        layer="mtp.layers.{module}.",
        own="mtp.",
        count_key="mtp_num_hidden_layers",
    ),
    MtpLayout(
        name="deepseek",
        fc="layers.{layer}.eh_proj",
        embedding_norm="layers.{layer}.enorm",
        hidden_norm="layers.{layer}.hnorm",
        output_norm="layers.{layer}.shared_head.norm",
        layer="layers.{layer}.",
        own="layers.{layer}.",
        count_key="num_nextn_predict_layers",
        embedding="layers.{layer}.embed_tokens",
        head="layers.{layer}.shared_head.head",
    ),
    MtpLayout(
        name="speculators",
        fc="mtp_layers.{module}.input_proj",
        embedding_norm="mtp_layers.{module}.token_layernorm",
        hidden_norm="mtp_layers.{module}.hidden_layernorm",
        output_norm="mtp_layers.{module}.final_layernorm",
        layer="mtp_layers.{module}.",
        own="mtp_layers.",
        count_key="num_nextn_predict_layers",
        layer_config="transformer_layer_config",
    ),
)


@dataclass(frozen=True)
class _Family:
    """How a family that is no target here says what its MTP layer is."""

    same_as: str  # the family whose layer it has otherwise
    defaults: Mapping[str, object]  # what its config.json may leave out
    rotary_share: float  # of each head, where config.json does not say
    zero_centred: bool  # norms are stored as their distance from one


_QWEN3_NEXT = _Family("qwen3", {"head_dim": 256}, rotary_share=0.25, zero_centred=True)
_FAMILIES: Mapping[str, _Family] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
}
_SAME = _Family("", {}, rotary_share=1.0, zero_centred=False)
# Of the whole model, not of the MTP layer: that one has full attention, and its own tensors say whether it has experts.
_NOT_OF_THE_LAYER = ("layer_types", "partial_rotary_factor", "num_experts", "num_local_experts")
_UNSUPPORTED = {
    "mlp.experts": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "mlp.shared_expert": "a mixture of experts",
    "self_attn.kv_": "multi-head latent attention",
    "self_attn.q_a_": "multi-head latent attention",
    "linear_attn": "linear attention",
}


@dataclass(frozen=True)
class MtpFacts:
    """A checkpoint's modules in the one form used here."""

    layout: MtpLayout
    num_modules: int
    first_layer: int  # N of the model the modules were published with
    arch: ArchConfig  # of each module's decoder layer; its vocabulary is the model's
    rotary_dim: int  # elements of each head that are rotated, from the first on
    is_gated: bool  # attention's output is multiplied by a sigmoid that comes out of q_proj, which is twice as tall
    zero_centred: bool  # norms are stored as their distance from one

    def name(self, pattern: str, module: int) -> str:
        return pattern.format(module=module, layer=self.first_layer + module)

    def __str__(self) -> str:
        return (
            f"layout={self.layout.name} modules={self.num_modules} gated={str(self.is_gated).lower()} "
            f"rotary_dim={self.rotary_dim} of {self.arch.head_dim} zero_centred={str(self.zero_centred).lower()}"
        )


def recognise(
    config: Mapping[str, object], tensors: DrafterTensors, zero_centred: bool | None, elsewhere: str = ""
) -> MtpFacts:
    """What `tensors` holds. `zero_centred`: what the user knows better than config.json.

    Raises `ModelFilesError` for files without modules, ending in `elsewhere` (where else they may be), and for modules that cannot be computed, naming the tensor.
    """
    config = _text_part(config)
    first_layer = config.get("num_hidden_layers", 0)
    if type(first_layer) is not int or first_layer < 0:
        raise tensors.refusal(f"num_hidden_layers of config.json must be a whole number, got {first_layer!r:.40}")
    layout = _layout(tensors, first_layer, elsewhere)
    count = _count(layout, config, tensors, first_layer)
    _refuse_unsupported(layout, tensors, first_layer, count)
    layer_config = config if layout.layer_config is None else config.get(layout.layer_config)
    if not isinstance(layer_config, Mapping):
        raise tensors.refusal(f"{layout.layer_config} of config.json is missing or no object")
    layer_config = _text_part(layer_config)
    family = _FAMILIES.get(str(layer_config.get("model_type")), _SAME)
    arch = _layer_arch(tensors, layer_config, family, layout.layer.format(module=0, layer=first_layer))
    query = tensors.shape(layout.layer.format(module=0, layer=first_layer) + "self_attn.q_proj.weight")
    return MtpFacts(
        layout=layout,
        num_modules=count,
        first_layer=first_layer,
        arch=arch,
        rotary_dim=_rotary_dim(tensors, layer_config, family, arch.head_dim),
        is_gated=query is not None and query[0] == 2 * arch.query_size,
        zero_centred=family.zero_centred if zero_centred is None else zero_centred,
    )


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """What a model that also sees or hears says about its text."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _layout(tensors: DrafterTensors, first_layer: int, elsewhere: str) -> MtpLayout:
    marks = [layout.fc.format(module=0, layer=first_layer) + ".weight" for layout in LAYOUTS]
    for layout, mark in zip(LAYOUTS, marks):
        if mark in tensors:
            return layout
    raise tensors.refusal(f"it has no MTP modules: the tensors {' and '.join(marks)} are missing{elsewhere}")


def _count(layout: MtpLayout, config: Mapping[str, object], tensors: DrafterTensors, first_layer: int) -> int:
    """Modules, by config.json; by the tensors where it does not say."""
    there = sum(1 for _ in _present(layout, tensors, first_layer))
    count = config.get(layout.count_key)
    if count is None:
        return max(there, 1)
    if type(count) is not int or not 1 <= count <= MAX_MODULES:
        raise tensors.refusal(f"{layout.count_key} of config.json must be from 1 to {MAX_MODULES}, got {count!r:.40}")
    if there > count:
        raise tensors.refusal(f"it has {there} MTP modules where {layout.count_key} of config.json says {count}")
    return count


def _present(layout: MtpLayout, tensors: DrafterTensors, first_layer: int) -> Iterator[int]:
    for module in range(MAX_MODULES):
        prefix = layout.layer.format(module=module, layer=first_layer + module)
        if f"{prefix}input_layernorm.weight" not in tensors:
            return
        yield module


def _refuse_unsupported(layout: MtpLayout, tensors: DrafterTensors, first_layer: int, count: int) -> None:
    for module in range(count):
        prefix = layout.layer.format(module=module, layer=first_layer + module)
        for name in tensors.matching(prefix):
            for part, kind in _UNSUPPORTED.items():
                if name.startswith(prefix + part):
                    raise tensors.refusal(f"the tensor {name} belongs to {kind}, which MTP modules cannot have here")


def _layer_arch(
    tensors: DrafterTensors, config: Mapping[str, object], family: _Family, first_prefix: str
) -> ArchConfig:
    """The decoder layer; what config.json leaves open (biases, norms of heads) is what the tensors are."""
    described = {**family.defaults, **{key: value for key, value in config.items() if key not in _NOT_OF_THE_LAYER}}
    if family.same_as:
        described["model_type"] = family.same_as
    for key in ("rope_parameters", "rope_scaling"):
        rope = described.get(key)
        if isinstance(rope, Mapping):
            described[key] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    context = described.get("max_position_embeddings")
    if type(context) is not int or context < 1:
        raise tensors.refusal(f"max_position_embeddings of config.json must be a whole number, got {context!r:.40}")
    arch = arch_of_config(tensors.directory / "config.json", described, context)
    return replace(
        arch,
        qkv_bias=f"{first_prefix}self_attn.q_proj.bias" in tensors,
        out_bias=f"{first_prefix}self_attn.o_proj.bias" in tensors,
        ffn_bias=f"{first_prefix}mlp.down_proj.bias" in tensors,
        qk_norm=f"{first_prefix}self_attn.q_norm.weight" in tensors,
    )


def _rotary_dim(tensors: DrafterTensors, config: Mapping[str, object], family: _Family, head_dim: int) -> int:
    rope = config.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    share = config.get("partial_rotary_factor") if share is None else share
    share = family.rotary_share if share is None else share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise tensors.refusal(f"partial_rotary_factor of config.json must be above 0 and at most 1, got {share!r:.40}")
    size = int(head_dim * share)
    if size < 2 or size % 2:
        raise tensors.refusal(
            f"partial_rotary_factor {share} rotates {size} of {head_dim} elements, which are no pairs"
        )
    return size

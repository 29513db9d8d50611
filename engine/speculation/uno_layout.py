"""What a published UNO adapter holds: PEFT's LoRA files, adapter_config.json and adapter_model.safetensors.

Owns one table of the projections an adapter may change, the check of every setting and shape before a weight is read, and
the reading of them into fused parts. Called by `uno_recipe`. r = rank of the adapter. Source of the format: the PEFT
library's checkpoints as published (names and meaning of the settings; none of its code).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.arch import ArchConfig
from engine.model.low_rank import LayerAdapter, LowRank, Part, Raise
from engine.model.weights import expected_shapes
from engine.speculation.drafter_tensors import DrafterTensors

CONFIG = "adapter_config.json"
MAX_RANK = 4096
# Published name of a projection -> where it is in a layer, and the fused product it is part of, in the product's order.
MODULES: Mapping[str, tuple[str, Part]] = {
    "q_proj": ("self_attn", "qkv"),
    "k_proj": ("self_attn", "qkv"),
    "v_proj": ("self_attn", "qkv"),
    "o_proj": ("self_attn", "out"),
    "gate_proj": ("mlp", "gate_up"),
    "up_proj": ("mlp", "gate_up"),
    "down_proj": ("mlp", "down"),
}
ALL_MODULES = "all-linear"
# Before `layers.0.`: of a causal model with its head, and of the model alone. The first that is there.
_PREFIXES = ("base_model.model.model.", "base_model.model.")
# What would make it another arithmetic than x + scale * B A x for each projection.
_MUST_BE_UNSET = (
    "use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layer_replication", "exclude_modules", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
    "arrow_config",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterShape:
    """What adapter_config.json and the tensors agree on."""

    prefix: str
    rank: int
    scale: float
    modules: tuple[str, ...]  # in the table's order
    layers: tuple[int, ...]  # adapted ones, ascending
    base_model: str | None  # what it says it was trained on

    def __str__(self) -> str:
        return f"rank={self.rank} scale={self.scale:g} layers={len(self.layers)} modules={','.join(self.modules)}"


def read_shape(config: Mapping[str, object], tensors: DrafterTensors, arch: ArchConfig) -> AdapterShape:
    """The adapter's shape for a target of `arch`, every tensor checked. Raises `ModelFilesError` naming key or tensor."""
    settings = _Settings(config, tensors)
    if config.get("peft_type") != "LORA":
        raise settings.refusal("peft_type", "only LORA adapters can be read")
    for key in _MUST_BE_UNSET:
        if config.get(key):
            raise settings.refusal(key, "is not supported: plain LoRA on projections is")
    if config.get("bias", "none") not in (None, "none"):
        raise settings.refusal("bias", "is not supported: UNO adapters have none")
    rank = settings.number("r", 1, MAX_RANK, whole=True)
    alpha = settings.number("lora_alpha", 0.0, 1e6)
    shape = AdapterShape(
        prefix=_prefix(tensors),
        rank=int(rank),
        scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        modules=_modules(settings),
        layers=_layers(settings, arch.num_layers),
        base_model=str(base) if (base := config.get("base_model_name_or_path")) else None,
    )
    tensors.check(_expected(shape, arch), frozenset(), f"a LoRA adapter of {CONFIG}'s modules and layers")
    return shape


def load_adapter(
    tensors: DrafterTensors, shape: AdapterShape, arch: ArchConfig, dtype: torch.dtype, device: torch.device
) -> tuple[LayerAdapter, ...]:
    """One entry per layer of the target; the scale goes into the second factors."""
    return tuple(
        _layer(tensors, shape, arch, layer, dtype, device) if layer in shape.layers else {}
        for layer in range(arch.num_layers)
    )


def num_weight_bytes(shape: AdapterShape, arch: ArchConfig, dtype: torch.dtype) -> int:
    return sum(math.prod(size) for size in _expected(shape, arch).values()) * dtype.itemsize


# ---- adapter_config.json ----


class _Settings:
    """Reads keys; what cannot be is refused naming the file and the key."""

    def __init__(self, config: Mapping[str, object], tensors: DrafterTensors) -> None:
        self.config = config
        self._tensors = tensors

    def refusal(self, key: str, reason: str) -> Exception:
        return self._tensors.refusal(f"{CONFIG}: {key} {self.config.get(key)!r:.80}: {reason}")

    def number(self, key: str, low: float, high: float, *, whole: bool = False) -> float:
        value = self.config.get(key)
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not is_number or not isinstance(value, int | float) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise self.refusal(key, f"must be {kind} between {low:g} and {high:g}")
        return value

    def names(self, key: str) -> list[str] | None:
        """A list of strings; None where it is no such list."""
        value = self.config.get(key)
        return [str(name) for name in value] if isinstance(value, list) and value else None


def _modules(settings: _Settings) -> tuple[str, ...]:
    asked = settings.config.get("target_modules")
    if asked == ALL_MODULES:
        return tuple(MODULES)
    names = settings.names("target_modules")
    if names is None:
        raise settings.refusal("target_modules", "must be a list of projections' names (a pattern cannot be read)")
    for name in names:
        if name not in MODULES:
            raise settings.refusal("target_modules", f"{name!r:.40} is none of {', '.join(MODULES)}")
    return tuple(name for name in MODULES if name in names)


def _layers(settings: _Settings, num_layers: int) -> tuple[int, ...]:
    asked = settings.config.get("layers_to_transform")
    if asked is None:
        return tuple(range(num_layers))
    listed = asked if isinstance(asked, list) else [asked]
    if not listed or not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in listed):
        raise settings.refusal("layers_to_transform", f"must be numbers of the target's {num_layers} layers, from 0")
    return tuple(sorted(set(listed)))


# ---- tensors ----


def _prefix(tensors: DrafterTensors) -> str:
    for prefix in _PREFIXES:
        if tensors.matching(f"{prefix}layers."):
            return prefix
    raise tensors.refusal(f"no tensor begins with {_PREFIXES[0]}layers.: these are not a decoder's LoRA weights")


def _name(shape: AdapterShape, layer: int, module: str, factor: str) -> str:
    return f"{shape.prefix}layers.{layer}.{MODULES[module][0]}.{module}.lora_{factor}.weight"


def _base_shape(arch: ArchConfig, module: str) -> tuple[int, int]:
    """(out, in) of the target's projection, the same in all layers."""
    out, width = expected_shapes(arch)[f"model.layers.0.{MODULES[module][0]}.{module}.weight"]
    return out, width


def _expected(shape: AdapterShape, arch: ArchConfig) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {}
    for module in shape.modules:
        out, width = _base_shape(arch, module)
        for layer in shape.layers:
            expected[_name(shape, layer, module, "A")] = (shape.rank, width)
            expected[_name(shape, layer, module, "B")] = (out, shape.rank)
    return expected


def _layer(
    tensors: DrafterTensors,
    shape: AdapterShape,
    arch: ArchConfig,
    layer: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerAdapter:
    reduces: dict[Part, list[torch.Tensor]] = {}
    raises: dict[Part, list[Raise]] = {}
    starts: dict[Part, int] = {}
    for module, (_, part) in MODULES.items():
        first = starts.get(part, 0)
        out, width = _base_shape(arch, module)
        starts[part] = first + out
        if module not in shape.modules:
            continue
        reduce, weight = torch.empty(shape.rank, width), torch.empty(out, shape.rank)
        tensors.copy(_name(shape, layer, module, "A"), reduce)
        tensors.copy(_name(shape, layer, module, "B"), weight)
        found = reduces.setdefault(part, [])
        raises.setdefault(part, []).append(
            Raise(first, len(found) * shape.rank, (weight * shape.scale).to(dtype).to(device))
        )
        found.append(reduce)
    return {
        part: LowRank(torch.cat(found).to(dtype).to(device), tuple(raises[part])) for part, found in reduces.items()
    }

"""What a published EAGLE checkpoint means: one table of conventions, converted to the only one used here.

Owns recognising a layout from config.json and tensor names, and turning its conventions (which hidden states, which
norms, how the vocabulary is mapped) into `EagleFacts`; never loads a weight. A wrong convention raises nothing anywhere:
it only makes every draft wrong. So each is resolved once, logged, and can be overridden. Called by `eagle_recipe`.

Numbers of hidden states: 0 is the embedding, i the residual stream behind i layers; the target has N layers.
Sources: SafeAILab/EAGLE, SpecForge, DeepSpec and speculators as published; their conventions, none of their code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.recipe import EagleOverrides

FEATURE_NORMS = ("none", "joint", "each")
VOCABULARY_MAPS = ("offsets", "ids")
HIDDEN_NORM = "layers.0.hidden_norm.weight"  # every EAGLE-3 has it, no EAGLE-1 does
_INPUT_NORM = "layers.0.input_layernorm.weight"  # nor does an EAGLE-1 have this one


@dataclass(frozen=True)
class EagleLayout:
    """One publisher's conventions. A checkpoint has the first layout whose key and tensor are both there."""

    name: str
    generation: int  # 1 is EAGLE-1 and EAGLE-2, which share their weights
    config_key: str | None  # a key of config.json that only this layout has
    tensor: str
    layer_config: str | None  # the key of config.json under which the decoder layer is described; None: the top
    tap_keys: tuple[tuple[tuple[str, ...], int], ...]  # where hidden states are named, and what is added to the number


_AUX = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = (
    # speculators numbers hidden states as they are numbered here.
    EagleLayout("speculators", 3, "speculators_model_type", HIDDEN_NORM, "transformer_layer_config", (((_AUX,), 0),)),
    # DeepSpec numbers layers from 0 and reads what comes out of them.
    EagleLayout("deepspec", 3, "target_layer_ids", HIDDEN_NORM, None, ((("target_layer_ids",), 1),)),
    # SafeAILab, SpecForge, AngelSlim. SpecForge and SGLang number layers as DeepSpec does, in a nested object; a key at
    # the top is vLLM's and numbers hidden states.
    EagleLayout("safeailab", 3, None, HIDDEN_NORM, None, ((("eagle_config", _AUX), 1), ((_AUX,), 0))),
    EagleLayout("eagle", 1, None, "fc.weight", None, ()),
)


@dataclass(frozen=True)
class EagleFacts:
    """A checkpoint's conventions in the one form used here."""

    layout: EagleLayout
    taps: tuple[int, ...]  # numbers of hidden states, in the order in which fc reads them
    final_norm: bool  # a tap behind the last layer is read after the target's final norm
    norm_before_residual: bool
    norm_output: bool
    feature_norm: str  # one of FEATURE_NORMS
    vocabulary_map: str  # one of VOCABULARY_MAPS; says nothing without a d2t

    def __str__(self) -> str:
        return (
            f"layout={self.layout.name} taps={','.join(map(str, self.taps))} "
            f"final_norm={str(self.final_norm).lower()} feature_norm={self.feature_norm} "
            f"norm_before_residual={str(self.norm_before_residual).lower()} "
            f"norm_output={str(self.norm_output).lower()} vocabulary_map={self.vocabulary_map}"
        )


def recognise(config: Mapping[str, object], tensors: DrafterTensors) -> EagleLayout:
    """The checkpoint's layout. Raises `ModelFilesError` for what is no EAGLE drafter, by its own name where it has one."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise tensors.refusal(f"it is a speculators model of type {kind!r:.40}; of those eagle3 can be read")
    if "mask_hidden" in tensors:
        raise tensors.refusal("it drafts in parallel (P-EAGLE), which is not supported")
    if "block_size" in config or "dflash_config" in config:
        raise tensors.refusal("it is a block drafter (DFlash, DSpark), not an EAGLE drafter")
    for layout in LAYOUTS:
        if (layout.config_key is None or layout.config_key in config) and layout.tensor in tensors:
            if layout.generation == 1 and _INPUT_NORM in tensors:
                raise tensors.refusal(
                    f"the tensor {tensors.spelling(HIDDEN_NORM)} is missing: with a norm of its input it is an EAGLE-3 drafter"
                )
            return layout
    raise tensors.refusal(f"it is no EAGLE drafter: the tensors {LAYOUTS[-1].tensor} and {HIDDEN_NORM} are missing")


def resolve_facts(
    layout: EagleLayout,
    config: Mapping[str, object],
    tensors: DrafterTensors,
    num_target_layers: int,
    overrides: EagleOverrides,
) -> EagleFacts:
    """Every convention, from the files where nobody said otherwise.

    Raises ValueError naming the option that cannot be, `ModelFilesError` for a config.json that contradicts the tensors.
    """
    if layout.generation == 1:
        _refuse_for_first(overrides)
        taps: tuple[int, ...] = (num_target_layers,)
        final_norm = True
    else:
        taps = _taps(layout, config, tensors, num_target_layers)
        final_norm = False
    if overrides.taps is not None:
        taps = _parse_taps(overrides.taps)
    for tap in taps:
        if not 0 <= tap <= num_target_layers:
            raise ValueError(
                f"{tensors.directory} reads hidden state {tap} of a target that has 0 to {num_target_layers}: "
                "it was made for another model, or --eagle-taps must say which to read"
            )
    flags = _Flags(config, tensors)
    return EagleFacts(
        layout=layout,
        taps=taps,
        final_norm=final_norm if overrides.final_norm is None else overrides.final_norm,
        norm_before_residual=flags.value("norm_before_residual", overrides.norm_before_residual),
        norm_output=flags.value("norm_output", overrides.norm_output),
        feature_norm=_feature_norm(flags, tensors, overrides.feature_norm),
        vocabulary_map=_one_of("--eagle-vocabulary-map", overrides.vocabulary_map, VOCABULARY_MAPS, "offsets"),
    )


def _refuse_for_first(overrides: EagleOverrides) -> None:
    for name in ("norm_before_residual", "norm_output", "feature_norm", "vocabulary_map"):
        if getattr(overrides, name) is not None:
            raise ValueError(f"--eagle-{name.replace('_', '-')} says nothing about an EAGLE-1/2 drafter")


class _Flags:
    """True or false from config.json, at its top or in eagle_config."""

    def __init__(self, config: Mapping[str, object], tensors: DrafterTensors) -> None:
        nested = config.get("eagle_config")
        self._places = (config, nested if isinstance(nested, Mapping) else {})
        self._tensors = tensors

    def given(self, key: str) -> bool | None:
        for place in self._places:
            value = place.get(key)
            if isinstance(value, bool):
                return value
            if value is not None:
                raise self._tensors.refusal(f"{key} of config.json must be true or false, got {value!r:.40}")
        return None

    def value(self, key: str, override: bool | None) -> bool:
        return bool(self.given(key)) if override is None else override


def _feature_norm(flags: _Flags, tensors: DrafterTensors, override: str | None) -> str:
    """Which norm runs before fc: the tensors say so, and config.json must not say otherwise."""
    present = {"joint": "input_norm.weight" in tensors, "each": "fc_norm.0.weight" in tensors}
    if override is not None:
        chosen = _one_of("--eagle-feature-norm", override, FEATURE_NORMS, "none")
        if chosen != "none" and not present[chosen]:
            raise ValueError(f"--eagle-feature-norm {chosen}: {tensors.directory} has no weights of such a norm")
        return chosen
    if all(present.values()):
        raise tensors.refusal("it has input_norm and fc_norm; --eagle-feature-norm must say which runs before fc")
    for chosen, key in (("joint", "norm_before_fc"), ("each", "fc_norm")):
        given = flags.given(key)
        if given is not None and given is not present[chosen]:
            there = "are there" if present[chosen] else "are missing"
            raise tensors.refusal(
                f"{key} of config.json is {str(given).lower()}, but the norm's weights {there}: say --eagle-feature-norm"
            )
    return next((name for name, is_present in present.items() if is_present), "none")


def _taps(
    layout: EagleLayout, config: Mapping[str, object], tensors: DrafterTensors, num_layers: int
) -> tuple[int, ...]:
    for path, offset in layout.tap_keys:
        value: object = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return tuple(number + offset for number in _whole_numbers(tensors, ".".join(path), value))
    return (2, num_layers // 2, num_layers - 3)  # what SafeAILab's code reads, and everybody's default since


def _whole_numbers(tensors: DrafterTensors, key: str, value: object) -> Sequence[int]:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise tensors.refusal(f"{key} of config.json must be a list of whole numbers, got {value!r:.60}")
    return value


def _parse_taps(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--eagle-taps must be whole numbers separated by commas (2,9,15), got {text!r:.60}")
    return tuple(int(part) for part in parts)


def _one_of(option: str, value: str | None, choices: tuple[str, ...], default: str) -> str:
    if value is not None and value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, got {value!r:.40}")
    return default if value is None else value

"""`--speculator eagle` and `eagle3`: from options and files to a drafter that is checked, then built.

Owns what of a checkpoint is read before any weight: its layout, its shapes, what it shares with the target, the memory it
takes. Called by the registry.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.arch import ArchConfig, arch_of_config
from engine.speculation.draft_options import read_draft_options
from engine.speculation.drafter_log import DrafterSummary, log_drafter, vocabulary_line
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.eagle_drafter import EaglePlan, EagleSpeculator
from engine.speculation.eagle_head import EagleHead, HeadConventions
from engine.speculation.eagle_layout import EagleFacts, recognise, resolve_facts
from engine.speculation.eagle_passes import EaglePasses
from engine.speculation.eagle_tree import TreeShape
from engine.speculation.eagle_weights import (
    EMBEDDING,
    HEAD,
    EagleShape,
    expected_tensors,
    load_weights,
    read_map,
)
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.recipe import Progress, Recipe, SpeculationSettings, Target, TargetFacts, draft_model_files
from engine.speculation.shipped import comes_with, shipped_drafter
from engine.speculation.speculator import Capabilities, Speculator
from protocol.model_files import ModelFiles, ModelFilesError

DEFAULT_CHAIN_TOKENS = 4
DEFAULT_TREE_NODES = 16
DEFAULT_TREE_DEPTH = 5
_LAYER = "layers.0."
_MAPS = frozenset({"d2t", "t2d"})


def prepare_eagle(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    """EAGLE-1 and EAGLE-2: one kind of checkpoint, drafted as a chain or as a tree."""
    return _EagleRecipe(settings, facts, "eagle", generation=1)


def prepare_eagle3(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    return _EagleRecipe(settings, facts, "eagle3", generation=3)


class _EagleRecipe(Recipe):
    """Raises as `engine.speculation.registry.prepare` does."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts, name: str, generation: int) -> None:
        self._name = name
        options = read_draft_options(settings, name, has_trees=True)
        tree = None if options.tree is None else TreeShape(options.tree.top_k, options.tree.depth or DEFAULT_TREE_DEPTH)
        self._tensors, config, layer_config = _open(settings, name, facts.files)
        shape = _shape(self._tensors, config, layer_config, settings, facts)
        if shape.facts.layout.generation != generation:
            other = "eagle" if generation == 3 else "eagle3"
            raise ValueError(f"{self._tensors.directory} is an {other} drafter: say --speculator {other}")
        expected = expected_tensors(shape)
        self._tensors.check(expected, _unread(self._tensors, shape, settings), f"an {name} drafter")
        read_map(self._tensors, shape, torch.device("cpu"))  # refused now rather than after the target is loaded
        self._shape = shape
        taps = tuple(dict.fromkeys(shape.facts.taps))  # the target gives each once
        self._plan = EaglePlan(
            tree=tree,
            is_sampled=options.is_sampled,
            context_length=min(shape.arch.context_length, facts.max_model_len),
            tap_order=tuple(taps.index(tap) for tap in shape.facts.taps),
        )
        self.capabilities = Capabilities(
            max_draft_len=settings.num_draft_tokens or _default_length(config, tree),
            sources=(name,),
            tree=tree is not None,
            gives_probs=options.is_sampled,
            taps=taps,
            lookahead=1,
        )
        self.kv_shape = KVShape(1, shape.arch.num_kv_heads, shape.arch.head_dim, facts.block_size, facts.dtype)
        self.weight_bytes = sum(prod(size) * _item_bytes(size, facts.dtype) for size in expected.values())
        if shape.has_map and not shape.has_head:  # the target's rows, copied
            self.weight_bytes += shape.draft_vocab_size * shape.arch.hidden_size * facts.dtype.itemsize
        log_drafter(self._summary(), facts.max_model_len)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        weights = load_weights(self._tensors, self._shape, target.model)
        num_layers = target.model.arch.num_layers
        conventions = HeadConventions(
            last_layer=tuple(tap == num_layers for tap in self._shape.facts.taps),
            norm_before_residual=self._shape.facts.norm_before_residual,
            norm_output=self._shape.facts.norm_output,
        )
        head = EagleHead(self._shape.arch, weights, conventions, target.model.arch.norm_eps)
        assert self.kv_shape is not None
        pool = KVPool(self.kv_shape, target.num_blocks, target.model.device)
        watch = FirstTokenWatch(self._name, _suspects(self._shape.facts))
        return EagleSpeculator(EaglePasses(head, pool), self._plan, self.capabilities, watch)

    def _summary(self) -> DrafterSummary:
        shape = self._shape
        vocabulary = vocabulary_line(
            shape.draft_vocab_size,
            shape.arch.vocab_size,
            has_embedding=shape.has_embedding,
            has_head=shape.has_head,
        )
        conventions = f"{shape.facts} {vocabulary}"
        return DrafterSummary(
            self._name, self._tensors.directory, conventions, shape.arch.context_length, self.weight_bytes
        )


def _open(
    settings: SpeculationSettings, name: str, target: ModelFiles | None
) -> tuple[DrafterTensors, Mapping[str, object], Mapping[str, object]]:
    """Tensors, config.json, and the part of it that describes the decoder layer."""
    asked = settings.draft_model
    files = shipped_drafter(name, target) if asked is None else draft_model_files(asked)
    if files is None:
        raise ValueError(
            f"--speculator {name} needs --draft-model: the directory of the drafter's config.json and weights"
            f"{comes_with(name)}"
        )
    if files.kind != "hf":
        raise ModelFilesError(f"{files.path}: an {name} drafter is a Hugging Face directory, not a GGUF file")
    tensors = DrafterTensors(files.path)
    layout = recognise(files.config, tensors)
    layer_config: object = files.config if layout.layer_config is None else files.config.get(layout.layer_config)
    if not isinstance(layer_config, Mapping):
        raise tensors.refusal(f"{layout.layer_config} of config.json is missing or no object")
    return tensors, files.config, layer_config


def _shape(
    tensors: DrafterTensors,
    config: Mapping[str, object],
    layer_config: Mapping[str, object],
    settings: SpeculationSettings,
    facts: TargetFacts,
) -> EagleShape:
    arch = _layer_arch(tensors, layer_config, facts)
    layout = recognise(config, tensors)
    resolved = resolve_facts(layout, config, tensors, facts.arch.num_layers, settings.eagle)
    if layout.generation == 1 and len(resolved.taps) != 1:
        raise ValueError("--eagle-taps: an EAGLE-1/2 drafter reads one hidden state")
    if settings.eagle.final_norm is not None and facts.arch.num_layers not in resolved.taps:
        raise ValueError(
            f"--eagle-final-norm says nothing: the target's final norm comes behind hidden state {facts.arch.num_layers}, "
            f"and the drafter reads {', '.join(map(str, resolved.taps))}"
        )
    shape = EagleShape(
        arch=arch,
        facts=resolved,
        target_width=facts.arch.hidden_size,
        draft_vocab_size=_draft_vocab_size(tensors, config, arch.vocab_size),
        has_fc_bias="fc.bias" in tensors,
        has_embedding=EMBEDDING in tensors,
        has_head=HEAD in tensors,
        has_map="d2t" in tensors,
    )
    _check_shared(tensors, shape, settings)
    return shape


def _layer_arch(tensors: DrafterTensors, config: Mapping[str, object], facts: TargetFacts) -> ArchConfig:
    """The head's layer; what config.json leaves open (biases, norms of heads) is what the tensors are."""
    context = config.get("max_position_embeddings", facts.arch.context_length)
    if type(context) is not int or context < 1:
        raise tensors.refusal(f"max_position_embeddings of config.json must be a whole number, got {context!r:.40}")
    arch = arch_of_config(tensors.directory / "config.json", config, context)
    if arch.num_layers != 1:
        raise tensors.refusal(f"EAGLE drafters of several layers are not supported; this one has {arch.num_layers}")
    if arch.vocab_size != facts.vocab_size:
        raise tensors.refusal(
            f"it was made for a vocabulary of {arch.vocab_size} tokens; the target has {facts.vocab_size}"
        )
    return replace(
        arch,
        qkv_bias=f"{_LAYER}self_attn.q_proj.bias" in tensors,
        out_bias=f"{_LAYER}self_attn.o_proj.bias" in tensors,
        ffn_bias=f"{_LAYER}mlp.down_proj.bias" in tensors,
        qk_norm=f"{_LAYER}self_attn.q_norm.weight" in tensors,
    )


def _draft_vocab_size(tensors: DrafterTensors, config: Mapping[str, object], vocab_size: int) -> int:
    size = config.get("draft_vocab_size")
    if size is None:
        stored = tensors.shape(HEAD)
        size = stored[0] if stored else vocab_size
    if type(size) is not int or not 1 <= size <= vocab_size:
        raise tensors.refusal(f"a draft vocabulary of {size!r:.40} tokens does not fit the target's {vocab_size}")
    return size


def _unread(tensors: DrafterTensors, shape: EagleShape, settings: SpeculationSettings) -> frozenset[str]:
    """Tensors that may be there without being weights of the head: the maps, and norms a user said do not run."""
    unread = _MAPS if shape.has_map else frozenset()
    if settings.eagle.feature_norm is not None:
        unread |= frozenset(tensors.matching("input_norm.") + tensors.matching("fc_norm."))
    return unread


def _check_shared(tensors: DrafterTensors, shape: EagleShape, settings: SpeculationSettings) -> None:
    """What a checkpoint leaves out must be what the target has."""
    width, target_width = shape.arch.hidden_size, shape.target_width
    if shape.facts.layout.generation == 1 and width != target_width:
        raise tensors.refusal(f"it is {width} wide; the target it continues must be as wide, and is {target_width}")
    for name, is_there in ((EMBEDDING, shape.has_embedding), (HEAD, shape.has_head)):
        if not is_there and width != target_width:
            raise tensors.refusal(
                f"the tensor {name} is missing, and the target's is {target_width} wide where {width} is needed"
            )
    if shape.draft_vocab_size < shape.arch.vocab_size and not shape.has_map:
        raise tensors.refusal(
            f"the tensor d2t is missing: it drafts {shape.draft_vocab_size} of {shape.arch.vocab_size} tokens"
        )
    if settings.eagle.vocabulary_map is not None and not shape.has_map:
        raise ValueError(f"--eagle-vocabulary-map says nothing: {tensors.directory} has no tensor d2t")
    stored = tensors.shape("fc.weight")
    if shape.facts.layout.generation == 3 and stored is not None and len(stored) == 2:
        taps = shape.facts.taps
        if stored[1] != len(taps) * target_width:
            raise ValueError(
                f"{tensors.directory}: fc.weight reads {stored[1]} numbers, which is not {len(taps)} hidden states "
                f"({', '.join(map(str, taps))}) of {target_width}: another target, or --eagle-taps must say which to read"
            )


def _default_length(config: Mapping[str, object], tree: TreeShape | None) -> int:
    """What a speculators checkpoint was trained to draft, where it says so."""
    if tree is not None:
        return DEFAULT_TREE_NODES
    described = config.get("speculators_config")
    methods = described.get("proposal_methods") if isinstance(described, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    length = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return length if type(length) is int and 1 <= length <= 64 else DEFAULT_CHAIN_TOKENS


def _item_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.float32.itemsize if len(size) == 1 else dtype.itemsize


def _suspects(facts: EagleFacts) -> str:
    taps = ",".join(map(str, facts.taps))
    if facts.layout.generation == 1:
        return f"the hidden state it reads (--eagle-taps, now {taps}; --eagle-final-norm, now {facts.final_norm})"
    return (
        f"the hidden states it reads (--eagle-taps, now {taps}), then --eagle-norm-before-residual (now "
        f"{facts.norm_before_residual}), --eagle-feature-norm (now {facts.feature_norm}), --eagle-norm-output (now "
        f"{facts.norm_output}), --eagle-final-norm (now {facts.final_norm}) and --eagle-vocabulary-map (now "
        f"{facts.vocabulary_map})"
    )

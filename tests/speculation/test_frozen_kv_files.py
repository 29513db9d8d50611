"""Assistants are read as Gemma 4's are published; what this target cannot carry is refused by its name."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.rope import LinearScaling, RopeConfig
from engine.speculation.frozen_kv_recipe import FrozenKvRecipe
from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from protocol.model_files import ModelFiles, ModelFilesError
from tests.speculation.frozen_kv_rows import BLOCK_SIZE, NUM_BLOCKS, facts_of
from tests.tiny import write_tiny_model
from tests.tiny_drafters import target_model
from tests.tiny_frozen_kv import PLAIN, PublishedAssistant, write_frozen_kv

CLUSTERED = PublishedAssistant(clusters=(16, 5))
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("frozen_kv_files") / "target", seed=3)


@pytest.fixture(scope="module")
def facts(target: Path) -> TargetFacts:
    return facts_of(target, target_model(target))


def prepared(facts: TargetFacts, directory: Path | None, **settings: object) -> FrozenKvRecipe:
    draft_model = None if directory is None else str(directory)
    return FrozenKvRecipe(SpeculationSettings(draft_model=draft_model, **settings), facts)  # type: ignore[arg-type]


def changed(directory: Path, change: Change) -> Path:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory


def reconfigured(directory: Path, entries: dict[str, Any], text_entries: dict[str, Any]) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | entries
    if text_entries:
        config["text_config"] |= text_entries
    path.write_text(json.dumps(config))
    return directory


def drop(name: str) -> Change:
    return lambda weights: weights.pop(name)


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda weights: weights.update({name: tensor})


def test_an_assistant_asks_for_no_keys_and_says_what_it_reads(
    facts: TargetFacts, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_frozen_kv(tmp_path / "assistant", target, CLUSTERED)
    with caplog.at_level(logging.INFO):
        recipe = prepared(facts, directory)
    assert recipe.kv_bytes_per_token == 0
    stored = load_file(directory / "model.safetensors").values()
    assert recipe.weight_bytes == sum(tensor.numel() * tensor.element_size() for tensor in stored)
    assert recipe.capabilities.taps == (2,)
    assert recipe.capabilities.lookahead == 0
    assert recipe.capabilities.max_draft_len == 3
    assert "layers=2 reads_target_layers=1,1 clusters=5 of 16 context=512" in caplog.text


def test_it_cannot_be_built_without_the_targets_keys(facts: TargetFacts, target: Path, tmp_path: Path) -> None:
    recipe = prepared(facts, write_frozen_kv(tmp_path / "assistant", target))
    with pytest.raises(ValueError, match="frozen_kv_mtp reads the target's keys, and was given none"):
        recipe.build(Target(target_model(target), NUM_BLOCKS, BLOCK_SIZE))


def test_keys_of_its_own_and_a_second_embedding_are_left_alone(
    facts: TargetFacts, target: Path, tmp_path: Path
) -> None:
    """Publishers may ship what no layer reads."""
    directory = write_frozen_kv(tmp_path / "assistant", target, PublishedAssistant(has_head=True))
    changed(directory, put("model.embed_tokens.weight", torch.zeros(320, 48)))
    changed(directory, put("model.layers.0.self_attn.k_proj.weight", torch.zeros(32, 48)))
    bytes_read = prepared(facts, directory).weight_bytes
    assert bytes_read == prepared(facts, write_frozen_kv(tmp_path / "other", target)).weight_bytes


def test_it_needs_a_directory(facts: TargetFacts, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--speculator frozen_kv_mtp needs --draft-model"):
        prepared(facts, None)


def test_a_shorter_context_is_said_at_the_start(
    facts: TargetFacts, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(facts, write_frozen_kv(tmp_path / "assistant", target, PublishedAssistant(context_length=20)))
    assert "sequences longer than that run without drafts" in caplog.text


REFUSED: dict[str, tuple[PublishedAssistant, Change, str]] = {
    "missing": (PLAIN, drop("pre_projection.weight"), "the tensor pre_projection.weight is missing"),
    "missing-layer": (PLAIN, drop("model.layers.1.layer_scalar"), "the tensor model.layers.1.layer_scalar is missing"),
    "missing-output": (PLAIN, drop("model.embed_tokens.weight"), "the tensor embed_tokens.weight is missing"),
    "misshapen": (PLAIN, put("post_projection.weight", torch.zeros(48, 64)), r"post_projection.weight has shape \(48"),
    "unknown": (PLAIN, put("model.layers.2.layer_scalar", torch.ones(1)), "layer_scalar is not part of a frozen-KV"),
    "clusters-unasked": (PLAIN, put("masked_embedding.centroids.weight", torch.ones(16, 48)), "is not part of a froz"),
    "ordering": (
        CLUSTERED,
        put("masked_embedding.token_ordering", torch.zeros(320, dtype=torch.int64)),
        "masked_embedding.token_ordering does not name every token once",
    ),
    "heads": (
        PLAIN,
        put("model.layers.0.self_attn.q_norm.weight", torch.ones(8)),
        "made for heads of a width of 8; the target has 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_cannot_be_right_are_named(facts: TargetFacts, target: Path, tmp_path: Path, case: str) -> None:
    published, change, reason = REFUSED[case]
    directory = changed(write_frozen_kv(tmp_path / "assistant", target, published), change)
    with pytest.raises(ModelFilesError, match=reason):
        prepared(facts, directory)


FULL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("entries", "text_entries", "reason"),
    [
        ({"model_type": "gemma4_unified_assistant"}, {}, "'gemma4_unified_assistant' is not supported"),
        ({"text_config": None}, {}, "text_config of config.json is missing"),
        ({"backbone_hidden_size": 1536}, {}, r"states of a width \(backbone_hidden_size\) of 1536; the target has 64"),
        ({"use_ordered_embeddings": "yes"}, {}, "use_ordered_embeddings of config.json must be true or false"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "num_centroids of config.json must divide"),
        ({"use_ordered_embeddings": True, "num_centroids": 16}, {}, "centroid_intermediate_top_k of config.json must"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "it is a quantised checkpoint"),
        ({}, {"vocab_size": 300}, "a vocabulary of 300; the target has 320"),
        ({}, {"num_key_value_heads": 1}, "a number of key-value heads of 1; the target has 2"),
        ({}, {"attention_k_eq_v": True, "num_global_key_value_heads": 4}, "key-value heads of 4; the target has 2"),
        ({}, {"per_layer_config": {"0": {"num_key_value_heads": 8}}}, "key-value heads of 8; the target has 2"),
        ({}, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types of text_config has 'sliding_att"),
        ({}, {"layer_types": None}, "layer_types of text_config must name the attention of every layer"),
        ({}, {"num_kv_shared_layers": 1}, "an assistant has no keys of its own in any layer"),
        ({}, {"enable_moe_block": True}, "enable_moe_block of text_config means a mixture of experts"),
        ({}, {"use_double_wide_mlp": True}, "use_double_wide_mlp of text_config means"),
        ({}, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input of text_config means embeddings for"),
        ({}, {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({}, {"rope_parameters": {}}, "rope_parameters of text_config must have an entry full_attention"),
        ({}, {"rope_parameters": {"full_attention": FULL_ROPE | {"rope_type": "proportional"}}}, "rope scaling 'propo"),
        ({}, {"rope_parameters": {"full_attention": FULL_ROPE | {"partial_rotary_factor": 0.25}}}, "partial_rotary_fac"),
        ({}, {"rope_parameters": {"full_attention": FULL_ROPE | {"rope_theta": 1e6}}}, "target's keys are rotated by"),
        ({}, {"max_position_embeddings": None}, "max_position_embeddings of text_config must be a whole number"),
        ({}, {"num_attention_heads": 3}, "3 attention heads cannot share 2 key-value heads evenly"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_right_is_refused(
    facts: TargetFacts, target: Path, tmp_path: Path, entries: dict[str, Any], text_entries: dict[str, Any], reason: str
) -> None:
    directory = reconfigured(write_frozen_kv(tmp_path / "assistant", target), entries, text_entries)
    with pytest.raises(ModelFilesError, match=reason):
        prepared(facts, directory)


def test_a_scaling_that_a_gguf_target_keeps_as_a_tensor_is_not_doubted(
    facts: TargetFacts, target: Path, tmp_path: Path
) -> None:
    rope = FULL_ROPE | {"rope_type": "linear", "factor": 2.0}
    written = write_frozen_kv(tmp_path / "assistant", target)
    directory = reconfigured(written, {}, {"rope_parameters": {"full_attention": rope}})
    with pytest.raises(ModelFilesError, match="the target's keys are rotated by"):
        prepared(facts, directory)
    scaled = replace(facts, arch=replace(facts.arch, rope=RopeConfig(10000.0, LinearScaling(2.0))))
    for able in (scaled, replace(facts, files=ModelFiles("gguf", tmp_path / "x.gguf", "x"))):
        assert prepared(able, directory).capabilities.max_draft_len == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"draft_sampling": "hot"}, "--draft-sampling must be one of greedy, sampled, got 'hot'"),
        ({"tree_top_k": 4}, "--tree-top-k says nothing with --speculator frozen_kv_mtp, which drafts chains"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    facts: TargetFacts, target: Path, tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    directory = write_frozen_kv(tmp_path / "assistant", target)
    with pytest.raises(ValueError, match=reason):
        prepared(facts, directory, **settings)

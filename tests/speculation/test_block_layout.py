"""Block drafters in every published layout come to one convention, and what cannot be used is refused by name."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.speculation.recipe import BlockOverrides, Recipe, SpeculationSettings, Target
from engine.speculation.registry import prepare
from protocol.model_files import ModelFilesError
from tests.speculation.block_harness import recipe_of
from tests.speculation.on_host import toy_facts
from tests.tiny import write_tiny_model
from tests.tiny_blocks import PublishedBlock, write_block
from tests.tiny_drafters import target_model

ZLAB = PublishedBlock("z-lab")
SPARK = PublishedBlock("deepspec", anchor="first", markov="vanilla", confidence="markov")
SPECULATORS = PublishedBlock("speculators", draft_vocab_size=100, has_head=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=5)


def prepared(target: Path, directory: Path, published: PublishedBlock, **settings: Any) -> Recipe:
    return recipe_of(target, directory, published.name, SpeculationSettings(**settings))


def edit_config(directory: Path, **changes: Any) -> None:
    """A None takes the key away."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, str(path))


@pytest.mark.parametrize(
    ("published", "line"),
    [
        (ZLAB, "layout=z-lab anchor=drop taps=1,2 final_norm=false block_size=5 mask_token=319 windows=all,all"),
        (replace(ZLAB, sliding=(True, False)), "windows=6,all causal=true,false layers=2 markov=none confidence=false"),
        (replace(ZLAB, says_causal=True), "windows=all,all causal=true,true"),
        (PublishedBlock("z-lab", anchor="first", says_anchor=True), "layout=z-lab anchor=first"),
        (
            PublishedBlock("specforge", markov="gated"),
            "layout=z-lab anchor=drop taps=1,2 final_norm=false block_size=5",
        ),
        (PublishedBlock("deepspec", anchor="first"), "layout=deepspec anchor=first taps=1,2"),
        (SPARK, "layout=deepspec anchor=first taps=1,2 final_norm=false block_size=5 mask_token=319 windows=all,all"),
        (SPARK, "markov=vanilla/8 confidence=true vocabulary=320 of 320 own=nothing"),
        (SPECULATORS, "layout=speculators anchor=drop taps=1,2"),
        (SPECULATORS, "vocabulary=100 of 320 own=head"),
        (replace(SPECULATORS, sliding=(True, True)), "windows=6,6 causal=true,true"),
        (replace(SPECULATORS, sliding=(True, True), says_causal=False), "windows=6,6 causal=false,false"),
        (PublishedBlock("speculators", anchor="first", markov="rnn"), "layout=speculators anchor=first taps=1,2"),
        (PublishedBlock("speculators", anchor="drop", says_anchor=True, markov="rnn"), "anchor=drop"),
    ],
)
def test_every_layout_comes_to_one_convention_which_is_logged(
    target: Path, tmp_path: Path, published: PublishedBlock, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_block(tmp_path / "d", target, published)
    with caplog.at_level(logging.INFO):
        recipe = prepared(target, tmp_path / "d", published)
    (record,) = caplog.records
    assert line in record.getMessage()
    capabilities = recipe.capabilities
    assert capabilities.taps == published.taps and capabilities.lookahead == 0
    assert capabilities.max_draft_len == published.max_tokens
    assert not capabilities.drafts_on_host and not capabilities.tree and not capabilities.gives_probs
    assert recipe.kv_bytes_per_token == published.num_layers * 2 * 2 * 16 * 4 and recipe.weight_bytes > 0


def test_a_tree_may_have_more_nodes_than_a_block_has_rows(target: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "d", target, ZLAB)
    asked = [{}, {"tree_depth": 2}, {"num_draft_tokens": 40}, {"num_draft_tokens": 3, "tree_depth": 4}]
    trees = [prepared(target, tmp_path / "d", ZLAB, tree_top_k=3, **more).capabilities for more in asked]
    assert [tree.max_draft_len for tree in trees] == [16, 12, 40, 3]
    assert all(tree.tree and not tree.gives_probs for tree in trees)
    assert not prepared(target, tmp_path / "d", ZLAB, tree_top_k=0).capabilities.tree


def test_keys_in_dflash_config_come_before_those_at_the_top(target: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "d", target, ZLAB)
    nested = json.loads((tmp_path / "d" / "config.json").read_text())["dflash_config"]
    edit_config(tmp_path / "d", dflash_config={**nested, "block_size": 4})
    assert prepared(target, tmp_path / "d", ZLAB).capabilities.max_draft_len == 3
    edit_config(tmp_path / "d", dflash_config={**nested, "use_swa": True, "swa_window_size": 9})
    assert prepared(target, tmp_path / "d", ZLAB)._shape.facts.windows == (9, 9)


def test_a_zlab_drafter_without_layer_ids_reads_those_of_its_publishers_code(tmp_path: Path) -> None:
    """Evenly spread from layer 1 to the third from the end: hidden states 2, 4 and 6 of 8 layers; one layer, the middle."""
    deep = write_tiny_model(tmp_path / "deep", "llama", num_layers=8)
    published = replace(ZLAB, taps=(2, 4, 6), num_layers=3, sliding=(False,) * 3)
    write_block(tmp_path / "d", deep, published)
    edit_config(tmp_path / "d", dflash_config={"mask_token_id": 5})
    assert prepared(deep, tmp_path / "d", published).capabilities.taps == (2, 4, 6)
    single = replace(ZLAB, taps=(5,), num_layers=1)
    write_block(tmp_path / "s", deep, single)
    edit_config(tmp_path / "s", dflash_config={"mask_token_id": 5})
    assert prepared(deep, tmp_path / "s", single).capabilities.taps == (5,)


def test_overrides_come_before_the_files(target: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "d", target, ZLAB)
    overrides = BlockOverrides(taps="0,1", anchor="first", causal="all")
    recipe: Any = prepared(target, tmp_path / "d", ZLAB, block=overrides)
    facts = recipe._shape.facts
    assert (facts.taps, facts.anchor, facts.causal) == ((0, 1), "first", (True, True))
    assert recipe.capabilities.max_draft_len == 5  # all rows of the block draft
    normed: Any = prepared(target, tmp_path / "d", ZLAB, block=BlockOverrides(final_norm=True))
    assert normed._shape.facts.final_norm


def test_draft_lengths_and_choices_follow_the_options(target: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "d", target, SPARK)
    assert prepared(target, tmp_path / "d", SPARK, num_draft_tokens=2).capabilities.max_draft_len == 2
    assert prepared(target, tmp_path / "d", SPARK, draft_sampling="sampled").capabilities.gives_probs
    with pytest.raises(ValueError, match="--num-draft-tokens 6 is more than the 5 that a block of 5 rows drafts"):
        prepared(target, tmp_path / "d", SPARK, num_draft_tokens=6)


def test_what_repeats_the_targets_tensors_takes_no_memory(target: Path, tmp_path: Path) -> None:
    published = PublishedBlock("deepspec", anchor="first", has_embedding=True, has_head=True)
    model = target_model(target)
    write_block(tmp_path / "d", target, published)
    edit_tensors(tmp_path / "d", lambda weights: weights.update({"embed_tokens.weight": model.weights.embedding}))
    speculator: Any = prepared(target, tmp_path / "d", published).build(Target(model, 4, 4))
    weights = speculator._passes.model.weights
    assert weights.embedding is model.weights.embedding
    assert weights.output is not model.weights.output  # this one differs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree_top_k": 33}, "--tree-top-k must be between 0 and 32, got 33"),
        (
            {"tree_top_k": 2, "tree_depth": 5},
            "--tree-depth must be between 1 and 4, one level per token .* 5 rows .* got 5",
        ),
        ({"num_draft_tokens": 7, "tree_top_k": 2, "tree_depth": 2}, "a tree of 2 levels with 2 children .* has 6$"),
        ({"tree_top_k": 2, "draft_sampling": "sampled"}, "--draft-sampling sampled cannot be had with --tree-top-k"),
        ({"draft_sampling": "hot"}, "--draft-sampling must be one of greedy, sampled"),
        ({"confidence_threshold": 0.5}, "--confidence-threshold says nothing: .* has no confidence head"),
        ({"confidence_threshold": 1.5}, "--confidence-threshold must be between 0 and 1, got 1.5"),
        ({"block": BlockOverrides(taps="1;2")}, "--block-taps must be whole numbers separated by commas"),
        ({"block": BlockOverrides(taps="1,3")}, "reads hidden state 3 of a target that has 0 to 2"),
        ({"block": BlockOverrides(taps="0,1,2")}, "which is not 3 hidden states .0, 1, 2. of 64"),
        ({"block": BlockOverrides(taps="0,1", final_norm=True)}, "--block-final-norm says nothing"),
        ({"block": BlockOverrides(anchor="last")}, "--block-anchor must be one of drop, first, got 'last'"),
        ({"block": BlockOverrides(causal="some")}, "--block-causal must be one of none, sliding, all, got 'some'"),
    ],
)
def test_options_that_cannot_work_are_refused(
    target: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write_block(tmp_path / "d", target, ZLAB)
    with pytest.raises(ValueError, match=message):
        prepared(target, tmp_path / "d", ZLAB, **settings)


def test_a_drafter_of_the_other_name_says_how_to_start_it(target: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "flash", target, ZLAB)
    write_block(tmp_path / "spark", target, SPARK)
    with pytest.raises(ValueError, match="has no Markov head: it is a dflash drafter, say --speculator dflash"):
        recipe_of(target, tmp_path / "flash", "dspark", SpeculationSettings())
    with pytest.raises(ValueError, match="it is a dspark drafter, say --speculator dspark"):
        recipe_of(target, tmp_path / "spark", "dflash", SpeculationSettings())


@pytest.mark.parametrize(
    ("published", "change", "message"),
    [
        (ZLAB, lambda w: w.pop("fc.weight"), "fc.weight is missing"),
        (ZLAB, lambda w: w.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight is missing"),
        (ZLAB, lambda w: w.update({"layers.0.extra": torch.ones(2)}), "layers.0.extra is not part of a dflash drafter"),
        (ZLAB, lambda w: w.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \(3,\)"),
        (
            ZLAB,
            lambda w: w.update({"layers.0.attention_conv.base_kernel": torch.ones(2)}),
            "attention_conv.base_kernel",
        ),
        (SPECULATORS, lambda w: (w.pop("d2t"), w.pop("t2d")), "d2t is missing: it drafts 100 of 320"),
        (SPECULATORS, lambda w: w.update({"d2t": w["d2t"].flip(0)}), "maps no vocabulary .its tokens do not ascend."),
        (SPARK, lambda w: w.pop("markov_head.markov_w1.weight"), "markov_w1.weight is missing"),
        (SPARK, lambda w: w.pop("confidence_head.proj.weight"), "confidence_head.proj.weight is missing"),
    ],
)
def test_tensors_that_cannot_be_used_are_named(
    target: Path,
    tmp_path: Path,
    published: PublishedBlock,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    write_block(tmp_path / "d", target, published)
    edit_tensors(tmp_path / "d", change)
    with pytest.raises(ModelFilesError, match=message):
        prepared(target, tmp_path / "d", published)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (ZLAB, {"vocab_size": 321}, "vocabulary of 321 tokens; the target has 320"),
        (ZLAB, {"block_size": 1}, "a block_size of 1 is not between 2 and 65"),
        (ZLAB, {"block_size": 66}, "a block_size of 66 is not between 2 and 65"),
        (ZLAB, {"dflash_config": {}}, "mask_token_id of config.json must be a whole number"),
        (ZLAB, {"dflash_config": []}, "dflash_config of config.json must be an object"),
        (ZLAB, {"dflash_config": {"mask_token_id": 320}}, "mask_token_id 320 is none of the target's 320 tokens"),
        (ZLAB, {"is_causal": "yes"}, "is_causal of config.json must be true or false"),
        (ZLAB, {"layer_types": ["sliding_attention"]}, "layer_types of config.json must name"),
        (ZLAB, {"layer_types": ["sliding_attention"] * 2}, "sliding_window of config.json must be a whole number"),
        (ZLAB, {"is_neox_style": False}, "is_neox_style of config.json is False, which is not supported"),
        (ZLAB, {"attention_value_scale": 0.5}, "attention_value_scale of config.json is 0.5, which is not supported"),
        (ZLAB, {"selector_rank": 64}, "selector_rank of config.json is 64 .DFlash2., which is not supported"),
        (ZLAB, {"markov_rank": 8}, "is a dspark drafter"),
        (ZLAB, {"max_position_embeddings": 0}, "max_position_embeddings of config.json"),
        (ZLAB, {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        (SPARK, {"markov_rank": 0}, "has the tensors of a Markov head, but config.json names no markov_rank"),
        (SPARK, {"markov_head_type": "lstm"}, "markov_head_type of config.json must be one of vanilla, gated, rnn"),
        (SPARK, {"markov_head_type": "gated"}, "markov_head.gate_proj.weight is missing"),
        (SPARK, {"target_layer_ids": None}, "target_layer_ids of config.json is missing: --block-taps must say"),
        (SPARK, {"target_layer_ids": "1"}, "target_layer_ids of config.json must be a list of whole numbers"),
        (SPECULATORS, {"speculators_model_type": "eagle3"}, "speculators model of type 'eagle3'"),
        (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config of config.json is missing"),
        (SPECULATORS, {"draft_vocab_size": 400}, "draft vocabulary of 400 tokens does not fit"),
    ],
)
def test_configurations_that_cannot_be_used_are_named(
    target: Path, tmp_path: Path, published: PublishedBlock, changes: dict[str, Any], message: str
) -> None:
    write_block(tmp_path / "d", target, published)
    edit_config(tmp_path / "d", **changes)
    with pytest.raises((ModelFilesError, ValueError), match=message):
        prepared(target, tmp_path / "d", published)


def test_what_is_no_block_drafter_is_refused(target: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "d", target, ZLAB)
    (tmp_path / "d" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelFilesError, match=r"mask_embedding.pt, .* is not supported"):
        prepared(target, tmp_path / "d", ZLAB)
    with pytest.raises(ModelFilesError, match="it is no block drafter"):
        recipe_of(target, target, "dflash", SpeculationSettings())
    with pytest.raises(ValueError, match="--speculator dspark needs --draft-model"):
        prepare("dspark", SpeculationSettings(), toy_facts(100))


def test_a_drafter_for_shorter_texts_says_so(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    published = replace(ZLAB, context_length=64)
    write_block(tmp_path / "d", target, published)
    prepared(target, tmp_path / "d", published)
    assert "context=64 max_model_len=512" in caplog.text

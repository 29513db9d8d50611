"""EAGLE checkpoints in every published layout come to one convention, and what cannot be used is refused by name."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.speculation.recipe import EagleOverrides, Recipe, SpeculationSettings, Target
from protocol.model_files import ModelFilesError
from tests.speculation.eagle_harness import BLOCK_SIZE, NUM_BLOCKS, recipe_of
from tests.tiny import write_tiny_model
from tests.tiny_drafters import Published, target_model, write_eagle

EAGLE = Published("eagle", taps=(2,), has_head=False)
EAGLE3 = Published("safeailab", taps=(1, 2), draft_vocab_size=100)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=5)


def prepared(target: Path, directory: Path, published: Published, **settings: Any) -> Recipe:
    return recipe_of(target, directory, published.generation, SpeculationSettings(**settings))


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
        (EAGLE, "layout=eagle taps=2 final_norm=true feature_norm=none"),
        (EAGLE3, "layout=safeailab taps=1,2 final_norm=false feature_norm=none norm_before_residual=false"),
        (Published("deepspec", taps=(1, 2), qk_norm=True), "layout=deepspec taps=1,2 final_norm=false"),
        (
            Published("speculators", taps=(0, 2), norm_before_residual=True, norm_output=True, feature_norm="joint"),
            "layout=speculators taps=0,2 final_norm=false feature_norm=joint norm_before_residual=true norm_output=true",
        ),
        (replace(EAGLE3, feature_norm="each", pickled=True), "taps=1,2 final_norm=false feature_norm=each"),
    ],
)
def test_every_layout_comes_to_one_convention_which_is_logged(
    target: Path, tmp_path: Path, published: Published, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_eagle(tmp_path / "d", target, published)
    with caplog.at_level(logging.INFO):
        recipe = prepared(target, tmp_path / "d", published)
    (record,) = caplog.records
    assert (
        line in record.getMessage() and f"vocabulary={published.draft_vocab_size or 320} of 320" in record.getMessage()
    )
    capabilities = recipe.capabilities
    assert capabilities.taps == published.taps and capabilities.lookahead == 1
    assert not capabilities.drafts_on_host and not capabilities.tree and not capabilities.gives_probs
    assert recipe.kv_bytes_per_token == 2 * 2 * 16 * 4 and recipe.weight_bytes > 0


def test_a_target_of_another_depth_gets_the_usual_hidden_states(tmp_path: Path) -> None:
    deep = write_tiny_model(tmp_path / "deep", "llama", num_layers=8)
    published = Published("speculators", taps=(2, 4, 5))
    write_eagle(tmp_path / "d", deep, published)
    edit_config(tmp_path / "d", eagle_aux_hidden_state_layer_ids=None)
    assert prepared(deep, tmp_path / "d", published).capabilities.taps == (2, 4, 5)


def test_a_key_at_the_top_numbers_hidden_states_and_a_nested_one_layers(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "d", target, EAGLE3)
    edit_config(tmp_path / "d", eagle_config=None, eagle_aux_hidden_state_layer_ids=[0, 1])
    assert prepared(target, tmp_path / "d", EAGLE3).capabilities.taps == (0, 1)
    edit_config(tmp_path / "d", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]})
    assert prepared(target, tmp_path / "d", EAGLE3).capabilities.taps == (1, 2)


def test_draft_lengths_and_trees_follow_the_options(target: Path, tmp_path: Path) -> None:
    speculators = Published("speculators", taps=(1, 2))
    write_eagle(tmp_path / "s", target, speculators)
    write_eagle(tmp_path / "e", target, EAGLE)
    assert prepared(target, tmp_path / "s", speculators).capabilities.max_draft_len == 3  # as it was trained
    assert prepared(target, tmp_path / "e", EAGLE).capabilities.max_draft_len == 4
    assert prepared(target, tmp_path / "e", EAGLE, num_draft_tokens=7).capabilities.max_draft_len == 7
    tree = prepared(target, tmp_path / "e", EAGLE, tree_top_k=3).capabilities
    assert tree.tree and tree.max_draft_len == 16
    assert not prepared(target, tmp_path / "e", EAGLE, tree_top_k=0).capabilities.tree
    assert prepared(target, tmp_path / "e", EAGLE, draft_sampling="sampled").capabilities.gives_probs


def test_what_repeats_the_targets_tensors_takes_no_memory(target: Path, tmp_path: Path) -> None:
    from engine.speculation.recipe import Target
    from tests.tiny_drafters import target_model

    published = replace(EAGLE, has_embedding=True, has_head=True)
    model = target_model(target)
    write_eagle(tmp_path / "d", target, published)
    edit_tensors(tmp_path / "d", lambda weights: weights.update({"embed_tokens.weight": model.weights.embedding}))
    speculator: Any = prepared(target, tmp_path / "d", published).build(Target(model, 4, 4))
    weights = speculator._passes.head.weights
    assert weights.embedding is model.weights.embedding
    assert weights.output is not model.weights.output  # this one differs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree_depth": 4}, "--tree-depth says nothing without --tree-top-k"),
        ({"tree_top_k": 33}, "--tree-top-k must be between 0 and 32"),
        ({"tree_top_k": 2, "tree_depth": 17}, "--tree-depth must be between 1 and 16"),
        ({"tree_top_k": 2, "draft_sampling": "sampled"}, "--draft-sampling sampled cannot be had with --tree-top-k"),
        ({"draft_sampling": "hot"}, "--draft-sampling must be one of greedy, sampled"),
        ({"eagle": EagleOverrides(taps="1;2")}, "--eagle-taps must be whole numbers separated by commas"),
        ({"eagle": EagleOverrides(taps="1,3")}, "reads hidden state 3 of a target that has 0 to 2"),
        ({"eagle": EagleOverrides(taps="0,1,2")}, "which is not 3 hidden states .0, 1, 2. of 64"),
        (
            {"eagle": EagleOverrides(feature_norm="joint")},
            "--eagle-feature-norm joint: .* has no weights of such a norm",
        ),
        ({"eagle": EagleOverrides(feature_norm="two")}, "--eagle-feature-norm must be one of none, joint, each"),
        ({"eagle": EagleOverrides(vocabulary_map="names")}, "--eagle-vocabulary-map must be one of offsets, ids"),
        ({"eagle": EagleOverrides(vocabulary_map="ids")}, "d2t, read as ids, maps no vocabulary"),
    ],
)
def test_options_that_cannot_work_are_refused(
    target: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write_eagle(tmp_path / "d", target, EAGLE3)
    with pytest.raises((ValueError, ModelFilesError), match=message):
        prepared(target, tmp_path / "d", EAGLE3, **settings)


def test_options_that_say_nothing_about_a_drafter_are_refused(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "d", target, EAGLE)
    for name, value in (("norm_output", True), ("norm_before_residual", False), ("feature_norm", "none")):
        with pytest.raises(ValueError, match=f"--eagle-{name.replace('_', '-')} says nothing about an EAGLE-1/2"):
            prepared(target, tmp_path / "d", EAGLE, eagle=EagleOverrides(**{name: value}))
    whole = replace(EAGLE3, draft_vocab_size=None)
    write_eagle(tmp_path / "w", target, whole)
    with pytest.raises(ValueError, match="--eagle-vocabulary-map says nothing"):
        prepared(target, tmp_path / "w", whole, eagle=EagleOverrides(vocabulary_map="ids"))


def test_a_drafter_of_the_other_generation_says_how_to_start_it(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "one", target, EAGLE)
    write_eagle(tmp_path / "three", target, EAGLE3)
    with pytest.raises(ValueError, match="is an eagle drafter: say --speculator eagle"):
        recipe_of(target, tmp_path / "one", 3, SpeculationSettings())
    with pytest.raises(ValueError, match="is an eagle3 drafter: say --speculator eagle3"):
        recipe_of(target, tmp_path / "three", 1, SpeculationSettings())


def _cut_map(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] = weights["d2t"].flip(0).contiguous()


def _as_whole_numbers(weights: dict[str, torch.Tensor]) -> None:
    weights["midlayer.mlp.up_proj.weight"] = torch.zeros_like(weights["midlayer.mlp.up_proj.weight"], dtype=torch.int8)


def _other_marks(weights: dict[str, torch.Tensor]) -> None:
    weights["t2d"] = ~weights["t2d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), "fc.weight is missing"),
        (lambda w: w.pop("norm.weight"), "norm.weight is missing"),
        (lambda w: w.pop("midlayer.mlp.up_proj.weight"), "the tensor midlayer.mlp.up_proj.weight is missing"),
        (
            lambda w: w.pop("midlayer.hidden_norm.weight"),
            "the tensor midlayer.hidden_norm.weight is missing: .* EAGLE-3",
        ),
        (_as_whole_numbers, "the tensor midlayer.mlp.up_proj.weight is stored as torch.int8"),
        (lambda w: (w.pop("d2t"), w.pop("t2d")), "d2t is missing: it drafts 100 of 320"),
        (lambda w: w.update({"midlayer.extra": torch.ones(2)}), "midlayer.extra is not part of an eagle3 drafter"),
        (lambda w: w.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \(3,\)"),
        (lambda w: w.update({"lm_head.weight": torch.ones(99, 64)}), r"lm_head.weight has shape \(99, 64\)"),
        (lambda w: w.update({"mask_hidden": torch.ones(1)}), "drafts in parallel"),
        (lambda w: w.update({"input_norm.weight": torch.ones(128)}), "norm_before_fc of config.json is false"),
        (_cut_map, "d2t, read as offsets, maps no vocabulary .its tokens do not ascend."),
        (_other_marks, "maps no vocabulary .t2d marks other tokens."),
    ],
)
def test_tensors_that_cannot_be_used_are_named(
    target: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    write_eagle(tmp_path / "d", target, EAGLE3)
    edit_tensors(tmp_path / "d", change)
    with pytest.raises(ModelFilesError, match=message):
        prepared(target, tmp_path / "d", EAGLE3).build(Target(target_model(target), NUM_BLOCKS, BLOCK_SIZE))


def test_a_missing_tensor_is_named_as_its_publisher_would(target: Path, tmp_path: Path) -> None:
    published = Published("speculators", taps=(1, 2))
    write_eagle(tmp_path / "d", target, published)
    edit_tensors(tmp_path / "d", lambda weights: weights.pop("layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelFilesError, match=r"the tensor layers\.0\.mlp\.up_proj\.weight is missing"):
        prepared(target, tmp_path / "d", published)

    def with_prefix(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("layers.")]:
            weights[f"model.{name}"] = weights.pop(name)

    edit_tensors(tmp_path / "d", with_prefix)
    with pytest.raises(ModelFilesError, match=r"the tensor model\.layers\.0\.mlp\.up_proj\.weight is missing"):
        prepared(target, tmp_path / "d", published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "several layers are not supported; this one has 2"),
        ({"vocab_size": 321}, "vocabulary of 321 tokens; the target has 320"),
        ({"draft_vocab_size": 400}, "draft vocabulary of 400 tokens does not fit"),
        ({"speculators_model_type": "peagle"}, "speculators model of type 'peagle'"),
        ({"block_size": 16}, "block drafter"),
        ({"norm_output": "yes"}, "norm_output of config.json must be true or false"),
        ({"fc_norm": True}, "fc_norm of config.json is true, but the norm's weights are missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1"}}, "must be a list of whole numbers"),
        ({"max_position_embeddings": 0}, "max_position_embeddings of config.json"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ],
)
def test_configurations_that_cannot_be_used_are_named(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle(tmp_path / "d", target, EAGLE3)
    edit_config(tmp_path / "d", **changes)
    with pytest.raises(ModelFilesError, match=message):
        prepared(target, tmp_path / "d", EAGLE3)


def test_a_map_of_token_ids_is_read_when_it_is_said_to_be_one(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "d", target, EAGLE3)
    edit_tensors(tmp_path / "d", lambda weights: weights["d2t"].add_(torch.arange(100)))
    with pytest.raises(ModelFilesError, match="--eagle-vocabulary-map says how to read it"):
        prepared(target, tmp_path / "d", EAGLE3)
    assert prepared(target, tmp_path / "d", EAGLE3, eagle=EagleOverrides(vocabulary_map="ids")).weight_bytes > 0


def test_files_that_are_no_weights_run_nothing(target: Path, tmp_path: Path) -> None:
    """A pickle that would call something is refused unread."""
    published = replace(EAGLE3, pickled=True)
    write_eagle(tmp_path / "d", target, published)
    torch.save({"fc.weight": Path("x")}, tmp_path / "d" / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match=r"pytorch_model.bin cannot be read as plain weights"):
        prepared(target, tmp_path / "d", published)
    torch.save([torch.ones(2)], tmp_path / "d" / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match="holds a list, not tensors by name"):
        prepared(target, tmp_path / "d", published)


def test_a_drafter_for_shorter_texts_says_so(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    published = replace(EAGLE3, context_length=64)
    write_eagle(tmp_path / "d", target, published)
    prepared(target, tmp_path / "d", published)
    assert "context=64 max_model_len=512" in caplog.text


def test_no_draft_model_is_an_error_that_says_what_to_give() -> None:
    from engine.speculation.registry import prepare
    from tests.speculation.on_host import toy_facts

    with pytest.raises(ValueError, match=r"eagle3 needs --draft-model.*only --model embedded comes with one"):
        prepare("eagle3", SpeculationSettings(), toy_facts(100))
    with pytest.raises(ValueError, match=r"--speculator eagle needs --draft-model: .* weights$"):
        prepare("eagle", SpeculationSettings(), toy_facts(100))

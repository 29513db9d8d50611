"""MTP modules are found among the target's own files or in a directory of their own; what cannot be right is refused."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.weights import load_model
from engine.speculation.mtp_recipe import MtpRecipe
from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from protocol.model_files import ModelFiles, ModelFilesError, resolve
from tests.inprocess import Drafter
from tests.lossless import SCENARIOS, Plain, assert_equal, check
from tests.speculation.mtp_rows import BLOCK_SIZE, NUM_BLOCKS, facts_of
from tests.tiny import write_tiny_model
from tests.tiny_drafters import target_model
from tests.tiny_mtp import DEEPSEEK, QWEN, PublishedMtp, add_mtp, write_mtp

HOST = torch.device("cpu")
PLAIN_QWEN = PublishedMtp("qwen")
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mtp_files") / "target", seed=3)


@pytest.fixture(scope="module")
def facts(target: Path) -> TargetFacts:
    return facts_of(target, target_model(target))


def prepared(facts: TargetFacts, directory: Path | None, **settings: object) -> MtpRecipe:
    draft_model = None if directory is None else str(directory)
    return MtpRecipe(SpeculationSettings(draft_model=draft_model, **settings), facts)  # type: ignore[arg-type]


def changed(directory: Path, change: Change) -> Path:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory


def reconfigured(directory: Path, **entries: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return directory


# ---- the target ----


@pytest.mark.parametrize("published", [PLAIN_QWEN, DEEPSEEK], ids=["qwen", "deepseek-3"])
def test_a_target_is_the_same_model_with_modules_among_its_files(tmp_path: Path, published: PublishedMtp) -> None:
    directory = write_tiny_model(tmp_path / "target", seed=3)
    without = load_model(resolve(str(directory)), torch.float32, HOST)
    add_mtp(directory, published)
    progress: list[tuple[int, int]] = []
    model = load_model(resolve(str(directory)), torch.float32, HOST, lambda done, total: progress.append((done, total)))
    assert progress[-1][0] == progress[-1][1]
    assert model.weights.num_bytes == without.weights.num_bytes
    assert torch.equal(model.weights.layers[-1].down, without.weights.layers[-1].down)
    recipe = prepared(facts_of(directory, model), None)
    assert recipe.capabilities.max_draft_len == 3
    assert recipe.capabilities.lookahead == published.num_modules
    assert recipe.capabilities.taps == (model.arch.num_layers,)
    speculator = recipe.build(Target(model, NUM_BLOCKS, BLOCK_SIZE))
    assert speculator.capabilities is recipe.capabilities


def test_a_layer_too_many_that_is_no_module_is_still_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "target", seed=3)
    name = "model.layers.2.mlp.down_proj.weight"
    changed(directory, lambda weights: weights.update({name: weights["model.layers.1.mlp.down_proj.weight"].clone()}))
    with pytest.raises(ModelFilesError, match=f"the tensor {name} is not part of a llama model"):
        load_model(resolve(str(directory)), torch.float32, HOST)


def test_a_gguf_target_needs_a_draft_model(facts: TargetFacts, tmp_path: Path, target: Path) -> None:
    gguf = TargetFacts(facts.arch, facts.dtype, HOST, BLOCK_SIZE, 60, ModelFiles("gguf", tmp_path / "x.gguf", "x"))
    with pytest.raises(ModelFilesError, match=r"a GGUF file has no MTP modules.*--draft-model can name the directory"):
        prepared(gguf, None)
    modules = write_mtp(tmp_path / "modules", target, PLAIN_QWEN)
    assert prepared(gguf, modules).capabilities.max_draft_len == 3


def test_a_target_without_modules_is_refused(facts: TargetFacts) -> None:
    wanted = "it has no MTP modules: the tensors mtp.fc.weight and layers.2.eh_proj.weight and mtp_layers.0.input_proj"
    elsewhere = "--draft-model DIR can name files that have them"
    with pytest.raises(ModelFilesError, match=f"{wanted}.* are missing; {elsewhere}"):
        prepared(facts, None)
    assert facts.files is not None
    with pytest.raises(ModelFilesError, match=wanted) as refused:
        prepared(facts, facts.files.path)
    assert elsewhere not in str(refused.value)  # they were named, and are not there either


# ---- what is refused ----


def drop(name: str) -> Change:
    return lambda weights: weights.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda weights: weights.update({name: torch.zeros(*shape)})


REFUSED: dict[str, tuple[PublishedMtp, Change, str]] = {
    "missing": (
        PLAIN_QWEN,
        drop("mtp.pre_fc_norm_hidden.weight"),
        "the tensor mtp.pre_fc_norm_hidden.weight is missing",
    ),
    "missing-layer": (QWEN, drop("mtp.layers.0.mlp.up_proj.weight"), "the tensor mtp.layers.0.mlp.up_proj.weight is"),
    "missing-module": (
        DEEPSEEK,
        lambda weights: [weights.pop(name) for name in list(weights) if name.startswith("layers.4.")],
        "the tensor layers.4.eh_proj.weight is missing",
    ),
    "misshapen": (
        DEEPSEEK,
        put("layers.3.eh_proj.weight", 64, 64),
        r"the tensor layers.3.eh_proj.weight has shape \(64, 64\)",
    ),
    "unknown": (PLAIN_QWEN, put("mtp.embed_tokens.weight", 320, 64), "mtp.embed_tokens.weight is not part of the MTP"),
    "too-many": (DEEPSEEK, put("layers.5.input_layernorm.weight", 64), "4 MTP modules where num_nextn_predict_layers"),
    "experts": (
        PLAIN_QWEN,
        put("mtp.layers.0.mlp.experts.0.up_proj.weight", 4, 64),
        "mtp.layers.0.mlp.experts.0.up_proj.weight belongs to a mixture of experts",
    ),
    "router": (
        DEEPSEEK,
        put("layers.2.mlp.gate.weight", 4, 64),
        "layers.2.mlp.gate.weight belongs to a mixture of exp",
    ),
    "latent": (
        DEEPSEEK,
        put("layers.3.self_attn.kv_a_proj_with_mqa.weight", 8, 64),
        "layers.3.self_attn.kv_a_proj_with_mqa.weight belongs to multi-head latent attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_cannot_be_right_are_named(facts: TargetFacts, target: Path, tmp_path: Path, case: str) -> None:
    published, change, reason = REFUSED[case]
    directory = changed(write_mtp(tmp_path / "modules", target, published), change)
    with pytest.raises(ModelFilesError, match=reason):
        prepared(facts, directory)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"hidden_size": 32}, "made for a width of 32; the target has 64"),
        ({"vocab_size": 300}, "made for a vocabulary of 300; the target has 320"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers of config.json must be from 1 to 16, got 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers of config.json must be a whole number, got 'two'"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor of config.json must be above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "rotates 3 of 16 elements"),
        ({"max_position_embeddings": None}, "max_position_embeddings of config.json must be a whole number, got None"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(
    facts: TargetFacts, target: Path, tmp_path: Path, entries: dict[str, object], reason: str
) -> None:
    directory = reconfigured(write_mtp(tmp_path / "modules", target, DEEPSEEK), **entries)
    with pytest.raises(ModelFilesError, match=reason):
        prepared(facts, directory)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_draft_tokens": 4}, "--num-draft-tokens 4: each of the 3 MTP modules drafts one token"),
        ({"draft_sampling": "hot"}, "--draft-sampling must be one of greedy, sampled, got 'hot'"),
        ({"tree_top_k": 4}, "--tree-top-k says nothing with --speculator mtp, which drafts chains"),
    ],
)
def test_options_that_cannot_work_are_named(
    facts: TargetFacts, target: Path, tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    directory = write_mtp(tmp_path / "modules", target, DEEPSEEK)
    with pytest.raises(ValueError, match=reason):
        prepared(facts, directory, **settings)


# ---- what is told and kept ----


def test_the_conventions_are_logged_and_can_be_overridden(
    facts: TargetFacts, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_mtp(tmp_path / "modules", target, QWEN)
    with caplog.at_level(logging.INFO):
        prepared(facts, directory)
        prepared(facts, directory, mtp_zero_centred=False)
    first, second = caplog.messages
    assert "layout=qwen modules=1 gated=true rotary_dim=8 of 16 zero_centred=true context=512" in first
    assert "zero_centred=false" in second


def test_a_copy_of_the_targets_head_is_not_kept_twice(facts: TargetFacts, target: Path, tmp_path: Path) -> None:
    model = target_model(target)
    directory = write_mtp(tmp_path / "modules", target, DEEPSEEK)
    names = {
        "layers.2.shared_head.head.weight": model.weights.output,
        "layers.3.embed_tokens.weight": model.weights.embedding,
    }
    changed(directory, lambda weights: weights.update({name: tensor.clone() for name, tensor in names.items()}))
    speculator = prepared(facts, directory).build(Target(model, NUM_BLOCKS, BLOCK_SIZE))
    modules = speculator._modules  # type: ignore[attr-defined]
    assert modules[0]._weights.output is model.weights.output
    assert modules[1]._weights.embedding is model.weights.embedding


def test_layers_of_one_qwen_module_share_its_matrices(facts: TargetFacts, target: Path, tmp_path: Path) -> None:
    directory = write_mtp(tmp_path / "modules", target, PublishedMtp("qwen", num_modules=2))
    recipe = prepared(facts, directory)
    speculator = recipe.build(Target(target_model(target), NUM_BLOCKS, BLOCK_SIZE))
    first, second = (module._weights for module in speculator._modules)  # type: ignore[attr-defined]
    assert first.fc is second.fc
    assert first.layer.down is not second.layer.down
    assert recipe.weight_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in load_file(directory / "model.safetensors").values()
    )


# ---- behind the whole engine ----


def quieten(weights: dict[str, torch.Tensor]) -> None:
    """Layers that say little next to the embedding: what comes next is then within reach of a fitted module."""
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.06


@pytest.mark.parametrize("published", [PublishedMtp("qwen"), DEEPSEEK], ids=["recycled", "modules"])
def test_fitted_modules_are_often_right_and_change_no_answer(tmp_path: Path, published: PublishedMtp) -> None:
    directory = changed(write_tiny_model(tmp_path / "target", seed=5), quieten)
    add_mtp(directory, published, fitted=True)
    drafter = Drafter("mtp", "mtp", SpeculationSettings(draft_model=str(directory)))
    plain = Plain(directory)
    counters = check(directory, SCENARIOS["cached"](plain), drafter, plain, assert_equal)
    assert counters.accepted_per_pos[0] > 0.2 * counters.draft_rounds
    assert counters.accepted_per_pos[2] > 0, "no draft was accepted whole"

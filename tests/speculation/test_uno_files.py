"""What an adapter's files may say: PEFT's layout is read as it is published, anything else is refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.model.low_rank import LowRank
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.recipe import Recipe, SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.uno_layout import load_adapter, read_shape
from protocol.model_files import ModelFilesError, resolve
from tests.tiny import write_tiny_model
from tests.tiny_drafters import target_model
from tests.tiny_uno import RANK, adapter_config, random_adapter, write_adapter, write_uno
from tests.uno_reference import DenseTarget


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "model", seed=5)


def prepared(target: Path, adapter: Path | None, **settings: Any) -> Recipe:
    arch = target_model(target).arch
    facts = TargetFacts(arch, torch.float32, torch.device("cpu"), 4, 512, resolve(str(target)))
    asked = SpeculationSettings(draft_model=None if adapter is None else str(adapter), **settings)
    return prepare("uno", asked, facts)


def product(low_rank: LowRank, x: torch.Tensor, out: int) -> torch.Tensor:
    """What is added to a product of zeros, on every row."""
    product = torch.zeros(len(x), out)
    low_rank.add_to(product, x, torch.arange(len(x)))
    return product


@pytest.mark.parametrize(
    ("config", "scale"),
    [({}, 2.0), ({"lora_alpha": 6}, 6 / RANK), ({"use_rslora": True, "lora_alpha": 6.0}, 6 / RANK**0.5)],
    ids=["alpha", "smaller", "rank-stabilised"],
)
@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model."])
def test_fused_parts_add_what_the_published_factors_do(
    target: Path, tmp_path: Path, config: dict[str, Any], scale: float, prefix: str
) -> None:
    adapter = random_adapter(target, seed=3)
    write_uno(tmp_path / "a", target, adapter, prefix=prefix, **config)
    tensors, arch = DrafterTensors(tmp_path / "a"), target_model(target).arch
    shape = read_shape(json.loads((tmp_path / "a" / "adapter_config.json").read_text()), tensors, arch)
    layers = load_adapter(tensors, shape, arch, torch.float32, torch.device("cpu"))
    x = torch.randn(5, arch.hidden_size, generator=torch.Generator().manual_seed(1))
    wide = torch.randn(5, arch.ffn_size, generator=torch.Generator().manual_seed(2))
    for layer, parts in enumerate(layers):
        for part, inputs, names in (
            ("qkv", x, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("out", x, ("self_attn.o_proj",)),
            ("gate_up", x, ("mlp.gate_proj", "mlp.up_proj")),
            ("down", wide, ("mlp.down_proj",)),
        ):
            pairs = [adapter[f"layers.{layer}.{name}"] for name in names]
            wanted = torch.cat([scale * inputs @ a.T @ b.T for a, b in pairs], dim=1)
            assert torch.allclose(product(parts[part], inputs, wanted.shape[1]), wanted, atol=1e-5)  # type: ignore[index]


def test_an_adapter_of_some_projections_of_some_layers_leaves_the_others(target: Path, tmp_path: Path) -> None:
    adapter = random_adapter(target, modules=("v_proj", "up_proj"))
    some = {name: pair for name, pair in adapter.items() if name.startswith("layers.1.")}
    write_uno(tmp_path / "a", target, some, layers_to_transform=[1])
    tensors, arch = DrafterTensors(tmp_path / "a"), target_model(target).arch
    shape = read_shape(json.loads((tmp_path / "a" / "adapter_config.json").read_text()), tensors, arch)
    first, second = load_adapter(tensors, shape, arch, torch.float32, torch.device("cpu"))
    assert not first
    assert set(second) == {"qkv", "gate_up"}
    x = torch.randn(3, arch.hidden_size, generator=torch.Generator().manual_seed(1))
    added = product(second["qkv"], x, arch.query_size + 2 * arch.kv_size)
    assert (added[:, : arch.query_size + arch.kv_size] == 0).all() and (added[:, -arch.kv_size :] != 0).any()


def test_memory_is_known_before_the_weights_are_read(target: Path, tmp_path: Path) -> None:
    recipe = prepared(target, write_uno(tmp_path / "a", target))
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert recipe.weight_bytes == sum(tensor.numel() * 4 for tensor in stored.values())
    assert recipe.kv_shape is None and recipe.capabilities.taps == ()


REFUSED = [
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"use_dora": True}, "use_dora True"),
    ({"bias": "all"}, "bias 'all'"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
    ({"r": 0}, "r 0: must be a whole number between 1 and 4096"),
    ({"r": 12.5}, "r 12.5: must be a whole number"),
    ({"lora_alpha": None}, "lora_alpha None: must be a number"),
    ({"target_modules": ".*proj"}, "a pattern cannot be read"),
    ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' is none of q_proj"),
    ({"layers_to_transform": [0, 2]}, "numbers of the target's 2 layers"),
    ({"layers_to_transform": [0]}, "is not part of a LoRA adapter of adapter_config.json's modules and layers"),
    ({"target_modules": ["q_proj"]}, "is not part of a LoRA adapter"),
    ({"r": RANK // 2}, "has shape"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[str(config) for config, _ in REFUSED])
def test_settings_of_another_arithmetic_are_refused_by_name(
    target: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelFilesError) as refused:
        prepared(target, write_uno(tmp_path / "a", target, **config))
    assert reason in str(refused.value) and str(tmp_path / "a") in str(refused.value)


def test_files_of_another_kind_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"holds no adapter_config\.json"):
        prepared(target, target)
    with pytest.raises(ModelFilesError, match="neither a directory nor org/name"):
        prepared(target, tmp_path / "nowhere")
    dense = DenseTarget(target, dtype=torch.float32)
    config = adapter_config(random_adapter(target))
    write_adapter(tmp_path / "b", config, {"fc.weight": dense.weights["norm.weight"]})
    with pytest.raises(ModelFilesError, match=r"no tensor begins with base_model\.model\.model\.layers\."):
        prepared(target, tmp_path / "b")
    wider = write_tiny_model(tmp_path / "wider", seed=5, intermediate_size=96)
    with pytest.raises(ModelFilesError, match="has shape"):
        prepared(wider, write_uno(tmp_path / "c", target))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_draft_tokens": 1}, "--num-draft-tokens must be at least 2 with --speculator uno, got 1"),
        ({"num_draft_tokens": 4, "tree_top_k": 2, "tree_depth": 4}, "--tree-depth 4: of --num-draft-tokens 4 one"),
        ({"tree_top_k": 2, "draft_sampling": "sampled"}, "--draft-sampling sampled cannot be had with --tree-top-k"),
    ],
)
def test_options_that_cannot_work_are_refused(
    target: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        prepared(target, write_uno(tmp_path / "a", target), **settings)


def test_uno_needs_files_and_the_targets_keys(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--speculator uno needs --draft-model"):
        prepared(target, None)
    recipe = prepared(target, write_uno(tmp_path / "a", target))
    with pytest.raises(ValueError, match="needs its keys and values"):
        recipe.build(Target(target_model(target), num_blocks=8, block_size=4))

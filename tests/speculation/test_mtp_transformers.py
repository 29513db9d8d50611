"""Several MTP modules draft what transformers' own MTP model drafts with the same weights."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from engine.speculation.mtp_recipe import MtpRecipe
from engine.speculation.recipe import SpeculationSettings, Target
from tests.mtp_reference import DenseModule, ModuleShape, chained
from tests.speculation.mtp_rows import BLOCK_SIZE, NUM_BLOCKS, Drafting, Row, facts_of, pool_of
from tests.tiny_drafters import target_model

NUM_MODULES, NUM_LAYERS = 3, 2
_NAMES = {"post_norm": "norm", "eh_proj": "fc", "enorm": "enorm", "hnorm": "hnorm"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> tuple[Qwen3ForCausalLM, MtpModel]:
    """A target and its modules, as transformers has them; every norm away from one."""
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
        initializer_range=0.4,
    )  # fmt: skip
    config.num_mtp_layers = NUM_MODULES
    config.mtp_layer_types = ["full_attention"] * NUM_MODULES
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    target = Qwen3ForCausalLM(config).eval()
    modules = MtpModel(target, NUM_MODULES).eval()
    with torch.no_grad():
        for name, parameter in (*target.named_parameters(), *modules.layers.named_parameters()):
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.copy_(0.4 * torch.randn_like(parameter))
    return target, modules


@pytest.fixture(scope="module")
def drafting(models: tuple[Qwen3ForCausalLM, MtpModel], tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """The same, published in one directory in DeepSeek's layout and read from there."""
    target, modules = models
    directory = tmp_path_factory.mktemp("published")
    target.config.save_pretrained(directory)
    stored = {name: tensor.contiguous() for name, tensor in target.state_dict().items()}
    dense = []
    own = {"embed_tokens.weight": target.model.embed_tokens.weight, "head.weight": target.lm_head.weight}
    for number, module in enumerate(modules.layers):
        weights = {name.removeprefix("mtp_block."): tensor for name, tensor in module.state_dict().items()}
        plain = {
            _NAMES.get(name.removesuffix(".weight"), name.removesuffix(".weight")): t for name, t in weights.items()
        }
        shape = ModuleShape(4, 2, 8, rotary_dim=8)
        dense.append(DenseModule({**own, **{f"{name}.weight": tensor for name, tensor in plain.items()}}, shape))
        for name, tensor in weights.items():
            published = name.replace("post_norm.", "shared_head.norm.")
            stored[f"model.layers.{NUM_LAYERS + number}.{published}"] = tensor.contiguous()
    save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
    model = target_model(directory)
    recipe = MtpRecipe(SpeculationSettings(), facts_of(directory, model))
    speculator = recipe.build(Target(model, NUM_BLOCKS, BLOCK_SIZE))
    return Drafting(model, speculator, pool_of(speculator), dense)


@pytest.mark.parametrize("length", [2, 5, 17])
def test_a_prompts_drafts_are_those_of_transformers(
    models: tuple[Qwen3ForCausalLM, MtpModel], drafting: Drafting, length: int
) -> None:
    target, modules = models
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(0, 96, (1, length), generator=generator)
    with torch.inference_mode():
        output = target(prompt, output_hidden_states=True)
        root = output.logits[:, -1].argmax(dim=1, keepdim=True)
        told, logits, _ = modules(
            input_ids=torch.cat([prompt[:, 1:], root], dim=1),
            last_hidden_states=output.hidden_states[-1],
            attention_mask=None,
            position_ids=torch.arange(1, length + 1)[None],
            mtp_cache=MtpCache(config=target.config.get_mtp_config()),
        )
    history = [*prompt[0].tolist(), int(root)]
    row = Row(0, history, drafting)
    with torch.inference_mode():
        drafting.speculator.observe([row.span(length)])
        draft = drafting.speculator.propose([row.asks(NUM_MODULES)])
    assert draft.tokens[0].tolist() == told[0].tolist()
    reference = chained(drafting.dense, drafting.states(history[:-1]), history, NUM_MODULES)
    assert torch.allclose(torch.stack(reference.logits).float(), logits[0], atol=2e-4)

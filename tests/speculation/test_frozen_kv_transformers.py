"""An assistant saved by transformers, read here, drafts what transformers drafts with it over the same target."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.modeling_outputs import ModelOutput

from engine.model.decoder import DecoderModel
from engine.speculation.frozen_kv_head import FrozenKvHead
from engine.speculation.frozen_kv_mtp import FrozenKvSpeculator
from engine.speculation.frozen_kv_recipe import FrozenKvRecipe
from engine.speculation.recipe import SpeculationSettings, Target
from tests.frozen_kv_reference import DenseAssistant
from tests.speculation.frozen_kv_rows import BLOCK_SIZE, NUM_BLOCKS, Rig, Row, facts_of, new_pool
from tests.tiny_drafters import target_model

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 96, 4, 4, 2, 8
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Published:
    target: LlamaForCausalLM
    assistant: Gemma4AssistantForCausalLM
    model: DecoderModel
    rig: Rig


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[False, True], ids=["every-token", "clusters"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Both models as transformers saves them; every norm and scale away from one."""
    root = tmp_path_factory.mktemp("published")
    torch.manual_seed(7)
    target = LlamaForCausalLM(_target_config()).eval()
    assistant = Gemma4AssistantForCausalLM(_assistant_config(has_clusters=request.param)).eval()
    _scramble(target, assistant)
    target.save_pretrained(root / "target")
    assistant.save_pretrained(root / "assistant")
    model = target_model(root / "target")
    settings = SpeculationSettings(num_draft_tokens=WIDTH, draft_model=str(root / "assistant"))
    pool = new_pool(model, NUM_BLOCKS, BLOCK_SIZE)
    recipe = FrozenKvRecipe(settings, facts_of(root / "target", model))
    speculator = recipe.build(Target(model, NUM_BLOCKS, BLOCK_SIZE, pool))
    dense = DenseAssistant({}, 0, None)  # transformers is the reference here
    return Published(target, assistant, model, Rig(model, speculator, pool, dense))


def _target_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _assistant_config(*, has_clusters: bool) -> Gemma4AssistantConfig:
    text = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, global_head_dim=HEAD_DIM, max_position_embeddings=128,
        layer_types=["full_attention"] * 2, num_kv_shared_layers=2, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    )  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, use_ordered_embeddings=has_clusters, num_centroids=12,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def _scramble(*models: torch.nn.Module) -> None:
    with torch.no_grad():
        for model in models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith("token_ordering"):
                    tensor.copy_(torch.randperm(VOCAB))
                elif name.endswith("layer_scalar") or "norm" in name:
                    tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
                elif tensor.dim() == 2:
                    tensor.copy_(0.4 * torch.randn_like(tensor))


@pytest.mark.parametrize("length", [1, 6, 17])
def test_a_prompts_drafts_are_those_of_transformers(published: Published, length: int) -> None:
    prompt = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        output = published.target(prompt, output_hidden_states=True, use_cache=True)
    root = output.logits[:, -1].argmax(dim=1, keepdim=True)
    keys, values = output.past_key_values.layers[-1].keys, output.past_key_values.layers[-1].values
    told, logits = _told(published, torch.cat([prompt, root], dim=1), output.hidden_states, (keys, values))
    rig = published.rig
    row = Row(0, [*prompt[0].tolist(), int(root)], rig)
    with torch.inference_mode():
        rig.speculator.observe([row.chunk(length)])
        draft = rig.speculator.propose([row.asks(WIDTH)])
    assert draft.tokens[0].tolist() == told
    ours = _first_logits(rig, row)
    known = ours.isfinite()
    assert torch.allclose(ours[known], logits[0][known], atol=TOLERANCE)
    assert int(known.sum()) == (VOCAB if published.assistant.masked_embedding is None else VOCAB * 3 // 12)


def _told(
    published: Published,
    token_ids: torch.Tensor,
    hidden_states: tuple[torch.Tensor, ...],
    last_layer: tuple[torch.Tensor, torch.Tensor],
) -> tuple[list[int], torch.Tensor]:
    """What transformers drafts behind `token_ids` after a prompt, and the logits [W, V] it does so by."""
    assistant = published.assistant
    assistant.generation_config.num_assistant_tokens = WIDTH
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, published.target.get_input_embeddings(), GenerationConfig(max_length=128)
    )
    # No layer of this assistant slides, but a mask for it is made all the same.
    shared = {"full_attention": last_layer, "sliding_attention": last_layer}
    outputs = ModelOutput(hidden_states=hidden_states, shared_kv_states=shared)
    with torch.inference_mode():
        candidates, logits = generator.get_candidates(
            token_ids, {}, outputs, is_first_iteration=False, n_last_matches=0
        )
    assert logits is not None
    return candidates[0, token_ids.shape[1] :].tolist(), logits[0]


def _first_logits(rig: Rig, row: Row) -> torch.Tensor:
    """float32 [V], by which the row's first token was chosen."""
    assert isinstance(rig.speculator, FrozenKvSpeculator)
    seen: list[torch.Tensor] = []
    head = rig.speculator._head
    assert isinstance(head, FrozenKvHead)
    plain = head.logits
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(head, "logits", lambda hidden: seen.append(plain(hidden)) or seen[-1])
        rig.speculator.propose([row.asks(1)])
    return seen[0][0]

"""MTP modules on pages against speculators 0.9.0 (vllm-project), which nobody here wrote: logits and drafted tokens.

speculators runs one module several times over a whole text: step t reads at every position its own output of step t - 1
there and the token one further. That is what several modules do that happen to have equal weights, so three copies are
drafted with here. It is fed the known tokens; with our drafts as the known tokens that is our chain, recomputed.
"""

from pathlib import Path

import pytest
import torch

from engine.speculation.recipe import SpeculationSettings
from protocol.sampling import SamplingParams
from tests.speculation.mtp_rows import Drafting, Row, drafting_of
from tests.tiny import write_tiny_model
from tests.tiny_mtp import FFN, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, PublishedMtp, Weights, named, tiny_modules

pytest.importorskip("speculators")

NUM_STEPS = 3
TOLERANCE = 2e-4
FORMS = {
    "qwen3": PublishedMtp("speculators", num_modules=NUM_STEPS),
    "qwen3_5": PublishedMtp(
        "speculators", num_modules=NUM_STEPS, model_type="qwen3_5_text", is_gated=True, rotary_share=0.5
    ),
}
DRAWN = SamplingParams(max_tokens=60, temperature=1.0)


def their_model(drafting: Drafting, published: PublishedMtp, module: Weights) -> torch.nn.Module:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3_5TextConfig, Qwen3Config

    arch = drafting.model.arch
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if published.is_gated:
        rope |= {"partial_rotary_factor": published.rotary_share}
    layer = (Qwen3_5TextConfig if published.is_gated else Qwen3Config)(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=FFN,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        attention_bias=False,
        max_position_embeddings=512,
        layer_types=["full_attention"],
        rope_parameters=rope,
    )
    layer._attn_implementation = "eager"
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = MTPDraftModel(config).eval()
    weights = named([module], PublishedMtp("speculators"), 0)
    weights["embed_tokens.weight"] = drafting.model.weights.embedding
    weights["lm_head.weight"] = drafting.model.weights.output
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown
    assert not [name for name in missing if name.startswith("mtp_layers")]
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [3, 9, 20])
def test_logits_and_drawn_tokens_are_those_of_speculators(tmp_path: Path, form: str, length: int) -> None:
    published = FORMS[form]
    target = write_tiny_model(tmp_path / "target", seed=3)
    [module] = tiny_modules_of(target, published)
    settings = SpeculationSettings(draft_sampling="sampled")
    drafting = drafting_of(target, tmp_path / "modules", published, settings, [module] * NUM_STEPS)
    text = torch.randint(3, 320, (length + 1,), generator=torch.Generator().manual_seed(length)).tolist()
    row = Row(0, text, drafting, params=DRAWN)
    with torch.inference_mode():
        drafting.speculator.observe([row.span(length)])
        draft = drafting.speculator.propose([row.asks(NUM_STEPS)])
        # The last of our drafts is nobody's input; their loop wants a token to compare its last step with.
        known = torch.tensor([[*text, *draft.tokens[0].tolist()]])
        states = torch.zeros(1, known.shape[1], drafting.model.arch.hidden_size)
        states[0, :length] = drafting.states(text[:-1])
        logits, _, _ = their_model(drafting, published, module)(known, states)
    assert draft.probs is not None
    ours = draft.probs[0]
    theirs = torch.stack([step[0, length - 1] for step in logits]).softmax(dim=1)
    assert torch.allclose(ours, theirs, atol=TOLERANCE)


def tiny_modules_of(target: Path, published: PublishedMtp) -> list[Weights]:
    from tests.tiny_drafters import target_model

    return tiny_modules(target_model(target), PublishedMtp(**{**vars(published), "num_modules": 1}))

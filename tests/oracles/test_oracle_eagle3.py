"""EAGLE-3 on pages against speculators 0.9.0 (vllm-project), which nobody here wrote: logits and drafted tokens.

speculators feeds later steps the known tokens: step t of row i reads token i + t, its own output of step t - 1, and the
rows before i. With our drafts as the known tokens that is our chain behind row i, recomputed by somebody else.
"""

from pathlib import Path

import pytest
import torch

from engine.speculation.recipe import SpeculationSettings
from protocol.sampling import SamplingParams
from tests.speculation.eagle_harness import Asked, Bench, texts
from tests.tiny import write_tiny_model
from tests.tiny_drafters import FFN, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Published, draft_token_ids

pytest.importorskip("speculators")

NUM_DRAFTS = 4
VARIANTS = {
    f"{'qwen3' if qk_norm else 'llama'}-{feature_norm}-{'normed' if normed else 'raw'}-{taps}-{size}": Published(
        "speculators",
        taps=taps,
        draft_vocab_size=size,
        norm_before_residual=normed,
        norm_output=normed != (size is None),
        feature_norm=feature_norm,
        qk_norm=qk_norm,
        has_embedding=True,
    )
    for qk_norm in (False, True)
    for feature_norm in ("none", "joint", "each")
    for normed, taps, size in ((False, (0, 1, 2), 160), (True, (1, 2), None))
}


def their_model(bench: Bench) -> torch.nn.Module:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    published, arch = bench.published, bench.model.arch
    layer = (Qwen3Config if published.qk_norm else LlamaConfig)(
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
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=published.draft_vocab_size or arch.vocab_size,
        norm_before_residual=published.norm_before_residual,
        norm_output=published.norm_output,
        norm_before_fc=published.feature_norm == "joint",
        fc_norm=published.feature_norm == "each",
        eagle_aux_hidden_state_layer_ids=list(published.taps),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    model.load_state_dict(bench.weights, strict=False)
    filled = {name for name, _ in model.named_parameters() if not name.startswith("verifier")}
    assert filled <= bench.weights.keys(), filled - bench.weights.keys()
    return model.eval().to(torch.float64)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_drafts_are_those_of_speculators(tmp_path: Path, name: str) -> None:
    target = write_tiny_model(tmp_path / "target", "llama", seed=5)
    sampling = SamplingParams(max_tokens=100, temperature=1.0)
    settings = SpeculationSettings(num_draft_tokens=NUM_DRAFTS, draft_sampling="sampled")
    bench = Bench(target, tmp_path / "drafter", VARIANTS[name], settings)
    theirs = their_model(bench)
    seen: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    token_ids = draft_token_ids(bench.model, bench.weights)
    for history in texts(3, shortest=6, longest=18):
        draft = bench.drafts([Asked(history, NUM_DRAFTS, sampling)])
        assert draft.probs is not None
        bench.speculator.end(0)
        row = len(history) - 2
        ids = torch.tensor([[*history, *draft.tokens[0].tolist()]])
        taken = bench.speculator.capabilities.taps
        taps = bench.taps(ids[0].tolist())[:-1, [taken.index(tap) for tap in bench.published.taps]]
        seen.clear()
        with torch.no_grad():
            theirs(
                hidden_states=taps.flatten(1)[None].to(torch.float64).clone(),
                input_ids=ids[:, 1:],
                document_ids=torch.zeros_like(ids[:, 1:]),
                ttt_steps=NUM_DRAFTS,
            )
        for step, logits in enumerate(seen):
            ours = draft.probs[0, step, token_ids].to(torch.float64)
            wanted = logits[row].softmax(dim=0)
            assert torch.allclose(ours, wanted, atol=2e-5), f"step {step}: {(ours - wanted).abs().max()}"
            assert int(ours.argmax()) == int(wanted.argmax())
        assert len(seen) == NUM_DRAFTS

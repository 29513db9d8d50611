"""Block drafters against z-lab's own `dflash` and speculators' DSpark heads: the same files, the same distributions.

Their layers get the target's hidden states and the masked block; what they say of every row is compared with what our
drafts on pages were drawn from. Tokens are ours, so that Markov heads are asked of the very same beginnings.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.speculation.recipe import SpeculationSettings
from protocol.sampling import SamplingParams
from tests.oracles.zlab_blocks import their_model, their_rows
from tests.speculation.block_harness import Asked, Bench
from tests.speculation.eagle_harness import texts
from tests.tiny import write_tiny_model
from tests.tiny_blocks import PublishedBlock

dspark = pytest.importorskip("speculators.models.dspark.model_definitions")

SAMPLED = SamplingParams(max_tokens=100, temperature=1.0)
SCALES = (("input_embedding_scale", 1.7), ("output_multiplier", 0.6), ("final_logit_softcapping", 5.0))
VARIANTS = {
    "plain": PublishedBlock("z-lab"),
    "windows": PublishedBlock("z-lab", taps=(2, 0, 2), sliding=(False, True), extras=SCALES),
    "open-windows": PublishedBlock("z-lab", sliding=(True, True), window=4, says_causal=False),
    "causal": PublishedBlock("z-lab", num_layers=1, sliding=(False,), says_causal=True, attention_bias=True),
    "vanilla": PublishedBlock("deepspec", anchor="first", markov="vanilla", confidence="markov"),
    "gated": PublishedBlock("specforge", markov="gated", confidence="hidden"),
    "rnn": PublishedBlock("speculators", anchor="first", markov="rnn"),
    "rnn-drop": PublishedBlock("speculators", anchor="drop", says_anchor=True, markov="rnn"),
}


@torch.inference_mode()
def their_logits(bench: Bench, model: torch.nn.Module, history: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
    """[K, V] behind every beginning of `drafted`, its last token excepted."""
    published = bench.published
    hidden = their_rows(bench.published, bench.model, model, history, len(drafted) + published.anchor_rows)
    head = torch.nn.Linear(hidden.shape[1], bench.model.arch.vocab_size, bias=False)
    head.weight = torch.nn.Parameter(bench.model.weights.output)
    logits = model.compute_logits(hidden, head)
    if published.markov is not None:
        # speculators gives the anchor's row, where it drafts nothing, the anchor itself as the token before.
        before = [history[-1]] * published.anchor_rows + [history[-1], *drafted[:-1]]
        markov = dspark.MarkovHead(
            verifier_vocab_size=logits.shape[1], draft_vocab_size=logits.shape[1], markov_rank=published.rank,
            hidden_size=hidden.shape[1], head_type=published.markov,
        )  # fmt: skip
        own = {name.removeprefix("markov_head."): tensor for name, tensor in bench.weights.items() if "markov" in name}
        markov.load_state_dict(own, strict=True)
        logits = logits + markov.block_bias(prev_token_ids=torch.tensor([before]), hidden_states=hidden[None])[0]
    return logits[published.anchor_rows :]


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_drawn_from_what_their_model_says(tmp_path: Path, name: str) -> None:
    target = write_tiny_model(tmp_path / "target", "llama", seed=5)
    settings = SpeculationSettings(num_draft_tokens=4, draft_sampling="sampled")
    bench = Bench(target, tmp_path / "drafter", VARIANTS[name], settings)
    model = their_model(bench.published, bench.model.arch, tmp_path / "drafter")
    asked = [Asked(text, 4, SAMPLED, seed=row) for row, text in enumerate(texts(5, seed=8))]
    draft = bench.drafts(asked)
    assert draft.probs is not None
    for row, one in enumerate(asked):
        drafted = draft.tokens[row].tolist()[:4]
        wanted = their_logits(bench, model, one.history, drafted).softmax(dim=1)
        torch.testing.assert_close(draft.probs[row, :4], wanted, atol=3e-5, rtol=0)
    assert (draft.probs[0, 0] - draft.probs[0, 1]).abs().max() > 1e-3, "rows that say the same would prove little"

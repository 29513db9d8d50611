"""DSpark's heads as others run them: SpecForge 0.2.0 samples whole blocks, speculators 0.9.0 says how sure it is.

The rows of a block come from z-lab's own layers, so that nothing of ours is on their side. SpecForge's draws get the
numbers ours get: then the very tokens must be the same, and what they were drawn from nearly so.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.speculation.markov_head import ConfidenceHead
from engine.speculation.recipe import SpeculationSettings
from protocol.sampling import SamplingParams
from tests.oracles.zlab_blocks import their_model, their_rows
from tests.speculation.block_harness import GREEDY, Asked, Bench
from tests.speculation.eagle_harness import texts
from tests.tiny import write_tiny_model
from tests.tiny_blocks import PublishedBlock

specforge = pytest.importorskip("specforge.modeling.draft.dspark")
speculators = pytest.importorskip("speculators.models.dspark.model_definitions")

TOLERANCE = 3e-5  # of a probability: float32 on both sides, summed in other orders
WIDTH = 4
# SpecForge's heads begin with the first row that drafts. An RNN whose anchor's row drafts nothing therefore begins one row
# later than in speculators, whose way is ours; both agree where the anchor's row drafts.
BLOCKS = {
    "vanilla": PublishedBlock("specforge", markov="vanilla"),
    "gated": PublishedBlock("specforge", markov="gated"),
    "rnn": PublishedBlock("deepspec", anchor="first", markov="rnn"),
}
CONFIDENT = {
    "hidden": PublishedBlock("speculators", anchor="first", markov="gated", confidence="hidden"),
    "markov": PublishedBlock("speculators", anchor="first", markov="vanilla", confidence="markov"),
    "markov-drop": PublishedBlock("speculators", anchor="drop", says_anchor=True, markov="rnn", confidence="markov"),
}


class Both:
    """A drafter of ours and z-lab's layers over the same files."""

    def __init__(self, root: Path, published: PublishedBlock, settings: SpeculationSettings) -> None:
        self.bench = Bench(write_tiny_model(root / "target", seed=5), root / "drafter", published, settings)
        self._layers = their_model(published, self.bench.model.arch, root / "drafter")

    def head(self, model: torch.nn.Module, prefix: str) -> torch.nn.Module:
        """`model` with the file's tensors below `prefix`."""
        own = {name[len(prefix) :]: one for name, one in self.bench.weights.items() if name.startswith(prefix)}
        model.load_state_dict(own, strict=True)
        return model.eval()

    @torch.inference_mode()
    def rows(self, history: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Their hidden states [B, h] of a block behind `history` and logits [B, V], the anchor's row where it drafts nothing too."""
        bench = self.bench
        num_rows = WIDTH + bench.published.anchor_rows
        hidden = their_rows(bench.published, bench.model, self._layers, history, num_rows)
        return hidden, hidden @ bench.model.weights.output.T


class OurNumbers:
    """Stands for torch.multinomial: draws from their probabilities with the numbers of one of our rows, and keeps those."""

    def __init__(self, asked: Asked) -> None:
        self.probs: list[torch.Tensor] = []  # float32 [1, V] each
        self._seed = torch.tensor([asked.seed])
        self._behind = len(asked.history)

    def __call__(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1 and probs.shape[0] == 1
        position = torch.tensor([self._behind + len(self.probs)])
        self.probs.append(probs)
        return draw(probs.double(), uniforms(self._seed, position, Purpose.DRAFT))[:, None]


def specforge_head(both: Both) -> torch.nn.Module:
    published, arch = both.bench.published, both.bench.model.arch
    sizes = {"vocab_size": arch.vocab_size, "markov_rank": published.rank}
    hidden = {} if published.markov == "vanilla" else {"hidden_size": arch.hidden_size}
    kinds = {"vanilla": "VanillaMarkovHead", "gated": "GatedMarkovHead", "rnn": "RNNMarkovHead"}
    return both.head(getattr(specforge, kinds[str(published.markov)])(**sizes, **hidden), "markov_head.")


@torch.inference_mode()
def sampled_block(both: Both, head: torch.nn.Module, asked: Asked) -> tuple[list[int], torch.Tensor]:
    """SpecForge's tokens of a block, and the logits [K, V] they were chosen from."""
    hidden, logits = both.rows(asked.history)
    drafting = slice(both.bench.published.anchor_rows, None)
    tokens, corrected = head.sample_block_tokens(
        logits[None, drafting],
        first_prev_token_ids=torch.tensor([asked.history[-1]]),
        hidden_states=hidden[None, drafting],
        temperature=asked.sampling.temperature,
    )
    return tokens[0].tolist(), corrected[0]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_sampled_as_specforge_samples_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, temperature: float
) -> None:
    how = "sampled" if temperature else "greedy"
    both = Both(tmp_path, BLOCKS[name], SpeculationSettings(num_draft_tokens=WIDTH, draft_sampling=how))
    head = specforge_head(both)
    params = SamplingParams(max_tokens=100, temperature=temperature)
    asked = [Asked(text, WIDTH, params, seed=row) for row, text in enumerate(texts(12, seed=8))]
    draft = both.bench.drafts(asked)
    greedy_of_rows = []
    for row, one in enumerate(asked):
        numbers = OurNumbers(one)
        monkeypatch.setattr(torch, "multinomial", numbers)
        tokens, corrected = sampled_block(both, head, one)
        assert draft.tokens[row].tolist() == tokens
        assert len(numbers.probs) == (WIDTH if temperature else 0)
        if draft.probs is not None:
            torch.testing.assert_close(draft.probs[row], torch.cat(numbers.probs), atol=TOLERANCE, rtol=0)
        greedy_of_rows.append(corrected.argmax(dim=1).tolist() == tokens)
    assert all(greedy_of_rows) == (temperature == 0.0), "draws that are all the likeliest would prove little"


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """What our confidence head says, float32 [n] per token."""
    said: list[torch.Tensor] = []
    inner = ConfidenceHead.probability

    def probability(head: ConfidenceHead, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        said.append(inner(head, hidden, embedded))
        return said[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ConfidenceHead, "probability", probability)
        yield said


@torch.inference_mode()
def their_confidences(both: Both, history: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
    """[K], of tokens behind every beginning of `drafted`, its last token excepted, as speculators puts the head's input together."""
    published, arch = both.bench.published, both.bench.model.arch
    read, _ = both.rows(history)
    read = read[published.anchor_rows :]
    if published.confidence == "markov":
        sizes = {"verifier_vocab_size": arch.vocab_size, "draft_vocab_size": arch.vocab_size}
        markov = speculators.MarkovHead(
            **sizes, markov_rank=published.rank, hidden_size=arch.hidden_size, head_type=published.markov
        )
        before = torch.tensor([history[-1], *drafted[:-1]])
        read = torch.cat([read, both.head(markov, "markov_head.").prev_embeddings(before)], dim=1)
    return both.head(speculators.ConfidenceHead(read.shape[1]), "confidence_head.")(read).sigmoid()


@pytest.mark.parametrize("name", CONFIDENT)
def test_confidences_are_those_of_speculators_and_end_drafts_where_theirs_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    published, threshold = CONFIDENT[name], 0.5
    settings = SpeculationSettings(num_draft_tokens=WIDTH, draft_sampling="greedy", confidence_threshold=threshold)
    both = Both(tmp_path, published, settings)
    asked = [Asked(text, WIDTH, GREEDY, seed=row) for row, text in enumerate(texts(16, seed=9))]
    with listening(monkeypatch) as said:
        draft = both.bench.drafts(asked)
    ours = torch.stack(said, dim=1)
    lengths = set()
    for row, one in enumerate(asked):
        wanted = their_confidences(both, one.history, draft.tokens[row].tolist())
        torch.testing.assert_close(ours[row], wanted, atol=TOLERANCE, rtol=0)
        assert (wanted - threshold).abs().min() > TOLERANCE, "a tie decides nothing"
        length = int((wanted >= threshold).int().cumprod(dim=0).sum())
        assert int(draft.lengths[row]) == length
        lengths.add(length)
    assert len(lengths) > 1 and ours.std(dim=1).max() > 0.01, "drafts that all end at one place would prove little"

"""What a block drafter drafts on pages, in batches and behind chunks is what float64 straight lines draft."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.speculation.recipe import BlockOverrides, SpeculationSettings
from protocol.sampling import SamplingParams
from tests.speculation.block_harness import Asked, Bench
from tests.speculation.eagle_harness import texts
from tests.tiny import write_tiny_model
from tests.tiny_blocks import PublishedBlock

MIXED = (False, True)
SCALES = (("input_embedding_scale", 1.7), ("output_multiplier", 0.6), ("final_logit_softcapping", 5.0))
VARIANTS = {
    "z-lab": PublishedBlock("z-lab", taps=(1, 2)),
    "z-lab-windows": PublishedBlock("z-lab", taps=(2, 0, 2), sliding=MIXED, extras=SCALES),
    "z-lab-open-windows": PublishedBlock("z-lab", sliding=(True, True), window=4, says_causal=False, qk_norm=False),
    "z-lab-causal": PublishedBlock("z-lab", num_layers=1, says_causal=True, attention_bias=True),
    "deepspec-dflash": PublishedBlock("deepspec", anchor="first", has_embedding=True, has_head=True),
    "speculators": PublishedBlock("speculators", taps=(0, 1, 2), draft_vocab_size=64, has_head=True, sliding=MIXED),
    "speculators-open": PublishedBlock(
        "speculators", draft_vocab_size=100, sliding=MIXED, says_causal=False, anchor="first", says_anchor=True
    ),
    "dspark": PublishedBlock(
        "deepspec", anchor="first", markov="vanilla", confidence="markov", has_embedding=True, has_head=True
    ),
    "dspark-gated": PublishedBlock("specforge", markov="gated", confidence="hidden"),
    "dspark-rnn": PublishedBlock(
        "speculators", anchor="first", markov="rnn", draft_vocab_size=64, has_head=True, confidence="markov"
    ),
    "dspark-rnn-drop": PublishedBlock("speculators", anchor="drop", says_anchor=True, markov="rnn"),
}
every_variant = pytest.mark.parametrize("name", VARIANTS)
SAMPLED = SamplingParams(max_tokens=100, temperature=1.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=5)


def bench_of(target: Path, tmp_path: Path, name: str, **settings: object) -> Bench:
    return Bench(target, tmp_path / "drafter", VARIANTS[name], SpeculationSettings(**settings))


def test_every_convention_is_among_the_variants() -> None:
    """A variant that nobody drafts with would be a convention that nobody checked."""
    published = VARIANTS.values()
    assert {one.layout for one in published} == {"z-lab", "speculators", "deepspec", "specforge"}
    assert {one.markov for one in published} == {None, "vanilla", "gated", "rnn"}
    assert {one.confidence for one in published} == {"none", "hidden", "markov"}
    assert {(one.anchor, one.name) for one in published} == {
        (anchor, name) for anchor in ("drop", "first") for name in ("dflash", "dspark")
    }
    for field in ("qk_norm", "attention_bias", "has_embedding", "has_head"):
        assert {getattr(one, field) for one in published} == {False, True}, field
    seen = {pair for one in published for pair in zip(one.sliding[: one.num_layers], one.causal, strict=True)}
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


@every_variant
def test_chains_are_the_references_likeliest_tokens(target: Path, tmp_path: Path, name: str) -> None:
    bench = bench_of(target, tmp_path, name)
    most = bench.published.max_tokens
    assert bench.speculator.capabilities.max_draft_len == most
    asked = [Asked(text, min(budget, most)) for text, budget in zip(texts(4), (5, 2, 1, 4), strict=True)]
    draft = bench.drafts(asked)
    assert draft.lengths.tolist() == [one.budget for one in asked]
    assert draft.parents is None and draft.probs is None and draft.num_forwards == 1
    for row, one in enumerate(asked):
        oracle = bench.oracle(one.history, one.budget)
        path: list[int] = []
        for drafted in draft.tokens[row, : one.budget].tolist():
            assert drafted == int(bench.token_ids[oracle.logits(path).argmax()]), f"row {row} behind {path}"
            path.append(drafted)


@every_variant
def test_sampled_chains_are_drawn_from_the_references_law(target: Path, tmp_path: Path, name: str) -> None:
    """What was drawn from is the softmax of the reference's logits given the draft so far; the draw is that law's own."""
    bench = bench_of(target, tmp_path, name, num_draft_tokens=4, draft_sampling="sampled")
    asked = [Asked(text, 4 - row % 2, SAMPLED, seed=row) for row, text in enumerate(texts(3, seed=9))]
    draft = bench.drafts(asked)
    assert draft.probs is not None and draft.probs.dtype == torch.float32
    for row, one in enumerate(asked):
        oracle = bench.oracle(one.history, one.budget)
        path: list[int] = []
        for step, drafted in enumerate(draft.tokens[row, : one.budget].tolist()):
            wanted = torch.zeros(bench.model.arch.vocab_size, dtype=torch.float64)
            wanted[bench.token_ids] = oracle.logits(path).softmax(dim=0)
            drawn_from = draft.probs[row, step].to(torch.float64)
            assert torch.allclose(drawn_from, wanted, atol=2e-5), (drawn_from - wanted).abs().max()
            number = uniforms(torch.tensor([one.seed]), torch.tensor([len(one.history) + step]), Purpose.DRAFT)
            assert drafted == int(draw(drawn_from[None], number))
            path.append(drafted)


@pytest.mark.parametrize("name", [name for name, one in VARIANTS.items() if one.confidence != "none"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_a_draft_ends_where_confidence_does(target: Path, tmp_path: Path, name: str, sampling: str) -> None:
    """The longest beginning whose tokens are all likely enough; each confidence is of what was drafted before."""
    threshold = 0.4
    bench = bench_of(target, tmp_path, name, draft_sampling=sampling, confidence_threshold=threshold)
    most = bench.published.max_tokens
    asked = [Asked(text, most, SAMPLED, seed=row) for row, text in enumerate(texts(12, seed=4))]
    draft = bench.drafts(asked)
    lengths = []
    for row, one in enumerate(asked):
        oracle, tokens = bench.oracle(one.history, most), draft.tokens[row].tolist()
        sure = [oracle.confidence(tokens[:end]) >= threshold for end in range(most)]
        lengths.append(sure.index(False) if False in sure else most)
    assert draft.lengths.tolist() == lengths
    assert len(set(lengths)) > 1, "all drafts were cut at the same place: it proved little"


def test_a_cut_never_depends_on_the_token_that_is_cut(target: Path, tmp_path: Path) -> None:
    """Whatever is drawn at a place, with whatever seed, the same beginning is kept or cut at that place alike."""
    bench = bench_of(target, tmp_path, "dspark", draft_sampling="sampled", confidence_threshold=0.4)
    hot = SamplingParams(max_tokens=100, temperature=1.0, top_k=2)
    rows = [(row, text, bench.hear(row, text)) for row, text in enumerate(texts(6, shortest=9, longest=9, seed=4))]
    kept: dict[tuple[int, ...], bool] = {}
    for seed in range(30):
        draft = bench.draft([(row, Asked(text, 5, hot, seed), blocks) for row, text, blocks in rows])
        for row, drafted in enumerate(draft.tokens.tolist()):
            length = int(draft.lengths[row])
            for place in range(min(length + 1, 5)):
                beginning = (row, *drafted[:place])
                assert kept.setdefault(beginning, place < length) == (place < length)
    assert {True, False} == set(kept.values()) and len(kept) > 20


@every_variant
def test_rejected_blocks_leave_no_trace_in_the_keys(target: Path, tmp_path: Path, name: str) -> None:
    """After rounds that accepted two tokens, one, none, keys are those of the text heard at once, and so is the draft."""
    bench = bench_of(target, tmp_path, name)
    most = bench.published.max_tokens
    text = texts(1, shortest=24, longest=24)[0]
    blocks = bench.hear(0, text[:12], extra=24)
    known = 12
    for committed in (3, 2, 1, 4):
        bench.draft([(0, Asked(text[:known], most), blocks)])
        bench.commit(0, text[: known + committed], [known - 1, known + committed - 1], blocks)
        known += committed
    again = bench.hear(1, text[:known], [5, 13], extra=12)
    end = known - 1
    assert torch.allclose(bench.keys(blocks, end), bench.keys(again, end), rtol=0, atol=1e-5)
    both = bench.draft([(0, Asked(text[:known], most), blocks), (1, Asked(text[:known], most), again)])
    assert both.tokens[0].tolist() == both.tokens[1].tolist()


@pytest.mark.parametrize("name", ["z-lab", "z-lab-windows"])
def test_a_row_that_inherits_nan_drafts_as_if_it_did_not(target: Path, tmp_path: Path, name: str) -> None:
    """A block may have belonged to a sequence whose keys overflowed."""
    bench = bench_of(target, tmp_path, name)
    text = texts(1, shortest=9, longest=9)[0]
    clean = bench.drafts([Asked(text, 4)]).tokens.tolist()
    pool = bench.speculator._passes.pool
    pool.keys.fill_(torch.nan), pool.values.fill_(torch.nan)
    assert bench.drafts([Asked(text, 4), Asked(text * 3, 4)]).tokens[0].tolist() == clean[0]


@pytest.mark.parametrize(("name", "lengths"), [("z-lab", [2, 1, 0, 0, 0]), ("deepspec-dflash", [3, 2, 1, 0, 0])])
def test_rows_beyond_the_drafters_context_run_without_drafts(
    target: Path, tmp_path: Path, name: str, lengths: list[int]
) -> None:
    published = replace(VARIANTS[name], context_length=12)
    bench = Bench(target, tmp_path / "drafter", published, SpeculationSettings(num_draft_tokens=4))
    asked = [Asked(texts(1, shortest=length, longest=length)[0], 4) for length in (10, 11, 12, 13, 20)]
    assert bench.drafts(asked).lengths.tolist() == lengths
    assert bench.draft([]).tokens.shape == (0, 4)


def test_overrides_change_what_is_drafted(target: Path, tmp_path: Path) -> None:
    """Each reaches the arithmetic: the probabilities are others."""
    published = VARIANTS["z-lab-windows"]
    text = texts(1, shortest=15, longest=15)[0]

    def probs(overrides: BlockOverrides) -> torch.Tensor:
        settings = SpeculationSettings(draft_sampling="sampled", block=overrides)
        drawn = Bench(target, tmp_path / "a", published, settings).drafts([Asked(text, 2, SAMPLED)]).probs
        assert drawn is not None
        return drawn[0, :2]

    before = probs(BlockOverrides())
    for overrides in (
        BlockOverrides(taps="2,1,0"),
        BlockOverrides(final_norm=True),
        BlockOverrides(anchor="first"),
        BlockOverrides(causal="none"),
        BlockOverrides(causal="all"),
    ):
        assert (before - probs(overrides)).abs().max() > 1e-3, overrides


def test_a_round_that_was_not_observed_is_an_error(target: Path, tmp_path: Path) -> None:
    bench = bench_of(target, tmp_path, "z-lab")
    text = texts(1, shortest=9, longest=9)[0]
    blocks = bench.hear(0, text)
    with pytest.raises(ValueError, match="observed was 7"):
        bench.draft([(0, Asked([*text, 5], 3), blocks)])
    bench.speculator.end(0)
    with pytest.raises(ValueError, match="observed was -1"):
        bench.draft([(0, Asked(text, 3), blocks)])

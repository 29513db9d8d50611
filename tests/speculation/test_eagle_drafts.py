"""What an EAGLE drafter drafts on pages, in batches and behind chunks is what float64 straight lines draft."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.model.layers import rms_norm
from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.speculation.growing_tree import ROOT
from engine.speculation.recipe import EagleOverrides, SpeculationSettings
from protocol.sampling import SamplingParams
from tests.eagle_reference import PathDrafter
from tests.speculation.eagle_harness import BLOCK_SIZE, Asked, Bench, texts
from tests.tiny import write_tiny_model
from tests.tiny_drafters import Published, dense_head, draft_token_ids

VARIANTS = {
    "eagle": Published("eagle", taps=(2,), has_head=False),
    "eagle-biases": Published("eagle", taps=(2,), fc_bias=True, attention_bias=True, has_embedding=True),
    "safeailab": Published("safeailab", taps=(1, 2), draft_vocab_size=100),
    "safeailab-3.1": Published("safeailab", taps=(2, 0, 2), feature_norm="each", norm_output=True),
    "deepspec": Published("deepspec", taps=(1, 2), qk_norm=True, has_embedding=True),
    "speculators": Published("speculators", taps=(0, 1, 2), draft_vocab_size=64, norm_before_residual=True),
    "lent-head": Published("safeailab", taps=(1, 2), draft_vocab_size=100, has_head=False),
    "speculators-joint": Published("speculators", taps=(0, 2), feature_norm="joint", has_head=False, pickled=True),
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


def reference(bench: Bench, history: list[int]) -> PathDrafter:
    """The head over the target's hidden states, read in the publisher's order."""
    taken = bench.speculator.capabilities.taps
    with torch.inference_mode():
        taps = bench.taps(history)[:-1]
        if bench.published.generation == 1:
            taps = rms_norm(taps, bench.model.weights.final_norm, bench.model.arch.norm_eps)
    ordered = taps[:, [taken.index(tap) for tap in bench.published.taps]]
    return PathDrafter(dense_head(bench.model, bench.weights, bench.published), ordered, history)


def test_every_convention_is_among_the_variants() -> None:
    """A variant that nobody drafts with would be a convention that nobody checked."""
    published = VARIANTS.values()
    assert {one.layout for one in published} == {"eagle", "safeailab", "deepspec", "speculators"}
    assert {one.feature_norm for one in published} == {"none", "joint", "each"}
    for field in ("norm_before_residual", "norm_output", "qk_norm", "attention_bias", "has_embedding", "has_head"):
        assert {getattr(one, field) for one in published} == {False, True}, field


@every_variant
def test_chains_are_the_references_likeliest_tokens(target: Path, tmp_path: Path, name: str) -> None:
    bench = bench_of(target, tmp_path, name, num_draft_tokens=5)
    asked = [Asked(text, budget) for text, budget in zip(texts(6), (5, 2, 5, 1, 4, 5), strict=True)]
    draft = bench.drafts(asked)
    token_ids = draft_token_ids(bench.model, bench.weights)
    assert draft.lengths.tolist() == [one.budget for one in asked]
    assert draft.parents is None and draft.probs is None and draft.num_forwards == 5
    for row, one in enumerate(asked):
        by_path = reference(bench, list(one.history))
        path: list[int] = []
        for drafted in draft.tokens[row, : one.budget].tolist():
            assert drafted == int(token_ids[by_path.logits(path).argmax()]), f"row {row} behind {path}"
            path.append(drafted)


@every_variant
def test_sampled_chains_are_drawn_from_the_references_law(target: Path, tmp_path: Path, name: str) -> None:
    """q is the softmax of the reference's logits, zero on tokens the drafter does not know; the draw is q's own."""
    bench = bench_of(target, tmp_path, name, num_draft_tokens=4, draft_sampling="sampled")
    asked = [Asked(text, 4 - row % 2, SAMPLED, seed=row) for row, text in enumerate(texts(4, seed=9))]
    draft = bench.drafts(asked)
    assert draft.probs is not None and draft.probs.dtype == torch.float32
    token_ids = draft_token_ids(bench.model, bench.weights)
    for row, one in enumerate(asked):
        by_path = reference(bench, list(one.history))
        path: list[int] = []
        for step, drafted in enumerate(draft.tokens[row, : one.budget].tolist()):
            wanted = torch.zeros(bench.model.arch.vocab_size, dtype=torch.float64)
            wanted[token_ids] = by_path.logits(path).softmax(dim=0)
            drawn_from = draft.probs[row, step].to(torch.float64)
            assert torch.allclose(drawn_from, wanted, atol=2e-5), (drawn_from - wanted).abs().max()
            number = uniforms(torch.tensor([one.seed]), torch.tensor([len(one.history) + step]), Purpose.DRAFT)
            assert drafted == int(draw(drawn_from[None], number))
            path.append(drafted)


def tree_by_the_paper(
    by_path: PathDrafter, token_ids: torch.Tensor, limit: int, top_k: int, depth: int
) -> tuple[list[int], list[int]]:
    """EAGLE-2 with every candidate kept, each node's logits computed from scratch along its path."""
    nodes: list[tuple[float, int, tuple[int, ...]]] = []  # value, parent, path
    beams: list[int] = [ROOT]
    for _ in range(depth):
        level = []
        for beam in beams:
            value, path = (0.0, ()) if beam == ROOT else (nodes[beam][0], nodes[beam][2])
            best = by_path.logits(path).log_softmax(dim=0).topk(top_k)
            for log_prob, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level.append(len(nodes))
                nodes.append((value + log_prob, beam, (*path, int(token_ids[index]))))
        beams = sorted(level, key=lambda node: (-nodes[node][0], node))[:top_k]
    chosen = sorted(sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))[:limit])
    index_of = {node: index for index, node in enumerate(chosen)} | {ROOT: ROOT}
    return [nodes[node][2][-1] for node in chosen], [index_of[nodes[node][1]] for node in chosen]


@every_variant
def test_trees_are_the_references(target: Path, tmp_path: Path, name: str) -> None:
    """Small budgets make slots scarce, so that keys move while the tree grows."""
    bench = bench_of(target, tmp_path, name, num_draft_tokens=9, tree_top_k=3, tree_depth=4)
    asked = [Asked(text, budget) for text, budget in zip(texts(4, seed=21), (9, 3, 1, 6), strict=True)]
    draft = bench.drafts(asked)
    token_ids = draft_token_ids(bench.model, bench.weights)
    assert draft.parents is not None and draft.lengths.tolist() == [9, 3, 1, 6]
    for row, one in enumerate(asked):
        wanted = tree_by_the_paper(reference(bench, list(one.history)), token_ids, one.budget, 3, 4)
        got = (draft.tokens[row, : one.budget].tolist(), draft.parents[row, : one.budget].tolist())
        assert got == wanted, f"row {row}"
    assert max(len(set(parents)) for parents in draft.parents.tolist()) > 3, "no tree was deep enough to prove much"


@pytest.mark.parametrize("settings", [{"num_draft_tokens": 5}, {"num_draft_tokens": 8, "tree_top_k": 3}])
def test_rejected_drafts_leave_no_trace_in_the_keys(target: Path, tmp_path: Path, settings: dict[str, int]) -> None:
    """After rounds that accepted two tokens, one, none, keys are those of the text heard at once, and so is the draft."""
    bench = Bench(target, tmp_path / "drafter", VARIANTS["safeailab"], SpeculationSettings(**settings))
    text = texts(1, shortest=24, longest=24)[0]
    blocks = bench.hear(0, text[:12], extra=24)
    known = 12
    for committed in (3, 2, 1, 4):
        bench.draft([(0, Asked(text[:known], settings["num_draft_tokens"]), blocks)])
        bench.commit(0, text[: known + committed], [known - 1, known + committed - 1], blocks)
        known += committed
    again = bench.hear(1, text[:known], [5, 13], extra=12)
    end = known - 1
    assert torch.allclose(bench.keys(blocks, end), bench.keys(again, end), rtol=0, atol=2e-6)
    both = bench.draft([(0, Asked(text[:known], 4), blocks), (1, Asked(text[:known], 4), again)])
    assert both.tokens[0].tolist() == both.tokens[1].tolist()


def test_a_row_that_inherits_nan_drafts_as_if_it_did_not(target: Path, tmp_path: Path) -> None:
    """A block may have belonged to a sequence whose keys overflowed."""
    bench = bench_of(target, tmp_path, "safeailab", num_draft_tokens=5)
    text = texts(1, shortest=9, longest=9)[0]
    clean = bench.drafts([Asked(text, 5)]).tokens.tolist()
    pool = bench.speculator._passes.pool
    pool.keys.fill_(torch.nan), pool.values.fill_(torch.nan)
    assert bench.drafts([Asked(text, 5), Asked(text * 3, 5)]).tokens[0].tolist() == clean[0]


def test_rows_beyond_the_drafters_context_run_without_drafts(target: Path, tmp_path: Path) -> None:
    published = replace(VARIANTS["safeailab"], context_length=12)
    bench = Bench(target, tmp_path / "drafter", published, SpeculationSettings(num_draft_tokens=4))
    asked = [Asked(texts(1, shortest=length, longest=length)[0], 4) for length in (9, 11, 12, 13, 20)]
    draft = bench.drafts(asked)
    assert draft.lengths.tolist() == [4, 2, 1, 0, 0]
    assert bench.draft([]).tokens.shape == (0, 4)


def test_overrides_change_what_is_drafted(target: Path, tmp_path: Path) -> None:
    """Each flag reaches the arithmetic: the probabilities are others."""
    published = VARIANTS["safeailab-3.1"]
    plain = Bench(target, tmp_path / "a", published, SpeculationSettings(draft_sampling="sampled"))
    text = texts(1, shortest=15, longest=15)[0]
    before = plain.drafts([Asked(text, 2, SAMPLED)]).probs
    for overrides in (
        EagleOverrides(taps="2,1,0"),
        EagleOverrides(final_norm=True),
        EagleOverrides(norm_before_residual=True),
        EagleOverrides(norm_output=False),
    ):
        settings = SpeculationSettings(draft_sampling="sampled", eagle=overrides)
        other = Bench(target, tmp_path / "a", published, settings)
        after = other.drafts([Asked(text, 2, SAMPLED)]).probs
        assert before is not None and after is not None
        assert (before[0, :2] - after[0, :2]).abs().max() > 1e-3, overrides


def test_a_round_that_was_not_observed_is_an_error(target: Path, tmp_path: Path) -> None:
    bench = bench_of(target, tmp_path, "safeailab")
    text = texts(1, shortest=9, longest=9)[0]
    blocks = bench.hear(0, text)
    with pytest.raises(ValueError, match="observed was 7"):
        bench.draft([(0, Asked([*text, 5], 3), blocks)])
    bench.speculator.end(0)
    with pytest.raises(ValueError, match="observed was -1"):
        bench.draft([(0, Asked(text, 3), blocks)])
    assert BLOCK_SIZE * len(blocks) > len(text)

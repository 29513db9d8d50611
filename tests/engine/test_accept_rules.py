"""accept's behaviour at its seam: batches of all kinds, failures kept to their span, and the law with every transform."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.accept import accept, place_draft
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft, empty_draft, host_draft
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST, ToyTarget, chain, inverse_cdf_draw, reference_probs

VOCAB, EOS = 5, (2,)
MODEL = SamplingModel(VOCAB, EOS, HOST)
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=50)


def state_of(params: SamplingParams = GREEDY, seed: int = 1, history: tuple[int, ...] = (0, 1)) -> SamplingState:
    return SamplingState(params, seed, history, 1, MODEL)


def peaks(*tokens: int) -> torch.Tensor:
    """Logits whose argmax is the given token, row by row."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).to(torch.float32) * 5


# ---- greedy ----


@pytest.mark.parametrize(
    ("drafted", "accepted", "tokens"),
    [([], 0, [3]), ([3], 1, [3, 1]), ([4], 0, [3]), ([3, 1, 0], 3, [3, 1, 0, 4]), ([3, 0, 0], 1, [3, 1])],
)
def test_greedy_chain_keeps_the_longest_right_prefix(drafted: list[int], accepted: int, tokens: list[int]) -> None:
    truth = [3, 1, 0, 4]
    rows = SamplingRows.build([state_of()], [len(drafted) + 1], HOST)
    verdict = accept(peaks(*truth[: len(drafted) + 1]), chain([drafted], 3), rows)
    assert verdict.accepted.tolist() == [accepted]
    assert verdict.num_non_draft.tolist() == [1]
    assert verdict.tokens.tolist() == [tokens + [0] * (5 - len(tokens))]
    assert verdict.tokens.dtype == verdict.accepted.dtype == torch.int32
    assert verdict.path is None


def test_greedy_ties_go_to_the_lowest_id() -> None:
    rows = SamplingRows.build([state_of()], [1], HOST)
    assert accept(torch.tensor([[1.0, 4.0, 0.0, 4.0, 4.0]]), empty_draft(1, 0, HOST), rows).tokens[0, 0] == 1


def test_entries_beyond_the_real_length_are_never_read() -> None:
    draft = replace(chain([[3], []], 3), tokens=torch.tensor([[3, 1, 0], [3, -7, 10**6]], dtype=torch.int32))
    rows = SamplingRows.build([state_of(), state_of()], [2, 1], HOST)
    verdict = accept(peaks(3, 1, 3), draft, rows)
    assert verdict.accepted.tolist() == [1, 0]


def test_padded_rows_give_the_same_verdict_as_ragged_ones() -> None:
    states = [state_of(SAMPLED, seed) for seed in range(20)]
    draft = chain([[seed % 5] * (seed % 4) for seed in range(20)], 3)
    logits = torch.randn(20, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    ragged = [1 + seed % 4 for seed in range(20)]
    flat = torch.cat([logits[index, :count] for index, count in enumerate(ragged)])
    padded = accept(logits.reshape(80, VOCAB), draft, SamplingRows.build(states, [4] * 20, HOST))
    assert torch.equal(padded.tokens, accept(flat, draft, SamplingRows.build(states, ragged, HOST)).tokens)


def test_greedy_and_sampled_spans_do_not_touch_each_other() -> None:
    """A-SAMP-5: the verdict of each span equals the verdict it gets alone, for every kind of draft."""
    kinds = [
        GREEDY,
        SAMPLED,
        SamplingParams(max_tokens=9, top_p=0.6, repetition_penalty=1.4),
        SamplingParams(max_tokens=9, top_k=2, min_p=0.1, temperature=0.5),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={1: 2.0}),
        SamplingParams(max_tokens=9, temperature=3.0, allowed_token_ids=(0, 3)),
    ]
    generator = torch.Generator().manual_seed(7)
    states = [state_of(params, seed) for seed, params in enumerate(kinds * 6)]
    lengths = [index % 4 for index in range(len(states))]
    tokens = torch.randint(VOCAB, (len(states), 3), generator=generator).to(torch.int32)
    parents = torch.tensor([[-1, -1, 0]], dtype=torch.int32).expand(len(states), -1)
    probs = torch.rand(len(states), 3, VOCAB, generator=generator).softmax(dim=2)
    base = replace(chain([[]] * len(states), 3), tokens=tokens, lengths=torch.tensor(lengths, dtype=torch.int32))
    counts = [1 + length for length in lengths]
    logits = torch.randn(sum(counts), VOCAB, generator=generator) * 2
    for draft in (base, replace(base, parents=parents), replace(base, probs=probs)):
        together = accept(logits, draft, SamplingRows.build(states, counts, HOST))
        for index, state in enumerate(states):
            start = sum(counts[:index])
            alone = Draft(
                tokens=draft.tokens[index : index + 1],
                lengths=draft.lengths[index : index + 1],
                parents=None if draft.parents is None else draft.parents[index : index + 1],
                probs=None if draft.probs is None else draft.probs[index : index + 1],
                roots=None,
                sources=draft.sources[index : index + 1],
                num_forwards=0,
            )
            rows = SamplingRows.build([state], [counts[index]], HOST)
            verdict = accept(logits[start : start + counts[index]], alone, rows)
            assert verdict.tokens.tolist() == together.tokens[index : index + 1].tolist(), index
            assert verdict.accepted.tolist() == together.accepted[index : index + 1].tolist(), index


def test_small_pieces_give_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state_of(SAMPLED, seed) for seed in range(30)]
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(2))
    draft, rows = chain([[seed % 5] for seed in range(30)], 1), SamplingRows.build(states, [2] * 30, HOST)
    whole = accept(logits, draft, rows)
    monkeypatch.setattr("engine.accept._GROUP_ELEMENTS_ON_HOST", 4 * VOCAB)
    assert torch.equal(accept(logits, draft, rows).tokens, whole.tokens)


# ---- failures ----


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(max_tokens=9, top_p=0.5)])
def test_non_finite_logits_fail_their_span_only(bad: float, params: SamplingParams) -> None:
    states = [state_of(params, seed) for seed in range(3)]
    rows = SamplingRows.build(states, [2, 2, 2], HOST)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    draft = chain([[1], [2], [3]], 1)
    clean = accept(logits, draft, rows)
    logits[2, 3] = bad
    verdict = accept(logits, draft, rows)
    assert verdict.finite.tolist() == [True, False, True]
    assert verdict.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_non_finite_logits_behind_a_rejected_token_do_no_harm() -> None:
    """Plain decoding would never have seen that row."""
    logits = peaks(3, 1)
    logits[1, 0] = float("nan")
    rows = SamplingRows.build([state_of()], [2], HOST)
    assert accept(logits, chain([[4]], 1), rows).finite.tolist() == [True]
    assert accept(logits, chain([[3]], 1), rows).finite.tolist() == [False]


def test_bans_that_leave_nothing_are_reported_not_guessed() -> None:
    nothing = SamplingParams(max_tokens=9, min_tokens=3, allowed_token_ids=(2,))
    states = [state_of(nothing), state_of(replace_greedy(nothing)), state_of(SAMPLED)]
    verdict = accept(torch.zeros(3, VOCAB), empty_draft(3, 0, HOST), SamplingRows.build(states, [1, 1, 1], HOST))
    assert verdict.has_choice.tolist() == [False, False, True]
    assert verdict.finite.tolist() == [True, True, True]


def replace_greedy(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=0.0,
        min_tokens=params.min_tokens,
        allowed_token_ids=params.allowed_token_ids,
    )


# ---- trees, roots, placement ----


def test_tree_path_lists_the_accepted_nodes_in_order() -> None:
    # 3 -> {0, 1}; 1 -> 4. The target says 3, 1, 4, then 2.
    tokens, parents = [0, 3, 0, 1, 4], [-1, -1, 1, 1, 3]
    draft = replace(chain([tokens], 5), parents=torch.tensor([parents], dtype=torch.int32))
    logits = peaks(3, 0, 1, 0, 4, 2)
    verdict = accept(logits, draft, SamplingRows.build([state_of()], [6], HOST))
    assert verdict.path is not None
    assert verdict.path.tolist() == [[1, 3, 4, -1, -1]]
    assert verdict.tokens.tolist() == [[3, 1, 4, 2, 0, 0, 0]]
    assert verdict.rows[0, :4].tolist() == [0, 2, 4, 5]


def test_a_chain_written_as_a_tree_gets_the_chains_verdict() -> None:
    states = [state_of(SAMPLED, seed) for seed in range(200)]
    drafted = [[seed % 5, seed % 3, seed % 2][: seed % 4] for seed in range(200)]
    counts = [1 + len(one) for one in drafted]
    logits = torch.randn(sum(counts), VOCAB, generator=torch.Generator().manual_seed(5))
    rows, draft = SamplingRows.build(states, counts, HOST), chain(drafted, 3)
    tree = replace(draft, parents=torch.tensor([[-1, 0, 1]], dtype=torch.int32).expand(200, -1))
    left, right = accept(logits, draft, rows), accept(logits, tree, rows)
    assert max(left.accepted.tolist()) > 1
    assert torch.equal(left.tokens, right.tokens)
    assert torch.equal(left.accepted, right.accepted)


def test_root_comes_first_and_counts_in_penalties_and_floors() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=2.0, min_tokens=2, bad_words=((4, 3),))
    draft = replace(chain([[1], []], 1), roots=torch.tensor([4, -1], dtype=torch.int32))
    logits = torch.tensor([[0, 9, 0, 8, 10], [0, 0, 10, 0, 0], [0, 1, 5, 3, 0]], dtype=torch.float32)
    states = [SamplingState(params, 1, (0, 4), 2, MODEL), SamplingState(params, 1, (0, 4), 2, MODEL)]
    verdict = accept(logits, draft, SamplingRows.build(states, [2, 1], HOST))
    # Row 0: 4 was just emitted (10 - 2 = 8), 3 is a bad word behind it, so 1 stays; row 1: two were emitted, EOS may come.
    assert verdict.tokens.tolist() == [[4, 1, 2], [3, 0, 0]]
    assert verdict.num_non_draft.tolist() == [2, 1]


def test_placed_draft_leaves_other_spans_without_one() -> None:
    draft = replace(
        host_draft([[1, 2], [3]], 2, torch.rand(2, 2, VOCAB)),
        parents=torch.tensor([[-1, -1], [-1, 0]], dtype=torch.int32),
        roots=torch.tensor([1, 2], dtype=torch.int32),
    )
    placed = place_draft(draft, [0, 2], 4)
    assert placed.lengths.tolist() == [2, 0, 1, 0]
    assert placed.tokens.tolist() == [[1, 2], [0, 0], [3, 0], [0, 0]]
    assert placed.parents is not None
    assert placed.parents[2].tolist() == [-1, 0]
    assert placed.roots is not None
    assert placed.roots.tolist() == [1, -1, 2, -1]
    assert placed.probs is not None
    assert draft.probs is not None
    assert torch.equal(placed.probs[2], draft.probs[1])
    assert place_draft(draft, [0, 1], 2) is draft


# ---- the law with real noise and every transform ----

TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    "bias": {"logit_bias": {0: 1.5, 3: -1.0}},
    "allowed": {"allowed_token_ids": (0, 1, 3)},
    "bad words": {"bad_words": ((1, 3), (0,))},
    "min_tokens": {"min_tokens": 3},
    "all": {"temperature": 1.4, "top_p": 0.9, "top_k": 4, "min_p": 0.05, "repetition_penalty": 1.2, "min_tokens": 2},
}


@pytest.mark.parametrize("rule", ["one-hot", "probs", "tree"])
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_output_law_under_every_transform(rule: str, transform: str) -> None:
    """Chi-square of the first two emitted tokens; threshold far beyond p = 1e-6, and the seeds are fixed."""
    params = SamplingParams(max_tokens=50, **TRANSFORMS[transform])  # type: ignore[arg-type]
    target, count, history = ToyTarget(VOCAB, seed=11, scale=1.0), 2000, (0, 1)
    expected = two_token_law(target, params, history)
    likely = max(expected, key=lambda cell: expected[cell])
    draft = drafts_for(rule, count, likely)
    nodes = draft.tokens.tolist()
    parents = draft.parents.tolist() if draft.parents is not None else [[-1, 0, 1]] * count
    logits = torch.stack(
        [target.logits((*history, *path)) for row in range(count) for path in paths_of(nodes[row], parents[row])]
    )
    states = [state_of(params, seed) for seed in range(count)]
    verdict = accept(logits, draft, SamplingRows.build(states, [4] * count, HOST))
    completed: Counter[tuple[int, int]] = Counter()
    plain = torch.rand(count, generator=torch.Generator().manual_seed(99), dtype=torch.float64).tolist()
    for row, accepted in enumerate(verdict.accepted.tolist()):
        run = verdict.tokens[row].tolist()[: accepted + 1]
        if len(run) == 1:  # plain decoding would go on from here
            law = torch.tensor([[expected[run[0], token] for token in range(VOCAB)]], dtype=torch.float64)
            run.append(int(inverse_cdf_draw(law, torch.tensor([plain[row]], dtype=torch.float64))))
        completed[run[0], run[1]] += 1
    assert sum(completed[cell] for cell, mass in expected.items() if mass == 0.0) == 0
    chi_square = sum(
        (completed[cell] - mass * count) ** 2 / (mass * count) for cell, mass in expected.items() if mass > 0.0
    )
    assert chi_square < 85.0, (rule, transform, chi_square)  # at most 24 degrees of freedom: p = 1e-8
    assert int(verdict.accepted.sum()) > 0


def two_token_law(target: ToyTarget, params: SamplingParams, history: tuple[int, ...]) -> dict[tuple[int, int], float]:
    law = {}
    for first, mass in enumerate(reference_probs(target.logits(history).tolist(), params, history, 1, EOS)):
        follow = (*history, first)
        for second, second_mass in enumerate(reference_probs(target.logits(follow).tolist(), params, follow, 1, EOS)):
            law[first, second] = mass * second_mass
    return law


def drafts_for(rule: str, count: int, likely: tuple[int, int]) -> Draft:
    """Drafts drawn from probabilities, or for every row the likely run; in a tree beside a useless sibling."""
    if rule == "probs":
        generator = torch.Generator().manual_seed(21)
        probs = torch.rand(VOCAB, generator=generator).softmax(dim=0)
        tokens = torch.multinomial(probs, count * 3, replacement=True, generator=generator).reshape(count, 3)
        return replace(host_draft(tokens.tolist(), 3), probs=probs.expand(count, 3, VOCAB))
    if rule == "one-hot":
        return chain([[*likely, 1]] * count, 3)
    tree = chain([[(likely[0] + 1) % VOCAB, *likely]] * count, 3)
    return replace(tree, parents=torch.tensor([[-1, -1, 1]], dtype=torch.int32).expand(count, -1))


def paths_of(nodes: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node, parent in zip(nodes, parents, strict=True):
        paths.append((*paths[parent + 1], node))
    return paths

"""The target's distribution at every verify row equals a plain one-token-at-a-time reference."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.accept import accept
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft, empty_draft
from engine.transforms import Truncation, target_probs
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST, chain, reference_probs, row_probs

VOCAB, EOS = 8, (2,)
MODEL = SamplingModel(VOCAB, EOS, HOST)

tokens = st.integers(0, VOCAB - 1)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    logit_bias=st.none() | st.dictionaries(tokens, st.floats(-3, 3, width=32), max_size=3),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    # Words avoid ids 0 and 1, so that something stays possible whatever is banned.
    bad_words=st.lists(st.lists(st.integers(0, 4), max_size=2), max_size=3).map(
        lambda words: tuple((*word, 3 + sum(word) % 4) for word in words)
    ),
    allowed_token_ids=st.none() | st.sets(tokens, max_size=4).map(lambda ids: tuple(sorted({*ids, 0, 1, 7}))),
)
spans = st.tuples(
    sampling,
    st.lists(tokens, min_size=1, max_size=6),  # prompt
    st.lists(tokens, max_size=6),  # output so far
    st.lists(tokens, max_size=4),  # draft
)


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def has_choice(params: SamplingParams) -> bool:
    """Whether ids 0, 1 or 7 survive min_tokens; other bans never touch them all."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)} if params.min_tokens else set()
    return bool({0, 1} - stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, min_size=1, max_size=4), st.integers(0, 2**32))
def test_every_row_counts_its_drafts_as_emitted(batch: list, seed: int) -> None:
    batch = [span for span in batch if has_choice(span[0])]
    if not batch:
        return
    states = [SamplingState(params, 1, [*prompt, *output], len(prompt), MODEL) for params, prompt, output, _ in batch]
    counts = [1 + len(drafted) for *_, drafted in batch]
    logits = logits_of(sum(counts), seed)
    got = row_probs(logits, states, counts, chain([drafted for *_, drafted in batch], 4))
    row = 0
    for params, prompt, output, drafted in batch:
        for step in range(len(drafted) + 1):
            history = [*prompt, *output, *drafted[:step]]
            expected = reference_probs(logits[row].tolist(), params, history, len(prompt), EOS)
            assert got[row].tolist() == pytest.approx(expected, abs=2e-6), (row, step)
            row += 1


@settings(max_examples=60, deadline=None)
@given(spans, st.lists(st.integers(-1, 3), min_size=4, max_size=4), st.integers(0, 2**32))
def test_every_tree_row_counts_its_own_path(span: tuple, links: list[int], seed: int) -> None:
    params, prompt, output, drafted = span
    if not has_choice(params):
        return
    nodes = [*drafted, 5, 3, 5, 4][:4]
    parents = [min(link, node - 1) for node, link in enumerate(links)]
    draft = Draft(
        tokens=torch.tensor([nodes], dtype=torch.int32),
        lengths=torch.tensor([4], dtype=torch.int32),
        parents=torch.tensor([parents], dtype=torch.int32),
        probs=None,
        roots=None,
        sources=torch.zeros(1, dtype=torch.int8),
        num_forwards=0,
    )
    state = SamplingState(params, 1, [*prompt, *output], len(prompt), MODEL)
    logits = logits_of(5, seed)
    got = row_probs(logits, [state], [5], draft)
    for row in range(5):
        path, node = [], row - 1
        while node >= 0:
            path.insert(0, nodes[node])
            node = parents[node]
        expected = reference_probs(logits[row].tolist(), params, [*prompt, *output, *path], len(prompt), EOS)
        assert got[row].tolist() == pytest.approx(expected, abs=2e-6), (row, path)


@settings(max_examples=60, deadline=None)
@given(spans, st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=4), st.integers(0, 2**32))
def test_counts_kept_by_commits_equal_counts_built_at_once(span: tuple, commits: list, seed: int) -> None:
    params, prompt, output, drafted = span
    kept = SamplingState(params, 1, [*prompt, *output], len(prompt), MODEL)
    history = [*prompt, *output]
    for committed in commits:
        kept.commit(committed)
        history += committed
    built = SamplingState(params, 1, history, len(prompt), MODEL)
    logits, counts = logits_of(1 + len(drafted), seed), [1 + len(drafted)]
    draft = chain([drafted], 4)
    left, right = (row_probs(logits, [state], counts, draft) for state in (kept, built))
    assert torch.equal(left.nan_to_num(-1.0), right.nan_to_num(-1.0))


def probs_of(logits: list[float], **fields: object) -> list[float]:
    params = SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]
    row = torch.tensor([logits], dtype=torch.float32)
    return target_probs(row, Truncation.of([params], len(logits), HOST))[0].tolist()


def test_ties_are_kept_by_top_k_and_cut_by_id_in_top_p() -> None:
    assert probs_of([1.0, 2.0, 2.0, 0.0], top_k=1) == [0.0, 0.5, 0.5, 0.0]
    assert probs_of([1.0, 1.0, 1.0, 1.0], top_p=0.4) == [0.5, 0.5, 0.0, 0.0]
    assert probs_of([1.0, 1.0, 1.0, 1.0], top_p=1e-9) == [1.0, 0.0, 0.0, 0.0]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logs = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the three kept by top_k the first two hold 7/9 > 0.75; of all four they would hold 0.7 and a third would stay.
    assert probs_of(logs, top_k=3, top_p=0.75) == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])


def test_min_p_one_equals_greedy_at_any_temperature() -> None:
    for temperature in (1e-300, 1e-6, 1.5, 100.0):
        assert probs_of([0.5, 2.0, 1.9, -3.0], min_p=1.0, temperature=temperature) == [0.0, 1.0, 0.0, 0.0]


def test_tiny_temperatures_are_finite_and_greedy() -> None:
    for temperature in (5e-324, 1e-45, 1e-30):
        assert probs_of([-40.0, 90.0, 89.999, 3.0], temperature=temperature) == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_partial_sort_of_a_large_vocabulary_equals_the_full_sort(
    top_p: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3)) * scale
    truncation = Truncation.of([SamplingParams(max_tokens=1, top_p=top_p)] * 3, 5000, HOST)
    partial = target_probs(logits, truncation)
    monkeypatch.setattr("engine.transforms._LARGEST_ON_HOST", ())
    assert torch.equal(partial, target_probs(logits, truncation))


@pytest.mark.parametrize("stop_token_ids", [(), (5,)])
@pytest.mark.parametrize("min_tokens", range(13))
def test_min_tokens_forbids_the_end_exactly_that_long(min_tokens: int, stop_token_ids: tuple[int, ...]) -> None:
    """A-SAMP-3: the biased end is not among the first m tokens and is token m + 1, whatever the drafts are."""
    ending = stop_token_ids[0] if stop_token_ids else EOS[0]
    params = SamplingParams(
        max_tokens=20,
        temperature=0.0,
        min_tokens=min_tokens,
        logit_bias={ending: 100.0},
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(stop_token_ids),
    )
    generator = random.Random(min_tokens)
    emitted: list[int] = []
    state = SamplingState(params, 0, [1, 1, 1], 3, MODEL)
    while ending not in emitted:
        drafted = [generator.choice([ending, 0, 1]) for _ in range(4)]
        logits = torch.zeros(5, VOCAB)
        logits[:, generator.randrange(2)] = 1.0
        verdict = accept(logits, chain([drafted], 4), SamplingRows.build([state], [5], HOST))
        new = verdict.tokens[0, : int(verdict.accepted[0]) + 1].tolist()
        new = new[: new.index(ending) + 1] if ending in new else new
        emitted += new
        state.commit(new)
    assert emitted.index(ending) == min_tokens


def test_ignored_eos_is_not_banned_below_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=5, ignore_eos=True, logit_bias={2: 50.0})
    state = SamplingState(params, 0, [1], 1, MODEL)
    verdict = accept(torch.zeros(1, VOCAB), empty_draft(1, 0, HOST), SamplingRows.build([state], [1], HOST))
    assert verdict.tokens[0, 0] == 2


def test_bad_word_matches_output_only_and_across_commits() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, bad_words=((4, 5, 6),), logit_bias={6: 9.0})
    state = SamplingState(params, 0, [4, 5], 2, MODEL)

    def next_token() -> int:
        rows = SamplingRows.build([state], [1], HOST)
        return int(accept(torch.zeros(1, VOCAB), empty_draft(1, 0, HOST), rows).tokens[0, 0])

    assert next_token() == 6
    state.commit([4])
    assert next_token() == 6
    state.commit([5])
    assert next_token() == 0


def test_raw_logits_are_never_changed() -> None:
    params = SamplingParams(max_tokens=9, repetition_penalty=2.0, logit_bias={1: 5.0}, bad_words=((3,),), min_tokens=2)
    state = SamplingState(params, 0, [1, 2], 2, MODEL)
    logits = logits_of(2, 0)
    before = logits.clone()
    accept(logits, chain([[4]], 1), SamplingRows.build([state], [2], HOST))
    assert torch.equal(logits, before)


def test_untransformed_greedy_rows_cost_no_copy() -> None:
    state = SamplingState(SamplingParams(max_tokens=9, temperature=0.0), 0, [1], 1, MODEL)
    assert not state.has_masks_or_bias
    assert state.penalties is None


def test_a_span_without_rows_is_refused() -> None:
    state = SamplingState(SamplingParams(max_tokens=9), 0, [1], 1, MODEL)
    with pytest.raises(ValueError, match="at least one logits row"):
        SamplingRows.build([state], [0], HOST)

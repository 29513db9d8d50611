"""Log-probabilities under speculation, and the packed vector that carries a step's answer."""

import math
from dataclasses import replace

import pytest
import torch

from engine.accept import accept
from engine.logprobs import NO_CHOICE, NON_FINITE, pack, token_logprobs, unpack, verdict_logprobs
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import empty_draft
from protocol.messages import TokenLogprobs
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST, chain

VOCAB = 6
MODEL = SamplingModel(VOCAB, (), HOST)


def state_of(logprobs: int | None = None, **fields: object) -> SamplingState:
    params = SamplingParams(max_tokens=9, logprobs=logprobs, **fields)  # type: ignore[arg-type]
    return SamplingState(params, 3, (0, 1), 2, MODEL)


def expected_logprobs(row: list[float], token: int, num_top: int) -> TokenLogprobs:
    normaliser = math.log(math.fsum(math.exp(value) for value in row))
    order = sorted(range(len(row)), key=lambda index: -row[index])[:num_top]
    rank = 1 + sum(value > row[token] for value in row)
    return TokenLogprobs(row[token] - normaliser, rank, tuple(order), tuple(row[index] - normaliser for index in order))


def assert_close(got: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert got.rank == expected.rank
    assert got.top_ids == expected.top_ids
    assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


def test_every_emitted_token_has_the_raw_logprob_of_its_own_row() -> None:
    """A-LOGP-1: accepted and bonus positions alike, whatever the transforms; other spans have none."""
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    greedy = logits[:3].argmax(dim=1).tolist()
    states = [
        state_of(3, temperature=0.0),
        state_of(None),
        state_of(0, top_k=1, logit_bias={4: 100.0}),
        state_of(20, temperature=0.0, allowed_token_ids=(5,)),
    ]
    draft = chain([greedy[:2], [1], [4, 4], [1]], 2)
    rows = SamplingRows.build(states, [3, 2, 3, 1], HOST)
    verdict = accept(logits, replace(draft, lengths=torch.tensor([2, 1, 2, 0], dtype=torch.int32)), rows)
    packed, layout = pack(verdict, verdict_logprobs(logits, verdict, rows))
    assert packed.dtype == torch.int32
    spans, prompts = unpack(packed, layout)
    assert prompts == []
    assert [span.accepted for span in spans] == [2, spans[1].accepted, 2, 0]
    assert spans[1].logprobs is None
    for span, offset, num_top in ((spans[0], 0, 3), (spans[2], 5, 0), (spans[3], 8, 6)):
        assert span.logprobs is not None
        assert len(span.logprobs) == len(span.tokens) == span.accepted + 1
        for step, (token, got) in enumerate(zip(span.tokens, span.logprobs, strict=True)):
            assert_close(got, expected_logprobs(logits[offset + step].tolist(), token, num_top))
    assert all(one.rank == 1 for one in spans[0].logprobs or ())
    assert spans[3].tokens == (5,)


def test_tree_logprobs_follow_the_accepted_path() -> None:
    logits = torch.full((4, VOCAB), -1.0)
    for row, token in enumerate((3, 0, 2, 5)):
        logits[row, token] = 2.0 + row
    draft = replace(chain([[1, 3, 2]], 3), parents=torch.tensor([[-1, -1, 1]], dtype=torch.int32))
    rows = SamplingRows.build([state_of(1, temperature=0.0)], [4], HOST)
    verdict = accept(logits, draft, rows)
    (span,), _ = unpack(*pack(verdict, verdict_logprobs(logits, verdict, rows)))
    assert span.tokens == (3, 2, 5)
    assert span.path == (1, 2)
    assert span.logprobs is not None
    for token, row, got in zip(span.tokens, (0, 2, 3), span.logprobs, strict=True):
        assert_close(got, expected_logprobs(logits[row].tolist(), token, 1))


def test_ties_share_the_rank_and_the_mass_sums_to_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 0.0, 0.0]])
    for token, rank in ((1, 1), (2, 1), (0, 3), (5, 4)):
        assert token_logprobs(logits, torch.tensor([token]), 2).ranks.tolist() == [rank]
    whole = token_logprobs(logits, torch.tensor([0]), VOCAB)
    assert float(whole.top_logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-6)


def test_prompt_logprobs_travel_in_the_same_vector() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(9))
    parts = [token_logprobs(logits[:3], torch.tensor([1, 2, 3]), 2), token_logprobs(logits[3:], torch.tensor([0]), 0)]
    rows = SamplingRows.build([state_of(1)], [1], HOST)
    verdict = accept(logits[:1], empty_draft(1, 0, HOST), rows)
    spans, prompts = unpack(*pack(verdict, verdict_logprobs(logits[:1], verdict, rows), parts))
    assert [len(part) for part in prompts] == [3, 1]
    assert len(spans[0].tokens) == 1
    for row, token, got, num_top in zip(range(4), (1, 2, 3, 0), [*prompts[0], *prompts[1]], (2, 2, 2, 0), strict=True):
        assert_close(got, expected_logprobs(logits[row].tolist(), token, num_top))


def test_failures_become_sentences_for_their_span_only() -> None:
    states = [state_of(2), state_of(None, allowed_token_ids=(1,), bad_words=((1,),)), state_of(None)]
    logits = torch.zeros(3, VOCAB)
    logits[0, 0] = float("nan")
    rows = SamplingRows.build(states, [1, 1, 1], HOST)
    verdict = accept(logits, empty_draft(3, 0, HOST), rows)
    spans, _ = unpack(*pack(verdict, verdict_logprobs(logits, verdict, rows)))
    assert [span.failure for span in spans] == [NON_FINITE, NO_CHOICE, None]
    assert [len(span.tokens) for span in spans] == [0, 0, 1]
    assert spans[0].logprobs is None


def test_a_step_without_sampling_spans_packs_to_nothing() -> None:
    rows = SamplingRows.build([], [], HOST)
    verdict = accept(torch.zeros(0, VOCAB), empty_draft(0, 4, HOST), rows)
    assert unpack(*pack(verdict, verdict_logprobs(torch.zeros(0, VOCAB), verdict, rows))) == ([], [])


def test_a_vector_of_another_step_is_refused() -> None:
    rows = SamplingRows.build([state_of(2)], [1], HOST)
    verdict = accept(torch.zeros(1, VOCAB), empty_draft(1, 0, HOST), rows)
    packed, layout = pack(verdict, verdict_logprobs(torch.zeros(1, VOCAB), verdict, rows))
    for wrong in (packed[:-1], torch.cat([packed, packed])):
        with pytest.raises(ValueError, match="layout reads"):
            unpack(wrong, layout)

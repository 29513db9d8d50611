"""Synthetic acceptance: drafts stay at exactly the rates that were asked for, are really verified, and end nothing.

The statistical tests draw from seeds 0, 1, ...: they repeat exactly, and were chosen by nobody.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.accept import accept
from engine.config import EngineConfig
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft, host_draft
from engine.speculation.names import SYNTHETIC
from engine.speculation.oracle import OracleSpeculator
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.speculator import DraftRow, SequenceStart, Speculator
from engine.speculation.synthetic_rates import parse_synthetic_rates
from protocol.options import parse
from protocol.reasons import FinishReason
from protocol.sampling import SamplingParams
from tests.inprocess import Drafter, InProcessEngine, Shape
from tests.lossless import request
from tests.speculation.on_host import speculator_on_host
from tests.tiny import EOS_TOKEN_IDS, write_tiny_model

VOCAB = 320
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)
NUM_DRAWS = 20_000
DEVIATIONS = 4.5  # of a rate that holds: 7 in a million by chance


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("synthetic") / "target", seed=5)


def synthetic(rates: str | None = None, **settings: object) -> Speculator:
    return speculator_on_host(SYNTHETIC, SpeculationSettings(synthetic_acceptance=rates, **settings), VOCAB)  # type: ignore[arg-type]


def row_of(seed: int, token_ids: Sequence[int], num_prompt: int, budget: int = 8, row: int = 0) -> DraftRow:
    return DraftRow(row, token_ids, budget, num_prompt, GREEDY, seed)


# ---- rates ----


@pytest.mark.parametrize(
    ("text", "count", "rates"),
    [
        ("0.8,0.6,0.4", None, (0.8, 0.6, 0.4)),
        ("0.8, 0.6 ,0", 3, (0.8, 0.6, 0.0)),
        ("1,1", None, (1.0, 1.0)),
        ("2.5", None, (1.0, 1.0, 0.5, 0.0, 0.0)),
        ("2.5", 3, (1.0, 1.0, 0.5)),
        ("0", 2, (0.0, 0.0)),
        ("0.7", 1, (0.7,)),
        (None, 3, (0.7, 0.49, 0.343)),
    ],
)
def test_rates_are_read_by_position_or_from_a_mean(text: str | None, count: int | None, rates: Sequence[float]) -> None:
    parsed = parse_synthetic_rates(text, count)
    assert parsed.by_position == pytest.approx(rates)
    assert parsed.mean_accepted == pytest.approx(sum(rates))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--synthetic-acceptance", "often"), "'often' is no rate and no mean"),
        (("--synthetic-acceptance", "0.8,,0.4"), "'' is no rate and no mean"),
        (("--synthetic-acceptance", "0.8,nan"), "'nan' is no rate and no mean"),
        (("--synthetic-acceptance", "-1"), "'-1' is no rate and no mean"),
        (("--synthetic-acceptance", "0.4,0.6"), "never rise.*0.6 does not fit"),
        (("--synthetic-acceptance", "1.5,0.5"), "at most 1.*1.5 does not fit"),
        (("--synthetic-acceptance", "5.5"), "5.5 accepts more than the 5 draft tokens"),
        (("--synthetic-acceptance", "0.8,0.6", "--num-draft-tokens", "3"), "rates for 2 draft tokens.*says 3"),
        (("--executor", "sim"), "--speculator synthetic says nothing with --executor sim, which has --sim-acceptance"),
    ],
)
def test_options_that_cannot_work_stop_the_start(arguments: Sequence[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(EngineConfig, ("--speculator", SYNTHETIC, *arguments), {}, program="drafthouse engine")


@pytest.mark.parametrize("speculator", ["ngram", "none", "first_of:ngram,prediction"])
def test_rates_are_refused_where_the_target_decides(speculator: str) -> None:
    arguments = ("--speculator", speculator, "--synthetic-acceptance", "2")
    with pytest.raises(ValueError, match="--synthetic-acceptance works only with --speculator synthetic"):
        parse(EngineConfig, arguments, {}, program="drafthouse engine")


def test_it_drafts_beside_nobody_whose_drafts_are_judged() -> None:
    with pytest.raises(ValueError, match="cannot ask 'synthetic'"):
        EngineConfig(speculator="first_of:ngram,synthetic")


# ---- the draw ----


@pytest.mark.parametrize("text", ["0.8,0.6,0.4", "2.4", "0.9,0.9,0.1,0", "1,0.5"])
def test_each_rate_holds_exactly(text: str) -> None:
    speculator = synthetic(text)
    rates = torch.tensor(parse_synthetic_rates(text, None).by_position)
    rows = [row_of(seed, (5, 6, 7), 3) for seed in range(NUM_DRAWS)]
    accepted = speculator.propose(rows).accepted
    assert accepted is not None
    counted = (accepted[:, None] > torch.arange(len(rates))).double().mean(dim=0)
    deviation = (rates * (1 - rates) / NUM_DRAWS).sqrt()
    assert bool(((counted - rates).abs() <= DEVIATIONS * deviation).all()), (counted, rates)
    if "," not in text:  # a mean is met with the least variance
        assert set(accepted.tolist()) == {2, 3}


def test_rounds_of_one_row_are_drawn_independently() -> None:
    """One after the other, as positions go by: how a round ended says nothing of the next."""
    speculator = synthetic("0.5,0.25")
    accepted = speculator.propose([row_of(1, range(3, 10 + at), 7) for at in range(4000)]).accepted
    assert accepted is not None
    first = (accepted > 0).double()
    both, alone = (first[1:] * first[:-1]).mean(), first.mean()
    assert abs(alone - 0.5) < DEVIATIONS * 0.5 / 4000**0.5
    assert abs(both - 0.25) < DEVIATIONS * 0.5 / 4000**0.5


def test_a_seed_repeats_and_another_prompt_with_it_does_not() -> None:
    def fates(prompt: Sequence[int]) -> list[int]:
        speculator = synthetic("0.5,0.4,0.3,0.2")
        speculator.begin(SequenceStart(0, tuple(prompt), len(prompt)))
        history = [*prompt, *range(100, 140)]
        rows = [row_of(7, history[: len(prompt) + at], len(prompt)) for at in range(1, 40)]
        accepted = speculator.propose(rows).accepted
        assert accepted is not None
        return accepted.tolist()

    assert fates([4, 5, 6]) == fates([4, 5, 6])
    assert fates([4, 5, 6]) != fates([4, 5, 7])


def test_no_more_is_accepted_than_was_drafted() -> None:
    draft = synthetic("1,1,1").propose([row_of(1, (5, 6, 7), 3, budget) for budget in (1, 2, 3)])
    assert draft.lengths.tolist() == [1, 2, 3]
    assert draft.accepted is not None
    assert draft.accepted.tolist() == [1, 2, 3]


@pytest.mark.parametrize("prompt", [(5, 6, 2, 7), (2, 0, 9), (2, 0), (9,)])
def test_nothing_is_drafted_that_ends_a_sequence(model: Path, prompt: tuple[int, ...]) -> None:
    """EOS stands in chat prompts, and stop tokens may."""
    engine = InProcessEngine(model, Shape(), Drafter("s", SYNTHETIC, SpeculationSettings(synthetic_acceptance="5")))
    sampling = SamplingParams(max_tokens=60, stop_token_ids=(9,))
    row = replace(row_of(1, (*prompt, 2, 9), len(prompt)), sampling=sampling)
    speculator = engine.executor._inner._speculator  # type: ignore[attr-defined]
    draft = speculator.propose([row])
    assert draft.lengths.tolist() == [5]
    assert not {9, *EOS_TOKEN_IDS} & set(draft.tokens[0].tolist())


# ---- the verdict ----


def verdict_of(
    draft: Draft, logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[list[int], list[list[int]]]:
    host = torch.device("cpu")
    sampling = SamplingModel(logits.shape[1], (), host)
    states = [SamplingState(one, 11, (1, 2, 3), 2, sampling) for one in params]
    counts = [1 + length for length in draft.lengths.tolist()]
    verdict = accept(logits, draft, SamplingRows.build(states, counts, host))
    return verdict.accepted.tolist(), verdict.tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_stays_is_the_drafts_and_what_follows_is_the_targets(temperature: float) -> None:
    """The target would have kept all of the first draft and nothing of the second."""
    logits = torch.full((7, 16), -20.0)
    for at, token in enumerate((4, 5, 6, 7, 8, 9, 10)):
        logits[at, token] = 20.0
    draft = host_draft([[4, 5, 6], [3, 3]], 3)
    params = [SamplingParams(max_tokens=9, temperature=temperature)] * 2
    assert verdict_of(draft, logits, params)[0] == [3, 0]
    unjudged = replace(draft, accepted=torch.tensor([1, 2], dtype=torch.int32))
    accepted, tokens = verdict_of(unjudged, logits, params)
    assert accepted == [1, 2]
    assert [line[:3] for line in tokens] == [[4, 5, 0], [3, 3, 10]]


class Liar(OracleSpeculator):
    """Decides what stays and does not say that it is synthetic."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        return replace(draft, accepted=draft.lengths)


def test_a_drafter_that_is_not_synthetic_cannot_decide_what_stays(model: Path) -> None:
    liar = Liar({(5, 6): (7, 8, 9, 10)}, 3, VOCAB, is_right=False)
    engine = InProcessEngine(model, Shape(), Drafter("liar", oracle=liar))
    engine.submit(request(1, [5, 6], {"temperature": 0.0, "ignore_eos": True}))
    engine.run_dry()
    finish = engine.answers()[1, 0].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    assert "decides which of its tokens stay, and does not say that it is synthetic" in (finish.message or "")


# ---- the engine ----


def test_an_engine_counts_what_it_committed_and_keeps_what_requests_forbid(model: Path) -> None:
    settings = SpeculationSettings(synthetic_acceptance="1,1,0")
    engine = InProcessEngine(model, Shape(), Drafter("s", SYNTHETIC, settings))
    assert engine.capabilities.synthetic == "1,1,0"
    prompt = [50, 51, 52, 53, 54]
    free = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 31}
    engine.submit(request(1, prompt, free))
    engine.run_dry()
    # The first token, then rounds of three: two drafted ones and the target's. Nothing left for a bonus: one less at the end.
    counters = engine.counters
    assert counters.accepted_per_pos == [10, 10, 0]
    assert (counters.draft_rounds, counters.draft_tokens, counters.accepted_tokens) == (10, 29, 20)
    assert counters.generation_tokens == 31
    answer = engine.answers()[1, 0].token_ids
    assert sum(token in prompt for token in answer) >= 20
    forbidding = ({"allowed_token_ids": tuple(range(60, 70))}, {"bad_words": ((50,),)}, {"logit_bias": {51: -100.0}})
    for number, sampling in enumerate(forbidding, start=2):
        engine.submit(request(number, prompt, {**free, **sampling}))
    stops = {"min_tokens": 25, "max_tokens": 30, "stop_token_ids": (*prompt[:2], *range(100, 300))}
    engine.submit(request(9, prompt, {"temperature": 0.0, **stops}))
    engine.run_dry()
    answers = engine.answers()
    assert all(60 <= token < 70 for token in answers[2, 0].token_ids)
    assert 50 not in answers[3, 0].token_ids
    assert 51 not in answers[4, 0].token_ids
    assert len(answers[9, 0].token_ids) >= 25
    assert engine.counters.draft_rounds > 10


def test_the_start_warns_of_the_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        synthetic("0.8,0.6,0.4")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the text is NOT the model's" in record.getMessage()
    assert "rates=0.8,0.6,0.4 mean_accepted=1.8" in record.getMessage()

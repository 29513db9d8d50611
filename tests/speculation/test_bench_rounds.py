"""What `make bench-drafters` measures: decoding and nothing else, counted by the engine."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from protocol.messages import Phase
from protocol.options import OptionsError
from protocol.sampling import SamplingParams
from tests.bench.drafters import engine_options
from tests.bench.rounds import MeasuredEngine
from tests.tiny import write_tiny_model

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9] * 6, [40, 41, 42] * 9]


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "model", "llama", seed=3)


def measured(model: Path, setting: str) -> MeasuredEngine:
    return MeasuredEngine(engine_options(setting, f"--model {model} --dtype fp32 --max-num-batched-tokens 16"))


@pytest.mark.parametrize("streams", [1, 2])
def test_only_decoding_is_timed_and_all_of_its_tokens_are_counted(model: Path, streams: int):
    run = measured(model, "ngram").run(PROMPTS, SAMPLING, streams)
    rounds = run.after.draft_rounds + run.after.plain_rounds
    decoded = run.after.generation_tokens - run.after.first_tokens
    assert run.after.generation_tokens == len(PROMPTS) * SAMPLING.max_tokens
    assert run.after.draft_rounds > 0
    if streams == 1:
        assert (run.num_steps, run.num_tokens) == (rounds, decoded)
    else:  # steps that also computed a prompt are left out, with their tokens
        assert 0 < run.num_tokens < decoded
    assert len(run.phase_ns[Phase.VERIFY]) == run.num_steps
    assert sum(run.phase_ns[Phase.VERIFY]) + sum(run.phase_ns[Phase.DRAFT]) < run.wall_ns


def test_a_second_run_counts_only_what_it_did_itself(model: Path):
    engine = measured(model, "none")
    first, second = engine.run(PROMPTS, SAMPLING, 1), engine.run(PROMPTS, SAMPLING, 1)
    assert first.after == second.before
    assert first.num_tokens == second.num_tokens
    assert Phase.DRAFT not in {phase for phase, spans in second.phase_ns.items() if spans}


def test_a_drafter_that_cannot_start_says_why(model: Path):
    with pytest.raises(OptionsError, match="--no-such-option"):
        measured(model, "ngram --no-such-option 1")
    with pytest.raises(ValueError, match="draft_model needs --draft-model"):
        measured(model, "draft_model")


def test_options_of_the_user_win_over_those_that_keep_engines_small():
    assert engine_options("ngram --max-num-seqs=3", "--kv-cache-tokens 99") == [
        "--speculator", "ngram", "--max-num-seqs=3", "--kv-cache-tokens", "99",
    ]  # fmt: skip

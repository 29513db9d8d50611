"""The simulated executor behind the real policy: scripts, random text, time."""

import math
import subprocess
import sys

import pytest

from engine.simulate import SimExecutor, SimSettings
from protocol.messages import Finish, SimScript
from protocol.reasons import CloseReason, FinishReason, RejectReason
from tests.fakes import EOS, VOCAB, Engine

W = 6
TEXT = tuple(range(100, 200))


class Simulation:
    """An engine over a SimExecutor whose sleeps are recorded."""

    def __init__(
        self, acceptance: float = 0.6, step_ms: float = 0.0, prefill_ms: float = 0.0, **engine: object
    ) -> None:
        self.sleeps: list[float] = []
        settings = SimSettings(W, VOCAB, TEXT, acceptance, step_ms, prefill_ms)
        options = {"max_draft_len": W, "max_num_batched_tokens": 64, **engine}
        executor = SimExecutor(settings, sleep=self.sleeps.append)
        self.engine = Engine(executor=executor, takes_scripts=True, **options)  # type: ignore[arg-type]

    def play(self, script: SimScript, **options: object) -> Finish:
        self.engine.submit(1, **{"max_tokens": 64, **options, "sim": script})
        self.engine.run_dry()
        finishes = self.engine.finishes(1)
        assert isinstance(finishes[0], Finish)
        return finishes[0]

    @property
    def tokens(self) -> list[int]:
        return self.engine.tokens(1)


def rounds(engine: Engine, request_id: int = 1) -> list[tuple[int, int]]:
    return [(o.round.drafted, o.round.accepted) for o in engine.child_outputs(request_id) if o.round is not None]


def test_each_run_is_one_step_and_the_prompt_emits_nothing() -> None:
    simulation = Simulation()
    finish = simulation.play(SimScript(((582, 827, 996), (5,))))
    outputs = [o for o in simulation.engine.child_outputs(1) if o.round is not None]
    assert [o.token_ids for o in outputs] == [(582, 827, 996), (5,)]
    assert rounds(simulation.engine) == [(2, 2), (0, 0)]
    assert finish == Finish(FinishReason.STOP) and outputs[-1].finish == finish, "ends in its last step"
    prompt = simulation.engine.child_outputs(1)[0]
    assert prompt.prompt is not None and prompt.token_ids == ()
    counters = simulation.engine.counters
    assert (counters.first_tokens, counters.generation_tokens, counters.steps_ok) == (0, 4, 3)


def test_an_empty_script_ends_with_its_prompt() -> None:
    simulation = Simulation()
    assert simulation.play(SimScript(())) == Finish(FinishReason.STOP)
    assert simulation.tokens == [] and simulation.engine.counters.plain_rounds == 0


@pytest.mark.parametrize("position", range(6))
def test_eos_in_a_run_ends_it_and_no_further_round_runs(position: int) -> None:
    run = [582] * 6
    run[position] = EOS
    simulation = Simulation()
    assert simulation.play(SimScript((tuple(run), (582,)))).reason is FinishReason.STOP
    assert simulation.tokens == run[: position + 1]
    before = simulation.engine.counters.draft_rounds
    simulation.engine.step(3)
    assert simulation.engine.counters.draft_rounds == before == 1
    assert simulation.engine.counters.cut_tokens == 5 - position


def test_stop_token_beats_max_tokens_and_max_tokens_cuts_runs() -> None:
    finish = Simulation().play(SimScript(((582, 365, 827),)), stop_token_ids=(365,), max_tokens=2)
    assert finish == Finish(FinishReason.STOP, stop_token_id=365)
    simulation = Simulation()
    assert simulation.play(SimScript(((531, 976, 5), (7,))), max_tokens=2) == Finish(FinishReason.LENGTH)
    assert simulation.tokens == [531, 976]


def test_scripted_drafts_are_counted_as_scripted() -> None:
    """A-METR-5: 10 steps with 3 proposed and 2 accepted, 5 plain ones."""
    simulation = Simulation()
    runs = ((1, 3, 4),) * 10 + ((5,),) * 5
    simulation.play(SimScript(runs, drafted=(3,) * 10 + (0,) * 5))
    counters = simulation.engine.counters
    assert (counters.draft_rounds, counters.draft_tokens, counters.accepted_tokens) == (10, 30, 20)
    assert counters.accepted_per_pos == [10, 10, 0, 0, 0, 0]
    assert counters.plain_rounds == 5 and counters.generation_tokens == 35


def test_a_scripted_failure_ends_that_request_only() -> None:
    simulation = Simulation()
    simulation.engine.submit(2, max_tokens=30)
    finish = simulation.play(SimScript(((1, 3), (4, 5), (6, 7)), fail_at=1))
    assert finish.reason is FinishReason.ERROR and finish.message is not None and "step 1" in finish.message
    assert simulation.tokens == [1, 3]
    assert len(simulation.engine.tokens(2)) == 30


def test_a_scripted_preemption_loses_one_result_and_plays_the_run_once() -> None:
    simulation = Simulation()
    runs = ((1, 3, 4), (5, 6), (7,))
    assert simulation.play(SimScript(runs, preempt_at=1)).reason is FinishReason.STOP
    assert simulation.tokens == [1, 3, 4, 5, 6, 7]
    counters = simulation.engine.counters
    assert counters.num_preemptions == 1 and counters.prompt_tokens == 3
    assert rounds(simulation.engine) == [(2, 2), (0, 0), (1, 1), (0, 0)], "the recompute ends in a plain round"
    assert (counters.draft_rounds, counters.plain_rounds, counters.non_draft_tokens) == (2, 2, 3)


def test_a_script_survives_preemption_by_memory() -> None:
    simulation = Simulation(num_blocks=10, block_size=4, max_num_seqs=4, prefix_caching=False)
    runs = tuple((10 + step, 11 + step, 12 + step) for step in range(8))
    for request_id in range(1, 5):
        simulation.engine.submit(request_id, max_tokens=64, sim=SimScript(runs))
    simulation.engine.run_dry()
    assert simulation.engine.counters.num_preemptions > 0
    for request_id in range(1, 5):
        assert simulation.engine.tokens(request_id) == [token for run in runs for token in run]


def test_closing_between_dispatch_and_result_counts_the_step_as_aborted() -> None:
    """A-ABORT-4."""
    simulation = Simulation()
    engine = simulation.engine
    engine.submit(1, max_tokens=64, sim=SimScript(((1, 3, 4, 5, 6, 7),) * 3))
    engine.step()
    execute = engine.core.executor.execute

    def execute_and_close(plan: object) -> object:
        engine.close(1)
        return execute(plan)  # type: ignore[arg-type]

    engine.core.executor.execute = execute_and_close  # type: ignore[assignment,method-assign]
    engine.step()
    engine.core.executor.execute = execute  # type: ignore[method-assign]
    engine.run_dry()
    counters = engine.publisher.counters()
    assert (counters.draft_rounds, counters.accepted_tokens, counters.aborted_rounds) == (1, 5, 1)
    assert (counters.generation_tokens, counters.cut_tokens) == (0, 6)
    assert engine.publisher.snapshots[-1].load.running == 0


def test_a_stop_string_found_late_trims_the_run() -> None:
    """A-STOP-1 at the engine's seam: the frontend kept 3 of 5 tokens."""
    simulation = Simulation()
    engine = simulation.engine
    engine.submit(1, max_tokens=20, awaits_close=True, sim=SimScript(((582, 827, 365, 187, 253), (1,), (3,))))
    engine.step(2)
    engine.close(1, reason=CloseReason.STOP_STRING, kept=3)
    engine.run_dry()
    counters = engine.counters
    assert counters.generation_tokens - counters.trimmed_tokens == 3 and counters.trimmed_tokens == 2
    assert engine.finishes(1) == [Finish(FinishReason.STOP)]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (SimScript(((1,) * (W + 2),)), "step 0 has 8 tokens; a step has 1 to 7"),
        (SimScript(((1,), ())), "step 1 has 0 tokens"),
        (SimScript(((1, VOCAB),)), "outside the vocabulary"),
        (SimScript(((1, 3),), drafted=(0,)), "drafts 0 tokens; it accepts 1"),
        (SimScript(((1, 3),), drafted=(W + 1,)), "at most 6 can be drafted"),
        (SimScript(((1, 3),), drafted=()), "0 entries for 1 steps"),
        (SimScript(((1,),), fail_at=-1), "fail_at"),
        (SimScript(((1,),), step_ms=math.inf), "step_ms"),
    ],
)
def test_scripts_that_cannot_be_played_are_refused(script: SimScript, words: str) -> None:
    finish = Simulation().play(script)
    assert finish.rejected is RejectReason.INVALID and finish.message is not None and words in finish.message


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_random_text_does_not_depend_on_how_many_tokens_a_step_gives(acceptance: float) -> None:
    simulation = Simulation(acceptance)
    simulation.engine.submit(1, max_tokens=41, seed=9)
    simulation.engine.submit(2, max_tokens=41, seed=10)
    simulation.engine.run_dry()
    plain = Simulation(0.0)
    plain.engine.submit(1, max_tokens=41, seed=9)
    plain.engine.run_dry()
    assert simulation.tokens == plain.tokens != simulation.engine.tokens(2)
    assert len(simulation.tokens) == 41 and set(simulation.tokens) <= set(TEXT)
    accepted, drafted = simulation.engine.counters.accepted_tokens, simulation.engine.counters.draft_tokens
    assert (accepted == 0) == (acceptance == 0.0) and (accepted == drafted) == (acceptance == 1.0)


def test_greedy_text_follows_the_prompt_and_not_the_seed() -> None:
    simulation = Simulation()
    for request_id, prompt in ((1, (10, 11)), (2, (10, 11)), (3, (10, 12))):
        simulation.engine.submit(request_id, prompt, temperature=0.0, seed=None, max_tokens=20)
    simulation.engine.run_dry()
    first, second, third = (simulation.engine.tokens(request_id) for request_id in (1, 2, 3))
    assert first == second != third


def test_allowed_tokens_are_the_only_ones_emitted() -> None:
    simulation = Simulation()
    simulation.engine.submit(1, max_tokens=20, allowed_token_ids=(7, 8))
    simulation.engine.run_dry()
    assert set(simulation.tokens) == {7, 8}


def test_logprobs_are_complete_finite_and_sum_to_less_than_one() -> None:
    simulation = Simulation()
    simulation.engine.submit(1, range(10, 90), max_tokens=12, logprobs=5, prompt_logprobs=2)
    simulation.engine.run_dry()
    outputs = simulation.engine.child_outputs(1)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    assert len(entries) == 12
    report = next(output.prompt for output in outputs if output.prompt is not None)
    assert report.logprobs is not None and len(report.logprobs) == 80 and report.logprobs[0] is None
    assert [entry.top_ids[0] for entry in report.logprobs[1:] if entry is not None] == list(range(11, 90))
    for entry, token_id in zip(entries, simulation.tokens, strict=True):
        assert entry.rank == 1 and entry.top_ids[0] == token_id and entry.logprob == entry.top_logprobs[0]
        assert len(set(entry.top_ids)) == 5 and sum(map(math.exp, entry.top_logprobs)) < 1.0


def test_steps_and_prompts_take_their_time_once_per_step() -> None:
    simulation = Simulation(step_ms=4.0, prefill_ms=100.0)
    simulation.engine.step()
    assert simulation.sleeps == [], "an empty step takes none"
    simulation.engine.submit(1, range(10, 60), max_tokens=2)
    simulation.engine.submit(2, (5,) * 10, max_tokens=2, sim=SimScript(((1,),), step_ms=30.0))
    simulation.engine.step()
    assert simulation.sleeps == [pytest.approx(0.030 + 0.100 * 60 / 1000)]
    simulation.engine.step(2)
    assert simulation.sleeps[1:] == [pytest.approx(0.030)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"acceptance": 1.5}, "sim_acceptance"),
        ({"step_ms": -1.0}, "sim_step_ms"),
        ({"prefill_ms": math.nan}, "sim_prefill_ms"),
        ({"text_token_ids": ()}, "at least one text token"),
        ({"text_token_ids": (VOCAB,)}, "outside the vocabulary"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], words: str) -> None:
    values = {"max_draft_len": W, "vocab_size": VOCAB, "text_token_ids": TEXT, **settings}
    with pytest.raises(ValueError, match=words):
        SimSettings(**values)  # type: ignore[arg-type]


def test_a_simulated_engine_never_imports_torch() -> None:
    code = "import sys, engine.core, engine.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Every drafter of the registry, and the oracles, keeps the seam's promises on a toy target.

A drafter is enrolled by being in the registry's table; nothing here names one except to state what it is good at.
"""

import functools
import random
from collections.abc import Callable

import msgspec
import pytest
import torch

from engine.sampling import SamplingModel
from engine.speculation.names import members_of
from engine.speculation.oracle import OracleSpeculator, ScriptedSpeculator
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.registry import names
from engine.speculation.speculator import DraftRow, SequenceStart, Speculator
from protocol.sampling import SamplingParams
from tests.draft_files import has_files
from tests.lossless import COMBINATIONS, edited
from tests.speculation.on_host import speculator_on_host
from tests.speculation.reference import HOST, ToyTarget, generate
from tests.speculation.toy_engine import Run, ToyEngine

VOCAB, EOS, WIDTH = 12, (11,), 4
MODEL = SamplingModel(VOCAB, EOS, HOST)
TARGET = ToyTarget(VOCAB, seed=5, order=1, scale=3.0)
ORACLES = ("right", "wrong", "scripted")

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=0.0, min_tokens=10, logit_bias={EOS[0]: 40.0}),
    SamplingParams(max_tokens=40, temperature=0.3, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.6, top_p=0.9),
    SamplingParams(max_tokens=33, temperature=0.4, top_k=3, min_p=0.02, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.5, bad_words=((3, 4), (7,)), allowed_token_ids=tuple(range(9))),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=2, temperature=0.0),
]


def runs_of(params: list[SamplingParams]) -> list[Run]:
    runs = [Run(prompt_of(index), one, seed=1000 + index) for index, one in enumerate(params)]
    for index, run in enumerate(runs):
        run.prediction = edited(plain(run), index, VOCAB)
    return runs


def prompt_of(index: int) -> list[int]:
    return [index % VOCAB, *([(index * 5 + 1) % (VOCAB - 1), index % 3] * (index % 4))]


def plain(run: Run) -> list[int]:
    return list(_plain(tuple(run.prompt), run.seed, msgspec.msgpack.encode(run.params)))


@functools.cache
def _plain(prompt: tuple[int, ...], seed: int, encoded: bytes) -> list[int]:
    return generate(TARGET, msgspec.msgpack.decode(encoded, type=SamplingParams), seed, prompt, MODEL)


def speculator_of(name: str, runs: list[Run]) -> Speculator:
    if name in ("right", "wrong"):
        truths = {tuple(run.prompt): plain(run) for run in runs}
        return OracleSpeculator(truths, WIDTH, VOCAB, is_right=name == "right")
    if name == "scripted":
        return ScriptedSpeculator(lambda history: (TARGET.logits(history) * 0.5).softmax(dim=0), WIDTH, VOCAB, seed=3)
    return speculator_on_host(name, SpeculationSettings(WIDTH, lookup_min=1, lookup_max=3), VOCAB)


def can_be_compared(name: str) -> bool:
    """A drafter with a model of its own has nothing to run on here; tests/engine/test_lossless.py has all of them.

    Of synthetic acceptance nothing is claimed that is claimed here: its text is not the target's.
    """
    if any(map(has_files, members_of(name))):
        return False
    return not speculator_on_host(name, SpeculationSettings(), VOCAB).capabilities.synthetic


every_speculator = pytest.mark.parametrize("name", [*filter(can_be_compared, (*names(), *COMBINATIONS)), *ORACLES])


def finish(engine: ToyEngine, runs: list[Run], room: Callable[[], int] = lambda: 1000) -> None:
    for row, run in enumerate(runs):
        engine.begin(run, row)
    while any(not run.is_finished for run in runs):
        engine.step(room())


def comparable(run: Run, name: str) -> bool:
    """Rejection sampling keeps the law only, so its sampled rows take another path through it."""
    return run.params.is_greedy or name != "scripted"


@every_speculator
def test_output_is_plain_decodings_token_for_token(name: str) -> None:
    runs = runs_of(PARAMS)
    finish(ToyEngine(speculator_of(name, runs), TARGET, MODEL), runs)
    for index, run in enumerate(runs):
        if comparable(run, name):
            assert run.output == plain(run), index
        assert len(run.output) <= run.params.max_tokens


@every_speculator
def test_output_survives_preemption_and_row_changes(name: str) -> None:
    generator = random.Random(17)
    runs = runs_of(PARAMS)
    engine = ToyEngine(speculator_of(name, runs), TARGET, MODEL)
    free = list(range(len(runs)))
    waiting = list(runs)
    while any(not run.is_finished for run in runs):
        generator.shuffle(waiting)
        while waiting and generator.random() < 0.7:
            engine.begin(waiting.pop(), free.pop(generator.randrange(len(free))))
        if any(run.row is not None for run in runs):
            before = {id(run): run.row for run in runs}
            engine.step(generator.choice([0, 5, 1000]))
            free += [row for run in runs if run.is_finished and (row := before[id(run)]) is not None]
        running = [run for run in runs if run.row is not None]
        if running and generator.random() < 0.3:
            victim = generator.choice(running)
            assert victim.row is not None
            free.append(victim.row)
            engine.end(victim)
            waiting.append(victim)
    for run in runs:
        if comparable(run, name):
            assert run.output == plain(run)


@every_speculator
def test_rounds_account_for_every_token(name: str) -> None:
    runs = runs_of(PARAMS)
    finish(ToyEngine(speculator_of(name, runs), TARGET, MODEL), runs)
    for run in runs:
        assert len(run.output) == run.accepted + run.rounds - run.cut
        assert run.accepted <= run.drafted
        if run.params.ignore_eos:
            assert run.cut == 0  # the budget leaves room for the target's own token


@every_speculator
def test_a_lived_in_drafter_proposes_what_a_fresh_one_does(name: str) -> None:
    """No rejected token, no earlier sequence of the row and no neighbour leaves a trace (A-CACHE-3).

    Everybody has a scope of their own: within one, some drafters are meant to learn.
    """
    runs = runs_of(PARAMS)
    for number, run in enumerate(runs):
        run.scope = f"first {number}"
    engine = ToyEngine(speculator_of(name, runs), TARGET, MODEL)
    finish(engine, runs)
    again = runs_of(list(reversed(PARAMS)))
    for number, run in enumerate(again):
        run.scope = f"second {number}"
    engine.proposals.clear()
    finish(engine, again)
    by_history = {tuple(run.history[: len(run.prompt)]): run for run in again}
    for history, budget, proposed in engine.proposals:
        run = next(run for prompt, run in by_history.items() if tuple(history[: len(prompt)]) == prompt)
        fresh = speculator_of(name, runs)
        fresh.begin(SequenceStart(0, tuple(history), len(run.prompt), run.scope, run.prediction))
        draft = fresh.propose([DraftRow(0, tuple(history), budget, len(run.prompt), run.params)])
        assert draft.tokens[0, : int(draft.lengths[0])].tolist() == proposed


@every_speculator
def test_the_models_length_is_never_overrun(name: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    runs = [Run([1, 2, 3], params, seed=1)]
    engine = ToyEngine(speculator_of(name, runs), TARGET, MODEL, max_model_len=23)
    finish(engine, runs)
    assert len(runs[0].output) == 20
    assert all(len(history) + len(proposed) + 1 <= 23 for history, _, proposed in engine.proposals)


@every_speculator
def test_no_rows_and_no_room_are_legal(name: str) -> None:
    runs = runs_of(PARAMS[:3])
    speculator = speculator_of(name, runs)
    draft = speculator.propose([])
    assert draft.tokens.shape == (0, speculator.capabilities.max_draft_len)
    engine = ToyEngine(speculator, TARGET, MODEL)
    finish(engine, runs, room=lambda: 0)
    assert engine.proposals == []
    assert [run.output for run in runs] == [plain(run) for run in runs]


@every_speculator
def test_end_is_legal_for_a_row_that_never_drafted(name: str) -> None:
    speculator = speculator_of(name, runs_of(PARAMS[:1]))
    speculator.begin(SequenceStart(3, (1, 2), 2))
    speculator.end(3)


def test_the_extremes_are_extreme() -> None:
    for name, is_right in (("right", True), ("wrong", False)):
        runs = runs_of([GREEDY] * 3)
        finish(ToyEngine(speculator_of(name, runs), TARGET, MODEL), runs)
        assert all(run.drafted > 0 for run in runs)
        assert sum(run.accepted for run in runs) == (sum(run.drafted for run in runs) if is_right else 0)


def test_lookup_is_accepted_on_text_that_repeats() -> None:
    runs = runs_of([GREEDY])
    finish(ToyEngine(speculator_of("ngram", runs), TARGET, MODEL), runs)
    assert runs[0].accepted > 10


def test_speculation_never_touches_the_global_generator() -> None:
    runs = runs_of(PARAMS)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    finish(ToyEngine(speculator_of("scripted", runs), TARGET, MODEL), runs)
    assert torch.equal(before, torch.random.get_rng_state())

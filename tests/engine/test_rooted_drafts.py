"""Drafts that begin with a token of the target's own: two non-draft tokens in a round, exactly counted, and lossless.

A drafter that knows the answer holds rollback, compaction, hidden states and counters at every length of acceptance; UNO
itself is held to the law, and to leave alone what it cannot serve.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.accept import accept, place_draft
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft, empty_draft, host_draft
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, Speculator
from engine.speculation.uno_recipe import UNSUPPORTED_SAMPLING
from protocol.messages import Round, Submit
from protocol.sampling import SamplingParams
from tests.inprocess import Answer, Drafter, InProcessEngine, Logits, Shape
from tests.lossless import Plain, Scenario, alone, assert_equal, check_books, play, request
from tests.tiny import write_tiny_model
from tests.tiny_drafters import taps_of, target_model
from tests.tiny_uno import write_uno

WIDTH, VOCAB, TAPS = 5, 320, (1, 2)
HOST = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "model", seed=5)


@pytest.fixture(scope="module")
def plain(target: Path) -> Plain:
    return Plain(target)


class RootedOracle(Speculator):
    """The true next token as root, then the true continuation with a wrong token at some depth; as a chain or a tree.

    In a tree every true node comes behind a wrong sibling, so that what is accepted must be moved.
    """

    def __init__(self, truths: Mapping[tuple[int, ...], Sequence[int]], is_tree: bool) -> None:
        self.capabilities = Capabilities(WIDTH, ("oracle",), tree=is_tree, drafts_on_host=True, taps=TAPS)
        self.heard: dict[tuple[int, int], tuple[tuple[int, ...], torch.Tensor]] = {}
        self._truths = truths
        self._is_tree = is_tree

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        drafts = [self._tokens(row) for row in rows]
        roots = [tokens[0] if len(tokens) > 1 else -1 for tokens in drafts]
        proposals, parents = [], torch.full((len(rows), WIDTH), -1, dtype=torch.int32)
        for index, tokens in enumerate(drafts):
            nodes, own = self._nodes(tokens[1:], rows[index].budget - 1)
            proposals.append(nodes)
            parents[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        return replace(
            host_draft(proposals, WIDTH),
            parents=parents if self._is_tree else None,
            roots=torch.tensor(roots, dtype=torch.int32),
            has_root=torch.tensor([root >= 0 for root in roots]),
        )

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        for span in spans:
            assert span.taps is not None and len(span.taps) == len(span.token_ids)
            for offset in range(len(span.token_ids)):
                self.heard[span.row, span.start + offset] = (tuple(span.token_ids), span.taps[offset])

    def _tokens(self, row: DraftRow) -> list[int]:
        """Root and draft, of a length and wrong at a place that differ from round to round."""
        truth = self._truths[tuple(row.token_ids[: row.num_prompt_tokens])]
        done = len(row.token_ids) - row.num_prompt_tokens
        tokens = list(truth[done : done + row.budget])
        wrong = 1 + len(row.token_ids) % 5
        return [(token + (at == wrong)) % VOCAB for at, token in enumerate(tokens)]

    def _nodes(self, tokens: Sequence[int], limit: int) -> tuple[list[int], list[int]]:
        if not self._is_tree:
            return list(tokens[:limit]), []
        nodes, parents, parent = [], [], -1
        for token in tokens[: limit // 2]:
            nodes += [(token + 7) % VOCAB, token]
            parents += [parent, parent]
            parent = len(nodes) - 1
        return nodes, parents


def traffic() -> tuple[Submit, ...]:
    options: tuple[dict[str, object], ...] = (
        {"temperature": 0.0, "ignore_eos": True, "max_tokens": 25},
        {"temperature": 0.9, "top_p": 0.8, "max_tokens": 19},
        {"temperature": 0.0, "stop_token_ids": tuple(range(100, 150)), "max_tokens": 30},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 8, "max_tokens": 14},
        {"temperature": 1.0, "logit_bias": {7: 5.0}, "bad_words": ((9, 9), (12,)), "max_tokens": 14},
        {"temperature": 0.0, "max_tokens": 3},
    )
    prompts = [
        [5 + (number * 37 + place * 11) % 300 for place in range(3 + number * 4)] for number in range(len(options))
    ]
    return tuple(
        request(number, prompt, one) for number, (prompt, one) in enumerate(zip(prompts, options, strict=True))
    )


def started(target: Path, shape: Shape, oracle: RootedOracle) -> InProcessEngine:
    """An engine whose target gives the hidden states that the oracle asks for."""
    engine = InProcessEngine(target, shape, Drafter("rooted", oracle=oracle))
    engine.executor._inner._runner._taps = TAPS  # type: ignore[attr-defined]
    return engine


def rounds_of(engine: InProcessEngine, request_id: int) -> list[Round]:
    outputs = engine.outputs()[request_id, 0]
    return [output.round for output in outputs if output.round is not None]


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_rooted_rounds_are_lossless_and_counted(target: Path, plain: Plain, is_tree: bool) -> None:
    submits = traffic()
    truths = {one.prompt_token_ids: plain.answer(one).token_ids for one in submits}
    oracle = RootedOracle(truths, is_tree)
    scenario = Scenario(Shape(), (submits,), steps_between=1)
    engine = started(target, scenario.shape, oracle)
    play(engine, scenario)
    answers = engine.answers()
    for one in submits:
        assert_equal(one, plain.answer(alone(one, 0)), answers[one.request_id, 0])
    check_books(engine, scenario, answers)
    counters = engine.counters
    rounds = [round_ for one in submits for round_ in rounds_of(engine, one.request_id)]
    rooted = [round_ for round_ in rounds if round_.non_draft == 2]
    assert len(rooted) > 15 and counters.target_forwards < counters.generation_tokens
    assert counters.non_draft_tokens == len(rounds) + len(rooted)
    assert {round_.accepted for round_ in rooted} >= ({0, 1, 2} if is_tree else {0, 1, 2, 4})


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_hidden_states_of_a_root_and_what_it_carries_are_heard(target: Path, plain: Plain, is_tree: bool) -> None:
    [submit] = [request(1, [9, 8, 7, 6, 5], {"temperature": 0.0, "ignore_eos": True, "max_tokens": 22})]
    answer = plain.answer(submit).token_ids
    oracle = RootedOracle({submit.prompt_token_ids: answer}, is_tree)
    engine = started(target, Shape(), oracle)
    engine.submit(submit)
    engine.run_dry()
    engine.step()  # the last commit is told with the step after it
    text = [*submit.prompt_token_ids, *answer]
    wanted = taps_of(target_model(target), torch.tensor([text]), TAPS)[0]
    heard = {position: taps for (_, position), (_, taps) in oracle.heard.items()}
    assert sorted(heard) == list(range(len(text) - 1))
    for position, taps in heard.items():
        assert torch.allclose(taps, wanted[position], atol=1e-3), position


# ---- the seam's contract ----


def states(count: int) -> list[SamplingState]:
    model = SamplingModel(4, (3,), HOST)
    return [SamplingState(SamplingParams(max_tokens=9, temperature=0.0), 1, [0, 1], 1, model) for _ in range(count)]


def test_a_row_whose_root_could_not_be_drawn_fails_alone() -> None:
    draft = replace(
        host_draft([[2], [2]], 1),
        roots=torch.tensor([1, -1], dtype=torch.int32),
        has_root=torch.tensor([True, True]),
    )
    placed = place_draft(draft, [0, 2], 3)
    assert placed.has_root is not None and placed.has_root.tolist() == [True, False, True]
    logits = torch.zeros(5, 4)
    logits[:, 2] = 1.0
    verdict = accept(logits, placed, SamplingRows.build(states(3), [2, 1, 2], HOST))
    assert verdict.finite.tolist() == [True, True, False]
    assert verdict.num_non_draft.tolist()[:2] == [2, 1]
    assert verdict.tokens[0].tolist() == [1, 2, 2]


def asked(budget: int, **sampling: object) -> DraftRow:
    params = SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
    return DraftRow(4, (1, 2), budget, 1, params)


def test_a_root_takes_a_slot_and_has_no_log_probabilities(target: Path) -> None:
    engine = InProcessEngine(target, Shape(), Drafter("none"))
    executor = engine.executor._inner
    draft = replace(host_draft([[2, 3]], 4), roots=torch.tensor([1], dtype=torch.int32), has_root=torch.tensor([True]))
    assert executor._read(draft, [asked(3)])[0] == [2]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="gave row 4 3 tokens; its budget is 2"):
        executor._read(draft, [asked(2)])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="gave row 4 a root, which comes without the log-probabilities"):
        executor._read(draft, [asked(3, logprobs=0)])  # type: ignore[attr-defined]
    assert empty_draft(1, 4, HOST).has_root is None


# ---- UNO behind the whole engine ----


def uno(target: Path, directory: Path, **settings: object) -> Drafter:
    """With a random adapter, whose guesses are as good as never right."""
    adapter = write_uno(directory, target)
    return Drafter("uno", "uno", SpeculationSettings(draft_model=str(adapter), **settings))  # type: ignore[arg-type]


REFUSED: dict[str, dict[str, object]] = {
    "min_p": {"min_p": 0.1, "temperature": 0.7},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {7: 3.0}},
    "min_tokens": {"min_tokens": 4},
    "bad_words": {"bad_words": ((12,),)},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(9, 90))},
    "logprobs": {"logprobs": 2},
}


def test_what_uno_cannot_serve_runs_plain_beside_what_it_can(target: Path, plain: Plain, tmp_path: Path) -> None:
    assert REFUSED.keys() == UNSUPPORTED_SAMPLING
    own = request(0, [5, 9, 70, 5], {"temperature": 0.0, "ignore_eos": True, "max_tokens": 14})
    others = [
        request(1 + number, [5, 9, 70, 5], {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **options})
        for number, options in enumerate(REFUSED.values())
    ]
    engine = InProcessEngine(target, Shape(max_num_seqs=12), uno(target, tmp_path / "adapter", num_draft_tokens=4))
    for one in (own, *others):
        engine.submit(one)
    engine.run_dry()
    answers: Mapping[tuple[int, int], Answer] = engine.answers()
    for one in (own, *others):
        assert_equal(one, plain.answer(one), answers[one.request_id, 0])
    for one in others:
        rounds = rounds_of(engine, one.request_id)
        assert len(rounds) == 7 and all((round_.drafted, round_.non_draft) == (0, 1) for round_ in rounds)
    counters = engine.counters
    for round_ in rounds_of(engine, 0):
        assert (round_.non_draft == 2) is (round_.drafted > 0) and round_.drafted <= 3
    assert counters.plain_rounds >= 7 * len(others) and counters.draft_forwards == counters.draft_rounds > 3


def few_words(directory: Path) -> Path:
    """A target that says one of eight tokens as good as always, so that what is guessed is often among its two likeliest."""
    write_tiny_model(directory, seed=5)
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][:8] *= 3.0
    weights["lm_head.weight"][8:] *= 0.2
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory


def test_sampled_drafts_leave_the_targets_law(tmp_path: Path) -> None:
    """All 16 answers of four tokens, top_k 2 each, against their exact probabilities: false alarm once in a million."""
    target = few_words(tmp_path / "target")
    critical = 56.5  # chi-square with 15 degrees of freedom: exceeded with probability 1e-6
    prompt, count = [5, 9, 70, 5, 9, 70, 5], 600
    logits = Logits(target, "cpu", "fp32")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer = {}
        for path, mass in law.items():
            best = logits([*prompt, *path])[-1].double().topk(2)
            for token, share in zip(best.indices.tolist(), (best.values / 8.0).softmax(dim=0).tolist(), strict=True):
                longer[(*path, token)] = mass * share
        law = longer
    drafter = uno(target, tmp_path / "adapter", num_draft_tokens=3, draft_sampling="sampled")
    engine = InProcessEngine(target, Shape(max_num_seqs=64, num_blocks=500), drafter)
    sampling = {"temperature": 8.0, "top_k": 2, "max_tokens": 4, "ignore_eos": True}
    for number in range(count):
        engine.submit(request(number, prompt, {**sampling, "seed": number}))
    engine.run_dry(checks=False)
    seen = dict.fromkeys(law, 0)
    for answer in engine.answers().values():
        seen[answer.token_ids] += 1
    counters = engine.counters
    counters.check()
    assert 0.05 < counters.accepted_tokens / counters.draft_tokens < 0.95, "both verdicts must be frequent"
    assert sum((seen[path] - count * mass) ** 2 / (count * mass) for path, mass in law.items()) < critical

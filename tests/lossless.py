"""The claim that speculation changes no answer, as scenarios that any drafter, model and device can be put through.

Owns the traffic (who asks what, when, and who leaves), the plain answers it must come to, and the comparison. Used by
tests/engine/test_lossless.py on the CPU and by tests/gpu/check.py on a device; needs nothing that only tests install.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engine.speculation.names import PREDICTION
from engine.speculation.oracle import OracleSpeculator
from engine.speculation.recipe import SpeculationSettings, SuffixSettings
from engine.speculation.registry import names
from protocol.counters import Counters
from protocol.messages import Submit, TokenLogprobs
from protocol.model_files import read_context_length, resolve
from protocol.reasons import FinishReason
from protocol.sampling import SamplingParams
from tests.fakes import submit
from tests.inprocess import MAX_STEPS, Answer, ChildId, Drafter, InProcessEngine, Shape

VOCAB = 320
ORACLE_WIDTH = 4
LOGPROB_TOLERANCE = 1e-3  # natural log, float32: a batch of another size rounds otherwise
SEED_RANGE = 2**63

Compare = Callable[[Submit, Answer, Answer], None]  # (the child alone, its plain answer, its answer); raises

COMBINATIONS = ("first_of:prediction,ngram", "first_of:ngram,draft_model")

# Settings that change what a registered drafter proposes; one that is not named here runs with its own defaults.
_SETTINGS: Mapping[str, tuple[SpeculationSettings, ...]] = {
    "ngram": (
        SpeculationSettings(),
        SpeculationSettings(num_draft_tokens=1, lookup_min=1, lookup_max=1),
        SpeculationSettings(num_draft_tokens=16, lookup_min=1, lookup_max=5),
    ),
    "suffix": (
        SpeculationSettings(num_draft_tokens=8),
        SpeculationSettings(num_draft_tokens=6, suffix=SuffixSettings(mode="tree", factor=2.0, max_depth=8)),
    ),
    "first_of:ngram,draft_model": (
        SpeculationSettings(),
        SpeculationSettings(num_draft_tokens=3, draft_sampling="sampled"),
    ),
    "draft_model": (
        SpeculationSettings(),
        SpeculationSettings(num_draft_tokens=3, draft_sampling="sampled"),
    ),
    "eagle": (SpeculationSettings(num_draft_tokens=6, tree_top_k=3, tree_depth=4),),
    "mtp": (
        SpeculationSettings(),
        SpeculationSettings(num_draft_tokens=2, draft_sampling="sampled"),
    ),
    "medusa": (
        SpeculationSettings(num_draft_tokens=3, draft_sampling="sampled"),
        SpeculationSettings(num_draft_tokens=12, tree_top_k=6),
    ),
    "dspark": (
        SpeculationSettings(),
        SpeculationSettings(num_draft_tokens=6, tree_top_k=2, confidence_threshold=0.2),
    ),
    "synthetic": (SpeculationSettings(synthetic_acceptance="0.9,0.6,0.2"),),
    "frozen_kv_mtp": (
        SpeculationSettings(),
        SpeculationSettings(num_draft_tokens=2, draft_sampling="sampled"),
    ),
    "uno": (
        SpeculationSettings(num_draft_tokens=12, tree_top_k=6, tree_depth=3),
        SpeculationSettings(num_draft_tokens=4),
    ),
}


def registered_drafters() -> tuple[Drafter, ...]:
    """Every drafter a user can start, in every setting, and combinations: one more line in the registry is one more here."""
    return tuple(
        Drafter(f"{name}-{number}" if number else name, name, settings)
        for name in (*names(), *COMBINATIONS)
        for number, settings in enumerate(_SETTINGS.get(name, (SpeculationSettings(),)))
    )


def oracle_drafter(scenario: "Scenario", plain: "Plain", is_right: bool, vocab_size: int = VOCAB) -> Drafter:
    """A drafter that proposes what child 0 of each request will say, or always something else."""
    truths = {one.prompt_token_ids: plain.answer(alone(one, 0)).token_ids for one in scenario.submits}
    speculator = OracleSpeculator(truths, ORACLE_WIDTH, vocab_size, is_right)
    return Drafter("right" if is_right else "wrong", oracle=speculator)


# ---- traffic ----


@dataclass(frozen=True)
class Departure:
    """A client that goes away `after_steps` steps behind its Submit, between two steps or while one runs."""

    request_id: int
    after_steps: int
    in_flight: bool


@dataclass(frozen=True)
class Scenario:
    """Waves of requests: each begins when the one before has ended. `must_rise`: counters without which it is void."""

    shape: Shape
    waves: tuple[tuple[Submit, ...], ...]
    steps_between: int = 2  # two submissions of a wave
    departures: tuple[Departure, ...] = ()
    must_rise: tuple[str, ...] = ()

    @property
    def submits(self) -> tuple[Submit, ...]:
        return tuple(one for wave in self.waves for one in wave)


# Every parameter with another one, at least once; short alphabets make text that repeats, which is what lookup finds.
_SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 36},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.4, "allowed_token_ids": tuple(range(40, 46)), "bad_words": ((41, 42), (43,)), "max_tokens": 30},
    {"temperature": 0.0, "repetition_penalty": 1.05, "ignore_eos": True, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.7, "ignore_eos": True},
    {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(100, 200)), "max_tokens": 30},
    {"temperature": 1.0, "top_k": 2, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.05, "max_tokens": 33},
    {"temperature": 0.3, "min_p": 0.1, "ignore_eos": True, "max_tokens": 30},
    {"temperature": 0.0, "logit_bias": {7: 6.0, 300: -100.0, 2: -5.0}, "max_tokens": 30},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 6},
    {"temperature": 0.0, "bad_words": ((9,), (11, 12)), "allowed_token_ids": tuple(range(3, 40)), "max_tokens": 30},
    {"temperature": 1.0, "seed": -5, "stop_token_ids": (50, 60, 70), "min_tokens": 3},
    {"temperature": 0.6, "seed": SEED_RANGE - 1, "logit_bias": {15: 9.0, 16: 9.0, 2: -100.0}, "frequency_penalty": 0.1},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.7, "max_tokens": 2},
)


def traffic(seed: int, count: int = len(_SAMPLING), first_id: int = 1, longest: int = 40) -> tuple[Submit, ...]:
    """`count` requests with prompts of 1 to `longest` tokens, most of them a phrase said again and again."""
    generator = random.Random(seed)
    submits = []
    for number in range(count):
        phrase = [generator.randrange(3, VOCAB) for _ in range(generator.randint(1, 9))]
        length = generator.randint(1, longest)
        prompt = [*(phrase * longest)[:length], *generator.sample(range(3, VOCAB), number % 3)]
        submits.append(request(first_id + number, prompt, _SAMPLING[number % len(_SAMPLING)]))
    return tuple(submits)


def request(request_id: int, prompt: Sequence[int], sampling: Mapping[str, object]) -> Submit:
    """`sampling` with a seed and a length of 18 where it names none."""
    options = {"max_tokens": 18, "seed": 1000 + request_id, **sampling}
    return submit(request_id, prompt, **options)


def mixed(plain: "Plain") -> Scenario:
    """Rows of all lengths and parameters come and go."""
    return Scenario(Shape(), (traffic(1),))


def chunked(plain: "Plain") -> Scenario:
    """Prompts are cut into chunks of a few tokens, next to rows that decode and draft."""
    shape = Shape(max_num_seqs=4, max_num_batched_tokens=11, prefix_caching=False)
    return Scenario(shape, (traffic(2, longest=60),), steps_between=1)


def cached(plain: "Plain") -> Scenario:
    """Conversations: the second turn begins with the first and its answer, which speculation left in the cache.

    Then the same blocks behind a prefix that differs in its first token: nothing of the cache may serve them.
    """
    shared = random.Random(3).sample(range(3, VOCAB), 21)
    first = tuple(
        request(number, [*shared, number, number + 40], sampling) for number, sampling in enumerate(_SAMPLING[:8], 1)
    )
    second = []
    for one in first:
        history = [*one.prompt_token_ids, *plain.answer(one).token_ids, 5]
        second.append(msgspec.structs.replace(one, request_id=one.request_id + 100, prompt_token_ids=tuple(history)))
    third = [
        msgspec.structs.replace(one, request_id=one.request_id + 100, prompt_token_ids=(3, *one.prompt_token_ids[1:]))
        for one in second[:3]
    ]
    return Scenario(Shape(), (first, tuple(second), tuple(third)), must_rise=("prefix_cache_hits",))


def preempted(plain: "Plain") -> Scenario:
    """Far too few blocks: rows lose them in the middle of decoding and are computed again."""
    return Scenario(Shape(num_blocks=28), (traffic(4),), 1, must_rise=("num_preemptions", "recomputed_tokens"))


def cramped(plain: "Plain") -> Scenario:
    """Everything at once: chunks of a few tokens, too few blocks, shared prefixes, clients that leave."""
    shape = Shape(max_num_seqs=4, max_num_batched_tokens=13, num_blocks=30)
    submits = traffic(5, longest=30)
    generator = random.Random(6)
    leaving = [one for one in submits if one.sampling.max_tokens > 2][1::3]
    departures = tuple(
        Departure(one.request_id, generator.randint(1, 40), in_flight=bool(number % 2))
        for number, one in enumerate(leaving)
    )
    return Scenario(shape, (submits,), departures=departures, must_rise=("num_preemptions",))


def abandoned(plain: "Plain") -> Scenario:
    """Clients leave at random offsets, half of them in the middle of a step; those who stay notice nothing."""
    generator = random.Random(7)
    submits = traffic(8)
    leaving = [one for one in submits if one.sampling.max_tokens > 2][::2]
    departures = tuple(
        Departure(one.request_id, generator.randint(1, 14), in_flight=number % 3 > 0)
        for number, one in enumerate(leaving)
    )
    return Scenario(Shape(), (submits,), 1, departures, must_rise=("aborted_rounds",))


def several(plain: "Plain") -> Scenario:
    """n > 1: children share their prompt's blocks and go their own ways, with few blocks to share."""
    submits = tuple(
        msgspec.structs.replace(one, n=2 + number % 3) for number, one in enumerate(traffic(9, count=8, longest=30))
    )
    return Scenario(Shape(max_num_seqs=8, num_blocks=60), (submits,))


def limited(plain: "Plain") -> Scenario:
    """Rows grow into the end of the context, drafts reach beyond it, and every answer is cut there.

    All prompts begin one text, so that its blocks are computed once. No drafter was fitted to it, nor could UNO be (its
    answers are too short): so it is none of SCENARIOS, and nothing need be accepted.
    """
    shape = Shape()
    limit = min(plain.context_length, shape.num_blocks * shape.block_size)
    longer = {"temperature": 0.0, "ignore_eos": True, "max_tokens": limit}
    start = [*(random.Random(10).sample(range(3, VOCAB), 12) * limit)[: limit - 60]]
    text = [*start, *plain.answer(request(0, start, longer)).token_ids]
    submits = tuple(
        request(number, text[: limit - room], {**longer, **sampling})
        for number, (room, sampling) in enumerate(_AT_THE_LIMIT, 1)
    )
    for one in submits:
        assert len(one.prompt_token_ids) + len(plain.answer(one).token_ids) == limit, "the scenario misses its limit"
    return Scenario(shape, (submits,))


# Tokens between a prompt and the limit: one alone is never drafted, and no draft may be as long as what is left.
_AT_THE_LIMIT: tuple[tuple[int, dict[str, object]], ...] = (
    (14, {}),
    (1, {}),
    (2, {"logprobs": 2}),
    (9, {"temperature": 0.7}),
    (4, {"prompt_logprobs": 0, "presence_penalty": 0.3}),
)

SCENARIOS: Mapping[str, Callable[["Plain"], Scenario]] = {
    builder.__name__: builder for builder in (mixed, chunked, cached, preempted, cramped, abandoned, several)
}


# ---- what must come out ----


class Plain:
    """Answers without speculation, company, chunks or cache: one child at a time through an engine of its own."""

    def __init__(self, directory: Path, device: str = "cpu", dtype: str = "fp32") -> None:
        shape = Shape(max_num_seqs=1, prefix_caching=False, device=device, dtype=dtype)
        self.context_length = read_context_length(resolve(str(directory)))  # tokens
        self._engine = InProcessEngine(directory, shape, Drafter("none"))
        self._known: dict[bytes, Answer] = {}

    def answer(self, one: Submit) -> Answer:
        """Of a request with n = 1; its id does not matter."""
        key = msgspec.msgpack.encode(msgspec.structs.replace(one, request_id=0))
        if key not in self._known:
            number = len(self._known)
            self._engine.submit(msgspec.structs.replace(one, request_id=number))
            self._engine.run_dry()
            self._known[key] = self._engine.answers()[number, 0]
            self._engine.forget()
        return self._known[key]


def predicted(scenario: Scenario, plain: Plain) -> Scenario:
    """The same traffic, in which every client has an idea of its answer: nearly right, as an edited text is."""

    def with_prediction(number: int, one: Submit) -> Submit:
        guess = edited(plain.answer(alone(one, 0)).token_ids, number, VOCAB)
        return msgspec.structs.replace(one, prediction_token_ids=guess)

    numbers = itertools.count()
    waves = tuple(tuple(with_prediction(next(numbers), one) for one in wave) for wave in scenario.waves)
    return replace(scenario, waves=waves)


def edited(token_ids: Sequence[int], seed: int, vocab_size: int) -> tuple[int, ...]:
    """`token_ids` with about one token in eight replaced, one dropped and one put between; a few with nothing changed."""
    generator = random.Random(seed)
    changes = 0 if seed % 5 == 4 else 1
    text: list[int] = []
    for token_id in token_ids:
        change = generator.randrange(8) if changes else None
        if change == 0:
            text.append(generator.randrange(vocab_size))
        elif change != 1:
            text.append(token_id)
        if change == 2:
            text.append(generator.randrange(vocab_size))
    return tuple(text)


def alone(one: Submit, child: int) -> Submit:
    """Child `child` of a request as a request of its own; without what its client expects to hear."""
    seed = ((one.sampling.seed or 0) + child) % SEED_RANGE
    sampling = msgspec.structs.replace(one.sampling, seed=seed - 2**64 if seed > SEED_RANGE - 1 else seed)
    if child:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # child 0 reports for all
    return msgspec.structs.replace(one, n=1, sampling=sampling, prediction_token_ids=())


def play(engine: InProcessEngine, scenario: Scenario) -> None:
    """Send the scenario's traffic, step by step, until nothing is left."""
    submitted: dict[int, int] = {}
    departures = list(scenario.departures)

    def depart(in_flight: bool) -> None:
        for one in list(departures):
            at = submitted.get(one.request_id)
            if one.in_flight is in_flight and at is not None and engine.num_steps - at >= one.after_steps:
                engine.leave(one.request_id)
                departures.remove(one)

    engine.executor.during = lambda plan: depart(in_flight=True)
    for wave in scenario.waves:
        waiting, first = list(wave), engine.num_steps
        while waiting or engine.is_busy:
            if waiting and (engine.num_steps - first) % scenario.steps_between == 0:
                submitted[waiting[0].request_id] = engine.num_steps
                engine.submit(waiting.pop(0))
            depart(in_flight=False)
            engine.step()
            assert engine.num_steps - first < MAX_STEPS, "the engine comes to no end"


def check(
    directory: Path, scenario: Scenario, drafter: Drafter, plain: Plain, compare: Compare, drawn_must_rise: bool = False
) -> Counters:
    """Put `drafter` through `scenario`; AssertionError unless every answer is the plain one and the books are right.

    What the scenario says must rise does so over plain texts. Drawn drafts give other texts of the same law, which may end
    earlier and crowd less: of them it is asked only with `drawn_must_rise`, where it is known to hold.
    """
    engine = InProcessEngine(directory, scenario.shape, drafter)
    if PREDICTION in engine.capabilities.sources:
        scenario = predicted(scenario, plain)
    play(engine, scenario)
    answers = engine.answers()
    left = {one.request_id for one in scenario.departures}
    expected = {(one.request_id, child): alone(one, child) for one in scenario.submits for child in range(one.n)}
    assert answers.keys() == expected.keys(), "not everybody was answered, or somebody who did not ask"
    # Rejection sampling keeps the law, not the tokens; synthetic acceptance neither, so of its text nothing is claimed.
    keeps_tokens = not (engine.capabilities.gives_probs or engine.capabilities.synthetic)
    for child, single in () if engine.capabilities.synthetic else expected.items():
        if not keeps_tokens and not single.sampling.is_greedy:
            continue
        wanted = plain.answer(single)
        finish = answers[child].finish
        if child[0] in left and finish is not None and finish.reason is FinishReason.ABORT:
            wanted = _cut_short(wanted, answers[child])
        compare(single, wanted, answers[child])
    check_books(engine, scenario, answers)
    for name in scenario.must_rise if keeps_tokens or drawn_must_rise else ():
        assert getattr(engine.counters, name) > 0, f"{name} did not rise: the scenario proved nothing"
    return engine.counters


def _cut_short(wanted: Answer, got: Answer) -> Answer:
    """The plain answer as far as a client that left can have seen it."""
    count = len(got.token_ids)
    return replace(
        wanted,
        token_ids=wanted.token_ids[:count],
        finish=got.finish,
        logprobs=wanted.logprobs[:count],
        prompt_logprobs=wanted.prompt_logprobs if got.prompt_logprobs else (),
    )


def assert_equal(single: Submit, wanted: Answer, got: Answer) -> None:
    """Token for token, with the same end; log-probabilities up to rounding."""
    assert got.token_ids == wanted.token_ids, _difference(single, wanted, got)
    assert got.finish == wanted.finish, f"{single.sampling}: {got.finish} instead of {wanted.finish}"
    assert_close_logprobs(wanted.logprobs, got.logprobs)
    assert_close_logprobs(wanted.prompt_logprobs, got.prompt_logprobs)
    assert single.sampling.logprobs is None or len(got.logprobs) == len(got.token_ids)


def assert_close_logprobs(
    wanted: Sequence[TokenLogprobs | None], got: Sequence[TokenLogprobs | None], tolerance: float = LOGPROB_TOLERANCE
) -> None:
    assert len(wanted) == len(got), f"{len(got)} log-probabilities instead of {len(wanted)}"
    for position, (ours, theirs) in enumerate(zip(wanted, got, strict=True)):
        assert (ours is None) == (theirs is None), position
        if ours is not None and theirs is not None:
            pairs = zip((ours.logprob, *ours.top_logprobs), (theirs.logprob, *theirs.top_logprobs), strict=True)
            assert all(abs(a - b) <= tolerance for a, b in pairs), f"position {position}: {theirs} instead of {ours}"


def first_difference(wanted: Answer, got: Answer) -> int:
    """The first position at which the two do not agree; the shorter one's length if it begins the other."""
    pairs = zip(wanted.token_ids, got.token_ids, strict=False)
    common = min(len(wanted.token_ids), len(got.token_ids))
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), common)


def _difference(single: Submit, wanted: Answer, got: Answer) -> str:
    at = first_difference(wanted, got)
    return (
        f"request {single.request_id} ({single.sampling}) differs from token {at} on: "
        f"{got.token_ids[at : at + 8]} instead of {wanted.token_ids[at : at + 8]}"
    )


def check_books(engine: InProcessEngine, scenario: Scenario, answers: Mapping[ChildId, Answer]) -> None:
    """The counters equal the sums of what clients were told, and nothing is left behind."""
    counters, load = engine.counters, engine.load
    outputs = [output for outputs in engine.outputs().values() for output in outputs]
    rounds = [output.round for output in outputs if output.round is not None]
    drafting = [one for one in rounds if one.drafted]
    assert counters.generation_tokens == sum(len(answer.token_ids) for answer in answers.values())
    assert counters.first_tokens == sum(bool(answer.token_ids) for answer in answers.values())
    assert counters.draft_rounds == len(drafting)
    assert counters.plain_rounds == len(rounds) - len(drafting)
    assert counters.draft_tokens == sum(one.drafted for one in rounds)
    assert counters.accepted_tokens == sum(one.accepted for one in rounds)
    assert counters.non_draft_tokens == sum(one.non_draft for one in rounds)
    assert counters.cut_tokens == sum(one.cut for one in rounds)
    assert counters.aborted_rounds == sum(one.aborted for one in rounds)
    widths = [sum(one.accepted > position for one in rounds) for position in range(len(counters.accepted_per_pos))]
    assert counters.accepted_per_pos == widths
    prompts = {one.request_id: len(one.prompt_token_ids) for one in scenario.submits}
    done = {output.request_id for output in outputs if output.prompt is not None}
    assert counters.prompt_tokens == sum(prompts[request_id] for request_id in done)
    assert counters.steps_failed == counters.refused_messages == 0
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0), load


def check_drafting(counters: Counters, drafter: Drafter, scenario: Scenario, must_accept: bool = True) -> None:
    """Drafts were made and judged as this drafter deserves: without that, equal answers would prove nothing.

    `must_accept`: of a real drafter at least one token too; it needs the traffic and the arithmetic it was fitted to.
    """
    if not counters.accepted_per_pos:
        assert counters.draft_rounds == counters.draft_tokens == counters.accepted_tokens == 0
        return
    assert counters.draft_tokens > 0, f"{drafter.label} drafted nothing"
    if drafter.label == "wrong" and all(one.n == 1 for one in scenario.submits):
        assert counters.accepted_tokens == 0
    elif drafter.label == "right" and all(one.n == 1 for one in scenario.submits):
        assert counters.accepted_tokens == counters.draft_tokens
        if not scenario.departures:
            assert counters.cut_tokens <= len(scenario.submits)  # the bonus behind a drafted EOS or stop token
    elif drafter.label != "wrong" and must_accept:
        assert counters.accepted_tokens > 0, f"nothing that {drafter.label} drafted was accepted"


def unused_parameters() -> frozenset[str]:
    """Sampling parameters that no request of the traffic sets: the claim would not cover them."""
    used = {name for options in _SAMPLING for name in options}
    return frozenset(SamplingParams.__struct_fields__) - used

"""A prediction is drafted from while the output follows it, found again behind an edit, and never outlives its row."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.prediction import PredictionSpeculator
from engine.speculation.speculator import DraftRow, SequenceStart
from protocol.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=99)
PROMPT = [90, 91, 92]
PREDICTED = list(range(10, 30))
VOCAB = 49152


def begun(prediction: list[int], lookup: tuple[int, int] = (2, 4), width: int = 5) -> PredictionSpeculator:
    speculator = PredictionSpeculator(width, *lookup, VOCAB)
    speculator.begin(SequenceStart(0, PROMPT, len(PROMPT), prediction=tuple(prediction)))
    return speculator


def propose(
    speculator: PredictionSpeculator, output: list[int], budget: int = 64, prompt: list[int] = PROMPT
) -> list[int]:
    draft = speculator.propose([DraftRow(0, [*prompt, *output], budget, len(prompt), PARAMS)])
    return draft.tokens[0, : int(draft.lengths[0])].tolist()


def continuation(prediction: list[int], output: list[int], lookup: tuple[int, int]) -> int | None:
    """The same rule without an index, from the first token on: where in the prediction the output goes on, or None."""
    at: int | None = 0
    left = 0
    for index, token in enumerate(output):
        if at is not None and prediction[at : at + 1] == [token]:
            at += 1
            continue
        left = left if at is None else at
        at = None
        for length in range(lookup[1], lookup[0] - 1, -1):
            suffix = output[max(0, index + 1 - length) : index + 1]
            ends = [
                end
                for end in range(length, len(prediction) + 1)
                if len(suffix) == length and prediction[end - length : end] == suffix
            ]
            if ends:
                at = min(ends, key=lambda end: (end < left, end))
                break
    return at


@settings(max_examples=300, deadline=None)
@given(
    prediction=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    noise=st.lists(st.integers(1, 4), max_size=30),
    grown=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    lookup=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    follows=st.integers(0, 30),
)
def test_every_step_equals_the_rule_read_from_the_start(
    prediction: list, noise: list, grown: list, lookup: tuple, follows: int
) -> None:
    """However many tokens a step brings, and however often something repeats."""
    output = [*prediction[:follows], *noise, *prediction[follows // 2 :]]
    bounds = (lookup[0], lookup[0] + lookup[1])
    speculator = begun(prediction, bounds)
    length = 0
    for size in grown:
        length = min(length + size, len(output))
        at = continuation(prediction, output[:length], bounds)
        assert propose(speculator, output[:length]) == ([] if at is None else prediction[at : at + 5])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [10, 11, 12, 13, 14]),
        ([10], [11, 12, 13, 14, 15]),
        ([10, 11, 12], [13, 14, 15, 16, 17]),
        ([10, 11, 12, 50], []),  # a replaced token
        ([10, 11, 12, 50, 14], []),  # one token is no proof
        ([10, 11, 12, 50, 14, 15], [16, 17, 18, 19, 20]),
        ([10, 11, 50, 51, 52, 12, 13], [14, 15, 16, 17, 18]),  # inserted tokens
        ([10, 11, 18, 19], [20, 21, 22, 23, 24]),  # deleted tokens
        ([60, 61, 62, 10, 11], [12, 13, 14, 15, 16]),  # words before the predicted text
        ([*PREDICTED[:18]], [28, 29]),  # the end is near
        (PREDICTED, []),
        ([*PREDICTED, 70], []),
        ([*PREDICTED, 70, 15, 16], [17, 18, 19, 20, 21]),  # said again behind the end
    ],
)
def test_the_draft_goes_on_where_the_output_is(output: list[int], expected: list[int]) -> None:
    assert propose(begun(PREDICTED), output) == expected
    stepwise = begun(PREDICTED)
    for length in range(len(output)):
        propose(stepwise, output[:length])
    assert propose(stepwise, output) == expected


def test_of_several_places_the_next_one_behind_the_cursor_is_taken() -> None:
    body = [1, 2, 20, 1, 2, 21, 1, 2, 22, 1, 2, 23]
    assert propose(begun(body), [1, 2, 20, 1, 2, 21, 99, 1, 2]) == [22, 1, 2, 23]
    assert propose(begun(body), [*body, 99, 1, 2]) == [20, 1, 2, 21, 1]  # none is behind it: the first of all


def test_the_longest_suffix_wins_over_a_nearer_place() -> None:
    body = [7, 8, 30, 5, 7, 8, 31]
    assert propose(begun(body), [40, 7, 8]) == [30, 5, 7, 8, 31]
    assert propose(begun(body), [40, 5, 7, 8]) == [31]


def test_tokens_of_the_prompt_are_no_output() -> None:
    prompt = [10, 11]
    speculator = PredictionSpeculator(5, 2, 4, VOCAB)
    speculator.begin(SequenceStart(0, prompt, 2, prediction=(10, 11, 12, 13)))
    assert propose(speculator, [], prompt=prompt) == [10, 11, 12, 13]
    assert propose(speculator, [12], prompt=prompt) == []  # 11 is the prompt's: one generated token proves nothing


def test_a_sequence_that_resumes_drafts_as_if_it_had_never_stopped() -> None:
    generator = random.Random(3)
    output = [token if generator.random() < 0.8 else 77 for token in PREDICTED]
    for stopped in range(len(output)):
        history = [*PROMPT, *output[:stopped]]
        resumed = PredictionSpeculator(5, 1, 4, VOCAB)
        resumed.begin(SequenceStart(0, history, len(PROMPT), prediction=tuple(PREDICTED)))
        assert propose(resumed, output[:stopped]) == propose(begun(PREDICTED, (1, 4)), output[:stopped])


@pytest.mark.parametrize(("budget", "width", "length"), [(1, 5, 1), (3, 5, 3), (9, 5, 5), (9, 16, 9)])
def test_the_budget_and_the_width_bound_the_draft(budget: int, width: int, length: int) -> None:
    assert propose(begun(PREDICTED, width=width), [10], budget) == PREDICTED[1 : 1 + length]


def test_rows_without_a_prediction_get_no_draft_and_rows_do_not_mix() -> None:
    speculator = begun(PREDICTED)
    speculator.begin(SequenceStart(1, PROMPT, len(PROMPT)))
    speculator.begin(SequenceStart(2, PROMPT, len(PROMPT), prediction=(5, 6, 7)))
    rows = [DraftRow(row, [*PROMPT, first], 4, len(PROMPT), PARAMS) for row, first in ((1, 10), (2, 5), (0, 10))]
    draft = speculator.propose(rows)
    assert draft.lengths.tolist() == [0, 2, 4]
    assert draft.tokens[1, :2].tolist() == [6, 7]


def test_nothing_survives_the_end_of_a_row() -> None:
    speculator = begun(PREDICTED)
    assert propose(speculator, [10])
    speculator.end(0)
    speculator.begin(SequenceStart(0, PROMPT, len(PROMPT)))
    assert propose(speculator, [10]) == []


class CountingList(list):
    """Counts how many tokens are looked at."""

    looked_at = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.looked_at += len(found) if isinstance(index, slice) else 1
        return found


def test_a_step_looks_at_its_new_tokens_only() -> None:
    """Behind an edit too: the index is made once, and a lookup costs the longest n-gram."""
    size = 20_000
    speculator = begun([(index * index) % 40_000 for index in range(size)])
    history = CountingList([*PROMPT, 41_000])
    speculator.propose([DraftRow(0, history, 5, len(PROMPT), PARAMS)])  # differs at once: makes the index
    for step in range(100):
        history.append((step * step) % 40_000 if step % 9 else 41_000)
        history.looked_at = 0
        speculator.propose([DraftRow(0, history, 5, len(PROMPT), PARAMS)])
        assert history.looked_at <= 1 + 4

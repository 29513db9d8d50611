"""Prompt lookup equals a brute-force scan of vLLM's rule, step by step, and forgets what it must."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.ngram import NgramSpeculator
from engine.speculation.speculator import DraftRow, SequenceStart
from protocol.sampling import SamplingParams
from tests.speculation.reference import longest_suffix_match

PARAMS = SamplingParams(max_tokens=99)


def propose(speculator: NgramSpeculator, history: list[int], budget: int = 64, row: int = 0) -> list[int]:
    draft = speculator.propose([DraftRow(row, tuple(history), budget, 1, PARAMS)])
    return draft.tokens[0, : int(draft.lengths[0])].tolist()


@settings(max_examples=300, deadline=None)
@given(
    alphabet=st.sampled_from([1, 2, 3, 49152]),
    history=st.lists(st.integers(0, 49151), min_size=1, max_size=40),
    grown=st.lists(st.integers(1, 5), max_size=8),
    lookup=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    budget=st.integers(1, 6),
)
def test_every_step_equals_the_scan(alphabet: int, history: list, grown: list, lookup: tuple, budget: int) -> None:
    history = [token % alphabet for token in history]
    lookup_min, lookup_max = lookup[0], lookup[0] + lookup[1]
    speculator = NgramSpeculator(5, lookup_min, lookup_max, 49152)
    prompt, rest = history[: len(history) // 2 + 1], history[len(history) // 2 + 1 :]
    speculator.begin(SequenceStart(0, prompt, len(prompt)))
    known = list(prompt)
    for size in [0, *grown]:
        known, rest = known + rest[:size], rest[size:]
        expected = longest_suffix_match(known, lookup_min, lookup_max, min(budget, 5))
        assert propose(speculator, known, budget) == list(expected)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([7, 7, 7, 7], [7]),  # the earlier occurrence may overlap: earliest "7 7 7" ends before the last 7
        ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2, 4, 1]),  # earliest of two, not the latest
        ([5, 1, 2, 8, 9, 1, 2, 6, 5, 1, 2], [8, 9, 1, 2, 6]),  # the longest match wins over an earlier short one
        ([9, 5, 1, 2, 3, 0, 1, 2, 4, 5, 1, 2], [3, 0, 1, 2, 4]),
        ([1, 2, 3, 4], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_known_histories(history: list[int], expected: list[int]) -> None:
    speculator = NgramSpeculator(5, 2, 3, 10)
    speculator.begin(SequenceStart(0, history, 1))
    assert propose(speculator, history) == expected


def test_a_draft_never_runs_past_the_tokens_that_exist() -> None:
    speculator = NgramSpeculator(64, 1, 4, 10)
    speculator.begin(SequenceStart(0, [1, 2, 1], 3))
    assert propose(speculator, [1, 2, 1]) == [2, 1]


def test_nothing_survives_the_end_of_a_row() -> None:
    """A-CACHE-3: the next sequence of the row drafts as on a fresh server."""
    speculator = NgramSpeculator(5, 2, 4, 49152)
    speculator.begin(SequenceStart(0, list(range(1000, 2500)), 1500))
    speculator.end(0)
    speculator.begin(SequenceStart(0, [1, 1500, 1501], 3))
    assert propose(speculator, [1, 1500, 1501]) == []


def test_a_row_that_was_not_begun_is_an_error() -> None:
    speculator = NgramSpeculator(5, 2, 4, 10)
    speculator.begin(SequenceStart(0, [1, 2], 2))
    speculator.end(0)
    with pytest.raises(KeyError):
        propose(speculator, [1, 2, 1, 2])


class CountingHistory(list):
    """Counts how many tokens are looked at."""

    looked_at = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.looked_at += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("size", [1_000, 32_000])
def test_a_step_looks_at_a_few_tokens_however_long_the_history_is(size: int) -> None:
    history = CountingHistory((index * index) % 40_000 for index in range(size))
    speculator = NgramSpeculator(5, 2, 4, 49152)
    speculator.begin(SequenceStart(0, history, size))
    for step in range(100):
        history.append(step % 7)
        history.looked_at = 0
        speculator.propose([DraftRow(0, history, 5, 1, PARAMS)])
        assert history.looked_at <= 4 + 4 + 5  # index one end, look up one suffix, copy one draft
